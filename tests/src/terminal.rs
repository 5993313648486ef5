//! A terminal that a test types into, for `kubectl exec -it` and `kubectl attach -it`.

use std::fs::File;
use std::io::{Read, Write};
use std::process::Stdio;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::Context;
use rustix::fs::{Mode, OFlags};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use tokio::process::Child;

use crate::kubectl::{Kubectl, command};
use crate::wait;

/// A kubectl whose standard streams are a terminal.
#[derive(Debug)]
pub struct Terminal {
    master: File,
    screen: Arc<Mutex<String>>,
    child: Child,
}

impl Terminal {
    /// Runs kubectl on a new terminal.
    pub fn open(kubectl: &Kubectl, args: &[&str]) -> anyhow::Result<Self> {
        let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC)?;
        grantpt(&master)?;
        unlockpt(&master)?;
        let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC;
        let slave = rustix::fs::open(ptsname(&master, Vec::new())?, flags, Mode::empty())?;
        let child = command(&kubectl.program)
            .arg("--namespace")
            .arg(&kubectl.namespace)
            .args(args)
            .stdin(Stdio::from(slave.try_clone()?))
            .stdout(Stdio::from(slave.try_clone()?))
            .stderr(Stdio::from(slave))
            .kill_on_drop(true)
            .spawn()
            .with_context(|| format!("cannot run {}", kubectl.program.display()))?;
        let master = File::from(master);
        let screen = Arc::new(Mutex::new(String::new()));
        let (mut reader, shown) = (master.try_clone()?, screen.clone());
        // The thread ends when the last process with this terminal ends.
        std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(n @ 1..) = reader.read(&mut bytes) {
                let text = String::from_utf8_lossy(&bytes[..n]).into_owned();
                shown
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .push_str(&text);
            }
        });
        Ok(Self {
            master,
            screen,
            child,
        })
    }

    /// Types a line.
    pub fn line(&mut self, text: &str) -> anyhow::Result<()> {
        Ok(self.master.write_all(format!("{text}\n").as_bytes())?)
    }

    /// Returns everything that was shown so far.
    pub fn shown(&self) -> String {
        self.screen
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    /// Waits until the text was shown.
    pub async fn shows(&self, text: &str) -> anyhow::Result<()> {
        wait::until(
            &format!("{text:?} on the terminal"),
            Duration::from_secs(20),
            async || {
                let shown = self.shown();
                wait::holds(shown.contains(text), || shown.clone())
            },
        )
        .await
    }

    /// Waits until kubectl ends; returns its exit code.
    pub async fn ended(&mut self) -> anyhow::Result<i32> {
        let status =
            tokio::time::timeout(wait::scaled(Duration::from_secs(20)), self.child.wait()).await;
        let status = status.with_context(|| format!("kubectl goes on: {}", self.shown()))??;
        Ok(status.code().unwrap_or(-1))
    }
}
