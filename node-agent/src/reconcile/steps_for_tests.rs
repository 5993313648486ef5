//! A node and steps for tests.

use std::path::Path;
use std::sync::Arc;

use jiff::Timestamp;
use torpor_core::ids::PodUid;
use torpor_core::steps::{Action, Fence, Step};
use torpor_core::store_limit::PerNamespace;
use torpor_messages::service::Steps;
use torpor_records::WakeCause;
use torpor_records::config::Config;

use crate::args::SwapArgs;
use crate::policy::swap::SwapRoom;
use crate::reconcile::node::{Node, StoreLimits};
use crate::reconcile::shim::nothing;

/// Returns a step that was planned for the ledger at this number.
pub(crate) fn step(ledger_seq: u64, action: Action) -> Step {
    Step {
        fence: Fence {
            pod_uid: PodUid::new("pod-a").expect("a uid"),
            sandbox_id: None,
            ledger_seq,
        },
        before: None,
        action,
        after: None,
    }
}

/// Returns a request for steps of a plan.
pub(crate) fn request(steps: Vec<Step>) -> Steps {
    Steps {
        steps,
        stops_for: None,
        basis: nothing().basis,
        by_itself: false,
        decided: Timestamp::UNIX_EPOCH,
        cause: WakeCause::Asked,
        reserve: 0,
        namespace_limit: None,
        rules: None,
        pod: None,
    }
}

/// Returns an empty node in this directory.
pub(crate) fn node_in(dir: &Path) -> Node {
    let config = Config {
        runsc: dir.join("runsc"),
        runsc_digest: String::new(),
        state_dir: dir.to_owned(),
        store_dir: dir.to_owned(),
        kubelet_root: dir.join("kubelet"),
        kubelet_port: 10250,
        eviction_percent: None,
        platform: String::new(),
        expedite_wakes: false,
        begin_sandboxes: true,
        wakes_at_once: 0,
        revoked_runsc: Vec::new(),
        debug_log_dir: None,
    };
    let off = || "off".parse().expect("no limit");
    let swap = SwapRoom::new(&SwapArgs {
        doze_swap_per_sandbox: off(),
        doze_swap_per_node: off(),
    });
    let limits = StoreLimits {
        reserve: 0,
        per_namespace: PerNamespace::Unlimited,
    };
    Node::new(config, limits, dir, Arc::new(swap)).expect("a node")
}
