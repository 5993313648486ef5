//! A paused sandbox of gVisor, for [`torpor_core::transition::resume`]: the one function that lets
//! a sandbox run on.

use std::cell::RefCell;
use std::time::Duration;

use torpor_core::Entry;
use torpor_core::ids::SandboxId;
use torpor_core::transition::{Left, Paused};
use torpor_records::Records;
use torpor_snapshots::{LedgerFile, ledger_file};

use crate::command::Runsc;
use crate::control::Control;
use crate::pause;
use crate::state;

/// Why a sandbox was not resumed, or may have been.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Pause(#[from] pause::Error),
    #[error("cannot determine whether the gofers of sandbox {sandbox} run")]
    Gofers {
        sandbox: SandboxId,
        #[source]
        source: state::Error,
    },
    #[error("cannot write the memory image of sandbox {sandbox} to the ledger")]
    Ledger {
        sandbox: SandboxId,
        #[source]
        source: ledger_file::Error,
    },
}

/// A connected sandbox whose lock the caller holds.
#[derive(Debug)]
pub struct PausedSandbox<'a> {
    pub records: &'a Records,
    pub runsc: &'a Runsc,
    pub control: RefCell<&'a mut Control>,
    pub sandbox: &'a SandboxId,
    pub ledger: &'a LedgerFile,
    /// Time limit of each call to the sandbox.
    pub limit: Duration,
}

impl Paused for PausedSandbox<'_> {
    type Error = Error;

    fn is_paused(&self) -> Result<bool, Error> {
        let mut control = self.control.borrow_mut();
        let paused = pause::is_paused(self.records, &mut control, self.sandbox, self.limit);
        Ok(paused?)
    }

    fn has_gofers(&self) -> Result<bool, Error> {
        let control = self.control.borrow();
        let live = self
            .runsc
            .has_its_gofers_beside(self.sandbox.as_str(), &control);
        live.map_err(|source| Error::Gofers {
            sandbox: self.sandbox.clone(),
            source,
        })
    }

    fn let_run(&self) -> Result<bool, Error> {
        let mut control = self.control.borrow_mut();
        let resumed = pause::resume(self.records, &mut control, self.sandbox, self.limit);
        Ok(resumed?)
    }

    fn never_ran(error: &Error) -> bool {
        matches!(error, Error::Pause(error) if error.ended_before_call())
    }

    fn take_back(&self, left: &Left) -> Result<(), Error> {
        take_back(self.ledger, self.sandbox, left)
    }
}

/// Records that the sandbox does not run after all: the image is its memory again.
pub fn take_back(ledger: &LedgerFile, sandbox: &SandboxId, left: &Left) -> Result<(), Error> {
    let image = left.image.clone();
    let appended = ledger.append_at(left.seq, &Entry::Committed { image });
    appended.map(drop).map_err(|source| Error::Ledger {
        sandbox: sandbox.clone(),
        source,
    })
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;
    use crate::control;

    #[rstest]
    #[case::not_received(control::Error::NotReceived { method: "containerManager.Resume", source: reset() }, true)]
    #[case::may_have_been_received(control::Error::NoAnswer { method: "containerManager.Resume", source: reset() }, false)]
    fn only_a_sandbox_that_received_no_call_never_ran(
        #[case] error: control::Error,
        #[case] never_ran: bool,
    ) {
        let error = Error::Pause(error.into());
        assert_eq!(PausedSandbox::never_ran(&error), never_ran);
    }

    fn reset() -> std::io::Error {
        std::io::ErrorKind::ConnectionReset.into()
    }

    #[test]
    fn an_image_is_the_memory_again_unless_the_ledger_has_gone_on() {
        let dir = tempfile::tempdir().expect("a directory");
        let store = torpor_snapshots::Store::open(dir.path()).expect("a store");
        let pod = torpor_core::ids::PodUid::new("pod-a").expect("a uid");
        let sandbox = SandboxId::new("a".repeat(64)).expect("an id");
        let image = torpor_core::ids::ImageId::parse("pod-a.1").expect("an id");
        let ledger = store.ledger(&pod).expect("a ledger");
        let committed = Entry::Committed {
            image: image.clone(),
        };
        ledger.append(&committed).expect("written");
        let seq = ledger.append(&Entry::Awake).expect("written").seq;
        let left = Left { image, seq };
        take_back(&ledger, &sandbox, &left).expect("written");
        let memory = ledger.read().expect("read").memory;
        assert_eq!(memory.image(), Some(&left.image));
        take_back(&ledger, &sandbox, &left).expect_err("the ledger has gone on");
    }
}
