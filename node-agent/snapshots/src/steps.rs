//! Steps and the ledger: the fence of a step, its entries, and the acts that concern only the
//! store.

use std::time::{Duration, Instant};

use torpor_core::Entry;
use torpor_core::ids::{ImageId, Namespace, PodUid, SandboxId};
use torpor_core::ledger::{LedgerState, Memory};
use torpor_core::state::ImageState;
use torpor_core::steps::{Action, Outcome, Step};
use torpor_core::transition::Left;

use crate::ledger_file::{self, LedgerFile};
use crate::store::{Listed, Removed, SaveError, Store};

/// The Pod of a step, as its images and its ledger are found.
#[derive(Debug, Clone, Copy)]
pub struct Place<'a> {
    pub store: &'a Store,
    pub namespace: &'a Namespace,
    pub pod: &'a PodUid,
    /// The Pod's sandbox; none if it has none.
    pub sandbox: Option<&'a SandboxId>,
}

impl Place<'_> {
    /// Returns whether the image lies whole in the store.
    pub fn holds(&self, image: &ImageId) -> bool {
        self.store.image(self.namespace, image).is_ok()
    }
}

/// The act of a step.
pub trait Act {
    /// Returns a failure in place of the step; it comes before the step's first entry. `memory`:
    /// the image that is the sandbox' memory until the step lets the sandbox run.
    fn refuse(&mut self, action: &Action, memory: Option<&ImageId>) -> Option<Outcome>;

    /// Acts. `left`: the image that was the sandbox' memory until the step's first entry.
    fn act(&mut self, action: &Action, ledger: &LedgerFile, left: Option<&Left>) -> Outcome;
}

/// Takes steps until one does not succeed, and reports the index, outcome and duration of each.
/// Returns the outcome of the last step that was taken.
pub fn take_each(
    steps: &[Step],
    mut take: impl FnMut(&Step) -> Outcome,
    mut report: impl FnMut(usize, Outcome, Duration),
) -> Option<Outcome> {
    let mut last = None;
    for (index, step) in steps.iter().enumerate() {
        let began = Instant::now();
        let outcome = take(step);
        report(index, outcome.clone(), began.elapsed());
        let goes_on = outcome.is_success();
        last = Some(outcome);
        if !goes_on {
            break;
        }
    }
    last
}

/// Takes one step: checks the fence, writes the entry before, acts, writes the entry after.
pub fn take(place: &Place<'_>, step: &Step, act: &mut impl Act) -> Outcome {
    let opened = place.store.ledger(place.pod).and_then(|ledger| {
        let state = read_for(&ledger, step)?;
        Ok((ledger, state))
    });
    let (ledger, state) = match opened {
        Ok(opened) => opened,
        Err(error) => return Outcome::failed(error.reason(), &error),
    };
    if step.fence.pod_uid != *place.pod
        || step.fence.sandbox_id.as_ref() != place.sandbox
        || step.fence.ledger_seq != state.seq
    {
        return Outcome::Stale;
    }
    let memory = state
        .restorable(|image| place.holds(image))
        .filter(|_| step.before == Some(Entry::Awake));
    if let Some(refused) = act.refuse(&step.action, memory) {
        return refused;
    }
    let seq = match begin(&ledger, step) {
        Ok(seq) => seq,
        Err(outcome) => return outcome,
    };
    let left = memory.map(|image| Left {
        image: image.clone(),
        seq,
    });
    let outcome = act.act(&step.action, &ledger, left.as_ref());
    // A newer sandbox of the Pod, made while this one's keeper did not answer, may have written
    // its own entries. Then the append fails.
    if let Some(entry) = entry_after(step, &outcome, &ledger)
        && let Err(error) = ledger.append_at(seq, &entry)
    {
        return Outcome::unknown(&error);
    }
    outcome
}

/// Returns the entry that follows the act.
fn entry_after(step: &Step, outcome: &Outcome, ledger: &LedgerFile) -> Option<Entry> {
    match (outcome, &step.action) {
        (Outcome::Done | Outcome::Already, Action::DiscardLedger) => None,
        // The wake has written the entry already, before the sandbox could send anything.
        (Outcome::Done, Action::Wake { .. }) if is_awake(ledger) => None,
        (Outcome::Done | Outcome::Already, _) => step.after.clone(),
        (Outcome::Failed { reason, .. }, Action::Wake { image }) => Some(Entry::WakeFailed {
            image: image.clone(),
            reason: reason.clone(),
        }),
        _ => None,
    }
}

/// Appends the entry that must be durable before the act. Returns the ledger's number after it.
///
/// `Err(Stale)`: the ledger has newer entries than the step's fence, because a restore of
/// the sandbox writes entries too.
fn begin(ledger: &LedgerFile, step: &Step) -> Result<u64, Outcome> {
    let planned_for = step.fence.ledger_seq;
    let Some(entry) = &step.before else {
        return Ok(planned_for);
    };
    match ledger.append_at(planned_for, entry) {
        Ok(state) => Ok(state.seq),
        Err(ledger_file::Error::Fenced { .. }) => Err(Outcome::Stale),
        Err(error) => Err(Outcome::failed(error.reason(), &error)),
    }
}

/// Reads the ledger for a step.
///
/// A ledger that cannot be trusted reads as empty for a step that was planned without it and writes
/// no entry: so a paused sandbox is resumed, and the remains of a Pod that is gone are removed with
/// the ledger.
fn read_for(ledger: &LedgerFile, step: &Step) -> Result<LedgerState, ledger_file::Error> {
    use ledger_file::Error::{Corrupt, TooLarge, Unsafe};
    let needs_none = step.before.is_none() && step.after.is_none() && step.fence.ledger_seq == 0;
    match ledger.read() {
        Err(Corrupt { .. } | TooLarge { .. } | Unsafe(_)) if needs_none => {
            Ok(LedgerState::default())
        }
        read => read,
    }
}

/// Returns whether the sandbox is awake by its ledger.
fn is_awake(ledger: &LedgerFile) -> bool {
    ledger
        .read()
        .is_ok_and(|state| state.memory == Memory::Live)
}

/// Acts on the store alone. None: the action needs a sandbox.
pub fn act_on_store(place: &Place<'_>, action: &Action, ledger: &LedgerFile) -> Option<Outcome> {
    let (store, namespace) = (place.store, place.namespace);
    Some(match action {
        Action::Record => Outcome::Done,
        Action::DiscardPartial { image } => removed(store.remove_partial(namespace, image)),
        Action::DiscardImage { image } => removed(store.remove_image(namespace, image)),
        Action::ReleaseImage { image } => release_image(place, image),
        Action::DiscardLedger => match ledger.remove() {
            Ok(Removed::Done) => Outcome::Done,
            Ok(Removed::Already) => Outcome::Already,
            Err(error) => Outcome::failed(error.reason(), &error),
        },
        Action::Pause
        | Action::Freeze
        | Action::Doze
        | Action::Reclaim { .. }
        | Action::Resume
        | Action::Checkpoint { .. }
        | Action::Commit { .. }
        | Action::End { .. }
        | Action::Wake { .. }
        | Action::Bind { .. }
        | Action::ForgetSleep => return None,
    })
}

/// The acts for a Pod without a sandbox.
#[derive(Debug)]
pub struct OnStore<'a>(pub &'a Place<'a>);

impl Act for OnStore<'_> {
    fn refuse(&mut self, _: &Action, _: Option<&ImageId>) -> Option<Outcome> {
        None
    }

    fn act(&mut self, action: &Action, ledger: &LedgerFile, _: Option<&Left>) -> Outcome {
        act_on_store(self.0, action, ledger).unwrap_or_else(|| Outcome::Failed {
            reason: "SandboxGone".to_owned(),
            message: "the Pod has no sandbox on this node".to_owned(),
        })
    }
}

/// Releases another Pod's image that this Pod had taken. The store finds its namespace.
///
/// If the image is missing but the ledger of the Pod that made it has it, the image is only
/// away for a while, and the step fails.
fn release_image(place: &Place<'_>, image: &ImageId) -> Outcome {
    let store = place.store;
    let listed = store.list_pod(image.pod()).and_then(|mut listed| {
        listed.extend(store.fetched().list_pod(image.pod())?);
        Ok(listed)
    });
    let released = listed.and_then(|listed| {
        let whole = |one: &Listed| one.id == *image && one.state == ImageState::Committed;
        let found = listed.into_iter().find(whole);
        found
            .map(|one| store.image(&one.namespace, image)?.release(place.pod))
            .transpose()
    });
    let maker = store.ledger(image.pod()).and_then(|ledger| ledger.read());
    match released {
        Ok(None) if maker.is_ok_and(|state| state.images.contains_key(image)) => Outcome::Failed {
            reason: "ImageMissing".to_owned(),
            message: format!("cannot give back image {image}: it is not in the store"),
        },
        Ok(None | Some(Removed::Already)) => Outcome::Already,
        Ok(Some(Removed::Done)) => Outcome::Done,
        Err(error) => Outcome::failed(error.reason(), &error),
    }
}

fn removed(result: Result<Removed, SaveError>) -> Outcome {
    match result {
        Ok(Removed::Done) => Outcome::Done,
        Ok(Removed::Already) => Outcome::Already,
        Err(error) => Outcome::failed(error.reason(), &error),
    }
}

#[cfg(test)]
mod tests;
