//! No client required. Which Pod a SandboxSnapshot holds the memory of, by what the kubelet
//! reported while it ran.
//!
//! The controller keeps it in annotations, which agents cannot write. The node and the container
//! images of a restore come from here: an agent that was taken over can then draw no Pod of another
//! node to itself.

use k8s_openapi::api::core::v1::Pod;
use kube::{Resource, ResourceExt};
use serde_json::{Value, json};
use torpor_api::{PodRecord, Sandbox, SandboxSnapshot, annotations};

use crate::watches::sandbox_of;

/// The record in an annotation; none where it is missing or cannot be read.
fn read<K: Resource>(object: &K, key: &str) -> Option<PodRecord> {
    let value = object.meta().annotations.as_ref()?.get(key)?;
    match PodRecord::parse(value) {
        Ok(record) => Some(record),
        Err(error) => {
            let (namespace, name) = (
                object.meta().namespace.as_ref(),
                object.meta().name.as_ref(),
            );
            tracing::warn!(?namespace, ?name, annotation = key, %error, "left out");
            None
        }
    }
}

/// The Pod that last ran for a Sandbox. A Sandbox that was made from the manifest of another has that one's record, which does not count.
pub fn last_pod(sandbox: &Sandbox) -> Option<PodRecord> {
    let record = read(sandbox, annotations::LAST_POD)?;
    (sandbox.metadata.uid.as_deref() == Some(record.sandbox_uid.as_str())).then_some(record)
}

/// The Pod whose memory a snapshot holds: by the snapshot's own record, else by the Pod itself,
/// else by the record of its Sandbox. `pods` are those of the namespace that may be it; `sandbox`
/// is the Sandbox that the snapshot names.
pub fn saved_pod<'a>(
    snapshot: &SandboxSnapshot,
    pods: impl IntoIterator<Item = &'a Pod>,
    sandbox: Option<&Sandbox>,
) -> Option<PodRecord> {
    let asked_for = snapshot.spec.pod_uid.as_ref();
    let written = read(snapshot, annotations::SAVED_POD)
        .filter(|record| asked_for.is_none_or(|uid| *uid == record.uid));
    if written.is_some() {
        return written;
    }
    let told = || snapshot.status.as_ref()?.pod_uid.as_ref();
    let uid = asked_for.or_else(told)?;
    let of_pod = pods
        .into_iter()
        .filter(|pod| pod.metadata.uid.as_ref() == Some(uid))
        .filter(|pod| {
            // An agent may have named the UID: a stranger's Pod is not the Sandbox's.
            sandbox_of(*pod).is_some_and(|owner| owner.name == snapshot.spec.sandbox_name)
        })
        .find_map(PodRecord::of);
    of_pod.or_else(|| {
        let sandbox = sandbox.filter(|one| one.name_any() == snapshot.spec.sandbox_name)?;
        last_pod(sandbox).filter(|record| record.uid == *uid)
    })
}

/// Node of a snapshot's Pod, as far as no agent alone says it.
pub fn home<'a>(
    snapshot: &'a SandboxSnapshot,
    record: Option<&'a PodRecord>,
) -> Option<&'a String> {
    record
        .map(|record| &record.node_name)
        .or(snapshot.spec.node_name.as_ref())
}

/// The annotation of a snapshot that holds the memory of this Pod.
pub fn annotation(record: &PodRecord) -> Value {
    json!({annotations::SAVED_POD: record.to_annotation()})
}

/// Merge patch that records the last Pod on a Sandbox, or forgets it. It holds only for the version
/// of the Sandbox that it was made from: a process that sees late must not put an earlier Pod in
/// the place of a later one.
pub fn last_pod_patch(sandbox: &Sandbox, record: Option<&PodRecord>) -> Value {
    let value = record.map(PodRecord::to_annotation);
    json!({"metadata": {
        "uid": sandbox.metadata.uid,
        "resourceVersion": sandbox.metadata.resource_version,
        "annotations": {annotations::LAST_POD: value},
    }})
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;
    use crate::merge_patch;

    fn record(uid: &str, node: &str) -> PodRecord {
        PodRecord {
            images: [("c".to_owned(), "r@sha256:1".to_owned())].into(),
            name: "s".to_owned(),
            node_name: node.to_owned(),
            sandbox_uid: "sandbox-uid".to_owned(),
            uid: uid.to_owned(),
        }
    }

    fn snapshot(change: Value) -> SandboxSnapshot {
        let mut whole = json!({
            "apiVersion": "torpor.dev/v1alpha1", "kind": "SandboxSnapshot",
            "metadata": {"name": "m", "namespace": "ns"}, "spec": {"sandboxName": "s"},
        });
        merge_patch::apply(&mut whole, &change);
        serde_json::from_value(whole).unwrap()
    }

    fn recorded(record: &PodRecord) -> Value {
        json!({"metadata": {"annotations": annotation(record)}})
    }

    fn pod(owner: &str) -> Pod {
        serde_json::from_value(json!({
            "metadata": {"name": "s", "uid": "u-p", "ownerReferences": [{
                "apiVersion": "agents.x-k8s.io/v1beta1", "kind": "Sandbox", "name": owner, "uid": "u",
                "controller": true,
            }]},
            "spec": {"nodeName": "a", "containers": [{"name": "c"}]},
            "status": {"containerStatuses": [{
                "name": "c", "image": "i", "imageID": "r@sha256:1", "ready": true, "restartCount": 0,
            }]},
        }))
        .unwrap()
    }

    fn sandbox(name: &str, record: &PodRecord) -> Sandbox {
        serde_json::from_value(json!({
            "apiVersion": "agents.x-k8s.io/v1beta1", "kind": "Sandbox",
            "metadata": {
                "name": name, "uid": "sandbox-uid",
                "annotations": {annotations::LAST_POD: record.to_annotation()},
            },
            "spec": {"podTemplate": {"spec": {"containers": []}}},
        }))
        .unwrap()
    }

    #[test]
    fn a_sandbox_that_was_made_from_the_manifest_of_another_has_no_record() {
        let own = sandbox("s", &record("u-p", "a"));
        assert_eq!(last_pod(&own), Some(record("u-p", "a")));
        let mut copied = own;
        copied.metadata.uid = Some("another".to_owned());
        assert_eq!(last_pod(&copied), None);
    }

    /// A lying agent may write all of the status.
    fn told() -> Value {
        json!({"status": {
            "podUID": "u-p", "nodeName": "b",
            "containers": [{"name": "c", "imageID": "evil@sha256:2"}],
        }})
    }

    #[rstest]
    #[case::the_pod_itself(told(), Some(pod("s")), None, Some("a"))]
    #[case::a_strangers_pod(told(), Some(pod("t")), None, None)]
    #[case::the_sandbox(told(), None, Some(sandbox("s", &record("u-p", "a"))), Some("a"))]
    #[case::another_sandbox(told(), None, Some(sandbox("t", &record("u-p", "a"))), None)]
    #[case::a_later_pod_of_the_sandbox(told(), None, Some(sandbox("s", &record("u-2", "a"))), None)]
    #[case::nothing_but_the_agent(told(), None, None, None)]
    #[case::its_own_record(recorded(&record("u-1", "a")), None, None, Some("a"))]
    #[case::its_own_record_is_of_another_pod(
        json!({
            "metadata": {"annotations": annotation(&record("u-1", "b"))}, "spec": {"podUID": "u-p"},
        }),
        Some(pod("s")), None, Some("a")
    )]
    #[case::a_record_that_cannot_be_read(
        json!({"metadata": {"annotations": {annotations::SAVED_POD: "{"}}}), None, None, None
    )]
    fn the_saved_pod_is_never_taken_from_what_an_agent_writes(
        #[case] change: Value,
        #[case] pod: Option<Pod>,
        #[case] sandbox: Option<Sandbox>,
        #[case] node: Option<&str>,
    ) {
        let record = saved_pod(&snapshot(change), &pod, sandbox.as_ref());
        assert_eq!(record.as_ref().map(|r| &*r.node_name), node);
        let images = record.as_ref().map(|r| &*r.images["c"]);
        assert_eq!(images, node.map(|_| "r@sha256:1"));
    }
}
