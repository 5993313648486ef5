//! Apiserver in memory, with objects and arguments for the commands.

use std::sync::Arc;
use std::time::Duration;

use futures::future::join_all;
use serde_json::{Value, json};
use tokio::sync::Semaphore;
use torpor_cli::args::Change;
use torpor_cli::change::{self, Changed};
use torpor_cli::connect::Cluster;
use torpor_cli::error::Error;
use torpor_cli::goal::Goal;
use torpor_test_apiserver::Apiserver;

pub(crate) fn cluster(server: &Apiserver) -> Cluster {
    Cluster {
        client: server.client(),
        namespace: "x".to_owned(),
    }
}

/// Returns a client whose calls wait for permits of the gate.
pub(crate) fn gated(server: &Apiserver, gate: &Arc<Semaphore>) -> Cluster {
    Cluster {
        client: server.gated_client(gate),
        namespace: "x".to_owned(),
    }
}

pub(crate) fn create(server: &Apiserver, name: &str) -> Value {
    server.create(
        "sandboxes",
        json!({
            "metadata": {"name": name, "namespace": "x"},
            "spec": {"operatingMode": "Running", "podTemplate": {"spec": {"containers": []}}},
        }),
    )
}

/// Writes the conditions as the controller would.
pub(crate) fn set_conditions(server: &Apiserver, name: &str, conditions: &[(&str, &str, &str)]) {
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

/// Returns the arguments of a command for these Sandboxes.
pub(crate) fn asked(names: &[&str], seconds: u64) -> Change {
    Change {
        names: names.iter().map(|name| (*name).to_owned()).collect(),
        timeout: Duration::from_secs(seconds),
    }
}

/// Changes the Sandboxes, and returns their results in the order of the arguments.
pub(crate) async fn change(
    cluster: &Cluster,
    goal: Goal,
    asked: &Change,
    say: &(dyn Fn(&str) + Sync),
) -> Vec<Result<Changed, Error>> {
    let names = asked.names.iter();
    join_all(names.map(|name| change::change(cluster, goal, name, asked.timeout, say))).await
}

pub(crate) fn is_hibernate_requested(server: &Apiserver, name: &str) -> bool {
    let sandbox = server.get("sandboxes", "x", name).unwrap();
    sandbox["metadata"]["annotations"]["torpor.dev/hibernate"] == "true"
}

pub(crate) fn annotation(server: &Apiserver, key: &str) -> Value {
    let sandbox = server.get("sandboxes", "x", "demo").unwrap();
    sandbox["metadata"]["annotations"][key].clone()
}

pub(crate) fn mode(server: &Apiserver, name: &str) -> Value {
    server.get("sandboxes", "x", name).unwrap()["spec"]["operatingMode"].clone()
}
