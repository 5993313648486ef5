//! Places that are few: for requests that wait, and for exchanges without an end in sight. They are bounded in all and for each sandbox, and a greedy sandbox cannot take
//! what another needs: [`Bounds::admit`] decides and is pure.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

/// How many places there are.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    pub all: usize,
    /// For one sandbox.
    pub each: usize,
}

impl Bounds {
    /// Whether a sandbox that has `own` of the `taken` places gets another. It must find more places free than it has: one sandbox alone takes half of them at most, two
    /// a third each, and the last one goes to a sandbox that has none.
    pub fn admit(self, taken: usize, own: usize) -> bool {
        own < self.each && own < self.all.saturating_sub(taken)
    }

    /// How many one sandbox can have while no other has any.
    pub fn most_of_one(self) -> usize {
        self.each.min(self.all.div_ceil(2))
    }
}

/// The places. Clones are the same ones.
#[derive(Clone, Debug)]
pub struct Places(Arc<Shared>);

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

impl Places {
    /// All of them free.
    pub fn new(bounds: Bounds) -> Self {
        Self(Arc::new(Shared {
            bounds,
            taken: Mutex::default(),
        }))
    }

    /// A place for the sandbox of that UID, unless there is none for it. Whoever is for no known sandbox takes it as the sandbox `""`.
    pub fn take(&self, sandbox: &Arc<str>) -> Option<Place> {
        let mut taken = self.0.taken();
        let own = taken.by_sandbox.get(sandbox).copied().unwrap_or_default();
        if !self.0.bounds.admit(taken.all, own) {
            return None;
        }
        taken.all += 1;
        taken.by_sandbox.insert(Arc::clone(sandbox), own + 1);
        Some(Place {
            places: self.clone(),
            sandbox: Arc::clone(sandbox),
        })
    }

    /// How many are taken.
    pub fn taken(&self) -> usize {
        self.0.taken().all
    }
}

impl Shared {
    // A poisoned lock only says that somebody panicked; both numbers are always changed together.
    fn taken(&self) -> MutexGuard<'_, Taken> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A place, given back when it is dropped.
#[derive(Debug)]
pub struct Place {
    places: Places,
    sandbox: Arc<str>,
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut taken = self.places.0.taken();
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
    fn a_place_is_given_where_more_are_free_than_one_has(
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
        fn one_sandbox_alone_gets_as_many_as_it_is_said_to_get(all in 0_usize..100, each in 0_usize..100) {
            let bounds = Bounds { all, each };
            let most = bounds.most_of_one();
            prop_assert!((0..most).all(|own| bounds.admit(own, own)));
            prop_assert!(!bounds.admit(most, most));
        }

        #[test]
        fn however_greedy_they_are_the_last_place_goes_to_who_has_none(
            all in 1_usize..100, each in 1_usize..100, asked in prop::collection::vec(0_usize..6, 0..600),
        ) {
            let places = Places::new(Bounds { all, each });
            let mut held: Vec<(usize, Place)> = Vec::new();
            for sandbox in asked {
                let own = held.iter().filter(|(other, _)| *other == sandbox).count();
                let uid = sandbox.to_string().into();
                let place = places.take(&uid);
                if let Some(place) = place {
                    held.push((sandbox, place));
                    prop_assert!(own < each && held.len() <= all);
                    prop_assert!(own == 0 || held.len() < all, "it has {} already", own);
                } else {
                    prop_assert!(own > 0 || held.len() == all, "it has none, and some are free");
                }
                prop_assert_eq!(places.taken(), held.len());
            }
            drop(held);
            prop_assert_eq!(places.taken(), 0);
            prop_assert!(places.0.taken().by_sandbox.is_empty());
        }
    }
}
