//! Tracks client connections of a small server; above a limit the oldest of one address is closed.
//!
//! The server accepts each new connection: before a request has come, nothing distinguishes a
//! probe from an idle client. [`Connections::add`] decides which connection to close, and is pure.

use std::{collections::HashMap, net::IpAddr};

/// Limits of simultaneous connections.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    pub total: usize,
    pub per_address: usize,
}

/// Open connections, the oldest first.
#[derive(Debug)]
pub(crate) struct Connections<C> {
    bounds: Bounds,
    open: Vec<(IpAddr, C)>,
}

impl<C> Connections<C> {
    pub(crate) fn new(bounds: Bounds) -> Self {
        Self {
            bounds,
            open: Vec::new(),
        }
    }

    /// Adds a connection and returns the one that has to be closed for it.
    ///
    /// The closed connection is the oldest of the new connection's address if the address exceeds
    /// its limit. Otherwise, if the total exceeds its limit, it is the oldest connection of the
    /// address with the most. While the addresses are at most as many as the total limit, no
    /// address loses its only connection.
    pub(crate) fn add(&mut self, peer: IpAddr, connection: C) -> Option<C> {
        // A socket of both families reports an IPv4 peer as a mapped IPv6 address.
        let peer = peer.to_canonical();
        self.open.push((peer, connection));
        let own = self.open.iter().filter(|(other, _)| *other == peer);
        let loser = if own.count() > self.bounds.per_address {
            peer
        } else if self.open.len() > self.bounds.total {
            self.address_with_most()?
        } else {
            return None;
        };
        let oldest = self.open.iter().position(|(other, _)| *other == loser)?;
        Some(self.open.remove(oldest).1)
    }

    /// Removes a connection that has ended, if it is still there.
    pub(crate) fn remove(&mut self, ended: impl Fn(&C) -> bool) {
        self.open.retain(|(_, connection)| !ended(connection));
    }

    /// Returns the address with the most connections; of several, the one with the oldest.
    fn address_with_most(&self) -> Option<IpAddr> {
        let mut counts: HashMap<IpAddr, usize> = HashMap::new();
        for (peer, _) in &self.open {
            *counts.entry(*peer).or_default() += 1;
        }
        // `max_by_key` returns the last of several maxima.
        let newest_first = self.open.iter().rev().map(|(peer, _)| *peer);
        newest_first.max_by_key(|peer| counts.get(peer).copied())
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    const BOUNDS: Bounds = Bounds {
        total: 4,
        per_address: 2,
    };

    fn peer(last: u8) -> IpAddr {
        IpAddr::from([10, 0, 0, last])
    }

    #[rstest]
    #[case::below_both_limits(&[1, 2, 1, 3], None)]
    #[case::address_above_its_limit(&[2, 1, 1, 1], Some(1))]
    #[case::full_server_another_address_has_most(&[2, 1, 1, 3, 4], Some(1))]
    #[case::full_server_the_new_address_has_most(&[2, 1, 3, 4, 1], Some(1))]
    #[case::several_addresses_have_most(&[2, 1, 2, 1, 3], Some(0))]
    #[case::each_address_has_one(&[1, 2, 3, 4, 5], Some(0))]
    fn the_last_connection_closes(#[case] peers: &[u8], #[case] closed: Option<usize>) {
        let mut connections = Connections::new(BOUNDS);
        let numbered = peers.iter().enumerate();
        let mut all: Vec<_> = numbered
            .map(|(n, last)| connections.add(peer(*last), n))
            .collect();
        assert_eq!(all.pop(), Some(closed));
        assert!(all.iter().all(Option::is_none), "{all:?}");
    }

    #[test]
    fn a_connection_that_has_ended_is_not_counted() {
        let mut connections = Connections::new(BOUNDS);
        for connection in 0..9 {
            assert_eq!(connections.add(peer(1), connection), None);
            connections.remove(|other| *other == connection);
        }
        connections.remove(|_| true);
        assert!(connections.open.is_empty());
    }

    #[test]
    fn a_mapped_address_is_its_ipv4_address() {
        let mut connections = Connections::new(BOUNDS);
        let mapped = "::ffff:10.0.0.1".parse().unwrap();
        assert_eq!(connections.add(peer(1), 0), None);
        assert_eq!(connections.add(mapped, 1), None);
        assert_eq!(connections.add(peer(1), 2), Some(0));
    }

    #[rstest]
    #[case::one(1)]
    #[case::as_many_as_fit(3)]
    fn an_address_keeps_its_only_connection_however_many_others_open(#[case] others: u8) {
        let mut connections = Connections::new(BOUNDS);
        assert_eq!(connections.add(peer(1), 0), None);
        let peers = (2..2 + others).cycle().take(300);
        for (connection, last) in (1..).zip(peers) {
            assert_ne!(connections.add(peer(last), connection), Some(0));
            assert!(connections.open.len() <= BOUNDS.total);
        }
    }
}
