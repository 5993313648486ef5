//! What follows from desired and observed taken together, before anything is decided.

use std::collections::BTreeSet;
use std::time::Duration;

use jiff::Timestamp;

use crate::ids::{ContainerName, ImageId};
use crate::ledger::{LedgerState, Memory};
use crate::state::{
    Desired, Failure, ImageState, Live, NOT_WATCHED, Observed, PodPresence, Policy, Power,
    SnapshotIntent, SnapshotReason, SnapshotWish, later,
};

pub(super) struct View<'a> {
    pub(super) desired: &'a Desired,
    pub(super) observed: &'a Observed,
    pub(super) target: Power,
    /// The target is what the sandbox does because of idleness only.
    pub(super) by_itself: bool,
    /// It dozes because the runtime knows no deeper sleep, which is what was wanted.
    pub(super) shallow: bool,
    /// Until then it does not fall asleep by itself, because nothing that arrives would wake it. Whoever asks for an image has one before.
    pub(super) unwatched_until: Option<Timestamp>,
    /// Empty when it is corrupt.
    pub(super) ledger: LedgerState,
    pub(super) corrupt: Option<&'a str>,
    /// The image that is the sandbox's memory, or the same as its memory, and lies in the store.
    pub(super) fresh: Option<ImageId>,
    /// The name for the next image; `None` when the numbers are used up.
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
        let called = is_called(desired, observed, now);
        let unwatched_until = unwatched_until(observed, policy).filter(|until| *until > now);
        let is_watched = unwatched_until.is_none();
        let of_idleness = match desired.target() {
            Power::Awake if !called => of_idleness(desired, observed, &ledger, is_watched, now),
            Power::Awake | Power::Asleep | Power::Frozen | Power::Dozing => None,
        };
        let by_itself = of_idleness.is_some();
        let target = match of_idleness {
            Some(power) => power,
            None if called => Power::Awake,
            None => desired.target(),
        };
        // A Suspend wants the image itself: the Pod is going to be deleted.
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

    pub(super) fn is_present(&self) -> bool {
        self.desired.pod == PodPresence::Present
    }

    /// A container that the kubelet is bringing back, or has not brought yet. What dozes had them all.
    pub(super) fn awaited_container(&self) -> Option<&ContainerName> {
        let (desired, observed) = (&self.desired.containers, self.observed);
        let mut awaited = desired.difference(&observed.containers);
        awaited.next().filter(|_| observed.doze.is_none())
    }

    /// How long to wait after a save that failed: a sleep that nobody asked for can wait for longer, unless it will do in a moment.
    pub(super) fn save_backoff(&self, policy: &Policy) -> (Duration, Duration) {
        if self
            .observed
            .failures
            .save
            .as_ref()
            .is_some_and(Failure::passes)
        {
            return (policy.save_backoff_min, policy.save_backoff_max);
        }
        let nobody_asked =
            self.desired.target() == Power::Awake && self.needing_image().next().is_none();
        match nobody_asked && self.desired.sleep.first().is_some() {
            true => (policy.idle_backoff_min, policy.idle_backoff_max),
            false => (policy.save_backoff_min, policy.save_backoff_max),
        }
    }

    /// Whether the image lies whole in the store.
    pub(super) fn held(&self, image: &ImageId) -> bool {
        is_held(self.observed, image)
    }

    /// The image that a snapshot stands for. The ledger knows better than a status that may be old.
    pub(super) fn image_of<'s>(&'s self, snapshot: &'s SnapshotIntent) -> Option<&'s ImageId> {
        let linked = self
            .ledger
            .image_of(&snapshot.uid)
            .filter(|image| self.held(image));
        linked.or(snapshot.image.as_ref())
    }

    /// Snapshots of this Pod without an image, and Suspend snapshots whose image the sandbox outlived.
    pub(super) fn needing_image(&self) -> impl Iterator<Item = &SnapshotIntent> {
        let present = self.is_present();
        self.desired.kept_snapshots().filter(move |snapshot| {
            let image = self.image_of(snapshot);
            match snapshot.reason {
                SnapshotReason::Manual => image.is_none(),
                SnapshotReason::Suspend => {
                    image.is_none() || present && image != self.fresh.as_ref()
                }
            }
        })
    }

    /// Whether a snapshot that stays refers to the image: by its status, or by the ledger. Of several images of one snapshot the
    /// older ones count until its status names the newest, because the cache may not show yet what the status says.
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
            let newest_told =
                snapshot.image.is_some() && snapshot.image.as_ref() == self.image_of(snapshot);
            snapshot.image.as_ref() == Some(image) || linked && !newest_told
        })
    }

    /// The image of another Pod from which this one was to go on, if it never did.
    pub(super) fn taken_in_vain(&self) -> Option<&ImageId> {
        let image = self.ledger.memory.image()?;
        (image.pod() != &self.desired.pod_uid).then_some(image)
    }

    /// Whether a snapshot that stays names an image of this Pod, wherever that is at the moment.
    pub(super) fn is_awaited(&self) -> bool {
        let mut kept = self.desired.kept_snapshots();
        kept.any(|snapshot| {
            snapshot.image.is_some() || self.ledger.image_of(&snapshot.uid).is_some()
        })
    }

    /// Images that a snapshot that is being deleted refers to.
    pub(super) fn images_of_deleted(&self, snapshot: &SnapshotIntent) -> BTreeSet<ImageId> {
        let linked = self
            .ledger
            .images
            .iter()
            .filter(|(_, r)| r.snapshots.contains(&snapshot.uid));
        let linked = linked.map(|(image, _)| image.clone());
        linked.chain(snapshot.image.clone()).collect()
    }

    /// Whether a deleted snapshot asks for the image to go. Not when sleep is what is wanted: then the image stays for the
    /// sandbox's sake, and only the snapshot goes.
    pub(super) fn deletion_asked(&self, image: &ImageId) -> bool {
        let deleted = |s: &&SnapshotIntent| s.wish == SnapshotWish::Delete;
        !self.sleeps()
            && !self.is_referenced(image)
            && !self.is_last_image(image)
            && (self.desired.snapshots.iter())
                .filter(deleted)
                .any(|snapshot| self.images_of_deleted(snapshot).contains(image))
    }

    /// Whether it is to doze and no image will be made of it.
    pub(super) fn dozes_unsaved(&self) -> bool {
        dozes_unsaved(self.observed) && self.target == Power::Dozing
    }

    /// Whether somebody asks for what the runtime cannot do.
    pub(super) fn asks_for_image(&self) -> bool {
        self.shallow
            || self.desired.sleep.hibernate.is_some()
            || self.needing_image().next().is_some()
    }

    /// Whether the sandbox needs an image of its memory.
    pub(super) fn sleeps(&self) -> bool {
        matches!(self.target, Power::Asleep | Power::Dozing)
    }

    /// Whether it runs, as it is to, until it falls asleep by itself.
    pub(super) fn may_fall_asleep(&self) -> bool {
        let may_sleep = self.desired.sleep.first().is_some();
        may_sleep && self.target == Power::Awake && self.is_present()
    }

    /// Whether the image may be removed: nothing refers to it, and it is not the memory of a sandbox that may need it.
    pub(super) fn is_rubbish(&self, image: &ImageId) -> bool {
        // A frozen sandbox has its memory itself; an image of it is a second copy, kept unless somebody wants it gone.
        let second_copy = self.observed.live == Live::Paused && self.target == Power::Frozen;
        let spare = second_copy && self.deletion_asked(image);
        !self.is_referenced(image)
            && !self.is_last_image(image)
            && (!self.is_memory(image) || spare)
    }

    /// Whether the image is kept, stale or not, for the sandbox to go back to when it crashes.
    pub(super) fn is_last_image(&self, image: &ImageId) -> bool {
        let wanted = self.desired.keep_last_image && self.desired.pod != PodPresence::Gone;
        let whole = |i: &&crate::state::ImageObserved| i.state == ImageState::Committed;
        let images = self.observed.images.iter().filter(whole);
        wanted && images.map(|i| i.id.number()).max() == Some(image.number())
    }

    /// Whether some Pod is on its way back from the image: until it runs, these bytes are the only copy of its memory.
    pub(super) fn is_being_restored(&self, image: &ImageId) -> bool {
        let images = self.observed.images.iter();
        images.filter(|i| i.being_restored).any(|i| i.id == *image)
    }

    /// Whether the image stands in for a sandbox that is not there (or may soon not be).
    pub(super) fn is_memory(&self, image: &ImageId) -> bool {
        self.desired.pod != PodPresence::Gone && self.ledger.memory.image() == Some(image)
    }

    /// Sleeps in place: no sandbox, a note in /run, and the ledger agrees with it.
    pub(super) fn hibernated_in(&self) -> Option<&ImageId> {
        let record = self.observed.record.as_ref()?;
        let agreed = self.ledger.memory.image() == Some(&record.image);
        (self.observed.live == Live::None && agreed).then_some(&record.image)
    }
}

pub(super) fn dozes_unsaved(observed: &Observed) -> bool {
    observed.dozes_unsaved && observed.capable.is_err()
}

/// It sleeps since before the time at which it is to be awake, which has come.
fn is_called(desired: &Desired, observed: &Observed, now: Timestamp) -> bool {
    let asked = desired.called_at(now).zip(observed.asleep_since);
    let sleeps = matches!(desired.power, Power::Awake | Power::Asleep) && !desired.suspending();
    sleeps && asked.is_some_and(|(at, since)| since < at)
}

/// Since when nobody has needed it. Whoever set the time at which it is awake needs it then.
fn idle_since(desired: &Desired, observed: &Observed, now: Timestamp) -> Option<Timestamp> {
    let since = observed.idle_since?;
    Some(desired.called_at(now).map_or(since, |at| since.max(at)))
}

/// What a sandbox that shall run does because nobody needs it; none: it runs.
fn of_idleness(
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
    // What dozes has its memory in an image: it is kept, where a sandbox that is awake ends as any other.
    let evicted = desired.evicted && observed.live == Live::Paused && observed.doze.is_some();
    if evicted || sleeps_by_itself(desired, observed, ledger) {
        return Some(Power::Asleep);
    }
    let is_unready = observed.live == Live::Running && !desired.ready;
    if desired.pod != PodPresence::Present || is_unready || !is_watched {
        return None;
    }
    // Whoever needs it has resumed it: what dozes sleeps on, since when it is idle or not. So does what dozes for the node's sake: it is
    // not asked any more, and may have no time of its own.
    let dozes = observed.live == Live::Paused && observed.doze.is_some();
    let pressure = &desired.pressure;
    let for_the_node = dozes_unsaved(observed) && pressure.may && !pressure.never_dozes;
    let sleeps_on = dozes && (desired.sleep.doze.is_some() || for_the_node);
    let dozing = sleeps_on || is_over(desired.sleep.doze);
    // What exec has left behind goes on after a doze, and not after a restore.
    if is_over(desired.sleep.hibernate) && observed.left_by_exec.is_empty() {
        Some(Power::Asleep)
    } else if dozing && observed.can_doze.is_ok() {
        Some(Power::Dozing)
    } else {
        None
    }
}

/// After a sleep that failed for that reason, until when no other is tried but one that is asked for.
fn unwatched_until(observed: &Observed, policy: &Policy) -> Option<Timestamp> {
    let failure = observed.failures.save.as_ref()?;
    let until = || failure.retry_at(policy.idle_backoff_min, policy.idle_backoff_max);
    (failure.reason == NOT_WATCHED).then(until)
}

/// When it falls asleep, or deeper, if nothing happens before.
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

/// It fell asleep by itself, and nobody has needed it since: whoever does wakes it. It is woken when it may not sleep any more.
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
