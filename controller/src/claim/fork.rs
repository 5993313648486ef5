//! No client required. Decides whether a claim's sandbox continues from a SandboxSnapshot.

use kube::ResourceExt;
use torpor_api::{
    SandboxClaim, SandboxSnapshot,
    annotations::{FORK_OF, is_dns_subdomain},
    labels::CLAIMABLE,
};

/// Reason why a claim does not fork a snapshot.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    #[error("annotation {FORK_OF}: {0:?} is not the name of a SandboxSnapshot")]
    Name(String),
    #[error("SandboxSnapshot {0:?} does not exist in the claim's namespace")]
    Missing(String),
    #[error(
        "claims may not fork SandboxSnapshot {0:?}: it does not have the label {CLAIMABLE}=true"
    )]
    NotClaimable(String),
    #[error(
        "the claim's environment variables cannot reach a sandbox that continues from memory: the template needs torpor.dev/late-bind with env; variables of the first container alone, without $("
    )]
    Variables,
}

/// Returns the name of the snapshot that a claim asks to fork.
pub(super) fn asked(claim: &SandboxClaim) -> Option<&str> {
    claim.annotations().get(FORK_OF).map(String::as_str)
}

/// Returns the name of the snapshot that the claim's sandbox continues from; `None` if the claim
/// asks for none. `found`: the snapshot of the name that the claim asks for.
pub(super) fn source<'a>(
    claim: &'a SandboxClaim,
    found: Option<&SandboxSnapshot>,
) -> Result<Option<&'a str>, Refused> {
    let Some(name) = asked(claim) else {
        return Ok(None);
    };
    if !is_dns_subdomain(name) {
        return Err(Refused::Name(name.to_owned()));
    }
    // The claim may have been edited since the snapshot was found.
    let found = found.filter(|found| found.name_any() == name);
    let found = found.filter(|found| found.metadata.deletion_timestamp.is_none());
    let found = found.ok_or_else(|| Refused::Missing(name.to_owned()))?;
    let released = found.labels().get(CLAIMABLE);
    match released.is_some_and(|value| value == "true") {
        true => Ok(Some(name)),
        false => Err(Refused::NotClaimable(name.to_owned())),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn claim(fork_of: Value) -> SandboxClaim {
        serde_json::from_value(json!({
            "metadata": {"name": "c", "annotations": fork_of},
            "spec": {"warmPoolRef": {"name": "p"}},
        }))
        .unwrap()
    }

    fn snapshot(label: &str, deleted: Option<&str>) -> SandboxSnapshot {
        serde_json::from_value(json!({
            "metadata": {"name": "s", "labels": {CLAIMABLE: label}, "deletionTimestamp": deleted},
            "spec": {"sandboxName": "a", "reason": "Manual"},
        }))
        .unwrap()
    }

    #[test]
    fn a_claim_forks_only_a_snapshot_that_its_owner_has_released() {
        let asks = claim(json!({FORK_OF: "s"}));
        let released = snapshot("true", None);
        assert_eq!(source(&asks, Some(&released)), Ok(Some("s")));
        assert_eq!(source(&claim(json!({})), None), Ok(None));
        for held in [None, Some(snapshot("true", Some("2026-11-27T12:00:00Z")))] {
            let missing = Err(Refused::Missing("s".to_owned()));
            assert_eq!(source(&asks, held.as_ref()), missing);
        }
        let kept = snapshot("false", None);
        let refused = Err(Refused::NotClaimable("s".to_owned()));
        assert_eq!(source(&asks, Some(&kept)), refused);
        let other = claim(json!({FORK_OF: "t"}));
        let missing = Err(Refused::Missing("t".to_owned()));
        assert_eq!(source(&other, Some(&released)), missing);
        let elsewhere = claim(json!({FORK_OF: "other/s"}));
        let named = source(&elsewhere, Some(&released)).unwrap_err();
        assert!(named.to_string().contains("other/s"));
    }
}
