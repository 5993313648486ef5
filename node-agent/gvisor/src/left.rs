//! Processes that `kubectl exec` has left behind in a container (`kubectl exec … -- sh -c 'server &'`).
//!
//! gVisor ends them when it restores a sandbox, because their standard streams lead nowhere then (`runsc/boot/restore.go`, `OriginExec`), and nothing of its own
//! tells them from others. So torpor-oci marks what exec starts in its environment, which its children have from it.

use std::collections::VecDeque;
use std::time::Duration;

use crate::control::Control;
use crate::inside::{self, Error};

/// In the environment of what exec starts.
pub const MARK: &str = "TORPOR_EXEC=1";

/// At most so many processes of a container are looked at.
const MOST: usize = 1024;
/// Most bytes that are read of a process' environment and list of children. The mark comes last, and more than this much is no usual environment.
const MOST_BYTES: u64 = 128 << 10;
/// A name has 15 bytes and a line feed (proc_pid_comm(5)).
const MOST_NAME: u64 = 16;

/// The names of marked processes below the container's first one, by their numbers. Those of an exec that still runs are not below it.
pub fn left_by_exec(
    control: &mut Control,
    container: &str,
    timeout: Duration,
) -> Result<Vec<String>, Error> {
    let mut read = |path: String, most| inside::read(control, container, &path, most, timeout);
    let mut found = Vec::new();
    let mut next = VecDeque::from([1_u32]);
    let mut seen = 0;
    while let Some(pid) = next.pop_front() {
        seen += 1;
        if seen > MOST {
            break;
        }
        let children = read(format!("/proc/{pid}/task/{pid}/children"), MOST_BYTES)?;
        next.extend(numbers(&children.unwrap_or_default()));
        let environment = read(format!("/proc/{pid}/environ"), MOST_BYTES)?;
        if is_marked(&environment.unwrap_or_default()) {
            let name = read(format!("/proc/{pid}/comm"), MOST_NAME)?;
            found.push(printable(&name.unwrap_or_default()));
        }
    }
    Ok(found)
}

fn numbers(text: &[u8]) -> impl Iterator<Item = u32> {
    let text = String::from_utf8_lossy(text).into_owned();
    let words: Vec<u32> = text
        .split_whitespace()
        .filter_map(|word| word.parse().ok())
        .collect();
    words.into_iter()
}

fn is_marked(environment: &[u8]) -> bool {
    environment
        .split(|byte| *byte == 0)
        .any(|entry| entry == MARK.as_bytes())
}

/// The sandbox' word, for conditions.
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
