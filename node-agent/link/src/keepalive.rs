//! Answers the keepalives of peers, so that their idle connections live while the sandbox sleeps.
//!
//! **Definition.** A keepalive is an acknowledgement whose sequence number is one less than the
//! next one that its receiver expects. The receiver must therefore answer with its own numbers
//! (RFC 9293 §3.8.4, RFC 1122 §4.2.3.6). A probe of a closed window looks the same. The answer
//! follows from the keepalive itself: it acknowledges the number after the keepalive's own, and its
//! sequence number is the one that the keepalive acknowledges. The answer contains nothing new:
//! data that the sandbox has not received stays unacknowledged.
//!
//! **Detection.** One segment does not show that it *is* a keepalive. An ordinary acknowledgement,
//! late or because of a larger window, differs from it by its number alone, and the sandbox's
//! numbers are in its image. But a peer does not repeat an ordinary acknowledgement to a silent
//! receiver, while it repeats a keepalive without an answer after a second or more. A connection's
//! first keepalive is therefore not answered, unless an ordinary acknowledgement came before it.
//! The second one is answered, and from then on each one at once. Peers give up after several
//! (Linux after 9).
//!
//! **Segments without an answer** are kept for the sandbox like any acknowledgement: segments with
//! other options (selective acknowledgements report that data is missing; signatures cannot be made
//! here), and all segments of a connection on which anything else has come.
//!
//! **Segments that wake the sandbox.** Some acknowledgements are no keepalives but contain news:
//!
//! - A peer repeats its acknowledgement with a larger window: it has read the data that filled the
//!   window before. A sandbox that fell asleep while it could not send on has more data for it, and
//!   only the sandbox can send that. A connection's first acknowledgement in a sleep has none
//!   before it. Its peer therefore gets a keepalive of ours. If its answer has the same number, the
//!   acknowledgement was no keepalive.
//! - A peer acknowledges more than before: a paused sandbox, whose network stack runs, has
//!   sent data meanwhile.
//!
//! Some systems send keepalives with a byte of rubbish. On an unknown connection they count as data
//! and wake the sandbox.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use crate::acknowledgement::Acknowledgement;
use crate::packet::{Ends, Segment};
use crate::reminder::Reminder;

/// The largest number of connections in memory. Beyond it, the one that was silent for longest is
/// removed; its next two keepalives add it again.
const MAX_CONNECTIONS: usize = 1024;
/// The shortest interval between two keepalives; Linux' shortest is one second. A segment that is
/// repeated sooner is repeated for another reason.
const MIN_KEEPALIVE_INTERVAL: Duration = Duration::from_millis(900);
/// The shortest interval after an answer. If a peer sends again sooner, it did not accept the
/// answer, or the network has doubled its keepalive. The peer's next keepalives are then detected
/// anew. A peer repeats a keepalive after a second at the soonest.
const MIN_ANSWER_INTERVAL: Duration = Duration::from_millis(500);
/// The window of answers; the sandbox's own one is in its image.
///
/// The window is small, even if a connection multiplies it by 2^7. It is not zero: a peer with
/// data must be able to send it, so that the sandbox wakes.
const WINDOW: u16 = 4096;
/// The largest distance from a number to a later one. Numbers further on are earlier ones
/// (RFC 9293, 3.4).
pub(crate) const HALF: u32 = (1 << 31) - 1;

/// Time after which no peer acknowledges data from before the sleep any more. A receiver
/// may delay an acknowledgement by at most half a second (RFC 9293, 3.8.6.3).
const LATEST_ACKNOWLEDGEMENT: Duration = Duration::from_secs(1);
/// Time in which a peer answers a keepalive of ours. It answers at once, and repeats no
/// keepalive so soon.
const REPLY_TIME: Duration = Duration::from_millis(500);

/// The connections of one sleeping pod, as far as their peers' segments show them.
#[derive(Debug)]
pub struct Keepalives {
    /// Until then, a segment may acknowledge data from before the sleep.
    late_until: Instant,
    connections: HashMap<Ends, Connection>,
}

#[derive(Debug, Clone, Copy)]
struct Connection {
    /// The last segment that was recorded.
    last: Segment,
    /// When `last` first came, or when the peer got a keepalive of ours.
    at: Instant,
    state: State,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// `last` is an acknowledgement, or the first keepalive.
    Acknowledged,
    /// The peer got a keepalive of ours after `last`.
    Probed,
    /// `last` was a keepalive.
    Keepalive { answered: Instant },
    /// More than acknowledgements has come: only the sandbox can answer.
    Other,
}

/// The kind of a segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SegmentKind {
    /// A keepalive, and its answer.
    Keepalive(Answer),
    /// A keepalive, or an acknowledgement of a peer that has read on. The peer's reply to this
    /// keepalive of ours shows which one.
    Unclear(Answer),
    /// The peer has read the data that filled its window, and may wait for more.
    WindowOpens,
    /// The peer acknowledges more than before.
    AcknowledgesMore,
    /// None of these, as far as the segment shows.
    Other,
}

/// An acknowledgement to a peer: an answer to its keepalive, or a keepalive of ours.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Answer {
    to: Segment,
    sequence: u32,
    acknowledgment: u32,
}

impl Answer {
    /// Returns the sandbox's answer to a keepalive.
    fn to_keepalive(to: &Segment) -> Self {
        Self {
            to: *to,
            sequence: to.acknowledgment,
            acknowledgment: to.sequence.wrapping_add(1),
        }
    }

    /// Returns a keepalive of ours. A peer that gets a number that it has received long ago answers
    /// with the number that it expects and its own.
    fn probe(of: &Segment) -> Self {
        Self {
            to: *of,
            sequence: of.acknowledgment.wrapping_sub(1),
            acknowledgment: of.sequence,
        }
    }
}

impl Keepalives {
    /// Creates the state for a sandbox that falls asleep at `now`.
    pub fn begin(now: Instant) -> Self {
        Self {
            late_until: now + LATEST_ACKNOWLEDGEMENT,
            connections: HashMap::new(),
        }
    }

    /// Records a segment and returns its kind.
    ///
    /// `may_ask`: a peer may get a keepalive of ours, because no network stack answers for the
    /// sandbox.
    pub fn hear(&mut self, segment: &Segment, may_ask: bool, now: Instant) -> SegmentKind {
        if segment.rst || segment.begins() {
            // A connection that has ended or begins needs no keepalives.
            self.connections.remove(&segment.ends);
            return SegmentKind::Other;
        }
        let known = self.connections.get(&segment.ends).copied();
        if known.is_some_and(|known| known.is_reply_after_reading(segment, now)) {
            self.record(*segment, State::Acknowledged, now);
            return SegmentKind::WindowOpens;
        }
        if known.is_none() && is_bare(segment) && may_ask && now >= self.late_until {
            self.record(*segment, State::Probed, now);
            return SegmentKind::Unclear(Answer::probe(segment));
        }
        let state = next_state(known.as_ref(), segment, now);
        // Repetitions keep the time at which the segment first came.
        let at = match known {
            Some(known) if state == State::Acknowledged && is_repetition(&known.last, segment) => {
                known.at
            }
            _ => now,
        };
        self.record(*segment, state, at);
        if state == (State::Keepalive { answered: now }) {
            return SegmentKind::Keepalive(Answer::to_keepalive(segment));
        }
        match known {
            Some(known) if is_bare(segment) => news(&known.last, segment),
            _ => SegmentKind::Other,
        }
    }

    /// Ends the time in which segments may acknowledge data from before the sleep: the sandbox had
    /// sent nothing for long when it fell asleep.
    pub fn end_late_acknowledgements(&mut self) {
        self.late_until = self
            .late_until
            .checked_sub(LATEST_ACKNOWLEDGEMENT)
            .unwrap_or(self.late_until);
    }

    /// Returns a keepalive of ours to the sender of `segment`, if this is the connection's last one
    /// and no keepalive, and the sandbox may have missed it.
    ///
    /// A peer that repeats the segment has read on: [`SegmentKind::WindowOpens`].
    pub fn probe_again(&mut self, segment: &Segment, now: Instant) -> Option<Answer> {
        let known = self.connections.get_mut(&segment.ends)?;
        let is_last = known.last == *segment && known.state == State::Acknowledged;
        (is_last && is_bare(segment)).then(|| {
            (known.state, known.at) = (State::Probed, now);
            Answer::probe(segment)
        })
    }

    /// Returns the reminders for a sandbox that was restored. They follow all held frames.
    pub fn reminders(&self) -> impl Iterator<Item = Reminder> {
        let known = self.connections.values();
        known.filter_map(|known| Reminder::of(&known.last))
    }

    fn record(&mut self, last: Segment, state: State, at: Instant) {
        self.make_room(&last.ends);
        self.connections
            .insert(last.ends, Connection { last, at, state });
    }

    fn make_room(&mut self, ends: &Ends) {
        if self.connections.len() < MAX_CONNECTIONS || self.connections.contains_key(ends) {
            return;
        }
        let oldest = self.connections.iter().min_by_key(|(_, known)| known.at);
        if let Some(ends) = oldest.map(|(ends, _)| *ends) {
            self.connections.remove(&ends);
        }
    }
}

impl Connection {
    /// Reports whether the segment answers our keepalive and shows that `last` was no
    /// keepalive: after a keepalive its number would be another one now.
    ///
    /// The opposite does not prove a keepalive, because segments in between may have been lost.
    fn is_reply_after_reading(&self, segment: &Segment, now: Instant) -> bool {
        self.state == State::Probed
            && segment.has_no_data()
            && segment.sequence == self.last.sequence
            && segment.window > 0
            && now.saturating_duration_since(self.at) < REPLY_TIME
    }
}

/// Returns the state of a connection after a segment.
fn next_state(known: Option<&Connection>, segment: &Segment, now: Instant) -> State {
    let bare = is_bare(segment);
    let Some(known) = known else {
        return if bare {
            State::Acknowledged
        } else {
            State::Other
        };
    };
    let since = now.saturating_duration_since(known.at);
    match known.state {
        State::Other => State::Other,
        // A keepalive with a byte of rubbish is detected here: its number was received long ago.
        State::Keepalive { answered }
            if segment.sequence == known.last.sequence
                && segment.only_acknowledges()
                && segment.length <= 1
                && !segment.other_options =>
        {
            match now.saturating_duration_since(answered) >= MIN_ANSWER_INTERVAL {
                true => State::Keepalive { answered: now },
                false => State::Acknowledged,
            }
        }
        _ if !bare => State::Other,
        State::Acknowledged | State::Probed if since >= MIN_KEEPALIVE_INTERVAL => {
            let repeated = is_repetition(&known.last, segment);
            let follows = segment.sequence == known.last.sequence.wrapping_sub(1);
            match repeated || follows {
                true => State::Keepalive { answered: now },
                false => State::Acknowledged,
            }
        }
        State::Acknowledged | State::Probed | State::Keepalive { .. } => State::Acknowledged,
    }
}

/// Reports whether the segment has neither data nor options other than timestamps.
fn is_bare(segment: &Segment) -> bool {
    segment.has_no_data() && !segment.other_options
}

/// Returns the news in an acknowledgement that follows another one.
fn news(before: &Segment, now: &Segment) -> SegmentKind {
    match now.acknowledgment.wrapping_sub(before.acknowledgment) {
        0 if now.window > before.window => SegmentKind::WindowOpens,
        1..=HALF => SegmentKind::AcknowledgesMore,
        _ => SegmentKind::Other,
    }
}

fn is_repetition(before: &Segment, now: &Segment) -> bool {
    before.sequence == now.sequence
        && before.acknowledgment == now.acknowledgment
        && before.window == now.window
}

impl Answer {
    /// Returns the answer's Ethernet frame; `frame` is the keepalive's.
    ///
    /// Returns `None` if the keepalive's frame is not plain IP over Ethernet.
    pub fn frame(&self, frame: &[u8]) -> Option<Vec<u8>> {
        let to: [u8; 6] = frame.get(..6)?.try_into().ok()?;
        let from: [u8; 6] = frame.get(6..12)?.try_into().ok()?;
        if !matches!(frame.get(12..14)?, [0x08, 0x00] | [0x86, 0xdd]) {
            return None;
        }
        let ends = &self.to.ends;
        let acknowledgement = Acknowledgement {
            source: (ends.local, ends.local_port),
            destination: (ends.remote, ends.remote_port),
            sequence: self.sequence,
            number: self.acknowledgment,
            window: WINDOW,
            // The peer's clock, and the sandbox's latest time that the peer has received.
            timestamps: self.to.timestamps.map(|(value, echo)| (echo, value)),
        };
        acknowledgement.frame(to, from)
    }
}

#[cfg(test)]
pub(crate) mod tests;
