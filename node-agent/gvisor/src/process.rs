//! What the kernel says of a process of the host.

/// What follows the name in `/proc/<pid>/stat`: state, parent, and more (proc_pid_stat(5)). None: there is no such process.
pub fn after_name(pid: i32) -> Option<String> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name stands in brackets and may hold anything, brackets too: what follows begins after the last one.
    let (_, after) = stat.rsplit_once(')')?;
    Some(after.trim_start().to_owned())
}

/// Its parent: another one than before, once that has ended.
pub fn parent(pid: i32) -> Option<i32> {
    let after = after_name(pid)?;
    after.split_whitespace().nth(1)?.parse().ok()
}

/// Its words in one string; empty for one that is gone.
pub fn command_line(pid: i32) -> String {
    let bytes = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    String::from_utf8_lossy(&bytes).replace('\0', " ")
}

/// Whether the process has ended and its parent has not asked for its status yet.
pub fn is_zombie(pid: i32) -> bool {
    after_name(pid).is_some_and(|after| after.starts_with('Z'))
}

/// Whether the process is there and has not ended.
pub fn lives(pid: i32) -> bool {
    after_name(pid).is_some_and(|after| !after.starts_with(['Z', 'X']))
}
