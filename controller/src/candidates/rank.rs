//! No client required. Order of nodes from which a claim takes a member.

use std::{
    collections::{BTreeSet, HashMap},
    sync::Arc,
    time::Duration,
};

use jiff::Timestamp;
use kube::ResourceExt;
use tokio::time::Instant;
use torpor_api::{
    Sandbox, SandboxClaim, SandboxNode,
    annotations::NODE_PREFERENCE,
    conditions::{self, PRESSURE, RESTORED},
    labels,
};

use super::Stage;
use crate::{claim::wake, staging::nodes::NodeFacts};

/// Time for which members that sleep on a node come last after one of them could not continue from
/// its image there.
const AVOIDED: Duration = Duration::from_secs(60);

/// Most preferences of a claim; the others are left out.
const MOST_PREFERRED: usize = 16;

/// State of the nodes, for one claim.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Nodes {
    /// Nodes that are short of memory, or on which a wake failed: there a member had better not
    /// wake.
    unfit: BTreeSet<String>,
    /// Nodes whose agent does not report.
    silent: BTreeSet<String>,
    /// Place of each node among the claim's preferences; the first one is preferred most.
    preferred: Arc<HashMap<String, usize>>,
}

/// Returns the claim's preferences, the first one most: a node's name, or `<label>=<value>`.
fn preferences(claim: &SandboxClaim) -> impl Iterator<Item = &str> {
    let listed = claim.annotations().get(NODE_PREFERENCE);
    let listed = listed.map(String::as_str).unwrap_or_default();
    let each = listed.split(',').map(str::trim);
    each.filter(|one| !one.is_empty()).take(MOST_PREFERRED)
}

/// Reports whether a claim prefers nodes by their labels.
pub fn prefers_labels(claim: &SandboxClaim) -> bool {
    preferences(claim).any(|one| one.contains('='))
}

/// Returns the place of each node that a claim prefers.
fn places(claim: &SandboxClaim, facts: &[NodeFacts]) -> HashMap<String, usize> {
    let mut places = HashMap::new();
    for (place, preference) in preferences(claim).enumerate() {
        let Some((label, value)) = preference.split_once('=') else {
            places.entry(preference.to_owned()).or_insert(place);
            continue;
        };
        let has = |node: &&NodeFacts| node.labels.get(label).is_some_and(|has| has == value);
        for node in facts.iter().filter(has) {
            places.entry(node.name.clone()).or_insert(place);
        }
    }
    places
}

impl Nodes {
    /// Returns the state by the reports of the nodes' agents, with the claim's preference. `facts`
    /// has the labels of the nodes, for a claim that prefers some.
    pub fn of(
        nodes: &[Arc<SandboxNode>],
        facts: &[NodeFacts],
        claim: &SandboxClaim,
        now: Timestamp,
    ) -> Self {
        let named = |wanted: &dyn Fn(&SandboxNode) -> bool| -> BTreeSet<String> {
            let found = nodes.iter().filter(|node| wanted(node));
            found.map(|node| node.name_any()).collect()
        };
        Self {
            unfit: named(&|node| {
                let status = node.status.as_ref();
                status.is_some_and(|status| conditions::is_true(&status.conditions, PRESSURE))
            }),
            silent: named(&|node| node.is_silent(now)),
            preferred: Arc::new(places(claim, facts)),
        }
    }

    /// Returns the state in which nodes of recent failures are unfit, too. Older failures are
    /// removed.
    pub(super) fn with_failures(
        &self,
        failures: &mut HashMap<String, Instant>,
        now: Instant,
    ) -> Self {
        failures.retain(|_, at| *at + AVOIDED > now);
        let mut nodes = self.clone();
        nodes.unfit.extend(failures.keys().cloned());
        nodes
    }

    pub(super) fn is_silent(&self, node: &str) -> bool {
        self.silent.contains(node)
    }

    /// Returns the rank of a node for a member in this stage; the least comes first. A member that
    /// runs takes no more memory when a claim has it.
    pub(super) fn rank(&self, node: &str, stage: Stage) -> (bool, usize) {
        let is_unfit = stage == Stage::Asleep && self.unfit.contains(node);
        let place = self.preferred.get(node).copied();
        (is_unfit, place.unwrap_or(MOST_PREFERRED))
    }
}

/// Returns the node of a warm Sandbox that has just started without the memory that it should have
/// continued from.
pub(super) fn failed_on<'a>(
    before: Option<&Sandbox>,
    after: Option<&'a Sandbox>,
) -> Option<&'a str> {
    let has_failed = |sandbox: &Sandbox| {
        let status = sandbox.status.as_ref()?;
        Some(wake::is_cold(conditions::find(
            &status.conditions,
            RESTORED,
        )?))
    };
    let is_warm = |sandbox: &Sandbox| {
        let launched = sandbox.labels().get(labels::LAUNCH_TYPE);
        launched.is_some_and(|launched| launched == "warm")
    };
    let after = after.filter(|after| is_warm(after) && has_failed(after) == Some(true))?;
    // A controller that has just started sees old failures.
    let is_new = before.is_some_and(|before| has_failed(before) != Some(true));
    let node = after.status.as_ref()?.node_name.as_str();
    (is_new && !node.is_empty()).then_some(node)
}
