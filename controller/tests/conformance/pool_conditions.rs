//! What the conditions of a pool say, what its Events say beside them, and members that wait for
//! somebody else.

use serde_json::{Value, json};

use crate::{
    cluster::Cluster,
    objects::{NS, condition},
    pools::long_ago,
};

fn conditions(cluster: &Cluster) -> Vec<String> {
    let pool = cluster.api.get("sandboxwarmpools", NS, "p").unwrap();
    let all = pool["status"]["conditions"].as_array().unwrap().clone();
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let said = |c: &Value| {
        assert_eq!(c["observedGeneration"], pool["metadata"]["generation"]);
        format!(
            "{}={} {}",
            text(&c["type"]),
            text(&c["status"]),
            text(&c["reason"])
        )
    };
    all.iter().map(said).collect()
}

fn reasons(cluster: &Cluster) -> Vec<String> {
    let all = cluster.events().into_iter();
    all.map(|(reason, _)| reason).collect()
}

const IT_STALLS: [&str; 1] = ["WarmPoolNotProgressing"];
const IT_GOES_ON: [&str; 2] = ["WarmPoolNotProgressing", "WarmPoolProgressing"];
const ALL_IS_WELL: [&str; 2] = [
    "Available=True MinimumReplicasAvailable",
    "Progressing=True WarmPoolProgressing",
];

#[tokio::test]
async fn a_pool_is_available_once_its_members_are_ready_and_not_while_it_grows() {
    let cluster = Cluster::filled(2, json!({})).await;
    assert_eq!(conditions(&cluster), ALL_IS_WELL);
    cluster.edit("sandboxwarmpools", "p", &json!({"spec": {"replicas": 3}}));
    cluster.pool_pass("p").await.unwrap();
    let growing = [
        "Available=False MinimumReplicasUnavailable",
        "Progressing=True WarmPoolProgressing",
    ];
    assert_eq!(conditions(&cluster), growing);
    cluster.settle().await;
    assert_eq!(conditions(&cluster), ALL_IS_WELL);
}

#[tokio::test]
async fn a_pool_without_its_template_says_so_once_and_goes_on_when_it_comes() {
    let cluster = Cluster::new();
    cluster.pool(1, json!({}));
    for _ in 0..3 {
        let again = cluster.pool_pass("p").await.unwrap();
        assert_eq!(again.unwrap().as_secs(), 60);
    }
    assert_eq!(reasons(&cluster), IT_STALLS);
    let note = &cluster.events()[0].1;
    assert!(note.contains("SandboxTemplate \"t\" not found"), "{note}");
    let waiting = [
        "Available=False MinimumReplicasUnavailable",
        "Progressing=False SandboxTemplateError",
    ];
    assert_eq!(conditions(&cluster), waiting);
    cluster.template(json!({}));
    cluster.settle().await;
    assert_eq!(reasons(&cluster), IT_GOES_ON);
    assert_eq!(conditions(&cluster), ALL_IS_WELL);
}

#[tokio::test]
async fn a_member_that_is_held_by_scheduling_gates_keeps_its_place_and_the_pool_says_so() {
    let cluster = Cluster::new();
    cluster.template(json!({}));
    cluster.pool(1, json!({}));
    cluster.pool_pass("p").await.unwrap();
    let member = cluster.members().remove(0);
    let status = |scheduled: &str, reason: &str, ready: &str| {
        json!({"status": {"conditions": [
            condition("PodScheduled", scheduled, reason, "non-empty scheduling gates"),
            condition("Ready", ready, "R", ""),
        ]}})
    };
    cluster.api.edit("sandboxes", NS, &member, &long_ago());
    let gated = status("False", "SchedulingGated", "False");
    cluster.api.edit("sandboxes", NS, &member, &gated);
    for _ in 0..2 {
        let again = cluster.pool_pass("p").await.unwrap();
        assert_eq!(again.unwrap().as_secs(), 60);
    }
    assert_eq!(cluster.members(), std::slice::from_ref(&member));
    assert_eq!(reasons(&cluster), IT_STALLS);
    assert!(cluster.events()[0].1.contains("held by scheduling gates"));
    assert_eq!(
        conditions(&cluster)[1],
        "Progressing=False WarmPoolNotProgressing"
    );
    let let_go = status("True", "PodScheduled", "True");
    cluster.api.edit("sandboxes", NS, &member, &let_go);
    cluster.pool_pass("p").await.unwrap();
    assert_eq!(cluster.members(), [member]);
    assert_eq!(reasons(&cluster), IT_GOES_ON);
    assert_eq!(conditions(&cluster), ALL_IS_WELL);
}
