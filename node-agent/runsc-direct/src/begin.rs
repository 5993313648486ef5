//! The beginning of a sandbox' process by a wake.
//!
//! The wake starts a program of Torpor's with one thread, which enters the namespaces and executes
//! runsc ([`super::become_process`]). The wake sends it the arguments, and maps its users.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};

use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

use super::error::{Error, prepare};
use super::limit::Limit;
use super::message::{Message, receive_message, send_message};
use torpor_runsc::command::can_be_read;

/// The command of the shim that calls [`super::become_process`].
pub const COMMAND: &str = "sandbox-process";

/// A process to begin.
#[derive(Debug)]
pub(super) struct Beginning<'a> {
    /// The program's name and argument, for readers of the machine's list of processes.
    pub(super) name: &'static str,
    pub(super) id: &'a str,
    pub(super) message: Message,
    pub(super) files: &'a [BorrowedFd<'a>],
    /// Users of the process' user namespace, as lines of `/proc/<pid>/uid_map` and `gid_map`.
    pub(super) uid_map: &'a str,
    pub(super) gid_map: &'a str,
}

/// A process that has begun.
#[derive(Debug)]
pub(super) struct Begun {
    /// Id of the process that executes runsc.
    pub(super) pid: i32,
    /// Files that gVisor writes to, where the process is a gofer.
    pub(super) filestores: Vec<OwnedFd>,
}

impl Beginning<'_> {
    /// Begins the process, and returns when it executes runsc.
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
            // The child may wait for a message that will not come.
            let _ = child.kill();
        }
        let _ = child.wait();
        begun
    }

    fn converse(&self, with: &OwnedFd, child: &Child, until: Limit) -> Result<Begun, Error> {
        send_message(with, &self.message, self.files).map_err(Error::Talk)?;
        let (mut pid, mut filestores) = (None, Vec::new());
        loop {
            if !can_be_read(with, until.end).map_err(Error::Talk)? {
                return Err(until.exceeded("its process has not started"));
            }
            match receive_message(with).map_err(Error::Talk)? {
                Some((Message::Unshared, _)) => {
                    self.map_users(child.id())?;
                    send_message(with, &Message::Mapped, &[]).map_err(Error::Talk)?;
                }
                Some((Message::Forked { pid: forked }, _)) => pid = Some(forked),
                Some((Message::Filestores, files)) => filestores = files,
                Some((Message::Failed { message }, _)) => return Err(Error::Failed(message)),
                Some((Message::Boot(_) | Message::Serve(_) | Message::Mapped, _)) => {}
                None => {
                    let no_message =
                        || Error::Failed("it ended without an error message".to_owned());
                    let pid = pid.ok_or_else(no_message)?;
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
