//! No client required. Decides which snapshots have expired.

use std::{cmp::Reverse, collections::BTreeSet, sync::Arc, time::Duration};

use jiff::Timestamp;
use kube::ResourceExt;
use torpor_api::{
    SandboxSnapshot, SnapshotReason,
    retention::{KEEP_LAST, Retention, TTL},
};

/// Snapshots of one Sandbox, with the rules and the uses that decide about them.
#[derive(Clone, Debug, Default)]
pub struct Observed {
    /// Name of the SnapshotClass.
    pub class: String,
    pub rules: Retention,
    pub snapshots: Vec<Arc<SandboxSnapshot>>,
    /// Names of snapshots that a Sandbox or a SandboxTemplate of the namespace starts copies from.
    pub in_use: BTreeSet<String>,
}

/// Snapshot to delete, in the observed version.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Deletion {
    pub name: String,
    pub uid: String,
    pub resource_version: Option<String>,
    /// Message of the Event.
    pub why: String,
}

/// Deletions, and the time of the next pass.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    pub deletions: Vec<Deletion>,
    /// Time until the next snapshot expires.
    pub next_look: Option<Duration>,
}

/// Decides which snapshots to delete.
pub fn plan(observed: &Observed, now: Timestamp) -> Plan {
    let mut plan = Plan::default();
    let mut ranked: Vec<(Timestamp, &SandboxSnapshot)> = observed
        .snapshots
        .iter()
        .filter_map(|snapshot| Some((kept_since(snapshot)?, &**snapshot)))
        .collect();
    ranked.sort_by_key(|(since, snapshot)| Reverse((*since, snapshot.name_any())));
    for (rank, (since, snapshot)) in ranked.into_iter().enumerate() {
        let name = snapshot.name_any();
        if observed.in_use.contains(&name) {
            continue;
        }
        let age = Duration::try_from(now.duration_since(since)).unwrap_or_default();
        match expired_by(&observed.rules, rank, age) {
            Some(rule) => plan.deletions.push(Deletion {
                why: format!(
                    "Deleted SandboxSnapshot {name:?} by the rule {rule} of SnapshotClass {:?}",
                    observed.class
                ),
                uid: snapshot.uid().unwrap_or_default(),
                resource_version: snapshot.resource_version(),
                name,
            }),
            None => {
                let left = observed.rules.ttl.map(|ttl| ttl.saturating_sub(age));
                plan.next_look = plan.next_look.into_iter().chain(left).min();
            }
        }
    }
    plan
}

/// Returns the time from which a snapshot's age counts, or `None` if no rule applies to it.
///
/// Rules apply to committed images that a user asked for and that no other object owns. The memory
/// that a Sandbox continues from is never among them.
fn kept_since(snapshot: &SandboxSnapshot) -> Option<Timestamp> {
    let by_user = snapshot.spec.reason == SnapshotReason::Manual
        && snapshot.owner_references().is_empty()
        && snapshot.metadata.deletion_timestamp.is_none();
    if !by_user || !snapshot.is_committed() {
        return None;
    }
    let committed = snapshot.committed_at()?;
    // The node's clock may be behind.
    let created = snapshot.metadata.creation_timestamp.as_ref();
    Some(created.map_or(committed, |created| committed.max(created.0)))
}

/// Returns the rule by which a snapshot has expired.
///
/// `rank` is the number of newer snapshots of its Sandbox.
fn expired_by(rules: &Retention, rank: usize, age: Duration) -> Option<String> {
    if let Some(ttl) = rules.ttl.filter(|ttl| age >= *ttl) {
        let ttl = jiff::SignedDuration::try_from(ttl).unwrap_or_default();
        return Some(format!("{TTL} {ttl:#}"));
    }
    let count = rules.keep_last.filter(|count| rank >= *count)?;
    Some(format!("{KEEP_LAST} {count}"))
}

#[cfg(test)]
mod tests {
    use rstest::rstest;
    use serde_json::{Value, json};

    use super::*;
    use crate::merge_patch;

    fn now() -> Timestamp {
        "2026-01-02T00:00:00Z".parse().unwrap()
    }

    /// Snapshot committed at this hour of the previous day.
    fn snapshot(name: &str, hour: u8, change: Value) -> Arc<SandboxSnapshot> {
        let mut whole = json!({
            "apiVersion": "torpor.dev/v1alpha1", "kind": "SandboxSnapshot",
            "metadata": {
                "name": name, "namespace": "ns", "uid": format!("u-{name}"), "resourceVersion": "7",
                "creationTimestamp": "2026-01-01T00:00:00Z",
            },
            "spec": {"sandboxName": "s", "reason": "Manual"},
            "status": {
                "committedAt": format!("2026-01-01T{hour:02}:00:00Z"),
                "conditions": [{
                    "type": "Committed", "status": "True", "reason": "Committed", "message": "",
                    "lastTransitionTime": "2026-01-01T00:00:00Z",
                }],
            },
        });
        merge_patch::apply(&mut whole, &change);
        Arc::new(serde_json::from_value(whole).unwrap())
    }

    fn planned(parameters: &[(&str, &str)], snapshots: &[Arc<SandboxSnapshot>]) -> Plan {
        plan(&observed(parameters, snapshots), now())
    }

    fn observed(parameters: &[(&str, &str)], snapshots: &[Arc<SandboxSnapshot>]) -> Observed {
        let owned = parameters.iter();
        let owned = owned.map(|(key, value)| ((*key).to_owned(), (*value).to_owned()));
        Observed {
            class: "daily".to_owned(),
            rules: Retention::read(&owned.collect()),
            snapshots: snapshots.to_vec(),
            in_use: BTreeSet::new(),
        }
    }

    fn names(plan: &Plan) -> Vec<&str> {
        plan.deletions.iter().map(|one| &*one.name).collect()
    }

    fn three() -> Vec<Arc<SandboxSnapshot>> {
        // Not ordered by age.
        let hours = [("a", 20), ("b", 4), ("c", 12)];
        hours
            .map(|(name, hour)| snapshot(name, hour, json!({})))
            .to_vec()
    }

    #[test]
    fn an_expired_snapshot_is_deleted_and_the_next_pass_is_when_another_expires() {
        let plan = planned(&[("ttl", "12h")], &three());
        assert_eq!(names(&plan), ["c", "b"]);
        assert_eq!(plan.next_look, Some(Duration::from_secs(8 * 3600)));
        let Deletion {
            uid,
            resource_version,
            why,
            ..
        } = &plan.deletions[0];
        assert_eq!((&**uid, resource_version.as_deref()), ("u-c", Some("7")));
        let expected =
            "Deleted SandboxSnapshot \"c\" by the rule ttl 12h of SnapshotClass \"daily\"";
        assert_eq!(why, expected);
    }

    #[test]
    fn the_newest_snapshots_are_kept_without_a_next_pass() {
        let plan = planned(&[("keepLast", "2")], &three());
        assert_eq!((names(&plan), plan.next_look), (vec!["b"], None));
        assert!(plan.deletions[0].why.contains("keepLast 2"), "{plan:?}");
        assert_eq!(planned(&[("keepLast", "3")], &three()), Plan::default());
        let both = planned(&[("keepLast", "1"), ("ttl", "5h")], &three());
        assert_eq!(names(&both), ["c", "b"]);
        assert_eq!(both.next_look, Some(Duration::from_secs(3600)));
    }

    #[test]
    fn a_snapshot_that_copies_start_from_stays_and_counts_among_the_newest() {
        let mut observed = observed(&[("keepLast", "1"), ("ttl", "1h")], &three());
        observed.in_use = ["a", "b"].map(str::to_owned).into();
        let plan = plan(&observed, now());
        assert_eq!((names(&plan), plan.next_look), (vec!["c"], None));
    }

    #[rstest]
    #[case::of_a_suspension(json!({"spec": {"reason": "Suspend"}}))]
    #[case::not_whole(json!({"status": {"conditions": null}}))]
    #[case::not_found_at_the_moment(json!({"status": {"imageID": "i.1", "conditions": [{
        "type": "Committed", "status": "False", "reason": "ImageMissing", "message": "",
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    }]}}))]
    #[case::of_a_pod_snapshot(json!({"metadata": {"ownerReferences": [{
        "apiVersion": "podsnapshot.gke.io/v1", "kind": "PodSnapshot", "name": "p", "uid": "u-p",
    }]}}))]
    #[case::being_deleted(json!({"metadata": {"deletionTimestamp": "2026-01-01T23:00:00Z"}}))]
    fn no_rule_applies_to_snapshots_that_are_uncommitted_or_not_made_by_a_user(
        #[case] change: Value,
    ) {
        let other = snapshot("o", 1, change);
        let rules = [("ttl", "1m"), ("keepLast", "1")];
        let newest = snapshot(
            "n",
            23,
            json!({"metadata": {"creationTimestamp": "2026-01-02T00:00:00Z"}}),
        );
        let plan = planned(&rules, &[other, newest]);
        assert_eq!(plan.deletions, []);
    }

    #[test]
    fn a_node_clock_that_is_behind_does_not_shorten_the_ttl() {
        let created = json!({"metadata": {"creationTimestamp": "2026-01-01T23:30:00Z"}});
        let plan = planned(&[("ttl", "1h")], &[snapshot("a", 1, created)]);
        assert_eq!(plan.deletions, []);
        assert_eq!(plan.next_look, Some(Duration::from_secs(1800)));
    }

    #[test]
    fn without_rules_nothing_is_deleted() {
        assert_eq!(planned(&[], &three()), Plan::default());
        assert_eq!(planned(&[("ttl", "soon")], &three()), Plan::default());
    }
}
