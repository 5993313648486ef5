//! `get` and `doctor`: lists of objects.

use serde_json::json;
use torpor_cli::doctor::facts::Facts;
use torpor_cli::doctor::{Severity, diagnose};
use torpor_cli::error::Error;
use torpor_cli::objects::{Objects, Scope};
use torpor_cli::run::listing;
use torpor_cli::view::State;
use torpor_test_apiserver::Apiserver;

use crate::support::{cluster, create, set_conditions};

#[tokio::test]
async fn a_listing_joins_the_objects_of_the_apiserver() {
    let server = Apiserver::new();
    let uid = create(&server, "demo")["metadata"]["uid"].clone();
    create(&server, "other");
    set_conditions(
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
    let missing = listing(&cluster(&server), &["missing".to_owned()], false).await;
    assert!(matches!(missing, Err(Error::NoSandbox { .. })));
}

#[tokio::test]
async fn an_unreadable_object_hides_no_other() {
    let server = Apiserver::new();
    create(&server, "demo");
    create(&server, "odd");
    let time = json!({"spec": {"shutdownTime": "soon"}});
    server.edit("sandboxes", "x", "odd", &time);
    let cluster = cluster(&server);
    let objects = Box::pin(Objects::list(&cluster, Scope::Everywhere))
        .await
        .unwrap();
    let names: Vec<_> = objects.sandboxes.iter().map(|s| &s.metadata.name).collect();
    assert_eq!(names, [&Some("demo".to_owned())]);
    assert_eq!(objects.unseen.len(), 1);
    let words = &objects.unseen[0];
    assert!(
        words.starts_with("cannot parse x/odd of the Sandboxes"),
        "{words}"
    );
    let now = "2026-11-21T12:00:00Z".parse().unwrap();
    let facts = Box::pin(Facts::gather(&cluster, "agent-sandbox-system", now)).await;
    assert_eq!(
        (facts.unread, facts.sandboxes.unwrap().len()),
        (objects.unseen, 1)
    );
}

#[tokio::test]
async fn doctor_checks_the_whole_cluster() {
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
