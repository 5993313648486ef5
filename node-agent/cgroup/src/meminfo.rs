//! The machine's memory: proc_meminfo(5).

/// Bytes of a line of `/proc/meminfo`, which has a name and a number of KiB. None if it is not there.
pub fn bytes(meminfo: &str, name: &str) -> Option<u64> {
    let mut lines = meminfo.lines();
    let line = lines.find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    let kibibytes: u64 = line.split_whitespace().next()?.parse().ok()?;
    kibibytes.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_found_by_its_whole_name() {
        let text = "MemTotal:       24684084 kB\nMemFree: 1 kB\n";
        assert_eq!(bytes(text, "MemTotal"), Some(25_276_502_016));
        assert_eq!(bytes(text, "Mem"), None);
        assert_eq!(bytes("MemTotal: much\n", "MemTotal"), None);
    }
}
