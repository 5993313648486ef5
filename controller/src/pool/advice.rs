//! Events for the user of a pool: lack of progress, and a RuntimeClass that its template could
//! name. Pure.

use std::{sync::Arc, time::Duration};

use k8s_openapi::api::node::v1::RuntimeClass;
use kube::ResourceExt;
use torpor_api::{SandboxNode, SandboxTemplate, SandboxWarmPool, node, reasons::event};

use crate::events::{Note, REPEAT_INTERVAL, Severity};

/// Last Event about a pool's progress.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Published {
    /// The pool stalled, so long ago.
    Stalled(Duration),
    /// The pool stalled, and since then no member was held; a change may have helped, or not.
    Eased,
}

/// Returns the Event for a pool that stalls, and for a pool without waiting members after a stall
/// (`placed`).
///
/// No held members are not enough for the latter: members created for a changed template first have
/// their grace period, and then may be held as those before them. `published` is `None` without an
/// Event about a stall, or after the Event about its end.
pub fn progress(stalled: Option<&str>, placed: bool, published: Option<Published>) -> Option<Note> {
    match (stalled, published) {
        (Some(_), Some(Published::Stalled(ago))) if ago < REPEAT_INTERVAL => None,
        (Some(why), _) => Some(Note {
            severity: Severity::Warning,
            reason: event::WARM_POOL_NOT_PROGRESSING,
            message: why.to_owned(),
        }),
        (None, Some(_)) if placed => Some(Note {
            severity: Severity::Normal,
            reason: event::WARM_POOL_PROGRESSING,
            message: "No member of the pool waits for a Pod or a node".to_owned(),
        }),
        (None, _) => None,
    }
}

/// Returns the Event for a pool whose heat cannot be read.
pub fn heat(pool: &SandboxWarmPool) -> Option<Note> {
    let invalid = super::heat::of(pool)?.err()?;
    Some(Note {
        severity: Severity::Warning,
        reason: event::INVALID_ANNOTATION,
        message: format!("{invalid}; the default applies"),
    })
}

/// Returns the Event for a template without any setting of Torpor's, in a cluster with a
/// RuntimeClass that keeps memory: its author may not know of it.
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
             spec.podTemplate.spec.runtimeClassName to {class:?} there and delete this pool's members, which are then replaced; or annotate spec.podTemplate with \
             torpor.dev/suspension-strategy: Stop",
            template.name_any()
        ),
    })
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    fn minutes_ago(minutes: u64) -> Option<Published> {
        Some(Published::Stalled(Duration::from_secs(60 * minutes)))
    }

    #[rstest]
    #[case::first_stall(None, true)]
    #[case::just_published(minutes_ago(0), false)]
    #[case::published_a_while_ago(minutes_ago(54), false)]
    #[case::event_expires_soon(minutes_ago(55), true)]
    #[case::published_long_ago(minutes_ago(600), true)]
    #[case::stalled_again(Some(Published::Eased), true)]
    fn a_stall_is_published_about_every_hour(
        #[case] published: Option<Published>,
        #[case] again: bool,
    ) {
        let note = progress(Some("full"), false, published);
        let expected = again.then_some(("WarmPoolNotProgressing", "full"));
        let published = note.as_ref();
        assert_eq!(
            published.map(|note| (note.reason, &*note.message)),
            expected
        );
    }

    #[rstest]
    #[case::never_stalled(true, None, false)]
    #[case::at_once(true, minutes_ago(1), true)]
    #[case::after_long(true, minutes_ago(600), true)]
    #[case::after_a_while(true, Some(Published::Eased), true)]
    #[case::new_members_within_their_grace_period(false, minutes_ago(1), false)]
    #[case::new_members_still_within_it(false, Some(Published::Eased), false)]
    fn the_end_of_a_stall_is_published_once_no_member_waits(
        #[case] placed: bool,
        #[case] published: Option<Published>,
        #[case] expected: bool,
    ) {
        let note = progress(None, placed, published);
        let expected = expected.then_some("WarmPoolProgressing");
        assert_eq!(note.map(|note| note.reason), expected);
    }
}
