//! Programs of idle detection on a Pod's link: taken off and put back.

#![allow(unsafe_code)]

use std::{
    ffi::{CStr, CString},
    io,
    os::{
        fd::{AsRawFd, FromRawFd, OwnedFd, RawFd},
        unix::ffi::OsStrExt,
    },
    path::{Path, PathBuf},
};

use anyhow::{Context as _, ensure};
use nix::{
    libc,
    mount::{MsFlags, mount, umount},
};
use tempfile::TempDir;
use tokio::process::Command;

const SIDES: [&str; 2] = ["ingress", "egress"];
/// Preference of Torpor's filters.
const PREFERENCE: &str = "7";
/// Commands of bpf(2) (include/uapi/linux/bpf.h).
const BPF_OBJ_PIN: libc::c_long = 6;
const BPF_PROG_GET_FD_BY_ID: libc::c_long = 13;

/// The link of a Pod, and its programs, which files keep while they are off the link.
#[derive(Debug)]
pub(crate) struct Link {
    network: PathBuf,
    programs: Vec<(&'static str, PathBuf)>,
    _pins: Pins,
}

impl Link {
    pub(crate) async fn of(network: &Path) -> anyhow::Result<Self> {
        let pins = Pins::mount()?;
        let mut programs = Vec::new();
        for side in SIDES {
            let ids = ids(&show(network, side).await?);
            ensure!(
                !ids.is_empty(),
                "no program of idle detection is on the Pod's {side}"
            );
            for id in ids {
                let path = pins.path().join(format!("{side}-{id}"));
                pin(id, &path).with_context(|| format!("cannot pin program {id}"))?;
                programs.push((side, path));
            }
        }
        Ok(Self {
            network: network.to_owned(),
            programs,
            _pins: pins,
        })
    }

    /// Reports whether programs are on the link.
    pub(crate) async fn is_watched(&self) -> anyhow::Result<bool> {
        Ok(!ids(&show(&self.network, SIDES[0]).await?).is_empty())
    }

    /// Puts the programs on the link, or takes them off.
    pub(crate) async fn set(&self, on: bool) -> anyhow::Result<()> {
        if self.is_watched().await? == on {
            return Ok(());
        }
        if on {
            for (side, path) in &self.programs {
                let path = path.to_str().context("a path that is not UTF-8")?;
                let filter = ["add", "dev", "eth0", side, "pref", PREFERENCE];
                let program = ["protocol", "all", "bpf", "da", "object-pinned", path];
                tc(&self.network, &[&filter[..], &program].concat()).await?;
            }
        } else {
            for side in SIDES {
                let filter = ["del", "dev", "eth0", side, "pref", PREFERENCE];
                tc(&self.network, &filter).await?;
            }
        }
        Ok(())
    }
}

async fn show(network: &Path, side: &str) -> anyhow::Result<String> {
    tc(network, &["show", "dev", "eth0", side]).await
}

/// Runs `tc filter` in a network namespace.
async fn tc(network: &Path, args: &[&str]) -> anyhow::Result<String> {
    let ran = Command::new("nsenter")
        .arg(format!("--net={}", network.display()))
        .args(["tc", "filter"])
        .args(args)
        .output()
        .await
        .context("nsenter")?;
    let errors = String::from_utf8_lossy(&ran.stderr);
    ensure!(
        ran.status.success(),
        "tc filter {}: {errors}",
        args.join(" ")
    );
    Ok(String::from_utf8(ran.stdout)?)
}

/// Returns the ids of the programs in the output of `tc filter show`.
fn ids(text: &str) -> Vec<u32> {
    let after = text.split(" id ").skip(1);
    after
        .filter_map(|rest| rest.split_whitespace().next()?.parse().ok())
        .collect()
}

/// A mounted file system for pinned programs, which is removed at the end.
#[derive(Debug)]
struct Pins(TempDir);

impl Pins {
    fn mount() -> anyhow::Result<Self> {
        let dir = tempfile::tempdir()?;
        let none = None::<&str>;
        mount(Some("bpf"), dir.path(), Some("bpf"), MsFlags::empty(), none)
            .context("cannot mount a bpf file system")?;
        Ok(Self(dir))
    }

    fn path(&self) -> &Path {
        self.0.path()
    }
}

impl Drop for Pins {
    fn drop(&mut self) {
        if let Err(error) = umount(self.path()) {
            eprintln!("{} stays mounted: {error}", self.path().display());
        }
    }
}

/// Start of `union bpf_attr` for BPF_PROG_GET_FD_BY_ID.
#[repr(C)]
struct GetById {
    id: u32,
    next_id: u32,
    open_flags: u32,
}

/// Start of `union bpf_attr` for BPF_OBJ_PIN.
#[repr(C)]
struct ObjPin {
    path: u64,
    fd: u32,
    file_flags: u32,
}

/// Keeps a program by a file.
fn pin(id: u32, path: &Path) -> anyhow::Result<()> {
    let program = program(id)?;
    let path = CString::new(path.as_os_str().as_bytes())?;
    Ok(pin_at(&program, &path)?)
}

fn program(id: u32) -> io::Result<OwnedFd> {
    let attributes = GetById {
        id,
        next_id: 0,
        open_flags: 0,
    };
    // SAFETY: the structure is the one of this command and has no addresses.
    let answer = unsafe { bpf(BPF_PROG_GET_FD_BY_ID, &attributes)? };
    let fd = RawFd::try_from(answer).map_err(io::Error::other)?;
    // SAFETY: the kernel has just made this descriptor, and nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn pin_at(program: &OwnedFd, path: &CStr) -> io::Result<()> {
    let attributes = ObjPin {
        path: path.as_ptr() as u64,
        // Open descriptors are not negative.
        fd: program.as_raw_fd().cast_unsigned(),
        file_flags: 0,
    };
    // SAFETY: the structure is the one of this command, and the path lives until this returns.
    unsafe { bpf(BPF_OBJ_PIN, &attributes)? };
    Ok(())
}

/// # Safety
///
/// `attributes` must be the structure of `command`, and each address in it must be valid until this
/// returns.
unsafe fn bpf<T>(command: libc::c_long, attributes: &T) -> io::Result<libc::c_long> {
    let (address, size) = (std::ptr::from_ref(attributes), size_of::<T>());
    // SAFETY: the kernel reads `size` bytes from a reference of that size; the rest is promised.
    let answer = unsafe { libc::syscall(libc::SYS_bpf, command, address, size) };
    if answer < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(answer)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_of_programs_are_read_from_tc() {
        let text = "filter protocol all pref 7 bpf chain 0
filter protocol all pref 7 bpf chain 0 handle 0x1 torpor direct-action not_in_hw id 41 name torpor tag 3b
filter protocol all pref 7 bpf chain 0 handle 0x2 torpor direct-action not_in_hw id 7 name torpor tag 3b
";
        assert_eq!(ids(text), [41, 7]);
        assert!(ids("").is_empty());
    }
}
