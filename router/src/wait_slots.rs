//! Limited slots for held requests, and for tunnels and gRPC calls.
//!
//! The number of slots is limited in total and for each sandbox. One sandbox cannot take the slots
//! that another needs: [`Bounds::admit`] decides and is pure.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

/// Number of slots.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    pub all: usize,
    /// Slots for one sandbox.
    pub each: usize,
}

impl Bounds {
    /// Reports whether a sandbox that has `own` of the `taken` slots gets another.
    ///
    /// More slots must be free than the sandbox has: one sandbox alone takes at most half of them,
    /// two a third each, and the last slot goes to a sandbox that has none.
    pub fn admit(self, taken: usize, own: usize) -> bool {
        own < self.each && own < self.all.saturating_sub(taken)
    }

    /// Returns the most slots of one sandbox while no other has any.
    pub fn most_of_one(self) -> usize {
        self.each.min(self.all.div_ceil(2))
    }
}

/// Pool of slots. Clones share it.
#[derive(Clone, Debug)]
pub struct WaitSlots(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    bounds: Bounds,
    taken: Mutex<Taken>,
}

#[derive(Debug, Default)]
struct Taken {
    all: usize,
    by_sandbox: HashMap<Arc<str>, usize>,
}

impl WaitSlots {
    /// Returns a pool with all slots free.
    pub fn new(bounds: Bounds) -> Self {
        Self(Arc::new(Shared {
            bounds,
            taken: Mutex::default(),
        }))
    }

    /// Returns a slot for the sandbox of that UID, if it may have one more.
    ///
    /// All requests without a known sandbox share the UID `""`.
    pub fn take(&self, sandbox: &Arc<str>) -> Option<WaitSlot> {
        let mut taken = self.0.taken();
        let own = taken.by_sandbox.get(sandbox).copied().unwrap_or_default();
        if !self.0.bounds.admit(taken.all, own) {
            return None;
        }
        taken.all += 1;
        taken.by_sandbox.insert(Arc::clone(sandbox), own + 1);
        Some(WaitSlot {
            slots: self.clone(),
            sandbox: Arc::clone(sandbox),
        })
    }

    /// Returns the number of taken slots.
    pub fn taken(&self) -> usize {
        self.0.taken().all
    }
}

impl Shared {
    // Both numbers change together, so that a poisoned lock still guards valid data.
    fn taken(&self) -> MutexGuard<'_, Taken> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Slot, returned to the pool on drop.
#[derive(Debug)]
pub struct WaitSlot {
    slots: WaitSlots,
    sandbox: Arc<str>,
}

impl Drop for WaitSlot {
    fn drop(&mut self) {
        let mut taken = self.slots.0.taken();
        taken.all -= 1;
        if let Some(own) = taken.by_sandbox.get_mut(&self.sandbox) {
            *own -= 1;
            if *own == 0 {
                taken.by_sandbox.remove(&self.sandbox);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case::none_at_all(0, 9, 0, 0, false)]
    #[case::the_only_one(1, 9, 0, 0, true)]
    #[case::none_left(1, 9, 1, 0, false)]
    #[case::half_of_them(10, 9, 4, 4, true)]
    #[case::more_than_half(10, 9, 5, 5, false)]
    #[case::a_newcomer(10, 9, 9, 0, true)]
    #[case::its_own_bound(100, 3, 3, 3, false)]
    fn a_sandbox_gets_a_slot_if_more_are_free_than_it_has(
        #[case] all: usize,
        #[case] each: usize,
        #[case] taken: usize,
        #[case] own: usize,
        #[case] admitted: bool,
    ) {
        assert_eq!(Bounds { all, each }.admit(taken, own), admitted);
    }

    proptest! {
        #[test]
        fn one_sandbox_alone_gets_as_many_slots_as_most_of_one(all in 0_usize..100, each in 0_usize..100) {
            let bounds = Bounds { all, each };
            let most = bounds.most_of_one();
            prop_assert!((0..most).all(|own| bounds.admit(own, own)));
            prop_assert!(!bounds.admit(most, most));
        }

        #[test]
        fn the_last_slot_goes_to_a_sandbox_that_has_none(
            all in 1_usize..100, each in 1_usize..100, asked in prop::collection::vec(0_usize..6, 0..600),
        ) {
            let slots = WaitSlots::new(Bounds { all, each });
            let mut held: Vec<(usize, WaitSlot)> = Vec::new();
            for sandbox in asked {
                let own = held.iter().filter(|(other, _)| *other == sandbox).count();
                let uid = sandbox.to_string().into();
                let slot = slots.take(&uid);
                if let Some(slot) = slot {
                    held.push((sandbox, slot));
                    prop_assert!(own < each && held.len() <= all);
                    prop_assert!(own == 0 || held.len() < all, "the sandbox has {} already", own);
                } else {
                    prop_assert!(own > 0 || held.len() == all, "the sandbox has none, and some are free");
                }
                prop_assert_eq!(slots.taken(), held.len());
            }
            drop(held);
            prop_assert_eq!(slots.taken(), 0);
            prop_assert!(slots.0.taken().by_sandbox.is_empty());
        }
    }
}
