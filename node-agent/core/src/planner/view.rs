//! The facts that follow from request and observation together, before any decision.

use std::collections::BTreeSet;
use std::time::Duration;

use jiff::Timestamp;

use crate::ids::{ClaimUid, ContainerName, ImageId};
use crate::ledger::{LedgerState, Memory};
use crate::state::{
    Desired, Failure, ImageState, Live, NOT_WATCHED, Observed, PodPresence, Policy, Power,
    SnapshotIntent, SnapshotReason, SnapshotWish,
};
use crate::time::later;

pub(super) struct View<'a> {
    pub(super) desired: &'a Desired,
    pub(super) observed: &'a Observed,
    pub(super) target: Power,
    /// The sandbox has its target only because of idleness.
    pub(super) by_itself: bool,
    /// The sandbox dozes because the runtime has no deeper sleep, and a deeper sleep is requested.
    pub(super) shallow: bool,
    /// Until then the sandbox does not fall asleep by itself, because nothing that arrives would
    /// wake it. A request for an image does not wait for that time.
    pub(super) unwatched_until: Option<Timestamp>,
    /// Empty if the ledger is corrupt.
    pub(super) ledger: LedgerState,
    pub(super) corrupt: Option<&'a str>,
    /// The image that is the sandbox's memory, or holds the same memory, and lies in the store.
    pub(super) fresh: Option<ImageId>,
    /// The name for the next image; `None`: the numbers are used up.
    pub(super) next_image: Option<ImageId>,
}

impl<'a> View<'a> {
    pub(super) fn new(
        desired: &'a Desired,
        observed: &'a Observed,
        policy: &Policy,
        now: Timestamp,
    ) -> Self {
        let (ledger, corrupt) = match &observed.ledger {
            Ok(ledger) => (ledger.clone(), None),
            Err(fault) => (LedgerState::default(), Some(fault.as_str())),
        };
        let in_store = observed.images.iter().map(|image| image.id.number());
        let last = in_store.fold(ledger.last_number, u32::max);
        let number = last.checked_add(1);
        let next_image = number.and_then(|n| ImageId::new(desired.pod_uid.clone(), n).ok());
        let held = |image: &ImageId| is_held(observed, image);
        let fresh = ledger.restorable(held).cloned();
        let is_due = is_wake_up_due(desired, observed, now);
        let unwatched_until = unwatched_until(observed, policy).filter(|until| *until > now);
        let is_watched = unwatched_until.is_none();
        let idle_power = match desired.target() {
            Power::Awake if !is_due && unbound(desired, observed).is_none() => {
                idle_power(desired, observed, &ledger, is_watched, now)
            }
            Power::Awake | Power::Asleep | Power::Frozen | Power::Dozing => None,
        };
        let by_itself = idle_power.is_some();
        let target = match idle_power {
            Some(power) => power,
            None if is_due => Power::Awake,
            None => desired.target(),
        };
        // A Suspend needs the image itself: the Pod is going to be deleted.
        let shallow = dozes_unsaved(observed) && target == Power::Asleep && !desired.suspending();
        let target = match (shallow, &observed.can_doze) {
            (true, Ok(())) => Power::Dozing,
            (true, Err(_)) => Power::Awake,
            (false, _) => target,
        };
        Self {
            desired,
            observed,
            target,
            shallow,
            by_itself,
            unwatched_until,
            ledger,
            corrupt,
            fresh,
            next_image,
        }
    }

    /// Returns the claim that is to arrive in the sandbox now: the sandbox is ready, and is neither
    /// frozen nor about to end. A request to sleep, or for an image, waits for that.
    pub(super) fn claim_to_bind(&self) -> Option<&'a ClaimUid> {
        let may = self.target != Power::Frozen
            && !self.desired.suspending()
            && self.is_present()
            && self.desired.ready
            && self.awaited_container().is_none();
        unbound(self.desired, self.observed).filter(|_| may)
    }

    pub(super) fn is_present(&self) -> bool {
        self.desired.pod == PodPresence::Present
    }

    /// Returns a container that the kubelet is starting again, or has not started yet. A dozing
    /// sandbox had all containers when it fell asleep.
    pub(super) fn awaited_container(&self) -> Option<&ContainerName> {
        let (desired, observed) = (&self.desired.containers, self.observed);
        let mut awaited = desired.difference(&observed.containers);
        awaited.next().filter(|_| observed.doze.is_none())
    }

    /// Returns the shortest and the longest wait after a failed save. A sleep by idleness can wait
    /// for longer, unless the cause of the failure passes by itself in a moment.
    pub(super) fn save_backoff(&self, policy: &Policy) -> (Duration, Duration) {
        if self
            .observed
            .failures
            .save
            .as_ref()
            .is_some_and(Failure::is_transient)
        {
            return (policy.save_backoff_min, policy.save_backoff_max);
        }
        let is_unrequested =
            self.desired.target() == Power::Awake && self.needing_image().next().is_none();
        match is_unrequested && self.desired.sleep.first().is_some() {
            true => (policy.idle_backoff_min, policy.idle_backoff_max),
            false => (policy.save_backoff_min, policy.save_backoff_max),
        }
    }

    /// Returns whether the image lies whole in the store.
    pub(super) fn held(&self, image: &ImageId) -> bool {
        is_held(self.observed, image)
    }

    /// Returns the image that a snapshot stands for. The ledger has precedence over a status that
    /// may be old.
    pub(super) fn image_of<'s>(&'s self, snapshot: &'s SnapshotIntent) -> Option<&'s ImageId> {
        let linked = self
            .ledger
            .image_of(&snapshot.uid)
            .filter(|image| self.held(image));
        linked.or(snapshot.image.as_ref())
    }

    /// Returns the snapshots of this Pod that have no image, and Suspend snapshots whose sandbox
    /// ran on after their image was made. The sandbox of a Pod that is gone or being deleted is
    /// saved no more: its Suspend snapshots need the image that holds its memory, if there is one.
    pub(super) fn needing_image(&self) -> impl Iterator<Item = &SnapshotIntent> {
        let can_have_newer = self.is_present() || self.fresh.is_some();
        self.desired.kept_snapshots().filter(move |snapshot| {
            let image = self.image_of(snapshot);
            match snapshot.reason {
                SnapshotReason::Manual => image.is_none(),
                SnapshotReason::Suspend => {
                    image.is_none() || can_have_newer && image != self.fresh.as_ref()
                }
            }
        })
    }

    /// Returns whether a snapshot that stays refers to the image, by its status or by the ledger.
    /// If a snapshot has several images, the older ones count until its status names the newest,
    /// because the cache may be behind the status.
    pub(super) fn is_referenced(&self, image: &ImageId) -> bool {
        let record = self
            .ledger
            .images
            .get(image)
            .filter(|record| record.committed);
        let mut kept = self
            .desired
            .snapshots
            .iter()
            .filter(|s| s.wish == SnapshotWish::Keep);
        kept.any(|snapshot| {
            let linked = record.is_some_and(|record| record.snapshots.contains(&snapshot.uid));
            let status_names_newest =
                snapshot.image.is_some() && snapshot.image.as_ref() == self.image_of(snapshot);
            snapshot.image.as_ref() == Some(image) || linked && !status_names_newest
        })
    }

    /// Returns the image of another Pod that this Pod was to continue from, if this Pod never ran.
    pub(super) fn unused_foreign_image(&self) -> Option<&ImageId> {
        let image = self.ledger.memory.image()?;
        (image.pod() != &self.desired.pod_uid).then_some(image)
    }

    /// Returns whether a snapshot that stays names an image of this Pod, in the store or not.
    pub(super) fn is_awaited(&self) -> bool {
        let mut kept = self.desired.kept_snapshots();
        kept.any(|snapshot| {
            snapshot.image.is_some() || self.ledger.image_of(&snapshot.uid).is_some()
        })
    }

    /// Returns the images that a snapshot refers to that is being deleted.
    pub(super) fn images_of_deleted(&self, snapshot: &SnapshotIntent) -> BTreeSet<ImageId> {
        let linked = self
            .ledger
            .images
            .iter()
            .filter(|(_, r)| r.snapshots.contains(&snapshot.uid));
        let linked = linked.map(|(image, _)| image.clone());
        linked.chain(snapshot.image.clone()).collect()
    }

    /// Returns whether the deletion of a snapshot requires that the image goes. While sleep is
    /// wanted, the image stays for the sandbox, and only the snapshot goes.
    pub(super) fn wants_deletion_of(&self, image: &ImageId) -> bool {
        let deleted = |s: &&SnapshotIntent| s.wish == SnapshotWish::Delete;
        !self.sleeps()
            && !self.is_referenced(image)
            && !self.is_last_image(image)
            && !self.is_to_be_adopted(image)
            && (self.desired.snapshots.iter())
                .filter(deleted)
                .any(|snapshot| self.images_of_deleted(snapshot).contains(image))
    }

    /// Returns whether a snapshot is about to adopt the image.
    fn is_to_be_adopted(&self, image: &ImageId) -> bool {
        self.fresh.as_ref() == Some(image) && self.needing_image().next().is_some()
    }

    /// Returns whether the image serves or served a snapshot.
    pub(super) fn had_snapshot(&self, image: &ImageId) -> bool {
        let record = self.ledger.images.get(image);
        record.is_some_and(|record| !record.snapshots.is_empty())
    }

    /// Returns whether the sandbox is to doze and no image will be made of it.
    pub(super) fn dozes_unsaved(&self) -> bool {
        dozes_unsaved(self.observed) && self.target == Power::Dozing
    }

    /// Returns whether an image is wanted that the runtime may be unable to make.
    pub(super) fn wants_image(&self) -> bool {
        self.shallow
            || self.desired.sleep.hibernate.is_some()
            || self.needing_image().next().is_some()
    }

    /// Returns whether the sandbox needs an image of its memory.
    pub(super) fn sleeps(&self) -> bool {
        matches!(self.target, Power::Asleep | Power::Dozing)
    }

    /// Returns whether the sandbox runs, as requested, and may fall asleep by itself.
    pub(super) fn may_fall_asleep(&self) -> bool {
        let may_sleep = self.desired.sleep.first().is_some();
        may_sleep && self.target == Power::Awake && self.is_present()
    }

    /// Returns whether the image may be removed: nothing refers to it, and it is not the memory of
    /// a sandbox that may need it.
    pub(super) fn is_rubbish(&self, image: &ImageId) -> bool {
        // A frozen sandbox has its memory itself. An image of it is a second copy, which stays
        // until a deletion requires its removal.
        let second_copy = self.observed.live == Live::Paused
            && self.observed.record.is_none()
            && self.target == Power::Frozen;
        let spare = second_copy && self.wants_deletion_of(image);
        !self.is_referenced(image)
            && !self.is_last_image(image)
            && (!self.is_memory(image) || spare)
    }

    /// Returns whether the image is kept, stale or not, for a roll back after a crash.
    pub(super) fn is_last_image(&self, image: &ImageId) -> bool {
        let wanted = self.desired.keep_last_image && self.desired.pod != PodPresence::Gone;
        let whole = |i: &&crate::state::ImageObserved| i.state == ImageState::Committed;
        let images = self.observed.images.iter().filter(whole);
        wanted && images.map(|i| i.id.number()).max() == Some(image.number())
    }

    /// Returns whether a Pod is being restored from the image. Until that Pod runs, these bytes are
    /// the only copy of its memory.
    pub(super) fn is_being_restored(&self, image: &ImageId) -> bool {
        let images = self.observed.images.iter();
        images.filter(|i| i.being_restored).any(|i| i.id == *image)
    }

    /// Returns whether the image is the memory of a sandbox that is not there, or may soon not be.
    pub(super) fn is_memory(&self, image: &ImageId) -> bool {
        self.desired.pod != PodPresence::Gone && self.ledger.memory.image() == Some(image)
    }

    /// Returns the image that the sandbox hibernates in, in place: there is no sandbox, there is a
    /// note in /run, and the ledger agrees with the note.
    pub(super) fn hibernated_in(&self) -> Option<&ImageId> {
        let record = self.observed.record.as_ref()?;
        let agreed = self.ledger.memory.image() == Some(&record.image);
        (self.observed.live == Live::None && agreed).then_some(&record.image)
    }
}

/// Returns the Pod's claim, unless it has arrived in the sandbox.
fn unbound<'a>(desired: &'a Desired, observed: &Observed) -> Option<&'a ClaimUid> {
    let claim = desired.claim.as_ref();
    claim.filter(|claim| observed.bound.as_ref() != Some(*claim))
}

pub(super) fn dozes_unsaved(observed: &Observed) -> bool {
    observed.dozes_unsaved && observed.capable.is_err()
}

/// Returns whether the sandbox has slept since before a time of `wake_up` that has come.
fn is_wake_up_due(desired: &Desired, observed: &Observed, now: Timestamp) -> bool {
    let asked = desired.due_wake_up(now).zip(observed.asleep_since);
    let sleeps = matches!(desired.power, Power::Awake | Power::Asleep) && !desired.suspending();
    sleeps && asked.is_some_and(|(at, since)| since < at)
}

/// Returns the time since which the sandbox has been idle. A time of `wake_up` counts as a use.
fn idle_since(desired: &Desired, observed: &Observed, now: Timestamp) -> Option<Timestamp> {
    let since = observed.idle_since?;
    Some(desired.due_wake_up(now).map_or(since, |at| since.max(at)))
}

/// Returns the depth that an idle sandbox takes although the API requests that the sandbox runs;
/// `None`: the sandbox runs.
fn idle_power(
    desired: &Desired,
    observed: &Observed,
    ledger: &LedgerState,
    is_watched: bool,
    now: Timestamp,
) -> Option<Power> {
    let lives = matches!(observed.live, Live::Running | Live::Paused);
    let is_over = |after: Option<Duration>| {
        let until = idle_since(desired, observed, now).zip(after);
        lives && until.is_some_and(|(since, after)| later(since, after) <= now)
    };
    // An eviction keeps the memory of a dozing sandbox, because that memory is in an image. An
    // awake sandbox ends as after any other deletion.
    let evicted = desired.evicted && observed.live == Live::Paused && observed.doze.is_some();
    if evicted || sleeps_by_itself(desired, observed, ledger) {
        return Some(Power::Asleep);
    }
    let is_unready = observed.live == Live::Running && !desired.ready;
    if desired.pod != PodPresence::Present || is_unready || !is_watched {
        return None;
    }
    // A caller that needs a dozing sandbox has resumed it. A sandbox that dozes therefore sleeps
    // on, whether the begin of its idle time is known or not. A sandbox that dozes for the node's
    // sake sleeps on, too: its request has ended, and it may have no idle time of its own.
    let dozes = observed.live == Live::Paused && observed.doze.is_some();
    let pressure = &desired.pressure;
    let dozes_for_node = dozes_unsaved(observed) && pressure.may && !pressure.never_dozes;
    let sleeps_on = dozes && (desired.sleep.doze.is_some() || dozes_for_node);
    let dozing = sleeps_on || is_over(desired.sleep.doze);
    // A doze keeps the processes that exec left behind; a restore does not.
    if is_over(desired.sleep.hibernate) && observed.left_by_exec.is_empty() {
        Some(Power::Asleep)
    } else if dozing && observed.can_doze.is_ok() {
        Some(Power::Dozing)
    } else {
        None
    }
}

/// Returns the time until which no sleep by idleness is tried, after one failed with
/// [`NOT_WATCHED`]. A requested sleep is tried at once.
fn unwatched_until(observed: &Observed, policy: &Policy) -> Option<Timestamp> {
    let failure = observed.failures.save.as_ref()?;
    let until = || failure.retry_at(policy.idle_backoff_min, policy.idle_backoff_max);
    (failure.reason == NOT_WATCHED).then(until)
}

/// Returns the time at which the sandbox falls asleep, or deeper, unless it is used before.
pub(super) fn idle_until(
    desired: &Desired,
    observed: &Observed,
    now: Timestamp,
) -> Option<Timestamp> {
    let times = desired
        .sleep
        .doze
        .into_iter()
        .chain(desired.sleep.hibernate);
    let since = idle_since(desired, observed, now)?;
    times
        .map(|after| later(since, after))
        .filter(|at| *at > now)
        .min()
}

/// Returns whether the sandbox fell asleep by itself and may sleep on. A caller that needs it
/// wakes it. A sandbox that may not sleep any more is woken.
fn sleeps_by_itself(desired: &Desired, observed: &Observed, ledger: &LedgerState) -> bool {
    let asleep = matches!(&ledger.memory, Memory::Asleep { image, by_itself: true }
        if observed.record.as_ref().is_some_and(|record| record.image == *image));
    let may =
        desired.sleep.hibernate.is_some() || desired.pressure.may_hibernate() || desired.evicted;
    observed.live == Live::None && asleep && may
}

fn is_held(observed: &Observed, image: &ImageId) -> bool {
    let whole = |i: &&crate::state::ImageObserved| i.state == ImageState::Committed;
    observed.images.iter().filter(whole).any(|i| i.id == *image)
}
