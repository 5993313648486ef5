//! When a packet wakes a sandbox.
//!
//! ```text
//!            asleep                     wake
//!   Saving ─────────► Asleep ◄──────────────────► Waking
//!      └─────────────────┴──── release ──────────────┘  gives the frames to the sandbox, which runs
//! ```
//! It is told what happens and says what to do. A thousand packets make one wake; one that failed is tried again after a waiting time,
//! by itself some times (who sent one datagram does not send it again), then by a packet that comes, which TCP's repetitions are.

use std::time::{Duration, Instant};

use crate::held::Held;
use crate::packet::{Cause, Meaning, Says};

/// The first wait after a wake that failed; it doubles.
const RETRY_MIN: Duration = Duration::from_secs(1);
const RETRY_MAX: Duration = Duration::from_secs(60);
/// So often a wake is tried again although nothing comes any more: for two minutes. An image that cannot be restored is not tried for ever.
const RETRIES_BY_ITSELF: u32 = 7;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// The sandbox is there, paused, and its memory is being written: what arrives now is in no image.
    Saving,
    Asleep,
    Waking,
}

/// What is to be done now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Next {
    Nothing,
    Wake(Cause),
}

impl Next {
    /// Both: one wake is enough.
    pub fn or(self, other: Self) -> Self {
        match self {
            Self::Nothing => other,
            Self::Wake(_) => self,
        }
    }
}

/// The sensor of one sandbox, from the moment its memory is about to be written until it runs again.
#[derive(Debug)]
pub struct Sensor {
    phase: Phase,
    held: Held,
    /// The first packet since the sandbox slept that wanted an answer.
    wanted: Option<Cause>,
    failures: u32,
    not_before: Option<Instant>,
}

impl Default for Sensor {
    fn default() -> Self {
        Self {
            phase: Phase::Saving,
            held: Held::default(),
            wanted: None,
            failures: 0,
            not_before: None,
        }
    }
}

impl Sensor {
    /// Something came before this sensor was there, and the sandbox has not answered it yet.
    pub fn came_before(&mut self) {
        self.wanted.get_or_insert(Cause::Earlier);
    }

    /// A frame has arrived.
    pub fn arrived(
        &mut self,
        frame: &[u8],
        says: Option<Says>,
        meaning: Meaning,
        now: Instant,
    ) -> Next {
        match meaning {
            Meaning::NotForPod => return Next::Nothing,
            // Nothing of it is in the image, and nobody knows for how long it would lie here. It is as if it had been lost on
            // its way: TCP sends it again. A sandbox that still, or almost, runs gets it.
            Meaning::Unwanted if self.phase == Phase::Asleep => return Next::Nothing,
            Meaning::Unwanted | Meaning::Quiet | Meaning::Wakes(_) => self.held.keep(frame, says),
        }
        // Only what wants an answer starts a try, also the next one after a failure.
        match meaning {
            Meaning::Wakes(cause) => {
                self.wanted.get_or_insert(cause);
                self.next(now)
            }
            Meaning::NotForPod | Meaning::Quiet | Meaning::Unwanted => Next::Nothing,
        }
    }

    /// The sandbox' processes have ended and its image is its memory. Packets may have come while it was written.
    /// Told once or more often.
    pub fn asleep(&mut self, now: Instant) -> Next {
        if self.phase == Phase::Saving {
            self.phase = Phase::Asleep;
        }
        self.next(now)
    }

    /// A wake that this sensor asked for has ended and the sandbox does not run.
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

    /// When to call [`Sensor::turn`] although nothing comes.
    pub fn turn_again(&self, now: Instant) -> Option<Duration> {
        let waits = self.phase == Phase::Asleep && self.wanted.is_some();
        let at = self
            .not_before
            .filter(|_| waits && self.failures <= RETRIES_BY_ITSELF)?;
        Some(at.saturating_duration_since(now))
    }

    /// Time has passed: a wake that failed may be tried again.
    pub fn turn(&mut self, now: Instant) -> Next {
        match self.turn_again(now) {
            Some(Duration::ZERO) => self.next(now),
            _ => Next::Nothing,
        }
    }

    /// The sandbox runs: what it is to be given, in order.
    pub fn release(&mut self) -> Vec<Box<[u8]>> {
        let frames = self.held.take();
        *self = Self::default();
        frames
    }

    /// Whether the sandbox sleeps, as far as the sensor was told.
    pub fn is_asleep(&self) -> bool {
        self.phase != Phase::Saving
    }

    fn next(&mut self, now: Instant) -> Next {
        match (self.phase, self.wanted) {
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
    fn what_came_before_and_was_not_answered_wakes_at_once() {
        let now = Instant::now();
        let mut sensor = Sensor::default();
        sensor.came_before();
        assert_eq!(sensor.asleep(now), Next::Wake(Cause::Earlier));
        sensor.release();
        assert_eq!(sensor.asleep(now), Next::Nothing);
    }

    #[test]
    fn what_nobody_waits_for_is_kept_and_wakes_nobody() {
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
    fn what_is_not_to_wake_it_is_lost_while_it_sleeps_and_kept_around_that() {
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
        // The first, and of each time three.
        assert_eq!(sensor.release().len(), 1 + 3 * 8);
    }

    #[test]
    fn a_wake_that_failed_is_tried_again_by_itself_for_a_while() {
        let mut now = Instant::now();
        let mut sensor = Sensor::default();
        sensor.asleep(now);
        assert_eq!(sensor.turn_again(now), None);
        assert_eq!(sensor.arrived(b"datagram", None, SYN, now), WAKE);
        assert_eq!(sensor.turn_again(now), None, "it wakes");
        for wait in [1, 2, 4, 8, 16, 32, 60].map(Duration::from_secs) {
            sensor.wake_failed(now);
            assert_eq!(sensor.turn_again(now), Some(wait));
            assert_eq!(sensor.turn(now), Next::Nothing);
            now += wait;
            assert_eq!(sensor.turn(now), WAKE);
        }
        sensor.wake_failed(now);
        assert_eq!(sensor.turn_again(now), None);
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

    /// What the events so far ask of the sensor.
    #[derive(Debug, Default)]
    struct Model {
        asleep: bool,
        waking: bool,
        wanted: bool,
        failures: u32,
        not_before: Option<Instant>,
    }

    impl Model {
        /// Whether the event must make a wake, and no other may.
        fn must_wake(&self, event: Event, now: Instant) -> bool {
            let over = self.not_before.is_none_or(|at| at <= now);
            match event {
                Event::Frame(_, meaning) => self.sleeps() && meaning == SYN && over,
                Event::Asleep => !self.waking && self.wanted && over,
                Event::Turn => self.waits() && over && self.is_tried_by_itself(),
                Event::Failed | Event::Released | Event::Later(_) => false,
            }
        }

        fn sleeps(&self) -> bool {
            self.asleep && !self.waking
        }

        /// Somebody waits for an answer, and nobody wakes the sandbox.
        fn waits(&self) -> bool {
            self.sleeps() && self.wanted
        }

        fn is_tried_by_itself(&self) -> bool {
            self.failures <= RETRIES_BY_ITSELF
        }

        /// Whether a frame that comes now is for the sandbox.
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
        /// At every moment of a save, a sleep or a wake: a frame that is for the pod is given to it as often as it came, in order;
        /// never two wakes at once; no wake before the sandbox sleeps; and a wake whenever somebody waits for an answer, at the
        /// latest when the time after a failure is over.
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
                        let wanted: Vec<Box<[u8]>> = expected.drain(..).map(|n| Box::from(n.to_be_bytes())).collect();
                        prop_assert_eq!(given, wanted);
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
                let is_due = sensor.turn_again(now).is_some();
                prop_assert_eq!(is_due, model.waits() && model.is_tried_by_itself(), "{:?}", model);
            }
        }
    }
}
