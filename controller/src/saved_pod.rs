//! No client required. Determines the Pod whose memory a SandboxSnapshot holds, from what the
//! kubelet reported while that Pod ran.
//!
//! The controller keeps the record in annotations, which agents cannot write. The node and the
//! container images of a restore come from this record. A compromised agent can therefore not draw
//! Pods of other nodes to its own node.

use k8s_openapi::api::core::v1::Pod;
use kube::{Resource, ResourceExt};
use serde_json::{Value, json};
use torpor_api::{PodRecord, Sandbox, SandboxSnapshot, annotations};

use crate::watches::sandbox_of;

/// Reads the record in an annotation. Returns `None` if it is missing or malformed.
fn read<K: Resource>(object: &K, key: &str) -> Option<PodRecord> {
    let value = object.meta().annotations.as_ref()?.get(key)?;
    match PodRecord::parse(value) {
        Ok(record) => Some(record),
        Err(error) => {
            let (namespace, name) = (
                object.meta().namespace.as_ref(),
                object.meta().name.as_ref(),
            );
            tracing::warn!(?namespace, ?name, annotation = key, %error, "ignoring a malformed Pod record");
            None
        }
    }
}

/// Returns the record of the Pod that last ran for a Sandbox.
///
/// A Sandbox made from the manifest of another Sandbox has that Sandbox's record, which is ignored.
pub fn last_pod(sandbox: &Sandbox) -> Option<PodRecord> {
    let record = read(sandbox, annotations::LAST_POD)?;
    (sandbox.metadata.uid.as_deref() == Some(record.sandbox_uid.as_str())).then_some(record)
}

/// Returns the Pod whose memory a snapshot holds.
///
/// The sources, in this order: the snapshot's own record, the Pod itself, the record of the
/// Sandbox. `pods` are the candidates of the namespace. `sandbox` is the Sandbox that the snapshot
/// names.
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
    let reported = || snapshot.status.as_ref()?.pod_uid.as_ref();
    let uid = asked_for.or_else(reported)?;
    let of_pod = pods
        .into_iter()
        .filter(|pod| pod.metadata.uid.as_ref() == Some(uid))
        .filter(|pod| {
            // The UID may come from an agent, and may be that of another Sandbox's Pod.
            sandbox_of(*pod).is_some_and(|owner| owner.name == snapshot.spec.sandbox_name)
        })
        .find_map(PodRecord::of);
    of_pod.or_else(|| {
        let sandbox = sandbox.filter(|one| one.name_any() == snapshot.spec.sandbox_name)?;
        last_pod(sandbox).filter(|record| record.uid == *uid)
    })
}

/// Returns the node of a snapshot's Pod from sources other than the agent.
pub fn pod_node<'a>(
    snapshot: &'a SandboxSnapshot,
    record: Option<&'a PodRecord>,
) -> Option<&'a String> {
    // The node of an archive's Pod may be one of another cluster.
    let record = record.filter(|_| !snapshot.is_archive());
    record
        .map(|record| &record.node_name)
        .or(snapshot.spec.node_name.as_ref())
}

/// Returns the annotation that records this Pod on a snapshot.
pub fn annotation(record: &PodRecord) -> Value {
    json!({annotations::SAVED_POD: record.to_annotation()})
}

/// Returns the merge patch that records the last Pod on a Sandbox, or removes the record.
///
/// The patch holds only for the version of the Sandbox that it was made from. A process with an old
/// view can therefore not replace the record of a later Pod with that of an earlier one.
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

    /// Status of a compromised agent, which may write all of it.
    fn reported() -> Value {
        json!({"status": {
            "podUID": "u-p", "nodeName": "b",
            "containers": [{"name": "c", "imageID": "evil@sha256:2"}],
        }})
    }

    #[rstest]
    #[case::the_pod_itself(reported(), Some(pod("s")), None, Some("a"))]
    #[case::a_strangers_pod(reported(), Some(pod("t")), None, None)]
    #[case::the_sandbox(reported(), None, Some(sandbox("s", &record("u-p", "a"))), Some("a"))]
    #[case::another_sandbox(reported(), None, Some(sandbox("t", &record("u-p", "a"))), None)]
    #[case::a_later_pod_of_the_sandbox(reported(), None, Some(sandbox("s", &record("u-2", "a"))), None)]
    #[case::nothing_but_the_agent(reported(), None, None, None)]
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
