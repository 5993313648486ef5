//! Tests of a pool's conditions and Events, and of members that are held by other components.

use serde_json::{Value, json};

use crate::{
    cluster::Cluster,
    objects::NS,
    pools::{pool_with_unscheduled_member, schedule_member},
};

fn conditions(cluster: &Cluster) -> Vec<String> {
    let pool = cluster.api.get("sandboxwarmpools", NS, "p").unwrap();
    let all = pool["status"]["conditions"].as_array().unwrap().clone();
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let text_of = |c: &Value| {
        assert_eq!(c["observedGeneration"], pool["metadata"]["generation"]);
        format!(
            "{}={} {}",
            text(&c["type"]),
            text(&c["status"]),
            text(&c["reason"])
        )
    };
    all.iter().map(text_of).collect()
}

fn reasons(cluster: &Cluster) -> Vec<String> {
    let all = cluster.events().into_iter();
    all.map(|(reason, _)| reason).collect()
}

const STALLED: [&str; 1] = ["WarmPoolNotProgressing"];
const RECOVERED: [&str; 2] = ["WarmPoolNotProgressing", "WarmPoolProgressing"];
const AVAILABLE: [&str; 2] = [
    "Available=True MinimumReplicasAvailable",
    "Progressing=True WarmPoolProgressing",
];

#[tokio::test]
async fn a_pool_is_available_once_its_members_are_ready_and_not_while_it_grows() {
    let cluster = Cluster::filled(2, json!({})).await;
    assert_eq!(conditions(&cluster), AVAILABLE);
    cluster.edit("sandboxwarmpools", "p", &json!({"spec": {"replicas": 3}}));
    cluster.pool_pass("p").await.unwrap();
    let growing = [
        "Available=False MinimumReplicasUnavailable",
        "Progressing=True WarmPoolProgressing",
    ];
    assert_eq!(conditions(&cluster), growing);
    cluster.settle().await;
    assert_eq!(conditions(&cluster), AVAILABLE);
}

#[tokio::test]
async fn a_pool_without_its_template_reports_it_once_and_continues_when_it_is_created() {
    let cluster = Cluster::new();
    cluster.pool(1, json!({}));
    for _ in 0..3 {
        let again = cluster.pool_pass("p").await.unwrap();
        assert_eq!(again.unwrap().as_secs(), 60);
    }
    assert_eq!(reasons(&cluster), STALLED);
    let note = &cluster.events()[0].1;
    assert!(note.contains("SandboxTemplate \"t\" not found"), "{note}");
    let waiting = [
        "Available=False MinimumReplicasUnavailable",
        "Progressing=False SandboxTemplateError",
    ];
    assert_eq!(conditions(&cluster), waiting);
    cluster.template(json!({}));
    cluster.settle().await;
    assert_eq!(reasons(&cluster), RECOVERED);
    assert_eq!(conditions(&cluster), AVAILABLE);
}

#[tokio::test]
async fn a_member_held_by_scheduling_gates_is_kept_and_the_pool_reports_it() {
    let (cluster, member) =
        pool_with_unscheduled_member("SchedulingGated", "non-empty scheduling gates").await;
    assert_eq!(reasons(&cluster), STALLED);
    assert!(cluster.events()[0].1.contains("held by scheduling gates"));
    assert_eq!(
        conditions(&cluster)[1],
        "Progressing=False WarmPoolNotProgressing"
    );
    schedule_member(&cluster, &member).await;
    assert_eq!(cluster.members(), [member]);
    assert_eq!(reasons(&cluster), RECOVERED);
    assert_eq!(conditions(&cluster), AVAILABLE);
}
