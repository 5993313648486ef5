//! No client required. Plans on which nodes the images of a template are staged: pure.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use jiff::Timestamp;
use k8s_openapi::api::{
    core::v1::{Pod, PodSpec},
    node::v1::RuntimeClass,
};
use kube::ResourceExt;
use torpor_api::{SandboxNode, SandboxTemplate, annotations};

use super::{
    fit::{self, NodeFacts},
    pod::{self, Progress},
};

/// Input of the plan for one template.
#[derive(Clone, Debug, Default)]
pub struct Observed {
    pub template: Arc<SandboxTemplate>,
    /// True if a pool names the template.
    pub has_pool: bool,
    /// Image of the program that the Pods run.
    pub runtime: Option<Arc<str>>,
    /// RuntimeClass that the template names.
    pub class: Option<Arc<RuntimeClass>>,
    /// Nodes of the cluster; `None` if the controller may not list them.
    pub nodes: Option<Arc<[NodeFacts]>>,
    pub agents: Vec<Arc<SandboxNode>>,
    /// Pods that bring images of the template to a node.
    pub pods: Vec<Arc<Pod>>,
    /// Number of Pods that may be created now.
    pub room: usize,
}

/// Step of a plan: one call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    Create { name: String, node: String },
    Delete { name: String, uid: String },
}

/// Steps for one template.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    pub steps: Vec<Action>,
    /// Why images are not on a node yet, for the template's author.
    pub problem: Option<String>,
    /// True if all images are where they should be.
    pub is_settled: bool,
    pub requeue: Option<Duration>,
}

/// Time until the next look while images are on their way.
const LOOK_SOON: Duration = Duration::from_secs(10);
/// Time until the next look at labels and taints of the nodes.
const LOOK: Duration = Duration::from_secs(300);
/// Age at which a Pod that ended without the images is replaced.
const RETRY: Duration = Duration::from_secs(300);

/// Reports whether a template asks for its images on the nodes of its pools.
pub fn is_wanted(template: &SandboxTemplate) -> bool {
    let value = template.annotations().get(annotations::STAGE_IMAGES);
    value.is_some_and(|value| value == "true") && template.metadata.deletion_timestamp.is_none()
}

/// Plans the steps for one template.
pub fn plan(observed: &Observed, now: Timestamp) -> Plan {
    if !is_wanted(&observed.template) || !observed.has_pool {
        return Plan {
            steps: observed.pods.iter().filter_map(|pod| delete(pod)).collect(),
            is_settled: true,
            ..Plan::default()
        };
    }
    match nodes(observed) {
        Ok((selected, open)) => staged(observed, &selected, &open, now),
        Err(problem) => Plan {
            problem: Some(problem),
            requeue: Some(LOOK),
            ..Plan::default()
        },
    }
}

fn delete(pod: &Pod) -> Option<Action> {
    let is_new = pod.metadata.deletion_timestamp.is_none();
    is_new.then(|| Action::Delete {
        name: pod.name_any(),
        uid: pod.uid().unwrap_or_default(),
    })
}

/// Names of Pods, each with its node.
type Places<'a> = BTreeMap<String, &'a str>;

/// Returns the Pods for the nodes that the template selects, and the names of those that may be
/// created now. The error is the cause why none can be.
fn nodes(observed: &Observed) -> Result<(Places<'_>, BTreeSet<String>), String> {
    let template = &observed.template;
    if pod::images(template).is_empty() {
        return Err("each container of the template has imagePullPolicy: Never".to_owned());
    }
    if observed.runtime.is_none() {
        let why = "the controller has no image of the runtime; start it with --runtime-image";
        return Err(why.to_owned());
    }
    let Some(nodes) = observed.nodes.as_deref() else {
        return Err("the controller may not list nodes; grant its ClusterRole that".to_owned());
    };
    let spec = template.spec.pod_template.spec.json().clone();
    let spec = serde_json::from_value::<PodSpec>(spec.into());
    let spec = spec.map_err(|why| format!("the pod template is not valid: {why}"))?;
    let class = observed.class.as_deref();
    if let (Some(name), None) = (&spec.runtime_class_name, class) {
        return Err(format!("RuntimeClass {name:?} does not exist"));
    }
    let selected = nodes
        .iter()
        .filter(|node| fit::is_selected(&spec, class, node));
    let version = pod::version(template);
    let (mut places, mut open) = (BTreeMap::new(), BTreeSet::new());
    for node in selected {
        let name = pod::name(template, &version, &node.name);
        if fit::is_open(&spec, class, node) && has_runtime(observed, &node.name) {
            open.insert(name.clone());
        }
        places.insert(name, node.name.as_str());
    }
    if let Some(class) = class
        && !places.values().any(|node| has_runtime(observed, node))
    {
        let (handler, count) = (&class.handler, places.len());
        return Err(format!(
            "none of the {count} nodes that the template selects has the runtime {handler:?}"
        ));
    }
    Ok((places, open))
}

/// Reports whether a node has the runtime of the template's RuntimeClass.
fn has_runtime(observed: &Observed, node: &str) -> bool {
    let Some(class) = &observed.class else {
        return true;
    };
    let mut agents = observed
        .agents
        .iter()
        .filter(|agent| agent.name_any() == node);
    agents.any(|agent| {
        let status = agent.status.as_ref();
        let mut runtimes = status.into_iter().flat_map(|status| &status.runtimes);
        runtimes.any(|runtime| runtime.handler == class.handler)
    })
}

fn staged(
    observed: &Observed,
    places: &Places<'_>,
    open: &BTreeSet<String>,
    now: Timestamp,
) -> Plan {
    let (mut steps, mut problems, mut is_moving) = (Vec::new(), Vec::new(), false);
    let mut missing = open.clone();
    for pod in &observed.pods {
        let Some(node) = places.get(&pod.name_any()) else {
            steps.extend(delete(pod));
            continue;
        };
        missing.remove(&pod.name_any());
        match pod::progress(pod, now) {
            Progress::Staged => {}
            Progress::Pulling => is_moving = true,
            Progress::Held(why) => problems.push(format!("{node}: {why}")),
            Progress::Failed(why) => {
                problems.push(format!("{node}: {why}"));
                steps.extend(delete(pod).filter(|_| pod::age(pod, now) >= RETRY));
            }
        }
    }
    is_moving |= !missing.is_empty();
    let created = missing.into_iter().take(observed.room);
    steps.extend(created.filter_map(|name| {
        let node = (*places.get(&name)?).to_owned();
        Some(Action::Create { name, node })
    }));
    let count = problems.len();
    Plan {
        steps,
        problem: problems.into_iter().next().map(|first| {
            format!(
                "images are missing on {count} of {} nodes. {first}",
                places.len()
            )
        }),
        is_settled: count == 0 && !is_moving,
        // A change of a Pod queues a pass, too.
        requeue: Some(if is_moving { LOOK_SOON } else { LOOK }),
    }
}

#[cfg(test)]
mod tests;
