//! Tests of idle times from a SandboxTemplate's own annotations to the Pod.

use serde_json::{Value, json};

use crate::{cluster::Cluster, objects::NS};

const DOZE: &str = "torpor.dev/doze-after";
const HIBERNATE: &str = "torpor.dev/hibernate-after";

fn on_pod(cluster: &Cluster, sandbox: &str, key: &str) -> Value {
    let pod = cluster.api.get("pods", NS, sandbox).expect("it has a Pod");
    pod["metadata"]["annotations"][key].clone()
}

/// Covers pool members and Sandboxes that start cold.
#[tokio::test]
async fn a_templates_own_annotations_reach_the_pods_of_its_sandboxes() {
    let cluster = Cluster::new();
    let template = json!({
        "metadata": {"annotations": {DOZE: "1m", "torpor.dev/idle-timeout": "1h"}},
        "spec": {"podTemplate": {"metadata": {"annotations": {HIBERNATE: "2h"}}}},
    });
    let [warm, cold] = cluster.warm_and_cold(template).await;
    for sandbox in [&warm, &cold] {
        assert_eq!(on_pod(&cluster, sandbox, DOZE), "60s", "{sandbox}");
        // The pod template sets it by another alias, which takes precedence.
        assert_eq!(on_pod(&cluster, sandbox, HIBERNATE), "7200s", "{sandbox}");
    }
    let own = json!({"metadata": {"annotations": {DOZE: "5s"}}});
    cluster.edit("sandboxes", &warm, &own);
    cluster.settle().await;
    assert_eq!(on_pod(&cluster, &warm, DOZE), "5s", "its own wins");
}

/// The same holds for the annotation of the runtime's injection.
#[tokio::test]
async fn changed_idle_times_of_the_template_make_no_member_stale() {
    let cluster = Cluster::new();
    let change = json!({"metadata": {"annotations": {DOZE: "1m"}}});
    let [before, after] = cluster.members_over(json!({}), &change).await;
    assert_eq!(after, before);
}
