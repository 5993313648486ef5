//! Chooses the nodes that may restore an image: the one that holds it, and all others that fit, if
//! the image is in a repository or its node gives it to others.
//!
//! A node claims an image in its SandboxNode before it fetches it (`status.fetched`). As long as
//! such a claim is open, no other Pod is made for the image.

use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use serde_json::json;
use torpor_api::{
    SandboxNode, SandboxSnapshot, annotations, conditions, name_hash,
    node::FetchState,
    reasons::{restored, snapshot as snapshot_reasons},
    taker::{TakenBy, Taker},
};

use super::{
    super::{Action, Area, Plan},
    image_missing, is_terminating,
    location::{LostNode, lost, out_of_reach},
    node_of,
    origin::pod_node,
    pod_condition,
    resume::Obstacle,
};
use crate::sandbox::{dereference::Observed, pod_spec, validate::Desired};

/// Most nodes in the affinity of a Pod.
const MOST_NODES: usize = 64;

/// Reports whether a reason means that the Sandbox has to wait, whatever its policy is.
pub(super) fn waits(reason: &str) -> bool {
    matches!(reason, restored::IMAGE_CLAIMED | restored::UPLOADING)
}

/// Returns the node of the Pod that was made to continue from an image.
pub(in crate::sandbox) fn node_of_taker(snapshot: &SandboxSnapshot) -> Option<String> {
    match TakenBy::of(snapshot) {
        TakenBy::Pod(taker) => Some(taker.node_name),
        TakenBy::Nobody | TakenBy::Unknown => None,
    }
}

/// Records the Pod on the snapshot that it continues from, once it has a node.
pub(super) fn record_taker(plan: &mut Plan, snapshot: &SandboxSnapshot, pod: &Pod) {
    let fetches = pod.annotations().contains_key(annotations::RESTORE_DIGEST);
    let Some((node, uid)) = node_of(pod).zip(pod.uid()).filter(|_| fetches) else {
        return;
    };
    let taker = Taker {
        node_name: node.to_owned(),
        uid,
    };
    if matches!(TakenBy::of(snapshot), TakenBy::Pod(known) if known == taker) {
        return;
    }
    let patch = json!({"metadata": {
        "resourceVersion": snapshot.resource_version(),
        "annotations": {annotations::TAKEN_BY: taker.to_annotation()},
    }});
    let name = snapshot.name_any();
    plan.step(Area::Pod, Action::PatchSnapshot { name, patch });
}

/// Returns why the memory has run on in a Pod elsewhere that is gone, if it has.
pub(super) fn continued(observed: &Observed, snapshot: &SandboxSnapshot) -> Option<String> {
    let TakenBy::Pod(taker) = TakenBy::of(snapshot) else {
        return None;
    };
    let consumed = state_of(observed, snapshot, &taker) == Some(FetchState::Consumed);
    let Taker { node_name, uid } = taker;
    consumed.then(|| format!(
        "Pod {uid} on node {node_name:?} continued from the image and is gone; the memory that it had since is lost"
    ))
}

/// Returns why the memory of an image has run on in a Pod elsewhere, or may have.
pub(super) fn may_have_continued(
    observed: &Observed,
    snapshot: &SandboxSnapshot,
) -> Option<String> {
    let origin = pod_node(observed, snapshot).map_or("", String::as_str);
    continued(observed, snapshot)
        .or_else(|| open_claim(observed, snapshot, origin).map(|(_, message)| message))
}

/// Returns what the node of the recorded Pod reports about that Pod and the image.
fn state_of(observed: &Observed, snapshot: &SandboxSnapshot, taker: &Taker) -> Option<FetchState> {
    let mut claims = claims(observed, snapshot);
    let (_, claim) =
        claims.find(|(node, claim)| claim.pod_uid == taker.uid && *node == taker.node_name)?;
    Some(claim.state)
}

/// Returns the claims on an image, each with its node.
fn claims<'a>(
    observed: &'a Observed,
    snapshot: &'a SandboxSnapshot,
) -> impl Iterator<Item = (String, &'a torpor_api::node::FetchedImage)> {
    let status = snapshot.status.as_ref();
    let image = status.and_then(|status| status.image_id.as_deref());
    let namespace = snapshot.metadata.namespace.as_deref().unwrap_or_default();
    let nodes = observed.cluster.iter().map(|candidate| &candidate.node);
    nodes.flat_map(move |node| {
        let image = image.unwrap_or_default();
        let fetched = node.fetched(namespace, image);
        fetched.map(move |claim| (node.name_any(), claim))
    })
}

/// Returns the nodes that may restore the image, `origin` first if it can.
pub(super) fn nodes(
    desired: &Desired<'_>,
    observed: &Observed,
    snapshot: &SandboxSnapshot,
    origin: &str,
    copy: bool,
) -> Result<Vec<String>, Obstacle> {
    // A Pod elsewhere may have taken the image also if it can be fetched no more.
    if !copy && let Some(claim) = open_claim(observed, snapshot, origin) {
        return Err(claim);
    }
    let here = origin_can(desired, observed, snapshot, origin);
    if !snapshot.is_uploaded() && !is_served(observed, snapshot, origin) {
        here?;
        return match is_awaited(observed, snapshot, origin) {
            true => Err(uploading(snapshot, origin)),
            false => Ok(vec![origin.to_owned()]),
        };
    }
    if !copy && may_be_taken_on(snapshot, origin) {
        return here.map(|()| vec![origin.to_owned()]);
    }
    let mut others = fitting(desired, observed, snapshot);
    others.retain(|node| node != origin);
    if !snapshot.is_uploaded() {
        others.retain(|node| serves(observed, node));
    }
    let nodes: Vec<String> = here
        .as_ref()
        .ok()
        .map(|()| origin.to_owned())
        .into_iter()
        .chain(others)
        .collect();
    match (nodes.is_empty(), here) {
        (true, Err((reason, message))) => {
            let obstacle = obstacles(desired, observed, snapshot, Some(origin)).next();
            let why = obstacle.map_or_else(String::new, |(_, why)| format!(": {why}"));
            let message = format!(
                "{message}. Other nodes can fetch the image, but no other node can restore it{why}"
            );
            Err((reason, message))
        }
        _ => Ok(nodes.into_iter().take(MOST_NODES).collect()),
    }
}

/// Returns the nodes that may restore an archive, which no node holds.
pub(super) fn nodes_of_archive(
    desired: &Desired<'_>,
    observed: &Observed,
    snapshot: &SandboxSnapshot,
) -> Result<Vec<String>, Obstacle> {
    if !snapshot.is_uploaded() {
        let uploaded = conditions::find(snapshot.conditions(), conditions::UPLOADED);
        let why = uploaded.map_or("", |uploaded| &uploaded.message);
        let message = format!("Archive {:?} is not whole: {why}", snapshot.name_any());
        return Err((restored::IMAGE_MISSING, message));
    }
    let mut nodes = fitting(desired, observed, snapshot);
    nodes.truncate(MOST_NODES);
    if !nodes.is_empty() {
        return Ok(nodes);
    }
    let obstacle = obstacles(desired, observed, snapshot, None).next();
    Err(obstacle.unwrap_or_else(|| {
        let message = "No node of the cluster has an agent of Torpor that reports".to_owned();
        (restored::NODE_UNAVAILABLE, message)
    }))
}

/// Returns why reporting nodes, all but `except`, cannot restore an image.
fn obstacles<'a>(
    desired: &'a Desired<'_>,
    observed: &'a Observed,
    snapshot: &'a SandboxSnapshot,
    except: Option<&'a str>,
) -> impl Iterator<Item = Obstacle> + 'a {
    let reporting = observed.cluster.iter().filter(|one| !one.is_silent);
    let asked = reporting.filter(move |one| except != Some(one.node.name_any().as_str()));
    asked.filter_map(|one| fits(desired, observed, snapshot, &one.node).err())
}

/// Returns the reporting nodes that can restore an image, in another order for each Sandbox, so
/// that not all go to the same nodes of a large cluster.
fn fitting(desired: &Desired<'_>, observed: &Observed, snapshot: &SandboxSnapshot) -> Vec<String> {
    let nodes = observed.cluster.iter().filter(|candidate| {
        !candidate.is_silent && fits(desired, observed, snapshot, &candidate.node).is_ok()
    });
    let named = pod_spec::named_nodes(desired.sandbox.spec.pod_template.spec.json());
    let mut nodes: Vec<String> = nodes.map(|candidate| candidate.node.name_any()).collect();
    nodes.retain(|node| named.as_ref().is_none_or(|named| named.contains(node)));
    nodes.sort_by_key(|node| name_hash(&format!("{}/{node}", desired.name)));
    nodes
}

/// Returns why the node that holds the image cannot restore it.
///
/// The node's agent reports what only the node can see (damage, a consumed image).
fn origin_can(
    desired: &Desired<'_>,
    observed: &Observed,
    snapshot: &SandboxSnapshot,
    origin: &str,
) -> Result<(), Obstacle> {
    if let Some(lost) = lost(observed, snapshot) {
        let message = out_of_reach(observed, snapshot, lost);
        return Err((restored::NODE_UNAVAILABLE, message));
    }
    if snapshot.is_missing() {
        let message = image_missing(observed, snapshot);
        return Err((restored::IMAGE_MISSING, message));
    }
    match observed.nodes.get(origin) {
        Some(node) => fits(desired, observed, snapshot, node),
        None => Err(cannot_restore(desired, observed, origin)),
    }
}

fn cannot_restore(desired: &Desired<'_>, observed: &Observed, node: &str) -> Obstacle {
    let handler = handler(desired, observed);
    let runtime = handler.map_or("the default runtime", String::as_str);
    let message = format!("Node {node:?} cannot restore the image with {runtime}");
    (restored::NODE_UNAVAILABLE, message)
}

fn handler<'a>(desired: &Desired<'_>, observed: &'a Observed) -> Option<&'a String> {
    let class = desired
        .sandbox
        .spec
        .pod_template
        .spec
        .runtime_class_name()?;
    observed.handlers.get(class)
}

/// Returns why a node cannot restore the image.
fn fits(
    desired: &Desired<'_>,
    observed: &Observed,
    snapshot: &SandboxSnapshot,
    node: &SandboxNode,
) -> Result<(), Obstacle> {
    let name = node.name_any();
    let handler = handler(desired, observed);
    if !handler.is_some_and(|handler| node.capabilities(handler).restore) {
        return Err(cannot_restore(desired, observed, &name));
    }
    let lacks = node.lacks(snapshot);
    if lacks.is_empty() {
        return Ok(());
    }
    let lacks = lacks.join("; ");
    let message = format!("Node {name:?} lacks what the image was made with: {lacks}");
    Err((restored::FINGERPRINT_MISMATCH, message))
}

/// Returns why it is not known whether a Pod that is gone has run from the image.
///
/// Only the Pod that the controller recorded counts: an agent that was taken over claims what it
/// likes. That Pod's node has to answer; silence is no answer. If the record is not complete, each
/// claim counts.
fn open_claim(observed: &Observed, snapshot: &SandboxSnapshot, origin: &str) -> Option<Obstacle> {
    let (node, pod) = match TakenBy::of(snapshot) {
        TakenBy::Nobody => return None,
        TakenBy::Pod(taker) if taker.node_name == origin => return None,
        TakenBy::Pod(taker) => {
            if state_of(observed, snapshot, &taker) == Some(FetchState::Released) {
                return None;
            }
            (taker.node_name, taker.uid)
        }
        TakenBy::Unknown => {
            let mut claims = claims(observed, snapshot);
            let (node, claim) = claims.find(|(_, one)| one.state != FetchState::Released)?;
            (node, claim.pod_uid.clone())
        }
    };
    if let Some(lost) = lost_claimant(observed, &node) {
        let message = format!(
            "Pod {pod}, which is gone, may have continued from the image on node {node:?}, {}",
            lost.clause()
        );
        return Some((restored::NODE_UNAVAILABLE, message));
    }
    let message = format!(
        "Pod {pod} was made to continue from the image on node {node:?} and is gone; the controller waits until the node's agent has reported whether that Pod ran"
    );
    Some((restored::IMAGE_CLAIMED, message))
}

/// Reports whether the node that holds an image gives it to other nodes.
pub(super) fn is_served(observed: &Observed, snapshot: &SandboxSnapshot, origin: &str) -> bool {
    snapshot.is_committed()
        && !snapshot.is_missing()
        && lost(observed, snapshot).is_none()
        && serves(observed, origin)
}

fn serves(observed: &Observed, node: &str) -> bool {
    let mut reporting = observed.cluster.iter().filter(|one| !one.is_silent);
    let found = reporting.find(|one| one.node.name_any() == node);
    found.is_some_and(|one| one.node.serves_images())
}

/// Reports whether a Pod, which is no copy, waits for the image's own node, and other nodes can
/// fetch the image since the Pod was made.
pub(super) fn has_more_places(
    desired: &Desired<'_>,
    observed: &Observed,
    snapshot: &SandboxSnapshot,
    pod: &Pod,
) -> bool {
    let scheduled = pod_condition(pod, conditions::POD_SCHEDULED, conditions::POD_SCHEDULED);
    let waits = node_of(pod).is_none()
        && !is_terminating(pod)
        && !pod.annotations().contains_key(annotations::RESTORE_DIGEST)
        && scheduled.is_some_and(|scheduled| scheduled.reason == "Unschedulable");
    let origin = pod_node(observed, snapshot).filter(|_| waits);
    origin.is_some_and(|origin| {
        let nodes = nodes(desired, observed, snapshot, origin, false);
        nodes.is_ok_and(|nodes| nodes.iter().any(|node| node != origin))
    })
}

/// Returns why a node that has to answer for a Pod is lost, if it is.
fn lost_claimant(observed: &Observed, name: &str) -> Option<LostNode> {
    let mut reporting = observed.cluster.iter().map(|candidate| &candidate.node);
    let reports = reporting.any(|node| node.name_any() == name && node.status.is_some());
    match observed.gone_nodes.contains(name) {
        true => Some(LostNode::Gone),
        false => (!reports).then_some(LostNode::NoAgent),
    }
}

/// Reports whether a Pod may have taken the image on the image's own node, where only that node's
/// mark on the image tells.
fn may_be_taken_on(snapshot: &SandboxSnapshot, origin: &str) -> bool {
    match TakenBy::of(snapshot) {
        TakenBy::Nobody => false,
        TakenBy::Unknown => true,
        TakenBy::Pod(taker) => taker.node_name == origin,
    }
}

/// Reports whether the image will be in a repository soon and its node takes no Pods until then.
fn is_awaited(observed: &Observed, snapshot: &SandboxSnapshot, origin: &str) -> bool {
    let upload = snapshot.upload_reason();
    let fails = upload == Some(snapshot_reasons::INVALID_CLASS);
    observed.cordoned.contains(origin) && upload.is_some() && !fails
}

fn uploading(snapshot: &SandboxSnapshot, origin: &str) -> Obstacle {
    let message = format!(
        "Node {origin:?}, which holds the image of SandboxSnapshot {:?}, takes no Pods; the Sandbox continues elsewhere once the image is uploaded",
        snapshot.name_any()
    );
    (restored::UPLOADING, message)
}
