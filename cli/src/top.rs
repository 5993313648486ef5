//! `top`: the current use of sandboxes, and the memory that sleep saves. Pure, except for one call
//! to the metrics API.

use std::collections::HashMap;

use kube::api::{Api, ApiResource, DynamicObject, GroupVersionKind, ListParams};
use serde::Serialize;

use crate::args::SortBy;
use crate::connect::{Cluster, call};
use crate::error::Error;
use crate::objects::Scope;
use crate::output::Render;
use crate::table::Table;
use crate::units;
use crate::view::{State, View};

/// Current use of a Pod, by the metrics API.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Thousandths of a processor.
    pub cpu_millis: i64,
    pub memory_bytes: i64,
}

/// Usage by namespace and Pod.
pub type Usages = HashMap<(String, String), Usage>;

/// Lists the use of Pods by the metrics API, which `kubectl top` also uses.
///
/// A cluster may have no metrics API; the other columns do not need it.
pub async fn usages(cluster: &Cluster, scope: Scope<'_>) -> Result<Usages, Error> {
    let kind = GroupVersionKind::gvk("metrics.k8s.io", "v1beta1", "PodMetrics");
    let resource = ApiResource::from_gvk_with_plural(&kind, "pods");
    let client = cluster.client.clone();
    let api: Api<DynamicObject> = match scope {
        Scope::Everywhere => Api::all_with(client, &resource),
        Scope::Namespace(namespace) => Api::namespaced_with(client, namespace, &resource),
    };
    let listed = call("list PodMetrics", api.list(&ListParams::default())).await?;
    Ok(listed.items.iter().filter_map(usage).collect())
}

/// Returns the key and the use of one PodMetrics: the sum over its containers.
fn usage(metrics: &DynamicObject) -> Option<((String, String), Usage)> {
    let containers = metrics.data.get("containers")?.as_array()?;
    let sum = |resource: &str| {
        let figures = containers.iter().filter_map(|container| {
            units::quantity_in_thousandths(container["usage"][resource].as_str()?)
        });
        figures.sum::<i64>()
    };
    let key = (
        metrics.metadata.namespace.clone()?,
        metrics.metadata.name.clone()?,
    );
    let usage = Usage {
        cpu_millis: sum("cpu"),
        memory_bytes: sum("memory") / 1000,
    };
    Some((key, usage))
}

/// Figures of one sandbox.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Row {
    pub namespace: String,
    pub name: String,
    pub state: State,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpu_millis: Option<i64>,
    /// Memory in use.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_bytes: Option<i64>,
    /// Memory freed by the current sleep; 0 while awake.
    pub saved_bytes: i64,
    /// Size of the image on disk.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub image_bytes: Option<i64>,
}

/// Output of `top`. The figures outside of `items` are sums.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Ranking {
    pub items: Vec<Row>,
    pub asleep: usize,
    pub awake: usize,
    pub memory_bytes: i64,
    pub saved_bytes: i64,
    pub image_bytes: i64,
    #[serde(skip)]
    pub with_namespaces: bool,
}

/// Joins sandboxes with their use, in the sort order.
pub fn rank(views: &[View], usages: &Usages, by: SortBy, with_namespaces: bool) -> Ranking {
    let mut items: Vec<Row> = views.iter().map(|view| row(view, usages)).collect();
    items.sort_by(|a, b| {
        let names = || (&a.namespace, &a.name).cmp(&(&b.namespace, &b.name));
        match by {
            SortBy::Memory => b.memory_bytes.cmp(&a.memory_bytes),
            SortBy::Cpu => b.cpu_millis.cmp(&a.cpu_millis),
            SortBy::Saved => b.saved_bytes.cmp(&a.saved_bytes),
            SortBy::Name => std::cmp::Ordering::Equal,
        }
        .then_with(names)
    });
    let asleep = items.iter().filter(|row| row.state.is_asleep()).count();
    Ranking {
        asleep,
        awake: items.len() - asleep,
        memory_bytes: items.iter().filter_map(|row| row.memory_bytes).sum(),
        saved_bytes: items.iter().map(|row| row.saved_bytes).sum(),
        image_bytes: items.iter().filter_map(|row| row.image_bytes).sum(),
        items,
        with_namespaces,
    }
}

fn row(view: &View, usages: &Usages) -> Row {
    let asleep = view.state.is_asleep();
    let key = view.pod.clone().map(|pod| (view.namespace.clone(), pod));
    let usage = key.and_then(|key| usages.get(&key)).copied();
    // Without a figure of the metrics API, that of the node's agent: it does not change in sleep.
    let measured = view.memory_asleep_bytes.filter(|_| asleep);
    let saved = match (view.memory_awake_bytes, view.memory_asleep_bytes) {
        (Some(before), Some(after)) if asleep => (before - after).max(0),
        _ => 0,
    };
    Row {
        namespace: view.namespace.clone(),
        name: view.name.clone(),
        state: view.state,
        cpu_millis: usage.map(|usage| usage.cpu_millis),
        memory_bytes: usage.map(|usage| usage.memory_bytes).or(measured),
        saved_bytes: saved,
        image_bytes: view.image_bytes,
    }
}

impl Render for Ranking {
    fn text(&self, _wide: bool) -> String {
        let namespace = self.with_namespaces.then_some("NAMESPACE");
        let headings = ["NAME", "STATE", "CPU", "MEMORY", "SAVED", "IMAGE"];
        let headings: Vec<&str> = namespace.into_iter().chain(headings).collect();
        let mut table = Table::new(&headings);
        let bytes = |count: Option<i64>| count.map_or_else(String::new, units::bytes);
        for row in &self.items {
            let cpu = row.cpu_millis.map(|millis| format!("{millis}m"));
            let namespace = self.with_namespaces.then(|| row.namespace.clone());
            let cells = [
                row.name.clone(),
                row.state.to_string(),
                cpu.unwrap_or_default(),
                bytes(row.memory_bytes),
                bytes(Some(row.saved_bytes).filter(|saved| *saved > 0)),
                bytes(row.image_bytes),
            ];
            table.push(namespace.into_iter().chain(cells).collect());
        }
        format!(
            "{}\n{} asleep, {} awake; {} in use, {} saved by sleep, {} in images\n",
            table.text(),
            self.asleep,
            self.awake,
            units::bytes(self.memory_bytes),
            units::bytes(self.saved_bytes),
            units::bytes(self.image_bytes),
        )
    }

    fn names(&self) -> Vec<String> {
        let rows = self.items.iter();
        rows.map(|row| format!("sandbox.agents.x-k8s.io/{}", row.name))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use crate::view::tests::some_views;

    use super::*;

    fn metrics(pod: &str, usages: &[(&str, &str)]) -> DynamicObject {
        let containers: Vec<_> = usages
            .iter()
            .map(|(cpu, memory)| json!({"name": "c", "usage": {"cpu": cpu, "memory": memory}}))
            .collect();
        serde_json::from_value(json!({
            "metadata": {"name": pod, "namespace": "x"}, "containers": containers,
        }))
        .unwrap()
    }

    fn usages() -> Usages {
        let all = [
            metrics("runner", &[("250m", "100Mi"), ("1500u", "46Mi")]),
            metrics("sleeper", &[("0", "4Mi")]),
        ];
        all.iter().filter_map(usage).collect()
    }

    #[test]
    fn a_pods_usage_is_the_sum_of_its_containers() {
        let runner = usages()[&("x".to_owned(), "runner".to_owned())];
        let expected = Usage {
            cpu_millis: 252,
            memory_bytes: 146 << 20,
        };
        assert_eq!(runner, expected);
        assert_eq!(
            usage(&metrics("no-containers-yet", &[])).unwrap().1,
            Usage::default()
        );
    }

    #[test]
    fn the_largest_is_first_and_the_sums_are_last() {
        let ranking = rank(&some_views(), &usages(), SortBy::Memory, false);
        insta::assert_snapshot!(ranking.text(false));
    }

    #[test]
    fn saved_memory_needs_no_metrics_api() {
        let ranking = rank(&some_views(), &Usages::new(), SortBy::Saved, true);
        assert_eq!(ranking.items[0].name, "sleeper");
        assert_eq!(ranking.saved_bytes, 154_140_672 - 5_242_880);
        // For an awake sandbox only the metrics API has a figure.
        let runner = ranking.items.iter().find(|row| row.name == "runner");
        assert_eq!(runner.unwrap().memory_bytes, None);
        insta::assert_snapshot!(ranking.text(false));
    }
}
