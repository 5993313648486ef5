//! The desired state of one Pod, from the objects of the watch caches. Pure: no I/O.

use std::collections::BTreeSet;

use k8s_openapi::api::core::v1::{Container, ContainerStatus, Pod, PodCondition};
use k8s_openapi::api::node::v1::RuntimeClass;
use kube::ResourceExt;
use torpor_api::snapshot::{SandboxSnapshot, SnapshotReason as ApiReason};
use torpor_api::{annotations, conditions};
use torpor_core::ids::{ClaimUid, ContainerName, ImageId, PodUid, SnapshotUid};
use torpor_core::state::{
    Desired, PodPresence, Power, SnapshotIntent, SnapshotReason, SnapshotWish,
};

use crate::policy::sleep::SleepSettings;
use crate::reconcile::kubelet::containers;

fn intent(snapshot: &SandboxSnapshot, pod_uid: &PodUid) -> Option<SnapshotIntent> {
    // The image belongs to the snapshot even if it cannot be found at the moment: a disk may be
    // mounted late.
    let status = snapshot.status.as_ref();
    let image = status.and_then(|status| status.image_id.as_deref());
    Some(SnapshotIntent {
        uid: SnapshotUid::new(snapshot.uid()?).ok()?,
        name: format!("{}/{}", snapshot.namespace()?, snapshot.name_any()),
        pod_uid: pod_uid.clone(),
        reason: match snapshot.spec.reason {
            ApiReason::Suspend => SnapshotReason::Suspend,
            ApiReason::Manual => SnapshotReason::Manual,
            ApiReason::Archive => return None,
        },
        image: image.and_then(|image| ImageId::parse(image).ok()),
        wish: match snapshot.metadata.deletion_timestamp {
            Some(_) => SnapshotWish::Delete,
            None => SnapshotWish::Keep,
        },
    })
}

/// Returns the desired state of the Pod `pod_uid`. `pod`: from a synced cache of this node's Pods;
/// `class`: the Pod's RuntimeClass, from a synced cache too; `snapshots`: the snapshots about the
/// Pod.
pub(crate) fn desired(
    pod_uid: &PodUid,
    pod: Option<&Pod>,
    class: Option<&RuntimeClass>,
    snapshots: &[&SandboxSnapshot],
) -> Desired {
    let annotated = |key: &str| {
        pod.is_some_and(|pod| {
            pod.annotations()
                .get(key)
                .is_some_and(|value| value == "true")
        })
    };
    let power = match (
        annotated(annotations::HIBERNATE),
        annotated(annotations::FREEZE),
    ) {
        (true, _) => Power::Asleep,
        (false, true) => Power::Frozen,
        (false, false) => Power::Awake,
    };
    let settings = pod
        .map(|pod| SleepSettings::of(pod, class))
        .unwrap_or_default();
    let snapshots = snapshots
        .iter()
        .filter(|snapshot| snapshot.is_adopted())
        .filter_map(|snapshot| intent(snapshot, pod_uid))
        .collect();
    Desired {
        pod_uid: pod_uid.clone(),
        pod: presence(pod),
        // The Pod's task adds both: see `crate::reconcile::driver`.
        departure: None,
        answer: None,
        power,
        sleep: settings.after(),
        // The Pod's task adds the node's part.
        pressure: settings.pressure(),
        evicted: pod
            .and_then(|pod| condition(pod, conditions::POD_DISRUPTION_TARGET))
            .is_some_and(|found| found.status == "True"),
        keep_last_image: pod.is_some_and(goes_back),
        wake_up: pod.map(wake_up).unwrap_or_default(),
        snapshots,
        claim: pod.and_then(claim),
        has_sleep_condition: pod
            .is_some_and(|pod| condition(pod, conditions::POD_HIBERNATED).is_some()),
        containers: pod.map(to_run).unwrap_or_default(),
        ready: pod.is_none_or(is_ready),
    }
}

/// Returns the Pod's presence. A Pod that has ended (its node shuts down, or is short of memory)
/// counts as one that is being deleted: the kubelet never starts its containers again.
fn presence(pod: Option<&Pod>) -> PodPresence {
    let Some(pod) = pod else {
        return PodPresence::Gone;
    };
    let phase = pod
        .status
        .as_ref()
        .and_then(|status| status.phase.as_deref());
    let ended = matches!(phase, Some("Succeeded" | "Failed"));
    match ended || pod.metadata.deletion_timestamp.is_some() {
        true => PodPresence::Terminating,
        false => PodPresence::Present,
    }
}

/// Returns the Pod's condition of this type.
pub(crate) fn condition<'a>(pod: &'a Pod, kind: &str) -> Option<&'a PodCondition> {
    let conditions = pod.status.as_ref()?.conditions.as_ref()?;
    conditions.iter().find(|condition| condition.type_ == kind)
}

/// Returns the containers that run or that the kubelet is going to start again: all except those
/// that stay ended. Init containers end, except sidecars, which the kubelet always starts again
/// (Kubernetes, "Sidecar containers").
fn to_run(pod: &Pod) -> BTreeSet<ContainerName> {
    let spec = pod.spec.as_ref();
    let policy = spec.and_then(|spec| spec.restart_policy.as_deref());
    let stays_ended = |container: &Container| {
        let status = status_of(pod, &container.name);
        let ended = status.and_then(|status| status.state.as_ref()?.terminated.as_ref());
        ended.is_some_and(|ended| !starts_again(container, policy, ended.exit_code))
    };
    let init = spec.and_then(|spec| spec.init_containers.as_ref());
    let sidecars = init
        .into_iter()
        .flatten()
        .filter(|container| is_sidecar(container));
    let main = spec.iter().flat_map(|spec| &spec.containers);
    main.filter(|container| !stays_ended(container))
        .chain(sidecars)
        .filter_map(|container| ContainerName::new(container.name.clone()).ok())
        .collect()
}

/// Returns whether the kubelet starts a container again that has ended with this code. The
/// container's own rules and policy (from Kubernetes 1.34 on) come before the Pod's policy.
fn starts_again(container: &Container, of_pod: Option<&str>, exit_code: i32) -> bool {
    let own = container.restart_policy.as_deref();
    // A rule has only one action: to start the container again.
    let mut rules = container.restart_policy_rules.iter().flatten();
    let by_rule = rules.any(|rule| {
        rule.exit_codes.as_ref().is_some_and(|codes| {
            let is_listed = codes.values.iter().flatten().any(|code| *code == exit_code);
            match codes.operator.as_str() {
                "In" => is_listed,
                "NotIn" => !is_listed,
                _ => false,
            }
        })
    });
    by_rule
        || match own.or(of_pod) {
            Some("Never") => false,
            Some("OnFailure") => exit_code != 0,
            _ => true,
        }
}

/// Returns the kubelet's status of this container.
fn status_of<'a>(pod: &'a Pod, container: &str) -> Option<&'a ContainerStatus> {
    let status = pod.status.as_ref()?;
    let init = status.init_container_statuses.iter().flatten();
    let main = status.container_statuses.iter().flatten();
    main.chain(init).find(|status| status.name == container)
}

/// Returns whether all containers that run, or are to run, have started and are ready, as far as
/// probes check that.
///
/// The source is the kubelet's status of each container, because the Pod's condition Ready also
/// waits for readiness gates of others. A failing liveness probe does not show in a status before
/// the container is restarted.
fn is_ready(pod: &Pod) -> bool {
    let to_run = to_run(pod);
    let mut runs = containers(pod).filter(|container| {
        let mut names = to_run.iter();
        names.any(|name| name.as_str() == container.name)
    });
    runs.all(|container| {
        let status = status_of(pod, &container.name);
        let has_started = status.is_some_and(|status| status.started == Some(true));
        let is_ready = status.is_some_and(|status| status.ready);
        (has_started || container.startup_probe.is_none())
            && (is_ready || container.readiness_probe.is_none())
    })
}

fn is_sidecar(init_container: &Container) -> bool {
    init_container.restart_policy.as_deref() == Some("Always")
}

/// Returns whether the sandbox goes back to its last image after a crash. The controller reports a
/// wrong value.
fn goes_back(pod: &Pod) -> bool {
    let policy = pod.annotations().get(annotations::ON_CRASH);
    policy.and_then(|value| annotations::parse_on_crash(value).ok())
        == Some(annotations::OnCrash::LastImage)
}

/// Returns the claim that is to arrive in the sandbox.
fn claim(pod: &Pod) -> Option<ClaimUid> {
    ClaimUid::new(pod.annotations().get(annotations::CLAIM)?.clone()).ok()
}

/// Returns the times at which the sandbox is to be awake. A wrong value gives none; the controller
/// reports it.
fn wake_up(pod: &Pod) -> BTreeSet<jiff::Timestamp> {
    let keys = [annotations::NEXT_WAKEUP, annotations::WAKE_AT];
    let times = keys.into_iter().filter_map(|key| {
        let written = pod.annotations().get(key)?;
        annotations::parse_time(key, written).ok()
    });
    times.collect()
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use serde_json::json;

    pub(crate) fn pod(annotations: serde_json::Value) -> Pod {
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

    pub(crate) fn snapshot(spec: serde_json::Value, finalizers: &[&str]) -> SandboxSnapshot {
        serde_json::from_value(json!({
            "apiVersion": "torpor.dev/v1alpha1", "kind": "SandboxSnapshot",
            "metadata": { "name": "x", "namespace": "n", "uid": "snap-1", "finalizers": finalizers },
            "spec": spec,
        }))
        .expect("a SandboxSnapshot")
    }

    pub(crate) fn uid() -> PodUid {
        PodUid::new("pod-1").expect("a UID")
    }

    #[test]
    fn only_the_exact_word_true_puts_a_sandbox_to_sleep() {
        let power = |annotations| desired(&uid(), Some(&pod(annotations)), None, &[]).power;
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
    fn a_pod_with_a_sleep_condition_is_recognized() {
        let has_condition = |kind: &str| {
            let mut pod = pod(json!({}));
            pod.status = Some(
                serde_json::from_value(
                    json!({ "conditions": [{ "type": kind, "status": "False" }] }),
                )
                .expect("a status"),
            );
            desired(&uid(), Some(&pod), None, &[]).has_sleep_condition
        };
        assert!(has_condition("torpor.dev/Hibernated"));
        assert!(!has_condition("Ready"));
    }

    #[test]
    fn an_eviction_is_read_from_the_pods_condition() {
        let evicted = |status: &str| {
            let mut pod = pod(json!({}));
            let status =
                json!({ "conditions": [{ "type": "DisruptionTarget", "status": status }] });
            pod.status = Some(serde_json::from_value(status).expect("a status"));
            desired(&uid(), Some(&pod), None, &[]).evicted
        };
        assert!(evicted("True") && !evicted("False"));
        assert!(!desired(&uid(), Some(&pod(json!({}))), None, &[]).evicted);
    }

    #[test]
    fn an_ended_pod_counts_as_being_deleted() {
        for (phase, expected) in [
            ("Pending", PodPresence::Present),
            ("Running", PodPresence::Present),
            ("Succeeded", PodPresence::Terminating),
            ("Failed", PodPresence::Terminating),
        ] {
            let mut pod = pod(json!({}));
            let status = json!({ "phase": phase });
            pod.status = Some(serde_json::from_value(status).expect("a status"));
            assert_eq!(
                desired(&uid(), Some(&pod), None, &[]).pod,
                expected,
                "{phase}"
            );
        }
    }

    #[test]
    fn a_sidecar_in_backoff_is_awaited_and_a_finally_ended_container_is_not() {
        let awaited = |policy: &str| {
            let mut pod = pod(json!({}));
            let spec = json!({
                "restartPolicy": policy,
                "initContainers": [
                    { "name": "once" }, { "name": "sidecar", "restartPolicy": "Always" },
                ],
                "containers": [{ "name": "runs" }, { "name": "ended" }, { "name": "over", "restartPolicy": "Never" }],
            });
            let ended = json!({ "terminated": { "exitCode": 1 } });
            let status = |name, state| json!({ "name": name, "image": "", "imageID": "", "ready": false, "restartCount": 0, "state": state });
            let statuses = json!({
                "initContainerStatuses": [
                    status("once", json!({ "terminated": { "exitCode": 0 } })),
                    status("sidecar", json!({ "waiting": { "reason": "CrashLoopBackOff" } })),
                ],
                "containerStatuses": [
                    status("runs", json!({ "running": {} })),
                    status("ended", ended.clone()),
                    status("over", ended),
                ],
            });
            pod.spec = Some(serde_json::from_value(spec).expect("a spec"));
            pod.status = Some(serde_json::from_value(statuses).expect("a status"));
            let names = desired(&uid(), Some(&pod), None, &[]).containers;
            names
                .iter()
                .map(|name| name.as_str().to_owned())
                .collect::<Vec<_>>()
        };
        assert_eq!(awaited("Always"), ["ended", "runs", "sidecar"]);
        assert_eq!(awaited("Never"), ["runs", "sidecar"]);
    }

    #[test]
    fn a_containers_restart_policy_goes_before_its_pods() {
        let starts = |own: serde_json::Value, of_pod: &str, exit_code| {
            let mut container = json!({ "name": "a" });
            for (key, value) in own.as_object().into_iter().flatten() {
                container[key] = value.clone();
            }
            let container = serde_json::from_value(container).expect("a container");
            starts_again(&container, Some(of_pod), exit_code)
        };
        let policy = |own: &str| json!({ "restartPolicy": own });
        for (own, of_pod, code, expected) in [
            (json!({}), "Always", 1, true),
            (json!({}), "Never", 1, false),
            (json!({}), "OnFailure", 0, false),
            (policy("Never"), "Always", 1, false),
            (policy("OnFailure"), "Always", 0, false),
            (policy("OnFailure"), "Never", 1, true),
            (policy("Always"), "Never", 0, true),
        ] {
            assert_eq!(starts(own.clone(), of_pod, code), expected, "{own} {code}");
        }
        let ruled = |operator: &str| {
            let rule = json!({ "action": "Restart", "exitCodes": { "operator": operator, "values": [42] } });
            json!({ "restartPolicy": "Never", "restartPolicyRules": [rule] })
        };
        for (operator, code, expected) in [
            ("In", 42, true),
            ("In", 1, false),
            ("NotIn", 42, false),
            ("NotIn", 1, true),
        ] {
            let found = starts(ruled(operator), "Always", code);
            assert_eq!(found, expected, "{operator} {code}");
        }
    }

    #[test]
    fn a_pod_is_ready_if_the_kubelet_reports_each_probed_container_ready() {
        let probe = json!({ "exec": { "command": ["true"] } });
        let spec = json!({
            "restartPolicy": "Never",
            "initContainers": [
                { "name": "once" },
                { "name": "sidecar", "restartPolicy": "Always", "startupProbe": probe },
            ],
            "containers": [
                { "name": "probed", "readinessProbe": probe },
                { "name": "watched", "livenessProbe": probe },
                { "name": "plain" },
            ],
        });
        let status = |name: &str, started: bool, ready: bool| json!({ "name": name, "image": "", "imageID": "", "restartCount": 0, "started": started, "ready": ready });
        let ready = |sidecar: bool, probed: serde_json::Value| {
            let mut pod = pod(json!({}));
            pod.spec = Some(serde_json::from_value(spec.clone()).expect("a spec"));
            let status = json!({
                // A readiness gate of another component is not open.
                "conditions": [{ "type": "Ready", "status": "False" }],
                "initContainerStatuses": [status("once", false, false), status("sidecar", sidecar, false)],
                "containerStatuses": [
                    probed, status("watched", false, false), status("plain", true, false),
                ],
            });
            pod.status = Some(serde_json::from_value(status).expect("a status"));
            desired(&uid(), Some(&pod), None, &[]).ready
        };
        assert!(ready(true, status("probed", true, true)));
        assert!(!ready(true, status("probed", true, false)), "not ready");
        assert!(!ready(false, status("probed", true, true)), "not started");
        let mut ended = status("probed", false, false);
        ended["state"] = json!({ "terminated": { "exitCode": 1 } });
        assert!(ready(true, ended), "it stays ended");
        // First a Pod whose probed containers have no status yet, then a Pod without probes.
        let mut new = pod(json!({}));
        new.spec = Some(serde_json::from_value(spec.clone()).expect("a spec"));
        assert!(!desired(&uid(), Some(&new), None, &[]).ready);
        assert!(desired(&uid(), Some(&pod(json!({}))), None, &[]).ready);
    }

    #[test]
    fn the_last_image_is_kept_for_a_crash_by_exactly_one_annotation_value() {
        let keeps =
            |annotations| desired(&uid(), Some(&pod(annotations)), None, &[]).keep_last_image;
        assert!(keeps(json!({ "torpor.dev/on-crash": "LastImage" })));
        for other in [
            json!({}),
            json!({ "torpor.dev/on-crash": "lastimage" }),
            json!({ "torpor.dev/on-crash": "ColdStart" }),
        ] {
            assert!(!keeps(other));
        }
    }

    #[test]
    fn each_valid_wake_time_counts_and_invalid_times_are_ignored() {
        let wake_up = |set: &str, asked: &str| {
            let pod = pod(json!({
                "agents.x-k8s.io/next-wakeup": set, "torpor.dev/wake-at": asked,
            }));
            desired(&uid(), Some(&pod), None, &[]).wake_up
        };
        let time = |text: &str| text.parse::<jiff::Timestamp>().expect("a time");
        let (set, asked) = ("2026-06-06T13:58:00+02:00", "2026-06-05T07:00:00.5Z");
        assert_eq!(
            wake_up(set, asked),
            BTreeSet::from([time(set), time(asked)])
        );
        assert_eq!(wake_up("tomorrow", asked), BTreeSet::from([time(asked)]));
        assert_eq!(wake_up("tomorrow", "now"), BTreeSet::new());
    }

    #[test]
    fn a_pod_that_is_not_in_the_cache_is_gone() {
        assert_eq!(desired(&uid(), None, None, &[]).pod, PodPresence::Gone);
    }

    #[test]
    fn no_byte_is_written_for_a_snapshot_without_our_finalizer() {
        let spec = json!({ "sandboxName": "s", "podUID": "pod-1" });
        let without = snapshot(spec.clone(), &[]);
        let with = snapshot(spec, &[annotations::IMAGE_FINALIZER]);
        let pod = pod(json!({}));
        assert!(
            desired(&uid(), Some(&pod), None, &[&without])
                .snapshots
                .is_empty()
        );
        assert_eq!(
            desired(&uid(), Some(&pod), None, &[&with]).snapshots.len(),
            1
        );
    }

    /// If both wrote a status, controller and agent would correct each other for ever.
    #[test]
    fn either_agent_or_controller_reports_on_a_snapshot_of_a_gone_pod() {
        let ours = annotations::IMAGE_FINALIZER;
        let named = json!({ "sandboxName": "s", "podUID": "pod-1", "reason": "Suspend" });
        let unnamed = json!({ "sandboxName": "s" });
        let mut saved = snapshot(unnamed.clone(), &[ours]);
        saved.status.get_or_insert_default().pod_uid = Some("pod-1".to_owned());
        let all = [
            snapshot(named.clone(), &[]),
            snapshot(named, &[ours]),
            snapshot(unnamed.clone(), &[]),
            snapshot(unnamed, &[ours]),
            saved,
        ];
        let answered = all.each_ref().map(|snapshot| {
            let about_it = crate::reconcile::references::named_pod(snapshot) == Some(uid());
            about_it
                && !desired(&uid(), None, None, &[snapshot])
                    .snapshots
                    .is_empty()
        });
        assert_eq!(answered, [false, true, false, false, true]);
        let left_to_agent = all.each_ref().map(SandboxSnapshot::is_told_by_agent);
        assert_eq!(answered, left_to_agent);
    }
}
