//! What the user of a pool should hear: that it does not come on, and what its template could have though nothing is wrong. Pure.

use std::{sync::Arc, time::Duration};

use k8s_openapi::api::node::v1::RuntimeClass;
use kube::ResourceExt;
use torpor_api::{SandboxNode, SandboxTemplate, node, reasons::event};

use crate::events::{AGAIN, Note, Severity};

/// What the user of a pool was told of it last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Told {
    /// That it does not come on, so long ago.
    Stalls(Duration),
    /// The same, and since then no member was held: what somebody did may have helped, or not.
    Eased,
}

/// For a pool whose members find no node or get no Pod, and for one none of whose members waits for that any more (`placed`). That none is held is not enough: members that were made
/// for a changed template have their time first, and then may be held as those before them. `told` is `None` where the first was never told, or the second since.
pub fn progress(stalled: Option<&str>, placed: bool, told: Option<Told>) -> Option<Note> {
    match (stalled, told) {
        (Some(_), Some(Told::Stalls(ago))) if ago < AGAIN => None,
        (Some(why), _) => Some(Note {
            severity: Severity::Warning,
            reason: event::WARM_POOL_NOT_PROGRESSING,
            message: why.to_owned(),
        }),
        (None, Some(_)) if placed => Some(Note {
            severity: Severity::Normal,
            reason: event::WARM_POOL_PROGRESSING,
            message: "No member of the pool waits for a Pod or a node any more".to_owned(),
        }),
        (None, _) => None,
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

    fn minutes_ago(minutes: u64) -> Option<Told> {
        Some(Told::Stalls(Duration::from_secs(60 * minutes)))
    }

    #[rstest]
    #[case::it_stalls(None, true)]
    #[case::it_was_told_just_now(minutes_ago(0), false)]
    #[case::it_was_told_a_while_ago(minutes_ago(54), false)]
    #[case::the_event_is_soon_gone(minutes_ago(55), true)]
    #[case::it_was_told_long_ago(minutes_ago(600), true)]
    #[case::what_was_done_has_not_helped(Some(Told::Eased), true)]
    fn that_a_pool_does_not_come_on_is_told_about_every_hour(
        #[case] told: Option<Told>,
        #[case] again: bool,
    ) {
        let note = progress(Some("full"), false, told);
        let expected = again.then_some(("WarmPoolNotProgressing", "full"));
        let said = note.as_ref();
        assert_eq!(said.map(|note| (note.reason, &*note.message)), expected);
    }

    #[rstest]
    #[case::it_never_stalled(true, None, false)]
    #[case::at_once(true, minutes_ago(1), true)]
    #[case::after_long(true, minutes_ago(600), true)]
    #[case::after_a_while(true, Some(Told::Eased), true)]
    #[case::new_members_have_their_time(false, minutes_ago(1), false)]
    #[case::and_still_have_it(false, Some(Told::Eased), false)]
    fn that_a_pool_comes_on_again_is_told_once_no_member_waits(
        #[case] placed: bool,
        #[case] told: Option<Told>,
        #[case] expected: bool,
    ) {
        let note = progress(None, placed, told);
        let expected = expected.then_some("WarmPoolProgressing");
        assert_eq!(note.map(|note| note.reason), expected);
    }
}
