//! Dozing: an idle sandbox is paused, and its memory is in an image and in swap. The next use of
//! the sandbox resumes it.

use std::time::{Duration, Instant};

use anyhow::{bail, ensure};
use torpor_cgroup::reclaim::{self, Whose};
use torpor_core::ids::{ImageId, SandboxId};
use torpor_messages::keeper::{self, Request};
use torpor_records::{DozeNote, SandboxState, SleepNote, WakeCause};
use torpor_runsc::control::Control;
use torpor_runsc::sigstop;

use crate::node::{CALL_LIMIT, Node};
use crate::restore::Refusal;
use crate::restore::transitions;

/// Time for the agent to handle a dozing sandbox that is to end. The agent learns of the end of a
/// Pod when the kubelet does, and needs a twentieth of a second.
const AGENT_LIMIT: Duration = Duration::from_millis(500);

/// Limit for a garbage collection. A collection takes some hundredths of a second, and longer in a
/// Pod with little processor time. A caller that needs the sandbox waits for the collection.
const COLLECT_LIMIT: Duration = Duration::from_secs(1);

/// Pushes the sandbox' memory out into swap. Fails unless `image` holds the same memory, so that a
/// crash of the dozing sandbox loses nothing.
pub(crate) fn doze(node: &Node, sandbox: &SandboxId, image: &ImageId) -> anyhow::Result<()> {
    let running = node.records.state(sandbox)? == SandboxState::Running;
    let Some(control) = transitions::connect_to_dozing(node, sandbox)?.filter(|_| running) else {
        bail!("the sandbox does not doze");
    };
    ensure!(
        transitions::memory_image(node, sandbox)?.as_ref() == Some(image),
        "image {image} is not the sandbox's memory"
    );
    let pod = node.records.pod(sandbox)?;
    collect_garbage(control);
    // A running process reads some of its memory back, so the processes stop before the reclaim.
    stop_processes(node, sandbox);
    let working_set = || node.cgroups.working_set(pod.cgroup.parent()?);
    let before = working_set();
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
    Ok(())
}

/// Has the sentry collect its garbage. A save leaves much garbage. The sentry's next collection is
/// due an hour later (two minutes with Google's build), so a wake within that time has no
/// collection in it.
fn collect_garbage(mut control: Control) {
    if let Err(error) = control.collect_garbage(COLLECT_LIMIT) {
        crate::log_line!("{:#}", anyhow::Error::new(error));
    }
}

/// Stops the sandbox' processes, if its keeper answers for the pod's address meanwhile. Without the
/// stop the sandbox still dozes, and reads some of its memory back now and then. The caller holds
/// the lock.
fn stop_processes(node: &Node, sandbox: &SandboxId) {
    let pause = node.records.container_dir(&sandbox.clone().into());
    let keeper_answers = keeper::ask(&pause, &Request::Halt, &[], CALL_LIMIT);
    let stopped = match keeper_answers {
        Ok(_) => sigstop::stop_all(&node.runsc.root_of(sandbox), sandbox.as_str())
            .map_err(anyhow::Error::new),
        Err(error) => Err(error.into()),
    };
    if let Err(error) = stopped {
        // The sandbox' own network stack answers for the address.
        let _ = keeper::ask(&pause, &Request::GoOn, &[], CALL_LIMIT);
        crate::log_line!("cannot stop the processes of the dozing sandbox: {error:#}");
    }
}

/// Command of a keeper that has noticed a use of the sandbox (a packet): wakes the sandbox from a
/// doze or a hibernation. A sandbox that is awake stays awake.
pub fn wake(node: &Node, sandbox: &SandboxId, cause: WakeCause) -> anyhow::Result<()> {
    let _lock = transitions::lock_awake(node, sandbox, cause)?;
    Ok(node.records.note_call(sandbox)?)
}

/// Waits, at most for [`AGENT_LIMIT`], until the agent has handled a dozing sandbox of which a
/// container is to end.
///
/// The agent observes why the container is to end. If the Pod is evicted, another Pod continues its
/// memory, and the agent ends the sandbox' processes. Otherwise the agent resumes them, so that the
/// program ends by itself. The wait has a limit because the agent may be dead, and because the
/// kubelet also recreates single containers of a Pod that stays.
pub fn wait_for_agent(node: &Node, sandbox: &SandboxId) -> anyhow::Result<()> {
    let dozes = || {
        let running = node.records.state(sandbox)? == SandboxState::Running;
        anyhow::Ok(running && node.records.doze(sandbox)?.is_some())
    };
    if !dozes()? || transitions::memory_image(node, sandbox)?.is_none() {
        return Ok(());
    }
    let deadline = Instant::now() + AGENT_LIMIT;
    while dozes()? && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok(())
}
