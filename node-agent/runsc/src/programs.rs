//! Programs that every sandbox of the node runs, kept in memory: the code and the constants of
//! runsc and of the shim.
//!
//! The kernel charges a page of a file to the cgroup of the process that touches the page first.
//! The process is a pod's, as a rule. When the pod dozes, such pages are evicted with its memory:
//! not into swap but to the disk of their file. Then the first packet to a sandbox that is alone on
//! its node waits for that disk, page after page. So the agent has the pages read again, into its
//! own cgroup. From then on no pod's doze evicts them. The kernel may evict them when it needs the
//! memory.

use std::io::Read;
use std::num::NonZeroU64;
use std::ops::Range;
use std::path::{Path, PathBuf};

use object::elf::{FileHeader64, PF_W, PT_LOAD};
use object::read::elf::{FileHeader, ProgramHeader};
use object::{Endianness, read};
use rustix::fs::{Advice, Mode, OFlags};

/// Bytes that are read of a program for its headers. Some ten headers come first in the file.
const HEADERS: u64 = 64 << 10;

/// Bytes of one request. The kernel reads only the beginning of a request that is larger than its
/// window for reading ahead; this is that window's default.
const AT_ONCE: usize = 128 << 10;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot read {}", path.display())]
    Read {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    #[error("{} is not a program", path.display())]
    NoProgram {
        path: PathBuf,
        #[source]
        source: read::Error,
    },
}

/// Requests that the kernel reads the missing pages of a program into memory. Returns the number of
/// requested bytes, before they are read.
pub fn keep_in_memory(program: &Path) -> Result<u64, Error> {
    let failed = |source: std::io::Error| Error::Read {
        path: program.into(),
        source,
    };
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file =
        rustix::fs::open(program, flags, Mode::empty()).map_err(|error| failed(error.into()))?;
    let file = std::fs::File::from(file);
    let mut headers = Vec::new();
    (&file)
        .take(HEADERS)
        .read_to_end(&mut headers)
        .map_err(failed)?;
    let shared = shared(&headers).map_err(|source| Error::NoProgram {
        path: program.into(),
        source,
    })?;
    let mut bytes = 0;
    for range in shared {
        for begin in range.clone().step_by(AT_ONCE) {
            let length = (AT_ONCE as u64).min(range.end - begin);
            rustix::fs::fadvise(&file, begin, NonZeroU64::new(length), Advice::WillNeed)
                .map_err(|error| failed(error.into()))?;
            bytes += length;
        }
    }
    Ok(bytes)
}

/// Returns the parts of a program's file whose pages all its processes share. Each process has its
/// own copy of a writable part to which it writes.
fn shared(headers: &[u8]) -> read::Result<Vec<Range<u64>>> {
    let header = FileHeader64::<Endianness>::parse(headers)?;
    let endian = header.endian()?;
    let segments = header.program_headers(endian, headers)?.iter();
    let loaded = segments.filter(|segment| segment.p_type(endian) == PT_LOAD);
    let read_only = loaded.filter(|segment| segment.p_flags(endian) & PF_W == 0);
    Ok(read_only
        .map(|segment| {
            let (begin, length) = segment.file_range(endian);
            begin..begin.saturating_add(length)
        })
        .collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_read_only_parts_of_a_program_are_kept_in_memory() {
        let program = std::env::current_exe().expect("this program");
        let all = std::fs::metadata(&program).expect("its size").len();
        let kept = keep_in_memory(&program).expect("read");
        assert!(0 < kept && kept < all, "{kept} of {all}");
        let headers = std::fs::read(&program).expect("read");
        let shared = shared(&headers[..4096]).expect("headers");
        // The code is among the parts.
        assert!(shared.len() >= 2, "{shared:?}");
        assert!(
            shared
                .iter()
                .all(|range| range.start < range.end && range.end <= all)
        );
    }

    #[test]
    fn a_file_that_is_no_program_is_refused_by_name() {
        let dir = tempfile::tempdir().expect("a directory");
        let file = dir.path().join("p");
        std::fs::write(&file, "#!/bin/sh").expect("written");
        let error = keep_in_memory(&file).expect_err("no program");
        assert!(
            error.to_string().contains(file.to_str().expect("a path")),
            "{error}"
        );
        let link = dir.path().join("l");
        std::os::unix::fs::symlink(std::env::current_exe().expect("this program"), &link)
            .expect("made");
        assert!(
            matches!(keep_in_memory(&link), Err(Error::Read { .. })),
            "a link"
        );
        std::fs::write(
            &file,
            &std::fs::read(std::env::current_exe().expect("this program")).expect("read")[..100],
        )
        .expect("cut");
        assert!(
            matches!(keep_in_memory(&file), Err(Error::NoProgram { .. })),
            "cut off"
        );
    }
}
