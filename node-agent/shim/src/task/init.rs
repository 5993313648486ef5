//! The first process of a container: a thread of the shim is its keeper.

use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;

use anyhow::Context;
use containerd_shim::protos::events::task::{TaskOOM, TaskStart};
use containerd_shim::protos::types::mount::Mount;
use torpor_core::ids::ContainerId;
use torpor_sandbox::log_line;

use super::container::{Container, Pod, lock};
use super::process::Life;
use super::streams::{self, Paths};
use super::verbs::{self, Caller};
use super::{exited, own_pid};
use crate::KILLED;
use crate::keeper::{self, Handover, Streams};
use crate::rootfs;

/// The number of SIGKILL.
const SIGKILL: &str = "9";

/// Creates a container, and starts its keeper.
pub(crate) fn create(
    pod: &Arc<Pod>,
    caller: Caller<'_>,
    id: ContainerId,
    bundle: &Path,
    mounts: &[Mount],
    paths: Paths,
) -> anyhow::Result<()> {
    pod.node()?;
    let _creating = lock(&pod.creating);
    rootfs::mount(bundle, mounts)?;
    let created = begin(pod, caller, id.clone(), bundle, paths);
    if created.is_err() {
        // containerd does not delete a container that it could not create.
        if let Err(error) = verbs::run("delete", &["--force", id.as_str()]) {
            log_line!("cannot remove the container: {error:#}");
        }
        rootfs::unmount(bundle);
    }
    created
}

fn begin(
    pod: &Arc<Pod>,
    caller: Caller<'_>,
    id: ContainerId,
    bundle: &Path,
    paths: Paths,
) -> anyhow::Result<()> {
    let (streams, held) = streams::open(&paths)?;
    let (handover, files) = verbs::create(caller, bundle, &id)?;
    for warning in &handover.warnings {
        log_line!("container {}: {warning}", id.as_str());
    }
    let container = Arc::new(Container {
        id,
        bundle: bundle.to_owned(),
        paths,
        life: Life::new(),
        held: held.into(),
        execs: Default::default(),
        starting: Default::default(),
    });
    let keeper = {
        let (pod, container) = (Arc::clone(pod), Arc::clone(&container));
        move || keep(&pod, &container, &handover, files, streams)
    };
    std::thread::Builder::new()
        .name("keeper".to_owned())
        .spawn(keeper)
        .context("cannot start the container's keeper")?;
    pod.add(container);
    Ok(())
}

/// Runs the container's keeper, and records and publishes the container's end.
fn keep(
    pod: &Pod,
    container: &Container,
    handover: &Handover,
    files: Vec<OwnedFd>,
    streams: Streams,
) {
    let served = pod
        .node()
        .and_then(|node| keeper::serve(node, &container.id, handover, files, streams));
    let code = served.unwrap_or_else(|error| {
        let id = container.id.as_str();
        log_line!("the keeper of container {id} has failed: {error:#}");
        // The program holds the container's output, and nothing would report its end.
        if let Err(error) = verbs::run("kill", &[id, SIGKILL]) {
            log_line!("cannot end container {id}: {error:#}");
        }
        KILLED
    });
    // containerd waits for the end of the output.
    drop(std::mem::take(&mut *lock(&container.held)));
    let kills_before = *lock(&container.starting);
    let id = container.id.to_string();
    let kills = oom_kills(pod, container).zip(kills_before);
    if code == KILLED && kills.is_some_and(|(now, before)| now > before) {
        let event = TaskOOM {
            container_id: id.clone(),
            ..TaskOOM::default()
        };
        pod.events.publish(&event);
    }
    let exit = container.life.end(code);
    pod.events.publish(&exited(&container.id, &id, exit));
}

/// Starts a created container.
pub(crate) fn start(pod: &Pod, caller: Caller<'_>, container: &Container) -> anyhow::Result<()> {
    let mut starting = lock(&container.starting);
    *starting = oom_kills(pod, container);
    verbs::run_for(caller, "start", &[container.id.as_str()])?;
    container.life.start();
    let event = TaskStart {
        container_id: container.id.to_string(),
        pid: own_pid(),
        ..TaskStart::default()
    };
    pod.events.publish(&event);
    Ok(())
}

/// Returns how many processes of the pod's sandbox the kernel has killed for want of memory.
fn oom_kills(pod: &Pod, container: &Container) -> Option<u64> {
    let node = pod.node().ok()?;
    let sandbox = node.container(&container.id).ok()?.sandbox;
    let cgroup = node.records.pod(&sandbox).ok()?.cgroup;
    node.cgroups.oom_kills(&cgroup)
}

/// Deletes a container that has ended or never ran.
pub(crate) fn delete(pod: &Pod, container: &Container) -> anyhow::Result<()> {
    verbs::run("delete", &[container.id.as_str()])?;
    // The command has ended the keeper.
    container.life.wait();
    // Exec'd processes that never started end with their container: containerd may wait for them.
    for exec in lock(&container.execs).values() {
        exec.life.end(KILLED);
    }
    rootfs::unmount(&container.bundle);
    pod.remove(&container.id);
    Ok(())
}
