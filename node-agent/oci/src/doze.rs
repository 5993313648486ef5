//! Dozing: a sandbox that is paused because it was idle, with its memory in an image and in swap. Whoever needs it resumes it.

use std::time::{Duration, Instant};

use anyhow::{bail, ensure};
use torpor_cgroup::reclaim::{self, Whose};
use torpor_core::ids::{ImageId, SandboxId};
use torpor_records::{Depth, DozeNote, SandboxState, SleepNote, WakeCause};
use torpor_runsc::control::Control;
use torpor_runsc::keeper::{self, Answer, Request};
use torpor_runsc::pause;
use torpor_runsc::resume::Resumed;
use torpor_runsc::sigstop;

use crate::exec::awake;
use crate::node::{CALL_LIMIT, Node};
use crate::restore::{self, AboutToRun, Refusal};
use crate::stages::Stages;

/// The agent hears of a Pod that goes when the kubelet does, and needs a twentieth of a second.
const AGENT_LIMIT: Duration = Duration::from_millis(500);

/// A collection takes some hundredths of a second, and longer in a Pod that may use little of a processor. Whoever needs the sandbox waits for it.
const COLLECT_LIMIT: Duration = Duration::from_secs(1);

/// Verb of the agent: push the sandbox' memory out. Only with an image that is its memory too: who dies while it dozes loses nothing.
pub(crate) fn doze(node: &Node, sandbox: &SandboxId, image: &ImageId) -> anyhow::Result<Answer> {
    let running = node.records.state(sandbox)? == SandboxState::Running;
    let Some(control) = dozing(node, sandbox)?.filter(|_| running) else {
        bail!("the sandbox does not doze");
    };
    ensure!(
        restore::memory_image(node, sandbox)?.as_ref() == Some(image),
        "image {image} is not the sandbox's memory"
    );
    let pod = node.records.pod(sandbox)?;
    collect_garbage(control);
    // Before its memory is pushed out: who runs reads some of it back.
    halt(node, sandbox);
    let working_set = || node.cgroups.working_set(pod.cgroup.parent()?);
    let before = working_set();
    let reclaimed =
        reclaim::reclaim(&node.cgroups, &pod.cgroup, Whose::Ours).map_err(|error| Refusal {
            reason: error.reason(),
            message: format!("{:#}", anyhow::Error::new(error)),
        })?;
    let note = DozeNote { reclaimed: true };
    node.records.write_doze(sandbox, Some(note))?;
    if let (Some(before), Some(after)) = (before, working_set()) {
        let note = SleepNote::new(before, after, None);
        node.records.write_sleep(sandbox, &note)?;
    }
    Ok(Answer::ok(serde_json::to_value(reclaimed)?))
}

/// The sentry's next collection, which is due an hour after this one (two minutes with Google's build), is no part of a wake before that. A save leaves much to collect.
fn collect_garbage(mut control: Control) {
    if let Err(error) = control.collect_garbage(COLLECT_LIMIT) {
        eprintln!("torpor-oci: {:#}", anyhow::Error::new(error));
    }
}

/// Stops the sandbox' processes, unless nobody would speak for it meanwhile. One that is not stopped dozes all the same, and reads some of its
/// memory back now and then. The caller holds the lock.
fn halt(node: &Node, sandbox: &SandboxId) {
    let pause = node.records.container_dir(&sandbox.clone().into());
    let spoken_for = keeper::ask(&pause, &Request::Halt, &[], CALL_LIMIT);
    let halted = match spoken_for {
        Ok(_) => sigstop::halt(&node.runsc.root_of(sandbox), sandbox.as_str())
            .map_err(anyhow::Error::new),
        Err(error) => Err(error.into()),
    };
    if let Err(error) = halted {
        // It speaks for itself.
        let _ = keeper::ask(&pause, &Request::GoOn, &[], CALL_LIMIT);
        eprintln!("torpor-oci: cannot stop the processes of the dozing sandbox: {error:#}");
    }
}

/// Verb of whoever has seen that the sandbox is needed (a packet): wakes it, however deep it sleeps. One that is awake stays so.
pub(crate) fn wake(node: &Node, sandbox: &SandboxId, cause: WakeCause) -> anyhow::Result<Answer> {
    let _lock = awake(node, sandbox, cause)?;
    node.records.note_call(sandbox)?;
    Ok(Answer::ok(serde_json::Value::Null))
}

/// Resumes the sandbox if it dozes; answers whether it did. The caller holds the lock.
pub(crate) fn rouse(node: &Node, sandbox: &SandboxId, cause: WakeCause) -> anyhow::Result<bool> {
    let mut stages = Stages::new();
    match resume(node, sandbox, &mut stages)? {
        Resumed::Runs => {}
        Resumed::RanAlready => return Ok(false),
        Resumed::GoferGone => return restore::restored(node, sandbox, cause),
    }
    let pause = node.records.container_dir(&sandbox.clone().into());
    // A keeper that cannot be told is gone, and with it what it held back.
    let _ = keeper::ask(&pause, &Request::Release, &[], CALL_LIMIT);
    stages.over("released");
    node.records
        .write_wake(sandbox, &stages.note(cause, Depth::Dozing))?;
    Ok(true)
}

/// The same for the keeper itself, which lets through what it held: to start a program for it would take longer than the rest.
/// Not while somebody else is at work on the sandbox.
pub(crate) fn rouse_at_once(node: &Node, sandbox: &SandboxId) -> anyhow::Result<bool> {
    let Some(_lock) = node.records.try_lock(sandbox)? else {
        return Ok(false);
    };
    let mut stages = Stages::new();
    let resumed = resume(node, sandbox, &mut stages)? == Resumed::Runs;
    if resumed {
        node.records
            .write_wake(sandbox, &stages.note(WakeCause::Packet, Depth::Dozing))?;
    }
    Ok(resumed)
}

/// A container that dozes is to end. Whether its memory is kept (the Pod is evicted, another goes on) or it wakes for its program's own end
/// is for the agent to say, which sees why: it ends the sandbox' processes or resumes them. It is given a moment; it may be dead, or the Pod
/// stays and the kubelet wants this container anew.
pub(crate) fn left_to_agent(node: &Node, sandbox: &SandboxId) -> anyhow::Result<()> {
    let dozes = || {
        let running = node.records.state(sandbox)? == SandboxState::Running;
        anyhow::Ok(running && node.records.doze(sandbox)?.is_some())
    };
    if !dozes()? || restore::memory_image(node, sandbox)?.is_none() {
        return Ok(());
    }
    let deadline = Instant::now() + AGENT_LIMIT;
    while dozes()? && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok(())
}

/// Resumes the sandbox if it dozes.
fn resume(node: &Node, sandbox: &SandboxId, stages: &mut Stages) -> anyhow::Result<Resumed> {
    let Some(mut control) = dozing(node, sandbox)? else {
        return Ok(Resumed::RanAlready);
    };
    let left = match restore::about_to_run(node, &control, sandbox)? {
        AboutToRun::Recorded(left) => left,
        AboutToRun::GoferGone => return Ok(Resumed::GoferGone),
    };
    stages.over("recorded");
    let resumed = restore::resume(node, &mut control, sandbox, left)?;
    match resumed {
        Resumed::Runs => {
            stages.over("resumed");
            node.records.note_call(sandbox)?;
        }
        Resumed::RanAlready => {
            bail!("another process resumed the sandbox without holding its lock")
        }
        Resumed::GoferGone => {}
    }
    Ok(resumed)
}

/// The way to a sandbox that dozes; none to one that does not, or that died while it dozed.
fn dozing(node: &Node, sandbox: &SandboxId) -> anyhow::Result<Option<Control>> {
    if node.records.doze(sandbox)?.is_none() {
        return Ok(None);
    }
    let Ok(mut control) = node.runsc.connect(sandbox) else {
        return Ok(None);
    };
    let dozes = pause::is_dozing(&node.records, &mut control, sandbox, CALL_LIMIT)?;
    Ok(dozes.then_some(control))
}
