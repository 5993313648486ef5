//! The order of restores when more sandboxes of a node are to wake than may at once: the line of
//! the processes that wait for a turn.
//!
//! The waiting processes share nothing but the places of the line (`torpor_runsc::wake_slots`).
//! Each process takes a place when it comes. A process restores when more turns are free than other
//! processes are before it. No process has to remember which namespace had the last turn.
//!
//! Namespaces take turns: a round has at most one place of each namespace. A process that comes
//! takes the first place after those of its own namespace that is in no round that has begun. A
//! namespace that needs a hundred sandboxes at once therefore waits for itself. Every other
//! namespace waits for at most two turns of it, and one more for each place of its own. Within
//! a round the order is that of names: each namespace has one turn in any case.

use std::fmt;

use crate::ids::Namespace;

const CLASS_AWAITED: &str = "called";
const CLASS_DEFERRABLE: &str = "asked";

/// A place in the line; the smallest comes first.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Place {
    /// No caller waits for the sandbox's answer: the place comes after all places with a caller.
    deferrable: bool,
    round: u64,
    namespace: Namespace,
}

impl Place {
    /// Returns the place of a process that comes now. `line`: the places that are taken.
    /// `deferrable`: no caller waits for the sandbox's answer. `is_stalled`: the process at a place
    /// waits for longer than any process waits.
    ///
    /// A stalled process does not hold up the rounds. Otherwise each process that comes while it is
    /// stalled would come before the processes that wait already.
    pub fn behind(
        line: &[Self],
        namespace: &Namespace,
        deferrable: bool,
        mut is_stalled: impl FnMut(&Self) -> bool,
    ) -> Self {
        let alike = || {
            line.iter()
                .filter(move |place| place.deferrable == deferrable)
        };
        let mut all: Vec<&Self> = alike().collect();
        all.sort_unstable();
        let first = all.into_iter().find(|place| !is_stalled(place));
        let begun = first.map(|place| place.round);
        let own = alike().filter(|place| place.namespace == *namespace);
        let last = begun.max(own.map(|place| place.round).max());
        Self {
            deferrable,
            round: last.map_or(0, |last| last.saturating_add(1)),
            namespace: namespace.clone(),
        }
    }

    /// Returns how many living processes are before this place; the count is exact up to `turns`,
    /// the number of turns.
    ///
    /// `is_alive` is called for the first places until `turns` of them are alive. The exact number
    /// of further ones does not matter. (If it were called until one is alive, dead processes
    /// behind a stalled one would keep all turns from the others.)
    pub fn ahead(
        &self,
        mut line: Vec<Self>,
        turns: usize,
        mut is_alive: impl FnMut(&Self) -> bool,
    ) -> usize {
        line.retain(|place| place < self);
        line.sort_unstable();
        let (mut living, mut dead) = (0, 0);
        for place in &line {
            if living == turns {
                break;
            }
            match is_alive(place) {
                true => living += 1,
                false => dead += 1,
            }
        }
        line.len() - dead
    }

    /// Parses the name of a place; `None` if it is the name of something else.
    pub fn parse(name: &str) -> Option<Self> {
        let (class, rest) = name.split_once('-')?;
        let (round, namespace) = rest.split_once('-')?;
        let deferrable = match class {
            CLASS_AWAITED => false,
            CLASS_DEFERRABLE => true,
            _ => return None,
        };
        Some(Self {
            deferrable,
            round: round.parse().ok()?,
            namespace: Namespace::new(namespace).ok()?,
        })
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let class = if self.deferrable {
            CLASS_DEFERRABLE
        } else {
            CLASS_AWAITED
        };
        write!(f, "{class}-{}-{}", self.round, self.namespace)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use proptest::prelude::*;

    use super::*;

    const NAMES: [&str; 4] = ["a", "b", "c", "d"];

    fn namespace(name: &str) -> Namespace {
        Namespace::new(name).unwrap()
    }

    /// The waiting processes, the dead and the stalled ones of them, and the number that restores.
    #[derive(Default)]
    struct Node {
        line: Vec<Place>,
        dead: BTreeSet<Place>,
        still: BTreeSet<Place>,
        restoring: usize,
    }

    impl Node {
        fn join(&mut self, name: &str, deferrable: bool) -> Place {
            let place = Place::behind(&self.line, &namespace(name), deferrable, |_| false);
            assert!(!self.line.contains(&place), "{place} is taken");
            self.line.push(place.clone());
            place
        }

        fn living(&self) -> Vec<Place> {
            let is_alive = |place: &&Place| !self.dead.contains(*place);
            self.line.iter().filter(is_alive).cloned().collect()
        }

        /// Returns the places of the processes that are able to take a turn, in their order.
        fn able(&self) -> Vec<Place> {
            let mut able = self.living();
            able.retain(|place| !self.still.contains(place));
            able.sort_unstable();
            able
        }

        /// The process that finds the place of a dead process removes it.
        fn ahead(&mut self, place: &Place, limit: usize) -> usize {
            let mut left = Vec::new();
            let ahead = place.ahead(self.line.clone(), limit, |other| {
                let dead = self.dead.contains(other);
                left.extend(dead.then(|| other.clone()));
                !dead
            });
            self.line.retain(|place| !left.contains(place));
            self.dead.retain(|place| !left.contains(place));
            ahead
        }

        /// Gives a turn to each process with fewer processes before it than turns are free.
        fn serve(&mut self, limit: usize) -> Vec<Place> {
            let mut served = Vec::new();
            while self.restoring < limit {
                let free = limit - self.restoring;
                let mut able = self.able().into_iter();
                let Some(next) = able.find(|place| self.ahead(place, limit) < free) else {
                    break;
                };
                self.line.retain(|place| *place != next);
                self.restoring += 1;
                served.push(next);
            }
            served
        }
    }

    /// The namespaces of a line in the order of their turns, one turn after the other.
    fn order(node: &mut Node) -> Vec<String> {
        std::iter::from_fn(|| {
            node.restoring = 0;
            let served = node.serve(1);
            Some(served.first()?.namespace.to_string())
        })
        .collect()
    }

    #[test]
    fn namespaces_take_turns_to_wake() {
        let mut node = Node::default();
        for name in ["many", "many", "many", "many", "one", "two", "two"] {
            node.join(name, false);
        }
        let expected = ["many", "many", "one", "two", "many", "two", "many"];
        assert_eq!(order(&mut node), expected);
    }

    #[test]
    fn a_wake_that_a_caller_waits_for_comes_first() {
        let mut node = Node::default();
        for (name, deferrable) in [("a", true), ("a", true), ("b", true), ("c", false)] {
            node.join(name, deferrable);
        }
        assert_eq!(order(&mut node), ["c", "a", "a", "b"]);
    }

    #[test]
    fn a_wake_whose_process_ended_loses_its_place_in_the_line() {
        let mut node = Node::default();
        let places = ["a", "b", "c", "d"].map(|name| node.join(name, false));
        node.dead.extend([places[0].clone(), places[1].clone()]);
        let ahead = |node: &mut Node, n: usize| node.ahead(&places[n], 1);
        assert_eq!((ahead(&mut node, 2), ahead(&mut node, 3)), (0, 1));
        assert_eq!(node.line, places[2..]);
    }

    #[test]
    fn ended_processes_behind_a_stalled_process_take_no_turn() {
        let mut node = Node::default();
        let places = ["a", "b", "c", "d"].map(|name| node.join(name, false));
        node.still.insert(places[0].clone());
        node.dead.extend([places[1].clone(), places[2].clone()]);
        assert_eq!(node.serve(2), [places[3].clone()]);
    }

    #[test]
    fn a_stalled_process_holds_up_no_round() {
        let place = |round, name| Place {
            deferrable: false,
            round,
            namespace: namespace(name),
        };
        let line = [place(0, "a"), place(7, "b"), place(8, "b")];
        let round = |name, stalled: bool| {
            let is_stalled = |other: &Place| stalled && *other == line[0];
            Place::behind(&line, &namespace(name), false, is_stalled).round
        };
        assert_eq!((round("c", false), round("c", true)), (1, 8));
        assert_eq!((round("b", true), round("a", true)), (9, 8));
        // The name of a stalled place stays taken.
        let alone = &line[..1];
        let behind = |name| Place::behind(alone, &namespace(name), false, |_| true).round;
        assert_eq!((behind("a"), behind("b")), (1, 0));
    }

    #[test]
    fn only_a_well_formed_name_is_a_place_in_the_line() {
        for name in ["called-0-team-a", "asked-18446744073709551615-b"] {
            let place = Place::parse(name).unwrap();
            assert_eq!(place.to_string(), name);
        }
        for name in [
            "",
            "called",
            "called-0",
            "called-x-a",
            "other-0-a",
            "asked-0-..",
        ] {
            assert_eq!(Place::parse(name), None, "{name}");
        }
    }

    proptest! {
        /// However many processes keep coming: a process with `own` places of its namespace before
        /// it waits for at most `own` + 2 turns of every other namespace.
        #[test]
        fn a_namespace_that_needs_many_wakes_delays_only_itself(
            limit in 1..4_usize,
            events in proptest::collection::vec((0..5_u8, 0..NAMES.len()), 1..300),
        ) {
            let (mut node, mut served, mut came) = (Node::default(), [0; NAMES.len()], BTreeMap::new());
            for (what, name) in events {
                if what < 3 {
                    let is_own = |place: &&Place| place.namespace.as_str() == NAMES[name];
                    let own = node.line.iter().filter(is_own).count();
                    came.insert(node.join(NAMES[name], false), (name, own, served));
                } else {
                    node.restoring = node.restoring.saturating_sub(1);
                }
                for place in node.serve(limit) {
                    let (name, own, before) = came.remove(&place).unwrap();
                    for other in (0..NAMES.len()).filter(|other| *other != name) {
                        let waited_for = served[other] - before[other];
                        prop_assert!(waited_for <= own + 2, "{place}, with {own} before it, waited for {waited_for} of {}", NAMES[other]);
                    }
                    served[name] += 1;
                }
                prop_assert!(node.restoring == limit || node.line.is_empty(), "a turn is free and {:?} wait", node.line);
            }
        }

        /// If processes die while they wait, no turn stays free while a living process waits for
        /// it, except one turn for each stalled process.
        #[test]
        fn ended_processes_keep_no_process_waiting(
            limit in 1..4_usize,
            events in proptest::collection::vec((0..7_u8, 0..NAMES.len(), any::<bool>(), 0..100_usize), 1..200),
        ) {
            let mut node = Node::default();
            for (what, name, deferrable, which) in events {
                let living = node.living();
                match what {
                    0..3 => drop(node.join(NAMES[name], deferrable)),
                    3 | 4 if !living.is_empty() => {
                        let dies = living[which % living.len()].clone();
                        node.still.remove(&dies);
                        node.dead.insert(dies);
                    }
                    5 if !living.is_empty() && node.still.len() + 1 < limit => {
                        node.still.insert(living[which % living.len()].clone());
                    }
                    _ => node.restoring = node.restoring.saturating_sub(1),
                }
                node.serve(limit);
                let taken = node.restoring + node.still.len();
                prop_assert!(taken >= limit || node.able().is_empty(), "{:?} wait, dead are {:?}, still stand {:?}", node.line, node.dead, node.still);
            }
        }
    }
}
