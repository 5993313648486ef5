//! Swap in compressed memory for dozing sandboxes. The installer makes this swap only if an option
//! requests it; the uninstallation removes it.
//!
//! The swap is a zram device of Torpor's own, in addition to any zram devices of the node. The
//! device does not survive a reboot. Every start of the node brings a new installation, which makes
//! the device again.

#![allow(unsafe_code)]

use std::ffi::CString;
use std::fs::OpenOptions;
use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use nix::libc;
use nix::unistd::{SysconfVar, sysconf};
use torpor_cgroup::meminfo;

use super::error::Error;
use super::host::{self, HostRoot};
use crate::args::ShareOfMemory;

/// Priority of the device among the swaps. The kernel fills it before any swap on disk.
const PRIORITY: i32 = 100;

/// Paths of the host's files that make and remove devices.
pub(super) struct Zram {
    control: PathBuf,
    block: PathBuf,
    dev: PathBuf,
    swaps: PathBuf,
    meminfo: PathBuf,
}

impl Zram {
    pub(super) fn new(root: &HostRoot) -> Result<Self, Error> {
        Ok(Self {
            control: root.path(Path::new("/sys/class/zram-control"))?,
            block: root.path(Path::new("/sys/block"))?,
            dev: root.path(Path::new("/dev"))?,
            // These two files have the host's content in every namespace.
            swaps: "/proc/swaps".into(),
            meminfo: "/proc/meminfo".into(),
        })
    }

    /// Reports whether the device is in use as swap.
    pub(super) fn is_on(&self, device: u32) -> Result<bool, Error> {
        let swaps = host::read_text(&self.swaps)?.unwrap_or_default();
        Ok(names_device(&swaps, device))
    }

    /// Makes a device, which has size zero and is not swap yet, and returns its number.
    pub(super) fn add(&self) -> Result<u32, Error> {
        let path = self.control.join("hot_add");
        let number = host::read_text(&path)?.ok_or_else(|| Error::NoZram { path: path.clone() })?;
        number.trim().parse().map_err(|_| Error::NoZram { path })
    }

    /// Sets the device's size to this share of the node's memory, and turns swap on it on.
    pub(super) fn switch_on(&self, device: u32, share: ShareOfMemory) -> Result<(), Error> {
        let memory = meminfo::read_at(&self.meminfo).map_err(|source| Error::Read {
            path: self.meminfo.clone(),
            source,
        })?;
        let bytes = share.of(memory.mem_total);
        let size = self.block.join(format!("zram{device}/disksize"));
        write(&size, &bytes.to_string())?;
        let path = self.dev.join(format!("zram{device}"));
        let page = sysconf(SysconfVar::PAGE_SIZE).ok().flatten();
        let page = page.and_then(|page| usize::try_from(page).ok());
        let header = header(bytes, page.unwrap_or(4096));
        let written = OpenOptions::new()
            .write(true)
            .open(&path)
            .and_then(|file| file.write_all_at(&header, 0).and_then(|()| file.sync_all()));
        written.map_err(|source| Error::Write {
            path: path.clone(),
            source,
        })?;
        swapon(&path).map_err(|source| Error::Swap { path, source })
    }

    /// Moves the device's content back into memory, and removes the device.
    pub(super) fn remove(&self, device: u32) -> Result<(), Error> {
        let path = self.dev.join(format!("zram{device}"));
        if self.is_on(device)? {
            swapoff(&path).map_err(|source| Error::Swap { path, source })?;
        }
        if !self.block.join(format!("zram{device}")).exists() {
            return Ok(());
        }
        write(&self.block.join(format!("zram{device}/reset")), "1")?;
        write(&self.control.join("hot_remove"), &device.to_string())
    }
}

/// Reports whether the content of /proc/swaps names the device. The first line has the titles of
/// the columns; each further line begins with the path of one swap. The kernel escapes blanks in a
/// path; paths of zram devices have none.
fn names_device(swaps: &str, device: u32) -> bool {
    let name = format!("/zram{device}");
    let mut paths = swaps
        .lines()
        .skip(1)
        .filter_map(|line| line.split_whitespace().next());
    paths.any(|path| path.ends_with(&name))
}

/// Returns the first page of a swap area of this size (the kernel's `union swap_header`, version
/// 1), without a name and without bad pages.
fn header(bytes: u64, page: usize) -> Vec<u8> {
    const VERSION_AT: usize = 1024;
    const MAGIC: &[u8] = b"SWAPSPACE2";
    let mut header = vec![0; page];
    let last_page = (bytes / page as u64).saturating_sub(1);
    let last_page = u32::try_from(last_page).unwrap_or(u32::MAX);
    header[VERSION_AT..VERSION_AT + 4].copy_from_slice(&1_u32.to_ne_bytes());
    header[VERSION_AT + 4..VERSION_AT + 8].copy_from_slice(&last_page.to_ne_bytes());
    header[page - MAGIC.len()..].copy_from_slice(MAGIC);
    header
}

fn write(path: &Path, text: &str) -> Result<(), Error> {
    let written = OpenOptions::new()
        .write(true)
        .open(path)
        .and_then(|mut file| file.write_all(text.as_bytes()));
    written.map_err(|source| Error::Write {
        path: path.into(),
        source,
    })
}

fn c_path(path: &Path) -> io::Result<CString> {
    CString::new(path.as_os_str().as_bytes()).map_err(io::Error::other)
}

fn swapon(path: &Path) -> io::Result<()> {
    let path = c_path(path)?;
    // SWAP_FLAG_PREFER, with the priority in the low bits (swapon(2)).
    let flags = 0x8000 | PRIORITY;
    // SAFETY: the path is a C string that outlives the call; the kernel only reads it.
    match unsafe { libc::swapon(path.as_ptr(), flags) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

fn swapoff(path: &Path) -> io::Result<()> {
    let path = c_path(path)?;
    // SAFETY: the path is a C string that outlives the call; the kernel only reads it.
    match unsafe { libc::swapoff(path.as_ptr()) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_device_is_found_among_the_swaps() {
        let swaps = "Filename\tType\tSize\tUsed\tPriority\n/dev/zram11 partition\t1024\t0\t100\n/swap file\t1\t0\t-2\n";
        assert!(names_device(swaps, 11));
        assert!(!names_device(swaps, 1));
        assert!(!names_device("", 11));
    }

    #[test]
    fn the_header_is_that_of_a_swap_area() {
        let header = header(1 << 20, 4096);
        assert_eq!(header.len(), 4096);
        assert_eq!(&header[4086..], b"SWAPSPACE2");
        assert_eq!(
            header[1024..1032],
            [1_u32.to_ne_bytes(), 255_u32.to_ne_bytes()].concat()
        );
    }

    /// This test needs root and the zram module, as the development cluster does.
    #[test]
    fn a_device_becomes_swap_and_goes_again() {
        let zram = Zram::new(&HostRoot::new(Path::new("/"))).expect("the host's files");
        let device = zram.add().expect("a device");
        let made = zram.switch_on(device, ShareOfMemory::percent(1).expect("a share"));
        let was_on = zram.is_on(device).expect("looked");
        zram.remove(device).expect("removed");
        made.expect("switched on");
        assert!(was_on);
        assert!(!zram.is_on(device).expect("looked"));
        zram.remove(device).expect("removed twice");
    }
}
