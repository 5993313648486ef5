//! Processes that `kubectl exec` has left behind in a container, such as `server` of
//! `kubectl exec … -- sh -c 'server &'`.
//!
//! gVisor ends such processes when it restores a sandbox, because their standard streams lead
//! nowhere then (`runsc/boot/restore.go`, `OriginExec`). gVisor offers no way to distinguish them
//! from other processes. So the shim marks a process that exec starts in its environment, which the
//! process' children inherit.

use std::collections::{HashSet, VecDeque};
use std::time::Instant;

use crate::control::Control;
use crate::inside::{self, Error};

/// Entry of the environment of processes that exec starts.
pub const MARK: &str = "TORPOR_EXEC=1";

/// Most processes of a container that are read.
const MOST_PROCESSES: usize = 1024;
/// Most bytes that are read of a process' environment and list of children. The mark is the last
/// entry. No usual environment is longer.
const MOST_BYTES: u64 = 128 << 10;
/// Bytes of a process' name: 15 and a line feed (proc_pid_comm(5)).
const MOST_NAME: u64 = 16;

/// Returns the names of marked processes below the container's first process. Processes of an exec
/// that still runs are not below it. The container controls the content of its `/proc`, so the
/// reads are bounded by number, by size and by `deadline`.
pub fn left_by_exec(
    control: &mut Control,
    container: &str,
    deadline: Instant,
) -> Result<Vec<String>, Error> {
    walk(|path, most| inside::read(control, container, &path, most, deadline))
}

fn walk(
    mut read: impl FnMut(String, u64) -> Result<Option<Vec<u8>>, Error>,
) -> Result<Vec<String>, Error> {
    let mut found = Vec::new();
    let mut visited = HashSet::from([1_u32]);
    let mut next = VecDeque::from([1_u32]);
    while let Some(pid) = next.pop_front() {
        let children = read(format!("/proc/{pid}/task/{pid}/children"), MOST_BYTES)?;
        for child in numbers(&children.unwrap_or_default()) {
            if visited.len() < MOST_PROCESSES && visited.insert(child) {
                next.push_back(child);
            }
        }
        let environment = read(format!("/proc/{pid}/environ"), MOST_BYTES)?;
        if is_marked(&environment.unwrap_or_default()) {
            let name = read(format!("/proc/{pid}/comm"), MOST_NAME)?;
            found.push(printable(&name.unwrap_or_default()));
        }
    }
    Ok(found)
}

fn numbers(text: &[u8]) -> impl Iterator<Item = u32> {
    let words = text.split(u8::is_ascii_whitespace);
    words.filter_map(|word| str::from_utf8(word).ok()?.parse().ok())
}

fn is_marked(environment: &[u8]) -> bool {
    environment
        .split(|byte| *byte == 0)
        .any(|entry| entry == MARK.as_bytes())
}

/// Returns a name from the sandbox without unprintable bytes, for conditions.
fn printable(name: &[u8]) -> String {
    let plain = |byte: &u8| {
        if byte.is_ascii_graphic() {
            char::from(*byte)
        } else {
            '?'
        }
    };
    name.trim_ascii_end().iter().map(plain).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_container_with_invented_processes_is_read_a_bounded_number_of_times() {
        let mut reads = 0;
        let found = walk(|path, _| {
            reads += 1;
            let answer = match path.rsplit('/').next() {
                Some("children") => (1..40_000).map(|pid| format!("{pid} ")).collect(),
                Some("environ") => format!("A=b\0{MARK}\0"),
                _ => "endless\n".to_owned(),
            };
            Ok(Some(answer.into_bytes()))
        });
        assert_eq!(found.expect("all answered").len(), MOST_PROCESSES);
        assert_eq!(reads, 3 * MOST_PROCESSES);
    }

    #[test]
    fn each_process_is_looked_at_once_and_an_answer_that_is_late_ends_the_look() {
        let answers = |path: String, _| match path.as_str() {
            "/proc/1/task/1/children" => Ok(Some(b"7 7 1 ".to_vec())),
            "/proc/7/environ" => Ok(Some(MARK.as_bytes().to_vec())),
            "/proc/7/comm" => Ok(Some(b"server\n".to_vec())),
            _ => Ok(None),
        };
        assert_eq!(walk(answers).expect("answered"), ["server"]);
        let late = |_, _| {
            Err(Error::Late {
                container: "c".to_owned(),
            })
        };
        walk(late).expect_err("late");
    }

    #[test]
    fn a_process_is_marked_by_a_whole_entry_of_its_environment() {
        assert!(is_marked(b"A=b\0TORPOR_EXEC=1\0") && is_marked(b"TORPOR_EXEC=1"));
        for other in [
            &b""[..],
            b"TORPOR_EXEC=11\0",
            b"X=TORPOR_EXEC=1\0",
            b"A=b\0",
        ] {
            assert!(!is_marked(other));
        }
        assert_eq!(numbers(b"7 12 x 9 ").collect::<Vec<_>>(), [7, 12, 9]);
        assert_eq!(printable(b"ser\x1bver\n"), "ser?ver");
    }
}
