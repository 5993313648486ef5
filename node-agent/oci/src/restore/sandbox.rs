//! The mechanics of a restore: which commands, in which order, what side by side.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use rustix::io::Errno;
use rustix::process::{Pid, Signal, kill_process};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use torpor_cgroup::swap;
use torpor_core::ids::SandboxId;
use torpor_link::net::{self, AddressWatch};
use torpor_link::packet_drop::{self, PacketDrop};
use torpor_records::Role;
use torpor_records::RunscRecord;
use torpor_records::{ContainerRecord, PodRecord, SandboxState, WakeCause};
use torpor_runsc::command::{Runsc, Stdio3};
use torpor_runsc::keeper::{self, Request, Rules};
use torpor_runsc::limits::write_boot_flags;
use torpor_runsc::process::is_zombie;
use torpor_runsc::spec::Spec;
use torpor_runsc::wake_slots::Turns;
use torpor_runsc_direct::{Start, filestore};
use torpor_snapshots::Image;

use super::begin::{self, BegunByUs, SECOND_TRY_LIMIT};
use super::memory::ensure_held_open;
use super::others::{Direct, ViaRunsc};
use super::{Refusal, room};
use crate::console::Terminal;
use crate::limits;
use crate::node::{CALL_LIMIT, COMMAND_LIMIT, Node};
use crate::packet_sockets;
use crate::stages::Stages;
use crate::start::stdio_of;

/// A killed process is gone within milliseconds, unless it is stuck in the kernel.
const KILL_LIMIT: Duration = Duration::from_secs(10);
/// The shim, parent of the sandbox' processes, asks for their status at once; where it died, the machine's first process
/// inherits them, and some ask every two seconds only.
const REAP_LIMIT: Duration = Duration::from_secs(3);

/// Restores the pod from the image. On success the sandbox runs, its state says so, and its keepers wait for its
/// containers' ends. On failure nothing of it runs. `awake` records that the image is stale: it is called when the sandbox
/// runs and nobody has heard of it yet, so that whoever is answered by it is answered by what no
/// crash takes back. It gets a function that gives back early what other wakes wait for: the turn,
/// and the machine's settings for a wake; the pod's quota holds again as well.
pub(super) fn restore(
    node: &Node,
    pod: &PodRecord,
    image: &Image,
    parts: &[ContainerRecord],
    cause: WakeCause,
    awake: impl Fn(&dyn Fn()) -> anyhow::Result<()>,
) -> anyhow::Result<Stages> {
    (node.config.admit_runsc(&pod.runsc_digest)).map_err(Refusal::from)?;
    let mut stages = Stages::new();
    let turns = Turns::new(&node.config.state_dir, node.config.wakes_at_once);
    let turn = turns.take(cause, &pod.namespace);
    stages.over("turnCame");
    let expedited = node.expedited_restore(image.manifest().size());
    let lent = RefCell::new(Some((turn, expedited)));
    let give_back = || {
        put_quotas_back(node, &pod.sandbox);
        drop(lent.take());
    };
    let awake = || awake(&give_back);
    // Stand until nothing runs of a sandbox that could not be restored.
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
        Err(error) if error.is::<BegunByUs>() => {
            begin::forget(node, pod);
            if began.elapsed() > SECOND_TRY_LIMIT {
                return Err(error);
            }
            eprintln!("torpor-oci: {error:#}; runsc starts it");
            attempt(None)
        }
        result => result,
    });
    // The turn lasts until what is left of a failed one is removed.
    let _turn = lent.take().map(|(turn, _)| turn);
    let result = result.flatten();
    if result.is_err() {
        // What ended it badly is the news; that the remains could not be removed will be seen by the next try.
        let _ = remove_remains(node, pod, parts);
    }
    room::give_back(node, &pod.sandbox);
    result.map(|()| stages)
}

/// A sandbox with a fifth of a processor would take six times as long to load its memory: for the moment of a wake the pod
/// has no limit. Whoever is killed meanwhile leaves it without one, until somebody else puts it back.
pub(super) fn without_quotas<T>(
    node: &Node,
    pod: &PodRecord,
    work: impl FnOnce() -> T,
) -> anyhow::Result<T> {
    lift_quotas(node, pod)?;
    let done = work();
    put_quotas_back(node, &pod.sandbox);
    Ok(done)
}

fn lift_quotas(node: &Node, pod: &PodRecord) -> anyhow::Result<()> {
    let Some(cgroup) = pod.cgroup.parent() else {
        return Ok(());
    };
    let quotas = node.cgroups.quotas(cgroup);
    if !quotas.is_empty() {
        node.records.note_quotas(&pod.sandbox, &quotas)?;
    }
    for quota in &quotas {
        quota.lift()?;
    }
    Ok(())
}

/// Where none are lifted nothing changes. That it fails is a reason for nobody to stop: a sandbox that runs is not ended for it, one that is to be
/// woken or removed does not wait for it, and its keeper tries again.
pub(crate) fn put_quotas_back(node: &Node, sandbox: &SandboxId) {
    let put_back = || -> anyhow::Result<()> {
        for quota in node.records.quotas(sandbox)? {
            quota.put_back()?;
        }
        Ok(node.records.forget_quotas(sandbox)?)
    };
    if let Err(error) = put_back() {
        eprintln!("torpor-oci: cannot restore the pod's limit of processor time: {error:#}");
    }
}

/// What is restored.
struct Restore<'a> {
    node: &'a Node,
    pod: &'a PodRecord,
    image: &'a Image,
    parts: &'a [ContainerRecord],
    /// In the words of `runsc boot`.
    limits: Vec<String>,
}

impl Restore<'_> {
    /// `kept`: what the sandbox is begun from; runsc begins it if there is nothing.
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
        // Of a sandbox that was put to sleep, by somebody who died before he could take it away: the one that comes is not paused.
        node.records.write_doze(&pod.sandbox, None)?;
        node.records.forget_execs(&pod.sandbox)?;
        node.cgroups.create(&pod.cgroup)?;
        swap::keep_in_memory(&node.cgroups, &pod.cgroup)?;
        // Its children, the sentry and the gofers, inherit the place, as runsc's do.
        node.cgroups.place(&pod.cgroup, std::process::id())?;
        stages.over("prepared");

        let terminals = subs
            .iter()
            .map(|sub| terminal_of(node, sub))
            .collect::<anyhow::Result<Vec<_>>>()?;
        let root_dir = node.records.container_dir(&root.id);
        let hush = self.bring_back(root, subs, &terminals, kept, stages, barriers)?;

        for (sub, terminal) in subs.iter().zip(&terminals) {
            let dir = node.records.container_dir(&sub.id);
            if let Some(terminal) = terminal {
                let console = [terminal.master.as_fd()];
                keeper::ask(&dir, &Request::Console, &console, CALL_LIMIT)?;
            }
            keeper::ask(&dir, &Request::Attach, &[], CALL_LIMIT)?;
        }
        // A pod without its first keeper or its shim is about to be taken away: as long as nobody has heard the sandbox, its memory is the image's.
        keeper::ask(&root_dir, &Request::Stdio, &[], CALL_LIMIT)?;
        ensure_held_open(node, &pod.sandbox)?;
        awake()?;
        stages.over("recorded");
        drop(hush);
        // Before the keeper lets through what it held: what is said after that would be lost.
        barriers.clear();
        let_be_heard(node, pod, &root_dir);
        stages.over("attached");
        // Who waits for a packet's answer has it already.
        packet_sockets::narrow(node, &pod.sandbox);
        Ok(())
    }

    /// Makes the sandbox and restores its containers: when it returns it runs, and nobody has heard it.
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
        let of = |kept| {
            // runsc says of a spec that cannot be read what is wrong with it.
            let spec = node.records.spec(&root.id).ok()?;
            let sandbox = pod.sandbox.as_str();
            Start::new(runsc, kept, sandbox, &root_dir, &spec, network, limits)
        };
        let start = &kept.as_ref().and_then(of);
        if start.is_none() {
            write_boot_flags(&root_dir, limits).context("cannot write the Pod's limits")?;
        }
        let known = kept.as_ref().filter(|_| start.is_some());
        let (mut ours, mut others) = (Vec::new(), Vec::new());
        for (record, terminal) in subs.iter().zip(terminals) {
            // The kept record of a container with a terminal names its old terminal.
            let known = known.filter(|_| terminal.is_none());
            match known.and_then(|kept| Direct::new(node, runsc, record, kept)) {
                Some(one) => ours.push(one),
                None => others.push(ViaRunsc {
                    record,
                    terminal: terminal.as_ref(),
                }),
            }
        }
        // What was wrong with its start may be seen as late as when its last container has come.
        let begun = |error: anyhow::Error| match start {
            Some(_) => error.context(BegunByUs),
            None => error,
        };
        std::thread::scope(|scope| {
            let verify = || -> anyhow::Result<()> { Ok(image.verify()?) };
            // Nothing of the image runs before all of it has been verified: of a pod of several containers nothing does before the last one is there.
            let verified = match &image.manifest().containers[..] {
                [] | [_] => verify().map(|()| None)?,
                _ => Some(scope.spawn(verify)),
            };
            let hush = hush(pod, image);
            *barriers = mute(pod, &root_dir)?;
            if let Some(namespace) = &pod.network_namespace {
                net::put_back(namespace, &pod.addresses)?;
            }

            // The root container's restore makes the sandbox and hands the image over; the last of them all does the work. What each of the others
            // needs before that is made side by side. Direct begin with the sandbox, but not before the image has been verified: with three on two processors the sandbox
            // would wait. runsc's (a command, a gofer) begin when the image is about to be handed over, and need longer to be ready for it.
            let handing_over = match &others[..] {
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
            stages.over("verified");
            let gofers: Vec<_> = (ours.iter())
                .map(|one| (one, scope.spawn(|| one.begin_gofer())))
                .collect();
            if let Some(handing_over) = handing_over {
                handing_over.wait(root_is_over.as_fd())?;
            }
            let restored_others: Vec<_> = (others.iter())
                .map(|one| (one, scope.spawn(|| one.restore(node, runsc, path))))
                .collect();
            join(restored_root)?.map_err(begun)?;
            stages.over("imageHandedOver");
            for (one, gofer) in gofers {
                let gofer = join(gofer)?.map_err(begun)?;
                one.restore(node, gofer).map_err(begun)?;
            }
            for (one, restored) in restored_others {
                let restored = one.or_again(join(restored)?, node, pod, runsc, path);
                restored.map_err(begun)?;
            }
            stages.over("restored");
            Ok(hush)
        })
    }
}

/// Nobody is to hear the sandbox before it is recorded that its image is stale, also when this program is killed in between: then the
/// sandbox is ended and restored once more. So the pause container's keeper holds what arrives, until it is told to wait for the sandbox.
pub(super) fn hold_packets(pod: &PodRecord, pause: &Path) {
    if pod.network_namespace.is_none() {
        return;
    }
    match keeper::ask(pause, &Request::Hold(Rules::default()), &[], CALL_LIMIT) {
        Ok((answer, _)) if answer.ok => {}
        // The resume is worth more.
        Ok((answer, _)) => eprintln!(
            "torpor-oci: the keeper does not hold packets: {}",
            answer.message
        ),
        Err(error) => eprintln!("torpor-oci: {:#}", anyhow::Error::new(error)),
    }
}

/// Keeps what the sandbox sends inside the pod: gVisor runs what it restores at once, and the
/// restore may still fail and be done again. Returns the descriptors that keep the sandbox muted
/// after its keeper has ended.
fn mute(pod: &PodRecord, pause: &Path) -> Result<Vec<OwnedFd>, keeper::Error> {
    if pod.network_namespace.is_none() {
        return Ok(Vec::new());
    }
    match keeper::ask(pause, &Request::HoldEgress, &[], CALL_LIMIT) {
        Ok((_, barriers)) => Ok(barriers),
        // A keeper that holds no packets cannot mute the sandbox; the wake is worth more.
        Err(error @ keeper::Error::Refused { .. }) => {
            eprintln!("torpor-oci: {:#}", anyhow::Error::new(error));
            Ok(Vec::new())
        }
        // The restore of a pod whose keeper has ended fails, after the sandbox would have been
        // heard.
        Err(error) => Err(error),
    }
}

/// The image is stale: there is no way back. Whoever dies here leaves the rest to the agent, or to who needs the sandbox next.
fn let_be_heard(node: &Node, pod: &PodRecord, root_dir: &Path) {
    // Whoever reads the state after this may use the sandbox, and a keeper that finds it dead ends.
    let running = SandboxState::Running;
    if let Err(error) = node.records.write_state(&pod.sandbox, &running) {
        return eprintln!("torpor-oci: {:#}", anyhow::Error::new(error));
    }
    // A keeper that has gone meanwhile ends the pod, and the kubelet makes another.
    if let Err(error) = keeper::ask(root_dir, &Request::Attach, &[], CALL_LIMIT) {
        eprintln!("torpor-oci: {:#}", anyhow::Error::new(error));
    }
}

/// runsc takes the addresses away for the sandbox, then hands the image over.
fn watch_addresses(pod: &PodRecord) -> anyhow::Result<Option<AddressWatch>> {
    let with_addresses = !pod.addresses.addresses.is_empty();
    let namespace = pod.network_namespace.as_deref().filter(|_| with_addresses);
    Ok(namespace.map(AddressWatch::begin).transpose()?)
}

/// What arrives from now on finds nobody who knows its connection. A Pod that is new has none, and is refused at once.
fn hush(pod: &PodRecord, image: &Image) -> Option<PacketDrop> {
    let namespace = pod.network_namespace.as_deref()?;
    if image.manifest().image_id.pod() != &pod.pod_uid {
        return None;
    }
    match PacketDrop::begin(namespace, None) {
        Ok(hush) => Some(hush),
        // By the pod's keeper, which goes on until the sandbox runs.
        Err(packet_drop::Error::Already) => None,
        Err(error) => {
            // The wake is worth more than connections that have something to say at this moment.
            eprintln!("torpor-oci: {:#}", anyhow::Error::new(error));
            None
        }
    }
}

/// gVisor hands a sub-container its terminal when it starts and has no place for one when it is restored
/// (runsc/boot/controller.go, RestoreSubcontainer): then it takes standard streams only. A terminal of ours given as
/// those three is the same to the program, whose saved descriptors are connected to it; and the spec says no terminal.
fn terminal_of(node: &Node, record: &ContainerRecord) -> anyhow::Result<Option<Terminal>> {
    if !record.terminal {
        return Ok(None);
    }
    let mut spec = Spec(node.records.spec(&record.id)?);
    spec.forget_terminal();
    node.records.write_spec(&record.id, &spec.0)?;
    Terminal::open().map(Some)
}

/// gVisor takes a container only after it has been handed the image (runsc/boot/controller.go, RestoreSubcontainer), and
/// changes nothing when one comes before; but runsc says so on the container's standard error, so this is the exception.
pub(super) fn came_too_early(error: &anyhow::Error) -> bool {
    format!("{error:#}").contains("sandbox is not being restored")
}

pub(super) fn restore_container(
    node: &Node,
    runsc: &Runsc,
    record: &ContainerRecord,
    terminal: Option<&Terminal>,
    image: &Path,
) -> anyhow::Result<()> {
    let dir = node.records.container_dir(&record.id);
    let stdio = match (record.role, terminal) {
        // A program that says nothing.
        (Role::Sandbox, _) => None,
        (Role::Container, Some(terminal)) => Some(Stdio3 {
            stdin: terminal.slave.try_clone()?,
            stdout: terminal.slave.try_clone()?,
            stderr: terminal.slave.try_clone()?,
        }),
        (Role::Container, None) => Some(stdio_of(&dir)?),
    };
    let restored = runsc.restore(record.id.as_str(), &dir, image, stdio, COMMAND_LIMIT);
    restored.with_context(|| match record.role {
        Role::Sandbox => "cannot restore the sandbox".to_owned(),
        Role::Container => format!("cannot restore container {}", record.name),
    })
}

fn join<T>(handle: std::thread::ScopedJoinHandle<'_, T>) -> anyhow::Result<T> {
    handle
        .join()
        .map_err(|_| anyhow::anyhow!("a thread of the restore panicked"))
}

/// Ends the processes of a pod and removes what runsc keeps of it, but for what its next start is told from.
pub(super) fn end(node: &Node, pod: &PodRecord) -> anyhow::Result<()> {
    begin::keep(node, pod);
    let parts = node.records.containers_of(&pod.sandbox)?;
    remove_remains(node, pod, &parts)
}

fn remove_remains(node: &Node, pod: &PodRecord, parts: &[ContainerRecord]) -> anyhow::Result<()> {
    kill_processes(node, &pod.cgroup)?;
    // Once, for all of it: where a sandbox' records are is seen by those of its root container.
    let runsc = node.runsc_of(&pod.sandbox);
    // The root container last: the others' records name it.
    for part in parts.iter().rev() {
        if runsc.knows(part.id.as_str(), pod.sandbox.as_str()) {
            runsc.delete(part.id.as_str(), COMMAND_LIMIT)?;
        }
    }
    // Nothing of it lives: what there still is belongs to a container that is gone, and the next restore would read it.
    runsc.sweep(pod.sandbox.as_str())?;
    // What does not run is not paused either.
    node.records.forget_pause(&pod.sandbox)?;
    remove_filestores(node, pod, parts)?;
    remove_volume_filestores(pod)
}

/// The files that gVisor writes to ([`filestore`]): a restore that failed leaves some, and the next one finds them in its way.
pub(super) fn remove_filestores(
    node: &Node,
    pod: &PodRecord,
    parts: &[ContainerRecord],
) -> anyhow::Result<()> {
    for part in parts {
        let Ok(spec) = node.records.spec(&part.id) else {
            continue;
        };
        let root = spec.pointer("/root/path").and_then(|path| path.as_str());
        if let Some(root) = root {
            remove_file(&Path::new(root).join(filestore(pod.sandbox.as_str())))?;
        }
    }
    Ok(())
}

fn remove_volume_filestores(pod: &PodRecord) -> anyhow::Result<()> {
    let name = filestore(pod.sandbox.as_str());
    let mut files = pod.volumes.iter().map(|volume| volume.source.join(&name));
    files.try_for_each(|path| remove_file(&path))
}

fn remove_file(path: &Path) -> anyhow::Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("cannot remove {}", path.display()))
        }
        _ => Ok(()),
    }
}

/// Kills every process of a cgroup but this one and waits until each has been reaped, because runsc takes one that has not
/// for a running one; not for ever: a parent that never asks is not ours to mend.
pub(crate) fn kill_processes(node: &Node, cgroup: &Path) -> anyhow::Result<()> {
    let killed = end_processes(node, cgroup)?;
    let began = Instant::now();
    // Newer kernels take an ended process out of its cgroup's list before it is reaped.
    while killed.iter().any(|pid| is_zombie(*pid)) && began.elapsed() < REAP_LIMIT {
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}

/// Kills every process of a cgroup but this one and waits until they have ended; answers which they were.
pub(crate) fn end_processes(node: &Node, cgroup: &Path) -> anyhow::Result<BTreeSet<i32>> {
    let own = i32::try_from(std::process::id()).unwrap_or(0);
    let began = Instant::now();
    let mut killed = BTreeSet::new();
    loop {
        let mut pids = node.cgroups.pids(cgroup)?;
        // 0 stands for a process of another pid namespace, which cannot be signalled from here.
        pids.retain(|pid| *pid != own && *pid > 0 && !is_zombie(*pid));
        if pids.is_empty() {
            return Ok(killed);
        }
        if began.elapsed() > KILL_LIMIT {
            bail!(
                "processes {pids:?} in cgroup {} do not end",
                cgroup.display()
            );
        }
        for pid in pids {
            let Some(process) = Pid::from_raw(pid) else {
                continue;
            };
            match kill_process(process, Signal::KILL) {
                Ok(()) | Err(Errno::SRCH) => killed.insert(pid),
                Err(error) => return Err(error).context("cannot kill a process of the sandbox"),
            };
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[cfg(test)]
mod tests {
    use anyhow::ensure;
    use torpor_runsc::keeper::Answer;

    use super::*;
    use crate::create::listening_socket;
    use crate::node::tests::Limited;
    use crate::restore::catch_up;

    const LIMIT: &str = "20000 100000";

    /// It may use a fifth of a processor.
    fn limited() -> Limited {
        Limited::by(&[("cpu.max", LIMIT)])
    }

    impl Limited {
        fn processor(&self) -> String {
            self.get("cpu.max")
        }

        fn lift(&self) {
            lift_quotas(&self.node, &self.pod).expect("lifted");
            assert_eq!(self.processor(), "max 100000");
        }
    }

    #[test]
    fn the_limit_is_lifted_for_the_work_and_back_after_it_however_that_ends() {
        let limited = limited();
        for well in [true, false] {
            let work = || -> anyhow::Result<()> {
                assert_eq!(limited.processor(), "max 100000");
                ensure!(well, "it failed");
                Ok(())
            };
            let done = without_quotas(&limited.node, &limited.pod, work).expect("put back");
            assert_eq!(
                (done.is_ok(), limited.processor()),
                (well, LIMIT.to_owned())
            );
        }
    }

    #[test]
    fn no_sandbox_runs_unmuted_for_a_keeper_that_has_ended() {
        let dir = tempfile::tempdir().expect("a directory");
        let mut pod = limited().pod;
        pod.network_namespace = Some(dir.path().join("netns"));
        let muted = || mute(&pod, dir.path());
        assert!(matches!(muted(), Err(keeper::Error::Gone { .. })));
        let socket = listening_socket(&dir.path().join(keeper::SOCKET)).expect("a socket");
        let next = || rustix::net::accept(&socket).expect("a connection");
        std::thread::scope(|scope| {
            // It ends between the question and its answer.
            scope.spawn(|| keeper::receive(&next()).expect("a question"));
            muted().expect_err("no answer");
            scope.spawn(|| {
                let peer = next();
                keeper::receive(&peer).expect("a question");
                let answer = Answer::refused("NotMuted", "packets are not held".to_owned());
                let bytes = serde_json::to_vec(&answer).expect("an answer");
                keeper::send(&peer, &bytes, &[]).expect("sent");
            });
            assert!(muted().is_ok_and(|barriers| barriers.is_empty()));
        });
        pod.network_namespace = None;
        mute(&pod, Path::new("/nowhere")).expect("nothing to mute");
    }

    #[test]
    fn whoever_catches_up_with_a_wake_that_was_cut_off_puts_its_limit_back() {
        // Where it was killed.
        type Killed = fn(&Limited);
        let moments: [(&str, Killed); 4] = [
            ("before it began", |_| {}),
            ("noted", |limited| {
                limited.lift();
                limited.set("cpu.max", LIMIT);
            }),
            ("lifted", Limited::lift),
            ("lifted again", |limited| {
                limited.lift();
                limited.lift();
            }),
        ];
        for (moment, killed) in moments {
            let limited = limited();
            let (node, sandbox) = (&limited.node, &limited.pod.sandbox);
            killed(&limited);
            for again in [false, true] {
                catch_up(node, sandbox).expect("caught up");
                assert_eq!(limited.processor(), LIMIT, "{moment} {again}");
                assert_eq!(node.records.quotas(sandbox).expect("read"), []);
            }
            let state = node.records.state(sandbox).expect("written");
            assert_eq!(state, SandboxState::Running);
            // Nothing is left that would undo what the kubelet sets from now on.
            limited.set("cpu.max", "max 100000");
            catch_up(node, sandbox).expect("caught up");
            assert_eq!(limited.processor(), "max 100000", "{moment}");
        }
    }
}
