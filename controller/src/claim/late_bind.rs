//! No client required. Additions of a claim to a sandbox that runs already.

use std::collections::BTreeMap;

use kube::ResourceExt;
use serde_json::{Map, Value};
use torpor_api::{
    Sandbox, SandboxClaim, SandboxTemplate,
    annotations::{self, LateBind},
    conditions,
};

use super::{files, sandbox_spec::inject_env};

/// Returns the claim's variables as the text of a file. `None`: only a cold start can give them to
/// the sandbox, or the template does not admit them.
///
/// Only variables of the first container reach it later. The kubelet replaces `$(NAME)` in a value
/// when it starts a container; a value with such a reference is left to it.
pub(super) fn env(claim: &SandboxClaim, template: &SandboxTemplate) -> Option<String> {
    let wanted = &claim.spec.env;
    if wanted.is_empty() {
        return Some(String::new());
    }
    if !of_template(template).env {
        return None;
    }
    let pod_spec = template.spec.pod_template.spec.json();
    let first = first_container(pod_spec);
    let is_late = |container: &str| container.is_empty() || Some(container) == first;
    let is_plain = |value: &str| !value.contains("$(");
    if !wanted
        .iter()
        .all(|one| is_late(&one.container_name) && is_plain(&one.value))
    {
        return None;
    }
    let policy = template.spec.env_vars_injection_policy;
    inject_env(&mut pod_spec.clone(), wanted, policy).ok()?;
    // The last one of a name applies.
    let last: BTreeMap<&str, &str> = wanted
        .iter()
        .map(|one| (one.name.as_str(), one.value.as_str()))
        .collect();
    torpor_claim_env::write(last).ok()
}

/// Returns the additions that claims of a template may bring. A template without a RuntimeClass has
/// no agent that delivers them.
pub(super) fn of_template(template: &SandboxTemplate) -> LateBind {
    match template.spec.pod_template.spec.runtime_class_name() {
        Some(_) => LateBind::of(template.annotations()),
        None => LateBind::default(),
    }
}

fn first_container(pod_spec: &Map<String, Value>) -> Option<&str> {
    pod_spec.get("containers")?.get(0)?.get("name")?.as_str()
}

/// Additions of a claim to a sandbox that runs already.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Additions {
    /// Text of a file of variables; empty: the claim has none.
    pub env: String,
    /// Sources of files ([`annotations::CLAIM_FILES`]).
    pub files: Option<String>,
}

impl Additions {
    /// Reports whether they can reach a Sandbox with these annotations. A member of a pool that is
    /// older than its template's setting has no volume for them.
    pub(super) fn suit(&self, sandbox: &BTreeMap<String, String>) -> bool {
        let late = LateBind::of(sandbox);
        let files = self.files.as_deref().unwrap_or_default();
        let sources = annotations::parse_claim_files(files).unwrap_or_default();
        (self.env.is_empty() || late.env) && sources.iter().all(|source| late.admits(source))
    }

    /// Returns the annotations by which a Sandbox has them.
    pub(super) fn annotations(&self) -> Vec<(&'static str, &str)> {
        let env = Some((annotations::CLAIM_ENV, self.env.as_str()));
        let env = env.filter(|(_, text)| !text.is_empty());
        let files = self.files.iter().flat_map(|text| {
            [
                (annotations::CLAIM_FILES, text.as_str()),
                (annotations::CLAIM_SECRET, files::PENDING),
            ]
        });
        env.into_iter().chain(files).collect()
    }
}

/// Reports whether the status of a claim's Sandbox is from before the claim took it: it shows the
/// Sandbox Ready, and the claim has not arrived there.
///
/// A client that knows the Sandbox' name would find it Ready. So the claim shows the name only once
/// the Sandbox' status says whether the claim has arrived.
pub(super) fn is_from_before(sandbox: &Sandbox) -> bool {
    let binds = sandbox
        .metadata
        .annotations
        .as_ref()
        .is_some_and(annotations::binds);
    let shown = sandbox.status.as_ref().map(|status| &status.conditions[..]);
    let shown = shown.unwrap_or_default();
    binds
        && conditions::is_true(shown, conditions::READY)
        && !conditions::is_true(shown, conditions::BOUND)
}

#[cfg(test)]
mod tests;
