//! The machine's memory: proc_meminfo(5), and accounting/psi.rst in the kernel's documentation.

use std::fs::File;
use std::io::{self, BufReader, Read};
use std::path::Path;

pub use procfs_core::Meminfo;
use procfs_core::{FromBufRead, MemoryPressure, ProcError};

/// Most bytes that are read of a file. Both files of the kernel are shorter.
const MAX_FILE: u64 = 64 << 10;

/// Reads the machine's memory and swap, in bytes.
pub fn read() -> io::Result<Meminfo> {
    read_at(Path::new("/proc/meminfo"))
}

/// Reads memory and swap from a file with the format of `/proc/meminfo`. A missing line that every
/// kernel writes is an error.
pub fn read_at(path: &Path) -> io::Result<Meminfo> {
    parse(path)
}

/// Returns the percentage of the last ten seconds in which a program waited for memory. None if the
/// kernel does not count it.
pub fn stalled() -> Option<f64> {
    let pressure: MemoryPressure = parse(Path::new("/proc/pressure/memory")).ok()?;
    Some(f64::from(pressure.some.avg10))
}

fn parse<T: FromBufRead>(path: &Path) -> io::Result<T> {
    let file = BufReader::new(File::open(path)?.take(MAX_FILE));
    T::from_buf_read(file).map_err(|error| match error {
        ProcError::Io(source, _) => source,
        other => io::Error::new(io::ErrorKind::InvalidData, other.to_string()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_describes_this_machines_memory() {
        let memory = read().expect("/proc/meminfo");
        let available = memory.mem_available.expect("MemAvailable");
        assert!(memory.mem_total > available && available > 0);
        assert!(memory.swap_total >= memory.swap_free);
        assert!(stalled().is_none_or(|percent| (0.0..=100.0).contains(&percent)));
    }

    #[test]
    fn a_file_without_the_total_is_an_error_and_not_a_machine_without_memory() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("meminfo");
        std::fs::write(&path, "MemFree: 1 kB\n").expect("a file");
        let error = read_at(&path).expect_err("no total");
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
        let missing = read_at(&folder.path().join("none")).expect_err("no file");
        assert_eq!(missing.kind(), io::ErrorKind::NotFound);
    }
}
