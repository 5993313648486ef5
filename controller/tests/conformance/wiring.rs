//! Tests of the running controller: watches, caches, queues, reconcilers and the lease, against the
//! apiserver in memory.

use std::{sync::Arc, time::Duration};

use serde_json::{Value, json};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use torpor_controller::{
    lease::{Candidate, Ended, LEASE_NAME, Timing},
    run,
};

use crate::{
    apiserver::{Apiserver, Fault, FaultAnswer},
    objects::{NS, committed, condition, golden, mode, ready_pod, sandbox, torpor_sandbox},
    world::World,
};

/// Running controller.
pub(crate) struct Running {
    pub(crate) world: World,
    stop: CancellationToken,
    work: JoinHandle<()>,
}

impl Running {
    pub(crate) fn start(world: World) -> Self {
        let stop = CancellationToken::new();
        let work = tokio::spawn(run::run(Arc::clone(&world.context), stop.clone()));
        Self { world, stop, work }
    }

    pub(crate) async fn wait_for_condition(&self, type_: &str, reason: &str) {
        let what = format!("{type_} has the reason {reason}");
        self.world
            .api
            .until(&what, |_| {
                self.world
                    .condition(type_)
                    .is_some_and(|condition| condition.1 == reason)
            })
            .await;
    }

    async fn pod_exists(&self) {
        self.world
            .api
            .until("there is a Pod", |api| api.get("pods", NS, "s").is_some())
            .await;
    }

    /// Creates the Sandbox "s" and brings it up.
    pub(crate) async fn bring_up(&self, sandbox: Value) {
        self.world.api.create("sandboxes", sandbox);
        self.pod_exists().await;
        self.world.pod_becomes_ready();
        self.wait_for_condition("Ready", "DependenciesReady").await;
    }

    /// Suspends the Sandbox up to the end of its Pod: the agent commits the image, the kubelet
    /// removes the Pod.
    async fn suspend(&self) {
        let world = &self.world;
        world.edit_sandbox(&mode("Suspended"));
        let made = |_: &Apiserver| world.image_of_suspension().is_some();
        world.api.until("there is a snapshot", made).await;
        let name = world.image_of_suspension().unwrap();
        world.edit_snapshot(&name, &committed("i.1", "n1"));
        let going = |_: &Apiserver| world.pod_is_terminating();
        world.api.until("the Pod is being deleted", going).await;
        world.pod_ends();
    }

    pub(crate) async fn end(self) -> World {
        self.stop.cancel();
        tokio::time::timeout(Duration::from_secs(20), self.work)
            .await
            .unwrap()
            .unwrap();
        self.world
    }
}

#[tokio::test]
async fn a_sandbox_is_reconciled_by_its_watches() {
    let running = Running::start(World::new());
    let api = running.world.api.clone();
    running
        .bring_up(sandbox(json!({"spec": {"service": true}})))
        .await;
    // A Service that a user deletes is created again.
    api.remove("services", NS, "s");
    api.until("the Service is back", |api| {
        api.get("services", NS, "s").is_some()
    })
    .await;
    api.remove("pods", NS, "s");
    running.pod_exists().await;
    running
        .wait_for_condition("Ready", "DependenciesNotReady")
        .await;
    let world = running.end().await;
    assert!(
        world
            .context
            .metrics
            .text()
            .unwrap()
            .contains("agent_sandboxes{namespace=\"ns\"")
    );
}

#[tokio::test]
async fn objects_created_before_the_controller_are_reconciled() {
    let world = World::new();
    world.api.create("sandboxes", sandbox(json!({})));
    let running = Running::start(world);
    running.pod_exists().await;
    running.end().await;
}

#[tokio::test]
async fn suspend_and_resume_follow_the_agents_writes() {
    let running = Running::start(World::new());
    let world = &running.world;
    running.bring_up(torpor_sandbox(json!({}))).await;
    running.suspend().await;
    running
        .wait_for_condition("Suspended", "PodTerminated")
        .await;
    running.wait_for_condition("Hibernated", "Hibernated").await;
    world.edit_sandbox(&mode("Running"));
    running.pod_exists().await;
    world.pod_becomes_ready();
    world.set_pod_condition(condition("torpor.dev/Restored", "True", "Restored", ""));
    running.wait_for_condition("Restored", "Restored").await;
    running.end().await;
}

#[tokio::test]
async fn a_node_that_returned_to_the_cluster_is_used_once_its_agent_reports() {
    let world = World::new();
    let heartbeat = |time: &str| json!({"status": {"heartbeatTime": time}});
    let long_ago = heartbeat("2020-01-01T00:00:00Z");
    world.api.edit("sandboxnodes", "", "n1", &long_ago);
    let running = Running::start(world);
    let (api, world) = (running.world.api.clone(), &running.world);
    running.bring_up(torpor_sandbox(json!({}))).await;
    running.suspend().await;
    running.wait_for_condition("Hibernated", "Hibernated").await;

    let agent_is_missing = || {
        let condition = world.condition("Hibernated");
        condition.is_some_and(|condition| condition.2.contains("no agent of Torpor reports"))
    };
    api.remove("sandboxnodes", "", "n1");
    api.until("no agent reports", |_| agent_is_missing()).await;
    let mut reports = crate::objects::sandbox_node("n1");
    reports["status"]["heartbeatTime"] = long_ago["status"]["heartbeatTime"].clone();
    api.create("sandboxnodes", reports);
    api.until("one does again", |_| !agent_is_missing()).await;

    api.remove("nodes", "", "n1");
    world.edit_sandbox(&mode("Running"));
    running
        .wait_for_condition("Restored", "NodeUnavailable")
        .await;
    assert_eq!(world.pod(), None);
    api.create("nodes", json!({"metadata": {"name": "n1"}}));
    api.edit("sandboxnodes", "", "n1", &heartbeat("2046-01-01T00:00:00Z"));
    running.pod_exists().await;
    running.end().await;
}

#[tokio::test]
async fn a_waiting_copy_starts_when_its_snapshot_and_its_node_are_there() {
    let world = World::new();
    world.api.remove("sandboxnodes", "", "n1");
    let running = Running::start(world);
    let api = running.world.api.clone();
    let from = json!({"metadata": {"annotations": {"torpor.dev/restore-from": "golden"}}});
    api.create("sandboxes", torpor_sandbox(from));
    running
        .wait_for_condition("Restored", "SnapshotNotFound")
        .await;
    api.create("sandboxsnapshots", golden());
    running
        .wait_for_condition("Restored", "NodeUnavailable")
        .await;
    api.create("sandboxnodes", crate::objects::sandbox_node("n1"));
    running.pod_exists().await;
    running.end().await;
}

#[tokio::test]
async fn a_snapshot_without_a_sandbox_is_reported_until_the_sandbox_is_created() {
    let running = Running::start(World::new());
    let api = running.world.api.clone();
    let snapshot = json!({
        "metadata": {"name": "m", "namespace": NS}, "spec": {"sandboxName": "s", "reason": "Manual"},
    });
    api.create("sandboxsnapshots", snapshot);
    let reason = |api: &Apiserver, reason: &str| {
        let snapshot = api.get("sandboxsnapshots", NS, "m").unwrap();
        snapshot["status"]["conditions"][0]["reason"] == reason
    };
    api.until("SandboxNotFound", |api| reason(api, "SandboxNotFound"))
        .await;
    api.create("sandboxes", sandbox(json!({})));
    api.until("Pending", |api| reason(api, "Pending")).await;
    running.end().await;
}

#[tokio::test]
async fn a_trigger_is_processed_to_its_end_and_named_on_the_next_pod() {
    let running = Running::start(World::new());
    let (api, world) = (running.world.api.clone(), &running.world);
    running.bring_up(torpor_sandbox(json!({}))).await;
    let trigger = json!({"metadata": {"name": "t", "namespace": NS}, "spec": {"targetPod": "s"}});
    api.create("podsnapshotmanualtriggers", trigger);
    let asked = |api: &Apiserver| api.get("sandboxsnapshots", NS, "t").is_some();
    api.until("an image is asked for", asked).await;
    world.edit_snapshot("t", &committed("i.1", "n1"));
    api.until("it was taken", |api| {
        let trigger = api.get("podsnapshotmanualtriggers", NS, "t").unwrap();
        trigger["status"]["snapshotCreated"]["name"] == "t"
    })
    .await;
    running.suspend().await;
    running
        .wait_for_condition("Suspended", "PodTerminated")
        .await;
    // The next controller creates the Pod after it has listed the PodSnapshot.
    let running = Running::start(running.end().await.restarted());
    running.world.edit_sandbox(&mode("Running"));
    running.pod_exists().await;
    let pod = running.world.pod().unwrap();
    assert_eq!(
        pod["metadata"]["annotations"]["torpor.dev/pod-snapshot"],
        "t"
    );
    running.end().await;
}

#[tokio::test]
async fn a_failed_pass_is_retried() {
    let world = World::new();
    world.api.fail(Fault {
        verb: "create",
        kind: "pods",
        answer: FaultAnswer::Refuse(403),
    });
    let running = Running::start(world);
    running.world.api.create("sandboxes", sandbox(json!({})));
    running.pod_exists().await;
    running
        .wait_for_condition("Ready", "DependenciesNotReady")
        .await;
    let world = running.end().await;
    let text = world.context.metrics.text().unwrap();
    let failure =
        "controller_runtime_reconcile_errors_total{controller=\"sandbox\",reason=\"Refused\"} 1";
    assert!(text.contains(failure), "{text}");
}

#[tokio::test]
async fn an_object_that_cannot_be_read_stops_no_other() {
    let world = World::new();
    // The apiserver's schema accepts such a time.
    let odd = json!({
        "metadata": {"name": "a-odd"}, "spec": {"shutdownTime": "2046-01-01T00:00:00.0000000000001Z"},
    });
    let odd = world.api.create("sandboxes", sandbox(odd));
    serde_json::from_value::<torpor_api::Sandbox>(odd).unwrap_err();
    let running = Running::start(world);
    running.world.api.create("sandboxes", sandbox(json!({})));
    running.pod_exists().await;
    running.end().await;
}

#[tokio::test]
async fn many_sandboxes_at_once_all_become_ready() {
    let running = Running::start(World::new());
    let api = running.world.api.clone();
    for number in 0..40 {
        api.create(
            "sandboxes",
            sandbox(json!({"metadata": {"name": format!("s{number}")}})),
        );
    }
    api.until("40 Pods", |api| api.list("pods").len() == 40)
        .await;
    for pod in api.list("pods") {
        api.edit(
            "pods",
            NS,
            pod["metadata"]["name"].as_str().unwrap(),
            &ready_pod("n1"),
        );
    }
    let ready = |sandbox: &Value| {
        let all = sandbox["status"]["conditions"].as_array();
        all.is_some_and(|all| {
            all.iter()
                .any(|c| c["type"] == "Ready" && c["status"] == "True")
        })
    };
    api.until("40 ready", |api| api.list("sandboxes").iter().all(ready))
        .await;
    running.end().await;
}

#[tokio::test]
async fn objects_of_tenants_are_listed_in_pages() {
    let world = World::new();
    for number in 0..60 {
        let name = format!("s{number}");
        let service = json!({"metadata": {"name": name, "namespace": NS}, "spec": {}});
        world.api.create("services", service);
        let asleep = json!({"metadata": {"name": name}, "spec": {"operatingMode": "Suspended"}});
        world.api.create("sandboxes", sandbox(asleep));
    }
    let running = Running::start(world);
    let caches = &running.world.context.caches;
    let listed =
        async { tokio::join!(caches.sandboxes.wait_ready(), caches.services.wait_ready()) };
    tokio::time::timeout(Duration::from_secs(20), listed)
        .await
        .unwrap();
    let lists = running.world.api.take_lists();
    let pages: [(&str, &[usize]); 2] = [("sandboxes", &[10; 6]), ("services", &[50, 10])];
    for (kind, expected) in pages {
        let of_kind = lists.iter().filter(|(listed, _)| listed == kind);
        let sizes: Vec<usize> = of_kind.map(|(_, size)| *size).collect();
        assert_eq!(sizes, expected, "{kind}");
    }
    for number in 0..60 {
        let found = caches.sandboxes.get(NS, &format!("s{number}"));
        assert!(found.is_some(), "s{number}");
    }
    running.end().await;
}

// Lease.

fn quick() -> Timing {
    Timing {
        duration: Duration::from_secs(1),
        renew_deadline: Duration::from_millis(300),
        retry: Duration::from_millis(20),
    }
}

fn candidate(api: &Apiserver, name: &str) -> Candidate {
    Candidate::new(api.client(), NS, name.to_owned(), quick())
}

fn holder(api: &Apiserver) -> Option<String> {
    let lease = api.get("leases", NS, LEASE_NAME)?;
    lease["spec"]["holderIdentity"].as_str().map(str::to_owned)
}

#[tokio::test]
async fn the_second_candidate_leads_once_the_first_gives_the_lease_back() {
    let api = Apiserver::new();
    let stop = CancellationToken::new();
    let mut first = candidate(&api, "a");
    first.acquire(&stop).await.unwrap();
    assert_eq!(holder(&api).as_deref(), Some("a"));
    let (second_api, second_stop) = (api.clone(), stop.clone());
    let second =
        tokio::spawn(async move { candidate(&second_api, "b").acquire(&second_stop).await });
    let release = CancellationToken::new();
    release.cancel();
    assert_eq!(first.keep(&release).await, Ended::Stopped);
    second.await.unwrap().unwrap();
    assert_eq!(holder(&api).as_deref(), Some("b"));
    let lease = api.get("leases", NS, LEASE_NAME).unwrap();
    assert_eq!(lease["spec"]["leaseTransitions"], 1);
}

#[tokio::test]
async fn a_lease_that_is_not_renewed_is_taken_after_its_duration() {
    let api = Apiserver::new();
    let stop = CancellationToken::new();
    candidate(&api, "dead").acquire(&stop).await.unwrap();
    let begin = std::time::Instant::now();
    candidate(&api, "b").acquire(&stop).await.unwrap();
    assert!(begin.elapsed() >= Duration::from_secs(1));
    assert_eq!(holder(&api).as_deref(), Some("b"));
}

#[tokio::test]
async fn a_leader_whose_lease_was_taken_stops() {
    let api = Apiserver::new();
    let stop = CancellationToken::new();
    let mut first = candidate(&api, "a");
    first.acquire(&stop).await.unwrap();
    api.edit(
        "leases",
        NS,
        LEASE_NAME,
        &json!({"spec": {"holderIdentity": "thief"}}),
    );
    assert_eq!(first.keep(&stop).await, Ended::Lost);
}

#[tokio::test]
async fn a_leader_that_cannot_renew_in_time_stops() {
    let api = Apiserver::new();
    let stop = CancellationToken::new();
    let mut first = candidate(&api, "a");
    first.acquire(&stop).await.unwrap();
    for _ in 0..1000 {
        api.fail(Fault {
            verb: "replace",
            kind: "leases",
            answer: FaultAnswer::Refuse(500),
        });
    }
    assert_eq!(first.keep(&stop).await, Ended::Lost);
}

#[tokio::test]
async fn a_candidate_that_waits_can_be_stopped() {
    let api = Apiserver::new();
    let stop = CancellationToken::new();
    candidate(&api, "a").acquire(&stop).await.unwrap();
    stop.cancel();
    assert_eq!(candidate(&api, "b").acquire(&stop).await, None);
}
