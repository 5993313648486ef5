//! What this process knows of claims that stands in no object yet: when each was first seen, and which write is without an answer. All of it may be lost at any moment;
//! the objects and the fences of the writes are what keeps claims right.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use jiff::Timestamp;
use kube::ResourceExt;
use torpor_api::{SandboxClaim, annotations, conditions};

/// What this process knows of claims, by UID. Clones share it.
#[derive(Clone, Debug, Default)]
pub struct Sightings(Arc<Mutex<HashMap<String, Sighting>>>);

/// The annotations of a claim are being written, or wait for their turn, as long as this is there.
#[derive(Debug)]
pub struct Telling {
    sightings: Sightings,
    uid: String,
}

impl Drop for Telling {
    fn drop(&mut self) {
        self.sightings.set_telling(&self.uid, false);
    }
}

/// What this process knows of one claim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sighting {
    /// When a controller saw the claim first.
    pub first_seen: Timestamp,
    /// A Sandbox that was assigned or created, and nobody knows whether it took effect.
    pub unsettled: Option<String>,
    /// The first Ready was counted, by this process or an earlier one.
    pub counted: bool,
    /// When this process counted it.
    pub ready_at: Option<Timestamp>,
    /// Carrier of the trace that the claim's first pass began, while no annotation of the claim names one.
    pub trace: Option<String>,
    /// The annotations are being written, or wait for their turn.
    pub telling: bool,
}

impl Sightings {
    /// Takes note of a claim.
    pub fn see(&self, claim: &SandboxClaim, now: Timestamp) {
        let uid = claim.uid().unwrap_or_default();
        self.lock().entry(uid).or_insert_with(|| first(claim, now));
    }

    /// What is known of a claim.
    pub fn of(&self, claim: &SandboxClaim, now: Timestamp) -> Sighting {
        let known = self.lock().get(&claim.uid().unwrap_or_default()).cloned();
        known.unwrap_or_else(|| first(claim, now))
    }

    /// Takes note of a Sandbox whose write may or may not take effect; `None` when the outcome is known.
    pub fn set_unsettled(&self, claim: &SandboxClaim, sandbox: Option<String>) {
        let uid = claim.uid().unwrap_or_default();
        if let Some(sighting) = self.lock().get_mut(&uid) {
            sighting.unsettled = sandbox;
        }
    }

    /// The first Ready is counted now. `false`: it was before.
    pub fn count(&self, claim: &SandboxClaim, now: Timestamp) -> bool {
        let uid = claim.uid().unwrap_or_default();
        let mut all = self.lock();
        let Some(sighting) = all.get_mut(&uid).filter(|sighting| !sighting.counted) else {
            return false;
        };
        sighting.counted = true;
        sighting.ready_at = Some(now);
        true
    }

    /// The trace of a claim whose annotation names none: that of its first pass, for which `begun` is asked.
    pub fn trace(
        &self,
        claim: &SandboxClaim,
        begun: impl FnOnce() -> Option<String>,
    ) -> Option<String> {
        let uid = claim.uid().unwrap_or_default();
        let mut all = self.lock();
        let sighting = all.get_mut(&uid)?;
        if sighting.trace.is_none() {
            sighting.trace = begun();
        }
        sighting.trace.clone()
    }

    /// The annotations are going to be written. `None`: they are already.
    pub fn tell(&self, claim: &SandboxClaim) -> Option<Telling> {
        let uid = claim.uid().unwrap_or_default();
        let sightings = self.clone();
        // Not made at all for who comes second: its end would say that nobody tells.
        (!self.set_telling(&uid, true)).then(|| Telling { sightings, uid })
    }

    /// What was so before.
    fn set_telling(&self, uid: &str, telling: bool) -> bool {
        let mut all = self.lock();
        all.get_mut(uid)
            .is_some_and(|sighting| std::mem::replace(&mut sighting.telling, telling))
    }

    /// The claim is gone.
    pub fn forget(&self, claim: &SandboxClaim) {
        let uid = claim.uid().unwrap_or_default();
        self.lock().remove(&uid);
    }

    // A panic elsewhere leaves the map as it was.
    fn lock(&self) -> MutexGuard<'_, HashMap<String, Sighting>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A claim that is Ready when it is seen for the first time became so without this process.
fn first(claim: &SandboxClaim, now: Timestamp) -> Sighting {
    let annotation = |key| claim.annotations().get(key);
    let earlier = annotation(annotations::CONTROLLER_FIRST_OBSERVED_AT);
    let conditions = claim.status.as_ref().map(|status| &status.conditions);
    Sighting {
        first_seen: earlier.and_then(|time| time.parse().ok()).unwrap_or(now),
        unsettled: None,
        counted: annotation(annotations::CLAIM_FIRST_READY_AT).is_some()
            || conditions.is_some_and(|all| conditions::is_true(all, conditions::READY)),
        ready_at: None,
        trace: None,
        telling: false,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn claim(metadata: Value, status: Value) -> SandboxClaim {
        let mut whole = json!({
            "apiVersion": "extensions.agents.x-k8s.io/v1beta1", "kind": "SandboxClaim",
            "metadata": {"name": "c", "uid": "u"},
            "spec": {"warmPoolRef": {"name": "p"}}, "status": status,
        });
        crate::merge_patch::apply(&mut whole, &json!({"metadata": metadata}));
        serde_json::from_value(whole).unwrap()
    }

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
    }

    #[test]
    fn a_claim_is_seen_once_and_counted_once() {
        let sightings = Sightings::default();
        let claim = claim(json!({}), Value::Null);
        sightings.see(&claim, at(1));
        sightings.see(&claim, at(2));
        assert_eq!(sightings.of(&claim, at(3)).first_seen, at(1));
        assert!(sightings.count(&claim, at(4)));
        assert!(!sightings.count(&claim, at(5)));
        assert_eq!(sightings.of(&claim, at(6)).ready_at, Some(at(4)));
    }

    #[test]
    fn what_is_being_told_is_not_told_twice_and_again_if_it_was_dropped() {
        let sightings = Sightings::default();
        let claim = claim(json!({}), Value::Null);
        sightings.see(&claim, at(1));
        let telling = sightings.tell(&claim);
        assert!(telling.is_some());
        assert!(sightings.tell(&claim).is_none());
        assert!(sightings.tell(&claim).is_none(), "nor by the third");
        drop(telling);
        assert!(sightings.tell(&claim).is_some());
    }

    #[test]
    fn what_an_earlier_process_saw_holds() {
        let sightings = Sightings::default();
        let seen = claim(
            json!({"annotations": {annotations::CONTROLLER_FIRST_OBSERVED_AT: "1970-01-01T00:00:05.5Z"}}),
            Value::Null,
        );
        let first = sightings.of(&seen, at(9)).first_seen;
        assert_eq!(first, Timestamp::from_millisecond(5500).unwrap());
        let ready = claim(
            json!({"uid": "u2"}),
            json!({"conditions": [{
                "type": "Ready", "status": "True", "reason": "R", "message": "",
                "lastTransitionTime": "2026-01-01T00:00:00Z",
            }]}),
        );
        sightings.see(&ready, at(9));
        assert!(!sightings.count(&ready, at(9)));
        assert_eq!(sightings.of(&ready, at(9)).ready_at, None);
    }
}
