//! Tests that this controller takes over from upstream's (v1): all objects are as upstream's left
//! them, with JSON written by Go's types, and stay so.

use serde_json::{Value, json};
use torpor_api::name_hash;

use crate::{
    cluster::{Cluster, merged, name, ready_at},
    objects::{NS, runtime_class, sandbox_node},
};

const SAFE_TO_EVICT: &str = "cluster-autoscaler.kubernetes.io/safe-to-evict";
/// Hash of the template's Go JSON, which never equals our hash.
const BLUEPRINT_HASH: &str = "5d2af1c0";
const HELD: &str = "p-7kq2x";
const MEMBERS: [&str; 2] = ["p-m4cdz", "p-x9fvb"];

/// Returns a pod spec as a user wrote it, with zero values. The apiserver added the protocol.
fn as_written() -> Value {
    json!({
        "hostNetwork": false,
        "containers": [{
            "name": "c", "image": "img", "tty": false,
            "env": [{"name": "EMPTY", "value": ""}, {"name": "CPUS", "valueFrom": {"resourceFieldRef": {"resource": "limits.cpu"}}}],
            "ports": [{"containerPort": 8888, "protocol": "TCP"}],
            "resources": {"requests": {"cpu": "0.5", "memory": "1024Mi"}},
            "volumeMounts": [{"name": "tmp", "mountPath": "/tmp", "readOnly": false}],
        }, {"name": "sidecar", "image": "img"}],
        "volumes": [{"name": "tmp", "emptyDir": {"medium": ""}}],
    })
}

/// Returns the same spec with the secure defaults, as Go's types write it.
fn through_go() -> Value {
    json!({
        "automountServiceAccountToken": false,
        "containers": [{
            "name": "c", "image": "img",
            "env": [{"name": "EMPTY"}, {"name": "CPUS", "valueFrom": {"resourceFieldRef": {"divisor": "0", "resource": "limits.cpu"}}}],
            "ports": [{"containerPort": 8888, "protocol": "TCP"}],
            "resources": {"requests": {"cpu": "500m", "memory": "1Gi"}},
            "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
        }, {"name": "sidecar", "image": "img", "resources": {}}],
        "dnsConfig": {"nameservers": ["8.8.8.8", "1.1.1.1"]},
        "dnsPolicy": "None",
        "volumes": [{"name": "tmp", "emptyDir": {}}],
    })
}

fn owned_by(owner: &Value) -> Value {
    json!([{
        "apiVersion": owner["apiVersion"], "kind": owner["kind"], "name": owner["metadata"]["name"],
        "uid": owner["metadata"]["uid"], "controller": true, "blockOwnerDeletion": true,
    }])
}

fn condition(type_: &str, status: &str, reason: &str, message: &str) -> Value {
    let mut condition = crate::objects::condition(type_, status, reason, message);
    condition["observedGeneration"] = 1.into();
    condition
}

/// Creates a Sandbox from the pool and its Pod, both Ready.
fn sandbox(cluster: &Cluster, at: usize, named: &str, of_owner: &Value) {
    let (hash, running) = (name_hash(named), ready_at(at));
    let template = json!({"agents.x-k8s.io/sandbox-template-ref-hash": name_hash("t")});
    let change = json!({
        "metadata": {
            "name": named, "namespace": NS,
            "labels": merged(json!({"agents.x-k8s.io/launch-type": "warm"}), &template),
            "annotations": {
                "agents.x-k8s.io/pod-name": named,
                "agents.x-k8s.io/sandbox-template-ref": "t",
            },
        },
        "spec": {"operatingMode": "Running", "podTemplate": {
            "metadata": {"labels": template},
            "spec": through_go(),
        }},
        "status": {
            "conditions": [
                condition("Suspended", "False", "NotSuspended", "Sandbox is not suspended"),
                condition("PodScheduled", "True", "PodScheduled", ""),
                condition("Ready", "True", "DependenciesReady", "Pod is Ready"),
            ],
            "nodeName": running["spec"]["nodeName"],
            "podIPs": [running["status"]["podIPs"][0]["ip"]],
            "selector": format!("agents.x-k8s.io/sandbox-name-hash={hash}"),
        },
    });
    let sandbox = merged(change, &of_owner["sandbox"]);
    let sandbox = cluster.api.create("sandboxes", sandbox);
    let pod = json!({
        "metadata": {
            "name": named, "namespace": NS,
            "labels": merged(json!({"agents.x-k8s.io/sandbox-name-hash": hash}), &template),
            "ownerReferences": owned_by(&sandbox),
        },
        "spec": {"containers": [{"name": "c", "image": "img"}]},
    });
    let pod = merged(pod, &of_owner["pod"]);
    cluster.api.create("pods", pod);
    cluster.api.edit("pods", NS, named, &running);
}

/// Returns the metadata of a pool member.
fn of_pool(pool: &Value) -> Value {
    let hashes = json!({
        "agents.x-k8s.io/sandbox-pod-template-hash": "9c1be2a7",
        "agents.x-k8s.io/sandbox-template-hash": BLUEPRINT_HASH,
        "agents.x-k8s.io/warm-pool-sandbox": name_hash("p"),
    });
    let creator = json!({"agents.x-k8s.io/created-by": "controller"});
    json!({
        "sandbox": {
            "metadata": {"labels": merged(hashes.clone(), &creator), "ownerReferences": owned_by(pool)},
            "spec": {"podTemplate": {"metadata": {"labels": hashes, "annotations": {SAFE_TO_EVICT: "true"}}}},
        },
        "pod": {"metadata": {
            "labels": merged(json!({"agents.x-k8s.io/warm-pool-sandbox": name_hash("p")}), &creator),
            "annotations": {"agents.x-k8s.io/propagated-annotations": SAFE_TO_EVICT, SAFE_TO_EVICT: "true"},
        }},
    })
}

/// Returns the metadata of a former member that a claim holds.
fn of_claim(claim: &Value) -> Value {
    let claimed = json!({
        "agents.x-k8s.io/claim-uid": claim["metadata"]["uid"],
        "agents.x-k8s.io/created-by": "python-client",
    });
    json!({
        "sandbox": {
            "metadata": {"labels": claimed, "ownerReferences": owned_by(claim)},
            "spec": {"podTemplate": {"metadata": {"labels": claimed}}},
        },
        "pod": {"metadata": {
            "labels": {"agents.x-k8s.io/created-by": "python-client"},
            "annotations": {"agents.x-k8s.io/propagated-annotations": ""},
        }},
    })
}

/// Creates a reconciled template and its NetworkPolicy.
fn template(cluster: &Cluster) {
    let hash = name_hash("t");
    let label = json!({"agents.x-k8s.io/sandbox-template-ref-hash": hash});
    cluster.new_template(json!({
        "metadata": {"labels": label},
        "spec": {
            "podTemplate": {"spec": as_written()},
            "networkPolicyManagement": "Managed",
            "envVarsInjectionPolicy": "Disallowed",
            "volumeClaimTemplatesPolicy": "Disallowed",
        },
    }));
    let owner = cluster.api.get("sandboxtemplates", NS, "t").unwrap();
    let namespace = json!({"kubernetes.io/metadata.name": "agent-sandbox-system"});
    let router = json!({
        "namespaceSelector": {"matchLabels": namespace},
        "podSelector": {"matchLabels": {"app": "sandbox-router"}},
    });
    let v4 = "10.0.0.0/8 172.16.0.0/12 192.168.0.0/16 169.254.0.0/16";
    let v4: Vec<&str> = v4.split(' ').collect();
    let policy = json!({
        "metadata": {
            "name": "t-network-policy", "namespace": NS, "ownerReferences": owned_by(&owner),
        },
        "spec": {
            "podSelector": {"matchLabels": label},
            "ingress": [{"from": [router]}],
            "egress": [{"to": [
                {"ipBlock": {"cidr": "0.0.0.0/0", "except": v4}},
                {"ipBlock": {"cidr": "::/0", "except": ["fc00::/7", "fe80::/10"]}},
            ]}],
            "policyTypes": ["Ingress", "Egress"],
        },
    });
    cluster.api.create("networkpolicies", policy);
}

/// Creates a full pool with the strategy Recreate.
fn pool(cluster: &Cluster) {
    let selector = format!("agents.x-k8s.io/warm-pool-sandbox={}", name_hash("p"));
    let change = json!({
        "spec": {"updateStrategy": {"type": "Recreate"}},
        "status": {
            "observedGeneration": 1, "readyReplicas": 2, "replicas": 2, "selector": selector,
        },
    });
    cluster.pool(MEMBERS.len(), change);
    let of_pool = of_pool(&cluster.get_pool("p"));
    for (at, member) in MEMBERS.into_iter().enumerate() {
        sandbox(cluster, at, member, &of_pool);
    }
}

/// Creates a claim that holds one of the pool's Sandboxes.
fn claim(cluster: &Cluster) {
    let change = json!({
        "metadata": {
            "labels": {"agents.x-k8s.io/created-by": "python-client"},
            "annotations": {
                "agents.x-k8s.io/sandbox-name": HELD,
                "agents.x-k8s.io/controller-first-observed-at": "2026-01-01T00:00:00.123456789Z",
                "agents.x-k8s.io/claim-first-ready-at": "2026-01-01T00:00:00.223456789Z",
            },
        },
        "spec": {"lifecycle": {"shutdownPolicy": "Retain"}},
        "status": {
            "conditions": [condition("Ready", "True", "DependenciesReady", "Pod is Ready")],
            "sandbox": {"name": HELD, "podIPs": [ready_at(2)["status"]["podIPs"][0]["ip"]]},
        },
    });
    cluster.claim("c", change);
    sandbox(cluster, 2, HELD, &of_claim(&cluster.get_claim("c")));
}

/// Returns the objects as upstream's controller leaves them, in a cluster whose nodes have Torpor.
fn left_by_upstream() -> Cluster {
    let cluster = Cluster::new();
    cluster.api.create("runtimeclasses", runtime_class());
    cluster.api.create("sandboxnodes", sandbox_node("n0"));
    template(&cluster);
    pool(&cluster);
    claim(&cluster);
    cluster
}

/// Runs a pass over every object; none fails.
async fn pass(cluster: &Cluster) {
    cluster.template_pass("t").await.unwrap();
    cluster.claim_pass("c").await.unwrap();
    cluster.pool_pass("p").await.unwrap();
    cluster.sandbox_passes().await;
}

#[tokio::test]
async fn objects_of_upstreams_controller_continue_unchanged() {
    let cluster = left_by_upstream();
    for _ in 0..3 {
        pass(&cluster).await;
    }
    // Only these differ: the policy blocks more than upstream's, and the pool gets conditions and
    // an Event that recommends a RuntimeClass.
    assert_eq!(
        cluster.writes_with_events(),
        [
            "patch networkpolicies",
            "create events",
            "patch status sandboxwarmpools"
        ]
    );
    assert_eq!(cluster.events()[0].0, "RuntimeNotNamed");
    cluster.assert_claim_ready("c", "True", "DependenciesReady", "Pod is Ready");
    assert_eq!(cluster.members(), MEMBERS);
}

#[tokio::test]
async fn a_member_made_by_upstreams_controller_is_claimed_with_its_pod() {
    let cluster = left_by_upstream();
    let uids = |cluster: &Cluster| -> Vec<(String, Value)> {
        let pods = cluster.api.list("pods");
        let uid = |pod: &Value| (name(pod).to_owned(), pod["metadata"]["uid"].clone());
        pods.iter().map(uid).collect()
    };
    // The template's policy gets our rules first.
    pass(&cluster).await;
    let before = uids(&cluster);
    cluster.claim("d", json!({}));
    cluster.claim_pass("d").await.unwrap();
    cluster.assert_claim_ready("d", "True", "DependenciesReady", "Pod is Ready");
    let taken = cluster.held_by("d").unwrap();
    assert!(MEMBERS.contains(&taken.as_str()), "{taken}");
    cluster.settle().await;
    let after = uids(&cluster);
    assert!(before.iter().all(|pod| after.contains(pod)), "{after:?}");
    assert_eq!(after.len(), before.len() + 1, "the pool is refilled");
    let pod = cluster.api.get("pods", NS, &taken).unwrap();
    let member = "agents.x-k8s.io/warm-pool-sandbox";
    assert_eq!(pod["metadata"]["labels"].get(member), None);
    assert_eq!(pod["metadata"]["annotations"].get(SAFE_TO_EVICT), None);
    for claim in ["c", "d"] {
        cluster.assert_claim_ready(claim, "True", "DependenciesReady", "Pod is Ready");
    }
}
