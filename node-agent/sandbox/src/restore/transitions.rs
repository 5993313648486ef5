//! The transitions of [`torpor_core::transition`] for a sandbox of this node. The caller holds its
//! lock.

use std::cell::{Cell, OnceCell, RefCell};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use torpor_core::ids::{ImageId, SandboxId};
use torpor_core::transition::{
    self, Awake, Delivery, Found, Holding, Left, Origin, Pause, Paused, Ran, Recorded, Resumed,
    Sandbox,
};
use torpor_core::{Entry, LedgerState};
use torpor_messages::keeper::{self, Request};
use torpor_records::{
    ContainerRecord, Depth, PodLock, PodRecord, RestoreReport, SandboxState, WakeCause, WakeNote,
};
use torpor_runsc::command::{self, Runsc};
use torpor_runsc::control::Control;
use torpor_runsc::resume::{self, PausedSandbox};
use torpor_runsc::{held_open, pause};
use torpor_snapshots::{Image, ImageError, LedgerFile, Store, ledger_file};

use super::end::end;
use super::known::parts_of;
use super::quotas::put_quotas_back;
use super::refusal::{Refusal, reason_of};
use super::{failure, renew, room, sandbox};
use crate::node::{CALL_LIMIT, Node};
use crate::stages::Stages;

/// An image that is restored, and the containers that are restored from it.
#[derive(Debug)]
struct Opened {
    image: Image,
    parts: Vec<ContainerRecord>,
}

/// A sandbox of this node. Its records, ledger and connection are opened when a transition first
/// needs them: a sandbox that is awake takes calls also while the store cannot be read.
#[derive(Debug)]
pub struct NodeSandbox<'a> {
    node: &'a Node,
    sandbox: &'a SandboxId,
    cause: WakeCause,
    /// The report of a restore in a new sandbox.
    report: Option<RestoreReport>,
    pod: OnceCell<PodRecord>,
    runsc: OnceCell<Runsc>,
    store: OnceCell<Store>,
    ledger: OnceCell<LedgerFile>,
    control: RefCell<Option<Control>>,
    opened: OnceCell<Opened>,
    stages: RefCell<Stages>,
    /// Set by [`Sandbox::pause`].
    dozed: Cell<bool>,
    /// Depth of the sleep from which an act has woken the sandbox.
    woken_from: Cell<Option<Depth>>,
}

/// Returns the value of the cell, which `make` makes at first.
fn made<T>(cell: &OnceCell<T>, make: impl FnOnce() -> anyhow::Result<T>) -> anyhow::Result<&T> {
    if let Some(value) = cell.get() {
        return Ok(value);
    }
    let value = make()?;
    Ok(cell.get_or_init(|| value))
}

impl<'a> NodeSandbox<'a> {
    pub fn new(node: &'a Node, sandbox: &'a SandboxId, cause: WakeCause) -> Self {
        Self {
            node,
            sandbox,
            cause,
            report: None,
            pod: OnceCell::new(),
            runsc: OnceCell::new(),
            store: OnceCell::new(),
            ledger: OnceCell::new(),
            control: RefCell::new(None),
            opened: OnceCell::new(),
            stages: RefCell::new(Stages::begin()),
            dozed: Cell::new(false),
            woken_from: Cell::new(None),
        }
    }

    /// A new sandbox of the Pod, restored from an open image with these containers.
    pub(super) fn anew(
        node: &'a Node,
        pod: &'a PodRecord,
        image: Image,
        parts: Vec<ContainerRecord>,
        report: RestoreReport,
    ) -> Self {
        Self {
            report: Some(report),
            pod: pod.clone().into(),
            opened: Opened { image, parts }.into(),
            ..Self::new(node, &pod.sandbox, WakeCause::Asked)
        }
    }

    fn pod(&self) -> anyhow::Result<&PodRecord> {
        made(&self.pod, || Ok(self.node.records.pod(self.sandbox)?))
    }

    fn store(&self) -> anyhow::Result<&Store> {
        made(&self.store, || self.node.store())
    }

    fn ledger_file(&self) -> anyhow::Result<&LedgerFile> {
        made(&self.ledger, || {
            Ok(self.store()?.ledger(&self.pod()?.pod_uid)?)
        })
    }

    fn opened(&self) -> anyhow::Result<&Opened> {
        self.opened.get().context("the image is not open")
    }

    /// Calls `act` on the connected sandbox.
    fn connected<T>(
        &self,
        act: impl FnOnce(&PausedSandbox<'_>) -> Result<T, resume::Error>,
    ) -> anyhow::Result<T> {
        let ledger = self.ledger_file()?;
        let runsc = made(&self.runsc, || Ok(self.node.runsc.of(self.sandbox)))?;
        let mut control = self.control.borrow_mut();
        let control = control.as_mut().context("the sandbox has no process")?;
        Ok(act(&PausedSandbox {
            records: &self.node.records,
            runsc,
            control: RefCell::new(control),
            sandbox: self.sandbox,
            ledger,
            limit: CALL_LIMIT,
        })?)
    }

    fn stage(&self, name: &'static str) {
        self.stages.borrow_mut().finish(name);
    }

    pub(super) fn stages(self) -> Stages {
        self.stages.into_inner()
    }

    /// The note of the wake, by its stages.
    fn note(&self, depth: Depth) -> WakeNote {
        self.stages.borrow().note(self.cause, depth)
    }

    /// Records a wake, if the transition was one. `release`: has the keeper of a sandbox that dozed
    /// release the packets that it holds.
    fn record_wake(&self, release: bool) -> anyhow::Result<()> {
        let Some(depth) = self.woken_from.get() else {
            return Ok(());
        };
        self.node.records.note_call(self.sandbox)?;
        if depth == Depth::Dozing && release {
            let pause = self
                .node
                .records
                .container_dir(&self.sandbox.clone().into());
            // A keeper that cannot be reached has ended, and holds nothing.
            let _ = keeper::ask(&pause, &Request::Release, &[], CALL_LIMIT);
            self.stage("released");
        }
        let note = self.note(depth);
        Ok(self.node.records.write_wake(self.sandbox, &note)?)
    }
}

impl Paused for NodeSandbox<'_> {
    type Error = anyhow::Error;

    fn is_paused(&self) -> anyhow::Result<bool> {
        self.connected(|sandbox| sandbox.is_paused())
    }

    fn has_gofers(&self) -> anyhow::Result<bool> {
        self.connected(|sandbox| sandbox.has_gofers())
    }

    fn let_run(&self) -> anyhow::Result<bool> {
        self.stage("recorded");
        let was_paused = self.connected(|sandbox| sandbox.let_run())?;
        self.stage("resumed");
        if was_paused && self.dozed.get() {
            self.woken_from.set(Some(Depth::Dozing));
        }
        Ok(was_paused)
    }

    fn never_ran(error: &anyhow::Error) -> bool {
        error
            .downcast_ref::<resume::Error>()
            .is_some_and(PausedSandbox::never_ran)
    }

    fn take_back(&self, left: &Left) -> anyhow::Result<()> {
        Ok(resume::take_back(self.ledger_file()?, self.sandbox, left)?)
    }
}

impl Sandbox for NodeSandbox<'_> {
    fn recorded(&self) -> anyhow::Result<Recorded> {
        Ok(match self.node.records.state(self.sandbox)? {
            SandboxState::Running => Recorded::Running,
            SandboxState::Hibernated { image, unstarted } => {
                Recorded::Hibernated { image, unstarted }
            }
            SandboxState::Restoring { .. } => Recorded::Restoring,
        })
    }

    fn ledger(&self) -> anyhow::Result<LedgerState> {
        Ok(self.ledger_file()?.read()?)
    }

    fn holding(&self, image: &ImageId) -> Holding {
        let found =
            || -> anyhow::Result<Image> { Ok(self.store()?.image(&self.pod()?.namespace, image)?) };
        match found() {
            Ok(_) => Holding::Held,
            Err(error) => match error.downcast_ref::<ImageError>() {
                Some(ImageError::Missing { .. }) => Holding::Missing,
                _ => Holding::Unreadable,
            },
        }
    }

    fn pause(&self) -> anyhow::Result<Option<Pause>> {
        let dozed = self.node.records.doze(self.sandbox)?.is_some();
        let mut control = self.control.borrow_mut();
        if control.is_none() {
            *control = self.node.runsc.connect(self.sandbox).ok();
        }
        let Some(connected) = control.as_mut() else {
            return Ok(None);
        };
        let records = &self.node.records;
        if !pause::is_paused(records, connected, self.sandbox, CALL_LIMIT)? {
            return Ok(None);
        }
        self.dozed.set(dozed);
        Ok(Some(match dozed {
            true => Pause::Doze,
            false => Pause::Other,
        }))
    }

    fn is_held_open(&self) -> anyhow::Result<bool> {
        let records = &self.node.records;
        Ok(held_open::is_held_open(records, self.sandbox)?)
    }

    fn is_suspended(&self) -> anyhow::Result<bool> {
        Ok(self.node.records.suspends(&self.pod()?.pod_uid))
    }

    fn append(&self, entry: &Entry) -> anyhow::Result<u64> {
        Ok(self.ledger_file()?.append(entry)?.seq)
    }

    fn append_at(&self, seq: u64, entry: &Entry) -> anyhow::Result<()> {
        self.ledger_file()?.append_at(seq, entry)?;
        Ok(())
    }

    fn is_fenced(error: &anyhow::Error) -> bool {
        let of_ledger = error.downcast_ref::<ledger_file::Error>();
        matches!(of_ledger, Some(ledger_file::Error::Fenced { .. }))
    }

    fn end(&self, image: &ImageId) -> anyhow::Result<()> {
        // A connection would be one to the sandbox that ends.
        self.control.borrow_mut().take();
        end(self.node, self.sandbox, image)
    }

    fn copy(&self, image: &ImageId) -> anyhow::Result<ImageId> {
        let pod = self.pod()?;
        // The Pod has saved nothing yet.
        let copy = ImageId::new(pod.pod_uid.clone(), 1)?;
        let store = self.store()?;
        store.copy_image(&pod.namespace, image, &copy, &pod.name)?;
        Ok(copy)
    }

    fn sleep_unstarted(&self, image: &ImageId, origin: Origin) -> anyhow::Result<()> {
        let records = &self.node.records;
        await_agent(|| records.has_probes(self.sandbox));
        let state = SandboxState::Hibernated {
            image: image.clone(),
            unstarted: Some(origin),
        };
        records.write_state(self.sandbox, &state)?;
        let pause = records.container_dir(&self.sandbox.clone().into());
        keeper::ask(&pause, &Request::Hibernated, &[], CALL_LIMIT)?;
        for part in &self.opened()?.parts {
            // A keeper that cannot be reached has ended.
            let dir = records.container_dir(&part.id);
            let _ = keeper::ask(&dir, &Request::Doze, &[], CALL_LIMIT);
        }
        Ok(())
    }

    fn start_cold(&self, image: &ImageId, error: &anyhow::Error) -> anyhow::Result<()> {
        let refusal = Refusal {
            reason: reason_of(error),
            message: format!("{error:#}"),
        };
        failure::start_cold(self.node, self.pod()?, image, refusal)
    }

    fn is_final(error: &anyhow::Error) -> bool {
        let command = error.downcast_ref::<command::Error>();
        error.is::<Refusal>()
            || error.is::<ImageError>()
            || matches!(command, Some(command::Error::Failed { .. }))
    }

    fn take(&self, image: &ImageId) -> anyhow::Result<()> {
        let opened = self.opened()?;
        debug_assert_eq!(opened.image.id(), image);
        let taken = opened.image.mark_consumed(&self.pod()?.pod_uid);
        Ok(taken.map(drop).map_err(Refusal::from)?)
    }

    fn give_back(&self, image: &ImageId) -> anyhow::Result<()> {
        let opened = self.opened()?;
        debug_assert_eq!(opened.image.id(), image);
        let released = opened.image.release(&self.pod()?.pod_uid);
        Ok(released.map(drop).map_err(Refusal::from)?)
    }

    fn open(&self, image: &ImageId) -> anyhow::Result<()> {
        let open = || {
            let image = self.store()?.image(&self.pod()?.namespace, image)?;
            let parts = parts_of(self.node, self.sandbox, &image)?;
            Ok(Opened { image, parts })
        };
        let opened = made(&self.opened, open)?;
        ensure!(
            opened.image.id() == image,
            "image {image} is to be restored, and {} is open",
            opened.image.id()
        );
        Ok(())
    }

    fn restore(&self, _: &ImageId, awake: &Awake<'_, anyhow::Error>) -> anyhow::Result<()> {
        let Opened { image, parts } = self.opened()?;
        let restored = sandbox::restore(self.node, self.pod()?, image, parts, self.cause, awake);
        let stages = match &self.report {
            Some(_) => restored?,
            None => restored.context("cannot wake the hibernated sandbox")?,
        };
        *self.stages.borrow_mut() = stages;
        self.woken_from.set(Some(Depth::Hibernated));
        Ok(())
    }

    fn renew(&self, release: &dyn Fn()) -> anyhow::Result<()> {
        let Opened { image, parts } = self.opened()?;
        renew::renew(self.node, self.pod()?, image, parts, release)
    }

    fn report(&self) -> anyhow::Result<()> {
        if let Some(report) = &self.report {
            let pod = &self.pod()?.pod_uid;
            self.node.records.write_report(pod, report)?;
        }
        Ok(())
    }

    fn reason(error: &anyhow::Error) -> String {
        reason_of(error).to_owned()
    }

    fn catch_up(&self) -> anyhow::Result<()> {
        catch_up(self.node, self.sandbox)
    }

    fn refuse(refusal: transition::Refusal) -> anyhow::Error {
        refusal.into()
    }
}

/// Time in which the agent learns of a new sandbox: it looks five times a second.
const AGENT_LIMIT: Duration = Duration::from_secs(1);
/// Time between two looks for the agent's note.
const AGENT_INTERVAL: Duration = Duration::from_millis(5);

/// Waits until the agent has recorded the kubelet's probes. Without that the first probe would wake
/// the sandbox. A node whose agent is away does not hold the Pod up.
fn await_agent(has_noted: impl Fn() -> bool) {
    let deadline = Instant::now() + AGENT_LIMIT;
    while !has_noted() && Instant::now() < deadline {
        std::thread::sleep(AGENT_INTERVAL);
    }
}

/// Records that the sandbox runs, after a wake that was interrupted before it could record that.
/// The image is stale, and the sandbox runs or has crashed.
pub(super) fn catch_up(node: &Node, sandbox: &SandboxId) -> anyhow::Result<()> {
    put_quotas_back(node, sandbox);
    room::give_back(node, sandbox);
    node.records.write_state(sandbox, &SandboxState::Running)?;
    for part in node.records.containers_of(sandbox)? {
        // A keeper that finds no sandbox ends. A keeper that cannot be reached has ended.
        let dir = node.records.container_dir(&part.id);
        let _ = keeper::ask(&dir, &Request::Attach, &[], CALL_LIMIT);
    }
    Ok(())
}

/// Makes a transition, and records the wake if it was one.
fn make<'a, T>(
    node: &'a Node,
    sandbox: &'a SandboxId,
    cause: WakeCause,
    transition: impl FnOnce(&NodeSandbox<'a>) -> anyhow::Result<T>,
) -> anyhow::Result<T> {
    let sandbox = NodeSandbox::new(node, sandbox, cause);
    let made = transition(&sandbox)?;
    sandbox.record_wake(true)?;
    Ok(made)
}

/// Wakes the sandbox for a caller that needs it.
pub fn wake_up(node: &Node, sandbox: &SandboxId, cause: WakeCause) -> anyhow::Result<Found> {
    make(node, sandbox, cause, transition::wake_up)
}

/// Wakes a sandbox that hibernates or dozes; returns the pod's lock. Fails for a frozen sandbox.
pub fn lock_awake(node: &Node, sandbox: &SandboxId, cause: WakeCause) -> anyhow::Result<PodLock> {
    let lock = node.records.lock(sandbox)?;
    wake_up(node, sandbox, cause)?;
    Ok(lock)
}

/// Lets a sandbox run that dozes.
pub fn rouse(node: &Node, sandbox: &SandboxId, cause: WakeCause) -> anyhow::Result<Ran> {
    // Most sandboxes that get a container are awake, and are not connected to.
    match node.records.doze(sandbox)? {
        None => Ok(Ran::Already),
        Some(_) => make(node, sandbox, cause, transition::rouse),
    }
}

/// Resumes a sandbox that dozes, for its keeper, which releases what it holds by itself. A process
/// for that would take longer than the resume. Returns false where another process has the sandbox'
/// lock.
pub fn resume_in_keeper(node: &Node, sandbox: &SandboxId) -> anyhow::Result<bool> {
    let Some(_lock) = node.records.try_lock(sandbox)? else {
        return Ok(false);
    };
    resume_dozing(node, sandbox, WakeCause::Packet, false)
}

/// Resumes a sandbox that dozes, if no other process has to run for that; returns whether it runs.
/// `release`: has the keeper release the packets that it holds.
pub fn resume_dozing(
    node: &Node,
    sandbox: &SandboxId,
    cause: WakeCause,
    release: bool,
) -> anyhow::Result<bool> {
    if node.records.doze(sandbox)?.is_none() {
        return Ok(false);
    }
    let sandbox = NodeSandbox::new(node, sandbox, cause);
    let resumed = transition::resume_dozing(&sandbox)?;
    sandbox.record_wake(release)?;
    Ok(resumed == Resumed::Runs)
}

/// Lets a paused sandbox run.
pub fn run_on(node: &Node, sandbox: &SandboxId, cause: WakeCause) -> anyhow::Result<Ran> {
    make(node, sandbox, cause, transition::run_on)
}

/// Wakes a hibernated sandbox in place; returns whether it was hibernated.
pub fn wake_hibernated(node: &Node, sandbox: &SandboxId, cause: WakeCause) -> anyhow::Result<bool> {
    make(node, sandbox, cause, transition::wake)
}

/// Restores a hibernated sandbox for a step of the agent's plan; returns the note of the wake.
pub(super) fn restore_planned(
    node: &Node,
    sandbox: &SandboxId,
    image: &ImageId,
    cause: WakeCause,
) -> anyhow::Result<WakeNote> {
    let sandbox = NodeSandbox::new(node, sandbox, cause);
    transition::restore_planned(&sandbox, image)?;
    Ok(sandbox.note(Depth::Hibernated))
}

/// Brings the sandbox into the state in which a container can receive a signal.
pub fn before_signal(
    node: &Node,
    sandbox: &SandboxId,
    ends: bool,
    keeper_has_ended: impl FnOnce() -> bool,
) -> anyhow::Result<Delivery> {
    make(node, sandbox, WakeCause::Signal, |sandbox| {
        transition::before_signal(sandbox, ends, keeper_has_ended)
    })
}

/// Ends a paused sandbox whose memory is in an image; returns whether there was such an image.
pub fn stay_in_image(node: &Node, sandbox: &SandboxId) -> anyhow::Result<bool> {
    make(node, sandbox, WakeCause::Asked, transition::stay_in_image)
}

/// Completes the record of a wake that was interrupted; returns the recorded state of the sandbox.
pub fn settle(node: &Node, sandbox: &SandboxId) -> anyhow::Result<Recorded> {
    make(node, sandbox, WakeCause::Asked, transition::settle)
}

/// Fails where the sandbox is being suspended and has its memory in an image.
pub(super) fn ensure_stays(node: &Node, sandbox: &SandboxId) -> anyhow::Result<()> {
    make(node, sandbox, WakeCause::Asked, transition::ensure_stays)
}

/// The image that holds the sandbox' memory, by the ledger, if the store holds it.
pub fn memory_image(node: &Node, sandbox: &SandboxId) -> anyhow::Result<Option<ImageId>> {
    make(node, sandbox, WakeCause::Asked, transition::memory_image)
}

/// The connection to a sandbox that dozes; none to any other.
pub fn connect_to_dozing(node: &Node, sandbox: &SandboxId) -> anyhow::Result<Option<Control>> {
    if node.records.doze(sandbox)?.is_none() {
        return Ok(None);
    }
    let sandbox = NodeSandbox::new(node, sandbox, WakeCause::Asked);
    let pause = sandbox.pause()?;
    let control = sandbox.control.into_inner();
    Ok(control.filter(|_| pause == Some(Pause::Doze)))
}
