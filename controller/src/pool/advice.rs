//! What the user of a pool should hear: that it does not come on, and what its template could have though nothing is wrong. Pure.

use std::{sync::Arc, time::Duration};

use k8s_openapi::api::node::v1::RuntimeClass;
use kube::ResourceExt;
use torpor_api::{SandboxNode, SandboxTemplate, node, reasons::event};

use crate::events::{AGAIN, Note, Severity};

/// For a pool whose members find no node or get no Pod, and for one whose members come on again. `told` is how long ago the first was told last, unless the second was told since.
pub fn progress(stalled: Option<&str>, told: Option<Duration>) -> Option<Note> {
    match (stalled, told) {
        (Some(why), told) if told.is_none_or(|ago| ago >= AGAIN) => Some(Note {
            severity: Severity::Warning,
            reason: event::WARM_POOL_NOT_PROGRESSING,
            message: why.to_owned(),
        }),
        (None, Some(_)) => Some(Note {
            severity: Severity::Normal,
            reason: event::WARM_POOL_PROGRESSING,
            message: "Members of the pool are scheduled again".to_owned(),
        }),
        _ => None,
    }
}

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

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case::it_comes_on(None, None, None)]
    #[case::it_stalls(Some("full"), None, Some("WarmPoolNotProgressing"))]
    #[case::it_was_told_just_now(Some("full"), Some(0), None)]
    #[case::it_was_told_a_while_ago(Some("full"), Some(54), None)]
    #[case::the_event_is_soon_gone(Some("full"), Some(55), Some("WarmPoolNotProgressing"))]
    #[case::it_was_told_long_ago(Some("full"), Some(600), Some("WarmPoolNotProgressing"))]
    #[case::it_comes_on_again(None, Some(1), Some("WarmPoolProgressing"))]
    #[case::it_comes_on_after_long(None, Some(600), Some("WarmPoolProgressing"))]
    fn that_a_pool_does_not_come_on_is_told_about_every_hour(
        #[case] stalled: Option<&str>,
        #[case] told_minutes_ago: Option<u64>,
        #[case] expected: Option<&str>,
    ) {
        let told = told_minutes_ago.map(|minutes| Duration::from_secs(60 * minutes));
        let note = progress(stalled, told);
        assert_eq!(note.as_ref().map(|note| note.reason), expected);
        if let (Some(why), Some(note)) = (stalled, note) {
            assert_eq!(note.message, why);
        }
    }
}
