//! What can go wrong: each says what was being done to what, and the remedy.

use std::time::Duration;

use kube::core::Status;
use torpor_api::answers::is_of_another;

use crate::units;

/// Why a command did not do what it was asked.
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
        "Sandbox {name}: not yet {goal} after {}; {last}. It goes on by itself: `kubectl torpor why {name} -n {namespace}`",
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
        "Sandbox {name}: it was asked; what becomes of it cannot be watched ({why}): `kubectl torpor get {name} -n {namespace}`"
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
    /// A call that the apiserver answered with an error, or did not get.
    pub fn api(doing: impl Into<String>, source: kube::Error) -> Self {
        Self::Api {
            doing: doing.into(),
            source: Box::new(source),
        }
    }

    /// What to do about it, where the error itself does not say.
    pub fn remedy(&self) -> Option<String> {
        let remedy = match self {
            Self::Kubeconfig { .. } => {
                "kubectl config get-contexts lists what there is; --kubeconfig or KUBECONFIG names the file"
            }
            Self::Client(_) => "log in to the cluster again",
            Self::Api { source, .. } => return remedy_of(source),
            Self::Unwatched { .. } => {
                "to wait needs list and watch of Sandboxes; --timeout 0 does not wait"
            }
            Self::NoAnswer { .. } => "is the cluster up? kubectl cluster-info tells",
            Self::NoNode { .. } => "kubectl get nodes lists them",
            Self::NoSandbox { name, .. } => {
                return Some(format!(
                    "kubectl torpor get -A lists all; which one a claim holds, kubectl get sandboxclaim {name} -o yaml tells in its status"
                ));
            }
            _ => return None,
        };
        Some(remedy.to_owned())
    }

    /// Whether the cluster does not serve the kind that was asked for.
    pub fn is_unknown_kind(&self) -> bool {
        self.answer().is_some_and(is_unserved)
    }

    /// Whether the object that was asked for is not there.
    pub fn is_missing(&self) -> bool {
        self.answer().is_some_and(is_missing)
    }

    /// Whether the object is another than the one that the call was made from.
    pub fn is_conflict(&self) -> bool {
        let is_conflict = |status: &Status| status.is_conflict() || is_of_another(status);
        self.answer().is_some_and(is_conflict)
    }

    /// What the apiserver said to the call.
    fn answer(&self) -> Option<&Status> {
        match self {
            Self::Api { source, .. } => answer_of(source),
            _ => None,
        }
    }

    /// Whether nobody knows what became of it, as against a failure.
    pub fn is_unknown(&self) -> bool {
        matches!(
            self,
            Self::NoAnswer { .. } | Self::Timeout { .. } | Self::Unwatched { .. }
        )
    }
}

/// An object that is not there has this reason. A kind that is not served has none: its path is not.
fn is_missing(status: &Status) -> bool {
    status.reason == "NotFound"
}

/// By the code: kube 5.0.0 asks whether the reason that it looks for is a known one, not the reason that came, and so never looks at the code.
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
            "the cluster does not know you: log in again"
        }
        kube::Error::Api(status) if is_missing(status) => {
            "it is gone: kubectl torpor get lists what there is"
        }
        kube::Error::Api(status) if is_unserved(status) => {
            "the cluster does not know this kind: is Torpor installed? kubectl torpor doctor tells"
        }
        kube::Error::Service(_) | kube::Error::HyperError(_) => {
            "is the cluster up, and is it the right context? kubectl cluster-info tells"
        }
        _ => return None,
    };
    Some(remedy.to_owned())
}

/// An admission webhook and a quota refuse in the same way.
fn refused() -> String {
    "you may not: the message says who refuses, and why".to_owned()
}

/// What somebody lacks the right to do.
#[derive(Debug, PartialEq, Eq)]
struct Right<'a> {
    verb: &'a str,
    /// As kubectl takes it.
    resource: String,
    /// None: of the whole cluster.
    namespace: Option<&'a str>,
}

impl<'a> Right<'a> {
    /// The right that an apiserver's refusal names: `User "jane" cannot list resource "pods" in API group "" in the namespace "x"`.
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
            "you may not: an administrator gives you the right by kubectl create {role} NAME --verb={verb} --resource={resource}{place} and kubectl create {role}binding; kubectl auth can-i --list{place} tells what you may"
        )
    }
}

/// An error with all its causes, in one line. Causes that repeat what was said are left out.
pub fn words(error: &(dyn std::error::Error + 'static)) -> String {
    let mut text = String::new();
    let mut next = Some(error);
    while let Some(error) = next {
        let answer = answer_in(error);
        let said = answer.map_or_else(|| error.to_string(), |status| status.message.clone());
        if !text.contains(&said) {
            let and = if text.is_empty() { "" } else { ": " };
            text.push_str(and);
            text.push_str(&said);
        }
        next = error.source().filter(|_| answer.is_none());
    }
    text
}

/// The apiserver's answer, where the error is nothing else: in its own words it is followed by the same in Rust's notation.
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
    fn what_the_apiserver_says_is_told_once_and_in_its_own_words() {
        let text = words(&answered(403, "Forbidden", FORBIDDEN));
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
        "who refuses, and why"
    )]
    fn who_may_not_is_told_which_right_is_missing_and_how_to_get_it(
        #[case] message: &str,
        #[case] expected: &str,
    ) {
        let remedy = answered(403, "Forbidden", message).remedy().unwrap();
        assert!(remedy.starts_with("you may not: "), "{remedy}");
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
    fn a_patch_of_another_object_of_the_name_is_a_conflict(
        #[case] code: u16,
        #[case] reason: &str,
        #[case] message: &str,
        #[case] expected: bool,
    ) {
        assert_eq!(answered(code, reason, message).is_conflict(), expected);
    }

    #[test]
    fn an_object_that_is_gone_is_not_a_kind_that_nobody_knows() {
        let gone = answered(404, "NotFound", "sandboxes \"demo\" not found");
        assert!(gone.is_missing() && !gone.is_unknown_kind());
        assert!(gone.remedy().unwrap().starts_with("it is gone"));
        // What is no JSON, kube gives a reason of its own.
        let unknown = answered(404, "Failed to parse error data", "404 page not found");
        assert!(unknown.is_unknown_kind() && !unknown.is_missing());
        assert!(unknown.remedy().unwrap().contains("doctor"));
    }
}
