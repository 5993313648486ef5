//! `wake`, and the times `wake-at` and `next-wakeup`.

use std::sync::Arc;

use serde_json::{Value, json};
use tokio::sync::Semaphore;
use torpor_cli::goal::Goal;
use torpor_test_apiserver::Apiserver;

use crate::support::{
    annotation, asked, change, cluster, create, gated, is_hibernate_requested, set_conditions,
};

const NEXT_WAKEUP: &str = "agents.x-k8s.io/next-wakeup";
const WAKE_AT: &str = "torpor.dev/wake-at";
const FAR_FUTURE: &str = "2999-01-01T00:00:00Z";

fn set_time(server: &Apiserver, time: &str) {
    let annotated = json!({"metadata": {"annotations": {NEXT_WAKEUP: time}}});
    server.edit("sandboxes", "x", "demo", &annotated);
}

/// Creates a Sandbox that sleeps because it was idle, with a `next-wakeup` in the far future.
fn asleep_until_its_time(server: &Apiserver) {
    create(server, "demo");
    set_time(server, FAR_FUTURE);
    let asleep = [
        ("Hibernated", "True", "Hibernated"),
        ("Ready", "True", "DependenciesReady"),
    ];
    set_conditions(server, "demo", &asleep);
}

#[tokio::test]
async fn a_wake_removes_the_annotation() {
    let server = Apiserver::new();
    create(&server, "demo");
    let annotated = json!({"metadata": {"annotations": {"torpor.dev/hibernate": "true"}}});
    server.edit("sandboxes", "x", "demo", &annotated);
    let asleep = [
        ("Hibernated", "True", "Hibernated"),
        ("Ready", "True", "DependenciesReady"),
    ];
    set_conditions(&server, "demo", &asleep);
    let controller = async {
        server
            .until("the patch", |s| !is_hibernate_requested(s, "demo"))
            .await;
        let awake = [
            ("Hibernated", "False", "Awake"),
            ("Ready", "True", "DependenciesReady"),
        ];
        set_conditions(&server, "demo", &awake);
    };
    let cluster = cluster(&server);
    let ask = asked(&["demo"], 60);
    let (results, ()) = tokio::join!(change(&cluster, Goal::Wake, &ask, &|_| {}), controller);
    results[0].as_ref().unwrap();
}

#[tokio::test]
async fn concurrent_wakes_keep_the_users_next_wakeup_even_if_one_is_killed() {
    let server = Apiserver::new();
    asleep_until_its_time(&server);
    let cluster = cluster(&server);
    let ask = asked(&["demo"], 60);
    let quietly = |_: &str| {};
    let wake = || change(&cluster, Goal::Wake, &ask, &quietly);
    // One wake is killed while it waits.
    let killed = async {
        let asked = |s: &Apiserver| annotation(s, WAKE_AT).is_string();
        server.until("the patch", asked).await;
    };
    tokio::select! {
        results = wake() => panic!("no controller has woken it: {results:?}"),
        () = killed => {}
    }
    assert_eq!(annotation(&server, NEXT_WAKEUP), FAR_FUTURE);
    let first = annotation(&server, WAKE_AT);
    let controller = async {
        let anew = |s: &Apiserver| annotation(s, WAKE_AT) != first;
        server.until("the next patch", anew).await;
        assert_eq!(annotation(&server, NEXT_WAKEUP), FAR_FUTURE);
        let awake = [
            ("Hibernated", "False", "Awake"),
            ("Ready", "True", "DependenciesReady"),
        ];
        set_conditions(&server, "demo", &awake);
    };
    let (one, other, ()) = tokio::join!(wake(), wake(), controller);
    for results in [one, other] {
        assert_eq!(results[0].as_ref().unwrap().note, None);
    }
    assert_eq!(annotation(&server, NEXT_WAKEUP), FAR_FUTURE);
}

#[tokio::test]
async fn a_wake_uses_the_clusters_clock_whatever_the_local_clock() {
    for (theirs, right) in [
        ("2999-01-01T00:00:00Z", "2999-01-01T00:00:01Z"),
        ("2020-01-01T00:00:00Z", "2020-01-01T00:00:01Z"),
    ] {
        let server = Apiserver::new();
        create(&server, "demo");
        let written = json!({"metadata": {"managedFields": [{"manager": "m", "time": theirs}]}});
        server.edit("sandboxes", "x", "demo", &written);
        let ask = asked(&["demo"], 0);
        let results = change(&cluster(&server), Goal::Wake, &ask, &|_| {}).await;
        results[0].as_ref().unwrap();
        assert_eq!(annotation(&server, WAKE_AT), right);
    }
}

#[tokio::test]
async fn a_timeout_of_a_wake_names_a_controller_that_is_too_old() {
    for (annotations, is_old) in [(json!({}), true), (json!({WAKE_AT: FAR_FUTURE}), false)] {
        let server = Apiserver::new();
        let uid = create(&server, "demo")["metadata"]["uid"].clone();
        let owner = json!({
            "apiVersion": "agents.x-k8s.io/v1beta1", "kind": "Sandbox", "name": "demo", "uid": uid,
            "controller": true,
        });
        server.create(
            "pods",
            json!({"metadata": {
                "name": "demo", "namespace": "x", "annotations": annotations,
                "ownerReferences": [owner],
            }}),
        );
        set_conditions(&server, "demo", &[("Hibernated", "True", "Hibernated")]);
        let ask = asked(&["demo"], 1);
        let results = change(&cluster(&server), Goal::Wake, &ask, &|_| {}).await;
        let error = results[0].as_ref().unwrap_err();
        assert!(error.is_unknown());
        let text = error.to_string();
        let named = text.contains("the controller does not run, or is older than this plugin");
        assert_eq!(named, is_old, "{text}");
    }
}

#[tokio::test]
async fn a_sandbox_suspended_right_after_its_next_wakeup_stays_suspended() {
    let server = Apiserver::new();
    create(&server, "demo");
    set_time(&server, "2026-01-01T00:00:00Z");
    let ask = asked(&["demo"], 0);
    let results = change(&cluster(&server), Goal::Suspend, &ask, &|_| {}).await;
    results[0].as_ref().unwrap();
    assert_eq!(annotation(&server, NEXT_WAKEUP), Value::Null);
}

#[tokio::test]
async fn a_next_wakeup_set_during_a_suspension_stays() {
    let server = Apiserver::new();
    create(&server, "demo");
    set_time(&server, "2026-01-01T00:00:00Z");
    let gate = Arc::new(Semaphore::new(1));
    let cluster = gated(&server, &gate);
    let user = async {
        // The Sandbox has been read and not yet patched.
        let read = || !server.take_reads().is_empty();
        while !read() {
            tokio::task::yield_now().await;
        }
        set_time(&server, FAR_FUTURE);
        gate.add_permits(10);
    };
    let ask = asked(&["demo"], 0);
    let (results, ()) = tokio::join!(change(&cluster, Goal::Suspend, &ask, &|_| {}), user);
    results[0].as_ref().unwrap();
    assert_eq!(annotation(&server, NEXT_WAKEUP), FAR_FUTURE);
    let sandbox = server.get("sandboxes", "x", "demo").unwrap();
    assert_eq!(sandbox["spec"]["operatingMode"], "Suspended");
}
