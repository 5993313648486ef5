//! The surroundings of a step: its Pod, its sandbox and its plan.

use std::cell::{Cell, RefCell};
use std::time::Duration;

use jiff::Timestamp;
use torpor_core::ids::{Namespace, PodUid};
use torpor_core::steps::Outcome;
use torpor_records::{PodLock, PodRecord, WakeCause};
use torpor_runsc::keeper::Rules;
use torpor_snapshots::{ManifestDraft, Partial};

use crate::reconcile::node::Node;
use crate::reconcile::observe::words;

/// Time limit of the shim's commands. The kubelet gives an exec two minutes.
pub(super) const VERB_LIMIT: Duration = Duration::from_secs(110);

/// The surroundings of the steps of one plan.
pub(crate) struct Context<'a> {
    pub(crate) node: &'a Node,
    pub(crate) pod: &'a PodUid,
    pub(crate) namespace: &'a Namespace,
    /// The Pod's sandbox with its lock. None if the Pod has no sandbox.
    pub(crate) sandbox: Option<(&'a PodRecord, &'a PodLock)>,
    /// Returns the current rules of the keeper for the time in which the sandbox sleeps.
    pub(crate) rules: &'a dyn Fn() -> Rules,
    /// The plan puts the sandbox to sleep without a request for it.
    pub(crate) by_itself: bool,
    /// When the plan was made. A use of the sandbox after that time is a use of a sandbox that the
    /// plan has put to sleep.
    pub(crate) decided: Timestamp,
    /// The cause of the wake, if the plan wakes the sandbox.
    pub(crate) cause: WakeCause,
    /// The storage limit of the Pod's namespace applies to an image of its sandbox.
    pub(crate) limited: bool,
    /// Returns the manifest that a commit writes.
    pub(crate) draft: &'a dyn Fn() -> ManifestDraft,
    /// The image that a checkpoint of this plan wrote and that waits for its commit.
    pub(crate) partial: RefCell<Option<Partial>>,
    /// Bytes of images that this plan wrote, committed or not.
    pub(crate) written: Cell<u64>,
}

/// Returns a failure with the error's text.
pub(super) fn failed(reason: &str, error: &(dyn std::error::Error + 'static)) -> Outcome {
    Outcome::Failed {
        reason: reason.to_owned(),
        message: words(error),
    }
}
