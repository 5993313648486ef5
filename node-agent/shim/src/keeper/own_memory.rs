//! Gives back memory of a shim whose sandbox sleeps: it has nothing to do for hours, and needs no
//! page of its program before the next request.
//!
//! The pages of its program file that it has mapped count as its memory. They count most in a pod
//! that is alone on its node, because no other shim shares them. The kernel maps them again from
//! the page cache, one by one, when they are used.

use std::ffi::c_void;
use std::fs::File;
use std::io::Read;
use std::ops::Range;

use rustix::mm::{Advice, madvise};

/// The largest size of smaps, in bytes. A static program has about ten mappings, and smaps has a
/// kilobyte of text about each.
const MAX_SMAPS: u64 = 1 << 20;

/// Gives back the pages of the program's text and constants, and the free memory of its allocator.
/// If that fails, the memory stays.
pub(super) fn give_back() {
    trim();
    let mut smaps = String::new();
    let read = File::open("/proc/self/smaps")
        .and_then(|file| file.take(MAX_SMAPS).read_to_string(&mut smaps));
    if read.is_err() {
        return;
    }
    for range in unchanged(&smaps) {
        drop_mapping(&range);
    }
}

#[allow(unsafe_code)]
fn trim() {
    #[cfg(target_env = "gnu")]
    // SAFETY: no pointers. The function touches only free memory of the allocator.
    unsafe {
        nix::libc::malloc_trim(0);
    }
}

#[allow(unsafe_code)]
fn drop_mapping(range: &Range<usize>) {
    let start = std::ptr::with_exposed_provenance_mut::<c_void>(range.start);
    // SAFETY: `unchanged` returns mappings of files that are not writable and have no page that
    // differs from the file. The next read of such a page therefore returns its present content.
    // The mappings of the program's own file never change, so they are as smaps says.
    let _ = unsafe { madvise(start, range.len(), Advice::LinuxDontNeed) };
}

/// Returns the mappings of files that are not writable and have only pages of their file.
///
/// A page that was written before its mapping became read-only (relocations) is anonymous, or
/// swapped out, and must stay.
///
/// The format is that of proc_pid_smaps(5): a line "start-end perms offset device inode path", then
/// lines "Key: n kB".
fn unchanged(smaps: &str) -> Vec<Range<usize>> {
    let mut found = Vec::new();
    let mut candidate: Option<Range<usize>> = None;
    for line in smaps.lines() {
        let mut words = line.split_ascii_whitespace();
        let first = words.next().unwrap_or_default();
        match first.strip_suffix(':') {
            None => {
                found.extend(candidate.take());
                candidate = read_only_file(first, words);
            }
            Some("Anonymous" | "Swap") if words.next() != Some("0") => candidate = None,
            Some(_) => {}
        }
    }
    found.extend(candidate);
    found
}

/// Returns the addresses of a mapping if it is one of a file and not writable. `rest`: the words of
/// its line after the addresses.
fn read_only_file<'a>(
    addresses: &str,
    mut rest: impl Iterator<Item = &'a str>,
) -> Option<Range<usize>> {
    let permissions = rest.next()?;
    let path = rest.nth(3)?;
    if permissions.contains('w') || !path.starts_with('/') {
        return None;
    }
    let (start, end) = addresses.split_once('-')?;
    let parse = |address| usize::from_str_radix(address, 16).ok();
    Some(parse(start)?..parse(end)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMAPS: &str = "\
7f10-7f20 r--p 00000000 fe:00 42 /opt/torpor/bin/containerd-shim-torpor-v1
Size:                 64 kB
Anonymous:             0 kB
Swap:                  0 kB
7f20-7f40 r-xp 00010000 fe:00 42 /opt/torpor/bin/containerd-shim-torpor-v1
Anonymous:             0 kB
Swap:                  0 kB
7f40-7f50 r--p 00030000 fe:00 42 /opt/torpor/bin/containerd-shim-torpor-v1
Anonymous:            40 kB
Swap:                  0 kB
7f50-7f60 r--p 00040000 fe:00 42 /opt/torpor/bin/containerd-shim-torpor-v1
Anonymous:             0 kB
Swap:                 64 kB
7f60-7f70 rw-p 00050000 fe:00 42 /opt/torpor/bin/containerd-shim-torpor-v1
Anonymous:             0 kB
Swap:                  0 kB
7f70-7f80 r--p 00000000 00:00 0
Anonymous:             0 kB
7fff0-7fff1 r-xp 00000000 00:00 0 [vdso]
Anonymous:             0 kB
";

    #[test]
    fn only_pages_that_equal_their_file_are_given_back() {
        assert_eq!(unchanged(SMAPS), [0x7f10..0x7f20, 0x7f20..0x7f40]);
    }

    #[test]
    fn a_mapping_that_cannot_be_read_is_left_alone() {
        assert_eq!(unchanged(""), [0..0; 0]);
        assert_eq!(
            unchanged("x-y r-xp 0 0 0 /file\nAnonymous: 0 kB\n"),
            [0..0; 0]
        );
        assert_eq!(unchanged("7f10 r-xp\nAnonymous: 0 kB\n"), [0..0; 0]);
    }

    /// The program continues after its text was given back. Its relocated constants were not.
    #[test]
    fn a_program_runs_on_after_its_pages_were_given_back() {
        let functions: Vec<&'static dyn Fn(u32) -> u32> = vec![&|n| n + 1, &|n| n * 2];
        give_back();
        let sum: u32 = functions.iter().map(|function| function(20)).sum();
        assert_eq!(sum, 61);
    }
}
