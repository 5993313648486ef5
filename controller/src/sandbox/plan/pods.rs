//! Plans the Pod. A Sandbox has exactly one, which it owns by UID. Foreign Pods are never changed.

use std::sync::Arc;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use serde_json::json;
use torpor_api::annotations;

use super::{
    Action, Area, Plan,
    claims::{not_adoptable, owned_by_other},
    memory,
};
use crate::owners::owner_reference;
use crate::sandbox::{
    dereference::Observed,
    metadata,
    validate::{Desired, PodState, may_adopt},
};

/// Plans the Pod.
pub(super) fn plan(plan: &mut Plan, desired: &Desired<'_>, observed: &Observed, now: Timestamp) {
    if let PodState::Several(count) = desired.pod {
        plan.several_pods = Some(count);
        return;
    }
    let annotated = desired.sandbox.annotations().get(annotations::POD_NAME);
    // A name that this pass writes again need not be removed first.
    let forget = desired.pod_name_is_stale
        && (desired.suspended
            || !matches!(desired.pod, PodState::Absent)
            || annotated != Some(&desired.name));
    if forget {
        plan.step(Area::Pod, Action::ForgetPodName);
    }
    if desired.suspended {
        suspended(plan, desired, observed, now);
    } else {
        running(plan, desired, observed, now);
    }
}

fn suspended(plan: &mut Plan, desired: &Desired<'_>, observed: &Observed, now: Timestamp) {
    match &desired.pod {
        PodState::Ours(pod) => {
            plan.pod = Some(Arc::clone(pod));
            memory::suspend(plan, desired, observed, pod, now);
            memory::record(plan, desired, observed, pod);
        }
        PodState::Unowned(pod) | PodState::Foreign(pod, _) => {
            plan.pod = Some(Arc::clone(pod));
            forget_pod_name(plan, desired);
            memory::asleep(plan, desired, observed, now);
        }
        PodState::Absent => memory::asleep(plan, desired, observed, now),
        PodState::Several(_) => {}
    }
}

fn forget_pod_name(plan: &mut Plan, desired: &Desired<'_>) {
    let annotated = desired
        .sandbox
        .annotations()
        .contains_key(annotations::POD_NAME);
    if annotated
        && !plan
            .steps
            .iter()
            .any(|step| step.action == Action::ForgetPodName)
    {
        plan.step(Area::Pod, Action::ForgetPodName);
    }
}

fn running(plan: &mut Plan, desired: &Desired<'_>, observed: &Observed, now: Timestamp) {
    match &desired.pod {
        PodState::Foreign(pod, owner) => {
            forget_pod_name(plan, desired);
            let why = owned_by_other("pod", &pod.name_any(), owner, &desired.name);
            plan.refuse(Area::Pod, why);
        }
        PodState::Unowned(pod) if !may_adopt(&**pod, &desired.hash) => {
            plan.refuse(Area::Pod, not_adoptable("pod", &pod.name_any()));
        }
        PodState::Unowned(pod) => {
            plan.pod = Some(Arc::clone(pod));
            let mut patch = metadata::patch_for(pod, desired.sandbox, &[]).unwrap_or_default();
            let mut owners = pod.owner_references().to_vec();
            owners.push(owner_reference(desired.sandbox));
            patch["metadata"]["ownerReferences"] = json!(owners);
            patch_pod(plan, pod, patch);
        }
        PodState::Ours(pod) => {
            plan.pod = Some(Arc::clone(pod));
            let torpor = memory::annotations_for_pod(desired, pod);
            if let Some(patch) = metadata::patch_for(pod, desired.sandbox, &torpor) {
                patch_pod(plan, pod, patch);
            }
            let known = desired
                .sandbox
                .annotations()
                .contains_key(annotations::POD_NAME);
            if !known && pod.metadata.deletion_timestamp.is_none() {
                plan.step(Area::Pod, Action::RecordPodName(pod.name_any()));
            }
            memory::awake(plan, desired, observed, pod, now);
            memory::record(plan, desired, observed, pod);
        }
        PodState::Absent => match &desired.template {
            Ok(_) => memory::start(plan, desired, observed, now),
            Err(why) => plan.refuse(Area::Pod, format!("podTemplate.spec: {why}")),
        },
        PodState::Several(_) => {}
    }
}

/// Plans a patch of the Pod. With the UID the apiserver refuses it if another Pod has the name.
pub(super) fn patch_pod(plan: &mut Plan, pod: &Pod, mut patch: serde_json::Value) {
    patch["metadata"]["uid"] = json!(pod.uid());
    plan.step(
        Area::Pod,
        Action::PatchPod {
            name: pod.name_any(),
            patch,
        },
    );
}
