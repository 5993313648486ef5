//! Decides when a packet wakes a sandbox.
//!
//! ```text
//!            asleep                     wake
//!   Saving ─────────► Asleep ◄──────────────────► Waking
//!      └─────────────────┴──── release ──────────────┘  the sandbox runs and gets the frames
//! ```
//! The keeper reports events to the [`Sensor`], which returns what to do. A thousand packets make
//! one wake. A wake that failed is retried after a waiting time. It is retried some times without a
//! packet, because the sender of a datagram does not repeat it. Then it is retried when a packet
//! comes, for instance a repetition of TCP.

use std::time::{Duration, Instant};

use crate::held::Held;
use crate::packet::{Cause, Meaning, SegmentContent};

/// The waiting time after the first wake that failed. It doubles with each failure.
const RETRY_MIN: Duration = Duration::from_secs(1);
const RETRY_MAX: Duration = Duration::from_secs(60);
/// Retries of a wake without a packet; they take two minutes. An image that cannot be restored is
/// not tried for ever.
const RETRIES_WITHOUT_PACKET: u32 = 7;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// The sandbox is paused, and its memory is being written. No image contains what arrives now.
    Saving,
    Asleep,
    Waking,
}

/// The action to take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Next {
    Nothing,
    Wake(Cause),
}

impl Next {
    /// Combines two actions: one wake is enough.
    pub fn or(self, other: Self) -> Self {
        match self {
            Self::Nothing => other,
            Self::Wake(_) => self,
        }
    }
}

/// The state machine of one sandbox, from the begin of a save until the sandbox runs again.
#[derive(Debug)]
pub struct Sensor {
    phase: Phase,
    held: Held,
    /// The first packet since the save began that wants an answer.
    cause: Option<Cause>,
    failures: u32,
    not_before: Option<Instant>,
}

impl Default for Sensor {
    fn default() -> Self {
        Self {
            phase: Phase::Saving,
            held: Held::default(),
            cause: None,
            failures: 0,
            not_before: None,
        }
    }
}

impl Sensor {
    /// Records that a packet came before this sensor existed and has no answer of the sandbox yet.
    pub fn record_earlier_packet(&mut self) {
        self.cause.get_or_insert(Cause::Earlier);
    }

    /// Records a frame, and keeps it if the sandbox is to get it.
    ///
    /// `content`: of a TCP segment.
    pub fn arrived(
        &mut self,
        frame: &[u8],
        content: Option<SegmentContent>,
        meaning: Meaning,
        now: Instant,
    ) -> Next {
        match meaning {
            Meaning::NotForPod => return Next::Nothing,
            // The image has no state of this packet, and the frame could lie here for any time. It
            // counts as lost on its way: TCP sends it again. A sandbox that still runs, or almost
            // runs again, gets it.
            Meaning::Unwanted if self.phase == Phase::Asleep => return Next::Nothing,
            Meaning::Unwanted | Meaning::Quiet | Meaning::Wakes(_) => {
                self.held.keep(frame, content)
            }
        }
        // Only a packet that wants an answer starts a wake, also after a failure.
        match meaning {
            Meaning::Wakes(cause) => {
                self.cause.get_or_insert(cause);
                self.wake_if_due(now)
            }
            Meaning::NotForPod | Meaning::Quiet | Meaning::Unwanted => Next::Nothing,
        }
    }

    /// Records that the sandbox's processes have ended and its image is its memory.
    ///
    /// Packets may have come during the save. Repeated calls change nothing.
    pub fn asleep(&mut self, now: Instant) -> Next {
        if self.phase == Phase::Saving {
            self.phase = Phase::Asleep;
        }
        self.wake_if_due(now)
    }

    /// Records that a wake of this sensor has failed: the sandbox does not run.
    pub fn wake_failed(&mut self, now: Instant) {
        let wait = RETRY_MIN
            .saturating_mul(2_u32.saturating_pow(self.failures.min(30)))
            .min(RETRY_MAX);
        self.failures = self.failures.saturating_add(1);
        self.not_before = Some(now + wait);
        if self.phase == Phase::Waking {
            self.phase = Phase::Asleep;
        }
    }

    /// Returns the time until the next call of [`Sensor::turn`] if no packet comes.
    pub fn next_deadline(&self, now: Instant) -> Option<Duration> {
        let waits = self.phase == Phase::Asleep && self.cause.is_some();
        let at = self
            .not_before
            .filter(|_| waits && self.failures <= RETRIES_WITHOUT_PACKET)?;
        Some(at.saturating_duration_since(now))
    }

    /// Retries a wake that failed, if its waiting time is over.
    pub fn turn(&mut self, now: Instant) -> Next {
        match self.next_deadline(now) {
            Some(Duration::ZERO) => self.wake_if_due(now),
            _ => Next::Nothing,
        }
    }

    /// Records that the sandbox runs. Returns the frames for it, in order.
    pub fn release(&mut self) -> Vec<Box<[u8]>> {
        let frames = self.held.take();
        *self = Self::default();
        frames
    }

    /// Reports whether the sandbox sleeps or wakes, by the recorded events.
    pub fn is_asleep(&self) -> bool {
        self.phase != Phase::Saving
    }

    fn wake_if_due(&mut self, now: Instant) -> Next {
        match (self.phase, self.cause) {
            (Phase::Asleep, Some(cause)) if self.not_before.is_none_or(|at| at <= now) => {
                self.phase = Phase::Waking;
                Next::Wake(cause)
            }
            _ => Next::Nothing,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const SYN: Meaning = Meaning::Wakes(Cause::Tcp { port: 80 });
    const WAKE: Next = Next::Wake(Cause::Tcp { port: 80 });

    #[test]
    fn a_thousand_connections_at_once_are_one_wake() {
        let now = Instant::now();
        let mut sensor = Sensor::default();
        assert_eq!(sensor.asleep(now), Next::Nothing);
        assert_eq!(sensor.arrived(b"1", None, SYN, now), WAKE);
        for n in 0..1000_u32 {
            let next = sensor.arrived(&n.to_be_bytes(), None, SYN, now);
            assert_eq!(next, Next::Nothing);
        }
        assert!(sensor.release().len() > 500);
    }

    #[test]
    fn a_packet_that_came_while_the_memory_was_written_wakes_at_once() {
        let now = Instant::now();
        let mut sensor = Sensor::default();
        assert_eq!(sensor.arrived(b"syn", None, SYN, now), Next::Nothing);
        assert_eq!(sensor.asleep(now), WAKE);
    }

    #[test]
    fn an_earlier_packet_without_an_answer_wakes_at_once() {
        let now = Instant::now();
        let mut sensor = Sensor::default();
        sensor.record_earlier_packet();
        assert_eq!(sensor.asleep(now), Next::Wake(Cause::Earlier));
        sensor.release();
        assert_eq!(sensor.asleep(now), Next::Nothing);
    }

    #[test]
    fn a_packet_without_a_listener_is_kept_and_wakes_no_sandbox() {
        let now = Instant::now();
        let mut sensor = Sensor::default();
        sensor.asleep(now);
        assert_eq!(
            sensor.arrived(b"fin", None, Meaning::Quiet, now),
            Next::Nothing
        );
        assert_eq!(
            sensor.arrived(b"arp", None, Meaning::NotForPod, now),
            Next::Nothing
        );
        assert_eq!(sensor.release(), [Box::from(*b"fin")]);
    }

    #[test]
    fn an_unwanted_packet_is_lost_during_sleep_and_kept_during_save_and_wake() {
        let now = Instant::now();
        let mut sensor = Sensor::default();
        let unwanted =
            |sensor: &mut Sensor, frame: &[u8]| sensor.arrived(frame, None, Meaning::Unwanted, now);
        assert_eq!(unwanted(&mut sensor, b"saving"), Next::Nothing);
        assert_eq!(sensor.asleep(now), Next::Nothing);
        assert_eq!(unwanted(&mut sensor, b"asleep"), Next::Nothing);
        assert_eq!(sensor.arrived(b"syn", None, SYN, now), WAKE);
        assert_eq!(unwanted(&mut sensor, b"waking"), Next::Nothing);
        assert_eq!(
            sensor.release(),
            [&b"saving"[..], b"syn", b"waking"].map(Box::from)
        );
    }

    #[test]
    fn a_wake_that_failed_is_tried_again_by_a_packet_after_its_time() {
        let begin = Instant::now();
        let mut sensor = Sensor::default();
        sensor.asleep(begin);
        assert_eq!(sensor.arrived(b"a", None, SYN, begin), WAKE);
        let mut now = begin;
        for wait in [1, 2, 4, 8, 16, 32, 60, 60] {
            sensor.wake_failed(now);
            let wait = Duration::from_secs(wait);
            let early = now + wait - Duration::from_millis(1);
            assert_eq!(sensor.arrived(b"a", None, SYN, early), Next::Nothing);
            now += wait;
            assert_eq!(
                sensor.arrived(b"x", None, Meaning::Quiet, now),
                Next::Nothing
            );
            assert_eq!(sensor.arrived(b"a", None, SYN, now), WAKE);
        }
        // The first frame, and three of each try.
        assert_eq!(sensor.release().len(), 1 + 3 * 8);
    }

    #[test]
    fn a_wake_that_failed_is_tried_again_by_itself_for_a_while() {
        let mut now = Instant::now();
        let mut sensor = Sensor::default();
        sensor.asleep(now);
        assert_eq!(sensor.next_deadline(now), None);
        assert_eq!(sensor.arrived(b"datagram", None, SYN, now), WAKE);
        assert_eq!(sensor.next_deadline(now), None, "it wakes");
        for wait in [1, 2, 4, 8, 16, 32, 60].map(Duration::from_secs) {
            sensor.wake_failed(now);
            assert_eq!(sensor.next_deadline(now), Some(wait));
            assert_eq!(sensor.turn(now), Next::Nothing);
            now += wait;
            assert_eq!(sensor.turn(now), WAKE);
        }
        sensor.wake_failed(now);
        assert_eq!(sensor.next_deadline(now), None);
        now += RETRY_MAX;
        assert_eq!(sensor.turn(now), Next::Nothing);
        assert_eq!(sensor.arrived(b"another", None, SYN, now), WAKE);
        assert_eq!(sensor.release().len(), 2);
    }

    #[derive(Debug, Clone, Copy)]
    enum Event {
        Frame(u16, Meaning),
        Asleep,
        Failed,
        Released,
        Later(u64),
        Turn,
    }

    fn event() -> impl Strategy<Value = Event> {
        prop_oneof![
            4 => (0..300_u16, prop_oneof![Just(SYN), Just(Meaning::Quiet), Just(Meaning::Unwanted), Just(Meaning::NotForPod)])
                .prop_map(|(n, meaning)| Event::Frame(n, meaning)),
            1 => Just(Event::Asleep),
            1 => Just(Event::Failed),
            1 => Just(Event::Released),
            1 => (0..70_u64).prop_map(Event::Later),
            1 => Just(Event::Turn),
        ]
    }

    /// The expected state after the events so far.
    #[derive(Debug, Default)]
    struct Model {
        asleep: bool,
        waking: bool,
        wanted: bool,
        failures: u32,
        not_before: Option<Instant>,
    }

    impl Model {
        /// Reports whether the event must make a wake. No other event may.
        fn must_wake(&self, event: Event, now: Instant) -> bool {
            let over = self.not_before.is_none_or(|at| at <= now);
            match event {
                Event::Frame(_, meaning) => self.sleeps() && meaning == SYN && over,
                Event::Asleep => !self.waking && self.wanted && over,
                Event::Turn => self.waits() && over && self.is_retried_without_packet(),
                Event::Failed | Event::Released | Event::Later(_) => false,
            }
        }

        fn sleeps(&self) -> bool {
            self.asleep && !self.waking
        }

        /// Reports whether a peer waits for an answer and no wake is under way.
        fn waits(&self) -> bool {
            self.sleeps() && self.wanted
        }

        fn is_retried_without_packet(&self) -> bool {
            self.failures <= RETRIES_WITHOUT_PACKET
        }

        /// Reports whether a frame that comes now is for the sandbox.
        fn keeps(&self, meaning: Meaning) -> bool {
            let lost = meaning == Meaning::Unwanted && self.sleeps();
            meaning != Meaning::NotForPod && !lost
        }

        fn fails(&mut self, now: Instant) {
            let wait = 2_u64.pow(self.failures.min(6)).min(60);
            self.failures += 1;
            self.not_before = Some(now + Duration::from_secs(wait));
            self.waking = false;
        }
    }

    proptest! {
        /// At every moment of a save, a sleep or a wake: the pod gets each of its frames as often
        /// as it came, in order. Two wakes are never under way at once. No wake comes before the
        /// sandbox sleeps. A wake comes whenever a peer waits for an answer, at the latest when
        /// the waiting time after a failure is over.
        #[test]
        fn no_frame_is_lost_or_given_twice(events in proptest::collection::vec(event(), 0..200)) {
            let mut now = Instant::now();
            let mut sensor = Sensor::default();
            let mut model = Model::default();
            let mut expected: Vec<u16> = Vec::new();
            for event in events {
                let must_wake = model.must_wake(event, now);
                let next = match event {
                    Event::Frame(n, meaning) => {
                        if model.keeps(meaning) {
                            expected.push(n);
                        }
                        model.wanted |= meaning == SYN;
                        sensor.arrived(&n.to_be_bytes(), None, meaning, now)
                    }
                    Event::Asleep => {
                        model.asleep = true;
                        sensor.asleep(now)
                    }
                    Event::Failed if model.waking => {
                        model.fails(now);
                        sensor.wake_failed(now);
                        Next::Nothing
                    }
                    Event::Released => {
                        let given = sensor.release();
                        let frames: Vec<Box<[u8]>> = expected.drain(..).map(|n| Box::from(n.to_be_bytes())).collect();
                        prop_assert_eq!(given, frames);
                        model = Model::default();
                        Next::Nothing
                    }
                    Event::Later(seconds) => {
                        now += Duration::from_secs(seconds);
                        Next::Nothing
                    }
                    Event::Turn => sensor.turn(now),
                    Event::Failed => Next::Nothing,
                };
                prop_assert_eq!(next != Next::Nothing, must_wake, "{:?} {:?}", event, model);
                model.waking |= must_wake;
                let is_due = sensor.next_deadline(now).is_some();
                prop_assert_eq!(is_due, model.waits() && model.is_retried_without_packet(), "{:?}", model);
            }
        }
    }
}
