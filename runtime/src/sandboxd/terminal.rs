//! Terminals of commands.

use std::{io, os::fd::OwnedFd};

use rustix::{
    fs::{Mode, OFlags},
    io::Errno,
    pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt},
    termios::{Winsize, tcsetwinsize},
};
use tokio::io::unix::AsyncFd;

use crate::sandboxd::polled::polled;

/// Master side of a pseudoterminal. Dropping the last reference hangs the terminal up.
#[derive(Debug)]
pub struct Terminal {
    master: AsyncFd<OwnedFd>,
}

impl Terminal {
    /// Opens a terminal of this size in columns and rows; returns it and its slave side.
    pub fn open(size: Option<(u16, u16)>) -> io::Result<(Self, OwnedFd)> {
        let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
        let master = openpt(flags)?;
        grantpt(&master)?;
        unlockpt(&master)?;
        let name = ptsname(&master, Vec::new())?;
        let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC;
        let slave = rustix::fs::open(name, flags, Mode::empty())?;
        rustix::io::ioctl_fionbio(&master, true)?;
        let terminal = Self {
            master: polled(master)?,
        };
        if let Some((columns, rows)) = size {
            terminal.resize(columns, rows)?;
        }
        Ok((terminal, slave))
    }

    /// Sets the size in characters.
    pub fn resize(&self, columns: u16, rows: u16) -> io::Result<()> {
        let size = Winsize {
            ws_col: columns,
            ws_row: rows,
            ws_xpixel: 0,
            ws_ypixel: 0,
        };
        Ok(tcsetwinsize(self.master.get_ref(), size)?)
    }

    /// Reads output of the command; returns 0 when no process has the terminal open.
    pub async fn read(&self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            let mut ready = self.master.readable().await?;
            let read = ready.try_io(|master| Ok(rustix::io::read(master.get_ref(), &mut *buffer)?));
            match read {
                Ok(Err(error)) if error.raw_os_error() == Some(Errno::IO.raw_os_error()) => {
                    return Ok(0);
                }
                Ok(read) => return read,
                Err(_would_block) => {}
            }
        }
    }

    /// Writes input, as if typed.
    pub async fn write_all(&self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            let mut ready = self.master.writable().await?;
            let written = ready.try_io(|master| Ok(rustix::io::write(master.get_ref(), bytes)?));
            if let Ok(written) = written {
                bytes = &bytes[written?..];
            }
        }
        Ok(())
    }
}
