//! Facts about claims that this process knows and no object holds yet: the time of first sight, and
//! the write without an answer.
//!
//! All of them may be lost at any moment; the objects and the preconditions of the writes keep
//! claims correct.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use jiff::Timestamp;
use kube::ResourceExt;
use torpor_api::{SandboxClaim, annotations, conditions};

/// Facts that this process knows about claims, by UID. Clones share them.
#[derive(Clone, Debug, Default)]
pub struct Memory(Arc<Mutex<HashMap<String, Remembered>>>);

/// Guard of a pending or running write of a claim's annotations.
#[derive(Debug)]
pub struct AnnotationsWrite {
    memory: Memory,
    uid: String,
}

impl Drop for AnnotationsWrite {
    fn drop(&mut self) {
        self.memory.set_writing(&self.uid, false);
    }
}

/// Facts that this process knows about one claim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Remembered {
    /// Time at which a controller first saw the claim.
    pub first_seen: Timestamp,
    /// Sandbox whose assignment or creation has an unknown outcome.
    pub unsettled: Option<String>,
    /// Time since which the claim waits for a member that sleeps.
    pub waits_since: Option<Timestamp>,
    /// True if it was counted that the claim has got a Sandbox.
    pub got: bool,
    /// True if the first Ready was counted, by this process or an earlier one.
    pub counted: bool,
    /// Time at which this process counted the first Ready.
    pub ready_at: Option<Timestamp>,
    /// Carrier of the trace of the claim's first pass, while no annotation of the claim has one.
    pub trace: Option<String>,
    /// True if a write of the annotations is pending or running.
    pub writing: bool,
}

impl Memory {
    /// Records a claim.
    pub fn see(&self, claim: &SandboxClaim, now: Timestamp) {
        let uid = claim.uid().unwrap_or_default();
        self.lock().entry(uid).or_insert_with(|| first(claim, now));
    }

    /// Returns the facts about a claim.
    pub fn of(&self, claim: &SandboxClaim, now: Timestamp) -> Remembered {
        let remembered = self.lock().get(&claim.uid().unwrap_or_default()).cloned();
        remembered.unwrap_or_else(|| first(claim, now))
    }

    /// Records a Sandbox whose write may or may not take effect; `None` when the outcome is known.
    pub fn set_unsettled(&self, claim: &SandboxClaim, sandbox: Option<String>) {
        let uid = claim.uid().unwrap_or_default();
        if let Some(remembered) = self.lock().get_mut(&uid) {
            remembered.unsettled = sandbox;
        }
    }

    /// Returns the time since which the claim waits for a member that sleeps: this one at first.
    pub fn waits_since(&self, claim: &SandboxClaim, now: Timestamp) -> Timestamp {
        let uid = claim.uid().unwrap_or_default();
        let mut all = self.lock();
        let remembered = all.get_mut(&uid);
        remembered.map_or(now, |remembered| *remembered.waits_since.get_or_insert(now))
    }

    /// Counts that the claim has got a Sandbox. Returns false if this process counted it before: a
    /// member that could not wake was replaced.
    pub fn count_got(&self, claim: &SandboxClaim) -> bool {
        let uid = claim.uid().unwrap_or_default();
        let mut all = self.lock();
        let remembered = all.get_mut(&uid);
        remembered.is_none_or(|remembered| !std::mem::replace(&mut remembered.got, true))
    }

    /// Counts the first Ready. Returns false if it was counted before.
    pub fn count(&self, claim: &SandboxClaim, now: Timestamp) -> bool {
        let uid = claim.uid().unwrap_or_default();
        let mut all = self.lock();
        let Some(remembered) = all.get_mut(&uid).filter(|remembered| !remembered.counted) else {
            return false;
        };
        remembered.counted = true;
        remembered.ready_at = Some(now);
        true
    }

    /// Returns the trace of a claim without one in its annotation: that of its first pass, which
    /// `begun` returns.
    pub fn trace(
        &self,
        claim: &SandboxClaim,
        begun: impl FnOnce() -> Option<String>,
    ) -> Option<String> {
        let uid = claim.uid().unwrap_or_default();
        let mut all = self.lock();
        let remembered = all.get_mut(&uid)?;
        if remembered.trace.is_none() {
            remembered.trace = begun();
        }
        remembered.trace.clone()
    }

    /// Marks a write of the annotations as pending. Returns `None` if one is pending already.
    pub fn begin_write(&self, claim: &SandboxClaim) -> Option<AnnotationsWrite> {
        let uid = claim.uid().unwrap_or_default();
        let memory = self.clone();
        // Not constructed when one is pending: its drop would end the other's mark.
        (!self.set_writing(&uid, true)).then(|| AnnotationsWrite { memory, uid })
    }

    /// Sets the mark and returns its previous value.
    fn set_writing(&self, uid: &str, writing: bool) -> bool {
        let mut all = self.lock();
        all.get_mut(uid)
            .is_some_and(|remembered| std::mem::replace(&mut remembered.writing, writing))
    }

    /// Forgets a deleted claim.
    pub fn forget(&self, claim: &SandboxClaim) {
        let uid = claim.uid().unwrap_or_default();
        self.lock().remove(&uid);
    }

    // A panic elsewhere leaves the map unchanged.
    fn lock(&self) -> MutexGuard<'_, HashMap<String, Remembered>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns the facts about a claim at first sight. A claim that is Ready then became so before this
/// process saw it.
fn first(claim: &SandboxClaim, now: Timestamp) -> Remembered {
    let annotation = |key| claim.annotations().get(key);
    let earlier = annotation(annotations::CONTROLLER_FIRST_OBSERVED_AT);
    let conditions = claim.status.as_ref().map(|status| &status.conditions);
    Remembered {
        first_seen: earlier.and_then(|time| time.parse().ok()).unwrap_or(now),
        unsettled: None,
        waits_since: None,
        got: false,
        counted: annotation(annotations::CLAIM_FIRST_READY_AT).is_some()
            || conditions.is_some_and(|all| conditions::is_true(all, conditions::READY)),
        ready_at: None,
        trace: None,
        writing: false,
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
        let memory = Memory::default();
        let claim = claim(json!({}), Value::Null);
        memory.see(&claim, at(1));
        memory.see(&claim, at(2));
        assert_eq!(memory.of(&claim, at(3)).first_seen, at(1));
        assert!(memory.count(&claim, at(4)));
        assert!(!memory.count(&claim, at(5)));
        assert_eq!(memory.of(&claim, at(6)).ready_at, Some(at(4)));
    }

    #[test]
    fn a_claim_gets_a_sandbox_once_and_waits_since_it_first_did() {
        let memory = Memory::default();
        let claim = claim(json!({}), Value::Null);
        memory.see(&claim, at(1));
        assert!(memory.count_got(&claim) && !memory.count_got(&claim));
        assert_eq!(memory.waits_since(&claim, at(5)), at(5));
        assert_eq!(memory.waits_since(&claim, at(9)), at(5));
    }

    #[test]
    fn annotations_are_written_once_at_a_time_and_again_after_a_drop() {
        let memory = Memory::default();
        let claim = claim(json!({}), Value::Null);
        memory.see(&claim, at(1));
        let writing = memory.begin_write(&claim);
        assert!(writing.is_some());
        assert!(memory.begin_write(&claim).is_none());
        assert!(memory.begin_write(&claim).is_none(), "still pending");
        drop(writing);
        assert!(memory.begin_write(&claim).is_some());
    }

    #[test]
    fn facts_of_an_earlier_process_are_kept() {
        let memory = Memory::default();
        let seen = claim(
            json!({"annotations": {annotations::CONTROLLER_FIRST_OBSERVED_AT: "1970-01-01T00:00:05.5Z"}}),
            Value::Null,
        );
        let first = memory.of(&seen, at(9)).first_seen;
        assert_eq!(first, Timestamp::from_millisecond(5500).unwrap());
        let ready = claim(
            json!({"uid": "u2"}),
            json!({"conditions": [{
                "type": "Ready", "status": "True", "reason": "R", "message": "",
                "lastTransitionTime": "2026-01-01T00:00:00Z",
            }]}),
        );
        memory.see(&ready, at(9));
        assert!(!memory.count(&ready, at(9)));
        assert_eq!(memory.of(&ready, at(9)).ready_at, None);
    }
}
