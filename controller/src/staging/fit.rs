//! No client required. Decides on which nodes a template's Pods may run, by the scheduler's rules
//! for node selectors, node affinity and taints.

use std::collections::BTreeMap;

use k8s_openapi::api::{
    core::v1::{Node, NodeSelectorRequirement, NodeSelectorTerm, PodSpec, Taint, Toleration},
    node::v1::RuntimeClass,
};
use kube::ResourceExt;

/// Facts about a node that decide whether a Pod may run there.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct NodeFacts {
    pub name: String,
    pub labels: BTreeMap<String, String>,
    pub taints: Vec<Taint>,
    pub is_cordoned: bool,
}

impl NodeFacts {
    /// Returns the facts about a node.
    pub fn of(node: Node) -> Self {
        let name = node.name_any();
        let spec = node.spec.unwrap_or_default();
        Self {
            name,
            labels: node.metadata.labels.unwrap_or_default(),
            taints: spec.taints.unwrap_or_default(),
            is_cordoned: spec.unschedulable == Some(true),
        }
    }
}

/// Reports whether a node has the labels and the name that a Pod asks for. A Pod that names a
/// RuntimeClass gets the node selector of that class.
pub(super) fn is_selected(pod: &PodSpec, class: Option<&RuntimeClass>, node: &NodeFacts) -> bool {
    let scheduling = class.and_then(|class| class.scheduling.as_ref());
    let of_class = scheduling.and_then(|scheduling| scheduling.node_selector.as_ref());
    let mut wanted = pod.node_selector.iter().chain(of_class).flatten();
    let affinity = pod
        .affinity
        .as_ref()
        .and_then(|all| all.node_affinity.as_ref());
    let required = affinity.and_then(|affinity| {
        affinity
            .required_during_scheduling_ignored_during_execution
            .as_ref()
    });
    wanted.all(|(key, value)| node.labels.get(key) == Some(value))
        && required.is_none_or(|required| {
            let mut terms = required.node_selector_terms.iter();
            terms.any(|term| is_match(term, node))
        })
}

/// Reports whether new Pods may start on a node: it is not cordoned, and the Pod tolerates its
/// taints.
pub(super) fn is_open(pod: &PodSpec, class: Option<&RuntimeClass>, node: &NodeFacts) -> bool {
    let scheduling = class.and_then(|class| class.scheduling.as_ref());
    let of_class = scheduling.and_then(|scheduling| scheduling.tolerations.as_ref());
    let tolerations = || pod.tolerations.iter().chain(of_class).flatten();
    let keeps_off = |taint: &&Taint| matches!(taint.effect.as_str(), "NoSchedule" | "NoExecute");
    let mut taints = node.taints.iter().filter(keeps_off);
    !node.is_cordoned && taints.all(|taint| tolerations().any(|one| tolerates(one, taint)))
}

/// Reports whether a term matches. One without requirements matches no node.
fn is_match(term: &NodeSelectorTerm, node: &NodeFacts) -> bool {
    let labels = term.match_expressions.iter().flatten();
    let fields = term.match_fields.iter().flatten();
    let name = |key: &str| (key == "metadata.name").then_some(&node.name);
    let is_empty = labels.clone().chain(fields.clone()).next().is_none();
    !is_empty
        && labels
            .map(|one| (one, node.labels.get(&one.key)))
            .all(holds)
        && fields.map(|one| (one, name(&one.key))).all(holds)
}

/// Reports whether a requirement holds for a value; `None`: the node has none of that key.
fn holds((requirement, value): (&NodeSelectorRequirement, Option<&String>)) -> bool {
    let listed = requirement.values.as_deref().unwrap_or_default();
    let numbers = || -> Option<(i64, i64)> {
        let limit = listed.first()?.parse().ok()?;
        Some((value?.parse().ok()?, limit))
    };
    match requirement.operator.as_str() {
        "In" => value.is_some_and(|value| listed.contains(value)),
        "NotIn" => value.is_none_or(|value| !listed.contains(value)),
        "Exists" => value.is_some(),
        "DoesNotExist" => value.is_none(),
        "Gt" => numbers().is_some_and(|(value, limit)| value > limit),
        "Lt" => numbers().is_some_and(|(value, limit)| value < limit),
        _ => false,
    }
}

fn tolerates(toleration: &Toleration, taint: &Taint) -> bool {
    let given = |text: &Option<String>| text.clone().filter(|text| !text.is_empty());
    let value = || {
        let wanted = toleration.value.as_deref().unwrap_or_default();
        wanted == taint.value.as_deref().unwrap_or_default()
    };
    let key = given(&toleration.key);
    let suits = match given(&toleration.operator).as_deref() {
        Some("Exists") => true,
        None | Some("Equal") => key.is_some() && value(),
        Some(_) => false,
    };
    suits
        && key.is_none_or(|key| key == taint.key)
        && given(&toleration.effect).is_none_or(|effect| effect == taint.effect)
}

#[cfg(test)]
mod tests;
