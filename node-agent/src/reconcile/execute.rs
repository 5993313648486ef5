//! Steps, done. One arm per action, one call per arm, no choices: what is to happen was decided in `torpor-core`.

use std::cell::{Cell, RefCell};
use std::time::{Duration, Instant};

use jiff::Timestamp;
use torpor_core::Entry;
use torpor_core::ids::{ContainerId, ImageId, Namespace, PodUid, SandboxId};
use torpor_core::ledger::{LedgerState, Memory};
use torpor_core::state::{ImageState, NOT_WATCHED};
use torpor_core::steps::{Action, Outcome, Step};
use torpor_records::Role;
use torpor_records::{self, ContainerRecord, Depth, PodLock, PodRecord, WakeCause, WakeNote};
use torpor_runsc::control::Control;
use torpor_runsc::held_open::{self, NOT_HELD_OPEN};
use torpor_runsc::keeper::{self, Request, Rules, Verb};
use torpor_runsc::pause;
use torpor_runsc::programs;
use torpor_runsc::resume::{self, Left, Resumed};
use torpor_runsc::save;
use torpor_snapshots::{
    LedgerFile, Listed, ManifestDraft, Partial, Removed, SaveError, ledger_file,
};

use crate::install::OCI;
use crate::policy::left;
use crate::policy::probe_gap;
use crate::policy::saves;
use crate::reconcile::driver::saved_name;
use crate::reconcile::node::{CALL_LIMIT, Node};
use crate::reconcile::observe::words;

mod room;
pub(crate) use room::no_room;
use room::{force_end, no_room_for, save_limit, stop_of};

/// The kubelet gives an exec two minutes.
const WAKE_LIMIT: Duration = Duration::from_secs(110);

/// The sandbox ended before it heard what was asked of it.
const NOT_HEARD: &str = "SandboxEnded";
const SHIM_GONE: &str = "ShimGone";

/// One step's surroundings.
pub(crate) struct Context<'a> {
    pub(crate) node: &'a Node,
    pub(crate) pod: &'a PodUid,
    pub(crate) namespace: &'a Namespace,
    /// The sandbox, with its lock; none when the Pod has none.
    pub(crate) sandbox: Option<(&'a PodRecord, &'a PodLock)>,
    /// What its keeper goes by while it sleeps, at the time of the call.
    pub(crate) rules: &'a dyn Fn() -> Rules,
    /// Nobody has asked for the sleep that the plan is for.
    pub(crate) by_itself: bool,
    /// When the plan was made: who needs the sandbox at a later time needs it after it has fallen asleep by it.
    pub(crate) decided: Timestamp,
    /// Who wants it, if this wakes it.
    pub(crate) cause: WakeCause,
    /// The limit of the Pod's namespace applies to an image of its sandbox.
    pub(crate) limited: bool,
    /// What a commit writes into the manifest.
    pub(crate) draft: &'a dyn Fn() -> ManifestDraft,
    /// The image that a checkpoint of this plan wrote and that waits for its commit.
    pub(crate) partial: RefCell<Option<Partial>>,
    /// Bytes of images that this plan wrote, whatever became of them.
    pub(crate) written: Cell<u64>,
}

/// Does steps until one does not succeed, and tells of each. A sandbox that runs is not stopped for what there is no room for: `stops_for`
/// then fails before the first step is done.
pub(crate) fn run(
    steps: &[Step],
    stops_for: Option<&Step>,
    no_room: impl FnOnce() -> Option<Outcome>,
    mut act: impl FnMut(&Step) -> Outcome,
    mut tell: impl FnMut(&Step, &Outcome, Duration),
) {
    let began = Instant::now();
    if let Some(step) = stops_for
        && let Some(refused) = no_room()
    {
        return tell(step, &refused, began.elapsed());
    }
    for step in steps {
        let began = Instant::now();
        let outcome = act(step);
        tell(step, &outcome, began.elapsed());
        if !matches!(outcome, Outcome::Done | Outcome::Already) {
            break;
        }
    }
}

/// Does one step: fence, ledger, act, ledger.
pub(crate) fn execute(context: &Context<'_>, step: &Step) -> Outcome {
    let opened = context.node.store.ledger(context.pod).and_then(|ledger| {
        let state = read_for(&ledger, step)?;
        Ok((ledger, state))
    });
    let (ledger, state) = match opened {
        Ok(opened) => opened,
        Err(error) => return failed(error.reason(), &error),
    };
    let current = context.sandbox.map(|(record, _)| record.sandbox.clone());
    if step.fence.pod_uid != *context.pod
        || step.fence.sandbox_id != current
        || step.fence.ledger_seq != state.seq
    {
        return Outcome::Stale;
    }
    let held = |image: &ImageId| context.node.store.image(context.namespace, image).is_ok();
    // The memory of a sandbox that is about to run.
    let left = state
        .restorable(held)
        .filter(|_| step.before == Some(Entry::Awake));
    if let Some(image) = left.filter(|_| step.action == Action::Resume)
        && is_broken(context)
    {
        return end_broken(context, image);
    }
    let seq = match begin(&ledger, step) {
        Ok(seq) => seq,
        Err(outcome) => return outcome,
    };
    let left = left.map(|image| (image, seq));
    let outcome = act(context, &step.action, &ledger, left);
    let entry = match (&outcome, &step.action) {
        (Outcome::Done | Outcome::Already, Action::DiscardLedger) => None,
        // Written by who woke it, before anybody could hear the sandbox.
        (Outcome::Done, Action::Wake { .. }) if is_awake(&ledger) => None,
        (Outcome::Done | Outcome::Already, _) => step.after.clone(),
        (Outcome::Failed { reason, .. }, Action::Wake { image }) => Some(Entry::WakeFailed {
            image: image.clone(),
            reason: reason.clone(),
        }),
        _ => None,
    };
    // Another sandbox of the Pod, made while this one's keeper did not answer, may have written what is true of it.
    if let Some(entry) = entry
        && let Err(error) = ledger.append_at(seq, &entry)
    {
        return Outcome::Unknown {
            message: words(&error),
        };
    }
    outcome
}

/// Appends what must be durable before the act; answers how far the ledger is then. It may have gone on since the step's fence was looked at: whoever restores the sandbox writes too.
fn begin(ledger: &LedgerFile, step: &Step) -> Result<u64, Outcome> {
    let planned_for = step.fence.ledger_seq;
    let Some(entry) = &step.before else {
        return Ok(planned_for);
    };
    match ledger.append_at(planned_for, entry) {
        Ok(state) => Ok(state.seq),
        Err(ledger_file::Error::Fenced { .. }) => Err(Outcome::Stale),
        Err(error) => Err(failed(error.reason(), &error)),
    }
}

/// What the ledger says. One that cannot be trusted says nothing to a step that was planned without it and writes nothing into it: a sandbox that stands
/// still runs on, and what a Pod that is gone has left is removed, the ledger with it.
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

fn is_awake(ledger: &LedgerFile) -> bool {
    ledger
        .read()
        .is_ok_and(|state| state.memory == Memory::Live)
}

fn act(
    context: &Context<'_>,
    action: &Action,
    ledger: &LedgerFile,
    left: Option<(&ImageId, u64)>,
) -> Outcome {
    let node = context.node;
    match action {
        Action::Pause => pause(context),
        Action::Freeze => {
            let outcome = pause(context);
            tell_keeper(context, &Request::Freeze((context.rules)()));
            outcome
        }
        Action::Doze => doze(context),
        Action::Reclaim { image: Some(image) } => reclaim(context, image),
        Action::Reclaim { image: None } => without_image(),
        Action::Resume => resume(context, left),
        Action::Checkpoint { image } => checkpoint(context, image),
        Action::Commit { image } => commit(context, image),
        Action::End { image } => run_verb(context, Verb::End, image),
        Action::Wake { image } => run_verb(context, Verb::Wake, image),
        Action::Record => Outcome::Done,
        Action::ForgetSleep => forget_sleep(context),
        Action::DiscardPartial { image } => {
            // The directory that a step before made and did not commit.
            context.partial.replace(None);
            removed(node.store.remove_partial(context.namespace, image))
        }
        Action::DiscardImage { image } => {
            removed(node.store.remove_image(context.namespace, image))
        }
        Action::ReleaseImage { image } => give_back(context, image),
        Action::DiscardLedger => match ledger.remove() {
            Ok(Removed::Done) => Outcome::Done,
            Ok(Removed::Already) => Outcome::Already,
            Err(error) => failed(error.reason(), &error),
        },
    }
}

/// Whether a gofer of the sandbox has ended. Asked again right before the resume, where also what cannot be found out counts.
fn is_broken(context: &Context<'_>) -> bool {
    context.sandbox.is_some_and(|(record, _)| {
        let runsc = context.node.runsc.of(&record.sandbox);
        matches!(runsc.has_its_gofers(record.sandbox.as_str()), Ok(false))
    })
}

fn is_held_open(context: &Context<'_>) -> bool {
    let records = &context.node.records;
    context.sandbox.is_some_and(|(record, _)| {
        matches!(held_open::is_held_open(&records, &record.sandbox), Ok(true))
    })
}

/// The sandbox is about to be ended and made anew: what would run now would be lost.
fn shim_gone(image: &ImageId) -> Outcome {
    Outcome::Failed {
        reason: SHIM_GONE.to_owned(),
        message: format!("{NOT_HELD_OPEN}, which then continues from image {image}"),
    }
}

/// The sandbox cannot run on: its memory is the image's alone, from which the next plan wakes it.
fn end_broken(context: &Context<'_>, image: &ImageId) -> Outcome {
    match run_verb(context, Verb::End, image) {
        Outcome::Done => Outcome::Failed {
            reason: "GoferGone".to_owned(),
            message: format!(
                "a gofer of the sandbox ended while the sandbox slept: the sandbox continues from image {image}"
            ),
        },
        other => other,
    }
}

fn wait_for_lull(context: &Context<'_>) {
    if let Some((record, lock)) = context.sandbox {
        probe_gap::wait(context.node, record, lock, &(context.rules)());
    }
}

fn pause(context: &Context<'_>) -> Outcome {
    wait_for_lull(context);
    let records = &context.node.records;
    if let Some((record, _)) = context.sandbox.filter(|_| !context.by_itself) {
        left::look(context.node, record);
    }
    with_control(context, |control, record| {
        let decided = context.decided.into();
        pause::pause(records, control, &record.sandbox, decided, CALL_LIMIT)
    })
}

fn doze(context: &Context<'_>) -> Outcome {
    wait_for_lull(context);
    let records = &context.node.records;
    let outcome = with_control(context, |control, record| {
        let decided = context.decided.into();
        pause::doze(records, control, &record.sandbox, decided, CALL_LIMIT)
    });
    let refused = tell_keeper(context, &Request::Watch((context.rules)()));
    if let (Outcome::Done | Outcome::Already, Some(unwatched)) =
        (&outcome, unwatched(context.by_itself, refused.as_ref()))
    {
        // The next plan resumes it.
        return unwatched;
    }
    if let Some((record, _)) = context.sandbox {
        tell_those_with_pipes(context.node, &record.sandbox);
    }
    outcome
}

/// Lets the sandbox run on. `left`: the image that was its memory until the ledger said otherwise, with the number of that entry.
fn resume(context: &Context<'_>, left: Option<(&ImageId, u64)>) -> Outcome {
    let Some((record, _)) = context.sandbox else {
        return no_sandbox();
    };
    let (sandbox, records) = (&record.sandbox, &context.node.records);
    let image = left.map(|(image, _)| image);
    let left = match left.map(|(image, seq)| ledger_left(context, image, seq)) {
        Some(Err(error)) => return failed(error.reason(), &error),
        Some(Ok(left)) => Some(left),
        None => None,
    };
    if let Some(image) = image.filter(|_| !is_held_open(context)) {
        return stays(sandbox, left, shim_gone(image));
    }
    let began = Instant::now();
    let dozed = matches!(records.doze(sandbox), Ok(Some(_)));
    let mut control = match context.node.connect(sandbox) {
        Ok(control) => control,
        Err(error) => return stays(sandbox, left, not_done(&error.into())),
    };
    let runsc = context.node.runsc.of(sandbox);
    let resumed = resume::resume(records, &runsc, &mut control, sandbox, left, CALL_LIMIT);
    if !matches!(resumed, Ok(Resumed::GoferGone)) {
        tell_keeper(context, &Request::Release);
    }
    match (resumed, image) {
        (Ok(Resumed::Runs), _) => {
            if dozed {
                note_wake(context, sandbox, began.elapsed());
            }
            Outcome::Done
        }
        (Ok(Resumed::GoferGone), Some(image)) => end_broken(context, image),
        (Ok(Resumed::RanAlready | Resumed::GoferGone), _) => Outcome::Already,
        (Err(resume::Error::Pause(error)), _) => not_done(&error),
        (Err(error), _) => failed("ControlFailed", &error),
    }
}

fn ledger_left(
    context: &Context<'_>,
    image: &ImageId,
    seq: u64,
) -> Result<Left, ledger_file::Error> {
    let ledger = context.node.store.ledger(context.pod)?;
    let image = image.clone();
    Ok(Left { image, ledger, seq })
}

/// The sandbox does not run: the image, if there is one, is its memory again.
fn stays(sandbox: &SandboxId, left: Option<Left>, outcome: Outcome) -> Outcome {
    match left.map(|left| left.take_back(sandbox)) {
        Some(Err(error)) => failed("LedgerFailed", &error),
        Some(Ok(())) | None => outcome,
    }
}

fn note_wake(context: &Context<'_>, sandbox: &SandboxId, took: Duration) {
    let micros = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
    let note = WakeNote {
        cause: context.cause,
        from: Depth::Dozing,
        stages_end_micros: [("resumed".to_owned(), micros)].into(),
    };
    if let Err(error) = context.node.records.write_wake(sandbox, &note) {
        tracing::warn!(pod = %context.pod, error = words(&error), "cannot record the wake");
    }
}

/// The image is another Pod's; where it lies is for the store to find. Its maker's ledger knows of one that is only away for a while.
fn give_back(context: &Context<'_>, image: &ImageId) -> Outcome {
    let store = &context.node.store;
    let released = store.list_pod(image.pod()).and_then(|listed| {
        let whole = |one: &Listed| one.id == *image && one.state == ImageState::Committed;
        let found = listed.into_iter().find(whole);
        found
            .map(|one| store.image(&one.namespace, image)?.release(context.pod))
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
        Err(error) => failed(error.reason(), &error),
    }
}

fn removed(result: Result<Removed, SaveError>) -> Outcome {
    match result {
        Ok(Removed::Done) => Outcome::Done,
        Ok(Removed::Already) => Outcome::Already,
        Err(error) => failed(error.reason(), &error),
    }
}

fn failed(reason: &str, error: &(dyn std::error::Error + 'static)) -> Outcome {
    Outcome::Failed {
        reason: reason.to_owned(),
        message: words(error),
    }
}

/// A gVisor sandbox whose memory is pushed out is in an image too: nothing is done without.
fn without_image() -> Outcome {
    Outcome::Failed {
        reason: "NoImage".to_owned(),
        message: "there is no image of the sandbox".to_owned(),
    }
}

fn no_sandbox() -> Outcome {
    Outcome::Failed {
        reason: "SandboxGone".to_owned(),
        message: "the Pod has no sandbox on this node".to_owned(),
    }
}

fn with_control(
    context: &Context<'_>,
    call: impl FnOnce(&mut Control, &PodRecord) -> Result<bool, pause::Error>,
) -> Outcome {
    let Some((record, _)) = context.sandbox else {
        return no_sandbox();
    };
    let connected = context.node.connect(&record.sandbox);
    match connected
        .map_err(pause::Error::from)
        .and_then(|mut control| call(&mut control, record))
    {
        Ok(true) => Outcome::Done,
        Ok(false) => Outcome::Already,
        Err(error) => not_done(&error),
    }
}

/// A call over the control socket was not done, or nobody knows whether it was.
fn not_done(error: &pause::Error) -> Outcome {
    match error {
        pause::Error::Control(error) if error.is_unknown() => Outcome::Unknown {
            message: words(error),
        },
        error if error.was_not_heard() => failed(NOT_HEARD, error),
        error => failed("ControlFailed", error),
    }
}

fn checkpoint(context: &Context<'_>, image: &ImageId) -> Outcome {
    let Some((record, lock)) = context.sandbox else {
        return no_sandbox();
    };
    // Once more: others may have taken of it since.
    let figures = saves::figures(context.node, record, lock);
    let expected = figures.expected();
    if let Some(refused) = no_room_for(context, expected) {
        return refused;
    }
    let partial = match context.node.store.begin(context.namespace, image) {
        Ok(partial) => partial,
        Err(error) => return failed(error.reason(), &error),
    };
    // What arrives from now on finds a sandbox whose image does not know of it.
    let refused = tell_keeper(context, &Request::Hold((context.rules)()));
    if let Some(unwatched) = unwatched(context.by_itself, refused.as_ref()) {
        return unwatched;
    }
    context.node.let_go_on(&record.sandbox);
    let root = context.node.runsc.root_of(&record.sandbox);
    let saved = match containers_in(context, &record.sandbox) {
        Ok(all) => save::checkpoint(
            &root,
            &record.sandbox,
            &all,
            &partial,
            save_limit(expected),
            &mut stop_of(context.node, record, lock, figures.cap()),
        ),
        Err(error) => return failed("NoRecord", &error),
    };
    if saved.as_ref().is_err_and(save::Error::is_defiance) {
        force_end(context);
    }
    match partial.size() {
        Ok(bytes) => context.written.set(context.written.get() + bytes),
        Err(error) => {
            tracing::warn!(pod = %context.pod, error = words(&error), "cannot determine how much was written");
        }
    }
    match saved {
        Ok(()) => {
            context.partial.replace(Some(partial));
            Outcome::Done
        }
        Err(error) if error.is_unknown() => Outcome::Unknown {
            message: words(&error),
        },
        Err(error) => failed(error.reason(), &error),
    }
}

/// The containers that the image's manifest will name.
fn containers_in(
    context: &Context<'_>,
    sandbox: &SandboxId,
) -> Result<Vec<ContainerId>, torpor_records::Error> {
    let draft = (context.draft)();
    let containers = context.node.records.containers_of(sandbox)?.into_iter();
    let is_named = |one: &ContainerRecord| {
        let name = saved_name(one);
        draft
            .containers
            .iter()
            .any(|saved| Some(&saved.name) == name.as_ref())
    };
    Ok(containers.filter(is_named).map(|one| one.id).collect())
}

fn commit(context: &Context<'_>, image: &ImageId) -> Outcome {
    match context.partial.take() {
        Some(partial) if partial.image() == image => match partial.commit((context.draft)()) {
            Ok(_) => Outcome::Done,
            Err(error) => failed(error.reason(), &error),
        },
        // Nothing was written by this plan: what lies in place was committed before a crash, or there is nothing.
        _ => match context.node.store.recommit(context.namespace, image) {
            Ok(_) => Outcome::Already,
            Err(error) => failed(error.reason(), &error),
        },
    }
}

/// Answers why the keeper does not do as asked. One that was not told that its sandbox runs sees it by itself.
fn tell_keeper(context: &Context<'_>, request: &Request) -> Option<keeper::Error> {
    let (record, _) = context.sandbox?;
    let dir = context.node.pause_dir(&record.sandbox);
    let error = keeper::ask(&dir, request, &[], CALL_LIMIT).err()?;
    tracing::warn!(pod = %context.pod, error = words(&error), "the Pod's keeper did not carry out a request");
    Some(error)
}

/// How a sleep fails in which no packet would wake the sandbox, because its keeper cannot hold any back. One that was asked for goes on: who
/// asked for it can end it.
fn unwatched(by_itself: bool, refused: Option<&keeper::Error>) -> Option<Outcome> {
    match refused {
        Some(keeper::Error::Refused { reason, message }) if by_itself && reason == NOT_WATCHED => {
            Some(Outcome::Failed {
                reason: reason.clone(),
                message: format!(
                    "{message}. The sandbox does not fall asleep by itself; it sleeps on request (torpor.dev/hibernate)"
                ),
            })
        }
        _ => None,
    }
}

/// The keeper of a terminal carries what is typed, and sees it. What stands in a pipe only gVisor reads, which now stands still.
pub(crate) fn tell_those_with_pipes(node: &Node, sandbox: &SandboxId) {
    let with_pipe = |one: &ContainerRecord| one.role == Role::Container && !one.terminal;
    tell_keepers(node, sandbox, &Request::Doze, with_pipe);
}

/// One that cannot be reached has ended.
fn tell_keepers(
    node: &Node,
    sandbox: &SandboxId,
    request: &Request,
    wanted: impl Fn(&ContainerRecord) -> bool,
) {
    let records = &node.records;
    let containers = records.containers_of(sandbox).unwrap_or_default();
    for container in containers.iter().filter(|one| wanted(one)) {
        let dir = records.container_dir(&container.id);
        let _ = keeper::ask(&dir, request, &[], CALL_LIMIT);
    }
}

/// The keeper's program holds the lock for as long as it works, whatever becomes of the agent.
fn run_verb(context: &Context<'_>, verb: Verb, image: &ImageId) -> Outcome {
    let Some((record, lock)) = context.sandbox else {
        return no_sandbox();
    };
    let cause = (verb == Verb::Wake).then_some(context.cause);
    let asked =
        context
            .node
            .ask_keeper(&record.sandbox, lock, verb, Some(image), cause, WAKE_LIMIT);
    match asked {
        Ok(_) => Outcome::Done,
        Err(keeper::Error::Refused { reason, message }) => Outcome::Failed { reason, message },
        Err(error @ keeper::Error::Gone { .. }) => failed("KeeperGone", &error),
        Err(error) => Outcome::Unknown {
            message: words(&error),
        },
    }
}

fn reclaim(context: &Context<'_>, image: &ImageId) -> Outcome {
    let outcome = run_verb(context, Verb::Doze, image);
    if let (Outcome::Done, Some((record, _))) = (&outcome, context.sandbox) {
        for program in [record.runsc.clone(), record.runsc.with_file_name(OCI)] {
            // Without it the next wake takes longer, and nothing else is wrong.
            if let Err(error) = programs::keep_in_memory(&program) {
                tracing::warn!(error = words(&error), "cannot keep a program in memory");
            }
        }
    }
    outcome
}

fn forget_sleep(context: &Context<'_>) -> Outcome {
    let Some((record, _)) = context.sandbox else {
        return no_sandbox();
    };
    let records = &context.node.records;
    let state = torpor_records::SandboxState::Running;
    if let Err(error) = records.write_state(&record.sandbox, &state) {
        return failed("RecordFailed", &error);
    }
    // Whose sandbox has ended finds that out when it is asked.
    tell_keepers(context.node, &record.sandbox, &Request::Attach, |_| true);
    Outcome::Done
}

#[cfg(test)]
pub(crate) mod tests;
