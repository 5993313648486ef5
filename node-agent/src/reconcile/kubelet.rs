//! The kubelet's probes and hooks of a Pod, and the rules that follow for the keeper of
//! its sleeping sandbox. Pure: no I/O.

use std::collections::BTreeSet;

use k8s_openapi::api::core::v1::{Container, LifecycleHandler, Pod, Probe};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use kube::ResourceExt;
use torpor_api::annotations;
use torpor_core::state::{Desired, PodPresence, Power};
use torpor_core::wake_on::WakeOn;
use torpor_records::Probes;
use torpor_records::Rules;

/// Returns the Pod's init containers and containers.
pub(crate) fn containers(pod: &Pod) -> impl Iterator<Item = &Container> {
    let spec = pod.spec.as_ref();
    let init = spec.and_then(|spec| spec.init_containers.as_ref());
    let main = spec.map(|spec| &spec.containers);
    init.into_iter().chain(main).flatten()
}

/// Returns each probe of the Pod, with its container.
pub(crate) fn each_probe(pod: &Pod) -> impl Iterator<Item = (&Container, &Probe)> {
    containers(pod).flat_map(|container| {
        let probes = [
            &container.startup_probe,
            &container.readiness_probe,
            &container.liveness_probe,
        ];
        let probes = probes.into_iter().flatten();
        probes.map(move |probe| (container, probe))
    })
}

/// Returns the probes of the Pod by which its traffic and processes can be recognized as the
/// kubelet's. `desired`: the desired state of that Pod.
pub(crate) fn probes(pod: &Pod, desired: &Desired) -> Probes {
    let mut found = Probes::default();
    for (container, probe) in each_probe(pod) {
        found.ports.extend(probed_port(container, probe));
        let command = probe.exec.as_ref().and_then(|exec| exec.command.clone());
        found.commands.extend(command);
    }
    for (_, hook) in each_hook(pod) {
        let command = hook.exec.as_ref().and_then(|exec| exec.command.as_ref());
        let Some(command) = command else { continue };
        if desired.suspending() {
            // The Pod's deletion is not its end: the hook is not run, and a sleeping
            // sandbox's keeper answers it like a probe.
            found.commands.insert(command.clone());
        } else {
            // The command alone does not show whether it is a hook or a probe. A hook that
            // is not run must not be answered as if it were.
            found.commands.remove(command);
        }
    }
    found
}

/// Returns the rules of the Pod's keeper while its sandbox sleeps or is frozen. `desired`:
/// the desired state of that Pod.
pub(crate) fn rules(pod: &Pod, desired: &Desired) -> Rules {
    let mut probes: BTreeSet<u16> = answerable_ports(pod).into_iter().collect();
    if desired.suspending() {
        // A packet would wake the sandbox only to be saved again. The Pod's deletion is not its
        // end, so hooks are answered and not run.
        probes.append(&mut hooked_ports(pod));
        let (probes, tls_probes) = tls_apart(pod, probes);
        return Rules {
            probes,
            tls_probes,
            hooks: Vec::new(),
            suspends: true,
            wake_on: WakeOn::NOTHING,
        };
    }
    let mut hooks = ambiguous_ports(pod);
    if pod.metadata.deletion_timestamp.is_some() {
        // From now on a request of the kubelet at such a port may be the hook.
        probes.retain(|port| !hooks.contains(port));
        hooks.clear();
    }
    // Only the user who froze the sandbox lets it run. A Pod that is being deleted runs to its end.
    let frozen = desired.power == Power::Frozen && desired.pod == PodPresence::Present;
    let (probes, tls_probes) = tls_apart(pod, probes);
    Rules {
        probes,
        tls_probes,
        hooks: hooks.into_iter().collect(),
        suspends: false,
        wake_on: match frozen {
            true => WakeOn::NOTHING,
            false => wake_on(pod),
        },
    }
}

/// Returns each hook that the kubelet runs before it ends a container, with its container.
fn each_hook(pod: &Pod) -> impl Iterator<Item = (&Container, &LifecycleHandler)> {
    containers(pod).filter_map(|container| {
        let lifecycle = container.lifecycle.as_ref()?;
        Some((container, lifecycle.pre_stop.as_ref()?))
    })
}

fn hooked_ports(pod: &Pod) -> BTreeSet<u16> {
    let ports = each_hook(pod).filter_map(|(container, hook)| {
        let port = port_of(container, &hook.http_get.as_ref()?.port)?;
        u16::try_from(port).ok()
    });
    ports.collect()
}

/// Returns the ports at which a connection of the kubelet may be a probe or a hook.
fn ambiguous_ports(pod: &Pod) -> BTreeSet<u16> {
    let probes = answerable_ports(pod);
    let mut hooks = hooked_ports(pod);
    hooks.retain(|port| probes.contains(port));
    hooks
}

/// Returns whether a hook may come at any moment that a keeper would take for a probe because
/// it does not have the rules of the deletion yet.
pub(crate) fn may_be_taken_for_probed(pod: &Pod) -> bool {
    pod.metadata.deletion_timestamp.is_some() && !ambiguous_ports(pod).is_empty()
}

/// Returns the packets that wake the Pod's sandbox. A wrong value counts as none; the controller
/// reports it.
fn wake_on(pod: &Pod) -> WakeOn {
    match annotations::wake_on(|key| pod.annotations().get(key)) {
        Some(Ok(annotations::WakeOn::Some {
            tcp,
            udp,
            icmp,
            ports,
        })) => WakeOn::Only {
            tcp,
            udp,
            icmp,
            ports: ports.iter().map(|ports| ports.first..=ports.last).collect(),
        },
        Some(Ok(annotations::WakeOn::Any) | Err(_)) | None => WakeOn::Any,
    }
}

/// Returns the ports whose probes can be answered without the Pod's program.
fn answerable_ports(pod: &Pod) -> Vec<u16> {
    let ports: BTreeSet<u16> = each_probe(pod)
        .filter_map(|(container, probe)| probed_port(container, probe))
        .collect();
    ports.into_iter().collect()
}

/// Splits the ports into those at which the kubelet never uses TLS, and those at which it does.
fn tls_apart(pod: &Pod, ports: BTreeSet<u16>) -> (Vec<u16>, Vec<u16>) {
    let of_probes = each_probe(pod).map(|(container, probe)| (container, probe.http_get.as_ref()));
    let of_hooks = each_hook(pod).map(|(container, hook)| (container, hook.http_get.as_ref()));
    let over_tls: BTreeSet<u16> = of_probes
        .chain(of_hooks)
        .filter_map(|(container, get)| Some((container, get?)))
        .filter(|(_, get)| get.scheme.as_deref() == Some("HTTPS"))
        .filter_map(|(container, get)| u16::try_from(port_of(container, &get.port)?).ok())
        .collect();
    ports.into_iter().partition(|port| !over_tls.contains(port))
}

fn probed_port(container: &Container, probe: &Probe) -> Option<u16> {
    let http = probe.http_get.as_ref().map(|http| &http.port);
    let tcp = probe.tcp_socket.as_ref().map(|tcp| &tcp.port);
    let port = http.or(tcp).and_then(|port| port_of(container, port));
    let grpc = || probe.grpc.as_ref().map(|grpc| grpc.port);
    u16::try_from(port.or_else(grpc)?).ok()
}

fn port_of(container: &Container, port: &IntOrString) -> Option<i32> {
    match port {
        IntOrString::Int(number) => Some(*number),
        IntOrString::String(name) => {
            let mut ports = container.ports.iter().flatten();
            let named = ports.find(|port| port.name.as_ref() == Some(name));
            named.map(|port| port.container_port)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reconcile::desired::desired;
    use crate::reconcile::desired::tests::{pod, snapshot, uid};
    use serde_json::json;
    use torpor_api::snapshot::SandboxSnapshot;

    #[test]
    fn probes_are_known_by_their_ports_and_commands() {
        let pod: Pod = serde_json::from_value(json!({ "spec": {
            "initContainers": [{ "name": "side", "startupProbe": { "grpc": { "port": 9000 } } }],
            "containers": [
                { "name": "a", "ports": [{ "name": "web", "containerPort": 8080 }],
                  "readinessProbe": { "httpGet": { "port": "web" } },
                  "livenessProbe": { "tcpSocket": { "port": 8081 } } },
                { "name": "b", "readinessProbe": {} },
                { "name": "c", "livenessProbe": { "exec": { "command": ["cat", "/ok"] } },
                  "readinessProbe": { "httpGet": { "port": "nowhere" } } },
            ],
        } }))
        .expect("a Pod");
        let found = probes(&pod, &desired(&uid(), Some(&pod), None, &[]));
        assert_eq!(
            found.ports.into_iter().collect::<Vec<_>>(),
            [8080, 8081, 9000]
        );
        assert_eq!(
            found.commands.into_iter().collect::<Vec<_>>(),
            [["cat", "/ok"]]
        );
    }

    #[test]
    fn a_keeper_receives_the_wake_on_setting_and_a_wrong_value_counts_as_none() {
        let wake_on = |value: &str| wake_on(&pod(json!({ "torpor.dev/wake-on": value })));
        let tcp = |ports| WakeOn::Only {
            tcp: true,
            udp: false,
            icmp: false,
            ports,
        };
        assert_eq!(wake_on("tcp"), tcp(vec![]));
        assert_eq!(wake_on("tcp,ports=80,443"), tcp(vec![80..=80, 443..=443]));
        assert_eq!(wake_on("http"), WakeOn::Any);
        assert_eq!(wake_on("any"), WakeOn::Any);
        let snapshot = |reason: &str| {
            let spec = json!({ "sandboxName": "s", "podUID": "pod-1", "reason": reason });
            snapshot(spec, &[annotations::IMAGE_FINALIZER])
        };
        let by_snapshots = |snapshots: &[&SandboxSnapshot]| {
            let pod = pod(json!({ "torpor.dev/wake-on": "tcp" }));
            rules(&pod, &desired(&uid(), Some(&pod), None, snapshots)).wake_on
        };
        assert_eq!(by_snapshots(&[&snapshot("Manual")]), tcp(vec![]));
        assert_eq!(by_snapshots(&[&snapshot("Suspend")]), WakeOn::NOTHING);
    }

    #[test]
    fn no_packet_wakes_a_frozen_sandbox_before_its_pod_is_deleted() {
        let frozen = json!({ "torpor.dev/freeze": "true", "torpor.dev/wake-on": "tcp" });
        let mut pod = pod(frozen);
        let wakes = |pod: &Pod| rules(pod, &desired(&uid(), Some(pod), None, &[])).wake_on;
        assert_eq!(wakes(&pod), WakeOn::NOTHING);
        pod.metadata.deletion_timestamp = Some(jiff::Timestamp::UNIX_EPOCH.into());
        assert_ne!(wakes(&pod), WakeOn::NOTHING, "its hooks are run");
    }

    #[test]
    fn a_possible_hook_is_no_probe_once_the_pod_is_being_deleted() {
        let mut pod = pod(json!({}));
        pod.spec = serde_json::from_value(json!({ "containers": [
            { "name": "a", "ports": [{ "name": "web", "containerPort": 8080 }],
              "readinessProbe": { "httpGet": { "port": 8080 } },
              "livenessProbe": { "exec": { "command": ["check"] } },
              "lifecycle": { "preStop": { "httpGet": { "port": "web" } } } },
            { "name": "b", "readinessProbe": { "tcpSocket": { "port": 8081 } },
              "livenessProbe": { "exec": { "command": ["stop"] } },
              "lifecycle": { "preStop": { "exec": { "command": ["stop"] } } } },
            // No probe uses this port: the hook wakes the sandbox like any other connection.
            { "name": "c", "lifecycle": { "preStop": { "httpGet": { "port": 9000 } } } },
        ] }))
        .expect("a spec");
        let rules = |pod: &Pod| rules(pod, &desired(&uid(), Some(pod), None, &[]));
        let probes = |pod: &Pod| probes(pod, &desired(&uid(), Some(pod), None, &[]));
        let sent = rules(&pod);
        assert_eq!((sent.probes, sent.hooks), (vec![8080, 8081], vec![8080]));
        let commands = |pod: &Pod| Vec::from_iter(probes(pod).commands);
        assert_eq!(commands(&pod), [["check"]]);
        assert!(!may_be_taken_for_probed(&pod), "no hook runs yet");
        pod.metadata.deletion_timestamp = Some(jiff::Timestamp::UNIX_EPOCH.into());
        let sent = rules(&pod);
        assert_eq!((sent.probes, sent.hooks), (vec![8081], vec![]));
        assert_eq!(commands(&pod), [["check"]]);
        assert!(
            may_be_taken_for_probed(&pod),
            "until the keeper hears of it"
        );
        // The hooks of a suspended Pod are answered like probes.
        let spec = json!({ "sandboxName": "s", "podUID": "pod-1", "reason": "Suspend" });
        let suspend = snapshot(spec, &[annotations::IMAGE_FINALIZER]);
        let suspended = desired(&uid(), Some(&pod), None, &[&suspend]);
        let sent = super::rules(&pod, &suspended);
        assert_eq!((sent.probes, sent.hooks), (vec![8080, 8081, 9000], vec![]));
        assert!(sent.suspends);
        assert_eq!(super::probes(&pod, &suspended).commands.len(), 2);
    }

    #[test]
    fn probes_that_can_be_answered_without_the_program_are_known() {
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
                {
                    "name": "b",
                    "readinessProbe": { "exec": { "command": ["true"] } },
                    // The port counts as one over TLS, because another probe uses TLS there.
                    "livenessProbe": { "tcpSocket": { "port": 8443 } },
                },
            ],
            "initContainers": [
                { "name": "c", "restartPolicy": "Always", "livenessProbe": { "grpc": { "port": 9000 } } },
                { "name": "d", "readinessProbe": { "tcpSocket": { "port": "nowhere" } } },
            ],
        }))
        .expect("a spec");
        assert_eq!(answerable_ports(&pod), [8080, 8443, 9000]);
        let desired = desired(&uid(), Some(&pod), None, &[]);
        let sent = rules(&pod, &desired);
        let (plain, tls) = (vec![8080, 9000], vec![8443]);
        assert_eq!((sent.probes, sent.tls_probes), (plain, tls));
        assert!(probes(&pod, &desired).ports.contains(&8443));
        pod.metadata.deletion_timestamp = Some(jiff::Timestamp::UNIX_EPOCH.into());
        assert!(!may_be_taken_for_probed(&pod), "it has no hook");
        pod.spec = None;
        assert!(answerable_ports(&pod).is_empty());
    }
}
