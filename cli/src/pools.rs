//! `pools`: warm pools with the heat of their members, their golden images and the nodes that have
//! their containers' images. Pure.

use std::collections::BTreeMap;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use serde::Serialize;
use torpor_api::conditions::{self, PROGRESSING, READY};
use torpor_api::{
    Sandbox, SandboxSnapshot, SandboxTemplate, SandboxWarmPool, annotations, labels, name_hash,
};

use crate::listing::{Item, Listing};
use crate::units;

/// Members of a pool, by what they do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Counts {
    /// Ready and awake.
    pub hot: usize,
    /// Ready and asleep, or about to sleep.
    pub asleep: usize,
    /// Not Ready yet.
    pub starting: usize,
}

/// One pool. Unknown fields are left out.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct View {
    pub namespace: String,
    pub name: String,
    pub template: String,
    /// Number of members that `spec.replicas` asks for.
    pub wanted: i32,
    #[serde(flatten)]
    pub counts: Counts,
    /// The same by node; members without a node have the name "".
    pub nodes: BTreeMap<String, Counts>,
    /// Value of the annotation `torpor.dev/heat`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub heat: Option<String>,
    /// Nodes with a golden image of the template; none where the template asks for none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub golden_nodes: Option<Vec<String>>,
    /// Nodes with a Pod that stages the images of the template's containers, each with whether it
    /// has them; none where the template does not ask for that. A Pod without a node stands by its
    /// own name in parentheses.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub staged_nodes: Option<BTreeMap<String, bool>>,
    pub created_at: Option<Timestamp>,
    /// Why the pool makes no progress.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub message: String,
}

/// Objects that the listing is made of.
#[derive(Debug, Default)]
pub struct Found {
    pub pools: Vec<SandboxWarmPool>,
    pub templates: Vec<SandboxTemplate>,
    pub sandboxes: Vec<Sandbox>,
    pub snapshots: Vec<SandboxSnapshot>,
    /// Pods that stage images.
    pub staging: Vec<Pod>,
}

/// Lists these pools; all if there are no names.
pub fn listing(
    found: &Found,
    names: &[String],
    with_namespaces: bool,
    now: Timestamp,
) -> Listing<View> {
    let asked = found
        .pools
        .iter()
        .filter(|pool| names.is_empty() || names.contains(&pool.name_any()));
    let mut items: Vec<View> = asked.map(|pool| view(pool, found)).collect();
    items.sort_by(|a, b| (&a.namespace, &a.name).cmp(&(&b.namespace, &b.name)));
    Listing {
        items,
        with_namespaces,
        now,
    }
}

fn view(pool: &SandboxWarmPool, found: &Found) -> View {
    let namespace = pool.namespace().unwrap_or_default();
    let template = pool.spec.sandbox_template_ref.name.clone();
    let mut counts = Counts::default();
    let mut nodes: BTreeMap<String, Counts> = BTreeMap::new();
    for member in found.sandboxes.iter().filter(|one| is_of(one, pool)) {
        let status = member.status.as_ref();
        let node = status.map(|status| status.node_name.clone());
        for counts in [
            &mut counts,
            nodes.entry(node.unwrap_or_default()).or_default(),
        ] {
            count(counts, member);
        }
    }
    let status = pool.status.as_ref();
    let progressing = status.and_then(|s| conditions::find(&s.conditions, PROGRESSING));
    let stalls = progressing.filter(|condition| condition.status == "False");
    let created = pool.metadata.creation_timestamp.as_ref();
    View {
        name: pool.name_any(),
        wanted: pool.spec.replicas.unwrap_or(1),
        counts,
        nodes,
        heat: pool.annotations().get(annotations::HEAT).cloned(),
        golden_nodes: golden_nodes(&namespace, &template, found),
        staged_nodes: staged_nodes(&namespace, &template, found),
        created_at: created.map(|created| created.0),
        message: stalls
            .map(|stalls| stalls.message.clone())
            .unwrap_or_default(),
        namespace,
        template,
    }
}

fn is_of(sandbox: &Sandbox, pool: &SandboxWarmPool) -> bool {
    let mut owners = sandbox.owner_references().iter();
    sandbox.metadata.deletion_timestamp.is_none()
        && owners
            .any(|owner| owner.controller == Some(true) && Some(&owner.uid) == pool.uid().as_ref())
}

fn count(counts: &mut Counts, member: &Sandbox) {
    let status = member.status.as_ref();
    let is_ready = status.is_some_and(|status| conditions::is_true(&status.conditions, READY));
    let hibernate = member.annotations().get(annotations::HIBERNATE);
    match (is_ready, hibernate.is_some_and(|value| value == "true")) {
        (false, _) => counts.starting += 1,
        (true, true) => counts.asleep += 1,
        (true, false) => counts.hot += 1,
    }
}

/// Reports whether a template has annotations as `wants` asks for them.
fn asks(
    found: &Found,
    namespace: &str,
    template: &str,
    wants: impl Fn(&BTreeMap<String, String>) -> bool,
) -> bool {
    found.templates.iter().any(|one| {
        one.namespace().as_deref() == Some(namespace)
            && one.name_any() == template
            && wants(one.annotations())
    })
}

/// Reports whether an object of a namespace has this label and is not being deleted.
fn is_labelled<K: ResourceExt>(object: &K, namespace: &str, label: &str, value: &str) -> bool {
    object.namespace().as_deref() == Some(namespace)
        && object
            .labels()
            .get(label)
            .is_some_and(|found| found == value)
        && object.meta().deletion_timestamp.is_none()
}

/// Returns the nodes of the Pods that stage images, each with whether the Pod has ended well; none
/// where the template does not ask for them.
fn staged_nodes(namespace: &str, template: &str, found: &Found) -> Option<BTreeMap<String, bool>> {
    let stages = |all: &BTreeMap<String, String>| {
        let value = all.get(annotations::STAGE_IMAGES);
        value.is_some_and(|value| value == "true")
    };
    if !asks(found, namespace, template, stages) {
        return None;
    }
    let hash = name_hash(template);
    let pods = found.staging.iter();
    let pods = pods.filter(|pod| is_labelled(*pod, namespace, labels::STAGED_IMAGES, &hash));
    let nodes = pods.map(|pod| {
        let node = pod.spec.as_ref().and_then(|spec| spec.node_name.clone());
        let node = node.filter(|node| !node.is_empty());
        let node = node.unwrap_or_else(|| format!("({})", pod.name_any()));
        let phase = pod
            .status
            .as_ref()
            .and_then(|status| status.phase.as_deref());
        (node, phase == Some("Succeeded"))
    });
    Some(nodes.collect())
}

/// Returns the nodes with a golden image; none where the template asks for none.
fn golden_nodes(namespace: &str, template: &str, found: &Found) -> Option<Vec<String>> {
    if !asks(found, namespace, template, annotations::is_golden) {
        return None;
    }
    let hash = name_hash(template);
    let images = found.snapshots.iter().filter(|snapshot| {
        is_labelled(*snapshot, namespace, labels::GOLDEN, &hash) && snapshot.is_committed()
    });
    let mut nodes: Vec<String> = images
        .filter_map(|snapshot| snapshot.spec.node_name.clone())
        .collect();
    nodes.sort();
    nodes.dedup();
    Some(nodes)
}

impl Item for View {
    const RESOURCE: &'static str = "sandboxwarmpool.extensions.agents.x-k8s.io";
    const HEADINGS: &'static [&'static str] = &[
        "NAME", "TEMPLATE", "WANTED", "HOT", "ASLEEP", "STARTING", "GOLDEN", "STAGED", "AGE",
    ];
    const WIDE: &'static [&'static str] = &["HEAT", "NODES", "MESSAGE"];

    fn namespace(&self) -> &str {
        &self.namespace
    }

    fn name(&self) -> &str {
        &self.name
    }

    fn cells(&self, now: Timestamp) -> Vec<String> {
        let age = |at| units::age(at, now);
        let golden = |nodes: &Vec<String>| match nodes.len() {
            0 => "being made".to_owned(),
            1 => "1 node".to_owned(),
            more => format!("{more} nodes"),
        };
        let staged = |nodes: &BTreeMap<String, bool>| {
            let there = nodes.values().filter(|is_there| **is_there).count();
            format!("{there} of {} nodes", nodes.len())
        };
        vec![
            self.name.clone(),
            self.template.clone(),
            self.wanted.to_string(),
            self.counts.hot.to_string(),
            self.counts.asleep.to_string(),
            self.counts.starting.to_string(),
            self.golden_nodes.as_ref().map_or_else(String::new, golden),
            self.staged_nodes.as_ref().map_or_else(String::new, staged),
            self.created_at.map_or_else(String::new, age),
        ]
    }

    fn wide_cells(&self, _: Timestamp) -> Vec<String> {
        let nodes = self.nodes.iter().map(|(node, counts)| {
            let name = if node.is_empty() { "(none)" } else { node };
            format!(
                "{name}:{}+{}+{}",
                counts.hot, counts.asleep, counts.starting
            )
        });
        vec![
            self.heat.clone().unwrap_or_default(),
            nodes.collect::<Vec<_>>().join(" "),
            self.message.clone(),
        ]
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::args::Format;
    use crate::output::rendered;
    use crate::view::tests::at;

    fn object<K: serde::de::DeserializeOwned>(whole: Value) -> K {
        serde_json::from_value(whole).unwrap()
    }

    fn pool(
        name: &str,
        template: &str,
        heat: Option<&str>,
        message: Option<&str>,
    ) -> SandboxWarmPool {
        let conditions = message.map(|message| {
            json!([{
                "type": "Progressing", "status": "False", "reason": "R", "message": message,
                "lastTransitionTime": "2026-11-21T11:40:00Z",
            }])
        });
        object(json!({
            "apiVersion": "extensions.agents.x-k8s.io/v1beta1", "kind": "SandboxWarmPool",
            "metadata": {
                "name": name, "namespace": "x", "uid": format!("u-{name}"),
                "creationTimestamp": "2026-11-21T11:00:00Z",
                "annotations": heat.map(|heat| json!({"torpor.dev/heat": heat})),
            },
            "spec": {"replicas": 4, "sandboxTemplateRef": {"name": template}},
            "status": {"conditions": conditions.unwrap_or_else(|| json!([]))},
        }))
    }

    fn member(pool: &str, node: &str, ready: bool, asleep: bool) -> Sandbox {
        let ready = if ready { "True" } else { "False" };
        object(json!({
            "apiVersion": "agents.x-k8s.io/v1beta1", "kind": "Sandbox",
            "metadata": {
                "name": "m", "namespace": "x",
                "annotations": asleep.then(|| json!({"torpor.dev/hibernate": "true"})),
                "ownerReferences": [{
                    "apiVersion": "extensions.agents.x-k8s.io/v1beta1", "kind": "SandboxWarmPool",
                    "name": pool, "uid": format!("u-{pool}"), "controller": true,
                }],
            },
            "spec": {"podTemplate": {"spec": {"containers": []}}},
            "status": {"nodeName": node, "conditions": [{
                "type": "Ready", "status": ready, "reason": "R", "message": "",
                "lastTransitionTime": "2026-11-21T11:40:00Z",
            }]},
        }))
    }

    fn template(name: &str, golden: bool) -> SandboxTemplate {
        let asks = json!({"torpor.dev/golden": "true", "torpor.dev/stage-images": "true"});
        object(json!({
            "apiVersion": "extensions.agents.x-k8s.io/v1beta1", "kind": "SandboxTemplate",
            "metadata": {"name": name, "namespace": "x", "annotations": golden.then_some(asks)},
            "spec": {"podTemplate": {"spec": {"containers": []}}},
        }))
    }

    fn image(template: &str, node: &str) -> SandboxSnapshot {
        object(json!({
            "apiVersion": "torpor.dev/v1alpha1", "kind": "SandboxSnapshot",
            "metadata": {
                "name": "s", "namespace": "x", "labels": {"torpor.dev/golden": name_hash(template)},
            },
            "spec": {"sandboxName": "g", "nodeName": node},
            "status": {"conditions": [{
                "type": "Committed", "status": "True", "reason": "Committed", "message": "",
                "lastTransitionTime": "2026-11-21T11:40:00Z",
            }]},
        }))
    }

    fn staging(template: &str, node: &str, phase: &str) -> Pod {
        object(json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {
                "name": "p", "namespace": "x",
                "labels": {"torpor.dev/staged-images": name_hash(template)},
            },
            "spec": {"nodeName": node, "containers": []},
            "status": {"phase": phase},
        }))
    }

    fn listing(names: &[&str], with_namespaces: bool) -> Listing<View> {
        let found = Found {
            pools: vec![
                pool("py", "python", Some("hot=1,asleep=rest"), None),
                pool(
                    "go",
                    "golang",
                    None,
                    Some("There is no golden image after 10 minutes."),
                ),
                pool("sh", "shell", None, None),
            ],
            templates: vec![
                template("python", true),
                template("golang", true),
                template("shell", false),
            ],
            sandboxes: vec![
                member("py", "node-1", true, false),
                member("py", "node-1", true, true),
                member("py", "node-2", true, true),
                member("py", "", false, true),
                member("sh", "node-2", true, false),
            ],
            snapshots: vec![image("python", "node-1"), image("python", "node-2")],
            staging: vec![
                staging("python", "node-1", "Succeeded"),
                staging("python", "node-2", "Pending"),
            ],
        };
        let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
        super::listing(&found, &names, with_namespaces, at("2026-11-21T12:00:00Z"))
    }

    #[test]
    fn a_table_shows_what_the_members_of_each_pool_do() {
        insta::assert_snapshot!(rendered(&listing(&[], false), Format::Table).unwrap());
    }

    #[test]
    fn a_wide_table_has_the_heat_and_the_members_of_each_node() {
        insta::assert_snapshot!(rendered(&listing(&[], true), Format::Wide).unwrap());
    }

    #[test]
    fn one_pool_can_be_listed_by_name_and_as_data() {
        let names = rendered(&listing(&["sh"], false), Format::Name).unwrap();
        assert_eq!(names, "sandboxwarmpool.extensions.agents.x-k8s.io/sh\n");
        insta::assert_snapshot!(rendered(&listing(&["py"], false), Format::Yaml).unwrap());
    }
}
