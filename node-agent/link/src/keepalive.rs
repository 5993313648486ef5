//! Answering the keepalives of peers, so that their idle connections live as long as the sandbox sleeps.
//!
//! A keepalive is an acknowledgement whose sequence number is one less than the next one that its receiver expects, so
//! that the receiver has to say where it stands (RFC 9293 §3.8.4, RFC 1122 §4.2.3.6); a probe of a closed window looks the
//! same. What the answer says follows from the keepalive itself: it acknowledges the number after the keepalive's own, and
//! continues at the number that the keepalive acknowledges. It tells nothing new: whatever the sandbox has not received
//! stays unacknowledged.
//!
//! What does not follow from one segment is whether it *is* a keepalive: an ordinary acknowledgement, late or because of a
//! larger window, differs from it by its number alone, and the sandbox' numbers are in its image. But nothing makes a peer
//! repeat an ordinary acknowledgement to somebody who is silent, and a keepalive without an answer is repeated after a
//! second at the soonest. So a connection's first keepalive is not answered, unless an ordinary acknowledgement came before
//! it; the second is, and from then on each one at once. Peers give up after several (Linux after 9).
//!
//! Not answered, but kept for the sandbox like any acknowledgement: segments with other options (selective acknowledgements
//! say that data is missing; signatures cannot be made here), and all of a connection on which something else has come.
//! Of the acknowledgements that are none, one tells something: a peer that says again what it has said, but for a larger window, has
//! read what had filled the one before. The first one in a sleep has none before it: its peer is asked, by a keepalive of ours,
//! and what is said again with the same number was none. A sandbox that fell asleep while it could not send on has more for it, and nobody but the
//! sandbox can say that. Likewise a peer that acknowledges more than before, which a sandbox that stands still (its network
//! stack runs) has sent meanwhile.
//!
//! Keepalives with a byte of rubbish, as some systems send them, are data to who does not know the connection: they wake.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use crate::acknowledgement::Acknowledgement;
use crate::packet::{Ends, Segment};
use crate::reminder::Reminder;

/// Beyond these the one that was quiet for longest is forgotten, and learnt anew by its next two keepalives.
const MOST_CONNECTIONS: usize = 1024;
/// Linux' shortest interval between keepalives is one second. What is repeated sooner is repeated for another reason.
const REPEATED: Duration = Duration::from_millis(900);
/// A peer that speaks again sooner does not agree with the answer (or the network has doubled its keepalive): what is known
/// of it is learnt anew. The shortest time after which it would ask again is a second, too.
const PROTEST: Duration = Duration::from_millis(500);
/// What the sandbox has room for is in its image. This is little, also for a connection that multiplies it by 2^7, and not
/// nothing: who has something to say must say it, so that the sandbox wakes.
const WINDOW: u16 = 4096;
/// Numbers further on than this are earlier ones (RFC 9293, 3.4).
pub(crate) const HALF: u32 = (1 << 31) - 1;

/// After so long a sleep nobody acknowledges what was said before it any more: half a second is the most that a receiver may
/// wait (RFC 9293, 3.8.6.3).
const LATE: Duration = Duration::from_secs(1);
/// A peer that is asked answers at once, and no keepalive is repeated so soon.
const REPLY: Duration = Duration::from_millis(500);

/// What is known of the connections of one sleeping pod, from what their peers say.
#[derive(Debug)]
pub struct Keepalives {
    /// Until then what comes may acknowledge what was said before the sleep.
    late_until: Instant,
    connections: HashMap<Ends, Connection>,
}

#[derive(Debug, Clone, Copy)]
struct Connection {
    /// The last acknowledgement.
    said: Segment,
    at: Instant,
    state: State,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Heard,
    /// Its peer was asked what `said` was.
    Asked,
    /// `said` was a keepalive.
    Asks {
        answered: Instant,
    },
    /// More than acknowledgements has come: the sandbox alone knows what to say.
    Spoken,
}

/// What a segment was.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Heard {
    /// A keepalive, and what to answer.
    Keepalive(Answer),
    /// A keepalive, or that the peer has read on: what to ask, so that it says so.
    Unclear(Answer),
    /// The peer has read what had filled its window, and may wait for more.
    WindowOpens,
    /// The peer acknowledges more than before.
    AcknowledgesMore,
    /// Nothing that could be told from what it says.
    Other,
}

/// An acknowledgement to a peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Answer {
    to: Segment,
    sequence: u32,
    acknowledgment: u32,
}

impl Answer {
    /// What the sandbox would say to a keepalive.
    fn keeps_alive(to: &Segment) -> Self {
        Self {
            to: *to,
            sequence: to.acknowledgment,
            acknowledgment: to.sequence.wrapping_add(1),
        }
    }

    /// A keepalive of ours: whoever gets a number that it has received long ago says which one it expects, and at which it is itself.
    fn asks(of: &Segment) -> Self {
        Self {
            to: *of,
            sequence: of.acknowledgment.wrapping_sub(1),
            acknowledgment: of.sequence,
        }
    }
}

impl Keepalives {
    /// The sandbox falls asleep.
    pub fn begin(now: Instant) -> Self {
        Self {
            late_until: now + LATE,
            connections: HashMap::new(),
        }
    }

    /// Takes note of a segment, and says what it was. `may_ask`: nobody but us speaks for the sandbox.
    pub fn hear(&mut self, segment: &Segment, may_ask: bool, now: Instant) -> Heard {
        if segment.rst || segment.begins() {
            // What is not there, or not yet, is not kept alive.
            self.connections.remove(&segment.ends);
            return Heard::Other;
        }
        let known = self.connections.get(&segment.ends).copied();
        if known.is_some_and(|known| known.is_said_again(segment, now)) {
            self.note(*segment, State::Heard, now);
            return Heard::WindowOpens;
        }
        if known.is_none() && is_bare(segment) && may_ask && now >= self.late_until {
            self.note(*segment, State::Asked, now);
            return Heard::Unclear(Answer::asks(segment));
        }
        let state = next(known.as_ref(), segment, now);
        // Whether it has been said for long is told by when it was first said.
        let at = match known {
            Some(known) if state == State::Heard && repeats(&known.said, segment) => known.at,
            _ => now,
        };
        self.note(*segment, state, at);
        if state == (State::Asks { answered: now }) {
            return Heard::Keepalive(Answer::keeps_alive(segment));
        }
        match known {
            Some(known) if is_bare(segment) => goes_on(&known.said, segment),
            _ => Heard::Other,
        }
    }

    /// The sandbox had said nothing for long when it fell asleep.
    pub fn nothing_is_late(&mut self) {
        self.late_until = self.late_until.checked_sub(LATE).unwrap_or(self.late_until);
    }

    /// What to ask who has said this last, if that was no keepalive, and nobody can tell whether the sandbox has heard it. Who says it again has read on:
    /// [`Heard::WindowOpens`].
    pub fn ask_again(&mut self, segment: &Segment, now: Instant) -> Option<Answer> {
        let known = self.connections.get_mut(&segment.ends)?;
        let is_last = known.said == *segment && known.state == State::Heard;
        (is_last && is_bare(segment)).then(|| {
            (known.state, known.at) = (State::Asked, now);
            Answer::asks(segment)
        })
    }

    /// What the sandbox is told of those that were heard, if it was restored meanwhile: after all that has waited for it.
    pub fn reminders(&self) -> impl Iterator<Item = Reminder> {
        let known = self.connections.values();
        known.filter_map(|known| Reminder::of(&known.said))
    }

    fn note(&mut self, said: Segment, state: State, at: Instant) {
        self.make_room(&said.ends);
        self.connections
            .insert(said.ends, Connection { said, at, state });
    }

    fn make_room(&mut self, ends: &Ends) {
        if self.connections.len() < MOST_CONNECTIONS || self.connections.contains_key(ends) {
            return;
        }
        let quietest = self.connections.iter().min_by_key(|(_, known)| known.at);
        if let Some(ends) = quietest.map(|(ends, _)| *ends) {
            self.connections.remove(&ends);
        }
    }
}

impl Connection {
    /// Whether the segment is the answer to our question of one that has not asked whether the connection lives: then it would
    /// bear another number now. A keepalive is not believed to be one because of that: what was said meanwhile may have been lost.
    fn is_said_again(&self, segment: &Segment, now: Instant) -> bool {
        self.state == State::Asked
            && segment.says_nothing()
            && segment.sequence == self.said.sequence
            && segment.window > 0
            && now.saturating_duration_since(self.at) < REPLY
    }
}

fn next(known: Option<&Connection>, segment: &Segment, now: Instant) -> State {
    let bare = is_bare(segment);
    let Some(known) = known else {
        return if bare { State::Heard } else { State::Spoken };
    };
    let since = now.saturating_duration_since(known.at);
    match known.state {
        State::Spoken => State::Spoken,
        // By now one with a byte of rubbish is known for what it is: its number was received long ago.
        State::Asks { answered }
            if segment.sequence == known.said.sequence
                && segment.only_acknowledges()
                && segment.length <= 1
                && !segment.other_options =>
        {
            match now.saturating_duration_since(answered) >= PROTEST {
                true => State::Asks { answered: now },
                false => State::Heard,
            }
        }
        _ if !bare => State::Spoken,
        State::Heard | State::Asked if since >= REPEATED => {
            let repeated = repeats(&known.said, segment);
            let follows = segment.sequence == known.said.sequence.wrapping_sub(1);
            match repeated || follows {
                true => State::Asks { answered: now },
                false => State::Heard,
            }
        }
        State::Heard | State::Asked | State::Asks { .. } => State::Heard,
    }
}

fn is_bare(segment: &Segment) -> bool {
    segment.says_nothing() && !segment.other_options
}

fn goes_on(before: &Segment, now: &Segment) -> Heard {
    match now.acknowledgment.wrapping_sub(before.acknowledgment) {
        0 if now.window > before.window => Heard::WindowOpens,
        1..=HALF => Heard::AcknowledgesMore,
        _ => Heard::Other,
    }
}

fn repeats(before: &Segment, now: &Segment) -> bool {
    before.sequence == now.sequence
        && before.acknowledgment == now.acknowledgment
        && before.window == now.window
}

impl Answer {
    /// The answer as it goes out of the pod's link; `frame` is the keepalive. None if that is not plain IP over Ethernet.
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
            // The peer's clock, and the last time of the sandbox' that it has seen.
            timestamps: self.to.timestamps.map(|(value, echo)| (echo, value)),
        };
        acknowledgement.frame(to, from)
    }
}

#[cfg(test)]
pub(crate) mod tests;
