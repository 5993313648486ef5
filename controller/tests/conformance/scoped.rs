//! Tests of a controller with rights in some namespaces only.

use std::{sync::Arc, time::Duration};

use serde_json::{Value, json};
use torpor_controller::{calls, context::Context, settings::Settings};

use crate::{
    apiserver::Apiserver,
    cluster::is_terminating,
    objects::{NS, mode, sandbox, torpor_sandbox},
    proxy::Proxy,
    wiring::Running,
    world::World,
};

const OTHER: &str = "other";
const FOREIGN: &str = "foreign";

fn settings() -> Settings {
    Settings {
        namespaces: format!("{NS},{OTHER}").parse().unwrap(),
        extensions: true,
        sandbox_workers: 4,
        ..Settings::default()
    }
}

/// Returns a world whose controller has rights in two namespaces only.
fn confined() -> World {
    let world = World::with_settings(settings());
    world.api.confine(&[NS, OTHER]);
    world
}

/// Returns the world behind a proxy that can forbid a part of the apiserver.
fn behind(world: World, part: &'static str) -> (World, Proxy) {
    let proxy = Proxy::new(&world.api, part);
    let calls = calls::Apiserver::new(proxy.client(), Duration::from_secs(20));
    let context = Context::new(calls, "cluster.local".to_owned(), settings());
    let context = Arc::new(context);
    (World { context, ..world }, proxy)
}

fn in_namespace(namespace: &str) -> Value {
    sandbox(json!({"metadata": {"namespace": namespace}}))
}

#[tokio::test]
async fn a_controller_of_two_namespaces_reads_nothing_beyond_them_except_cluster_scoped_kinds() {
    let world = confined();
    for namespace in [OTHER, FOREIGN] {
        world.api.create("sandboxes", in_namespace(namespace));
    }
    let running = Running::start(world);
    // The Sandbox of the other namespace existed before the start, this one is created later.
    running.bring_up(sandbox(json!({}))).await;
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
async fn without_cluster_scoped_rights_a_sandbox_is_stopped_as_upstream_does_and_this_is_reported()
{
    let running = Running::start(confined());
    running.bring_up(torpor_sandbox(json!({}))).await;
    running.world.edit_sandbox(&mode("Suspended"));
    let going = |api: &Apiserver| {
        api.get("pods", NS, "s")
            .is_some_and(|pod| is_terminating(&pod))
    };
    running
        .world
        .api
        .until("the Pod is being deleted", going)
        .await;
    running
        .wait_for_condition("Hibernated", "RuntimeNotCapable")
        .await;
    running.world.pod_ends();
    running
        .wait_for_condition("Suspended", "PodTerminated")
        .await;
    let world = running.end().await;
    assert!(world.snapshots().is_empty());
}

#[tokio::test]
async fn a_revoked_cluster_scoped_right_costs_no_sandbox_its_memory() {
    let (world, proxy) = behind(confined(), "/sandboxnodes");
    world.api.confine(&[NS, OTHER, ""]);
    let running = Running::start(world);
    running.bring_up(torpor_sandbox(json!({}))).await;
    proxy.forbid();
    proxy.has_refused(2).await;
    let world = &running.world;
    world.edit_sandbox(&mode("Suspended"));
    let asked = |_: &Apiserver| world.image_of_suspension().is_some();
    world.api.until("an image is asked for", asked).await;
    assert!(!world.pod_is_terminating(), "before there is an image");
    running.end().await;
}

#[tokio::test]
async fn a_namespace_without_its_role_delays_no_other_and_is_served_once_it_has_it() {
    let (world, proxy) = behind(confined(), "/namespaces/other/services");
    proxy.forbid();
    world.api.create("sandboxes", in_namespace(OTHER));
    let running = Running::start(world);
    running.bring_up(sandbox(json!({}))).await;
    let api = running.world.api.clone();
    let made = |api: &Apiserver| api.get("pods", OTHER, "s").is_some();
    assert!(!made(&api), "a Service may have its name");
    let listed = |expected: [u8; 2]| {
        let text = running.world.context.metrics_text().unwrap();
        for (namespace, value) in [NS, OTHER].into_iter().zip(expected) {
            let line = format!(
                "torpor_controller_namespace_listed{{namespace=\"{namespace}\"}} {value}\n"
            );
            assert!(text.contains(&line), "{text}");
        }
    };
    listed([1, 0]);
    proxy.allow();
    api.until("it has its Pod", made).await;
    listed([1, 1]);
    running.end().await;
}
