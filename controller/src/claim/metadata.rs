//! No client required. Checks and merges what a claim adds to the metadata of its Pod, and derives
//! how an edit of the claim changes its Sandbox.
//!
//! Two annotations of the Sandbox list the keys that came from the claim, so that keys that the
//! claim drops can be removed, and the template's metadata can be separated from the claim's.

use std::collections::BTreeMap;

use kube::ResourceExt;
use torpor_api::{
    Sandbox, SandboxClaim,
    annotations::{self, InvalidAnnotation},
    sandbox::PodMetadata,
};

/// Keys and values of labels or annotations.
pub type Strings = BTreeMap<String, String>;

/// Only the router carries this label; the default NetworkPolicy lets it in everywhere.
const ROUTER_LABEL: (&str, &str) = ("app", "sandbox-router");
/// Domains whose annotations have a meaning in the cluster.
const RESERVED_DOMAINS: [&str; 3] = ["kubernetes.io", "k8s.io", "agents.x-k8s.io"];

/// Torpor's own domain; the annotations of it that a claim may set are listed.
const TORPOR_DOMAIN: &str = "torpor.dev";

/// Metadata that a claim may not add.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Invalid {
    #[error("label {key:?} is not allowed: its domain is not one of {allowed}")]
    LabelDomain { key: String, allowed: String },
    #[error("label app=sandbox-router is reserved for the router")]
    RouterLabel,
    #[error("annotation {0:?} is not allowed: its domain is reserved")]
    AnnotationDomain(String),
    #[error(
        "annotation {0:?} is not allowed on a SandboxClaim: only the SandboxTemplate can set it; allowed annotations of torpor.dev: {allowed}",
        allowed = annotations::CLAIM_SETTINGS.join(", ")
    )]
    NotForClaims(String),
    #[error("{0}")]
    Setting(InvalidAnnotation),
    #[error("{kind} {key:?} is not well-formed: {why}")]
    Malformed {
        kind: &'static str,
        key: String,
        why: &'static str,
    },
    #[error(
        "{kind} {key:?} conflicts with the template: it has the value {template:?}, the claim wants {claim:?}"
    )]
    Conflict {
        kind: &'static str,
        key: String,
        template: String,
        claim: String,
    },
}

/// Checks the metadata that a claim adds, without the template's.
pub fn check(claim: &SandboxClaim, domains: &[String]) -> Result<(), Invalid> {
    let Some(added) = &claim.spec.additional_pod_metadata else {
        return Ok(());
    };
    for (key, value) in added.labels.iter().flatten() {
        if (key.as_str(), value.as_str()) == ROUTER_LABEL {
            return Err(Invalid::RouterLabel);
        }
        well_formed("label", key)?;
        label_value(key, value)?;
        let allowed = domain(key).is_some_and(|own| domains.iter().any(|d| is_within(own, d)));
        if !allowed {
            return Err(Invalid::LabelDomain {
                key: key.clone(),
                allowed: domains.join(", "),
            });
        }
    }
    for key in added.annotations.iter().flatten().map(|(key, _)| key) {
        well_formed("annotation", key)?;
        let reserved =
            domain(key).is_some_and(|own| RESERVED_DOMAINS.iter().any(|d| is_within(own, d)));
        if reserved && key != annotations::SAFE_TO_EVICT {
            return Err(Invalid::AnnotationDomain(key.clone()));
        }
        let torpors = domain(key).is_some_and(|own| is_within(own, TORPOR_DOMAIN));
        if torpors && !annotations::CLAIM_SETTINGS.contains(&key.as_str()) {
            return Err(Invalid::NotForClaims(key.clone()));
        }
    }
    let settings = annotations::Settings::read(added.annotations.as_ref(), None);
    match settings.problems.into_iter().next() {
        Some(problem) => Err(Invalid::Setting(problem)),
        None => Ok(()),
    }
}

fn domain(key: &str) -> Option<&str> {
    key.split_once('/').map(|(domain, _)| domain)
}

/// Reports whether a domain is `other` or below it.
fn is_within(domain: &str, other: &str) -> bool {
    domain == other
        || domain
            .strip_suffix(other)
            .is_some_and(|rest| rest.ends_with('.'))
}

/// Checks the form of a key, as the apiserver would on the Pod; here the user sees the error on the
/// claim.
fn well_formed(kind: &'static str, key: &str) -> Result<(), Invalid> {
    let malformed = |why| Invalid::Malformed {
        kind,
        key: key.to_owned(),
        why,
    };
    let name = match key.split_once('/') {
        Some((domain, name)) if annotations::is_dns_subdomain(domain) => name,
        Some(_) => return Err(malformed("the part before the slash is not a domain")),
        None => key,
    };
    if is_name(name) {
        Ok(())
    } else {
        Err(malformed(
            "a name has 1 to 63 letters, digits, '-', '_' or '.', and begins and ends with a letter or digit",
        ))
    }
}

fn label_value(key: &str, value: &str) -> Result<(), Invalid> {
    if value.is_empty() || is_name(value) {
        return Ok(());
    }
    Err(Invalid::Malformed {
        kind: "value of label",
        key: key.to_owned(),
        why: "a value has at most 63 letters, digits, '-', '_' or '.', and begins and ends with a letter or digit",
    })
}

fn is_name(text: &str) -> bool {
    let edge = |c: Option<char>| c.is_some_and(|c| c.is_ascii_alphanumeric());
    text.len() <= 63
        && edge(text.chars().next())
        && edge(text.chars().next_back())
        && text
            .chars()
            .all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.'))
}

/// Returns the metadata of the pod template with that of the claim. A value of the claim does not
/// replace one of the template.
pub fn merged(
    template: Option<&PodMetadata>,
    claim: &SandboxClaim,
) -> Result<PodMetadata, Invalid> {
    let added = claim.spec.additional_pod_metadata.as_ref();
    let side = |kind, of: fn(&PodMetadata) -> Option<&Strings>| {
        union(kind, template.and_then(of), added.and_then(of))
    };
    Ok(PodMetadata {
        labels: side("label", |m| m.labels.as_ref())?,
        annotations: side("annotation", |m| m.annotations.as_ref())?,
    })
}

fn union(
    kind: &'static str,
    template: Option<&Strings>,
    added: Option<&Strings>,
) -> Result<Option<Strings>, Invalid> {
    let mut all = template.cloned().unwrap_or_default();
    for (key, value) in added.into_iter().flatten() {
        match all.get(key) {
            Some(before) if before != value => {
                return Err(Invalid::Conflict {
                    kind,
                    key: key.clone(),
                    template: before.clone(),
                    claim: value.clone(),
                });
            }
            _ => drop(all.insert(key.clone(), value.clone())),
        }
    }
    Ok((!all.is_empty()).then_some(all))
}

/// Returns the two lists of keys that came from the claim, as annotations of the Sandbox; `None`
/// for an empty list.
pub fn lists(claim: &SandboxClaim) -> [(&'static str, Option<String>); 2] {
    let added = claim.spec.additional_pod_metadata.as_ref();
    let joined = |map: Option<&Strings>| {
        let keys: Vec<&str> = map.into_iter().flatten().map(|(k, _)| k.as_str()).collect();
        (!keys.is_empty()).then(|| keys.join(","))
    };
    [
        (
            annotations::CLAIM_LABELS,
            joined(added.and_then(|m| m.labels.as_ref())),
        ),
        (
            annotations::CLAIM_ANNOTATIONS,
            joined(added.and_then(|m| m.annotations.as_ref())),
        ),
    ]
}

/// Returns the Pod metadata of a Sandbox without what came from its claim.
pub fn without_claims(sandbox: &Sandbox) -> PodMetadata {
    let template = &sandbox.spec.pod_template;
    let side = |list: &str, map: Option<&Strings>| {
        let listed = sandbox.annotations().get(list).cloned().unwrap_or_default();
        let mut left = map.cloned().unwrap_or_default();
        for key in listed.split(',') {
            left.remove(key);
        }
        (!left.is_empty()).then_some(left)
    };
    PodMetadata {
        labels: side(annotations::CLAIM_LABELS, template.labels()),
        annotations: side(annotations::CLAIM_ANNOTATIONS, template.annotations()),
    }
}

#[cfg(test)]
mod tests;
