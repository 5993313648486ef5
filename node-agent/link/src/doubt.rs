//! Connections of the kubelet that may be a probe, or the hook that a container has for its end.
//!
//! Both begin in the same way and may go to the same port; a probe is answered for the sandbox, a hook must be answered by
//! it. Hooks run when the Pod is being deleted, which the agent hears of at the same time as the kubelet. So where a
//! container has an HTTP hook at a port that is probed too, such a connection waits a moment for the agent's word.

use std::time::{Duration, Instant};

use crate::packet::Ends;

/// The agent needs milliseconds, on a busy machine more. The kubelet gives a probe a second at least.
pub const PATIENCE: Duration = Duration::from_millis(400);
/// The kubelet has a few connections to a pod at once.
const MOST: usize = 16;

/// The beginnings of connections that wait.
#[derive(Debug, Default)]
pub struct Doubts(Vec<Doubt>);

#[derive(Debug, Clone, PartialEq, Eq)]
struct Doubt {
    ends: Ends,
    frame: Box<[u8]>,
    until: Instant,
}

/// What a connection has turned out to be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Settled {
    /// The agent has not said otherwise.
    Probe { ends: Ends, frame: Box<[u8]> },
    /// Its port is not one of probes any more.
    Other { frame: Box<[u8]> },
}

impl Doubts {
    /// The first frame of a connection. It may be sent again meanwhile. False when there is no room.
    pub fn add(&mut self, ends: &Ends, frame: &[u8], now: Instant) -> bool {
        if self.0.iter().any(|doubt| doubt.ends == *ends) {
            return true;
        }
        let room = self.0.len() < MOST;
        if room {
            self.0.push(Doubt {
                ends: *ends,
                frame: frame.into(),
                until: now + PATIENCE,
            });
        }
        room
    }

    /// Those that are settled by now; `probed` are the ports of which probes are answered.
    pub fn settle(&mut self, probed: &[u16], now: Instant) -> Vec<Settled> {
        let mut settled = Vec::new();
        self.0.retain_mut(|doubt| {
            let ends = doubt.ends;
            let is_probed = probed.contains(&ends.local_port);
            if is_probed && now < doubt.until {
                return true;
            }
            let frame = std::mem::take(&mut doubt.frame);
            settled.push(match is_probed {
                true => Settled::Probe { ends, frame },
                false => Settled::Other { frame },
            });
            false
        });
        settled
    }

    /// When the first of them is settled, whatever comes.
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
    fn nobody_has_said_otherwise_so_it_is_a_probe() {
        let now = Instant::now();
        let mut doubts = Doubts::default();
        assert_eq!(doubts.settled_in(now), None);
        assert!(doubts.add(&ends(1), b"syn", now));
        // Said again, it is the same one.
        assert!(doubts.add(&ends(1), b"syn", now + PATIENCE / 2));
        assert_eq!(doubts.settle(&[80], now), []);
        assert_eq!(doubts.settled_in(now), Some(PATIENCE));
        let (ends, frame) = (ends(1), Box::from(*b"syn"));
        let probe = Settled::Probe { ends, frame };
        assert_eq!(doubts.settle(&[80], now + PATIENCE), [probe]);
        assert_eq!(doubts.settle(&[80], now + PATIENCE), []);
    }

    #[test]
    fn a_port_that_is_not_probed_any_more_settles_it_at_once() {
        let now = Instant::now();
        let mut doubts = Doubts::default();
        assert!(doubts.add(&ends(1), b"syn", now));
        let frame = Box::from(*b"syn");
        assert_eq!(doubts.settle(&[], now), [Settled::Other { frame }]);
    }

    #[test]
    fn only_so_many_wait() {
        let now = Instant::now();
        let mut doubts = Doubts::default();
        let waiting = (0..100).filter(|port| doubts.add(&ends(*port), b"syn", now));
        assert_eq!(waiting.count(), MOST);
    }
}
