//! Collector that counts the Sandboxes of the watch caches at each scrape.

use std::{
    collections::BTreeMap,
    fmt,
    sync::{Arc, OnceLock},
};

use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric},
    metrics::{MetricType, gauge::ConstGauge},
};
use torpor_api::{
    OperatingMode, Sandbox, SandboxTemplate, SandboxWarmPool, annotations, conditions, labels,
    reasons::sandbox as reasons,
};

use super::{UNKNOWN, launch_type, owned_by};
use crate::{
    cache::Cache,
    pool::heat,
    staging::{self, pod::Progress},
    watches::extensions::controller_of_kind,
};

#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, EncodeLabelSet)]
struct SandboxLabels {
    namespace: String,
    ready_condition: &'static str,
    expired: &'static str,
    launch_type: &'static str,
    sandbox_template: String,
    owned_by: &'static str,
    created_by: &'static str,
    operating_mode: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, EncodeLabelSet)]
struct PoolLabels {
    namespace: String,
    warmpool_name: String,
    sandbox_template: String,
    sandbox_status: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, EncodeLabelSet)]
struct HeatLabels {
    namespace: String,
    warmpool_name: String,
    heat: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, EncodeLabelSet)]
struct StagingLabels {
    namespace: String,
    state: &'static str,
}

/// States of a pool's Ready members.
const HEATS: [&str; 2] = ["hot", "asleep"];

/// States of a pool's members, as upstream's.
const MEMBER_STATES: [&str; 4] = ["ready", "pending", "succeeded", "failed"];

/// Caches of the objects to count.
#[derive(Clone, Debug)]
pub struct Counted {
    pub sandboxes: Cache<Sandbox>,
    pub pools: Cache<SandboxWarmPool>,
    pub templates: Cache<SandboxTemplate>,
    /// Pods that stage images.
    pub staged: Cache<Pod>,
}

impl Counted {
    /// Returns the template that the Sandbox's annotation names, if the template exists.
    ///
    /// A user can write any text into the annotation, and each label value that is counted stays in
    /// memory.
    pub(super) fn template(&self, sandbox: &Sandbox) -> Option<String> {
        let named = sandbox
            .annotations()
            .get(annotations::SANDBOX_TEMPLATE_REF)?;
        let namespace = sandbox.namespace().unwrap_or_default();
        let found = self.templates.get(&namespace, named)?;
        Some(found.name_any())
    }
}

/// Collector; counts nothing until the caches are set.
pub(super) struct Scrape {
    pub(super) counted: Arc<OnceLock<Counted>>,
}

impl fmt::Debug for Scrape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Scrape")
    }
}

impl Collector for Scrape {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let (mut counts, mut members) = (BTreeMap::<_, i64>::new(), BTreeMap::<_, i64>::new());
        let (mut ready, mut staged) = (BTreeMap::<_, i64>::new(), BTreeMap::<_, i64>::new());
        if let Some(counted) = self.counted.get() {
            let pools = counted.pools.filtered(|_| true);
            // A pool without members is shown with zeros.
            for pool in &pools {
                for state in MEMBER_STATES {
                    members.insert(pool_labels(counted, pool, None, state), 0);
                }
                for heat in HEATS {
                    ready.insert(heat_labels(pool, heat), 0);
                }
            }
            let pools: BTreeMap<_, _> = pools
                .iter()
                .map(|pool| (pool.metadata.uid.clone(), pool))
                .collect();
            for pod in counted.staged.filtered(|_| true) {
                let namespace = pod.namespace().unwrap_or_default();
                let state = staging_state(&pod);
                *staged
                    .entry(StagingLabels { namespace, state })
                    .or_default() += 1;
            }
            for sandbox in counted.sandboxes.filtered(|_| true) {
                *counts.entry(sandbox_labels(counted, &sandbox)).or_default() += 1;
                let owner = controller_of_kind(&*sandbox, "SandboxWarmPool");
                if let Some(pool) = owner.and_then(|owner| pools.get(&Some(owner.uid.clone()))) {
                    let state = member_state(&sandbox);
                    let labels = pool_labels(counted, pool, Some(&sandbox), state);
                    *members.entry(labels).or_default() += 1;
                    let heat = HEATS[usize::from(heat::is_asleep(&sandbox))];
                    if state == "ready" {
                        *ready.entry(heat_labels(pool, heat)).or_default() += 1;
                    }
                }
            }
        }
        gauges(
            &mut encoder,
            "agent_sandboxes",
            "Sandboxes by state",
            &counts,
        )?;
        gauges(
            &mut encoder,
            "agent_sandbox_warmpool_size",
            "Unclaimed members of SandboxWarmPools by state",
            &members,
        )?;
        gauges(
            &mut encoder,
            "torpor_warmpool_ready_members",
            "Ready members of SandboxWarmPools by heat",
            &ready,
        )?;
        gauges(
            &mut encoder,
            "torpor_image_staging_pods",
            "Pods that stage the images of SandboxTemplates on nodes, by state",
            &staged,
        )
    }
}

fn gauges<L: EncodeLabelSet>(
    encoder: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    counts: &BTreeMap<L, i64>,
) -> Result<(), fmt::Error> {
    let mut family = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
    for (labels, count) in counts {
        ConstGauge::new(*count).encode(family.encode_family(labels)?)?;
    }
    Ok(())
}

fn staging_state(pod: &Pod) -> &'static str {
    match staging::pod::progress(pod, Timestamp::now()) {
        Progress::Staged => "staged",
        Progress::Pulling => "pulling",
        Progress::Held(_) | Progress::Failed(_) => "failing",
    }
}

fn heat_labels(pool: &SandboxWarmPool, heat: &'static str) -> HeatLabels {
    HeatLabels {
        namespace: pool.namespace().unwrap_or_default(),
        warmpool_name: pool.name_any(),
        heat,
    }
}

/// Returns the labels of a pool's member. The template is the member's own: a stale member was made
/// from another template than the pool's.
fn pool_labels(
    counted: &Counted,
    pool: &SandboxWarmPool,
    member: Option<&Sandbox>,
    sandbox_status: &'static str,
) -> PoolLabels {
    let own = member.and_then(|member| counted.template(member));
    let named = Some(&pool.spec.sandbox_template_ref.name);
    let named = named.filter(|name| annotations::is_dns_subdomain(name));
    PoolLabels {
        namespace: pool.namespace().unwrap_or_default(),
        warmpool_name: pool.name_any(),
        sandbox_template: own
            .or_else(|| named.cloned())
            .unwrap_or_else(|| UNKNOWN.to_owned()),
        sandbox_status,
    }
}

fn member_state(member: &Sandbox) -> &'static str {
    let conditions = member
        .status
        .as_ref()
        .map_or(&[][..], |status| &status.conditions);
    let finished = conditions::find(conditions, conditions::FINISHED)
        .filter(|finished| finished.status == "True");
    match finished.map(|finished| finished.reason.as_str()) {
        Some(reasons::POD_SUCCEEDED) => "succeeded",
        Some(reasons::POD_FAILED) => "failed",
        _ if conditions::is_true(conditions, conditions::READY) => "ready",
        _ => "pending",
    }
}

fn sandbox_labels(counted: &Counted, sandbox: &Sandbox) -> SandboxLabels {
    let conditions = sandbox
        .status
        .as_ref()
        .map_or(&[][..], |status| &status.conditions);
    let ready = conditions::find(conditions, conditions::READY);
    let text = |yes: bool| if yes { "true" } else { "false" };
    SandboxLabels {
        namespace: sandbox.namespace().unwrap_or_default(),
        ready_condition: text(ready.is_some_and(|ready| ready.status == "True")),
        expired: text(ready.is_some_and(|ready| ready.reason == reasons::SANDBOX_EXPIRED)),
        launch_type: launch_type(sandbox),
        sandbox_template: counted
            .template(sandbox)
            .unwrap_or_else(|| UNKNOWN.to_owned()),
        owned_by: owned_by(sandbox),
        created_by: sandbox
            .labels()
            .get(labels::CREATED_BY)
            .map_or(UNKNOWN, |creator| labels::created_by(creator)),
        operating_mode: match sandbox.spec.operating_mode {
            OperatingMode::Running => "Running",
            OperatingMode::Suspended => "Suspended",
        },
    }
}
