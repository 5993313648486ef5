//! Library of the end-to-end tests and the benchmark: a cluster, a namespace for each test,
//! kubectl, and the node itself.
//!
//! The tests run on the machine that is the cluster's node (`hack/cluster up` makes one). They
//! check processes, cgroups, mounts and files on the node instead of through the API.

use std::path::Path;

pub mod accounts;
pub mod agent;
pub mod attached;
pub mod case;
pub mod chaos;
pub mod cluster;
pub mod counted;
pub mod exec;
pub mod explain;
pub mod forward;
pub mod fullness;
pub mod http;
pub mod kubectl;
pub mod machine;
pub mod moves;
pub mod node;
pub mod plugin;
pub mod pods;
pub mod pools;
pub mod registry;
pub mod remains;
pub mod retag;
pub mod sandboxes;
pub mod sdk;
pub mod sleep;
pub mod swap;
pub mod terminal;
pub mod two_nodes;
pub mod wait;
pub mod websocket;
pub mod witness;

/// Returns the root of the repository.
pub fn repository() -> &'static Path {
    let tests = Path::new(env!("CARGO_MANIFEST_DIR"));
    tests.parent().unwrap_or(tests)
}
