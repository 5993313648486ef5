//! Condition types and operations on a list of conditions.
//!
//! The rules are those of the Kubernetes API conventions: a list has one entry per type, and
//! `lastTransitionTime` changes only with the status.

use std::borrow::Cow;

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use schemars::{Schema, SchemaGenerator, json_schema};

use crate::documented::documented;

documented! {
    /// Every condition type of this module with its documentation.
    pub const DOCUMENTED;
    /// On a Sandbox, a SandboxClaim or a SandboxNode: the object is usable.
    READY = "Ready";
    /// On a SandboxNode: the node is short of memory or swap, so the sandboxes idle longest sleep
    /// before their idle time is over.
    PRESSURE = "Pressure";
    /// On a SandboxNode: builds of runsc are revoked on the node.
    RUNSC_REVOKED = "RunscRevoked";
    /// On a Sandbox: `operatingMode: Suspended` took effect.
    SUSPENDED = "Suspended";
    /// On a Sandbox: copy of the Pod's condition.
    POD_SCHEDULED = "PodScheduled";
    /// On a Sandbox: the Pod ended by itself.
    FINISHED = "Finished";
    /// On a Sandbox: the memory is in an image and no process runs. Torpor's.
    HIBERNATED = "Hibernated";
    /// On a Sandbox: the running Pod continued from an image. Torpor's.
    RESTORED = "Restored";
    /// On a Sandbox that serves a claim: the claim has arrived in the sandbox. Torpor's.
    BOUND = "Bound";
    /// On a suspended Sandbox with `torpor.dev/archive-after`: why it is not archived yet.
    ARCHIVED = "Archived";
    /// On a SandboxWarmPool: as many members are Ready as `spec.replicas` asks for.
    AVAILABLE = "Available";
    /// On a SandboxWarmPool: no error keeps the pool from making members or its members from
    /// becoming Ready.
    PROGRESSING = "Progressing";
    /// On a SandboxSnapshot: the image is complete and durable.
    COMMITTED = "Committed";
    /// On a SandboxSnapshot: the image is whole in the repository of its SnapshotClass.
    UPLOADED = "Uploaded";
    /// On a SandboxSnapshot: a Pod was restored from the image, or the sandbox continued without
    /// it.
    CONSUMED = "Consumed";
    /// On a Pod, written by the agent: source of the Sandbox's `Hibernated`.
    POD_HIBERNATED = "torpor.dev/Hibernated";
    /// On a Pod, written by the agent: source of the Sandbox's `Restored`.
    POD_RESTORED = "torpor.dev/Restored";
    /// On a Pod, written by the agent: source of the Sandbox's `Bound`.
    POD_BOUND = "torpor.dev/Bound";
    /// On a Pod, written by the agent: the result of the restore is final. The agent writes it
    /// together with that result. It is a readiness gate, so a client that reads the result of a
    /// Ready Pod always finds it.
    POD_RESTORE_SETTLED = "torpor.dev/RestoreSettled";
    /// On a Pod, written before its deletion by the component that disrupts it (Kubernetes, "Pod
    /// disruption conditions").
    POD_DISRUPTION_TARGET = "DisruptionTarget";
}

/// Longest message that the schema of [`list_schema`] accepts. An apiserver counts characters; this
/// crate counts bytes, which are never fewer.
const MESSAGE_LIMIT: usize = 32_768;

/// Status of a condition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    True,
    False,
    Unknown,
}

impl Status {
    /// Returns the API's spelling.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::True => "True",
            Self::False => "False",
            Self::Unknown => "Unknown",
        }
    }
}

/// Condition without a transition time, before it is put into a list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Draft {
    pub type_: &'static str,
    pub status: Cow<'static, str>,
    pub reason: Cow<'static, str>,
    pub message: Cow<'static, str>,
}

impl Draft {
    /// Returns a condition whose status this program decided.
    pub fn new(
        type_: &'static str,
        status: Status,
        reason: impl Into<Cow<'static, str>>,
        message: impl Into<Cow<'static, str>>,
    ) -> Self {
        let status = Cow::Borrowed(status.as_str());
        Self {
            type_,
            status,
            reason: reason.into(),
            message: message.into(),
        }
    }
}

/// Returns the condition of a type.
pub fn find<'a>(conditions: &'a [Condition], type_: &str) -> Option<&'a Condition> {
    conditions.iter().find(|condition| condition.type_ == type_)
}

/// Reports whether the condition of a type is True.
pub fn is_true(conditions: &[Condition], type_: &str) -> bool {
    find(conditions, type_).is_some_and(|condition| condition.status == "True")
}

/// Puts a condition into the list. A new type goes last.
///
/// `lastTransitionTime` changes only with the status, to `now` in whole seconds, as the API keeps
/// times.
pub fn set(
    conditions: &mut Vec<Condition>,
    draft: Draft,
    observed_generation: Option<i64>,
    now: Timestamp,
) {
    let Draft {
        type_,
        status,
        reason,
        message,
    } = draft;
    let (status, reason, message) = (
        status.into_owned(),
        reason.into_owned(),
        within_limit(message.into_owned()),
    );
    let entry = match conditions
        .iter_mut()
        .find(|condition| condition.type_ == type_)
    {
        Some(entry) => entry,
        None => {
            conditions.push(Condition {
                type_: type_.to_owned(),
                status,
                reason,
                message,
                observed_generation,
                last_transition_time: Time(whole_seconds(now)),
            });
            return;
        }
    };
    if entry.status != status {
        entry.status = status;
        entry.last_transition_time = Time(whole_seconds(now));
    }
    entry.reason = reason;
    entry.message = message;
    entry.observed_generation = observed_generation;
}

/// Cuts a message at the limit: an apiserver refuses the whole status for one message that is too
/// long.
fn within_limit(mut message: String) -> String {
    const CUT: &str = "...";
    if message.len() > MESSAGE_LIMIT {
        message.truncate(message.floor_char_boundary(MESSAGE_LIMIT - CUT.len()));
        message.push_str(CUT);
    }
    message
}

/// Removes the condition of a type.
pub fn remove(conditions: &mut Vec<Condition>, type_: &str) {
    conditions.retain(|condition| condition.type_ != type_);
}

fn whole_seconds(time: Timestamp) -> Timestamp {
    // A timestamp within jiff's range has its second within the range, too.
    Timestamp::from_second(time.as_second()).unwrap_or(time)
}

/// Schema of `status.conditions` as the Kubernetes API machinery defines a condition.
///
/// The list-map marker keeps two writers with server-side apply from overwriting each other.
pub fn list_schema(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "array",
        "x-kubernetes-list-type": "map",
        "x-kubernetes-list-map-keys": ["type"],
        "items": {
            "type": "object",
            "properties": {
                "lastTransitionTime": {"type": "string", "format": "date-time"},
                "message": {"type": "string", "maxLength": MESSAGE_LIMIT},
                "observedGeneration": {"type": "integer", "format": "int64", "minimum": 0},
                "reason": {
                    "type": "string",
                    "minLength": 1,
                    "maxLength": 1024,
                    "pattern": "^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$",
                },
                "status": {"type": "string", "enum": ["True", "False", "Unknown"]},
                "type": {
                    "type": "string",
                    "maxLength": 316,
                    "pattern": r"^([a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*/)?(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])$",
                },
            },
            "required": ["lastTransitionTime", "message", "reason", "status", "type"],
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
    }

    #[test]
    fn transition_time_moves_only_with_the_status() {
        let mut list = Vec::new();
        set(
            &mut list,
            Draft::new(READY, Status::False, "A", "a"),
            Some(1),
            at(10),
        );
        set(
            &mut list,
            Draft::new(READY, Status::False, "B", "b"),
            Some(2),
            at(20),
        );
        assert_eq!(list[0].last_transition_time.0, at(10));
        assert_eq!(
            (list[0].reason.as_str(), list[0].observed_generation),
            ("B", Some(2))
        );
        set(
            &mut list,
            Draft::new(READY, Status::True, "C", "c"),
            Some(2),
            at(30),
        );
        assert_eq!(list[0].last_transition_time.0, at(30));
        assert_eq!(list.len(), 1);
    }

    #[test]
    fn transition_time_has_whole_seconds() {
        let mut list = Vec::new();
        let time = Timestamp::from_millisecond(10_900).unwrap();
        set(
            &mut list,
            Draft::new(READY, Status::True, "A", ""),
            None,
            time,
        );
        assert_eq!(
            serde_json::to_value(&list[0].last_transition_time).unwrap(),
            "1970-01-01T00:00:10Z"
        );
    }

    #[test]
    fn a_message_is_cut_at_the_schemas_limit_between_characters() {
        let cut = |message: String| {
            let mut list = Vec::new();
            let draft = Draft::new(READY, Status::False, "A", message);
            set(&mut list, draft, None, at(1));
            list.remove(0).message
        };
        let fits = "a".repeat(MESSAGE_LIMIT);
        assert_eq!(cut(fits.clone()), fits);
        for lead in ["", "a", "aa"] {
            let message = format!("{lead}{}", "\u{20ac}".repeat(MESSAGE_LIMIT));
            let short = cut(message.clone());
            assert!(short.len() <= MESSAGE_LIMIT && short.len() > MESSAGE_LIMIT - 6);
            assert!(message.starts_with(short.strip_suffix("...").unwrap()));
        }
    }

    #[test]
    fn removing_keeps_the_others_in_order() {
        let mut list = Vec::new();
        for type_ in [SUSPENDED, READY, FINISHED] {
            set(
                &mut list,
                Draft::new(type_, Status::True, "A", ""),
                None,
                at(1),
            );
        }
        remove(&mut list, READY);
        let left: Vec<&str> = list.iter().map(|c| c.type_.as_str()).collect();
        assert_eq!(left, [SUSPENDED, FINISHED]);
    }

    #[test]
    fn condition_types_are_listed_once() {
        let types = DOCUMENTED.iter().map(|entry| entry.value);
        let unique: std::collections::BTreeSet<_> = types.collect();
        assert_eq!(unique.len(), DOCUMENTED.len());
    }
}
