//! The transitions of a sandbox that need no agent: it runs on, wakes, stays in its image, or
//! starts anew from one.
//!
//! Each transition is written once, over the facts and acts of a [`Sandbox`]. The shim
//! provides those of a node, the simulation (`tests/sim`) those of its world, where each act
//! can fail or be the last one of its process. A caller holds the sandbox' lock.
//!
//! | transition | from | to |
//! |---|---|---|
//! | [`resume`] | paused | running, by the one rule for sandboxes with an image |
//! | [`run_on`] | paused | running: resumed, or restored where it cannot be resumed |
//! | [`wake`] | hibernated | running, in place |
//! | [`wake_up`] | dozing or hibernated | running, for a caller that needs the sandbox |
//! | [`stay_in_image`] | paused with an image | hibernated |
//! | [`restore`], [`restore_planned`] | an image | running, with the ledger's entries around it |
//! | [`rest`] | a new sandbox | hibernated, without ever having run |
//! | [`before_signal`] | any | as a container that receives a signal needs it |
//! | [`settle`] | a wake that was cut off | running, if the ledger says so |
//! | [`source`] | a new sandbox | whether it starts cold or from an image |
//! | [`rests`] | a new sandbox with an image | whether it sleeps on or runs |
//!
//! Facts are methods and no fields: reading one takes a part of a millisecond, and a wake reads
//! only those that its decision depends on.

use crate::ids::ImageId;
use crate::ledger::{Entry, LedgerState, Memory};

mod after;
mod sandbox;

pub use after::runs_on_after;
pub use sandbox::{
    Awake, Holding, Left, NOT_HELD_OPEN, Origin, Pause, Paused, Ran, Recorded, Refusal, Resumed,
    Sandbox,
};

/// Lets a paused sandbox run. The one rule for that: an image is stale from the first instruction
/// on, so the ledger says [`Entry::Awake`] before (`left`). A sandbox with an image and without a
/// gofer is not resumed: the image is its memory again. Without an image there is nothing to go
/// back to, and it is resumed.
pub fn resume<S: Paused>(sandbox: &S, left: Option<&Left>) -> Result<Resumed, S::Error> {
    let undone = |error: S::Error| match left.map(|left| sandbox.take_back(left)) {
        Some(Err(not_taken_back)) => not_taken_back,
        Some(Ok(())) | None => error,
    };
    if !sandbox.is_paused().map_err(undone)? {
        return Ok(Resumed::RanAlready);
    }
    if let Some(left) = left
        && !sandbox.has_gofers().map_err(undone)?
    {
        sandbox.take_back(left)?;
        return Ok(Resumed::GoferGone);
    }
    match sandbox.let_run() {
        Ok(true) => Ok(Resumed::Runs),
        Ok(false) => Ok(Resumed::RanAlready),
        Err(error) if S::never_ran(&error) => Err(undone(error)),
        Err(error) => Err(error),
    }
}

/// Lets a paused sandbox run: resumed, or restored from its image where it cannot be resumed.
pub fn run_on<S: Sandbox>(sandbox: &S) -> Result<Ran, S::Error> {
    match sandbox.pause()? {
        Some(_) => run_paused(sandbox),
        None => Ok(Ran::Already),
    }
}

/// Lets a sandbox run that dozes; leaves any other as it is.
pub fn rouse<S: Sandbox>(sandbox: &S) -> Result<Ran, S::Error> {
    match sandbox.pause()? {
        Some(Pause::Doze) => run_paused(sandbox),
        Some(Pause::Other) | None => Ok(Ran::Already),
    }
}

/// Resumes a sandbox that dozes, and does nothing else: one that has lost a gofer stays as it is.
pub fn resume_dozing<S: Sandbox>(sandbox: &S) -> Result<Resumed, S::Error> {
    match sandbox.pause()? {
        Some(Pause::Doze) => resume_paused(sandbox),
        Some(Pause::Other) | None => Ok(Resumed::RanAlready),
    }
}

fn run_paused<S: Sandbox>(sandbox: &S) -> Result<Ran, S::Error> {
    match resume_paused(sandbox)? {
        Resumed::Runs => Ok(Ran::Resumed),
        Resumed::RanAlready => Err(S::refuse(Refusal::Unlocked)),
        Resumed::GoferGone => match stay_in_image(sandbox)? {
            true => wake(sandbox).map(|_| Ran::Restored),
            false => Err(S::refuse(Refusal::Unrestorable)),
        },
    }
}

/// Records in the ledger that the sandbox is awake, and resumes it.
fn resume_paused<S: Sandbox>(sandbox: &S) -> Result<Resumed, S::Error> {
    let known = sandbox.ledger()?;
    let holding = |image: &ImageId| sandbox.holding(image);
    let Some(image) = outlived(&known.memory, holding).cloned() else {
        return resume(sandbox, None);
    };
    // Checked before the ledger says Awake, so that a crash here does not make the image stale.
    if !sandbox.has_gofers()? {
        return Ok(Resumed::GoferGone);
    }
    // Without an image the sandbox is resumed in any case: a caller may have to end it.
    if holding(&image) == Holding::Held {
        ensure_held_open(sandbox)?;
    }
    let seq = sandbox.append(&Entry::Awake)?;
    resume(sandbox, Some(&Left { image, seq }))
}

/// Fails where the kubelet is about to recreate the Pod's sandbox: one that woke would be ended,
/// and its memory with it.
fn ensure_held_open<S: Sandbox>(sandbox: &S) -> Result<(), S::Error> {
    match sandbox.is_held_open()? {
        true => Ok(()),
        false => Err(S::refuse(Refusal::NotHeldOpen)),
    }
}

/// Fails where the sandbox is being suspended and has its memory in an image: what it did in this
/// Pod would be lost, and its image would be stale. A Pod that has not run yet is restored first,
/// and saved.
pub fn ensure_stays<S: Sandbox>(sandbox: &S) -> Result<(), S::Error> {
    match sandbox.ledger()?.memory.image().is_some() && sandbox.is_suspended()? {
        true => Err(S::refuse(Refusal::Suspending)),
        false => Ok(()),
    }
}

/// The image that a sandbox leaves behind when it runs on. A committed image is left behind also
/// while it is missing or unreadable: it may be there again later, and would be taken for the
/// sandbox' memory. An image that was only being made may never have become one.
fn outlived(memory: &Memory, holding: impl Fn(&ImageId) -> Holding) -> Option<&ImageId> {
    match memory {
        Memory::Saving { image } if holding(image) == Holding::Missing => None,
        memory => memory.image(),
    }
}

/// The image that holds the sandbox' memory, by the ledger, if the store holds it.
pub fn memory_image<S: Sandbox>(sandbox: &S) -> Result<Option<ImageId>, S::Error> {
    let known = sandbox.ledger()?;
    let held = |image: &ImageId| sandbox.holding(image) == Holding::Held;
    Ok(known.restorable(held).cloned())
}

/// The image that is the memory of a paused sandbox for as long as it is paused.
pub fn paused_image<S: Sandbox>(sandbox: &S) -> Result<Option<ImageId>, S::Error> {
    match sandbox.pause()? {
        Some(_) => memory_image(sandbox),
        None => Ok(None),
    }
}

/// Ends a paused sandbox whose memory is in an image: it loses a container or a gofer, and would
/// run on without that container's memory. Returns whether there was such an image.
pub fn stay_in_image<S: Sandbox>(sandbox: &S) -> Result<bool, S::Error> {
    let Some(image) = paused_image(sandbox)? else {
        return Ok(false);
    };
    sandbox.append(&Entry::Asleep {
        image: image.clone(),
        by_itself: true,
    })?;
    sandbox.end(&image)?;
    Ok(true)
}

/// Returns the node's record, after it has recorded a wake that was cut off after [`Entry::Awake`].
pub fn settle<S: Sandbox>(sandbox: &S) -> Result<Recorded, S::Error> {
    let recorded = sandbox.recorded()?;
    let hibernated = matches!(recorded, Recorded::Hibernated { .. });
    if !hibernated || sandbox.ledger()?.memory != Memory::Live {
        return Ok(recorded);
    }
    sandbox.catch_up()?;
    Ok(Recorded::Running)
}

/// Wakes a hibernated sandbox in place; returns whether it was hibernated.
pub fn wake<S: Sandbox>(sandbox: &S) -> Result<bool, S::Error> {
    match settle(sandbox)? {
        Recorded::Running => Ok(false),
        Recorded::Restoring => Err(S::refuse(Refusal::Restoring)),
        Recorded::Hibernated { image, unstarted } => {
            ensure_stays(sandbox)?;
            ensure_held_open(sandbox)?;
            let place = match unstarted {
                None => Place::Here,
                Some(origin) => Place::Anew {
                    takes: false,
                    tries_again: true,
                    never_ran: origin == Origin::Golden,
                },
            };
            restore(sandbox, &image, place).map(|()| true)
        }
    }
}

/// Lets a new sandbox sleep in its image, without a process. Its first wake prepares it as a
/// restore in a new place does. `own`: the image is the Pod's.
pub fn rest<S: Sandbox>(
    sandbox: &S,
    image: &ImageId,
    origin: Origin,
    own: bool,
) -> Result<(), S::Error> {
    let image = match own {
        true => image.clone(),
        false => {
            let image = sandbox.copy(image)?;
            sandbox.append(&Entry::Committed {
                image: image.clone(),
            })?;
            image
        }
    };
    sandbox.append(&Entry::Asleep {
        image: image.clone(),
        by_itself: false,
    })?;
    sandbox.report()?;
    sandbox.sleep_unstarted(&image, origin)
}

/// Decides whether a new sandbox sleeps on in its image, because its Pod is requested to sleep
/// (`asleep`). `own`: the image is the Pod's. `golden`: the image is a golden one, or a copy of one
/// from which the Pod has not run. Any other image is restored first, and saved.
pub fn rests(
    ledger: &LedgerState,
    image: &ImageId,
    own: bool,
    golden: bool,
    asleep: bool,
) -> Option<Origin> {
    // A sandbox that goes back to an older image is restored from it before it may sleep.
    let is_memory = ledger.memory.image() == Some(image) && !ledger.was_left(image);
    let origin = match golden {
        true => Origin::Golden,
        false => Origin::Own,
    };
    let may = match own {
        true => is_memory,
        false => golden,
    };
    (asleep && may).then_some(origin)
}

/// How a caller that needs the sandbox found it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Found {
    Awake,
    Dozing,
    Hibernated,
}

/// Wakes the sandbox for a caller that needs it, from a doze or from its image. A frozen sandbox is
/// not woken.
pub fn wake_up<S: Sandbox>(sandbox: &S) -> Result<Found, S::Error> {
    match sandbox.recorded()? {
        Recorded::Restoring => Err(S::refuse(Refusal::Restoring)),
        Recorded::Hibernated { .. } => wake(sandbox).map(|_| Found::Hibernated),
        Recorded::Running => match sandbox.pause()? {
            None => Ok(Found::Awake),
            Some(Pause::Doze) => run_paused(sandbox).map(|_| Found::Dozing),
            Some(Pause::Other) => Err(S::refuse(Refusal::Frozen)),
        },
    }
}

/// Place of a restore.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// In the Pod where it hibernated.
    Here,
    /// In a new sandbox.
    Anew {
        /// The image is another Pod's, and no third one may go on from it.
        takes: bool,
        /// A restore that fails gives a taken image back; otherwise the Pod starts cold.
        tries_again: bool,
        /// The Pod never ran: it starts cold where the image cannot be restored.
        never_ran: bool,
    },
}

/// Restores the sandbox, with the ledger's entries around it. A Pod takes another Pod's image
/// before anything runs, and once more before [`Entry::Awake`]: an earlier sandbox of the Pod may
/// have given it back meanwhile. The report of a restore is written before the ledger says that the
/// sandbox runs: a process that finds it running writes none.
pub fn restore<S: Sandbox>(sandbox: &S, image: &ImageId, place: Place) -> Result<(), S::Error> {
    sandbox.open(image)?;
    let anew = place != Place::Here;
    let takes = matches!(place, Place::Anew { takes: true, .. });
    let waking = sandbox.append(&Entry::Waking {
        image: image.clone(),
    })?;
    let take = || match takes {
        true => sandbox.take(image),
        false => Ok(()),
    };
    let awake = |release: &dyn Fn()| {
        ensure_held_open(sandbox)?;
        if anew {
            sandbox.renew(release)?;
        }
        take()?;
        if anew {
            sandbox.report()?;
        }
        sandbox.append_at(waking, &Entry::Awake)
    };
    let restored = take().and_then(|()| sandbox.restore(image, &awake));
    if let Err(error) = &restored {
        let failed = Entry::WakeFailed {
            image: image.clone(),
            reason: S::reason(error),
        };
        match sandbox.append_at(waking, &failed) {
            // A Pod that starts cold leaves the image's memory behind for good.
            Ok(()) => match place {
                Place::Anew {
                    takes: true,
                    tries_again: true,
                    ..
                } => sandbox.give_back(image)?,
                Place::Anew {
                    never_ran: true, ..
                } if S::is_final(error) => sandbox.start_cold(image, error)?,
                Place::Anew { .. } | Place::Here => {}
            },
            // The kubelet has made another sandbox of the Pod meanwhile, which records its own
            // restore.
            Err(fenced) if S::is_fenced(&fenced) => {}
            Err(error) => return Err(error),
        }
    }
    restored
}

/// Restores a hibernated sandbox for a step of a plan, which has appended [`Entry::Waking`] and
/// appends the entry of a failure, unless the Pod starts cold.
pub fn restore_planned<S: Sandbox>(sandbox: &S, image: &ImageId) -> Result<(), S::Error> {
    ensure_held_open(sandbox)?;
    let unstarted = match sandbox.recorded()? {
        Recorded::Hibernated { unstarted, .. } => unstarted,
        Recorded::Running | Recorded::Restoring => None,
    };
    let waking = sandbox.ledger()?.seq;
    let awake = |release: &dyn Fn()| {
        ensure_held_open(sandbox)?;
        if unstarted.is_some() {
            sandbox.renew(release)?;
        }
        sandbox.append_at(waking, &Entry::Awake)
    };
    let opened = sandbox.open(image);
    let restored = opened.and_then(|()| sandbox.restore(image, &awake));
    if let Err(error) = &restored
        && unstarted == Some(Origin::Golden)
        && S::is_final(error)
    {
        let failed = Entry::WakeFailed {
            image: image.clone(),
            reason: S::reason(error),
        };
        // Another sandbox of the Pod may have gone on with the ledger.
        match sandbox.append_at(waking, &failed) {
            Ok(()) => sandbox.start_cold(image, error)?,
            Err(fenced) if S::is_fenced(&fenced) => {}
            Err(error) => return Err(error),
        }
    }
    restored
}

/// How a container receives a signal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Delivery {
    /// Its keeper has ended: the signal is for what is left of a container that has ended.
    Orphan,
    /// Its program does not run, but processes of a restore that was cut off may.
    Remains,
    /// Its program is in an image: the keeper ends in its place.
    Keeper,
    /// The sandbox runs, and its program with it.
    Program,
}

/// Brings the sandbox into the state in which a container can receive a signal. `ends`: the signal,
/// unhandled, ends the program. No signal wakes a sandbox that is being suspended: its OCI image
/// may name any as its stop signal (SIGWINCH, SIGUSR1), and its program goes on in another Pod.
pub fn before_signal<S: Sandbox>(
    sandbox: &S,
    ends: bool,
    keeper_has_ended: impl FnOnce() -> bool,
) -> Result<Delivery, S::Error> {
    let recorded = settle(sandbox)?;
    if recorded == Recorded::Running && keeper_has_ended() {
        return Ok(Delivery::Orphan);
    }
    // An unreadable record of the suspension is none: the signal is delivered.
    let ends = ends || sandbox.is_suspended().unwrap_or(false);
    match recorded {
        Recorded::Hibernated { .. } | Recorded::Restoring if ends => Ok(Delivery::Remains),
        Recorded::Hibernated { .. } => wake(sandbox).map(|_| Delivery::Program),
        Recorded::Restoring => Err(S::refuse(Refusal::Restoring)),
        // A save was cut off between the commit and the end of the processes: the image is the
        // sandbox, and one that ran on would make it stale in vain. A sandbox that dozes is resumed
        // in a millisecond, and its program handles its end.
        Recorded::Running if ends && is_saved(sandbox)? => Ok(Delivery::Keeper),
        // The sandbox may not be woken, and what it has lost does not come back: a caller that ends
        // it must not wait for that.
        Recorded::Running if ends && !sandbox.is_held_open()? && stay_in_image(sandbox)? => {
            Ok(Delivery::Keeper)
        }
        // A paused container handles no signal.
        Recorded::Running => run_on(sandbox).map(|_| Delivery::Program),
    }
}

/// Returns whether the sandbox is paused with its memory in an image, and does not doze.
fn is_saved<S: Sandbox>(sandbox: &S) -> Result<bool, S::Error> {
    Ok(sandbox.pause()? == Some(Pause::Other) && memory_image(sandbox)?.is_some())
}

/// Source of a new sandbox' memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    /// From its programs, as Kubernetes starts them.
    Cold,
    /// From an image: the Pod's own, because its sandbox was taken away while it slept (reboot,
    /// killed shim), or the one that its Sandbox left. `copy`: the user named the image, which may
    /// be stale and may be used again.
    Image { image: ImageId, copy: bool },
}

/// Chooses the source of a new sandbox. A Pod that has run goes on only from the image that it
/// sleeps in. After a crash while awake it starts cold, as Kubernetes would start it, or from the
/// last image that it left behind (`last`) if its user wishes that. `given`: the image of the Pod's
/// annotation.
pub fn source(
    ledger: &LedgerState,
    held: impl Fn(&ImageId) -> bool,
    given: Option<ImageId>,
    copy: bool,
    last: Option<ImageId>,
) -> Source {
    let crashed = || last.map_or(Source::Cold, |image| Source::Image { image, copy: true });
    match (&ledger.memory, given) {
        // The sandbox died during a save that was not finished: there is no image.
        (Memory::Saving { image }, _) if !held(image) => crashed(),
        (Memory::Live, Some(image)) if ledger.seq == 0 => Source::Image { image, copy },
        (Memory::Live, _) => crashed(),
        (memory, given) => match memory.image() {
            Some(image) => Source::Image {
                image: image.clone(),
                copy: copy && given.as_ref() == Some(image),
            },
            None => Source::Cold,
        },
    }
}

#[cfg(test)]
mod tests;
