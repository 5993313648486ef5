//! No client required. Files that a claim brings to its sandbox: which it may bring, and the Secret
//! by which the kubelet delivers them.

use std::{collections::BTreeMap, time::Duration};

use jiff::Timestamp;
use k8s_openapi::{ByteString, api::core::v1::Secret};
use kube::ResourceExt;
use serde_json::{Value, json};
use torpor_api::{
    Sandbox, SandboxClaim, SandboxTemplate,
    annotations::{
        self, CLAIM_FILES, CLAIM_SECRET, CLAIM_TOKEN_UNTIL, ClaimFile, InvalidAnnotation, LateBind,
        parse_claim_files,
    },
    conditions,
    labels::CLAIMABLE,
    reasons::bound::CLAIM_NOT_DELIVERED,
};
use torpor_claim_env::{ENV, FILES, FILES_OF, TOKEN, UID};

use super::late_bind;
use crate::{owners::owner_reference, sandbox::pod_spec::claim_volume::secret_name};

/// Value of [`CLAIM_SECRET`] until the Secret has the claim's files.
pub const PENDING: &str = "pending";
/// Value of [`CLAIM_SECRET`] from then on.
pub const WRITTEN: &str = "written";

/// Delay before the renewal of a token is tried again.
const RENEWAL_RETRY: Duration = Duration::from_secs(60);

/// Files by name.
pub type Files = BTreeMap<String, ByteString>;

/// Files of Torpor's own in the directory of a claim's files.
const OWN: [&str; 4] = [UID, ENV, FILES, FILES_OF];

/// Reason why a claim's files are not delivered.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum Refused {
    #[error(transparent)]
    Annotation(#[from] InvalidAnnotation),
    #[error(
        "claims may not bring {file} to sandboxes of SandboxTemplate {template:?}: its annotation torpor.dev/late-bind does not have {word:?}, or it has no RuntimeClass"
    )]
    NotAdmitted {
        file: ClaimFile,
        template: String,
        word: &'static str,
    },
    #[error("{0} does not exist in the claim's namespace")]
    Missing(ClaimFile),
    #[error("claims may not bring {0}: it does not have the label torpor.dev/claimable=true")]
    NotClaimable(ClaimFile),
    #[error("{0} and another source of the claim both have file {1:?}")]
    Twice(ClaimFile, String),
    #[error("file {1:?} of {0} has the name of a file of Torpor's own")]
    Reserved(ClaimFile, String),
    #[error("Secret {0:?} exists and is not of this claim's Sandbox: delete it")]
    Taken(String),
    #[error(
        "the controller may not read or write a claim's files in namespace {namespace:?} ({message}); grant it with: kubectl apply -n {namespace} -k deploy/late-binding"
    )]
    Forbidden { namespace: String, message: String },
}

/// Returns the sources of a claim's files as the annotation's text, if its template admits them;
/// `None` if the claim has none.
pub(super) fn wanted<'a>(
    claim: &'a SandboxClaim,
    template: &SandboxTemplate,
) -> Result<Option<&'a str>, Refused> {
    let Some(text) = claim.annotations().get(CLAIM_FILES) else {
        return Ok(None);
    };
    let late = late_bind::of_template(template);
    for source in parse_claim_files(text)? {
        if !late.admits(&source) {
            return Err(Refused::NotAdmitted {
                word: match source {
                    ClaimFile::Secret(_) | ClaimFile::ConfigMap(_) => "files",
                    ClaimFile::Token(_) => "identity",
                },
                file: source,
                template: template.name_any(),
            });
        }
    }
    Ok(Some(text))
}

/// Returns the sources of files that are to be written for a Sandbox.
pub(super) fn due(sandbox: &Sandbox) -> Option<Vec<ClaimFile>> {
    let text = sandbox.annotations().get(CLAIM_FILES);
    parse_claim_files(text.filter(|_| is_pending(sandbox))?).ok()
}

/// Returns the patch that corrects the sources of a Sandbox whose files are not written, after an
/// edit of the claim. Sources that the Sandbox does not admit are left to the claim's author.
pub(super) fn correction(claim: &SandboxClaim, sandbox: &Sandbox) -> Option<Value> {
    let asked = claim.annotations().get(CLAIM_FILES);
    if !is_pending(sandbox) || asked == sandbox.annotations().get(CLAIM_FILES) {
        return None;
    }
    let late = LateBind::of(sandbox.annotations());
    let sources = asked.map(|text| parse_claim_files(text)).transpose().ok()?;
    let is_admitted = |source: &ClaimFile| late.admits(source);
    let mut sources = sources.iter().flatten();
    sources.all(is_admitted).then(|| {
        let state = asked.map(|_| PENDING);
        json!({"metadata": {
            "uid": sandbox.uid(),
            "resourceVersion": sandbox.resource_version(),
            "annotations": {CLAIM_FILES: asked, CLAIM_SECRET: state},
        }})
    })
}

/// Reports whether written files need a look: their token is to be renewed, or the node does not
/// find them.
pub(super) fn need_upkeep(sandbox: &Sandbox, now: Timestamp) -> bool {
    let shown = sandbox.status.as_ref().map(|status| &status.conditions[..]);
    let bound = conditions::find(shown.unwrap_or_default(), conditions::BOUND);
    let state = sandbox.annotations().get(CLAIM_SECRET);
    state.is_some_and(|state| state == WRITTEN)
        && (renewal(sandbox).is_some_and(|at| at <= now)
            || bound.is_some_and(|bound| bound.reason == CLAIM_NOT_DELIVERED))
}

/// Returns the ServiceAccount whose token among a Sandbox' files is to be renewed now.
pub(super) fn account_to_renew(sandbox: &Sandbox, now: Timestamp) -> Option<String> {
    renewal(sandbox).filter(|at| *at <= now)?;
    let sources = parse_claim_files(sandbox.annotations().get(CLAIM_FILES)?).ok()?;
    sources.into_iter().find_map(|source| match source {
        ClaimFile::Token(name) => Some(name),
        ClaimFile::Secret(_) | ClaimFile::ConfigMap(_) => None,
    })
}

/// Reports whether no file of the claim has been written yet.
pub(super) fn is_pending(sandbox: &Sandbox) -> bool {
    let state = sandbox.annotations().get(CLAIM_SECRET);
    state.is_some_and(|state| state == PENDING)
}

/// Returns the time until the token of a Sandbox' files is to be renewed, or its renewal tried
/// again.
pub(super) fn renewal_in(sandbox: &Sandbox, now: Timestamp) -> Option<Duration> {
    let left = renewal(sandbox)?.duration_since(now);
    let left = Duration::try_from(left).unwrap_or_default();
    Some(if left.is_zero() { RENEWAL_RETRY } else { left })
}

fn renewal(sandbox: &Sandbox) -> Option<Timestamp> {
    let until = sandbox.annotations().get(CLAIM_TOKEN_UNTIL)?;
    until.parse().ok()
}

/// Returns the time at which a token is to be renewed: after four fifths of its life.
pub(super) fn renew_at(expires: Timestamp, now: Timestamp) -> Timestamp {
    let life = expires.duration_since(now);
    now.checked_add(life * 4 / 5).unwrap_or(expires)
}

/// Checks that the owner of a source lets claims bring it. `labels`: those of the object, `None` if
/// it does not exist.
pub(super) fn check(
    source: &ClaimFile,
    labels: Option<&BTreeMap<String, String>>,
) -> Result<(), Refused> {
    let labels = labels.ok_or_else(|| Refused::Missing(source.clone()))?;
    match labels.get(CLAIMABLE).is_some_and(|value| value == "true") {
        true => Ok(()),
        false => Err(Refused::NotClaimable(source.clone())),
    }
}

/// Adds the files of a source to those of others.
pub(super) fn add(all: &mut Files, source: &ClaimFile, files: Files) -> Result<(), Refused> {
    for (name, content) in files {
        let reserved =
            OWN.contains(&name.as_str()) || name == TOKEN && !matches!(source, ClaimFile::Token(_));
        if reserved {
            return Err(Refused::Reserved(source.clone(), name));
        }
        if all.contains_key(&name) {
            return Err(Refused::Twice(source.clone(), name));
        }
        all.insert(name, content);
    }
    Ok(())
}

/// Returns the Secret of a Sandbox, which goes with the Sandbox.
pub(super) fn secret(sandbox: &Sandbox, claim: &str, files: &Files) -> Value {
    let mut owner = owner_reference(sandbox);
    owner.controller = None;
    owner.block_owner_deletion = None;
    json!({
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {
            "name": secret_name(&sandbox.uid().unwrap_or_default()),
            "namespace": sandbox.namespace(),
            "annotations": {annotations::CLAIM: claim},
            "ownerReferences": [owner],
        },
        "type": "Opaque",
        "data": files,
    })
}

/// Reports whether a Secret is that of this Sandbox and this claim.
pub(super) fn is_of(secret: &Secret, sandbox: &Sandbox, claim: &str) -> bool {
    let owners = secret.owner_references();
    owners
        .iter()
        .any(|owner| Some(&owner.uid) == sandbox.metadata.uid.as_ref())
        && secret
            .annotations()
            .get(annotations::CLAIM)
            .map(String::as_str)
            == Some(claim)
}

/// Returns the patch of a Sandbox, in the version that was read, whose files are in this state.
/// `renew`: time at which the token is renewed.
pub(super) fn noted(sandbox: &Sandbox, state: &str, renew: Option<Timestamp>) -> Value {
    json!({"metadata": {
        "uid": sandbox.uid(),
        "resourceVersion": sandbox.resource_version(),
        "annotations": {
            CLAIM_SECRET: state,
            CLAIM_TOKEN_UNTIL: renew.map(|at| at.to_string()),
        },
    }})
}

#[cfg(test)]
mod tests;
