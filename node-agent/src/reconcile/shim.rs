//! Requests to the shims of the node's Pods: the agent's only way to a sandbox.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::Duration;

use torpor_core::ids::SandboxId;
use torpor_core::image_size::Figures;
use torpor_core::state::{Live, NOT_WATCHED};
use torpor_core::steps::{Outcome, Step, words};
use torpor_messages::service::{self, Answer, Basis, Error, Observed, Request, Steps};
use torpor_records::{Probes, Records, Rules, SandboxState};
use torpor_snapshots::Digest;

/// Limit for a request that does no work on the sandbox. The shim itself waits for up to ten
/// seconds for each of a few calls of a sandbox that is busy with its pages.
const LIMIT: Duration = Duration::from_secs(40);
/// Limit for one step. The longest is the save of a large sandbox to a slow disk.
const STEP_LIMIT: Duration = Duration::from_secs(3600);
/// Reason of a failure: no shim of this version serves the Pod.
const SHIM_GONE: &str = "ShimGone";

/// The shim of one Pod.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Shim<'a> {
    records: &'a Records,
    sandbox: &'a SandboxId,
}

impl<'a> Shim<'a> {
    pub(crate) fn of(records: &'a Records, sandbox: &'a SandboxId) -> Self {
        Self { records, sandbox }
    }

    fn dir(self) -> PathBuf {
        self.records.pod_dir(self.sandbox)
    }

    fn ask(self, request: Request) -> Result<Answer, Error> {
        service::ask(&self.dir(), request, LIMIT)
    }

    /// Returns an answer that does not belong to the request, as an error.
    fn unexpected(self) -> Error {
        Error::BadAnswer { path: self.dir() }
    }

    /// Reports whether the shim serves the agent.
    pub(crate) fn serves(self) -> bool {
        self.dir().join(service::SOCKET).exists()
    }

    /// Returns the state of the sandbox. `idle`: also the figures of its use.
    pub(crate) fn observe(self, idle: bool) -> Observed {
        match self.ask(Request::Observe { idle }) {
            Ok(Answer::Observed(observed)) => observed,
            Ok(_) => self.not_observed(&self.unexpected()),
            Err(error) => self.not_observed(&error),
        }
    }

    /// Returns the state of a sandbox whose shim has not reported it.
    fn not_observed(self, error: &Error) -> Observed {
        let is_gone = error.is_end();
        let sleeps = || {
            let state = self.records.state(self.sandbox);
            matches!(state, Ok(SandboxState::Hibernated { .. }))
        };
        if !is_gone {
            tracing::warn!(sandbox = %self.sandbox, error = words(error), "the Pod's shim does not report the sandbox");
        }
        let live = match is_gone && sleeps() {
            true => Live::None,
            false => Live::Unknown,
        };
        Observed {
            busy: !is_gone,
            basis: Basis {
                live,
                ..nothing().basis
            },
            ..nothing()
        }
    }

    /// Returns how long ago the last packet was that was no probe (none without one), and whether
    /// the program says that it is busy.
    pub(crate) fn inquire(self) -> Result<(Option<Duration>, bool), String> {
        match self.ask(Request::Inquire) {
            Ok(Answer::Inquired {
                packet_millis,
                busy,
            }) => Ok((packet_millis.map(Duration::from_millis), busy)),
            Ok(_) => Err(words(&self.unexpected())),
            Err(error) => Err(words(&error)),
        }
    }

    /// Returns the sizes that an image of the sandbox may have; none if they cannot be measured.
    pub(crate) fn measure(self) -> Option<Figures> {
        match self.ask(Request::Measure) {
            Ok(Answer::Measured(figures)) => Some(figures),
            Ok(_) => None,
            Err(error) => {
                tracing::warn!(sandbox = %self.sandbox, error = words(&error), "cannot estimate the size of the sandbox's image");
                None
            }
        }
    }

    /// Has the shim follow these rules. `Ok(false)`: it does not serve yet, or has ended.
    pub(crate) fn follow(self, rules: &Rules, probes: &Probes) -> Result<bool, Error> {
        let (rules, probes) = (rules.clone(), probes.clone());
        match self.ask(Request::Rules { rules, probes }) {
            Ok(_) => Ok(true),
            Err(Error::Gone { .. }) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Has the shim wake the dozing sandbox for packets and input. A repeated call is harmless.
    /// `Err`: the reason why no packet would wake it.
    pub(crate) fn watch(self) -> Result<(), String> {
        match self.ask(Request::Watch) {
            Ok(_) => Ok(()),
            Err(Error::Refused { reason, message }) if reason == NOT_WATCHED => Err(message),
            Err(error) => {
                tracing::warn!(sandbox = %self.sandbox, error = words(&error), "cannot notify the Pod's shim of the doze");
                Ok(())
            }
        }
    }

    /// Has the shim take steps, and reports the outcome of each that was tried. Returns how many
    /// bytes of images they have written.
    pub(crate) fn take(
        self,
        steps: Steps,
        mut report: impl FnMut(&Step, &Outcome, Duration),
    ) -> u64 {
        let planned = steps.steps.clone();
        let mut next = 0;
        let taken = service::run(&self.dir(), steps, STEP_LIMIT, |index, outcome, took| {
            next = index + 1;
            if let Some(step) = planned.get(index) {
                report(step, &outcome, took);
            }
        });
        taken.unwrap_or_else(|error| {
            if let Some(step) = planned.get(next) {
                report(step, &outcome_of(&error), Duration::ZERO);
            }
            0
        })
    }
}

/// Returns the outcome of a step that the shim has not reported.
fn outcome_of(error: &Error) -> Outcome {
    match error {
        Error::Gone { .. } => Outcome::Failed {
            reason: SHIM_GONE.to_owned(),
            message: format!(
                "{}. If the Pod was started by an older version of Torpor, delete it, and it is started by this one",
                words(error)
            ),
        },
        Error::TooLarge { .. } => Outcome::failed("RequestTooLarge", error),
        Error::Refused { reason, message } => Outcome::Failed {
            reason: reason.clone(),
            message: message.clone(),
        },
        Error::Talk { .. } | Error::BadAnswer { .. } => Outcome::unknown(error),
    }
}

/// Returns the observation of a Pod without a sandbox.
pub(crate) fn nothing() -> Observed {
    Observed {
        busy: false,
        basis: Basis {
            live: Live::None,
            dozes: false,
            in_session: false,
            containers: Digest::of(b""),
        },
        started: BTreeSet::new(),
        kept: BTreeSet::new(),
        used: None,
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::OwnedFd;
    use std::thread::JoinHandle;

    use torpor_core::ids::ImageId;
    use torpor_core::steps::{Action, StepKind};
    use torpor_messages::service::{Envelope, SOCKET};
    use torpor_messages::wire::{accept, listen, receive, send};

    use super::*;
    use crate::reconcile::sandbox_index::tests::record;
    use crate::reconcile::steps_for_tests::{node_in, request, step};

    /// Starts a shim that sends these answers to one request, and returns the request.
    fn shim_in(listener: OwnedFd, answers: Vec<Answer>) -> JoinHandle<Request> {
        std::thread::spawn(move || {
            let peer = accept(&listener).expect("a connection");
            let (bytes, _) = receive(&peer).expect("a request");
            for answer in answers {
                let bytes = serde_json::to_vec(&answer).expect("encoded");
                send(&peer, &bytes, &[]).expect("sent");
            }
            let envelope: Envelope = serde_json::from_slice(&bytes).expect("understood");
            envelope.request
        })
    }

    #[test]
    fn an_ended_shim_leaves_a_hibernated_sandbox_asleep_and_a_running_one_unknown() {
        let dir = tempfile::tempdir().expect("a directory");
        let records = &node_in(dir.path()).records;
        let sandbox = record('a', "pod-a").sandbox;
        records.create_pod_dir(&sandbox).expect("made");
        let shim = Shim::of(records, &sandbox);
        let running = SandboxState::Running;
        records.write_state(&sandbox, &running).expect("written");
        assert_eq!(shim.observe(false).basis.live, Live::Unknown);
        let image = ImageId::parse("pod-a.1").expect("an image's name");
        let asleep = SandboxState::Hibernated {
            image,
            unstarted: None,
        };
        records.write_state(&sandbox, &asleep).expect("written");
        let observed = shim.observe(false);
        assert_eq!((observed.basis.live, observed.busy), (Live::None, false));
        assert_eq!(shim.watch(), Ok(()), "it is gone");
        let rules = (Rules::default(), Probes::default());
        assert!(matches!(shim.follow(&rules.0, &rules.1), Ok(false)));
    }

    #[test]
    fn each_outcome_is_reported_for_its_step_and_a_broken_connection_makes_one_unknown() {
        let dir = tempfile::tempdir().expect("a directory");
        let records = &node_in(dir.path()).records;
        let sandbox = record('a', "pod-a").sandbox;
        records.create_pod_dir(&sandbox).expect("made");
        let image = || ImageId::parse("pod-a.1").expect("an image's name");
        let steps = [
            Action::Pause,
            Action::Checkpoint { image: image() },
            Action::Commit { image: image() },
        ]
        .map(|action| step(0, action));
        let done = |index| Answer::Step {
            index,
            outcome: Outcome::Done,
            took: Duration::ZERO,
        };
        let full = Outcome::Failed {
            reason: "DiskFull".to_owned(),
            message: String::new(),
        };
        let failed = Answer::Step {
            index: 1,
            outcome: full,
            took: Duration::ZERO,
        };
        let ended = Answer::Ended { written: 7 };
        let unknown = |outcome: &Outcome| matches!(outcome, Outcome::Unknown { .. });
        for (answers, kinds, last_is_unknown, written) in [
            (
                vec![done(0), done(1), done(2), ended.clone()],
                vec![StepKind::Pause, StepKind::Checkpoint, StepKind::Commit],
                false,
                7,
            ),
            (
                vec![done(0)],
                vec![StepKind::Pause, StepKind::Checkpoint],
                true,
                0,
            ),
            (vec![failed, ended], vec![StepKind::Checkpoint], false, 7),
        ] {
            let socket = records.pod_dir(&sandbox).join(SOCKET);
            let shim = shim_in(listen(&socket).expect("a socket"), answers);
            let mut request = request(steps.to_vec());
            request.stops_for = Some(1);
            let mut reported = Vec::new();
            let bytes = Shim::of(records, &sandbox).take(request, |step, outcome, _| {
                reported.push((step.action.kind(), outcome.clone()));
            });
            assert!(matches!(shim.join().expect("asked"), Request::Steps(_)));
            std::fs::remove_file(socket).expect("removed");
            let all: Vec<_> = reported.iter().map(|(kind, _)| *kind).collect();
            assert_eq!((all, bytes), (kinds, written));
            let last = &reported.last().expect("one").1;
            assert_eq!(unknown(last), last_is_unknown, "{last:?}");
        }
    }

    #[test]
    fn a_step_without_a_shim_has_failed_for_certain() {
        let dir = tempfile::tempdir().expect("a directory");
        let records = &node_in(dir.path()).records;
        let sandbox = record('a', "pod-a").sandbox;
        let mut outcomes = Vec::new();
        let steps = request(vec![step(0, Action::Pause)]);
        Shim::of(records, &sandbox).take(steps, |_, outcome, _| outcomes.push(outcome.clone()));
        let [Outcome::Failed { reason, message }] = outcomes.as_slice() else {
            panic!("{outcomes:?}");
        };
        assert_eq!(reason, SHIM_GONE);
        assert!(message.contains("delete it"), "{message}");
    }
}
