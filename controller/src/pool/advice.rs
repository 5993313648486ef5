//! What the user of a pool should hear though nothing is wrong. Pure.

use std::sync::Arc;

use k8s_openapi::api::node::v1::RuntimeClass;
use kube::ResourceExt;
use torpor_api::{SandboxNode, SandboxTemplate, node, reasons::event};

use crate::events::{Note, Severity};

/// For a template that asks for nothing of Torpor's where the cluster has a RuntimeClass that keeps memory: whoever wrote it for upstream's controller may not know.
pub fn plain_template(
    template: &SandboxTemplate,
    classes: &[Arc<RuntimeClass>],
    nodes: &[Arc<SandboxNode>],
) -> Option<Note> {
    if !template.spec.pod_template.is_plain(None) {
        return None;
    }
    let classes = classes.iter().map(AsRef::as_ref);
    let class = node::hibernating_class(classes, nodes.iter().map(AsRef::as_ref))?;
    Some(Note {
        severity: Severity::Normal,
        reason: event::RUNTIME_NOT_NAMED,
        message: format!(
            "SandboxTemplate {:?} names no RuntimeClass: its sandboxes lose their memory when they are suspended, as with upstream. To keep it, set \
             spec.podTemplate.spec.runtimeClassName to {class:?} there and delete this pool's members, which are made anew; or annotate spec.podTemplate with \
             torpor.dev/suspension-strategy: Stop",
            template.name_any()
        ),
    })
}
