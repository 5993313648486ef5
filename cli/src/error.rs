//! Errors of the commands. Each names the operation, its object and the remedy.

use std::time::Duration;

use kube::core::Status;
use torpor_api::answers::is_of_another;

use crate::units;

/// Failure of a command.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot use the kubeconfig{of}")]
    Kubeconfig {
        /// ` FILE`, ` context NAME`, or nothing.
        of: String,
        #[source]
        source: Box<kube::config::KubeconfigError>,
    },
    #[error("cannot use the credentials of the kubeconfig")]
    Client(#[source] Box<kube::Error>),
    #[error("cannot {doing}")]
    Api {
        doing: String,
        #[source]
        source: Box<kube::Error>,
    },
    #[error("cannot {doing}: the apiserver did not answer in {}", units::span(*limit))]
    NoAnswer { doing: String, limit: Duration },
    #[error("there is no Sandbox {name} in namespace {namespace}")]
    NoSandbox { namespace: String, name: String },
    #[error("there is no node {name}")]
    NoNode { name: String },
    #[error("Sandbox {name}: {message}")]
    Refused { name: String, message: String },
    #[error(
        "Sandbox {name}: not yet {goal} after {}; {last}. The operation continues; to follow it: `kubectl torpor why {name} -n {namespace}`",
        units::span(*limit)
    )]
    Timeout {
        namespace: String,
        name: String,
        goal: &'static str,
        limit: Duration,
        last: String,
    },
    #[error(
        "Sandbox {name}: the request is written, but its progress cannot be watched ({why}); to see its state: `kubectl torpor get {name} -n {namespace}`"
    )]
    Unwatched {
        namespace: String,
        name: String,
        why: String,
    },
    #[error("cannot write the output")]
    Output(#[source] std::io::Error),
    #[error("cannot write the output as {format}: {message}")]
    Format {
        format: &'static str,
        message: String,
    },
}

impl Error {
    /// Returns the error of a call that the apiserver refused or did not receive. `doing` follows
    /// "cannot".
    pub fn api(doing: impl Into<String>, source: kube::Error) -> Self {
        Self::Api {
            doing: doing.into(),
            source: Box::new(source),
        }
    }

    /// Returns the remedy, where the message of the error has none.
    pub fn remedy(&self) -> Option<String> {
        let remedy = match self {
            Self::Kubeconfig { .. } => {
                "list the contexts with kubectl config get-contexts; name the file with --kubeconfig or KUBECONFIG"
            }
            Self::Client(_) => "log in to the cluster again",
            Self::Api { source, .. } => return remedy_of(source),
            Self::Unwatched { .. } => {
                "waiting needs the rights to list and watch Sandboxes (rollback: also Pods; snapshot, fork, rollback, restore-archive: also SandboxSnapshots)"
            }
            Self::NoAnswer { .. } => "check that the cluster is up: kubectl cluster-info",
            Self::NoNode { .. } => "list the nodes: kubectl get nodes",
            Self::NoSandbox { name, .. } => {
                return Some(format!(
                    "list all: kubectl torpor get -A; if {name} is a SandboxClaim, its status names the Sandbox: kubectl get sandboxclaim {name} -o yaml"
                ));
            }
            _ => return None,
        };
        Some(remedy.to_owned())
    }

    /// Reports whether the cluster does not serve the kind of the call.
    pub fn is_unknown_kind(&self) -> bool {
        self.answer().is_some_and(is_unserved)
    }

    /// Reports whether the object of the call does not exist.
    pub fn is_missing(&self) -> bool {
        self.answer().is_some_and(is_missing)
    }

    /// Reports whether the object has changed since it was read, or is another of the same name.
    pub fn is_conflict(&self) -> bool {
        let is_conflict = |status: &Status| status.is_conflict() || is_of_another(status);
        self.answer().is_some_and(is_conflict)
    }

    /// Returns the status with which the apiserver refused the call.
    fn answer(&self) -> Option<&Status> {
        match self {
            Self::Api { source, .. } => answer_of(source),
            _ => None,
        }
    }

    /// Reports whether the outcome is unknown, which is no failure.
    pub fn is_unknown(&self) -> bool {
        matches!(
            self,
            Self::NoAnswer { .. } | Self::Timeout { .. } | Self::Unwatched { .. }
        )
    }
}

// The reason is that of a missing object. For a kind that is not served, the path is unknown and
// the answer has no reason.
fn is_missing(status: &Status) -> bool {
    status.reason == "NotFound"
}

// kube 5.0.0 has no usable check: it tests whether the expected reason is a known one instead of
// the reason of the answer, and so never tests the code.
fn is_unserved(status: &Status) -> bool {
    status.code == 404 && !is_missing(status)
}

fn answer_of(error: &kube::Error) -> Option<&Status> {
    match error {
        kube::Error::Api(status) => Some(status),
        _ => None,
    }
}

fn remedy_of(error: &kube::Error) -> Option<String> {
    let remedy = match error {
        kube::Error::Api(status) if status.is_forbidden() => {
            let right = Right::missed(&status.message);
            return Some(right.map_or_else(refused, |right| right.remedy()));
        }
        kube::Error::Api(status) if status.code == 401 => {
            "the cluster does not accept your credentials: log in again"
        }
        kube::Error::Api(status) if is_missing(status) => {
            "the object is gone; list the Sandboxes: kubectl torpor get"
        }
        kube::Error::Api(status) if is_unserved(status) => {
            "the cluster does not serve this kind; check the installation of Torpor: kubectl torpor doctor"
        }
        kube::Error::Service(_) | kube::Error::HyperError(_) => {
            "check that the cluster is up and the context is right: kubectl cluster-info"
        }
        _ => return None,
    };
    Some(remedy.to_owned())
}

// Admission webhooks and quotas also answer 403.
fn refused() -> String {
    "not allowed: the message names the policy that refuses, and the reason".to_owned()
}

/// Right that a user lacks.
#[derive(Debug, PartialEq, Eq)]
struct Right<'a> {
    verb: &'a str,
    /// Resource in kubectl's form, `RESOURCE.GROUP`.
    resource: String,
    /// Namespace of the right; `None` for the whole cluster.
    namespace: Option<&'a str>,
}

impl<'a> Right<'a> {
    /// Parses an apiserver's refusal:
    /// `User "jane" cannot list resource "pods" in API group "" in the namespace "x"`.
    fn missed(message: &'a str) -> Option<Self> {
        let (_, message) = message.split_once("\" cannot ")?;
        let (verb, message) = message.split_once(" resource \"")?;
        let (resource, message) = message.split_once("\" in API group \"")?;
        let (group, place) = message.split_once('"')?;
        let namespace = place.split_once("in the namespace \"");
        let namespace = namespace.and_then(|(_, rest)| Some(rest.split_once('"')?.0));
        Some(Self {
            verb,
            resource: match group {
                "" => resource.to_owned(),
                _ => format!("{resource}.{group}"),
            },
            namespace,
        })
    }

    fn remedy(&self) -> String {
        let (verb, resource) = (self.verb, &self.resource);
        let (role, place) = match self.namespace {
            Some(namespace) => ("role", format!(" -n {namespace}")),
            None => ("clusterrole", String::new()),
        };
        format!(
            "not allowed: an administrator grants the right with kubectl create {role} NAME --verb={verb} --resource={resource}{place} and kubectl create {role}binding; list your rights: kubectl auth can-i --list{place}"
        )
    }
}

/// Returns an error with all its causes in one line, without causes that repeat a text before.
pub fn full_message(error: &(dyn std::error::Error + 'static)) -> String {
    let mut text = String::new();
    let mut next = Some(error);
    while let Some(error) = next {
        let answer = answer_in(error);
        let message = answer.map_or_else(|| error.to_string(), |status| status.message.clone());
        if !text.contains(&message) {
            let separator = if text.is_empty() { "" } else { ": " };
            text.push_str(separator);
            text.push_str(&message);
        }
        next = error.source().filter(|_| answer.is_none());
    }
    text
}

/// Returns the apiserver's answer, where the error is nothing else.
///
/// The error's own text repeats the answer in Rust's debug notation.
fn answer_in<'a>(error: &'a (dyn std::error::Error + 'static)) -> Option<&'a Status> {
    let boxed = || error.downcast_ref::<Box<kube::Error>>().map(AsRef::as_ref);
    let error = error.downcast_ref::<kube::Error>().or_else(boxed)?;
    answer_of(error).filter(|status| !status.message.is_empty())
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    const FORBIDDEN: &str = r#"sandboxes.agents.x-k8s.io "demo" is forbidden: User "jane" cannot patch resource "sandboxes" in API group "agents.x-k8s.io" in the namespace "x""#;

    fn answered(code: u16, reason: &str, message: &str) -> Error {
        let status = Status::failure(message, reason).with_code(code);
        Error::api("patch Sandbox demo", kube::Error::Api(status.boxed()))
    }

    #[test]
    fn the_apiservers_message_is_printed_once_and_unchanged() {
        let text = full_message(&answered(403, "Forbidden", FORBIDDEN));
        assert_eq!(text, format!("cannot patch Sandbox demo: {FORBIDDEN}"));
    }

    #[rstest]
    #[case(
        FORBIDDEN,
        "role NAME --verb=patch --resource=sandboxes.agents.x-k8s.io -n x and"
    )]
    #[case(
        r#"pods is forbidden: User "a b" cannot list resource "pods" in API group "" at the cluster scope"#,
        "clusterrole NAME --verb=list --resource=pods and"
    )]
    #[case(
        "admission webhook \"policy\" denied the request: no sandbox may sleep",
        "the policy that refuses"
    )]
    fn a_missing_right_is_named_with_the_command_that_grants_it(
        #[case] message: &str,
        #[case] expected: &str,
    ) {
        let remedy = answered(403, "Forbidden", message).remedy().unwrap();
        assert!(remedy.starts_with("not allowed: "), "{remedy}");
        assert!(remedy.contains(expected), "{remedy}");
    }

    #[rstest]
    #[case(409, "Conflict", "the object has been modified", true)]
    #[case(
        422,
        "Invalid",
        r#"Sandbox.agents.x-k8s.io "demo" is invalid: metadata.uid: Invalid value: "u-1": field is immutable"#,
        true
    )]
    #[case(
        422,
        "Invalid",
        r#"Sandbox.agents.x-k8s.io "demo" is invalid: spec.operatingMode: Unsupported value: "x""#,
        false
    )]
    fn a_patch_of_another_object_of_the_same_name_is_a_conflict(
        #[case] code: u16,
        #[case] reason: &str,
        #[case] message: &str,
        #[case] expected: bool,
    ) {
        assert_eq!(answered(code, reason, message).is_conflict(), expected);
    }

    #[test]
    fn a_missing_object_is_not_an_unknown_kind() {
        let gone = answered(404, "NotFound", "sandboxes \"demo\" not found");
        assert!(gone.is_missing() && !gone.is_unknown_kind());
        assert!(gone.remedy().unwrap().starts_with("the object is gone"));
        // For an answer that is no JSON, kube makes up a reason.
        let unknown = answered(404, "Failed to parse error data", "404 page not found");
        assert!(unknown.is_unknown_kind() && !unknown.is_missing());
        assert!(unknown.remedy().unwrap().contains("doctor"));
    }
}
