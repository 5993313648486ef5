//! A controller that is confined to namespaces: at work with rights there and nowhere else.

use serde_json::{Value, json};
use torpor_controller::settings::Settings;

use crate::{
    apiserver::Apiserver,
    cluster::is_going,
    objects::{NS, mode, sandbox, torpor_sandbox},
    wiring::Running,
    world::World,
};

const OTHER: &str = "other";
const FOREIGN: &str = "foreign";

/// A world whose controller works in two namespaces, and is forbidden all else.
fn confined() -> World {
    let settings = Settings {
        namespaces: format!("{NS},{OTHER}").parse().unwrap(),
        extensions: true,
        sandbox_workers: 4,
        ..Settings::default()
    };
    let world = World::with_settings(settings);
    world.api.confine(&[NS, OTHER]);
    world
}

fn in_namespace(namespace: &str) -> Value {
    sandbox(json!({"metadata": {"namespace": namespace}}))
}

#[tokio::test]
async fn a_controller_of_two_namespaces_asks_for_nothing_beyond_them_but_kinds_of_the_cluster() {
    let world = confined();
    for namespace in [OTHER, FOREIGN] {
        world.api.create("sandboxes", in_namespace(namespace));
    }
    let running = Running::start(world);
    // The first of the one namespace was there before, that of the other comes later.
    running.comes_up(sandbox(json!({}))).await;
    let api = running.world.api.clone();
    let made = |api: &Apiserver| api.get("pods", OTHER, "s").is_some();
    api.until("the other namespace has its Pod", made).await;
    let world = running.end().await;
    assert!(world.api.get("pods", FOREIGN, "s").is_none());
    let foreign = world.api.get("sandboxes", FOREIGN, "s").unwrap();
    assert_eq!(foreign.get("status"), None);
    let forbidden: Vec<String> = world.api.forbidden().into_iter().collect();
    assert_eq!(
        forbidden,
        ["runtimeclasses", "sandboxnodes", "snapshotclasses"]
    );
}

#[tokio::test]
async fn without_rights_of_the_cluster_a_sandbox_is_stopped_as_upstream_does_and_says_so() {
    let running = Running::start(confined());
    running.comes_up(torpor_sandbox(json!({}))).await;
    running.world.edit_sandbox(&mode("Suspended"));
    let going = |api: &Apiserver| api.get("pods", NS, "s").is_some_and(|pod| is_going(&pod));
    running
        .world
        .api
        .until("the Pod is being deleted", going)
        .await;
    running.says("Hibernated", "RuntimeNotCapable").await;
    running.world.pod_ends();
    running.says("Suspended", "PodTerminated").await;
    let world = running.end().await;
    assert!(world.snapshots().is_empty());
}
