//! The end of a watch: the sandbox gets the packets that were held for it.

use torpor_link::packet::is_tcp;
use torpor_link::tap::{HEADER, ethernet};

use super::Watch;
use crate::keeper::keepalive_probes;
use crate::keeper::sender::with_sender;

/// The largest number of rounds in which held frames are handed over. Each round hands over the
/// frames that came during the one before.
const MAX_HANDOVERS: usize = 8;

impl Watch {
    /// Ends the watch, because the sandbox runs. Releases the packets from the pod, and then those
    /// to the pod; in each direction the held ones come first.
    ///
    /// The programs are detached from the links last: that takes longer, and no peer waits for it.
    pub(in crate::keeper) fn release(mut self) {
        self.end_answers();
        // The sandbox answers all probes itself, also those that were not settled.
        self.rules.probes.clear();
        // If the sandbox was woken at once, its hibernation may not have been recorded here.
        let restored = self.is_hibernated || self.held_egress.is_some();
        let mut held_egress = self.held_egress.take();
        if let Some(held) = &mut held_egress {
            held.release();
            self.send_as(None);
        }
        // Held frames are handed over before the drop ends, so that no later frame overtakes them.
        // A flood of packets must not delay the sandbox, so the rounds are limited.
        for _ in 0..MAX_HANDOVERS {
            if !self.hand_over(|_| true) {
                break;
            }
        }
        if restored {
            self.send_reminders();
            self.hand_over(|_| true);
        }
        self.packet_drop.open();
        self.passes_all = false;
        // Some frames came just before the drop ended. The sandbox may have received them already,
        // so only those of TCP are handed over, which accepts a segment twice.
        self.hand_over(is_tcp);
        if restored {
            self.send_keepalive_probes();
        }
        // The programs for packets from the pod are detached last, too.
        drop(held_egress);
    }

    /// Hands the held frames that `is_wanted` selects over to the sandbox, and drops the others.
    /// Returns whether any frames were held.
    fn hand_over(&mut self, is_wanted: impl Fn(&[u8]) -> bool) -> bool {
        let _ = self.handle_frames();
        let frames = self.sensor.release();
        // All frames go to the first link. A pod with several links may have received a frame on
        // another one, but the frame's destination address is the same pod's.
        let Some(link) = self.links.first() else {
            return false;
        };
        let wanted = frames.iter().filter(|frame| is_wanted(ethernet(frame)));
        for frame in wanted.filter_map(|frame| with_sender(frame, self.sender)) {
            // A peer repeats a lost frame if it needs an answer.
            let _ = link.tap.send(&frame);
        }
        !frames.is_empty()
    }

    /// Sends reminders to the sandbox, because gVisor restores no retransmission timers: see
    /// [`torpor_link::reminder`]. They follow the held frames, whose numbers are lower.
    fn send_reminders(&self) {
        let Some(link) = self.links.first() else {
            return;
        };
        let (from, to) = (self.sender.address(), link.pair.pod_address);
        let reminders = self.keepalives.reminders();
        for frame in reminders.filter_map(|reminder| reminder.frame(from, to)) {
            let frame = [&[0_u8; HEADER][..], frame.as_slice()].concat();
            // Without its reminder, a connection stays as it was.
            let _ = link.tap.send(&frame);
        }
    }

    /// Sends keepalives to the peers that may wait for lost data of the sandbox: see
    /// [`torpor_link::question`].
    fn send_keepalive_probes(self) {
        let Some((link, map)) = self.links.first().zip(self.unacknowledged) else {
            return;
        };
        for frame in keepalive_probes::frames(map, &self.pod_ips, link.pair.pod_address) {
            link.pod_end.send(frame);
        }
    }
}
