//! What the API asks for, for one Pod UID. Pure: from the watch caches to `torpor-core`'s words.

use k8s_openapi::api::core::v1::{Container, Pod, Probe};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use kube::ResourceExt;
use torpor_api::annotations;
use torpor_api::snapshot::{SandboxSnapshot, SnapshotReason as ApiReason};
use torpor_core::ids::{ImageId, PodUid, SnapshotUid};
use torpor_core::state::{
    Desired, PodPresence, Power, SnapshotIntent, SnapshotReason, SnapshotWish,
};
use torpor_gvisor::record::ProbeCommand;

/// The label that the controller puts on a Sandbox' Pod.
const SANDBOX_KIND: &str = "Sandbox";

/// Name of the Sandbox that controls the Pod.
pub(crate) fn sandbox_name(pod: &Pod) -> Option<&str> {
    let owners = pod.metadata.owner_references.as_deref().unwrap_or_default();
    owners
        .iter()
        .find(|owner| owner.kind == SANDBOX_KIND && owner.controller == Some(true))
        .map(|owner| owner.name.as_str())
}

/// The UID of the Pod that a snapshot is about: named in its spec, taken when it was accepted, or that of the Pod that
/// stands for its Sandbox on this node.
pub(crate) fn pod_of_snapshot(snapshot: &SandboxSnapshot, pods: &[&Pod]) -> Option<PodUid> {
    let named = snapshot.spec.pod_uid.clone();
    let accepted = || {
        snapshot
            .status
            .as_ref()
            .and_then(|status| status.pod_uid.clone())
    };
    let standing = || {
        pods.iter()
            .filter(|pod| pod.metadata.deletion_timestamp.is_none())
            .filter(|pod| pod.namespace() == snapshot.namespace())
            .find(|pod| sandbox_name(pod) == Some(snapshot.spec.sandbox_name.as_str()))
            .and_then(|pod| pod.uid())
    };
    named
        .or_else(accepted)
        .or_else(standing)
        .and_then(|uid| PodUid::new(uid).ok())
}

/// Whether the agent has promised to keep bytes for the snapshot.
pub(crate) fn has_finalizer(snapshot: &SandboxSnapshot) -> bool {
    snapshot
        .finalizers()
        .iter()
        .any(|name| name == annotations::IMAGE_FINALIZER)
}

fn intent(snapshot: &SandboxSnapshot, pod_uid: &PodUid) -> Option<SnapshotIntent> {
    let status = snapshot.status.as_ref();
    let image = status
        .filter(|_| snapshot.is_committed())
        .and_then(|s| s.image_id.as_deref());
    Some(SnapshotIntent {
        uid: SnapshotUid::new(snapshot.uid()?).ok()?,
        name: format!("{}/{}", snapshot.namespace()?, snapshot.name_any()),
        pod_uid: pod_uid.clone(),
        reason: match snapshot.spec.reason {
            ApiReason::Suspend => SnapshotReason::Suspend,
            ApiReason::Manual => SnapshotReason::Manual,
        },
        image: image.and_then(|image| ImageId::parse(image).ok()),
        wish: match snapshot.metadata.deletion_timestamp {
            Some(_) => SnapshotWish::Delete,
            None => SnapshotWish::Keep,
        },
    })
}

/// What is wanted of the Pod `pod_uid`. `pod`: from a synced cache of this node's Pods; `snapshots`: those about it.
pub(crate) fn desired(
    pod_uid: &PodUid,
    pod: Option<&Pod>,
    snapshots: &[&SandboxSnapshot],
) -> Desired {
    let annotated = |key: &str| {
        pod.is_some_and(|pod| {
            pod.annotations()
                .get(key)
                .is_some_and(|value| value == "true")
        })
    };
    let presence = match pod {
        None => PodPresence::Gone,
        Some(pod) if pod.metadata.deletion_timestamp.is_some() => PodPresence::Terminating,
        Some(_) => PodPresence::Present,
    };
    let power = match (
        annotated(annotations::HIBERNATE),
        annotated(annotations::FREEZE),
    ) {
        (true, _) => Power::Asleep,
        (false, true) => Power::Frozen,
        (false, false) => Power::Awake,
    };
    let snapshots = snapshots
        .iter()
        .filter(|snapshot| has_finalizer(snapshot))
        .filter_map(|snapshot| intent(snapshot, pod_uid))
        .collect();
    Desired {
        pod_uid: pod_uid.clone(),
        pod: presence,
        power,
        snapshots,
    }
}

/// How the kubelet probes a Pod, as far as it can be answered without its program.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Probes {
    /// TCP ports. A probe over TLS is not answered.
    pub(crate) ports: Vec<u16>,
    pub(crate) commands: Vec<ProbeCommand>,
}

impl Probes {
    /// The probes of the Pod's containers.
    pub(crate) fn of(pod: &Pod) -> Self {
        let Some(spec) = &pod.spec else {
            return Self::default();
        };
        let containers = spec
            .containers
            .iter()
            .chain(spec.init_containers.iter().flatten());
        let mut found = Self::default();
        for container in containers {
            let probes = [
                &container.startup_probe,
                &container.readiness_probe,
                &container.liveness_probe,
            ];
            for probe in probes.into_iter().flatten() {
                found.ports.extend(probed_port(probe, container));
                let command = probe.exec.as_ref().and_then(|exec| exec.command.clone());
                found.commands.extend(command.map(|command| ProbeCommand {
                    container: container.name.clone(),
                    command,
                }));
            }
        }
        found.ports.sort_unstable();
        found.ports.dedup();
        found
    }
}

fn probed_port(probe: &Probe, container: &Container) -> Option<u16> {
    let named = |port: &IntOrString| match port {
        IntOrString::Int(port) => Some(*port),
        IntOrString::String(name) => {
            let mut ports = container.ports.iter().flatten();
            let port = ports.find(|port| port.name.as_ref() == Some(name));
            port.map(|port| port.container_port)
        }
    };
    let http = probe
        .http_get
        .as_ref()
        .filter(|get| get.scheme.as_deref().unwrap_or("HTTP") == "HTTP");
    let port = http
        .map(|get| named(&get.port))
        .or_else(|| probe.tcp_socket.as_ref().map(|socket| named(&socket.port)))
        .or_else(|| probe.grpc.as_ref().map(|grpc| Some(grpc.port)))??;
    u16::try_from(port).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn pod(annotations: serde_json::Value) -> Pod {
        serde_json::from_value(json!({
            "metadata": {
                "name": "s", "namespace": "n", "uid": "pod-1", "annotations": annotations,
                "ownerReferences": [{
                    "apiVersion": "agents.x-k8s.io/v1beta1", "kind": "Sandbox", "name": "s",
                    "uid": "sandbox-1", "controller": true,
                }],
            },
        }))
        .expect("a Pod")
    }

    fn snapshot(spec: serde_json::Value, finalizers: &[&str]) -> SandboxSnapshot {
        serde_json::from_value(json!({
            "apiVersion": "torpor.dev/v1alpha1", "kind": "SandboxSnapshot",
            "metadata": { "name": "x", "namespace": "n", "uid": "snap-1", "finalizers": finalizers },
            "spec": spec,
        }))
        .expect("a SandboxSnapshot")
    }

    fn uid() -> PodUid {
        PodUid::new("pod-1").expect("a UID")
    }

    #[test]
    fn only_the_exact_word_true_puts_a_sandbox_to_sleep() {
        let power = |annotations| desired(&uid(), Some(&pod(annotations)), &[]).power;
        assert_eq!(
            power(json!({ "torpor.dev/hibernate": "true" })),
            Power::Asleep
        );
        assert_eq!(
            power(json!({ "torpor.dev/hibernate": "yes" })),
            Power::Awake
        );
        assert_eq!(power(json!({ "torpor.dev/freeze": "true" })), Power::Frozen);
        assert_eq!(power(json!({})), Power::Awake);
    }

    #[test]
    fn a_pod_that_is_not_in_the_cache_is_gone() {
        assert_eq!(desired(&uid(), None, &[]).pod, PodPresence::Gone);
    }

    #[test]
    fn no_byte_is_written_for_a_snapshot_without_our_finalizer() {
        let spec = json!({ "sandboxName": "s", "podUID": "pod-1" });
        let without = snapshot(spec.clone(), &[]);
        let with = snapshot(spec, &[annotations::IMAGE_FINALIZER]);
        let pod = pod(json!({}));
        assert!(
            desired(&uid(), Some(&pod), &[&without])
                .snapshots
                .is_empty()
        );
        assert_eq!(desired(&uid(), Some(&pod), &[&with]).snapshots.len(), 1);
    }

    #[test]
    fn a_snapshot_that_names_only_a_sandbox_is_about_the_pod_that_stands_for_it() {
        let of = |name: &str| {
            let pod = pod(json!({}));
            pod_of_snapshot(&snapshot(json!({ "sandboxName": name }), &[]), &[&pod])
        };
        assert_eq!(of("s"), Some(uid()));
        assert_eq!(of("another"), None);
    }

    #[test]
    fn probes_are_known_that_can_be_answered_without_the_program() {
        let mut pod = pod(json!({}));
        pod.spec = serde_json::from_value(json!({
            "containers": [
                {
                    "name": "a",
                    "ports": [{ "name": "web", "containerPort": 8080 }, { "name": "x", "containerPort": 9 }],
                    "readinessProbe": { "httpGet": { "port": "web" } },
                    "livenessProbe": { "tcpSocket": { "port": 8080 } },
                    "startupProbe": { "httpGet": { "port": 8443, "scheme": "HTTPS" } },
                },
                { "name": "b", "readinessProbe": { "exec": { "command": ["true"] } } },
            ],
            "initContainers": [
                { "name": "c", "restartPolicy": "Always", "livenessProbe": { "grpc": { "port": 9000 } } },
                { "name": "d", "readinessProbe": { "tcpSocket": { "port": "nowhere" } } },
            ],
        }))
        .expect("a spec");
        let found = Probes::of(&pod);
        assert_eq!(found.ports, [8080, 9000]);
        let of_b = ProbeCommand {
            container: "b".to_owned(),
            command: vec!["true".to_owned()],
        };
        assert_eq!(found.commands, [of_b]);
        pod.spec = None;
        assert_eq!(Probes::of(&pod), Probes::default());
    }
}
