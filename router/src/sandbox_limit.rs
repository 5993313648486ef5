//! Limits requests in flight to each sandbox: a sandbox that does not respond cannot occupy the
//! connections of all clients.
//!
//! Tunnels and gRPC calls do not count here ([`crate::wait_slots`]). Every other request counts;
//! the counts are therefore split into parts with a lock each.

use std::{
    array,
    collections::HashMap,
    hash::{BuildHasher, RandomState},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

/// Number of parts: far more than threads that serve clients, so that locks are rarely contended.
const PARTS: usize = 64;

/// Number of requests by UID of the sandbox.
type Counts = HashMap<Arc<str>, usize>;

/// Counts of requests. Clones share them.
#[derive(Clone, Debug)]
pub struct SandboxLimit(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    /// Most requests to one sandbox; 0: no limit.
    each: usize,
    hasher: RandomState,
    parts: [Mutex<Counts>; PARTS],
}

impl SandboxLimit {
    /// Allows at most `each` requests to one sandbox; 0 sets no limit.
    pub fn new(each: usize) -> Self {
        Self(Arc::new(Shared {
            each,
            hasher: RandomState::new(),
            parts: array::from_fn(|_| Mutex::default()),
        }))
    }

    /// Counts a request to the sandbox of that UID; `None`: the sandbox is at its limit.
    pub fn take(&self, sandbox: &Arc<str>) -> Option<SandboxPermit> {
        let mut part = self.0.part(sandbox);
        match part.get_mut(sandbox) {
            Some(taken) if self.0.each > 0 && *taken >= self.0.each => return None,
            Some(taken) => *taken += 1,
            None => {
                part.insert(Arc::clone(sandbox), 1);
            }
        }
        drop(part);
        Some(SandboxPermit {
            limit: self.clone(),
            sandbox: Arc::clone(sandbox),
        })
    }
}

impl Shared {
    /// Locks the part that holds a sandbox.
    fn part(&self, sandbox: &str) -> MutexGuard<'_, Counts> {
        let [byte, ..] = self.hasher.hash_one(sandbox).to_ne_bytes();
        let part = &self.parts[usize::from(byte) % PARTS];
        // Each change is complete, so that a poisoned lock still guards valid data.
        part.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Request in flight, counted until dropped.
#[derive(Debug)]
pub struct SandboxPermit {
    limit: SandboxLimit,
    sandbox: Arc<str>,
}

impl Drop for SandboxPermit {
    fn drop(&mut self) {
        let mut part = self.limit.0.part(&self.sandbox);
        if let Some(taken) = part.get_mut(&self.sandbox) {
            *taken -= 1;
            if *taken == 0 {
                part.remove(&self.sandbox);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn each_sandbox_has_its_own_limit_and_frees_all_permits(
            each in 0_usize..5, steps in prop::collection::vec((0_usize..100, any::<bool>()), 0..300),
        ) {
            let limit = SandboxLimit::new(each);
            let mut held: Vec<(usize, SandboxPermit)> = Vec::new();
            for (sandbox, come) in steps {
                let own = held.iter().filter(|(other, _)| *other == sandbox).count();
                if come {
                    let uid: Arc<str> = sandbox.to_string().into();
                    let permit = limit.take(&uid);
                    prop_assert_eq!(permit.is_some(), each == 0 || own < each);
                    held.extend(permit.map(|permit| (sandbox, permit)));
                } else if let Some(at) = held.iter().position(|(other, _)| *other == sandbox) {
                    held.swap_remove(at);
                }
            }
            drop(held);
            let empty = limit.0.parts.iter().all(|part| part.lock().unwrap().is_empty());
            prop_assert!(empty, "{:?}", limit);
        }
    }

    #[test]
    fn sandboxes_are_spread_over_the_parts() {
        let limit = SandboxLimit::new(0);
        let uid = |n: usize| -> Arc<str> { format!("3f0c2a7b-1d4e-455a-9a6c-{n:012x}").into() };
        let _held: Vec<_> = (0..64 * PARTS).map(|n| limit.take(&uid(n))).collect();
        let parts = limit.0.parts.iter();
        let most = parts.map(|part| part.lock().unwrap().len()).max();
        // The hash puts about 64 into each part.
        assert!(most < Some(160), "{most:?} in one part");
    }
}
