//! The agent observes, plans and tells; the shim takes the steps. Each may die at any point, and
//! any call may fail or never answer.

use jiff::Timestamp;
use torpor_core::transition::{self, Left, Paused, Resumed, Sandbox};
use torpor_core::{
    Action, Departure, Doze, Entry, Failures, ImageId, ImageState, Live, Memory, Outcome,
    PodPresence, Policy, Reason, SandboxId, SnapshotState, SnapshotWish, Step, plan,
};

use crate::node::{Fault, NodeSandbox};
use crate::schedule::Random;
use crate::world::{Image, World};

/// The agent's memory, lost when it dies.
#[derive(Debug, Default)]
pub(crate) struct Agent {
    failures: Failures,
    /// The partial image whose checkpoint came back.
    written: Option<ImageId>,
    /// By the last look a user has deleted the Pod to remove it.
    by_user: bool,
    /// When it was first seen that the Pod is gone.
    gone_since: Option<Timestamp>,
}

/// The steps of a plan.
pub(crate) struct Planned {
    steps: Vec<Step>,
    basis: Basis,
}

/// State that the shim compares before it takes the first step: the basis of the request
/// (`torpor_messages::service::Basis`) and the fence.
#[derive(Debug, PartialEq)]
struct Basis {
    live: Live,
    dozes: bool,
    in_session: bool,
    sandbox: Option<SandboxId>,
    ledger_seq: u64,
}

impl Basis {
    fn of(world: &World) -> Self {
        let observed = world.observe(&Failures::default());
        Self {
            live: observed.live,
            dozes: observed.doze.is_some(),
            in_session: observed.sessions > 0,
            sandbox: observed.sandbox,
            ledger_seq: world.ledger().seq,
        }
    }
}

/// How a pass ended.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Pass {
    /// Nothing to do before this second, if any.
    Idle(Option<i64>),
    Worked,
    Died,
}

/// Faults per thousand calls.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Faults {
    pub(crate) fail: u64,
    pub(crate) unknown: u64,
    pub(crate) die: u64,
    pub(crate) tell: u64,
}

impl Faults {
    pub(crate) const NONE: Faults = Faults {
        fail: 0,
        unknown: 0,
        die: 0,
        tell: 0,
    };
}

/// The process is gone.
struct Dead;

impl Agent {
    /// Looks and acts, without anything between.
    pub(crate) fn pass(&mut self, world: &mut World, random: &mut Random, faults: Faults) -> Pass {
        match self.look(world, random, faults) {
            Ok(planned) => self.take(world, random, faults, &planned),
            Err(pass) => pass,
        }
    }

    /// Observes and plans. `Err`: there is nothing to do.
    pub(crate) fn look(
        &mut self,
        world: &mut World,
        random: &mut Random,
        faults: Faults,
    ) -> Result<Planned, Pass> {
        let mut desired = world.desired(self.departure(world));
        self.failures.saw(world.live);
        let observed = world.observe(&self.failures);
        let policy = Policy::default();
        let mut made = plan(&desired, &observed, &policy, world.time());
        if made.asks && made.steps.is_empty() && !random.chance(faults.tell) {
            world.say("asked", String::new);
            desired.answer = Some(world.answer());
            made = plan(&desired, &observed, &policy, world.time());
        }
        let given_up = |reason: &Reason| matches!(reason, Reason::GivenUp { .. });
        if made.why.iter().any(given_up) {
            world.say("given up", String::new);
        }
        assert_eq!(
            made,
            plan(&desired, &observed, &policy, world.time()),
            "not deterministic"
        );
        if made.awaits_turn().is_some() {
            world.say("turn awaited", String::new);
        }
        if world.verbose {
            println!("  plan {:?} {:?}", made.why, made.status.phase);
        }
        if !random.chance(faults.tell) {
            tell(world, &made.status.snapshots);
        }
        if made.steps.is_empty() {
            // A task without an answer asks again at once.
            let again = made.asks.then(|| world.time());
            let made_at = made.wake_at.into_iter().chain(again).min();
            return Err(Pass::Idle(made_at.map(|at| at.as_second())));
        }
        let pressed = |reason: &Reason| matches!(reason, Reason::Pressure { .. });
        if made.why.iter().any(pressed) {
            world.say("asleep for the node", String::new);
        }
        Ok(Planned {
            steps: made.steps,
            basis: Basis::of(world),
        })
    }

    /// Takes the steps, if the sandbox is in the state that they were planned for. The agent may
    /// have died since.
    pub(crate) fn take(
        &mut self,
        world: &mut World,
        random: &mut Random,
        faults: Faults,
        planned: &Planned,
    ) -> Pass {
        if planned.basis != Basis::of(world) {
            world.say("stale", || format!("{:?}", planned.steps));
            return Pass::Worked;
        }
        for step in &planned.steps {
            let outcome = match self.execute(world, random, faults, step) {
                Ok(outcome) => outcome,
                Err(Dead) => {
                    world.say("agent died", || format!("at {:?}", step.action));
                    *self = Self::default();
                    return Pass::Died;
                }
            };
            self.failures.note(&step.action, &outcome, world.time());
            world.check();
            if !matches!(outcome, Outcome::Done | Outcome::Already) {
                world.say("step not done", || {
                    format!("{:?}: {outcome:?}", step.action)
                });
                self.run_on_after(world, random, faults, planned, &outcome);
                break;
            }
        }
        Pass::Worked
    }

    /// Lets the sandbox run at once where the shim does. It may die before it has.
    fn run_on_after(
        &mut self,
        world: &mut World,
        random: &mut Random,
        faults: Faults,
        planned: &Planned,
        last: &Outcome,
    ) {
        let held = |image: &ImageId| world.held(image);
        let runs_on = transition::runs_on_after(planned.basis.live, last, world.ledger(), held);
        if runs_on && world.doze.is_none() && may_die(random, faults).is_ok() {
            world.say("runs on", String::new);
            let _ = self.act(world, random, faults, &Action::Resume, None);
            world.check();
        }
    }

    /// Facts about how the Pod went.
    fn departure(&mut self, world: &World) -> Option<Departure> {
        match world.seen.presence {
            PodPresence::Present => self.by_user = false,
            PodPresence::Terminating => self.by_user = !world.seen.evicted,
            PodPresence::Gone => {
                let since = *self.gone_since.get_or_insert_with(|| world.time());
                return Some(Departure {
                    since,
                    by_user: self.by_user,
                    disk_short: false,
                });
            }
        }
        None
    }

    fn execute(
        &mut self,
        world: &mut World,
        random: &mut Random,
        faults: Faults,
        step: &Step,
    ) -> Result<Outcome, Dead> {
        if step.fence.ledger_seq != world.ledger().seq {
            panic!(
                "{step:?} was planned for another ledger than {}",
                world.ledger().seq
            );
        }
        may_die(random, faults)?;
        if let Some(Entry::Asleep {
            by_itself: true, ..
        }) = &step.before
        {
            world.say("fell asleep", String::new);
        }
        let left = world
            .restorable()
            .filter(|_| step.before == Some(Entry::Awake) && step.action == Action::Resume);
        if let Some(image) = &left
            && !world.gofers
        {
            return end_broken(world, random, faults, image);
        }
        if let Some(before) = &step.before
            && !append(world, random, faults, before)?
        {
            return Ok(full());
        }
        let seq = world.ledger().seq;
        let left = left.map(|image| Left { image, seq });
        may_die(random, faults)?;
        let outcome = if random.chance(faults.fail) {
            Outcome::Failed {
                reason: "Injected".into(),
                message: "injected".into(),
            }
        } else {
            self.act(world, random, faults, &step.action, left)?
        };
        world.check();
        may_die(random, faults)?;
        if random.chance(faults.unknown) {
            return Ok(Outcome::Unknown {
                message: "injected".into(),
            });
        }
        match (&outcome, &step.action) {
            // The command that woke the sandbox has appended it.
            (Outcome::Done, Action::Wake { .. }) if world.ledger().memory == Memory::Live => {}
            (Outcome::Done | Outcome::Already, _) => {
                if let Some(after) = &step.after
                    && !append(world, random, faults, after)?
                {
                    return Ok(full());
                }
            }
            (Outcome::Failed { reason, .. }, Action::Wake { image }) => {
                let entry = Entry::WakeFailed {
                    image: image.clone(),
                    reason: reason.clone(),
                };
                append(world, random, faults, &entry)?;
            }
            (Outcome::Failed { .. } | Outcome::Unknown { .. } | Outcome::Stale, _) => {}
        }
        Ok(outcome)
    }

    fn act(
        &mut self,
        world: &mut World,
        random: &mut Random,
        faults: Faults,
        action: &Action,
        left: Option<Left>,
    ) -> Result<Outcome, Dead> {
        world.say(name_of(action), || format!("{action:?}"));
        Ok(match action {
            Action::Pause | Action::Freeze => {
                let unreached = *action == Action::Pause;
                assert!(
                    unreached || world.restorable().is_none(),
                    "what reaches it is not in its image"
                );
                match world.live {
                    Live::Running => {
                        world.live = Live::Paused;
                        Outcome::Done
                    }
                    Live::Paused => {
                        world.doze = None;
                        Outcome::Already
                    }
                    Live::None | Live::Unknown => no_sandbox(),
                }
            }
            Action::Doze => {
                if world.live == Live::None {
                    return Ok(no_sandbox());
                }
                // The note comes first: without a pause it has no effect.
                world.doze = Some(Doze { reclaimed: false });
                may_die(random, faults)?;
                let outcome = match world.live {
                    Live::Paused => Outcome::Already,
                    _ => Outcome::Done,
                };
                world.live = Live::Paused;
                outcome
            }
            Action::Reclaim { image } => {
                assert!(image.is_some(), "this runtime makes images");
                assert_eq!(
                    world.restorable().as_ref(),
                    image.as_ref(),
                    "memory pushed out without an image of it"
                );
                if world.live != Live::Paused || world.doze.is_none() {
                    return Ok(no_sandbox());
                }
                world.doze = Some(Doze { reclaimed: true });
                Outcome::Done
            }
            Action::Resume => resume(world, random, faults, left)?,
            Action::Checkpoint { image } => self.checkpoint(world, random, faults, image)?,
            Action::Commit { image } => self.commit(world, image),
            Action::End { image } => end(world, random, faults, image)?,
            Action::Wake { image } => wake(world, random, faults, image)?,
            Action::Bind { .. } => {
                if world.live != Live::Running {
                    return Ok(no_sandbox());
                }
                world.bound = Some(world.sandboxes);
                Outcome::Done
            }
            Action::Record => Outcome::Done,
            Action::ForgetSleep => {
                world.record = None;
                if world.live == Live::None {
                    world.containers = false;
                }
                Outcome::Done
            }
            Action::DiscardPartial { image } => {
                match world.images.get(image).map(|i| i.state) {
                    Some(ImageState::Partial) => world.images.remove(image),
                    found => panic!("{image} is to be discarded as partial, and is {found:?}"),
                };
                Outcome::Done
            }
            Action::DiscardImage { image } => {
                let kept = world.keep_last && world.pod != PodPresence::Gone;
                assert!(
                    !kept || world.last_image().as_ref() != Some(image),
                    "{image} was to be kept for a crash"
                );
                let found = world
                    .images
                    .get_mut(image)
                    .expect("a discarded image is there");
                found.state = ImageState::Partial;
                world.check();
                may_die(random, faults)?;
                world.images.remove(image);
                Outcome::Done
            }
            Action::ReleaseImage { image } => panic!("{image} is no other Pod's"),
            Action::DiscardLedger => {
                assert_eq!(world.pod, PodPresence::Gone);
                world.discard_ledger();
                Outcome::Done
            }
        })
    }

    fn checkpoint(
        &mut self,
        world: &mut World,
        random: &mut Random,
        faults: Faults,
        image: &ImageId,
    ) -> Result<Outcome, Dead> {
        if world.live != Live::Paused {
            return Ok(no_sandbox());
        }
        assert!(world.save_turn, "saved out of turn");
        let memory = world.memory;
        let partial = Image {
            memory,
            state: ImageState::Partial,
        };
        let before = world.images.insert(image.clone(), partial);
        assert!(before.is_none(), "the name {image} was used twice");
        may_die(random, faults)?;
        if world.disk_full || random.chance(faults.fail) {
            return Ok(full());
        }
        self.written = Some(image.clone());
        Ok(Outcome::Done)
    }

    fn commit(&mut self, world: &mut World, image: &ImageId) -> Outcome {
        let written = self.written.take();
        let disk_full = world.disk_full;
        let Some(found) = world.images.get_mut(image) else {
            return no_sandbox();
        };
        match found.state {
            ImageState::Committed => Outcome::Already,
            ImageState::Partial if disk_full => full(),
            ImageState::Partial => {
                assert_eq!(
                    written.as_ref(),
                    Some(image),
                    "commit of what nobody finished writing"
                );
                found.state = ImageState::Committed;
                Outcome::Done
            }
        }
    }
}

/// Lets the sandbox run. `left`: the image that was its memory until the ledger said otherwise.
fn resume(
    world: &mut World,
    random: &mut Random,
    faults: Faults,
    left: Option<Left>,
) -> Result<Outcome, Dead> {
    let has_process = world.live != Live::None;
    let sandbox = NodeSandbox::new(world, random, faults);
    if !has_process {
        // There is no socket to connect to.
        let taken_back = left.map(|left| sandbox.take_back(&left)).transpose();
        return taken_back.map(|_| no_sandbox()).or_else(outcome_of);
    }
    match transition::resume(&sandbox, left.as_ref()) {
        Ok(Resumed::Runs) => Ok(Outcome::Done),
        Ok(Resumed::RanAlready) => Ok(Outcome::Already),
        Ok(Resumed::GoferGone) => {
            let image = left.expect("a sandbox without an image is resumed").image;
            end_broken(world, random, faults, &image)
        }
        Err(fault) => outcome_of(fault),
    }
}

/// The sandbox has lost a gofer and cannot run on: its memory is the image's alone, from which the
/// next plan wakes it.
fn end_broken(
    world: &mut World,
    random: &mut Random,
    faults: Faults,
    image: &ImageId,
) -> Result<Outcome, Dead> {
    world.say("gofer gone", String::new);
    let outcome = end(world, random, faults, image)?;
    Ok(match outcome {
        Outcome::Done => Outcome::Failed {
            reason: "GoferGone".into(),
            message: "a gofer has ended".into(),
        },
        other => other,
    })
}

fn end(
    world: &mut World,
    random: &mut Random,
    faults: Faults,
    image: &ImageId,
) -> Result<Outcome, Dead> {
    let had_processes = world.live != Live::None;
    if had_processes {
        assert_eq!(world.images[image].memory, world.memory);
    }
    match NodeSandbox::new(world, random, faults).end(image) {
        Ok(()) if had_processes => Ok(Outcome::Done),
        Ok(()) => Ok(Outcome::Already),
        Err(fault) => outcome_of(fault),
    }
}

fn wake(
    world: &mut World,
    random: &mut Random,
    faults: Faults,
    image: &ImageId,
) -> Result<Outcome, Dead> {
    let sandbox = NodeSandbox::new(world, random, faults);
    match transition::restore_planned(&sandbox, image) {
        Ok(()) => Ok(Outcome::Done),
        Err(fault) => outcome_of(fault),
    }
}

fn outcome_of(fault: Fault) -> Result<Outcome, Dead> {
    let reason = match fault {
        Fault::Died => return Err(Dead),
        Fault::Failed(reason) => reason,
        Fault::Refused(_) => "Refused",
        Fault::NotReceived => "NotReceived",
        Fault::Fenced => "Fenced",
    };
    Ok(Outcome::Failed {
        reason: reason.into(),
        message: "injected".into(),
    })
}

fn append(
    world: &mut World,
    random: &mut Random,
    faults: Faults,
    entry: &Entry,
) -> Result<bool, Dead> {
    if random.chance(faults.die) {
        world.append(entry, Some(random.pick(4096)));
        return Err(Dead);
    }
    Ok(world.append(entry, None))
}

fn may_die(random: &mut Random, faults: Faults) -> Result<(), Dead> {
    match random.chance(faults.die) {
        true => Err(Dead),
        false => Ok(()),
    }
}

fn full() -> Outcome {
    Outcome::Failed {
        reason: "DiskFull".into(),
        message: "no room".into(),
    }
}

fn no_sandbox() -> Outcome {
    Outcome::Failed {
        reason: "NoSandbox".into(),
        message: "no sandbox".into(),
    }
}

/// Writes snapshot states to the API, as the agent does.
fn tell(world: &mut World, drafts: &[torpor_core::SnapshotDraft]) {
    for draft in drafts {
        let images = world.images.clone();
        let Some(snapshot) = world
            .snapshots
            .iter_mut()
            .find(|s| s.intent.uid == draft.uid)
        else {
            continue;
        };
        match &draft.state {
            SnapshotState::Committed { image, stale, .. } => {
                snapshot.intent.image = Some(image.clone());
                snapshot.memory = images.get(image).map(|i| i.memory);
                snapshot.stale = *stale;
            }
            SnapshotState::Released => {
                assert_eq!(snapshot.intent.wish, SnapshotWish::Delete);
                world.snapshots.retain(|s| s.intent.uid != draft.uid);
                world.say("snapshot released", || draft.uid.to_string());
            }
            // The status goes on naming the image that it named.
            SnapshotState::Pending { .. }
            | SnapshotState::Saving
            | SnapshotState::Failed { .. }
            | SnapshotState::Releasing => {}
        }
    }
}

fn name_of(action: &Action) -> &'static str {
    match action {
        Action::Pause => "pause",
        Action::Freeze => "freeze",
        Action::Doze => "doze",
        Action::Reclaim { .. } => "reclaim",
        Action::Resume => "resume",
        Action::Checkpoint { .. } => "checkpoint",
        Action::Commit { .. } => "commit",
        Action::End { .. } => "end",
        Action::Wake { .. } => "wake",
        Action::Bind { .. } => "bind",
        Action::Record => "record",
        Action::ForgetSleep => "forget sleep",
        Action::DiscardPartial { .. } => "discard partial",
        Action::DiscardImage { .. } => "discard image",
        Action::ReleaseImage { .. } => "release image",
        Action::DiscardLedger => "discard ledger",
    }
}
