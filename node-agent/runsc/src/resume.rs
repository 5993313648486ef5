//! Resuming a sandbox that stands still: the one function that lets it run on, and its one rule.
//!
//! A sandbox that stands still may have its memory in an image too. The image is stale from the first instruction on, so the ledger says
//! [`Entry::Awake`] before the resume. gVisor kills a container whose gofer has ended as soon as the container may run. With an image
//! such a sandbox is not resumed: the image is its memory again, and the sandbox is restored from it. Without an image it is resumed, because
//! there is nothing to go back to. The caller holds the pod's lock.

use std::time::Duration;

use torpor_core::Entry;
use torpor_core::ids::{ImageId, SandboxId};
use torpor_snapshots::{LedgerFile, ledger_file};

use crate::command::Runsc;
use crate::control::Control;
use crate::pause;
use crate::state;
use torpor_records::Records;

/// Why it is not known whether a sandbox runs, or why it does not.
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

/// What came of a resume.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Resumed {
    Runs,
    /// It did not stand still.
    RanAlready,
    /// A gofer has ended. It stands still, and its memory is the image's alone.
    GoferGone,
}

/// The image that is stale because the ledger says that the sandbox is awake, and the sequence number of that entry.
#[derive(Debug)]
pub struct Left {
    pub image: ImageId,
    pub ledger: LedgerFile,
    pub seq: u64,
}

impl Left {
    /// Says that the sandbox does not run after all: the image is its memory again.
    pub fn take_back(self, sandbox: &SandboxId) -> Result<(), Error> {
        let Self { image, ledger, seq } = self;
        let taken_back = ledger.append_at(seq, &Entry::Committed { image });
        taken_back.map(drop).map_err(|source| Error::Ledger {
            sandbox: sandbox.clone(),
            source,
        })
    }
}

/// Whether all gofers of the sandbox live. Asked before the ledger says [`Entry::Awake`], so that a caller that dies has not made the image stale for nothing.
pub fn has_gofers(runsc: &Runsc, control: &Control, sandbox: &SandboxId) -> Result<bool, Error> {
    let live = runsc.has_its_gofers_beside(sandbox.as_str(), control);
    live.map_err(|source| Error::Gofers {
        sandbox: sandbox.clone(),
        source,
    })
}

/// Lets the sandbox run on. `left`: the image that was its memory until the ledger said [`Entry::Awake`], if there was one.
pub fn resume(
    records: &Records,
    runsc: &Runsc,
    control: &mut Control,
    sandbox: &SandboxId,
    left: Option<Left>,
    limit: Duration,
) -> Result<Resumed, Error> {
    match pause::is_paused(records, control, sandbox, limit) {
        Ok(true) => {}
        Ok(false) => return Ok(Resumed::RanAlready),
        Err(error) => {
            if let Some(left) = left {
                left.take_back(sandbox)?;
            }
            return Err(error.into());
        }
    }
    let left = left.map(|left| {
        let live = has_gofers(runsc, control, sandbox);
        (left, live)
    });
    let go = || Ok(pause::resume(records, control, sandbox, limit)?);
    follow(sandbox, left, go)
}

/// The rule. `left`: with whether all gofers live; `go` resumes the sandbox and answers whether it stood still.
fn follow(
    sandbox: &SandboxId,
    left: Option<(Left, Result<bool, Error>)>,
    go: impl FnOnce() -> Result<bool, Error>,
) -> Result<Resumed, Error> {
    let Some((left, gofers_live)) = left else {
        return Ok(match go()? {
            true => Resumed::Runs,
            false => Resumed::RanAlready,
        });
    };
    match gofers_live {
        Ok(true) => {}
        Ok(false) => return left.take_back(sandbox).map(|()| Resumed::GoferGone),
        Err(unknown) => {
            left.take_back(sandbox)?;
            return Err(unknown);
        }
    }
    match go() {
        Ok(true) => Ok(Resumed::Runs),
        Ok(false) => Ok(Resumed::RanAlready),
        // A sandbox that ended before it heard that it may run has not run.
        Err(error) => {
            if matches!(&error, Error::Pause(error) if error.was_not_heard()) {
                left.take_back(sandbox)?;
            }
            Err(error)
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use rstest::rstest;
    use torpor_core::ids::PodUid;
    use torpor_snapshots::Store;

    use super::*;
    use crate::control;

    fn sandbox() -> SandboxId {
        SandboxId::new("a".repeat(64)).expect("an id")
    }

    fn unknown_gofers() -> Error {
        let source = pause::Error::Control(lost(false));
        Error::Pause(source)
    }

    /// The answer to a resume that did not come; `heard`: the request may have been read.
    fn lost(heard: bool) -> control::Error {
        let method = "containerManager.Resume";
        let source = std::io::ErrorKind::ConnectionReset.into();
        match heard {
            true => control::Error::NoAnswer { method, source },
            false => control::Error::NotHeard { method, source },
        }
    }

    /// A pod whose memory was in an image until its ledger said that it is awake.
    struct Case {
        _dir: tempfile::TempDir,
        store: Store,
        pod: PodUid,
        image: ImageId,
    }

    impl Case {
        fn new() -> Self {
            let dir = tempfile::tempdir().expect("a directory");
            Self {
                store: Store::open(dir.path()).expect("a store"),
                pod: PodUid::new("pod-a").expect("a uid"),
                image: ImageId::parse("pod-a.1").expect("an id"),
                _dir: dir,
            }
        }

        fn left(&self) -> Left {
            let ledger = self.store.ledger(&self.pod).expect("a ledger");
            let image = self.image.clone();
            let committed = Entry::Committed {
                image: image.clone(),
            };
            ledger.append(&committed).expect("written");
            let seq = ledger.append(&Entry::Awake).expect("written").seq;
            Left { image, ledger, seq }
        }

        fn is_memory(&self) -> bool {
            let ledger = self.store.ledger(&self.pod).expect("a ledger");
            ledger.read().expect("read").memory.image() == Some(&self.image)
        }
    }

    #[rstest]
    #[case::all_live(Ok(true), true, Ok(Resumed::Runs))]
    #[case::one_has_ended(Ok(false), false, Ok(Resumed::GoferGone))]
    #[case::nobody_knows(Err(unknown_gofers()), false, Err(()))]
    fn a_sandbox_with_an_image_runs_on_only_with_its_gofers(
        #[case] gofers: Result<bool, Error>,
        #[case] runs: bool,
        #[case] expected: Result<Resumed, ()>,
    ) {
        let case = Case::new();
        let ran = Cell::new(false);
        let go = || {
            ran.set(true);
            Ok(true)
        };
        let resumed = follow(&sandbox(), Some((case.left(), gofers)), go);
        assert_eq!(resumed.map_err(drop), expected);
        assert_eq!(ran.get(), runs);
        assert_eq!(
            case.is_memory(),
            !runs,
            "the image is its memory until it runs"
        );
    }

    #[rstest]
    #[case(true, Resumed::Runs)]
    #[case(false, Resumed::RanAlready)]
    fn a_sandbox_without_an_image_runs_on_and_its_gofers_are_not_asked_for(
        #[case] stood_still: bool,
        #[case] expected: Resumed,
    ) {
        let resumed = follow(&sandbox(), None, || Ok(stood_still));
        assert_eq!(resumed.expect("resumed"), expected);
    }

    #[rstest]
    #[case::not_heard(false, true)]
    #[case::may_have_been_heard(true, false)]
    fn the_image_stays_the_memory_only_where_the_sandbox_heard_nothing(
        #[case] heard: bool,
        #[case] keeps: bool,
    ) {
        let case = Case::new();
        let go = || Err(Error::Pause(lost(heard).into()));
        let resumed = follow(&sandbox(), Some((case.left(), Ok(true))), go);
        resumed.unwrap_err();
        assert_eq!(case.is_memory(), keeps);
    }
}
