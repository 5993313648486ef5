//! Who is restored next, when more sandboxes of a node are to wake than may at once: the line of those who wait for a turn.
//!
//! They are processes that know each other by their places in the line alone (`torpor_runsc::wake_slots`). Each takes a place when it comes,
//! and goes when more turns are free than others are before it. Nobody has to remember who was served.
//!
//! Namespaces take turns: a round has at most one place of each, and who comes takes the first place after those of its own namespace
//! that is in no round that has begun. So one that needs a hundred sandboxes at once waits for itself, and everybody else for at most two
//! turns of it, and one more for each place of their own. Within a round the order is that of names: it is a turn of each in any case.

use std::fmt;

use crate::ids::Namespace;

const CALLED: &str = "called";
const ASKED: &str = "asked";

/// A place in the line; the smallest comes first.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Place {
    /// Nobody waits for its answer: it comes after all for whom somebody does.
    patient: bool,
    round: u64,
    namespace: Namespace,
}

impl Place {
    /// The place of one that comes now. Who `stands_still` does not hold up the rounds: for as long as it did, whoever comes would come before those who wait already.
    pub fn behind(
        line: &[Self],
        namespace: &Namespace,
        patient: bool,
        mut stands_still: impl FnMut(&Self) -> bool,
    ) -> Self {
        let alike = || line.iter().filter(move |place| place.patient == patient);
        let mut all: Vec<&Self> = alike().collect();
        all.sort_unstable();
        let first = all.into_iter().find(|place| !stands_still(place));
        let begun = first.map(|place| place.round);
        let own = alike().filter(|place| place.namespace == *namespace);
        let last = begun.max(own.map(|place| place.round).max());
        Self {
            patient,
            round: last.map_or(0, |last| last.saturating_add(1)),
            namespace: namespace.clone(),
        }
    }

    /// How many are before it. Who has died is not: `lives` is asked of the first, until there are as many who do as there are turns; how many more there are
    /// is of no matter. (Were it asked until there is one, the dead behind one that stands still would keep all turns from the others.)
    pub fn ahead(
        &self,
        mut line: Vec<Self>,
        turns: usize,
        mut lives: impl FnMut(&Self) -> bool,
    ) -> usize {
        line.retain(|place| place < self);
        line.sort_unstable();
        let (mut living, mut dead) = (0, 0);
        for place in &line {
            if living == turns {
                break;
            }
            match lives(place) {
                true => living += 1,
                false => dead += 1,
            }
        }
        line.len() - dead
    }

    /// The place of this name; none if it is the name of something else.
    pub fn parse(name: &str) -> Option<Self> {
        let (class, rest) = name.split_once('-')?;
        let (round, namespace) = rest.split_once('-')?;
        let patient = match class {
            CALLED => false,
            ASKED => true,
            _ => return None,
        };
        Some(Self {
            patient,
            round: round.parse().ok()?,
            namespace: Namespace::new(namespace).ok()?,
        })
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let class = if self.patient { ASKED } else { CALLED };
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

    /// Those who wait, who of them has died or stands still, and how many restore.
    #[derive(Default)]
    struct Node {
        line: Vec<Place>,
        dead: BTreeSet<Place>,
        still: BTreeSet<Place>,
        restoring: usize,
    }

    impl Node {
        fn join(&mut self, name: &str, patient: bool) -> Place {
            let place = Place::behind(&self.line, &namespace(name), patient, |_| false);
            assert!(!self.line.contains(&place), "{place} is taken");
            self.line.push(place.clone());
            place
        }

        fn living(&self) -> Vec<Place> {
            let lives = |place: &&Place| !self.dead.contains(*place);
            self.line.iter().filter(lives).cloned().collect()
        }

        /// Those who go when they may, in the order of their places.
        fn able(&self) -> Vec<Place> {
            let mut able = self.living();
            able.retain(|place| !self.still.contains(place));
            able.sort_unstable();
            able
        }

        /// What is left of the dead is removed by who finds it.
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

        /// Whoever has fewer before it than there are free turns goes.
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

    /// The namespaces of a line in the order in which they are served, one after the other.
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
    fn who_waits_for_an_answer_comes_first() {
        let mut node = Node::default();
        for (name, patient) in [("a", true), ("a", true), ("b", true), ("c", false)] {
            node.join(name, patient);
        }
        assert_eq!(order(&mut node), ["c", "a", "a", "b"]);
    }

    #[test]
    fn who_has_died_is_passed_over() {
        let mut node = Node::default();
        let places = ["a", "b", "c", "d"].map(|name| node.join(name, false));
        node.dead.extend([places[0].clone(), places[1].clone()]);
        let ahead = |node: &mut Node, n: usize| node.ahead(&places[n], 1);
        assert_eq!((ahead(&mut node, 2), ahead(&mut node, 3)), (0, 1));
        assert_eq!(node.line, places[2..]);
    }

    #[test]
    fn the_dead_behind_one_that_stands_still_keep_no_turn_from_the_others() {
        let mut node = Node::default();
        let places = ["a", "b", "c", "d"].map(|name| node.join(name, false));
        node.still.insert(places[0].clone());
        node.dead.extend([places[1].clone(), places[2].clone()]);
        assert_eq!(node.serve(2), [places[3].clone()]);
    }

    #[test]
    fn one_that_stands_still_holds_up_no_round() {
        let place = |round, name| Place {
            patient: false,
            round,
            namespace: namespace(name),
        };
        let line = [place(0, "a"), place(7, "b"), place(8, "b")];
        let of = |name, still: bool| {
            let stands_still = |other: &Place| still && *other == line[0];
            Place::behind(&line, &namespace(name), false, stands_still).round
        };
        assert_eq!((of("c", false), of("c", true)), (1, 8));
        assert_eq!((of("b", true), of("a", true)), (9, 8));
        // Its name stays its own.
        let alone = &line[..1];
        let behind = |name| Place::behind(alone, &namespace(name), false, |_| true).round;
        assert_eq!((behind("a"), behind("b")), (1, 0));
    }

    #[test]
    fn a_place_is_its_name_and_nothing_else_is() {
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
        /// However many others come, and go on coming: who has `own` of its namespace before it waits for at most so many turns of every
        /// other namespace, and two.
        #[test]
        fn a_namespace_that_needs_many_sandboxes_waits_for_itself(
            limit in 1..4_usize,
            events in proptest::collection::vec((0..5_u8, 0..NAMES.len()), 1..300),
        ) {
            let (mut node, mut served, mut came) = (Node::default(), [0; NAMES.len()], BTreeMap::new());
            for (what, name) in events {
                if what < 3 {
                    let of_it = |place: &&Place| place.namespace.as_str() == NAMES[name];
                    let own = node.line.iter().filter(of_it).count();
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

        /// Whoever dies while it waits: no turn stays free while somebody lives who waits for it, but for one for each that stands still.
        #[test]
        fn the_dead_keep_nobody_waiting(
            limit in 1..4_usize,
            events in proptest::collection::vec((0..7_u8, 0..NAMES.len(), any::<bool>(), 0..100_usize), 1..200),
        ) {
            let mut node = Node::default();
            for (what, name, patient, which) in events {
                let living = node.living();
                match what {
                    0..3 => drop(node.join(NAMES[name], patient)),
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
