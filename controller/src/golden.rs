//! Golden images: members of a warm pool start from the memory of a sandbox that is ready, and not
//! from their program's beginning.
//!
//! For a template that asks for it the controller starts one more sandbox, the golden one, saves it
//! once it is Ready, and deletes it: first on a node of the scheduler's choice, then on each node
//! that has members without an image. No claim ever takes a golden sandbox, so that its image has
//! nothing of a claim. One pass: gather → **plan** (pure) → apply. The pass is part of the
//! template's.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use jiff::Timestamp;
use kube::ResourceExt;
use serde_json::json;
use torpor_api::{
    Sandbox, SandboxNode, SandboxSnapshot, SandboxTemplate, annotations, labels, name_hash,
    reasons::event, snapshot::REPOSITORY_PROVISIONER,
};

use crate::{
    blueprint::{self, Blueprint},
    cache::{Change, key_of},
    calls::{self, Answer},
    candidates,
    context::Context,
    pace::Advance,
    pool::member,
    template::faults,
    watches::Caches,
};

pub mod images;
pub mod plan;
pub mod sandbox;

use self::plan::{Action, Observed};

/// State of a template's golden images, for its pools.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Golden {
    /// The template asks for none, or cannot have one.
    #[default]
    Off,
    /// There is no image yet; holds the name of the golden Sandbox.
    Preparing(String),
    /// There is at least one image; holds the name of the golden Sandbox.
    Ready(String),
}

impl Golden {
    /// Returns the name of the golden Sandbox.
    pub fn sandbox(&self) -> Option<&str> {
        match self {
            Self::Off => None,
            Self::Preparing(name) | Self::Ready(name) => Some(name),
        }
    }
}

/// Returns the name of the golden Sandbox of this version of a template. All that decides about the
/// memory of its sandboxes is part of the version.
pub fn name(template: &SandboxTemplate, runtime_image: Option<&str>) -> String {
    let settings = [
        annotations::INJECT_RUNTIME,
        annotations::GOLDEN_READY_EXEC,
        annotations::LATE_BIND,
        annotations::ON_CLAIM_EXEC,
    ];
    let settings = settings.map(|key| template.annotations().get(key));
    let version = json!([
        blueprint::blueprint_hash(template),
        settings,
        settings[0].and(runtime_image)
    ]);
    let suffix = format!("-golden-{}", name_hash(&version.to_string()));
    member::shortened(&template.name_any(), suffix.len()).to_owned() + &suffix
}

/// Returns the key of the Events about a template's golden images, by the template's UID.
pub fn memory_key(uid: &str) -> String {
    format!("golden {uid}")
}

/// Returns the state of a template's golden images. The template is whole.
pub fn state(template: &SandboxTemplate, context: &Context) -> Golden {
    if !plan::is_wanted(template) || plan::unfit(template).is_some() {
        return Golden::Off;
    }
    let name = name(template, context.settings.runtime_image.as_deref());
    let namespace = template.namespace().unwrap_or_default();
    let template = &template.name_any();
    match images::of(&snapshots_of(&context.caches, &namespace, template, &name)) {
        Some(_) => Golden::Ready(name),
        None => Golden::Preparing(name),
    }
}

/// Returns the index value of a SandboxSnapshot: the template of a golden image, else the Sandbox.
pub fn snapshot_index(snapshot: &SandboxSnapshot) -> Option<String> {
    let golden = snapshot.labels().get(labels::GOLDEN);
    Some(golden.map_or_else(|| snapshot.spec.sandbox_name.clone(), |hash| index(hash)))
}

/// Returns the index value of the golden images of a template, by the hash of its name.
fn index(hash: &str) -> String {
    format!("golden {hash}")
}

/// Returns the SandboxSnapshots of a golden Sandbox.
pub fn snapshots_of(
    caches: &Caches,
    namespace: &str,
    template: &str,
    sandbox: &str,
) -> Vec<Arc<SandboxSnapshot>> {
    let mut found = caches
        .snapshots
        .indexed(namespace, &index(&name_hash(template)));
    found.retain(|snapshot| snapshot.spec.sandbox_name == sandbox);
    found
}

/// Queues the template of a golden Sandbox or of its SandboxSnapshot, and the template's pools.
pub fn changed<K: kube::Resource>(context: &Context, object: &K) {
    let meta = object.meta();
    let is_golden = meta
        .labels
        .as_ref()
        .is_some_and(|all| all.contains_key(labels::GOLDEN));
    let all = meta.annotations.as_ref();
    let template = all.and_then(|all| all.get(annotations::SANDBOX_TEMPLATE_REF));
    if let Some(template) = template.filter(|_| is_golden) {
        let namespace = meta.namespace.clone().unwrap_or_default();
        for pool in context.caches.pools.indexed(&namespace, template) {
            context.queues.pools.add(key_of(&*pool));
        }
        context.queues.templates.add((namespace, template.clone()));
    }
}

/// Queues the template of a member that has got a node, if it asks for golden images.
pub fn member_placed(context: &Context, member: &Sandbox) {
    let Some(template) = member.annotations().get(annotations::SANDBOX_TEMPLATE_REF) else {
        return;
    };
    let namespace = member.namespace().unwrap_or_default();
    let found = context.caches.templates.get(&namespace, template);
    if found.is_some_and(|template| plan::is_wanted(&template)) {
        context.queues.templates.add((namespace, template.clone()));
    }
}

/// Queues the templates that ask for golden images: a node may have another runtime now.
pub fn node_changed(context: &Context, change: &Change<SandboxNode>) {
    let offered = |node: &Option<Arc<SandboxNode>>| {
        let status = node.as_ref()?.status.as_ref()?;
        status.fingerprint.clone()
    };
    if offered(&change.before) == offered(&change.after) {
        return;
    }
    for template in context.caches.templates.filtered(plan::is_wanted) {
        context.queues.templates.add(key_of(&*template));
    }
}

/// Reconciles the golden images of a template. `isolated`: the template's NetworkPolicy is in
/// place. Returns the delay until the next pass when nothing changes.
pub async fn reconcile(
    template: &Arc<SandboxTemplate>,
    isolated: bool,
    context: &Context,
) -> Result<Option<Duration>, calls::Error> {
    let Some(observed) = gather(template, isolated, context) else {
        return Ok(None);
    };
    let plan = plan::plan(&observed, Timestamp::now());
    for step in &plan.steps {
        execute(step, &observed, context).await?;
    }
    if let Some(message) = plan.problem {
        let key = memory_key(&template.uid().unwrap_or_default());
        faults::warn(
            template,
            &key,
            event::GOLDEN_IMAGE_NOT_MADE,
            message,
            context,
        )
        .await;
    }
    Ok(plan.requeue)
}

/// Reads the caches; none for a template that neither asks for golden images nor has any.
fn gather(template: &Arc<SandboxTemplate>, isolated: bool, context: &Context) -> Option<Observed> {
    let namespace = template.namespace().unwrap_or_default();
    let caches = &context.caches;
    let owned = caches
        .sandboxes
        .indexed(&namespace, &template.uid().unwrap_or_default());
    let hash = name_hash(&template.name_any());
    let snapshots = caches.snapshots.indexed(&namespace, &index(&hash));
    if !plan::is_wanted(template) && owned.is_empty() && snapshots.is_empty() {
        return None;
    }
    let name = name(template, context.settings.runtime_image.as_deref());
    let class = template.annotations().get(annotations::SNAPSHOT_CLASS);
    let class = class.and_then(|name| caches.snapshot_classes.get("", name));
    let mut pods = caches.pods.indexed(&namespace, &name_hash(&name));
    pods.retain(|pod| pod.metadata.deletion_timestamp.is_none());
    Some(Observed {
        template: Arc::clone(template),
        sandboxes: owned,
        snapshots,
        pod: pods.pop(),
        member_nodes: member_nodes(template, &namespace, context),
        nodes: caches.nodes.filtered(|_| true),
        isolated,
        uploads: class.is_some_and(|class| class.spec.provisioner == REPOSITORY_PROVISIONER),
        name,
    })
}

/// Returns the nodes with members of this version of the template.
fn member_nodes(
    template: &SandboxTemplate,
    namespace: &str,
    context: &Context,
) -> BTreeSet<String> {
    if !plan::is_wanted(template) {
        return BTreeSet::new();
    }
    let blueprint = Blueprint::of(template);
    let pools = context
        .caches
        .pools
        .indexed(namespace, &template.name_any());
    let members = pools.iter().flat_map(|pool| {
        let uid = pool.uid().unwrap_or_default();
        context.caches.sandboxes.indexed(namespace, &uid)
    });
    let current =
        members.filter(|member| candidates::is_member(member) && blueprint.is_current(member));
    let nodes = current.filter_map(|member| {
        let status = member.status.as_ref()?;
        Some(status.node_name.clone()).filter(|node| !node.is_empty())
    });
    nodes.collect()
}

/// Executes one step; one call per arm. An object that exists, is gone or has changed ends the
/// step: its event queues the next pass.
async fn execute(
    step: &Action,
    observed: &Observed,
    context: &Context,
) -> Result<(), calls::Error> {
    let api = context.api.in_advance(Advance::Calm);
    let namespace = &observed.template.namespace().unwrap_or_default();
    let done = match step {
        Action::CreateSandbox { node, copied } => {
            let (node, copied) = (node.as_deref(), copied.as_deref());
            let object = sandbox::sandbox(&observed.template, &observed.name, node, copied);
            api.create::<Sandbox>(namespace, object).await.map(drop)
        }
        Action::CreateSnapshot { pod, uploads } => {
            let object = sandbox::snapshot(&observed.template, &observed.name, pod, *uploads);
            api.create::<SandboxSnapshot>(namespace, object)
                .await
                .map(drop)
        }
        Action::DeleteSandbox { name, uid } => {
            api.delete::<Sandbox>(namespace, name, uid, None).await
        }
        Action::DeleteSnapshot { name, uid } => {
            api.delete::<SandboxSnapshot>(namespace, name, uid, None)
                .await
        }
    };
    match done {
        Err(error)
            if matches!(
                error.answer(),
                Answer::NotFound | Answer::Conflict | Answer::AlreadyExists
            ) =>
        {
            Ok(())
        }
        other => other,
    }
}
