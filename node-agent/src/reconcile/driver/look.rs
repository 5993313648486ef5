//! One observation of a Pod with its plan, and the state that a task keeps between two of them.

use std::sync::Arc;

use jiff::Timestamp;
use torpor_core::ids::{Namespace, PodUid, SandboxId};
use torpor_core::pressure::Candidate;
use torpor_core::queue::Wish;
use torpor_core::state::{Failures, Observed};
use torpor_core::steps::Plan;
use torpor_messages::service::Basis;
use torpor_records::{PodRecord, WakeCause};

use super::departure::{GivenUp, Going};
use super::keeper_rules::SentRules;
use super::own_writes::OwnWrites;
use super::sleep_watch::SleepWatch;
use crate::kata::LockedSandbox;
use crate::policy::idle::Watched;
use crate::policy::saves::SaveTurn;
use crate::report::publish::SavedImage;
use crate::report::wakes::FailedWakes;

/// The state of a task from turn to turn. It is lost when the agent restarts: then every action is
/// tried at once, and an idle sandbox counts as used until then.
#[derive(Debug, Clone, Default)]
pub(super) struct Remembered {
    pub(super) failures: Failures,
    pub(super) idle: Option<Watched>,
    /// The task's turn to save, or its place in the queue.
    pub(super) save_turn: Option<Arc<SaveTurn>>,
    pub(super) sent_rules: Option<SentRules>,
    /// The sandbox that this task observed last.
    pub(super) handled: Option<SandboxId>,
    pub(super) own_writes: OwnWrites,
    pub(super) failed_wakes: FailedWakes,
    pub(super) going: Going,
}

/// One observation of a Pod and the plan that follows.
pub(super) struct Look {
    pub(super) pod_uid: PodUid,
    pub(super) plan: Plan,
    /// The index of the step for which the plan stops the running sandbox.
    pub(super) stops_for: Option<usize>,
    pub(super) record: Option<PodRecord>,
    /// The state of the sandbox that the plan is made for.
    pub(super) basis: Basis,
    pub(super) namespace: Option<Namespace>,
    /// The save for which the plan waits.
    pub(super) wish: Option<Wish>,
    /// The images that the plan's statuses name.
    pub(super) saved: Vec<SavedImage>,
    /// Nothing of the Pod is on the node, and only the plan's statuses are left to be published.
    pub(super) nothing: bool,
    /// The memory that the plan gives up.
    pub(super) given_up: Vec<GivenUp>,
    /// Set if the sandbox sleeps and no other process holds its lock.
    pub(super) asleep: Option<SleepWatch>,
    /// Set if the sandbox could sleep to relieve the node.
    pub(super) candidate: Option<Candidate>,
    pub(super) sent_rules: Option<SentRules>,
    /// The sandbox that this task has observed.
    pub(super) handled: Option<SandboxId>,
    /// When the plan was made.
    pub(super) decided: Timestamp,
    /// The cause of the wake, if the plan wakes the sandbox.
    pub(super) cause: WakeCause,
    /// The storage limit of the namespace applies to a save.
    pub(super) limited: bool,
    /// Earlier failures that are not made good yet.
    pub(super) failures: Failures,
    pub(super) failed_wakes: FailedWakes,
    /// The sandbox, if Kata runs it. Then there is neither record nor lock.
    pub(super) kata: Option<LockedSandbox>,
}

/// Adds the state of the sandbox's save turn to the observation.
pub(super) fn note_turn(observed: &mut Observed, turn: Option<&SaveTurn>) {
    observed.save_turn = turn.is_some_and(SaveTurn::has_come);
    observed.held_back = turn.is_some_and(SaveTurn::is_held_back);
}
