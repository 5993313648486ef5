//! The condition RunscRevoked: the builds of runsc that start no sandbox on this node.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use torpor_api::conditions::{self, Draft, Status};
use torpor_records::config::Config;

/// Makes the condition; None if no build is revoked and the `previous` conditions do not have this
/// condition.
pub(super) fn draft(config: &Config, previous: &[Condition]) -> Option<Draft> {
    let own = &config.runsc_digest;
    let is_own = |digest: &String| digest == own;
    if config.revoked_runsc.is_empty() {
        let has_condition = conditions::find(previous, conditions::RUNSC_REVOKED).is_some();
        let message = String::new();
        return has_condition.then(|| {
            Draft::new(
                conditions::RUNSC_REVOKED,
                Status::False,
                "NoneRevoked",
                message,
            )
        });
    }
    let named: Vec<String> = config
        .revoked_runsc
        .iter()
        .map(|digest| match is_own(digest) {
            true => format!("{digest} (installed on this node: no sandbox starts here)"),
            false => digest.clone(),
        })
        .collect();
    let reason = match config.revoked_runsc.iter().any(is_own) {
        true => "InstalledBuild",
        false => "OtherBuild",
    };
    let message = format!(
        "No sandbox starts, wakes or resumes with these builds of runsc; their images are kept: {}",
        named.join(", ")
    );
    Some(Draft::new(
        conditions::RUNSC_REVOKED,
        Status::True,
        reason,
        message,
    ))
}

#[cfg(test)]
mod tests {
    use jiff::Timestamp;

    use super::*;

    fn conditions_after(own: &str, revoked: &[&str], previous: &[Condition]) -> Vec<Condition> {
        let config = serde_json::json!({
            "runsc": "/r", "runsc_digest": own, "state_dir": "/s", "store_dir": "/i", "kubelet_root": "/k",
            "revoked_runsc": revoked,
        });
        let config: Config = serde_json::from_value(config).expect("understood");
        let mut conditions = previous.to_vec();
        if let Some(draft) = draft(&config, previous) {
            conditions::set(&mut conditions, draft, None, Timestamp::UNIX_EPOCH);
        }
        conditions
    }

    #[test]
    fn a_node_names_the_builds_that_are_revoked_and_whether_its_own_is() {
        assert!(
            conditions_after("blake3:1", &[], &[]).is_empty(),
            "nothing to say"
        );
        let own = conditions_after("blake3:1", &["blake3:2", "blake3:1"], &[]);
        let other = conditions_after("blake3:1", &["blake3:2"], &own);
        let none = conditions_after("blake3:1", &[], &other);
        let status_and_reason = |conditions: &[Condition]| {
            let [condition] = conditions else {
                panic!("{conditions:?}")
            };
            (condition.status.clone(), condition.reason.clone())
        };
        assert_eq!(
            status_and_reason(&own),
            ("True".into(), "InstalledBuild".into())
        );
        assert!(own[0].message.contains("blake3:1 (installed"));
        assert_eq!(
            status_and_reason(&other),
            ("True".into(), "OtherBuild".into())
        );
        assert!(other[0].message.ends_with("blake3:2"));
        assert_eq!(
            status_and_reason(&none),
            ("False".into(), "NoneRevoked".into())
        );
    }
}
