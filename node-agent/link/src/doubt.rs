//! Connections of the kubelet that may be a probe or a container's preStop hook.
//!
//! Both begin in the same way and may go to the same port. The keeper answers a probe for the
//! sandbox. Only the sandbox may answer a hook. Hooks run when the Pod is being deleted; the agent
//! sees the deletion at the same time as the kubelet. If a container has an HTTP hook at a port
//! that is probed too, such a connection therefore waits a moment for a message of the agent.

use std::time::{Duration, Instant};

use crate::packet::Ends;

/// Time that a connection waits for the agent's message.
///
/// The agent needs milliseconds, on a busy machine more. The kubelet waits a second or more.
pub const PATIENCE: Duration = Duration::from_millis(400);
/// The largest number of connections that wait. The kubelet has a few to a pod at once.
const MAX_WAITING: usize = 16;

/// The first frames of connections that wait.
#[derive(Debug, Default)]
pub struct UndecidedConnections(Vec<Doubt>);

#[derive(Debug, Clone, PartialEq, Eq)]
struct Doubt {
    ends: Ends,
    frame: Box<[u8]>,
    until: Instant,
}

/// The result for a connection that waited.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Decision {
    /// The connection is a probe: no message of the agent came in time.
    Probe { ends: Ends, frame: Box<[u8]> },
    /// The connection is no probe: its port is no longer a probed port.
    Other { frame: Box<[u8]> },
}

impl UndecidedConnections {
    /// Adds the first frame of a connection. A repeated frame changes nothing.
    ///
    /// Returns false if there is no room.
    pub fn add(&mut self, ends: &Ends, frame: &[u8], now: Instant) -> bool {
        if self.0.iter().any(|doubt| doubt.ends == *ends) {
            return true;
        }
        let room = self.0.len() < MAX_WAITING;
        if room {
            self.0.push(Doubt {
                ends: *ends,
                frame: frame.into(),
                until: now + PATIENCE,
            });
        }
        room
    }

    /// Removes and returns the connections that are settled at `now`.
    ///
    /// `probed`: the ports whose probes the keeper answers.
    pub fn settle(&mut self, probed: &[u16], now: Instant) -> Vec<Decision> {
        let mut settled = Vec::new();
        self.0.retain_mut(|doubt| {
            let ends = doubt.ends;
            let is_probed = probed.contains(&ends.local_port);
            if is_probed && now < doubt.until {
                return true;
            }
            let frame = std::mem::take(&mut doubt.frame);
            settled.push(match is_probed {
                true => Decision::Probe { ends, frame },
                false => Decision::Other { frame },
            });
            false
        });
        settled
    }

    /// Returns the time until the oldest connection is settled at the latest.
    pub fn settled_in(&self, now: Instant) -> Option<Duration> {
        let first = self.0.iter().map(|doubt| doubt.until).min()?;
        Some(first.saturating_duration_since(now))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ends(remote_port: u16) -> Ends {
        Ends {
            remote: [10, 1, 0, 1].into(),
            remote_port,
            local: [10, 1, 2, 3].into(),
            local_port: 80,
        }
    }

    #[test]
    fn an_undecided_connection_counts_as_a_probe_after_its_waiting_time() {
        let now = Instant::now();
        let mut doubts = UndecidedConnections::default();
        assert_eq!(doubts.settled_in(now), None);
        assert!(doubts.add(&ends(1), b"syn", now));
        // A repeated frame makes no second entry.
        assert!(doubts.add(&ends(1), b"syn", now + PATIENCE / 2));
        assert_eq!(doubts.settle(&[80], now), []);
        assert_eq!(doubts.settled_in(now), Some(PATIENCE));
        let (ends, frame) = (ends(1), Box::from(*b"syn"));
        let probe = Decision::Probe { ends, frame };
        assert_eq!(doubts.settle(&[80], now + PATIENCE), [probe]);
        assert_eq!(doubts.settle(&[80], now + PATIENCE), []);
    }

    #[test]
    fn an_undecided_connection_to_an_unprobed_port_is_settled_at_once() {
        let now = Instant::now();
        let mut doubts = UndecidedConnections::default();
        assert!(doubts.add(&ends(1), b"syn", now));
        let frame = Box::from(*b"syn");
        assert_eq!(doubts.settle(&[], now), [Decision::Other { frame }]);
    }

    #[test]
    fn the_number_of_undecided_connections_is_limited() {
        let now = Instant::now();
        let mut doubts = UndecidedConnections::default();
        let waiting = (0..100).filter(|port| doubts.add(&ends(*port), b"syn", now));
        assert_eq!(waiting.count(), MAX_WAITING);
    }
}
