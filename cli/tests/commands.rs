//! The commands against an apiserver in memory, with a controller that the test plays.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures::future::join_all;
use serde_json::{Value, json};
use tokio::sync::Semaphore;
use torpor_cli::args::{Change, Drain};
use torpor_cli::change::{self, Changed};
use torpor_cli::connect::Cluster;
use torpor_cli::doctor::facts::Facts;
use torpor_cli::doctor::{Severity, diagnose};
use torpor_cli::drain::{Kept, NotKept, Part, keep, look};
use torpor_cli::error::{Error, words};
use torpor_cli::goal::Goal;
use torpor_cli::run::{Ended, drained, listing};
use torpor_cli::view::State;
use torpor_cli::world::{Scope, World};
use torpor_test_apiserver::{Apiserver, Fault, FaultAnswer};

fn cluster(server: &Apiserver) -> Cluster {
    Cluster {
        client: server.client(),
        namespace: "x".to_owned(),
    }
}

fn create(server: &Apiserver, name: &str) -> Value {
    server.create(
        "sandboxes",
        json!({
            "metadata": {"name": name, "namespace": "x"},
            "spec": {"operatingMode": "Running", "podTemplate": {"spec": {"containers": []}}},
        }),
    )
}

/// What a controller would write.
fn says(server: &Apiserver, name: &str, conditions: &[(&str, &str, &str)]) {
    let sandbox = server.get("sandboxes", "x", name).unwrap();
    let generation = sandbox["metadata"]["generation"].clone();
    let conditions: Vec<Value> = conditions
        .iter()
        .map(|(type_, status, reason)| {
            json!({
                "type": type_, "status": status, "reason": reason, "message": format!("{reason} in words"),
                "lastTransitionTime": "2026-11-21T12:00:00Z", "observedGeneration": generation,
            })
        })
        .collect();
    let patch = json!({"status": {"conditions": conditions}});
    server.edit("sandboxes", "x", name, &patch);
}

fn asked(names: &[&str], seconds: u64) -> Change {
    Change {
        names: names.iter().map(|name| (*name).to_owned()).collect(),
        timeout: Duration::from_secs(seconds),
    }
}

/// Of each Sandbox what it came to, in the order of their names in the command.
async fn change(
    cluster: &Cluster,
    goal: Goal,
    asked: &Change,
    say: &(dyn Fn(&str) + Sync),
) -> Vec<Result<Changed, Error>> {
    let names = asked.names.iter();
    join_all(names.map(|name| change::change(cluster, goal, name, asked.timeout, say))).await
}

fn hibernates(server: &Apiserver, name: &str) -> bool {
    let sandbox = server.get("sandboxes", "x", name).unwrap();
    sandbox["metadata"]["annotations"]["torpor.dev/hibernate"] == "true"
}

#[tokio::test]
async fn hibernating_annotates_and_tells_what_the_conditions_say_until_it_sleeps() {
    let server = Apiserver::new();
    create(&server, "demo");
    let said = Mutex::new(Vec::new());
    let say = |text: &str| said.lock().unwrap().push(text.to_owned());
    let controller = async {
        server.until("asked", |s| hibernates(s, "demo")).await;
        says(&server, "demo", &[("Hibernated", "False", "Saving")]);
        // The client has to hear this before the next is written.
        while !said
            .lock()
            .unwrap()
            .iter()
            .any(|line| line.contains("Saving"))
        {
            tokio::task::yield_now().await;
        }
        says(&server, "demo", &[("Hibernated", "True", "Hibernated")]);
    };
    let cluster = cluster(&server);
    let ask = asked(&["demo"], 60);
    let (results, ()) = tokio::join!(change(&cluster, Goal::Hibernate, &ask, &say), controller);
    let done = results[0].as_ref().unwrap();
    assert!(done.took.is_some());
    let said = said.into_inner().unwrap();
    assert_eq!(said.last().unwrap(), "demo: Saving: Saving in words");
}

#[tokio::test]
async fn several_are_asked_at_once_and_each_has_its_own_end() {
    let server = Apiserver::new();
    create(&server, "good");
    create(&server, "bad");
    let controller = async {
        server
            .until("both asked", |s| {
                hibernates(s, "good") && hibernates(s, "bad")
            })
            .await;
        says(&server, "good", &[("Hibernated", "True", "Hibernated")]);
        says(
            &server,
            "bad",
            &[("Hibernated", "False", "RuntimeNotCapable")],
        );
    };
    let cluster = cluster(&server);
    let ask = asked(&["good", "missing", "bad"], 60);
    let (results, ()) = tokio::join!(change(&cluster, Goal::Hibernate, &ask, &|_| {}), controller);
    assert_eq!(results[0].as_ref().unwrap().name, "good");
    assert!(matches!(&results[1], Err(Error::NoSandbox { name, .. }) if name == "missing"));
    let refused = results[2].as_ref().unwrap_err();
    assert!(!refused.is_unknown());
    let text = refused.to_string();
    assert!(
        text.contains("RuntimeNotCapable in words") && text.contains("Remedy"),
        "{text}"
    );
}

#[tokio::test]
async fn when_time_is_over_nothing_is_claimed_to_have_failed() {
    let server = Apiserver::new();
    create(&server, "demo");
    says(&server, "demo", &[("Hibernated", "False", "SaveFailed")]);
    let results = change(
        &cluster(&server),
        Goal::Hibernate,
        &asked(&["demo"], 1),
        &|_| {},
    )
    .await;
    let error = results[0].as_ref().unwrap_err();
    assert!(error.is_unknown());
    let text = error.to_string();
    assert!(text.contains("not yet hibernated after 1s"), "{text}");
}

#[tokio::test]
async fn without_a_timeout_nobody_waits() {
    let server = Apiserver::new();
    create(&server, "demo");
    let results = change(
        &cluster(&server),
        Goal::Suspend,
        &asked(&["demo"], 0),
        &|_| {},
    )
    .await;
    let expected = Changed {
        name: "demo".to_owned(),
        took: None,
        note: None,
    };
    assert_eq!(results[0].as_ref().unwrap(), &expected);
    let sandbox = server.get("sandboxes", "x", "demo").unwrap();
    assert_eq!(sandbox["spec"]["operatingMode"], "Suspended");
}

#[tokio::test]
async fn a_suspension_that_kept_no_memory_says_so() {
    let server = Apiserver::new();
    create(&server, "demo");
    let controller = async {
        let suspended = |s: &Apiserver| {
            s.get("sandboxes", "x", "demo").unwrap()["spec"]["operatingMode"] == "Suspended"
        };
        server.until("asked", suspended).await;
        let conditions = [
            ("Suspended", "True", "PodTerminated"),
            ("Hibernated", "False", "RuntimeNotCapable"),
        ];
        says(&server, "demo", &conditions);
    };
    let cluster = cluster(&server);
    let ask = asked(&["demo"], 60);
    let (results, ()) = tokio::join!(change(&cluster, Goal::Suspend, &ask, &|_| {}), controller);
    let note = results[0].as_ref().unwrap().note.as_deref().unwrap();
    assert!(
        note.starts_with("memory was not kept (RuntimeNotCapable"),
        "{note}"
    );
}

#[tokio::test]
async fn a_sandbox_that_is_deleted_meanwhile_is_a_failure_and_not_a_long_wait() {
    let server = Apiserver::new();
    create(&server, "demo");
    let user = async {
        server.until("asked", |s| hibernates(s, "demo")).await;
        server.delete("sandboxes", "x", "demo");
    };
    let cluster = cluster(&server);
    let ask = asked(&["demo"], 3600);
    let (results, ()) = tokio::join!(change(&cluster, Goal::Hibernate, &ask, &|_| {}), user);
    let error = results[0].as_ref().unwrap_err();
    assert!(error.to_string().contains("deleted"), "{error}");
}

#[tokio::test]
async fn waking_takes_the_annotation_away() {
    let server = Apiserver::new();
    create(&server, "demo");
    let annotated = json!({"metadata": {"annotations": {"torpor.dev/hibernate": "true"}}});
    server.edit("sandboxes", "x", "demo", &annotated);
    let asleep = [
        ("Hibernated", "True", "Hibernated"),
        ("Ready", "True", "DependenciesReady"),
    ];
    says(&server, "demo", &asleep);
    let controller = async {
        server.until("asked", |s| !hibernates(s, "demo")).await;
        let awake = [
            ("Hibernated", "False", "Awake"),
            ("Ready", "True", "DependenciesReady"),
        ];
        says(&server, "demo", &awake);
    };
    let cluster = cluster(&server);
    let ask = asked(&["demo"], 60);
    let (results, ()) = tokio::join!(change(&cluster, Goal::Wake, &ask, &|_| {}), controller);
    results[0].as_ref().unwrap();
}

const NEXT_WAKEUP: &str = "agents.x-k8s.io/next-wakeup";
const WAKE_AT: &str = "torpor.dev/wake-at";
const THEIRS: &str = "2999-01-01T00:00:00Z";

fn set_time(server: &Apiserver, time: &str) {
    let annotated = json!({"metadata": {"annotations": {NEXT_WAKEUP: time}}});
    server.edit("sandboxes", "x", "demo", &annotated);
}

fn annotation(server: &Apiserver, key: &str) -> Value {
    let sandbox = server.get("sandboxes", "x", "demo").unwrap();
    sandbox["metadata"]["annotations"][key].clone()
}

/// One that fell asleep by itself, and is to be awake in a thousand years.
fn asleep_until_its_time(server: &Apiserver) {
    create(server, "demo");
    set_time(server, THEIRS);
    let asleep = [
        ("Hibernated", "True", "Hibernated"),
        ("Ready", "True", "DependenciesReady"),
    ];
    says(server, "demo", &asleep);
}

#[tokio::test]
async fn however_many_wake_it_at_once_and_whoever_of_them_is_killed_the_time_of_its_user_stands() {
    let server = Apiserver::new();
    asleep_until_its_time(&server);
    let cluster = cluster(&server);
    let ask = asked(&["demo"], 60);
    let unheard = |_: &str| {};
    let wake = || change(&cluster, Goal::Wake, &ask, &unheard);
    // One is killed while it waits.
    let killed = async {
        let asked = |s: &Apiserver| annotation(s, WAKE_AT).is_string();
        server.until("asked", asked).await;
    };
    tokio::select! {
        results = wake() => panic!("nobody has woken it: {results:?}"),
        () = killed => {}
    }
    assert_eq!(annotation(&server, NEXT_WAKEUP), THEIRS);
    let first = annotation(&server, WAKE_AT);
    let controller = async {
        let anew = |s: &Apiserver| annotation(s, WAKE_AT) != first;
        server.until("asked anew", anew).await;
        assert_eq!(annotation(&server, NEXT_WAKEUP), THEIRS);
        let awake = [
            ("Hibernated", "False", "Awake"),
            ("Ready", "True", "DependenciesReady"),
        ];
        says(&server, "demo", &awake);
    };
    let (one, other, ()) = tokio::join!(wake(), wake(), controller);
    for results in [one, other] {
        assert_eq!(results[0].as_ref().unwrap().note, None);
    }
    assert_eq!(annotation(&server, NEXT_WAKEUP), THEIRS);
}

#[tokio::test]
async fn the_time_to_wake_is_the_clusters_whatever_this_machines_clock_says() {
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
async fn whoever_wakes_by_an_old_controller_is_told_so_when_time_is_over() {
    for (annotations, is_old) in [(json!({}), true), (json!({WAKE_AT: THEIRS}), false)] {
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
        says(&server, "demo", &[("Hibernated", "True", "Hibernated")]);
        let ask = asked(&["demo"], 1);
        let results = change(&cluster(&server), Goal::Wake, &ask, &|_| {}).await;
        let error = results[0].as_ref().unwrap_err();
        assert!(error.is_unknown());
        let text = error.to_string();
        let told = text.contains("the controller does not run, or is older than this plugin");
        assert_eq!(told, is_old, "{text}");
    }
}

#[tokio::test]
async fn who_is_suspended_right_after_a_wake_stays_so() {
    let server = Apiserver::new();
    create(&server, "demo");
    set_time(&server, "2026-01-01T00:00:00Z");
    let ask = asked(&["demo"], 0);
    let results = change(&cluster(&server), Goal::Suspend, &ask, &|_| {}).await;
    results[0].as_ref().unwrap();
    assert_eq!(annotation(&server, NEXT_WAKEUP), Value::Null);
}

/// A client whose next call waits for a word, and then the server.
fn gated(server: &Apiserver, gate: &Arc<Semaphore>) -> Cluster {
    Cluster {
        client: server.gated_client(gate),
        namespace: "x".to_owned(),
    }
}

#[tokio::test]
async fn a_time_that_is_set_while_a_suspension_takes_an_old_one_off_stands() {
    let server = Apiserver::new();
    create(&server, "demo");
    set_time(&server, "2026-01-01T00:00:00Z");
    let gate = Arc::new(Semaphore::new(1));
    let cluster = gated(&server, &gate);
    let user = async {
        // It has been read, and is to be patched.
        let read = || !server.take_reads().is_empty();
        while !read() {
            tokio::task::yield_now().await;
        }
        set_time(&server, THEIRS);
        gate.add_permits(10);
    };
    let ask = asked(&["demo"], 0);
    let (results, ()) = tokio::join!(change(&cluster, Goal::Suspend, &ask, &|_| {}), user);
    results[0].as_ref().unwrap();
    assert_eq!(annotation(&server, NEXT_WAKEUP), THEIRS);
    let sandbox = server.get("sandboxes", "x", "demo").unwrap();
    assert_eq!(sandbox["spec"]["operatingMode"], "Suspended");
}

#[tokio::test]
async fn one_that_goes_before_it_is_asked_is_not_taken_for_a_cluster_without_torpor() {
    for anew in [false, true] {
        let server = Apiserver::new();
        create(&server, "demo");
        let gate = Arc::new(Semaphore::new(1));
        let cluster = gated(&server, &gate);
        let user = async {
            while server.take_reads().is_empty() {
                tokio::task::yield_now().await;
            }
            server.remove("sandboxes", "x", "demo");
            if anew {
                create(&server, "demo");
            }
            gate.add_permits(10);
        };
        let ask = asked(&["demo"], 60);
        let (results, ()) = tokio::join!(change(&cluster, Goal::Hibernate, &ask, &|_| {}), user);
        let error = results[0].as_ref().unwrap_err();
        assert!(error.to_string().contains("it was deleted"), "{error}");
        assert_eq!(error.remedy(), None);
        if anew {
            assert!(!hibernates(&server, "demo"));
        }
    }
}

#[tokio::test]
async fn a_conflict_that_nobody_has_made_is_told_and_not_tried_for_ever() {
    let server = Apiserver::new();
    create(&server, "demo");
    server.fail(Fault {
        verb: "patch",
        kind: "sandboxes",
        answer: FaultAnswer::Refuse(409),
    });
    let ask = asked(&["demo"], 60);
    let results = change(&cluster(&server), Goal::Hibernate, &ask, &|_| {}).await;
    assert!(results[0].as_ref().unwrap_err().is_conflict());
}

#[tokio::test]
async fn who_may_not_is_told_what_and_where_to_ask() {
    let server = Apiserver::new();
    create(&server, "demo");
    server.fail(Fault {
        verb: "patch",
        kind: "sandboxes",
        answer: FaultAnswer::Refuse(403),
    });
    let results = change(
        &cluster(&server),
        Goal::Suspend,
        &asked(&["demo"], 60),
        &|_| {},
    )
    .await;
    let error = results[0].as_ref().unwrap_err();
    let text = words(error);
    assert!(text.starts_with("cannot patch Sandbox demo: "), "{text}");
    assert!(error.remedy().unwrap().starts_with("you may not"));
    assert!(!error.is_unknown());
}

#[tokio::test]
async fn a_listing_joins_what_the_apiserver_has() {
    let server = Apiserver::new();
    let uid = create(&server, "demo")["metadata"]["uid"].clone();
    create(&server, "other");
    says(
        &server,
        "demo",
        &[
            ("Hibernated", "True", "Hibernated"),
            ("Ready", "True", "DependenciesReady"),
        ],
    );
    let pod = server.create(
        "pods",
        json!({
            "metadata": {"name": "demo", "namespace": "x", "ownerReferences": [{
                "apiVersion": "agents.x-k8s.io/v1beta1", "kind": "Sandbox", "name": "demo", "uid": uid, "controller": true,
            }]},
            "spec": {"nodeName": "node-0", "containers": []},
        }),
    );
    server.create(
        "sandboxnodes",
        json!({
            "metadata": {"name": "node-0"}, "spec": {},
            "status": {"sandboxes": [{"podUID": pod["metadata"]["uid"], "imageBytes": 117}]},
        }),
    );
    let found = listing(&cluster(&server), &[], false).await.unwrap();
    assert_eq!(found.items.len(), 2);
    let demo = &found.items[0];
    assert_eq!(
        (demo.state, demo.image_bytes),
        (State::Hibernated, Some(117))
    );
    assert_eq!(demo.node.as_deref(), Some("node-0"));
    let only = listing(&cluster(&server), &["other".to_owned()], false).await;
    assert_eq!(only.unwrap().items[0].name, "other");
    let missing = listing(&cluster(&server), &["nobody".to_owned()], false).await;
    assert!(matches!(missing, Err(Error::NoSandbox { .. })));
}

#[tokio::test]
async fn an_object_that_cannot_be_read_hides_no_other() {
    let server = Apiserver::new();
    create(&server, "demo");
    create(&server, "odd");
    let time = json!({"spec": {"shutdownTime": "soon"}});
    server.edit("sandboxes", "x", "odd", &time);
    let cluster = cluster(&server);
    let world = Box::pin(World::look(&cluster, Scope::Everywhere))
        .await
        .unwrap();
    let names: Vec<_> = world.sandboxes.iter().map(|s| &s.metadata.name).collect();
    assert_eq!(names, [&Some("demo".to_owned())]);
    assert_eq!(world.unseen.len(), 1);
    let words = &world.unseen[0];
    assert!(
        words.starts_with("of the Sandboxes, x/odd cannot be read"),
        "{words}"
    );
    let now = "2026-11-21T12:00:00Z".parse().unwrap();
    let facts = Box::pin(Facts::gather(&cluster, "agent-sandbox-system", now)).await;
    assert_eq!(
        (facts.unread, facts.sandboxes.unwrap().len()),
        (world.unseen, 1)
    );
}

#[tokio::test]
async fn doctor_looks_at_the_whole_cluster() {
    let server = Apiserver::new();
    server.create("nodes", json!({"metadata": {"name": "node-0"}}));
    let now = "2026-11-21T12:00:00Z".parse().unwrap();
    let cluster = cluster(&server);
    let facts = Box::pin(Facts::gather(&cluster, "agent-sandbox-system", now)).await;
    let diagnosis = diagnose(&facts);
    let of = |name: &str| {
        let check = diagnosis.checks.iter().find(|check| check.name == name);
        check.unwrap().findings.clone()
    };
    assert_eq!(
        of("definitions").len(),
        torpor_api::crds::definitions().len()
    );
    assert!(of("controller")[0].text.contains("is missing"));
    assert_eq!(of("nodes")[0].severity, Severity::Warning);
    assert_eq!(of("sandboxes"), []);
}

/// A Sandbox with its Pod on node-0, by a RuntimeClass of which that node keeps the memory.
fn on_node(server: &Apiserver, name: &str, annotations: &Value) {
    let sandbox = create(server, name);
    let patch = json!({"metadata": {"annotations": annotations}});
    server.edit("sandboxes", "x", name, &patch);
    let owner = json!({
        "apiVersion": "agents.x-k8s.io/v1beta1", "kind": "Sandbox", "name": name,
        "uid": sandbox["metadata"]["uid"], "controller": true,
    });
    server.create(
        "pods",
        json!({
            "metadata": {"name": name, "namespace": "x", "ownerReferences": [owner]},
            "spec": {"nodeName": "node-0", "runtimeClassName": "torpor", "containers": []},
        }),
    );
    let runs = json!({"status": {"phase": "Running"}});
    server.edit("pods", "x", name, &runs);
}

fn mode(server: &Apiserver, name: &str) -> Value {
    server.get("sandboxes", "x", name).unwrap()["spec"]["operatingMode"].clone()
}

fn node_with_torpor(server: &Apiserver) {
    server.create("nodes", json!({"metadata": {"name": "node-0"}}));
    server.create(
        "runtimeclasses",
        json!({"metadata": {"name": "torpor"}, "handler": "torpor"}),
    );
    server.create(
        "sandboxnodes",
        json!({"metadata": {"name": "node-0"}, "spec": {}, "status": {"runtimes": [
            {"handler": "torpor", "kind": "gVisor", "capabilities": {"hibernate": true}},
        ]}}),
    );
}

fn drain(node: &str, dry_run: bool) -> Drain {
    Drain {
        node: node.to_owned(),
        dry_run,
        timeout: Duration::from_secs(60),
    }
}

const ASLEEP: [(&str, &str, &str); 2] = [
    ("Suspended", "True", "PodTerminated"),
    ("Hibernated", "True", "Hibernated"),
];

/// Of what becomes of `name` when node-0 is drained, where this comes of its suspension.
async fn drained_of(
    server: &Apiserver,
    name: &str,
    answer: impl AsyncFnOnce(&Apiserver),
) -> Result<Kept, NotKept> {
    let cluster = cluster(server);
    let (parts, unseen) = Box::pin(look(&cluster, "node-0")).await.unwrap();
    assert_eq!(unseen, Vec::<String>::new());
    let mut became = Vec::new();
    let controller = async {
        let asked = |s: &Apiserver| mode(s, name) == "Suspended";
        server.until("it is asked to suspend", asked).await;
        answer(server).await;
    };
    let limit = Duration::from_secs(60);
    let told = |part: &Part, result| became.push((part.name.clone(), result));
    let kept = keep(&cluster, &parts, limit, &|_| {}, told);
    tokio::join!(kept, controller);
    let (of, result) = became.pop().unwrap();
    assert_eq!((of.as_str(), became.len()), (name, 0));
    result
}

#[tokio::test]
async fn who_drains_a_node_leaves_no_sandbox_suspended_and_none_whose_memory_is_lost() {
    let server = Apiserver::new();
    node_with_torpor(&server);
    on_node(&server, "kept", &json!({}));
    let stops = json!({"torpor.dev/suspension-strategy": "Stop"});
    on_node(&server, "stops", &stops);
    let cluster = cluster(&server);
    let controller = async {
        let suspended = |s: &Apiserver| mode(s, "kept") == "Suspended";
        server.until("it is suspended", suspended).await;
        let cordoned = server.get("nodes", "", "node-0").unwrap();
        assert_eq!(
            cordoned["spec"]["unschedulable"], true,
            "not cordoned before"
        );
        says(&server, "kept", &ASLEEP);
    };
    let asked = drain("node-0", false);
    let (ended, ()) = tokio::join!(drained(&cluster, &asked), controller);
    // One is left as it is.
    assert_eq!(ended.unwrap(), Ended::Failed);
    assert_eq!(mode(&server, "kept"), "Running");
    assert_eq!(mode(&server, "stops"), "Running");
}

#[tokio::test]
async fn a_drain_says_of_memory_that_was_lost_after_all_and_of_a_sandbox_that_has_gone() {
    let server = Apiserver::new();
    node_with_torpor(&server);
    on_node(&server, "s", &json!({}));
    let lost = [
        ("Suspended", "True", "PodTerminated"),
        ("Hibernated", "False", "SaveFailed"),
    ];
    let became = drained_of(&server, "s", async |s| says(s, "s", &lost)).await;
    assert!(matches!(became, Ok(Kept::No(why)) if why.contains("SaveFailed")));
    assert_eq!(mode(&server, "s"), "Running");
    let goes = async |s: &Apiserver| {
        s.delete("sandboxes", "x", "s");
    };
    let became = drained_of(&server, "s", goes).await;
    assert!(matches!(became, Ok(Kept::Gone)), "{became:?}");
}

#[tokio::test]
async fn one_that_somebody_resumes_while_its_node_is_drained_is_asked_again() {
    let server = Apiserver::new();
    node_with_torpor(&server);
    on_node(&server, "s", &json!({}));
    let resumed_once = async |s: &Apiserver| {
        s.edit(
            "sandboxes",
            "x",
            "s",
            &json!({"spec": {"operatingMode": "Running"}}),
        );
        let again = |s: &Apiserver| mode(s, "s") == "Suspended";
        s.until("it is asked again", again).await;
        says(s, "s", &ASLEEP);
    };
    let became = drained_of(&server, "s", resumed_once).await;
    assert!(matches!(became, Ok(Kept::Yes(_))), "{became:?}");
    assert_eq!(mode(&server, "s"), "Running");
}

#[tokio::test]
async fn a_suspension_that_does_not_end_in_time_is_called_off() {
    let server = Apiserver::new();
    node_with_torpor(&server);
    on_node(&server, "s", &json!({}));
    let cluster = cluster(&server);
    let (parts, _) = Box::pin(look(&cluster, "node-0")).await.unwrap();
    let mut became = Vec::new();
    let limit = Duration::from_millis(50);
    keep(&cluster, &parts, limit, &|_| {}, |_, result| {
        became.push(result)
    })
    .await;
    assert!(
        matches!(&became[..], [Err(NotKept::Runs(Error::Timeout { .. }))]),
        "{became:?}"
    );
    assert_eq!(mode(&server, "s"), "Running");
}

#[tokio::test]
async fn who_is_suspended_by_somebody_else_while_its_node_is_drained_is_not_resumed() {
    let server = Apiserver::new();
    node_with_torpor(&server);
    on_node(&server, "s", &json!({}));
    let by_others = json!({"spec": {"operatingMode": "Suspended"}});
    server.edit("sandboxes", "x", "s", &by_others);
    let became = drained_of(&server, "s", async |s| says(s, "s", &ASLEEP)).await;
    assert!(matches!(became, Ok(Kept::Yes(_))), "{became:?}");
    assert_eq!(mode(&server, "s"), "Suspended");
}

#[tokio::test]
async fn a_drain_that_is_only_tried_changes_nothing_and_a_node_that_is_not_there_is_named() {
    let server = Apiserver::new();
    node_with_torpor(&server);
    on_node(&server, "demo", &json!({}));
    let cluster = cluster(&server);
    let ended = drained(&cluster, &drain("node-0", true)).await;
    assert_eq!(ended.unwrap(), Ended::Done);
    assert_eq!(mode(&server, "demo"), "Running");
    let node = server.get("nodes", "", "node-0").unwrap();
    assert_eq!(node["spec"].get("unschedulable"), None);
    for dry_run in [true, false] {
        let asked = drain("node-1", dry_run);
        let error = drained(&cluster, &asked).await.unwrap_err();
        assert_eq!(error.to_string(), "there is no node node-1");
        assert!(error.remedy().unwrap().contains("kubectl get nodes"));
    }
}
