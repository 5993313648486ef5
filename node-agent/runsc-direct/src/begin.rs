//! How a wake begins a process of a sandbox: a program of ours that has one thread goes the way there, and is told and helped by the wake.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};

use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

use super::process::{Word, hear, say};
use super::{COMMAND, Error, Limit, prepare};
use torpor_runsc::command::can_be_read;

/// What is to be begun.
#[derive(Debug)]
pub(super) struct Beginning<'a> {
    /// For who looks at the machine's processes, as is the next.
    pub(super) name: &'static str,
    pub(super) id: &'a str,
    pub(super) word: Word,
    pub(super) files: &'a [BorrowedFd<'a>],
    /// Of its user namespace.
    pub(super) uid_map: &'a str,
    pub(super) gid_map: &'a str,
}

/// What has begun.
#[derive(Debug)]
pub(super) struct Begun {
    /// Of the process that executes runsc.
    pub(super) pid: i32,
    /// Of a gofer, the files that gVisor writes to.
    pub(super) filestores: Vec<OwnedFd>,
}

impl Beginning<'_> {
    /// Returns when the process executes runsc.
    pub(super) fn begin(&self, until: Limit) -> Result<Begun, Error> {
        let (unix, packets, cloexec) = (
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
        );
        let (ours, theirs) =
            socketpair(unix, packets, cloexec, None).map_err(prepare("make a socket"))?;
        let mut child = Command::new("/proc/self/exe")
            .arg0(self.name)
            .args([COMMAND, self.id])
            .stdin(theirs)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .current_dir("/")
            .env_clear()
            .spawn()
            .map_err(prepare("start a process"))?;
        let begun = self.converse(&ours, &child, until);
        if begun.is_err() {
            // It may wait for a word that will not come.
            let _ = child.kill();
        }
        let _ = child.wait();
        begun
    }

    fn converse(&self, with: &OwnedFd, child: &Child, until: Limit) -> Result<Begun, Error> {
        say(with, &self.word, self.files).map_err(Error::Talk)?;
        let (mut pid, mut filestores) = (None, Vec::new());
        loop {
            if !can_be_read(with, until.end).map_err(Error::Talk)? {
                return Err(until.is_over("its process has not started"));
            }
            match hear(with).map_err(Error::Talk)? {
                Some((Word::Unshared, _)) => {
                    self.map_users(child.id())?;
                    say(with, &Word::Mapped, &[]).map_err(Error::Talk)?;
                }
                Some((Word::Forked { pid: forked }, _)) => pid = Some(forked),
                Some((Word::Filestores, files)) => filestores = files,
                Some((Word::Failed { message }, _)) => return Err(Error::Failed(message)),
                Some((Word::Boot(_) | Word::Serve(_) | Word::Mapped, _)) => {}
                None => {
                    let silent = || Error::Failed("it ended without an error message".to_owned());
                    let pid = pid.ok_or_else(silent)?;
                    return Ok(Begun { pid, filestores });
                }
            }
        }
    }

    fn map_users(&self, pid: u32) -> Result<(), Error> {
        for (name, map) in [
            ("uid_map", self.uid_map),
            ("setgroups", "deny"),
            ("gid_map", self.gid_map),
        ] {
            let path = format!("/proc/{pid}/{name}");
            std::fs::write(path, map).map_err(prepare("map the users"))?;
        }
        Ok(())
    }
}
