//! Places at a small server. Whoever comes gets one: only what a connection says tells a probe from one that is silent, and it has not said anything yet. Where that makes
//! too many, the oldest of one address goes: [`Places::enter`] decides which, and is pure.

use std::{collections::HashMap, net::IpAddr};

/// How many places there are.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bounds {
    pub(crate) all: usize,
    /// For one address.
    pub(crate) each: usize,
}

/// The connections that have a place, the oldest first. They are few, so they are counted anew each time.
#[derive(Debug)]
pub(crate) struct Places<C> {
    bounds: Bounds,
    taken: Vec<(IpAddr, C)>,
}

impl<C> Places<C> {
    /// All of them free.
    pub(crate) fn new(bounds: Bounds) -> Self {
        Self {
            bounds,
            taken: Vec::new(),
        }
    }

    /// Gives a connection a place, and tells which one has to end for it: the oldest of an address that has more than it may, or, of all, of the address that has most. While
    /// there are no more addresses than places, nobody loses their only one.
    pub(crate) fn enter(&mut self, peer: IpAddr, connection: C) -> Option<C> {
        // A socket of both families writes IPv4 in IPv6.
        let peer = peer.to_canonical();
        self.taken.push((peer, connection));
        let own = self.taken.iter().filter(|(other, _)| *other == peer);
        let loser = if own.count() > self.bounds.each {
            peer
        } else if self.taken.len() > self.bounds.all {
            self.greediest()?
        } else {
            return None;
        };
        let oldest = self.taken.iter().position(|(other, _)| *other == loser)?;
        Some(self.taken.remove(oldest).1)
    }

    /// Frees the place of a connection that has ended, if it still had one.
    pub(crate) fn leave(&mut self, ended: impl Fn(&C) -> bool) {
        self.taken.retain(|(_, connection)| !ended(connection));
    }

    /// Who has most; of several, who has been here for longest.
    fn greediest(&self) -> Option<IpAddr> {
        let mut counts: HashMap<IpAddr, usize> = HashMap::new();
        for (peer, _) in &self.taken {
            *counts.entry(*peer).or_default() += 1;
        }
        // The last of several is taken.
        let newest_first = self.taken.iter().rev().map(|(peer, _)| *peer);
        newest_first.max_by_key(|peer| counts.get(peer).copied())
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    const BOUNDS: Bounds = Bounds { all: 4, each: 2 };

    fn peer(last: u8) -> IpAddr {
        IpAddr::from([10, 0, 0, last])
    }

    #[rstest]
    #[case::there_is_room(&[1, 2, 1, 3], None)]
    #[case::more_than_one_address_may_have(&[2, 1, 1, 1], Some(1))]
    #[case::of_a_full_server_who_has_most(&[2, 1, 1, 3, 4], Some(1))]
    #[case::who_comes_to_a_full_server_and_so_has_most(&[2, 1, 3, 4, 1], Some(1))]
    #[case::several_have_most(&[2, 1, 2, 1, 3], Some(0))]
    #[case::everybody_has_one(&[1, 2, 3, 4, 5], Some(0))]
    fn the_last_to_come_gets_the_place_of(#[case] comers: &[u8], #[case] lost: Option<usize>) {
        let mut places = Places::new(BOUNDS);
        let entered = comers.iter().enumerate();
        let mut all: Vec<_> = entered
            .map(|(n, comer)| places.enter(peer(*comer), n))
            .collect();
        assert_eq!(all.pop(), Some(lost));
        assert!(all.iter().all(Option::is_none), "{all:?}");
    }

    #[test]
    fn who_left_is_not_counted() {
        let mut places = Places::new(BOUNDS);
        for connection in 0..9 {
            assert_eq!(places.enter(peer(1), connection), None);
            places.leave(|other| *other == connection);
        }
        places.leave(|_| true);
        assert!(places.taken.is_empty());
    }

    #[test]
    fn an_address_is_one_however_it_is_written() {
        let mut places = Places::new(BOUNDS);
        let mapped = "::ffff:10.0.0.1".parse().unwrap();
        assert_eq!(places.enter(peer(1), 0), None);
        assert_eq!(places.enter(mapped, 1), None);
        assert_eq!(places.enter(peer(1), 2), Some(0));
    }

    #[rstest]
    #[case::one(1)]
    #[case::as_many_as_there_are_places(3)]
    fn however_many_come_from_the_others_nobody_loses_their_only_one(#[case] others: u8) {
        let mut places = Places::new(BOUNDS);
        assert_eq!(places.enter(peer(1), 0), None);
        let comers = (2..2 + others).cycle().take(300);
        for (connection, comer) in (1..).zip(comers) {
            assert_ne!(places.enter(peer(comer), connection), Some(0));
            assert!(places.taken.len() <= BOUNDS.all);
        }
    }
}
