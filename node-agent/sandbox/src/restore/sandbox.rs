//! The steps of a restore, their order and their concurrency.

use std::cell::RefCell;
use std::path::Path;
use std::time::Instant;

use anyhow::{Context, bail};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use torpor_cgroup::swap;
use torpor_link::net::{self, AddressWatch};
use torpor_link::packet_drop::{self, PacketDrop};
use torpor_messages::keeper::{self, Request};
use torpor_records::Role;
use torpor_records::RunscRecord;
use torpor_records::{ContainerRecord, PodRecord, SandboxState, WakeCause};
use torpor_runsc::limits::write_boot_flags;
use torpor_runsc::spec::Spec;
use torpor_runsc::wake_slots::WakeSlots;
use torpor_runsc_direct::Start;
use torpor_snapshots::Image;

use super::begin::{self, SECOND_TRY_LIMIT, StartedWithoutRunsc};
use super::direct::Direct;
use super::quotas::{put_quotas_back, without_quotas};
use super::refusal::Refusal;
use super::remains::remove_remains;
use super::room;
use super::via_runsc::ViaRunsc;
use crate::console::Terminal;
use crate::node::{CALL_LIMIT, Node};
use crate::packet_sockets;
use crate::stages::Stages;
use crate::{address, limits};

/// Restores the pod from the image.
///
/// On success the sandbox runs, its state is Running, and its keepers wait for the ends of its
/// containers. On failure no process of it runs.
///
/// `awake` records that the image is stale. It is called when the sandbox runs, before a peer
/// receives anything from the sandbox: so no crash takes back an answer that a peer has received.
/// It also checks that the Pod's shim and keepers live. It gets a function that releases early the
/// turn and the machine's settings, for which other wakes wait, and restores the pod's quota.
pub(super) fn restore(
    node: &Node,
    pod: &PodRecord,
    image: &Image,
    parts: &[ContainerRecord],
    cause: WakeCause,
    awake: impl Fn(&dyn Fn()) -> anyhow::Result<()>,
) -> anyhow::Result<Stages> {
    (node.config.admit_runsc(&pod.runsc_digest)).map_err(Refusal::from)?;
    let mut stages = Stages::begin();
    let turns = WakeSlots::new(&node.config.state_dir, node.config.wakes_at_once);
    let turn = turns.take(cause, &pod.namespace);
    stages.finish("turnCame");
    let expedited = node.expedited_restore(image.manifest().size());
    let wake_resources = RefCell::new(Some((turn, expedited)));
    let give_back = || {
        put_quotas_back(node, &pod.sandbox);
        drop(wake_resources.take());
    };
    let awake = || awake(&give_back);
    // The barriers stay until no process of a failed restore runs.
    let mut barriers = Vec::new();
    let limits = limits::flags(node, pod)?;
    room::make(node, pod);
    let restore = Restore {
        node,
        pod,
        image,
        parts,
        limits,
    };
    let mut attempt = |kept| restore.attempt(kept, &awake, &mut stages, &mut barriers);
    let began = Instant::now();
    let result = without_quotas(node, pod, || match attempt(begin::kept(node, pod)) {
        Err(error) if error.is::<StartedWithoutRunsc>() => {
            begin::forget(node, pod);
            if began.elapsed() > SECOND_TRY_LIMIT {
                return Err(error);
            }
            crate::log_line!("{error:#}; runsc starts it");
            attempt(None)
        }
        result => result,
    });
    // The turn is held until the remains of a failed restore are removed.
    let _turn = wake_resources.take().map(|(turn, _)| turn);
    let result = result.flatten();
    if result.is_err() {
        // The caller gets the error of the restore. The next restore begins with the same removal,
        // and returns its error.
        let _ = remove_remains(node, pod, parts);
        if let Some(namespace) = &pod.network_namespace {
            address::put_back(namespace, &pod.addresses);
        }
    }
    room::give_back(node, &pod.sandbox);
    result.map(|()| stages)
}

/// The restore of one pod.
struct Restore<'a> {
    node: &'a Node,
    pod: &'a PodRecord,
    image: &'a Image,
    parts: &'a [ContainerRecord],
    /// Arguments of `runsc boot`.
    limits: Vec<String>,
}

impl Restore<'_> {
    /// Restores the pod once. `kept`: runsc's record from which Torpor starts the sandbox; none
    /// where runsc starts it.
    fn attempt(
        &self,
        kept: Option<RunscRecord>,
        awake: &impl Fn() -> anyhow::Result<()>,
        stages: &mut Stages,
        barriers: &mut Vec<OwnedFd>,
    ) -> anyhow::Result<()> {
        let &Self {
            node, pod, parts, ..
        } = self;
        let Some((root, subs)) = parts
            .split_first()
            .filter(|(root, _)| root.role == Role::Sandbox)
        else {
            bail!("the pod has no pause container");
        };
        remove_remains(node, pod, parts)?;
        // A process that put the sandbox to sleep may have died before it removed the note of the
        // doze. The restored sandbox is not paused.
        node.records.write_doze(&pod.sandbox, None)?;
        node.records.forget_execs(&pod.sandbox)?;
        node.cgroups.create(&pod.cgroup)?;
        swap::keep_in_memory(&node.cgroups, &pod.cgroup)?;
        // The children of this process, the sentry and the gofers, inherit the cgroup, as runsc's
        // children do.
        node.cgroups.place(&pod.cgroup, std::process::id())?;
        stages.finish("prepared");

        let terminals = subs
            .iter()
            .map(|sub| terminal_of(node, sub))
            .collect::<anyhow::Result<Vec<_>>>()?;
        let root_dir = node.records.container_dir(&root.id);
        let packet_drop = self.bring_back(root, subs, &terminals, kept, stages, barriers)?;

        for (sub, terminal) in subs.iter().zip(&terminals) {
            let dir = node.records.container_dir(&sub.id);
            if let Some(terminal) = terminal {
                let console = [terminal.master.as_fd()];
                keeper::ask(&dir, &Request::Console, &console, CALL_LIMIT)?;
            }
            keeper::ask(&dir, &Request::Attach, &[], CALL_LIMIT)?;
        }
        // The kubelet is about to recreate a pod without its shim or the pause container's keeper.
        // The image stays the memory until a peer has received anything from the sandbox, so the
        // restore fails before that.
        keeper::ask(&root_dir, &Request::Stdio, &[], CALL_LIMIT)?;
        awake()?;
        stages.finish("recorded");
        drop(packet_drop);
        // The barriers end before the keeper releases held packets. Otherwise the sandbox' answers
        // to those packets would be lost.
        barriers.clear();
        record_running(node, pod, &root_dir);
        stages.finish("attached");
        // A peer that waits for the answer to a packet has the answer already.
        packet_sockets::exclude_router_packets(node, &pod.sandbox);
        Ok(())
    }

    /// Makes the sandbox and restores its containers. On success the sandbox runs, and no peer has
    /// received anything from it.
    fn bring_back(
        &self,
        root: &ContainerRecord,
        subs: &[ContainerRecord],
        terminals: &[Option<Terminal>],
        kept: Option<RunscRecord>,
        stages: &mut Stages,
        barriers: &mut Vec<OwnedFd>,
    ) -> anyhow::Result<Option<PacketDrop>> {
        let &Self {
            node,
            pod,
            image,
            ref limits,
            ..
        } = self;
        let path = image.path();
        let runsc = &node.runsc_of(&pod.sandbox);
        let root_dir = node.records.container_dir(&root.id);
        let network = pod.network_namespace.as_deref();
        let start_from = |kept| {
            // runsc returns the error of a spec that cannot be read.
            let spec = node.records.spec(&root.id).ok()?;
            let sandbox = pod.sandbox.as_str();
            Start::new(runsc, kept, sandbox, &root_dir, &spec, network, limits)
        };
        let start = &kept.as_ref().and_then(start_from);
        if start.is_none() {
            write_boot_flags(&root_dir, limits).context("cannot write the Pod's limits")?;
        }
        let known = kept.as_ref().filter(|_| start.is_some());
        let (mut direct, mut via_runsc) = (Vec::new(), Vec::new());
        for (record, terminal) in subs.iter().zip(terminals) {
            // The kept record of a container with a terminal names its old terminal.
            let known = known.filter(|_| terminal.is_none());
            match known.and_then(|kept| Direct::new(node, runsc, record, kept)) {
                Some(one) => direct.push(one),
                None => via_runsc.push(ViaRunsc {
                    record,
                    terminal: terminal.as_ref(),
                }),
            }
        }
        // A fault in the start of the sandbox may appear as late as at the restore of its last
        // container.
        let mark_start = |error: anyhow::Error| match start {
            Some(_) => error.context(StartedWithoutRunsc),
            None => error,
        };
        std::thread::scope(|scope| {
            let verify = || -> anyhow::Result<()> { Ok(image.verify()?) };
            // No program of the image runs before the whole image has been verified. A pod of
            // several containers runs none before the last container is restored, so its image is
            // verified meanwhile.
            let verified = match &image.manifest().containers[..] {
                [] | [_] => verify().map(|()| None)?,
                _ => Some(scope.spawn(verify)),
            };
            let packet_drop = drop_packets(pod, image);
            *barriers = hold_egress(pod, &root_dir)?;
            if let Some(namespace) = &pod.network_namespace {
                net::put_back(namespace, &pod.addresses)?;
            }

            // The restore of the root container makes the sandbox and hands the image over. The
            // restore of the last container loads the memory. The preparations of the other
            // containers run concurrently. Torpor's own gofers start beside the sandbox, but not
            // before the image has been verified: three of them on two processors would delay the
            // sandbox. runsc's restores (a command and a gofer each) start when the image is about
            // to be handed over, and need longer until they are ready for the image.
            let handing_over = match &via_runsc[..] {
                [] => None,
                _ => watch_addresses(pod)?,
            };
            let (root_is_over, ends_with_root) = UnixStream::pair()?;
            let restored_root = scope.spawn(move || {
                let _ends_with_root = ends_with_root;
                begin::restore_root(node, runsc, root, start.as_ref(), path)
            });
            if let Some(verified) = verified {
                join(verified)??;
            }
            stages.finish("verified");
            let gofers: Vec<_> = (direct.iter())
                .map(|one| (one, scope.spawn(|| one.begin_gofer())))
                .collect();
            if let Some(handing_over) = handing_over {
                handing_over.wait(root_is_over.as_fd())?;
            }
            let restored_via_runsc: Vec<_> = (via_runsc.iter())
                .map(|one| (one, scope.spawn(|| one.restore(node, runsc, path))))
                .collect();
            join(restored_root)?.map_err(mark_start)?;
            stages.finish("imageHandedOver");
            for (one, gofer) in gofers {
                let gofer = join(gofer)?.map_err(mark_start)?;
                one.restore(node, gofer).map_err(mark_start)?;
            }
            for (one, restored) in restored_via_runsc {
                let restored = one.or_again(join(restored)?, node, pod, runsc, path);
                restored.map_err(mark_start)?;
            }
            stages.finish("restored");
            Ok(packet_drop)
        })
    }
}

/// Has the pause container's keeper hold arriving packets, until [`Request::Attach`].
///
/// No peer may receive anything from the sandbox before its image is recorded as stale. If this
/// process is killed before that, the sandbox is ended and restored once more.
pub(super) fn hold_packets(pod: &PodRecord, pause: &Path) {
    if pod.network_namespace.is_none() {
        return;
    }
    match keeper::ask(pause, &Request::Hold, &[], CALL_LIMIT) {
        Ok((answer, _)) if answer.ok => {}
        // The resume is more important, and goes on.
        Ok((answer, _)) => crate::log_line!("the keeper does not hold packets: {}", answer.message),
        Err(error) => crate::log_line!("{:#}", anyhow::Error::new(error)),
    }
}

/// Has the pause container's keeper hold the packets that the sandbox sends: gVisor runs a restored
/// sandbox at once, and the restore may still fail and be repeated. Returns the barriers,
/// descriptors that block the packets also after the shim has ended.
fn hold_egress(pod: &PodRecord, pause: &Path) -> Result<Vec<OwnedFd>, keeper::Error> {
    if pod.network_namespace.is_none() {
        return Ok(Vec::new());
    }
    match keeper::ask(pause, &Request::HoldEgress, &[], CALL_LIMIT) {
        Ok((_, barriers)) => Ok(barriers),
        // A keeper that holds no packets cannot block the sandbox' packets. The wake is more
        // important, and goes on.
        Err(error @ keeper::Error::Refused { .. }) => {
            crate::log_line!("{:#}", anyhow::Error::new(error));
            Ok(Vec::new())
        }
        // The keeper has ended, so the restore would fail later in any case, after peers had
        // received packets of the sandbox.
        Err(error) => Err(error),
    }
}

/// Records that the sandbox runs, and has the pause container's keeper release held packets.
///
/// The image is stale now, so errors are only logged. If this process dies here, the agent or the
/// next use of the sandbox completes the wake.
fn record_running(node: &Node, pod: &PodRecord, root_dir: &Path) {
    // From now on callers may use the sandbox, and a keeper that finds no sandbox ends.
    let running = SandboxState::Running;
    if let Err(error) = node.records.write_state(&pod.sandbox, &running) {
        return crate::log_line!("{:#}", anyhow::Error::new(error));
    }
    // If the keeper has ended meanwhile, the pod's sandbox ends with it, and the kubelet makes
    // another one.
    if let Err(error) = keeper::ask(root_dir, &Request::Attach, &[], CALL_LIMIT) {
        crate::log_line!("{:#}", anyhow::Error::new(error));
    }
}

/// Begins to watch the addresses of the pod's network namespace: runsc removes them for the sandbox
/// just before it hands the image over. None for a pod without addresses.
fn watch_addresses(pod: &PodRecord) -> anyhow::Result<Option<AddressWatch>> {
    let with_addresses = !pod.addresses.addresses.is_empty();
    let namespace = pod.network_namespace.as_deref().filter(|_| with_addresses);
    Ok(namespace.map(AddressWatch::begin).transpose()?)
}

/// Drops arriving packets, until the result is dropped: no network stack has the packets'
/// connections. None for a new Pod, which has no connections yet and refuses connections at once.
fn drop_packets(pod: &PodRecord, image: &Image) -> Option<PacketDrop> {
    let namespace = pod.network_namespace.as_deref()?;
    if image.manifest().image_id.pod() != &pod.pod_uid {
        return None;
    }
    match PacketDrop::begin(namespace, None) {
        Ok(packet_drop) => Some(packet_drop),
        // The pod's keeper drops the packets, until the sandbox runs.
        Err(packet_drop::Error::Already) => None,
        Err(error) => {
            // The wake is more important than connections with a packet at this moment.
            crate::log_line!("{:#}", anyhow::Error::new(error));
            None
        }
    }
}

/// Opens a terminal of the host for the restore of a container that has a terminal; none for other
/// containers.
///
/// gVisor accepts a terminal when a sub-container starts, but only three standard streams when it
/// is restored (runsc/boot/controller.go, RestoreSubcontainer). So the restore gets the terminal of
/// the host as the three streams. The program notices no difference: its saved descriptors are
/// connected to that terminal. The container's spec is changed to one without a terminal.
fn terminal_of(node: &Node, record: &ContainerRecord) -> anyhow::Result<Option<Terminal>> {
    if !record.terminal {
        return Ok(None);
    }
    let mut spec = Spec(node.records.spec(&record.id)?);
    spec.forget_terminal();
    node.records.write_spec(&record.id, &spec.0)?;
    Terminal::open().map(Some)
}

fn join<T>(handle: std::thread::ScopedJoinHandle<'_, T>) -> anyhow::Result<T> {
    handle
        .join()
        .map_err(|_| anyhow::anyhow!("a thread of the restore panicked"))
}

#[cfg(test)]
mod tests {
    use torpor_messages::keeper::Answer;

    use super::*;
    use crate::node::tests::record;

    #[test]
    fn no_sandbox_runs_without_an_egress_hold_if_its_keeper_has_ended() {
        let dir = tempfile::tempdir().expect("a directory");
        let mut pod = record();
        pod.network_namespace = Some(dir.path().join("netns"));
        let hold = || hold_egress(&pod, dir.path());
        assert!(matches!(hold(), Err(keeper::Error::Gone { .. })));
        let socket =
            torpor_messages::wire::listen(&dir.path().join(keeper::SOCKET)).expect("a socket");
        let next = || rustix::net::accept(&socket).expect("a connection");
        std::thread::scope(|scope| {
            // The keeper ends between the request and the answer.
            scope.spawn(|| torpor_messages::wire::receive(&next()).expect("a question"));
            hold().expect_err("no answer");
            scope.spawn(|| {
                let peer = next();
                torpor_messages::wire::receive(&peer).expect("a question");
                let answer = Answer::refused("NotMuted", "packets are not held".to_owned());
                let bytes = serde_json::to_vec(&answer).expect("an answer");
                torpor_messages::wire::send(&peer, &bytes, &[]).expect("sent");
            });
            assert!(hold().is_ok_and(|barriers| barriers.is_empty()));
        });
        pod.network_namespace = None;
        hold_egress(&pod, Path::new("/nowhere")).expect("nothing to hold");
    }
}
