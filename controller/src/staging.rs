//! Stages the images of a template on the nodes where its pools may run, so that the first member
//! on a node need not wait for a pull.
//!
//! For each such node the controller makes a Pod that has the images and ends at once
//! ([`pod`]): the kubelet pulls them as it does for a member, with the template's pull secrets, its
//! own limits and its own back-off. One pass: gather → **plan** (pure) → apply. The pass is part of
//! the template's.

use std::{sync::Arc, time::Duration};

use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use kube::{Resource, ResourceExt};
use torpor_api::{SandboxNode, SandboxTemplate, SandboxWarmPool, annotations, reasons::event};

use crate::{
    cache::{Change, key_of},
    calls::{self, Answer},
    context::Context,
    pace::Advance,
    template::faults,
    watches::{self, extensions::controller_of_kind},
};

mod fit;
pub mod nodes;
pub mod plan;
pub mod pod;

use self::{
    plan::{Action, Observed, Plan},
    pod::Progress,
};

/// Most Pods that pull images at the same time, of all templates, and most steps of a pass.
const AT_ONCE: usize = 16;
/// Most Pods of one namespace that pull images at the same time.
const AT_ONCE_OF_NAMESPACE: usize = 8;
/// Time until the next pass where one could not take all steps.
const REST: Duration = Duration::from_millis(100);
/// Returns the index value of a Pod that stages images: the UID of its template. A Pod with the
/// label and without that owner is somebody else's.
pub fn index(pod: &Pod) -> Option<String> {
    let owner = controller_of_kind(pod, &SandboxTemplate::kind(&()))?;
    Some(owner.uid.clone())
}

/// Returns the key of the Events about a template's images, by the template's UID.
pub fn memory_key(uid: &str) -> String {
    format!("images {uid}")
}

/// Queues the template of a Pod that stages images.
pub fn pod_changed(context: &Context, change: &Change<Pod>) {
    let Some(pod) = change.after.as_ref().or(change.before.as_ref()) else {
        return;
    };
    if let Some(template) = pod.annotations().get(annotations::SANDBOX_TEMPLATE_REF) {
        let namespace = pod.namespace().unwrap_or_default();
        context.queues.templates.add((namespace, template.clone()));
    }
}

/// Queues the templates that a pool names or named: images are staged while it has a pool.
pub fn pool_changed(context: &Context, change: &Change<SandboxWarmPool>) {
    let template = |pool: &Option<Arc<SandboxWarmPool>>| {
        let pool = pool.as_ref()?;
        let name = pool.spec.sandbox_template_ref.name.clone();
        Some((pool.namespace().unwrap_or_default(), name))
    };
    let (before, after) = (template(&change.before), template(&change.after));
    if before == after {
        return;
    }
    for (namespace, name) in [before, after].into_iter().flatten() {
        let named = context.caches.templates.get(&namespace, &name);
        if named.is_some_and(|template| plan::is_wanted(&template)) {
            context.queues.templates.add((namespace, name));
        }
    }
}

/// Queues the templates that stage images: a node may have another runtime now.
pub fn node_changed(context: &Context, change: &Change<SandboxNode>) {
    let handlers = |node: &Option<Arc<SandboxNode>>| -> Option<Vec<String>> {
        let runtimes = &node.as_ref()?.status.as_ref()?.runtimes;
        Some(runtimes.iter().map(|one| one.handler.clone()).collect())
    };
    if handlers(&change.before) == handlers(&change.after) {
        return;
    }
    for template in context.caches.templates.filtered(plan::is_wanted) {
        context.queues.templates.add(key_of(&*template));
    }
}

/// Reconciles the staged images of a template. Returns the delay until the next pass when nothing
/// changes.
pub async fn reconcile(
    template: &Arc<SandboxTemplate>,
    context: &Context,
) -> Result<Option<Duration>, calls::Error> {
    let Some(observed) = gather(template, context).await? else {
        return Ok(None);
    };
    let Plan {
        steps,
        mut problem,
        is_settled,
        requeue,
    } = plan::plan(&observed, Timestamp::now());
    let mut is_refused = false;
    for step in steps.iter().take(AT_ONCE) {
        if let Err(refused) = execute(step, &observed, context).await? {
            problem.get_or_insert(refused);
            is_refused = true;
        }
    }
    let key = memory_key(&template.uid().unwrap_or_default());
    match problem {
        None if is_settled => context.templates.forget(&key),
        None => {}
        Some(message) => {
            faults::warn(template, &key, event::IMAGES_NOT_STAGED, message, context).await;
        }
    }
    // Other templates have their passes in between.
    let rest = (steps.len() > AT_ONCE && !is_refused).then_some(REST);
    Ok(rest.or(requeue))
}

/// Reads the caches, and the nodes if the template asks for its images there. None for a template
/// that neither asks for that nor has such Pods.
async fn gather(
    template: &Arc<SandboxTemplate>,
    context: &Context,
) -> Result<Option<Observed>, calls::Error> {
    let namespace = template.namespace().unwrap_or_default();
    let (caches, name) = (&context.caches, template.name_any());
    let uid = template.uid().unwrap_or_default();
    let pods = caches.staged.indexed(&namespace, &uid);
    let is_wanted = plan::is_wanted(template);
    if !is_wanted && pods.is_empty() {
        return Ok(None);
    }
    let nodes = match is_wanted {
        true => context.nodes.listed(&context.api).await?,
        false => None,
    };
    let class = template.spec.pod_template.spec.runtime_class_name();
    let now = Timestamp::now();
    let pulls = |pod: &Pod| index(pod).is_some() && pod::progress(pod, now) == Progress::Pulling;
    let pulling = caches.staged.filtered(pulls);
    let is_own = |pod: &&Arc<Pod>| pod.namespace().as_deref() == Some(&namespace);
    let own = pulling.iter().filter(is_own).count();
    let room = AT_ONCE.saturating_sub(pulling.len());
    Ok(Some(Observed {
        template: Arc::clone(template),
        has_pool: !caches.pools.indexed(&namespace, &name).is_empty(),
        runtime: context.settings.runtime_image.clone(),
        class: class.and_then(|class| caches.runtime_classes.get("", class)),
        nodes,
        agents: caches.nodes.filtered(|node| !node.is_silent(now)),
        pods,
        room: room.min(AT_ONCE_OF_NAMESPACE.saturating_sub(own)),
    }))
}

/// Executes one step; one call per arm. The inner error is the apiserver's refusal of a Pod. An
/// object that exists, is gone or has changed ends the step: its event queues the next pass.
async fn execute(
    step: &Action,
    observed: &Observed,
    context: &Context,
) -> Result<Result<(), String>, calls::Error> {
    let api = context.api.in_advance(Advance::Calm);
    let template = &observed.template;
    let namespace = &template.namespace().unwrap_or_default();
    let done = match step {
        Action::Create { name, node } => {
            let runtime = observed.runtime.as_deref().unwrap_or_default();
            let object = pod::pod(template, name, node, runtime);
            let created = api.create::<Pod>(namespace, object).await;
            created.map(|mut pod| {
                watches::trim_staged(&mut pod);
                context.caches.staged.assume(pod);
            })
        }
        Action::Delete { name, uid } => api.delete::<Pod>(namespace, name, uid, None).await,
    };
    match done {
        Err(error) => match error.answer() {
            Answer::NotFound | Answer::Conflict | Answer::AlreadyExists => Ok(Ok(())),
            Answer::Refused => Ok(Err(error.to_string())),
            _ => Err(error),
        },
        Ok(()) => Ok(Ok(())),
    }
}
