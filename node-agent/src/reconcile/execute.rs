//! The execution of steps. One arm per action, one call per arm, no choices: `torpor-core`
//! has decided what is to happen.

use std::cell::RefCell;
use std::time::{Duration, Instant};

use torpor_core::Entry;
use torpor_core::ids::{ContainerId, ImageId, SandboxId};
use torpor_core::ledger::{LedgerState, Memory};
use torpor_core::state::{ImageState, NOT_WATCHED};
use torpor_core::steps::{Action, Outcome, Step};
use torpor_core::transition::{self, Left, NOT_HELD_OPEN, Resumed};
use torpor_records::Role;
use torpor_records::{self, ContainerRecord, Depth, PodRecord, WakeNote};
use torpor_runsc::control::Control;
use torpor_runsc::held_open;
use torpor_runsc::keeper::{self, Request, Run, Verb};
use torpor_runsc::pause;
use torpor_runsc::programs;
use torpor_runsc::resume::{self, PausedSandbox};
use torpor_runsc::save;
use torpor_snapshots::{LedgerFile, Listed, Removed, SaveError, ledger_file};

use crate::install::SHIM;
use crate::policy::exec_leftovers;
use crate::policy::probe_gap;
use crate::policy::saves;
use crate::reconcile::manifest::saved_name;
use crate::reconcile::node::{CALL_LIMIT, Node};
use crate::reconcile::observe::words;

mod context;
pub(crate) use context::Context;
use context::{VERB_LIMIT, failed};
mod room;
pub(crate) use room::no_room;
use room::{force_end, no_room_for, save_limit, stop_of};

/// Reason of a failure: the sandbox ended before it received the call.
const SANDBOX_ENDED: &str = "SandboxEnded";
/// Reason of a failure: the shim of the sandbox has ended.
const SHIM_GONE: &str = "ShimGone";

/// Does steps until one does not succeed, and reports each. A running sandbox is not stopped for a
/// save that has no room: then `stops_for` fails before the first step is done.
pub(crate) fn run(
    steps: &[Step],
    stops_for: Option<&Step>,
    no_room: impl FnOnce() -> Option<Outcome>,
    mut act: impl FnMut(&Step) -> Outcome,
    mut report: impl FnMut(&Step, &Outcome, Duration),
) {
    let began = Instant::now();
    if let Some(step) = stops_for
        && let Some(refused) = no_room()
    {
        return report(step, &refused, began.elapsed());
    }
    for step in steps {
        let began = Instant::now();
        let outcome = act(step);
        report(step, &outcome, began.elapsed());
        if !matches!(outcome, Outcome::Done | Outcome::Already) {
            break;
        }
    }
}

/// Does one step: checks the fence, writes the entry before, acts, writes the entry after.
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
    // The image that is the memory of the sandbox until the sandbox runs.
    let memory = state
        .restorable(held)
        .filter(|_| step.before == Some(Entry::Awake));
    if let Some(image) = memory.filter(|_| step.action == Action::Resume)
        && is_broken(context)
    {
        return end_broken(context, image);
    }
    let seq = match begin(&ledger, step) {
        Ok(seq) => seq,
        Err(outcome) => return outcome,
    };
    let left = memory.map(|image| Left {
        image: image.clone(),
        seq,
    });
    let outcome = act(context, &step.action, &ledger, left.as_ref());
    let entry = match (&outcome, &step.action) {
        (Outcome::Done | Outcome::Already, Action::DiscardLedger) => None,
        // The shim's command has written the entry already, before the sandbox could send anything.
        (Outcome::Done, Action::Wake { .. }) if is_awake(&ledger) => None,
        (Outcome::Done | Outcome::Already, _) => step.after.clone(),
        (Outcome::Failed { reason, .. }, Action::Wake { image }) => Some(Entry::WakeFailed {
            image: image.clone(),
            reason: reason.clone(),
        }),
        _ => None,
    };
    // A newer sandbox of the Pod, made while this one's keeper did not answer, may have written
    // its own entries. Then the append fails.
    if let Some(entry) = entry
        && let Err(error) = ledger.append_at(seq, &entry)
    {
        return Outcome::Unknown {
            message: words(&error),
        };
    }
    outcome
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
        Err(error) => Err(failed(error.reason(), &error)),
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

fn act(
    context: &Context<'_>,
    action: &Action,
    ledger: &LedgerFile,
    left: Option<&Left>,
) -> Outcome {
    let node = context.node;
    match action {
        Action::Pause => pause(context),
        Action::Freeze => {
            let outcome = pause(context);
            request_keeper(context, &Request::Freeze((context.rules)()));
            outcome
        }
        Action::Doze => doze(context),
        Action::Reclaim { image: Some(image) } => reclaim(context, image),
        Action::Reclaim { image: None } => without_image(),
        Action::Resume => resume(context, ledger, left),
        Action::Checkpoint { image } => checkpoint(context, image),
        Action::Commit { image } => commit(context, image),
        Action::End { image } => run_verb(context, Verb::End, image),
        Action::Wake { image } => run_verb(context, Verb::Wake, image),
        Action::Bind { claim } => {
            let claim = Some(claim.clone());
            run_command(
                context,
                Run {
                    claim,
                    ..Verb::Bind.into()
                },
            )
        }
        Action::Record => Outcome::Done,
        Action::ForgetSleep => forget_sleep(context),
        Action::DiscardPartial { image } => {
            // A step before made this directory and did not commit it.
            context.partial.replace(None);
            removed(node.store.remove_partial(context.namespace, image))
        }
        Action::DiscardImage { image } => {
            removed(node.store.remove_image(context.namespace, image))
        }
        Action::ReleaseImage { image } => release_image(context, image),
        Action::DiscardLedger => match ledger.remove() {
            Ok(Removed::Done) => Outcome::Done,
            Ok(Removed::Already) => Outcome::Already,
            Err(error) => failed(error.reason(), &error),
        },
    }
}

/// Returns whether a gofer of the sandbox has ended. `false` if that cannot be found out:
/// the resume itself checks again, and there an unknown result counts.
fn is_broken(context: &Context<'_>) -> bool {
    context.sandbox.is_some_and(|(record, _)| {
        let runsc = context.node.runsc.of(&record.sandbox);
        matches!(runsc.has_its_gofers(record.sandbox.as_str()), Ok(false))
    })
}

/// Returns whether the sandbox's shim still holds it open.
fn is_held_open(context: &Context<'_>) -> bool {
    let records = &context.node.records;
    context.sandbox.is_some_and(|(record, _)| {
        matches!(held_open::is_held_open(records, &record.sandbox), Ok(true))
    })
}

/// Returns the failure of a resume without a shim. The sandbox is about to be ended and made
/// anew, so work that it did now would be lost.
fn shim_gone(image: &ImageId) -> Outcome {
    Outcome::Failed {
        reason: SHIM_GONE.to_owned(),
        message: format!("{NOT_HELD_OPEN}, which then continues from image {image}"),
    }
}

/// Ends a sandbox that cannot run on. The next plan wakes it from the image, which has its memory.
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

fn wait_for_probe_gap(context: &Context<'_>) {
    if let Some((record, lock)) = context.sandbox {
        probe_gap::wait(context.node, record, lock, &(context.rules)());
    }
}

fn pause(context: &Context<'_>) -> Outcome {
    wait_for_probe_gap(context);
    let records = &context.node.records;
    if let Some((record, _)) = context.sandbox.filter(|_| !context.by_itself) {
        exec_leftovers::note(context.node, record);
    }
    with_control(context, |control, record| {
        let decided = context.decided.into();
        pause::pause(records, control, &record.sandbox, decided, CALL_LIMIT)
    })
}

fn doze(context: &Context<'_>) -> Outcome {
    wait_for_probe_gap(context);
    let records = &context.node.records;
    let outcome = with_control(context, |control, record| {
        let decided = context.decided.into();
        pause::doze(records, control, &record.sandbox, decided, CALL_LIMIT)
    });
    let refused = request_keeper(context, &Request::Watch((context.rules)()));
    if let (Outcome::Done | Outcome::Already, Some(unwatched)) =
        (&outcome, unwatched(context.by_itself, refused.as_ref()))
    {
        // The next plan resumes it.
        return unwatched;
    }
    if let Some((record, _)) = context.sandbox {
        notify_pipe_keepers(context.node, &record.sandbox);
    }
    outcome
}

/// Lets the sandbox run. `left`: the image that was its memory until the step's entry.
fn resume(context: &Context<'_>, ledger: &LedgerFile, left: Option<&Left>) -> Outcome {
    let Some((record, _)) = context.sandbox else {
        return no_sandbox();
    };
    let (sandbox, records) = (&record.sandbox, &context.node.records);
    let stays_asleep = |outcome: Outcome| {
        let taken_back = left.map(|left| resume::take_back(ledger, sandbox, left));
        match taken_back {
            Some(Err(error)) => failed("LedgerFailed", &error),
            Some(Ok(())) | None => outcome,
        }
    };
    if let Some(left) = left.filter(|_| !is_held_open(context)) {
        return stays_asleep(shim_gone(&left.image));
    }
    let began = Instant::now();
    let dozed = matches!(records.doze(sandbox), Ok(Some(_)));
    let mut control = match context.node.connect(sandbox) {
        Ok(control) => control,
        Err(error) => return stays_asleep(not_done(&error.into())),
    };
    let paused = PausedSandbox {
        records,
        runsc: &context.node.runsc.of(sandbox),
        control: RefCell::new(&mut control),
        sandbox,
        ledger,
        limit: CALL_LIMIT,
    };
    let resumed = transition::resume(&paused, left);
    if !matches!(resumed, Ok(Resumed::GoferGone)) {
        request_keeper(context, &Request::Release);
    }
    match (resumed, left) {
        (Ok(Resumed::Runs), _) => {
            if dozed {
                note_wake(context, sandbox, began.elapsed());
            }
            Outcome::Done
        }
        (Ok(Resumed::GoferGone), Some(left)) => end_broken(context, &left.image),
        (Ok(Resumed::RanAlready | Resumed::GoferGone), _) => Outcome::Already,
        (Err(resume::Error::Pause(error)), _) => not_done(&error),
        (Err(error), _) => failed("ControlFailed", &error),
    }
}

/// Records how long the wake from a doze took.
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

/// Releases another Pod's image that this Pod had taken. The store finds its namespace.
///
/// If the image is missing but the ledger of the Pod that made it has it, the image is only
/// away for a while, and the step fails.
fn release_image(context: &Context<'_>, image: &ImageId) -> Outcome {
    let store = &context.node.store;
    let listed = store.list_pod(image.pod()).and_then(|mut listed| {
        listed.extend(store.fetched().list_pod(image.pod())?);
        Ok(listed)
    });
    let released = listed.and_then(|listed| {
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

/// Returns the failure of a reclaim without an image. The memory of a gVisor sandbox is pushed
/// out only if an image has it too.
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

/// Returns the outcome of a call over the control socket that failed, or whose result is not known.
fn not_done(error: &pause::Error) -> Outcome {
    match error {
        pause::Error::Control(error) if error.is_unknown() => Outcome::Unknown {
            message: words(error),
        },
        error if error.ended_before_call() => failed(SANDBOX_ENDED, error),
        error => failed("ControlFailed", error),
    }
}

fn checkpoint(context: &Context<'_>, image: &ImageId) -> Outcome {
    let Some((record, lock)) = context.sandbox else {
        return no_sandbox();
    };
    // The room is checked again: other saves may have taken some since.
    let figures = saves::figures(context.node, record, lock);
    let expected = figures.expected();
    if let Some(refused) = no_room_for(context, expected) {
        return refused;
    }
    let partial = match context.node.store.begin(context.namespace, image) {
        Ok(partial) => partial,
        Err(error) => return failed(error.reason(), &error),
    };
    // The image will not have packets that reach the sandbox from now on, so the keeper holds them.
    let refused = request_keeper(context, &Request::Hold((context.rules)()));
    if let Some(unwatched) = unwatched(context.by_itself, refused.as_ref()) {
        return unwatched;
    }
    context.node.continue_processes(&record.sandbox);
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

/// Returns the containers that the image's manifest will name.
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
        // This plan has written nothing: the image was committed before a crash, or there is none.
        _ => match context.node.store.recommit(context.namespace, image) {
            Ok(_) => Outcome::Already,
            Err(error) => failed(error.reason(), &error),
        },
    }
}

/// Sends a request to the Pod's keeper. Returns why the keeper did not carry it out.
///
/// A failure does no lasting harm: a keeper that misses the request of a resume detects by
/// itself that the sandbox runs.
fn request_keeper(context: &Context<'_>, request: &Request) -> Option<keeper::Error> {
    let (record, _) = context.sandbox?;
    let dir = context.node.pause_dir(&record.sandbox);
    let error = keeper::ask(&dir, request, &[], CALL_LIMIT).err()?;
    tracing::warn!(pod = %context.pod, error = words(&error), "the Pod's keeper did not carry out a request");
    Some(error)
}

/// Returns the failure of a sleep in which no packet would wake the sandbox, because its
/// keeper cannot hold packets. A sleep on request continues: the user who requested it can end it.
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

/// Notifies the keepers of containers without a terminal that the sandbox dozes, so that they wake
/// it for input in a pipe. Only gVisor reads such a pipe, and gVisor is paused. The keeper of a
/// terminal carries the input itself and so detects it.
pub(crate) fn notify_pipe_keepers(node: &Node, sandbox: &SandboxId) {
    let with_pipe = |one: &ContainerRecord| one.role == Role::Container && !one.terminal;
    notify_keepers(node, sandbox, &Request::Doze, with_pipe);
}

/// Sends the request to the keepers of the wanted containers. A keeper that cannot be reached has
/// ended.
fn notify_keepers(
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

/// Runs a command of the shim through the Pod's keeper. The command holds the lock until it ends,
/// even if the agent ends before.
fn run_verb(context: &Context<'_>, verb: Verb, image: &ImageId) -> Outcome {
    let command = Run {
        image: Some(image.clone()),
        cause: (verb == Verb::Wake).then_some(context.cause),
        ..verb.into()
    };
    run_command(context, command)
}

/// Runs a command of the shim, as [`run_verb`].
fn run_command(context: &Context<'_>, command: Run) -> Outcome {
    let Some((record, lock)) = context.sandbox else {
        return no_sandbox();
    };
    let node = context.node;
    let asked = node.ask_keeper(&record.sandbox, lock, command, VERB_LIMIT);
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
        for program in [record.runsc.clone(), record.runsc.with_file_name(SHIM)] {
            // A failure only makes the next wake slower.
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
    // A keeper whose sandbox has ended detects that on this request.
    notify_keepers(context.node, &record.sandbox, &Request::Attach, |_| true);
    Outcome::Done
}

#[cfg(test)]
pub(crate) mod tests;
