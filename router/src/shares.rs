//! Requests under way to each sandbox, but for those that have no end in sight ([`crate::places`]): one that answers nothing does not take the connections of all clients.
//! Every request is counted, and so the counts are in parts, each with a lock of its own.

use std::{
    array,
    collections::HashMap,
    hash::{BuildHasher, RandomState},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

/// Many more than there are threads that serve clients: they seldom meet.
const PARTS: usize = 64;

/// Requests by UID of their sandbox.
type Counts = HashMap<Arc<str>, usize>;

/// The counts. Clones are the same ones.
#[derive(Clone, Debug)]
pub struct Shares(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    /// 0: any number.
    each: usize,
    hasher: RandomState,
    parts: [Mutex<Counts>; PARTS],
}

impl Shares {
    /// At most `each` requests to one sandbox; 0 sets no limit.
    pub fn new(each: usize) -> Self {
        Self(Arc::new(Shared {
            each,
            hasher: RandomState::new(),
            parts: array::from_fn(|_| Mutex::default()),
        }))
    }

    /// Counts one more request to the sandbox of that UID, unless it has as many as it may.
    pub fn take(&self, sandbox: &Arc<str>) -> Option<Share> {
        let mut part = self.0.part(sandbox);
        match part.get_mut(sandbox) {
            Some(taken) if self.0.each > 0 && *taken >= self.0.each => return None,
            Some(taken) => *taken += 1,
            None => {
                part.insert(Arc::clone(sandbox), 1);
            }
        }
        drop(part);
        Some(Share {
            shares: self.clone(),
            sandbox: Arc::clone(sandbox),
        })
    }
}

impl Shared {
    /// The part that a sandbox is in.
    fn part(&self, sandbox: &str) -> MutexGuard<'_, Counts> {
        let [byte, ..] = self.hasher.hash_one(sandbox).to_ne_bytes();
        let part = &self.parts[usize::from(byte) % PARTS];
        // A poisoned lock only says that somebody panicked; each change is whole.
        part.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A request under way, counted until it is dropped.
#[derive(Debug)]
pub struct Share {
    shares: Shares,
    sandbox: Arc<str>,
}

impl Drop for Share {
    fn drop(&mut self) {
        let mut part = self.shares.0.part(&self.sandbox);
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
        fn each_sandbox_has_its_own_share_and_gives_all_of_it_back(
            each in 0_usize..5, steps in prop::collection::vec((0_usize..100, any::<bool>()), 0..300),
        ) {
            let shares = Shares::new(each);
            let mut held: Vec<(usize, Share)> = Vec::new();
            for (sandbox, come) in steps {
                let own = held.iter().filter(|(other, _)| *other == sandbox).count();
                if come {
                    let uid: Arc<str> = sandbox.to_string().into();
                    let share = shares.take(&uid);
                    prop_assert_eq!(share.is_some(), each == 0 || own < each);
                    held.extend(share.map(|share| (sandbox, share)));
                } else if let Some(at) = held.iter().position(|(other, _)| *other == sandbox) {
                    held.swap_remove(at);
                }
            }
            drop(held);
            let empty = shares.0.parts.iter().all(|part| part.lock().unwrap().is_empty());
            prop_assert!(empty, "{:?}", shares);
        }
    }

    #[test]
    fn sandboxes_are_spread_over_the_parts() {
        let shares = Shares::new(0);
        let uid = |n: usize| -> Arc<str> { format!("3f0c2a7b-1d4e-455a-9a6c-{n:012x}").into() };
        let _held: Vec<_> = (0..64 * PARTS).map(|n| shares.take(&uid(n))).collect();
        let parts = shares.0.parts.iter();
        let most = parts.map(|part| part.lock().unwrap().len()).max();
        // Each has 64 more or less, by the hash.
        assert!(most < Some(160), "{most:?} in one part");
    }
}
