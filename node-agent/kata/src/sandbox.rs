//! A Pod's sandbox and its state, from containerd's answers. Pure.

use std::path::PathBuf;

use serde_json::Value;
use torpor_core::ids::SandboxId;
use torpor_core::state::Live;

use crate::proto::containers::Container;
use crate::proto::tasks::{Process, Status};

/// A sandbox of a Pod: a virtual machine with its containers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sandbox {
    /// Id of the sandbox container.
    pub id: SandboxId,
    /// containerd's name of its runtime, such as `io.containerd.kata-qemu.v2`.
    pub runtime: String,
    /// `linux.cgroupsPath` of the sandbox container. Kata places the virtual machine in this cgroup
    /// (`sandbox_cgroup_only`, Kata's default).
    pub cgroup: Option<PathBuf>,
    /// The other containers, each with its own cgroup, sorted by id.
    pub members: Vec<Member>,
}

/// A container of the Pod other than the sandbox container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Member {
    pub id: String,
    pub cgroup: Option<PathBuf>,
}

/// Returns the sandboxes of one Pod that one of these runtimes runs. There are several if the
/// kubelet has made a new sandbox and the old one is not removed yet. A runtime is a complete name,
/// or a prefix with `*`.
pub fn sandboxes(containers: &[Container], runtimes: &[String]) -> Vec<Sandbox> {
    let read: Vec<(&Container, Spec)> = containers
        .iter()
        .filter(|container| matches_any(&runtime(container), runtimes))
        .filter_map(|container| Some((container, Spec::of(container)?)))
        .collect();
    let own = read.iter().filter(|(_, spec)| spec.is_sandbox);
    let sandboxes = own.filter_map(|(container, spec)| {
        let members = read.iter().filter(|(_, member)| {
            !member.is_sandbox && member.sandbox.as_deref() == Some(container.id.as_str())
        });
        let mut members: Vec<Member> = members
            .map(|(member, spec)| Member {
                id: member.id.clone(),
                cgroup: spec.cgroup.clone(),
            })
            .collect();
        members.sort_by(|a, b| a.id.cmp(&b.id));
        Some(Sandbox {
            id: SandboxId::new(container.id.clone()).ok()?,
            runtime: runtime(container),
            cgroup: spec.cgroup.clone(),
            members,
        })
    });
    sandboxes.collect()
}

fn runtime(container: &Container) -> String {
    let runtime = container.runtime.as_ref();
    runtime
        .map(|runtime| runtime.name.clone())
        .unwrap_or_default()
}

fn matches_any(name: &str, runtimes: &[String]) -> bool {
    runtimes
        .iter()
        .any(|runtime| match runtime.strip_suffix('*') {
            Some(prefix) => name.starts_with(prefix),
            None => name == runtime,
        })
}

/// The parts of a container's OCI spec that assign the container to a sandbox and a cgroup. The
/// annotations are those of containerd's CRI plugin (`pkg/annotations`).
struct Spec {
    is_sandbox: bool,
    sandbox: Option<String>,
    cgroup: Option<PathBuf>,
}

impl Spec {
    fn of(container: &Container) -> Option<Self> {
        let spec: Value = serde_json::from_slice(&container.spec.as_ref()?.value).ok()?;
        let annotation = |name: &str| spec["annotations"][name].as_str();
        let cgroup = spec["linux"]["cgroupsPath"].as_str();
        Some(Self {
            is_sandbox: annotation("io.kubernetes.cri.container-type")? == "sandbox",
            sandbox: annotation("io.kubernetes.cri.sandbox-id").map(str::to_owned),
            cgroup: cgroup.and_then(|path| torpor_cgroup::relative_path(path).ok()),
        })
    }
}

/// Combined state of a sandbox's members.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Standing {
    pub live: Live,
    /// True if some members are paused and others are not: a pause or a resume was interrupted.
    pub half: bool,
}

/// Combines the states of the tasks. `own` is the sandbox container's task. Members that have ended
/// or have no task do not count.
pub fn standing(own: Option<&Process>, members: &[Option<Process>]) -> Standing {
    let whole = |live| Standing { live, half: false };
    match own.map(Process::status) {
        // containerd reports Unknown while Kata's shim does not answer.
        Some(Status::Unknown) => return whole(Live::Unknown),
        Some(Status::Running | Status::Paused | Status::Pausing) => {}
        Some(Status::Created | Status::Stopped) | None => return whole(Live::None),
    }
    let (mut paused, mut running) = (false, false);
    for member in members.iter().flatten() {
        match member.status() {
            Status::Unknown | Status::Pausing => return whole(Live::Unknown),
            Status::Paused => paused = true,
            // A container that is being started will run.
            Status::Running | Status::Created => running = true,
            Status::Stopped => {}
        }
    }
    match (paused, running) {
        (true, half) => Standing {
            live: Live::Paused,
            half,
        },
        (false, true) => whole(Live::Running),
        (false, false) => whole(Live::None),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::proto::containers::{Packed, Runtime};

    fn container(id: char, runtime: &str, spec: &Value) -> Container {
        Container {
            id: String::from(id).repeat(64),
            runtime: Some(Runtime {
                name: runtime.to_owned(),
            }),
            spec: Some(Packed {
                type_url: String::new(),
                value: spec.to_string().into_bytes(),
            }),
            ..Container::default()
        }
    }

    fn spec(kind: &str, sandbox: char, cgroup: &str) -> Value {
        json!({
            "annotations": {
                "io.kubernetes.cri.container-type": kind,
                "io.kubernetes.cri.sandbox-id": String::from(sandbox).repeat(64),
            },
            "linux": { "cgroupsPath": cgroup },
        })
    }

    const KATA: &str = "io.containerd.kata-qemu.v2";

    fn kata() -> Vec<String> {
        vec!["io.containerd.kata*".to_owned()]
    }

    #[test]
    fn a_sandbox_is_its_sandbox_container_and_the_containers_that_name_it() {
        let containers = [
            container('b', KATA, &spec("container", 'a', "/kubepods/pod1/b")),
            container('a', KATA, &spec("sandbox", 'a', "/kubepods/pod1/a")),
            container('c', KATA, &spec("container", 'f', "/kubepods/pod1/c")),
        ];
        let found = sandboxes(&containers, &kata());
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].id.as_str(), "a".repeat(64));
        assert_eq!(found[0].cgroup, Some("kubepods/pod1/a".into()));
        let members: Vec<_> = found[0].members.iter().map(|member| &member.id).collect();
        assert_eq!(members, [&"b".repeat(64)]);
    }

    #[test]
    fn containers_of_other_runtimes_and_malformed_specs_are_left_alone() {
        let of = |runtime| container('a', runtime, &spec("sandbox", 'a', "/kubepods/pod1/a"));
        for (runtime, expected) in [
            ("io.containerd.kata.v2", 1),
            (KATA, 1),
            ("io.containerd.runc.v2", 0),
            ("", 0),
        ] {
            assert_eq!(
                sandboxes(&[of(runtime)], &kata()).len(),
                expected,
                "{runtime}"
            );
        }
        let exact = ["io.containerd.runc.v2".to_owned()];
        assert_eq!(sandboxes(&[of("io.containerd.runc.v2")], &exact).len(), 1);
        assert_eq!(sandboxes(&[of("io.containerd.runc.v2x")], &exact).len(), 0);
        let strange = [json!({}), json!("x"), spec("sandbox", 'a', "/../etc")];
        let found: Vec<_> = strange
            .iter()
            .flat_map(|spec| sandboxes(&[container('a', KATA, spec)], &kata()))
            .collect();
        // A cgroup outside the hierarchy is not accepted.
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].cgroup, None);
    }

    #[test]
    fn the_state_of_a_sandbox_follows_from_its_tasks() {
        use Status::*;
        let task = |status: Status| {
            Some(Process {
                pid: 7,
                status: status.into(),
            })
        };
        let how = |own: Option<Status>, members: &[Status]| {
            let members: Vec<_> = members.iter().map(|status| task(*status)).collect();
            let standing = standing(own.and_then(task).as_ref(), &members);
            (standing.live, standing.half)
        };
        let whole = |live| (live, false);
        for (own, members, expected) in [
            (None, vec![Running], whole(Live::None)),
            (Some(Stopped), vec![Paused], whole(Live::None)),
            (Some(Created), vec![], whole(Live::None)),
            (Some(Unknown), vec![Running], whole(Live::Unknown)),
            (Some(Running), vec![], whole(Live::None)),
            (Some(Running), vec![Running, Stopped], whole(Live::Running)),
            (Some(Running), vec![Paused, Stopped], whole(Live::Paused)),
            (Some(Running), vec![Stopped], whole(Live::None)),
            (Some(Running), vec![Paused, Running], (Live::Paused, true)),
            (Some(Running), vec![Paused, Created], (Live::Paused, true)),
            (Some(Running), vec![Paused, Pausing], whole(Live::Unknown)),
            (Some(Paused), vec![Running], whole(Live::Running)),
        ] {
            assert_eq!(how(own, &members), expected, "{own:?} {members:?}");
        }
        let gone = standing(task(Running).as_ref(), &[None, task(Running)]);
        assert_eq!(gone.live, Live::Running);
    }
}
