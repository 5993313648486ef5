//! The steps of the agent's plan for a sandbox of this node. One arm per action, one call per arm,
//! no choices: `torpor-core` has decided what is to happen.

use std::cell::RefCell;
use std::time::{Duration, Instant, SystemTime};

use anyhow::Context;
use torpor_core::ids::{ContainerId, ImageId, SandboxId};
use torpor_core::state::NOT_WATCHED;
use torpor_core::steps::{Action, Outcome, Step};
use torpor_core::transition::{self, Left, NOT_HELD_OPEN, Resumed};
use torpor_messages::keeper::{self, Request};
use torpor_messages::service::Steps;
use torpor_records::{ContainerRecord, Depth, PodRecord, Role, SandboxState, WakeNote};
use torpor_runsc::control::Control;
use torpor_runsc::resume::{self, PausedSandbox};
use torpor_runsc::{held_open, pause, programs, save};
use torpor_snapshots::steps::{Act, Place, act_on_store};
use torpor_snapshots::{LedgerFile, ManifestDraft, Partial};

use crate::figures::figures;
use crate::node::{CALL_LIMIT, Node};
use crate::{claim, doze, exec_leftovers, manifest, observe, restore};

mod probe_gap;
use probe_gap::Probes;
mod room;
use room::{no_room_for, save_limit, stop_of};

/// Reason of a failure: the sandbox ended before it received the call.
const SANDBOX_ENDED: &str = "SandboxEnded";
/// Reason of a failure: the shim of the sandbox has ended.
const SHIM_GONE: &str = "ShimGone";

/// Takes the steps until one does not succeed, and reports the index, outcome and duration of each.
/// Returns how many bytes of images they have written. The steps are stale if another process has
/// the sandbox' lock, or if the sandbox is not in the state any more that the plan was made for.
pub fn take(
    node: &Node,
    sandbox: &SandboxId,
    request: &Steps,
    mut report: impl FnMut(usize, Outcome, Duration),
) -> anyhow::Result<u64> {
    let record = node.records.pod(sandbox)?;
    let lock = node.records.try_lock(sandbox)?;
    let store = node.store()?;
    if lock.is_none() || !is_as_planned(node, &record, request) {
        report(0, Outcome::Stale, Duration::ZERO);
        return Ok(0);
    }
    let place = Place {
        store: &store,
        namespace: &record.namespace,
        pod: &record.pod_uid,
        sandbox: Some(sandbox),
    };
    let mut plan = Plan {
        node,
        record: &record,
        request,
        place: &place,
        partial: None,
        written: 0,
    };
    let last = take_each(
        &request.steps,
        request.stops_for,
        &mut plan,
        Plan::no_room,
        |plan, step| torpor_snapshots::steps::take(&place, step, plan),
        report,
    );
    if let Some(last) = last {
        plan.run_on_after(&last);
    }
    Ok(plan.written)
}

/// Reports whether the sandbox is in the state that the plan was made for. The lock was free
/// meanwhile: a caller may have woken the sandbox, an exec may have begun, or a container may have
/// been created. A sandbox that is to sleep because it is idle must not have been used, either.
fn is_as_planned(node: &Node, record: &PodRecord, request: &Steps) -> bool {
    let decided = request.decided.into();
    request.basis == observe::basis(node, record)
        && !(request.by_itself && observe::is_used_since(node, &record.sandbox, decided))
}

/// Takes steps until one does not succeed. A running sandbox is not stopped for a save that has no
/// room: then `no_room` refuses the step `stops_for` before the first step is taken. Returns the
/// outcome of the last step that was taken.
fn take_each<T>(
    steps: &[Step],
    stops_for: Option<usize>,
    plan: &mut T,
    no_room: impl FnOnce(&T) -> Option<Outcome>,
    mut take: impl FnMut(&mut T, &Step) -> Outcome,
    mut report: impl FnMut(usize, Outcome, Duration),
) -> Option<Outcome> {
    let began = Instant::now();
    if let Some(index) = stops_for
        && let Some(refused) = no_room(plan)
    {
        report(index, refused, began.elapsed());
        return None;
    }
    torpor_snapshots::steps::take_each(steps, |step| take(plan, step), report)
}

/// The surroundings of the steps of one plan. The process holds the sandbox' lock.
struct Plan<'a> {
    node: &'a Node,
    record: &'a PodRecord,
    request: &'a Steps,
    place: &'a Place<'a>,
    /// The image that a checkpoint of this plan wrote and that waits for its commit.
    partial: Option<Partial>,
    /// Bytes of images that this plan wrote, committed or not.
    written: u64,
}

impl Act for Plan<'_> {
    fn refuse(&mut self, action: &Action, memory: Option<&ImageId>) -> Option<Outcome> {
        let image = memory.filter(|_| *action == Action::Resume)?;
        self.is_broken().then(|| self.end_broken(image))
    }

    fn act(&mut self, action: &Action, ledger: &LedgerFile, left: Option<&Left>) -> Outcome {
        if let Action::DiscardPartial { .. } = action {
            // A step before made this directory and did not commit it.
            self.partial = None;
        }
        if let Some(outcome) = act_on_store(self.place, action, ledger) {
            return outcome;
        }
        let (node, sandbox) = (self.node, self.sandbox());
        match action {
            Action::Pause => self.pause(&Request::Hold),
            Action::Freeze => self.pause(&Request::Freeze),
            Action::Doze => self.doze(),
            Action::Reclaim { image: Some(image) } => self.reclaim(image),
            Action::Resume => self.resume(ledger, left),
            Action::Checkpoint { image } => self.checkpoint(image),
            Action::Commit { image } => self.commit(image),
            Action::End { image } => done("EndFailed", restore::end(node, sandbox, image)),
            Action::Wake { image } => {
                let cause = self.request.cause;
                done("WakeFailed", restore::wake(node, sandbox, image, cause))
            }
            Action::Bind { claim } => done("BindFailed", claim::bind(node, sandbox, claim)),
            Action::ForgetSleep => self.forget_sleep(),
            _ => without_image(),
        }
    }
}

/// Returns the outcome of an act. `failed`: the reason of an error that has no reason of its own.
fn done(failed: &str, result: anyhow::Result<()>) -> Outcome {
    match result {
        Ok(()) => Outcome::Done,
        Err(error) => Outcome::Failed {
            reason: restore::reason_or(failed, &error).to_owned(),
            message: format!("{error:#}"),
        },
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

/// Returns the failure of a resume without a shim. The sandbox is about to be ended and made
/// anew, so work that it did now would be lost.
fn shim_gone(image: &ImageId) -> Outcome {
    Outcome::Failed {
        reason: SHIM_GONE.to_owned(),
        message: format!("{NOT_HELD_OPEN}, which then continues from image {image}"),
    }
}

/// Returns the outcome of a call over the control socket that failed, or whose result is not known.
fn not_done(error: &pause::Error) -> Outcome {
    match error {
        pause::Error::Control(error) if error.is_unknown() => Outcome::unknown(error),
        error if error.ended_before_call() => Outcome::failed(SANDBOX_ENDED, error),
        error => Outcome::failed("ControlFailed", error),
    }
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

impl Plan<'_> {
    fn sandbox(&self) -> &SandboxId {
        &self.record.sandbox
    }

    fn decided(&self) -> SystemTime {
        self.request.decided.into()
    }

    /// Returns the failure of a save if there is no room for it.
    fn no_room(&self) -> Option<Outcome> {
        self.no_room_for(figures(self.node, self.record).expected())
    }

    fn no_room_for(&self, expected: Option<u64>) -> Option<Outcome> {
        let (reserve, limit) = (self.request.reserve, self.request.namespace_limit);
        no_room_for(self.place, expected, reserve, limit)
    }

    /// Returns whether a gofer of the sandbox has ended. `false` if that cannot be found out:
    /// the resume itself checks again, and there an unknown result counts.
    fn is_broken(&self) -> bool {
        let runsc = self.node.runsc.of(self.sandbox());
        matches!(runsc.has_its_gofers(self.sandbox().as_str()), Ok(false))
    }

    /// Ends a sandbox that cannot run on. The next plan wakes it from the image, which has its
    /// memory.
    fn end_broken(&self, image: &ImageId) -> Outcome {
        match done("EndFailed", restore::end(self.node, self.sandbox(), image)) {
            Outcome::Done => Outcome::Failed {
                reason: "GoferGone".to_owned(),
                message: format!(
                    "a gofer of the sandbox ended while the sandbox slept: the sandbox continues from image {image}"
                ),
            },
            other => other,
        }
    }

    fn with_control(
        &self,
        call: impl FnOnce(&mut Control) -> Result<bool, pause::Error>,
    ) -> Outcome {
        let connected = self.node.runsc.connect(self.sandbox());
        match connected
            .map_err(pause::Error::from)
            .and_then(|mut control| call(&mut control))
        {
            Ok(true) => Outcome::Done,
            Ok(false) => Outcome::Already,
            Err(error) => not_done(&error),
        }
    }

    /// Pauses the sandbox between two probes of the kubelet, and has the keeper take over with
    /// `request`. Returns why the keeper did not.
    ///
    /// Before the pause no probe may be seen, and one may begin before the keeper takes over. Then
    /// the sandbox runs on at once and answers it, and the pause is tried again.
    fn pause_in_gap(
        &self,
        pause: impl Fn(&mut Control) -> Result<bool, pause::Error>,
        request: &Request,
    ) -> (Outcome, Option<keeper::Error>) {
        let mut probes = Probes::of(self.node, self.record);
        loop {
            probes.wait_for_gap();
            let outcome = self.with_control(&pause);
            let refused = match outcome {
                // It is certain that the sandbox runs.
                Outcome::Failed { .. } => None,
                _ => self.request_keeper(request),
            };
            if outcome != Outcome::Done || probes.is_over() || !probes.has_cut_one() {
                return (outcome, refused);
            }
            let records = &self.node.records;
            let runs = self.with_control(|control| {
                pause::resume(records, control, self.sandbox(), CALL_LIMIT)
            });
            if !runs.is_success() {
                return (runs, refused);
            }
            self.request_keeper(&Request::Release);
        }
    }

    fn pause(&self, request: &Request) -> Outcome {
        if !self.request.by_itself {
            exec_leftovers::note(self.node, self.sandbox());
        }
        let (records, decided) = (&self.node.records, self.decided());
        let pause = |control: &mut Control| {
            pause::pause(records, control, self.sandbox(), decided, CALL_LIMIT)
        };
        self.pause_in_gap(pause, request).0
    }

    fn doze(&self) -> Outcome {
        let (records, decided) = (&self.node.records, self.decided());
        let doze = |control: &mut Control| {
            pause::doze(records, control, self.sandbox(), decided, CALL_LIMIT)
        };
        let (outcome, refused) = self.pause_in_gap(doze, &Request::Watch);
        let unwatched = unwatched(self.request.by_itself, refused.as_ref());
        if let (true, Some(unwatched)) = (outcome.is_success(), unwatched) {
            // The next plan resumes it.
            return unwatched;
        }
        notify_pipe_keepers(self.node, self.sandbox());
        outcome
    }

    /// Lets the sandbox run on at once if the plan has paused it and the save has failed. The next
    /// plan would do the same; until then every exec would be refused.
    fn run_on_after(&self, last: &Outcome) {
        let ledger = self.place.store.ledger(self.place.pod);
        let read = ledger.and_then(|ledger| Ok((ledger.read()?, ledger)));
        let Ok((state, ledger)) = read else { return };
        let found = self.request.basis.live;
        let held = |image: &ImageId| self.place.holds(image);
        if transition::runs_on_after(found, last, &state, held)
            && matches!(self.node.records.doze(self.sandbox()), Ok(None))
        {
            self.resume(&ledger, None);
        }
    }

    /// Lets the sandbox run. `left`: the image that was its memory until the step's entry.
    fn resume(&self, ledger: &LedgerFile, left: Option<&Left>) -> Outcome {
        let (node, sandbox) = (self.node, self.sandbox());
        let stays_asleep = |outcome: Outcome| {
            let taken_back = left.map(|left| resume::take_back(ledger, sandbox, left));
            match taken_back {
                Some(Err(error)) => Outcome::failed("LedgerFailed", &error),
                Some(Ok(())) | None => outcome,
            }
        };
        let is_held_open = || matches!(held_open::is_held_open(&node.records, sandbox), Ok(true));
        if let Some(left) = left.filter(|_| !is_held_open()) {
            return stays_asleep(shim_gone(&left.image));
        }
        let began = Instant::now();
        let dozed = matches!(node.records.doze(sandbox), Ok(Some(_)));
        let mut control = match node.runsc.connect(sandbox) {
            Ok(control) => control,
            Err(error) => return stays_asleep(not_done(&error.into())),
        };
        let paused = PausedSandbox {
            records: &node.records,
            runsc: &node.runsc.of(sandbox),
            control: RefCell::new(&mut control),
            sandbox,
            ledger,
            limit: CALL_LIMIT,
        };
        let resumed = transition::resume(&paused, left);
        if !matches!(resumed, Ok(Resumed::GoferGone)) {
            self.request_keeper(&Request::Release);
        }
        match (resumed, left) {
            (Ok(Resumed::Runs), _) => {
                if dozed {
                    self.note_wake(began.elapsed());
                }
                Outcome::Done
            }
            (Ok(Resumed::GoferGone), Some(left)) => self.end_broken(&left.image),
            (Ok(Resumed::RanAlready | Resumed::GoferGone), _) => Outcome::Already,
            (Err(resume::Error::Pause(error)), _) => not_done(&error),
            (Err(error), _) => Outcome::failed("ControlFailed", &error),
        }
    }

    /// Records how long the wake from a doze took.
    fn note_wake(&self, took: Duration) {
        let micros = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
        let note = WakeNote {
            cause: self.request.cause,
            from: Depth::Dozing,
            stages_end_micros: [("resumed".to_owned(), micros)].into(),
        };
        if let Err(error) = self.node.records.write_wake(self.sandbox(), &note) {
            crate::log_line!("cannot record the wake: {:#}", anyhow::Error::new(error));
        }
    }

    fn checkpoint(&mut self, image: &ImageId) -> Outcome {
        let node = self.node;
        // The room is checked again: other saves may have taken some since.
        let figures = figures(node, self.record);
        let expected = figures.expected();
        if let Some(refused) = self.no_room_for(expected) {
            return refused;
        }
        let partial = match self.place.store.begin(self.place.namespace, image) {
            Ok(partial) => partial,
            Err(error) => return Outcome::failed(error.reason(), &error),
        };
        // The image will not have packets that reach the sandbox from now on, so the keeper holds
        // them.
        let refused = self.request_keeper(&Request::Hold);
        if let Some(unwatched) = unwatched(self.request.by_itself, refused.as_ref()) {
            return unwatched;
        }
        if node.runsc.is_stopped_by_signal(self.sandbox()) {
            // Without an answer the save itself fails, and returns the reason.
            self.request_keeper(&Request::GoOn);
        }
        let saved = match self.draft() {
            Ok((_, all)) => save::checkpoint(
                &node.runsc.root_of(self.sandbox()),
                self.sandbox(),
                &all,
                &partial,
                save_limit(expected),
                &mut stop_of(
                    node,
                    self.record,
                    self.place.store,
                    self.request.reserve,
                    figures.cap(),
                ),
            ),
            Err(error) => return done("NoRecord", Err(error)),
        };
        if saved.as_ref().is_err_and(save::Error::is_defiance) {
            self.force_end();
        }
        match partial.size() {
            Ok(bytes) => self.written += bytes,
            Err(error) => {
                let error = anyhow::Error::new(error);
                crate::log_line!("cannot determine how much was written: {error:#}");
            }
        }
        match saved {
            Ok(()) => {
                self.partial = Some(partial);
                Outcome::Done
            }
            Err(error) if error.is_unknown() => Outcome::unknown(&error),
            Err(error) => Outcome::failed(error.reason(), &error),
        }
    }

    /// Ends a sandbox that continues a stopped save. It cannot be trusted any more, and its end
    /// frees the bytes that it has written. The containers' keepers notice the end by themselves.
    fn force_end(&self) {
        match restore::kill_processes(self.node, &self.record.cgroup) {
            Ok(()) => crate::log_line!(
                "ended the sandbox, because it continued to write an image after the save was stopped"
            ),
            Err(error) => crate::log_line!(
                "cannot end the sandbox, which continues to write an image after the save was stopped: {error:#}"
            ),
        }
    }

    /// Returns the draft of the image's manifest, and the containers that it names.
    fn draft(&self) -> anyhow::Result<(ManifestDraft, Vec<ContainerId>)> {
        let containers = self.node.records.containers_of(self.sandbox())?;
        let pod = self.request.pod.as_ref();
        let pod = pod.context("the request has no facts of the Pod for an image")?;
        let draft = manifest::draft(self.record, &containers, pod);
        let is_named = |one: &ContainerRecord| {
            let name = manifest::saved_name(one);
            let mut saved = draft.containers.iter();
            saved.any(|saved| Some(&saved.name) == name.as_ref())
        };
        let named = containers.into_iter().filter(is_named);
        let named = named.map(|one| one.id).collect();
        Ok((draft, named))
    }

    fn commit(&mut self, image: &ImageId) -> Outcome {
        match self.partial.take() {
            Some(partial) if partial.image() == image => {
                let draft = match self.draft() {
                    Ok((draft, _)) => draft,
                    Err(error) => return done("NoRecord", Err(error)),
                };
                match partial.commit(draft) {
                    Ok(_) => Outcome::Done,
                    Err(error) => Outcome::failed(error.reason(), &error),
                }
            }
            // This plan has written nothing: the image was committed before a crash, or there is
            // none.
            _ => match self.place.store.recommit(self.place.namespace, image) {
                Ok(_) => Outcome::Already,
                Err(error) => Outcome::failed(error.reason(), &error),
            },
        }
    }

    fn reclaim(&self, image: &ImageId) -> Outcome {
        let outcome = done("DozeFailed", doze::doze(self.node, self.sandbox(), image));
        if outcome == Outcome::Done {
            let own = std::env::current_exe().ok();
            for program in [Some(self.record.runsc.clone()), own].into_iter().flatten() {
                // A failure only makes the next wake slower.
                if let Err(error) = programs::keep_in_memory(&program) {
                    let error = anyhow::Error::new(error);
                    crate::log_line!("cannot keep a program in memory: {error:#}");
                }
            }
        }
        outcome
    }

    fn forget_sleep(&self) -> Outcome {
        let records = &self.node.records;
        if let Err(error) = records.write_state(self.sandbox(), &SandboxState::Running) {
            return Outcome::failed("RecordFailed", &error);
        }
        // A keeper whose sandbox has ended detects that on this request.
        notify_keepers(self.node, self.sandbox(), &Request::Attach, |_| true);
        Outcome::Done
    }

    /// Sends a request to the Pod's keeper. Returns why the keeper did not carry it out.
    ///
    /// A failure does no lasting harm: a keeper that misses the request of a resume detects by
    /// itself that the sandbox runs.
    fn request_keeper(&self, request: &Request) -> Option<keeper::Error> {
        let dir = self.node.pause_dir(self.sandbox());
        let error = keeper::ask(&dir, request, &[], CALL_LIMIT).err()?;
        crate::log_line!(
            "the Pod's keeper did not carry out a request: {}",
            torpor_core::steps::words(&error)
        );
        Some(error)
    }
}

/// Has the keepers of a sandbox that dozes wake it. A repeated call is harmless. `Err`: the reason
/// why no packet would wake it.
pub fn watch(node: &Node, sandbox: &SandboxId) -> Result<(), keeper::Error> {
    let asked = keeper::ask(&node.pause_dir(sandbox), &Request::Watch, &[], CALL_LIMIT);
    notify_pipe_keepers(node, sandbox);
    asked.map(drop)
}

/// Notifies the keepers of containers without a terminal that the sandbox dozes, so that they wake
/// it for input in a pipe. Only gVisor reads such a pipe, and gVisor is paused. The keeper of a
/// terminal carries the input itself and so detects it.
fn notify_pipe_keepers(node: &Node, sandbox: &SandboxId) {
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

#[cfg(test)]
mod tests;
