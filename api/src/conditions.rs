//! Condition types, and the few operations on a list of conditions. The rules are those of the Kubernetes API conventions: one entry per type, and
//! `lastTransitionTime` moves only with the status.

use std::borrow::Cow;

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use schemars::{Schema, SchemaGenerator, json_schema};

/// Sandbox, SandboxClaim, SandboxNode.
pub const READY: &str = "Ready";
/// SandboxNode: the node is short of memory or swap, and sandboxes that have been idle longest sleep before their time.
pub const PRESSURE: &str = "Pressure";
/// SandboxNode: builds of runsc are revoked on it.
pub const RUNSC_REVOKED: &str = "RunscRevoked";
/// Sandbox: `operatingMode: Suspended` took effect.
pub const SUSPENDED: &str = "Suspended";
/// Sandbox: copy of the Pod's condition.
pub const POD_SCHEDULED: &str = "PodScheduled";
/// Sandbox: the Pod ended by itself.
pub const FINISHED: &str = "Finished";
/// Sandbox: memory lies in an image, no process runs. Torpor's.
pub const HIBERNATED: &str = "Hibernated";
/// Sandbox: the running Pod continued from an image. Torpor's.
pub const RESTORED: &str = "Restored";
/// SandboxWarmPool: as many members are Ready as are asked for.
pub const AVAILABLE: &str = "Available";
/// SandboxWarmPool: nothing keeps it from making its members, and them from becoming Ready.
pub const PROGRESSING: &str = "Progressing";
/// SandboxSnapshot: the image is complete and durable.
pub const COMMITTED: &str = "Committed";
/// SandboxSnapshot: the image is older than the sandbox, since that went on without it.
pub const CONSUMED: &str = "Consumed";
/// Pod, written by the agent; the Sandbox shows it as [`HIBERNATED`].
pub const POD_HIBERNATED: &str = "torpor.dev/Hibernated";
/// Pod, written by the agent; the Sandbox shows it as [`RESTORED`].
pub const POD_RESTORED: &str = "torpor.dev/Restored";
/// Pod, written by the agent together with how the restore went, once that is final. A readiness gate: who reads that as soon as the Pod is Ready finds it.
pub const POD_RESTORE_SETTLED: &str = "torpor.dev/RestoreSettled";
/// Pod, written by whoever disrupts it, before its deletion (Kubernetes, "Pod disruption conditions").
pub const POD_DISRUPTION_TARGET: &str = "DisruptionTarget";

/// Every condition type of this module.
pub const ALL: [&str; 16] = [
    READY,
    PRESSURE,
    RUNSC_REVOKED,
    SUSPENDED,
    POD_SCHEDULED,
    FINISHED,
    HIBERNATED,
    RESTORED,
    AVAILABLE,
    PROGRESSING,
    COMMITTED,
    CONSUMED,
    POD_HIBERNATED,
    POD_RESTORED,
    POD_RESTORE_SETTLED,
    POD_DISRUPTION_TARGET,
];

/// The longest message that the schema of [`list_schema`] takes. An apiserver counts characters, and who counts bytes finds no more of them.
const MESSAGE_LIMIT: usize = 32_768;

/// Status of a condition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    True,
    False,
    Unknown,
}

impl Status {
    /// The API's spelling.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::True => "True",
            Self::False => "False",
            Self::Unknown => "Unknown",
        }
    }
}

/// A condition before it is put into a list: no transition time yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Draft {
    pub type_: &'static str,
    pub status: Cow<'static, str>,
    pub reason: Cow<'static, str>,
    pub message: Cow<'static, str>,
}

impl Draft {
    /// A condition with a status that this program decided.
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

/// The condition of a type.
pub fn find<'a>(conditions: &'a [Condition], type_: &str) -> Option<&'a Condition> {
    conditions.iter().find(|condition| condition.type_ == type_)
}

/// Whether the condition of a type is True.
pub fn is_true(conditions: &[Condition], type_: &str) -> bool {
    find(conditions, type_).is_some_and(|condition| condition.status == "True")
}

/// Puts a condition into the list: a new type goes last; `lastTransitionTime` changes (to `now`, whole seconds, as the API keeps them) only with the status.
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

/// An apiserver refuses the whole status for one message that is too long.
fn within_limit(mut message: String) -> String {
    const CUT: &str = "...";
    if message.len() > MESSAGE_LIMIT {
        message.truncate(message.floor_char_boundary(MESSAGE_LIMIT - CUT.len()));
        message.push_str(CUT);
    }
    message
}

/// Takes the condition of a type out of the list.
pub fn remove(conditions: &mut Vec<Condition>, type_: &str) {
    conditions.retain(|condition| condition.type_ != type_);
}

fn whole_seconds(time: Timestamp) -> Timestamp {
    // A timestamp within jiff's range has its second within the range too.
    Timestamp::from_second(time.as_second()).unwrap_or(time)
}

/// Schema of `status.conditions` as the Kubernetes API machinery defines a condition, with the list-map marker, so that two writers with server-side apply do not
/// overwrite each other.
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
    fn a_message_is_cut_at_the_limit_of_the_schema_and_in_no_character() {
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
        let unique: std::collections::BTreeSet<_> = ALL.iter().collect();
        assert_eq!(unique.len(), ALL.len());
    }
}
