use std::net::IpAddr;

use super::*;
use crate::packet::segment;
use etherparse::{PacketBuilder, TcpOptionElement};
use proptest::prelude::*;

const NODE: [u8; 4] = [10, 1, 0, 1];
const POD: [u8; 4] = [10, 1, 2, 3];
const NODE6: [u8; 16] = [0xfd, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1];
const POD6: [u8; 16] = [0xfd, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 3];

fn ends(remote_port: u16) -> Ends {
    Ends {
        remote: NODE.into(),
        remote_port,
        local: POD.into(),
        local_port: 22,
    }
}

/// Returns an acknowledgement of all numbers before 500, with this number of its own.
pub(crate) fn bare(sequence: u32) -> Segment {
    Segment {
        ends: ends(4000),
        sequence,
        acknowledgment: 500,
        window: 512,
        syn: false,
        fin: false,
        rst: false,
        ack: true,
        length: 0,
        timestamps: Some((1, 2)),
        other_options: false,
    }
}

/// Returns which of the segments are answered, each so many milliseconds after the first.
fn answered(segments: &[(u64, Segment)]) -> Vec<bool> {
    let began = Instant::now();
    let mut keepalives = Keepalives::begin(began);
    segments
        .iter()
        .map(|(millis, segment)| {
            let at = began + Duration::from_millis(*millis);
            matches!(
                keepalives.hear(segment, true, at),
                SegmentKind::Keepalive(_)
            )
        })
        .collect()
}

#[test]
fn a_keepalive_is_answered_once_it_is_recognized() {
    // The keepalive comes again after each keepalive interval.
    let idle = [(0, bare(99)), (75_000, bare(99)), (7_275_000, bare(99))];
    assert_eq!(answered(&idle), [false, true, true]);
    // Linux' shortest interval.
    let hasty = [(0, bare(99)), (1_000, bare(99)), (2_000, bare(99))];
    assert_eq!(answered(&hasty), [false, true, true]);
    // After an ordinary acknowledgement, the first keepalive is detected already.
    let after_a_late_one = [(0, bare(100)), (15_000, bare(99))];
    assert_eq!(answered(&after_a_late_one), [false, true]);
    // A new window in between changes nothing.
    let wider = Segment {
        window: 900,
        ..bare(100)
    };
    let between = [
        (0, bare(99)),
        (1_000, bare(99)),
        (5_000, wider),
        (9_000, bare(99)),
    ];
    assert_eq!(answered(&between), [false, true, false, true]);
    // Numbers continue at zero after the largest.
    assert_eq!(
        answered(&[(0, bare(0)), (2_000, bare(u32::MAX))]),
        [false, true]
    );
}

#[test]
fn a_segment_that_is_no_keepalive_is_not_answered() {
    let data = Segment {
        length: 5,
        ..bare(100)
    };
    let byte = Segment {
        length: 1,
        ..bare(99)
    };
    let window = |window| Segment {
        window,
        ..bare(100)
    };
    let fin = Segment {
        fin: true,
        ..bare(100)
    };
    let sack = Segment {
        other_options: true,
        ..bare(99)
    };
    for segments in [
        // Acknowledgements of what was sent just before.
        vec![
            (0, bare(99)),
            (1, bare(99)),
            (40, bare(99)),
            (800, bare(99)),
        ],
        vec![(0, bare(100)), (5, bare(99))],
        // A peer that reads slowly.
        vec![(0, window(1)), (2_000, window(2)), (4_000, window(3))],
        // A byte may be data.
        vec![(0, byte), (1_000, byte), (2_000, byte)],
        vec![(0, bare(99)), (1_000, sack), (2_000, sack)],
        // A peer that has sent data waits for the sandbox.
        vec![
            (0, data),
            (1_000, bare(104)),
            (2_000, bare(104)),
            (3_000, bare(103)),
        ],
        vec![
            (0, bare(99)),
            (1_000, fin),
            (2_000, bare(99)),
            (3_000, bare(99)),
        ],
    ] {
        assert!(!answered(&segments).contains(&true), "{segments:?}");
    }
}

/// Returns the kinds of segments that come 700 ms apart.
fn kinds(segments: &[Segment]) -> Vec<SegmentKind> {
    let began = Instant::now();
    let mut keepalives = Keepalives::begin(began);
    let mut millis = 0;
    let receive = |segment| {
        millis += 700;
        keepalives.hear(segment, true, began + Duration::from_millis(millis))
    };
    segments.iter().map(receive).collect()
}

#[test]
fn a_peer_that_reads_on_is_distinguished_from_an_idle_peer() {
    use SegmentKind::{AcknowledgesMore, Other, WindowOpens};
    let acknowledgement = |acknowledgment, window| Segment {
        acknowledgment,
        window,
        ..bare(100)
    };
    // The window before the first segment is unknown. A window that shrinks is one that fills.
    let opens = [
        (0, Other),
        (8, WindowOpens),
        (8, Other),
        (4, Other),
        (9, WindowOpens),
    ];
    let (windows, expected): (Vec<_>, Vec<_>) = opens.into_iter().unzip();
    let segments: Vec<_> = windows
        .into_iter()
        .map(|window| acknowledgement(500, window))
        .collect();
    assert_eq!(kinds(&segments), expected);
    // Numbers continue at zero after the largest.
    let more = [
        acknowledgement(u32::MAX, 8),
        acknowledgement(4, 8),
        acknowledgement(3, 9),
    ];
    assert_eq!(kinds(&more), [Other, AcknowledgesMore, Other]);
    let data = Segment {
        length: 5,
        ..acknowledgement(600, 9)
    };
    assert_eq!(
        kinds(&[acknowledgement(500, 0), data]),
        [Other; 2],
        "data wakes by itself"
    );
    // Keepalives repeat the same numbers.
    let idle = kinds(&[bare(100), bare(99), bare(99), bare(100), bare(99)]);
    assert!(
        !idle.contains(&WindowOpens) && !idle.contains(&AcknowledgesMore),
        "{idle:?}"
    );
}

#[test]
fn the_first_unclear_segment_is_probed_and_its_repetition_shows_an_opened_window() {
    let heard_at = |millis: u64, segments: &[Segment], may_ask: bool| {
        let began = Instant::now();
        let mut keepalives = Keepalives::begin(began);
        let mut at = began + Duration::from_millis(millis);
        let receive = |segment| {
            at += Duration::from_millis(10);
            keepalives.hear(segment, may_ask, at)
        };
        segments.iter().map(receive).collect::<Vec<_>>()
    };
    let question = SegmentKind::Unclear(Answer::probe(&bare(100)));
    assert_eq!(
        heard_at(2_000, &[bare(100), bare(100)], true),
        [question, SegmentKind::WindowOpens]
    );
    // In the first second, the segment may acknowledge data from before the sleep.
    let early = heard_at(400, &[bare(100), bare(100)], true);
    assert_eq!(early, [SegmentKind::Other; 2]);
    // Another network stack answers.
    let stands = heard_at(2_000, &[bare(100), bare(100)], false);
    assert_eq!(stands, [SegmentKind::Other; 2]);
    // The sender of a keepalive replies with its real number; a peer with a full window has no
    // room yet.
    let keepalive = heard_at(2_000, &[bare(99), bare(100)], true);
    assert_eq!(keepalive[1], SegmentKind::Other);
    let full = Segment {
        window: 0,
        ..bare(100)
    };
    assert_eq!(heard_at(2_000, &[full, full], true)[1], SegmentKind::Other);
}

#[test]
fn a_peer_is_probed_again_if_the_sandbox_may_have_missed_its_last_segment() {
    let now = Instant::now();
    let at = |millis| now + Duration::from_millis(millis);
    let mut keepalives = Keepalives::begin(now);
    // The sandbox's network stack receives this, or is stopped before.
    assert_eq!(
        keepalives.hear(&bare(100), false, at(10)),
        SegmentKind::Other
    );
    assert_eq!(
        keepalives.probe_again(&bare(99), at(20)),
        None,
        "not the last"
    );
    let question = Some(Answer::probe(&bare(100)));
    assert_eq!(keepalives.probe_again(&bare(100), at(20)), question);
    assert_eq!(keepalives.probe_again(&bare(100), at(20)), None, "once");
    assert_eq!(
        keepalives.hear(&bare(100), true, at(30)),
        SegmentKind::WindowOpens
    );
    // Other peers get a keepalive from now on, as in the middle of a sleep.
    let other = Segment {
        ends: ends(4001),
        ..bare(100)
    };
    keepalives.end_late_acknowledgements();
    let kind = keepalives.hear(&other, true, at(40));
    assert_eq!(kind, SegmentKind::Unclear(Answer::probe(&other)));
}

#[test]
fn a_keepalive_probe_has_an_old_number_and_acknowledges_nothing_new() {
    let probe = Answer::probe(&bare(100));
    assert_eq!((probe.sequence, probe.acknowledgment), (499, 100));
    let kept = Answer::to_keepalive(&bare(99));
    assert_eq!((kept.sequence, kept.acknowledgment), (500, 100));
}

#[test]
fn a_keepalive_with_a_byte_is_recognized_by_the_segments_before_it() {
    let rubbish = Segment {
        length: 1,
        ..bare(99)
    };
    let known = [(0, bare(99)), (1_000, bare(99)), (2_000, rubbish)];
    assert_eq!(answered(&known), [false, true, true]);
    // The byte with the next number is data.
    let data = Segment {
        length: 1,
        ..bare(100)
    };
    let with_data = [
        (0, bare(99)),
        (1_000, bare(99)),
        (2_000, data),
        (3_000, bare(99)),
    ];
    assert_eq!(answered(&with_data), [false, true, false, false]);
}

#[test]
fn a_keepalive_right_after_an_answer_is_not_answered() {
    let protest = [
        (0, bare(99)),
        (1_000, bare(99)),
        (1_001, bare(99)),
        (1_002, bare(99)),
    ];
    assert_eq!(answered(&protest), [false, true, false, false]);
}

#[test]
fn a_connection_that_is_over_is_forgotten() {
    let reset = Segment {
        rst: true,
        ..bare(99)
    };
    let begun = Segment {
        syn: true,
        ack: false,
        ..bare(99)
    };
    for over in [reset, begun] {
        let segments = [(0, bare(99)), (1_000, over), (2_000, bare(99))];
        assert_eq!(answered(&segments), [false; 3], "{over:?}");
    }
}

#[test]
fn the_sandbox_gets_one_reminder_for_each_connection_whose_last_segment_had_data() {
    let now = Instant::now();
    let mut keepalives = Keepalives::begin(now);
    let of = |port, segment| Segment {
        ends: ends(port),
        ..segment
    };
    let data = Segment {
        length: 5,
        ..bare(100)
    };
    let reset = Segment {
        rst: true,
        ..bare(105)
    };
    for segment in [
        of(1, data),
        of(1, data),
        of(2, data),
        of(2, reset),
        of(3, bare(99)),
        // An acknowledgement without data follows, with the number that the sandbox expects.
        of(4, data),
        of(4, bare(105)),
        of(5, data),
    ] {
        keepalives.hear(&segment, true, now);
    }
    let mut reminders: Vec<_> = keepalives.reminders().collect();
    let mut expected = [1, 5].map(|port| Reminder::of(&of(port, data)).expect("a reminder"));
    reminders.sort_by_key(|reminder| format!("{reminder:?}"));
    expected.sort_by_key(|reminder| format!("{reminder:?}"));
    assert_eq!(reminders, expected);
}

#[test]
fn connections_are_bounded_and_the_longest_silent_is_forgotten() {
    let now = Instant::now();
    let mut keepalives = Keepalives::begin(now);
    for n in 0..=MAX_CONNECTIONS {
        let port = u16::try_from(n).expect("a port");
        let segment = Segment {
            ends: ends(port),
            ..bare(99)
        };
        keepalives.hear(
            &segment,
            true,
            now + Duration::from_millis(n.try_into().expect("few")),
        );
    }
    assert_eq!(keepalives.connections.len(), MAX_CONNECTIONS);
    assert!(!keepalives.connections.contains_key(&ends(0)));
}

macro_rules! frame {
    ($ip:expr, $options:expr) => {{
        let mut bytes = Vec::new();
        $ip.tcp(4000, 22, 99, 512)
            .ack(500)
            .options($options)
            .expect("room")
            .write(&mut bytes, &[])
            .expect("a frame");
        bytes
    }};
}

#[test]
fn the_answer_has_the_numbers_and_timestamps_that_the_keepalive_requests() {
    let to = || PacketBuilder::ethernet2([2, 0, 0, 0, 0, 1], [2, 0, 0, 0, 0, 3]);
    let stamp = [
        TcpOptionElement::Noop,
        TcpOptionElement::Noop,
        TcpOptionElement::Timestamp(70, 60),
    ];
    let frames = [
        frame!(to().ipv4(NODE, POD, 64), &stamp),
        frame!(to().ipv6(NODE6, POD6, 64), &stamp),
        frame!(to().ipv4(NODE, POD, 64), &[]),
    ];
    for (frame, stamped) in frames.iter().zip([true, true, false]) {
        let own = [IpAddr::from(POD), IpAddr::from(POD6)];
        let received = segment(frame, &own).expect("a segment");
        let answer = Answer::to_keepalive(&received)
            .frame(frame)
            .expect("an answer");
        assert_eq!(answer[..6], frame[6..12]);
        assert_eq!(answer[6..12], frame[..6]);
        let read = segment(&answer, &[received.ends.remote]).expect("a segment for the peer");
        let back = Ends {
            remote: received.ends.local,
            remote_port: 22,
            local: received.ends.remote,
            local_port: 4000,
        };
        let expected = Segment {
            ends: back,
            sequence: 500,
            acknowledgment: 100,
            window: WINDOW,
            timestamps: stamped.then_some((60, 70)),
            ..received
        };
        assert_eq!(read, expected);
    }
    // No link that the keeper answers on carries frames with a VLAN tag.
    let mut tagged = frames[0].clone();
    tagged.splice(12..12, [0x81, 0x00, 0, 5]);
    let received = segment(&frames[0], &[POD.into()]).expect("a segment");
    assert_eq!(Answer::to_keepalive(&received).frame(&tagged), None);
}

/// An action of a peer while only the keeper answers it.
#[derive(Debug, Clone, Copy)]
enum Event {
    /// The peer sends so many bytes, which arrive or not.
    Sends(u32, bool),
    /// The peer announces a window of this size.
    Room(u16),
    /// The peer had no answer for long, and all that it has sent was acknowledged.
    Keepalive,
    /// The peer has data to send, and the window of the other side is zero.
    ProbesWindow,
    Later(u64),
}

fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        1 => (1..2000_u32, any::<bool>()).prop_map(|(bytes, arrives)| Event::Sends(bytes, arrives)),
        2 => any::<u16>().prop_map(Event::Room),
        4 => Just(Event::Keepalive),
        1 => Just(Event::ProbesWindow),
        4 => (0..5_000_u64).prop_map(Event::Later),
    ]
}

proptest! {
    /// A peer that follows RFC 9293 gets no acknowledgement of data that is not in the sandbox's
    /// image, and no two answers within a moment.
    #[test]
    fn data_that_the_sandbox_does_not_have_is_never_acknowledged(
        received in any::<u32>(),
        in_flight in 0..3_u32,
        events in proptest::collection::vec(event(), 0..60),
    ) {
        let mut now = Instant::now();
        let mut keepalives = Keepalives::begin(now);
        // The peer's numbers: sent, and acknowledged of it; and its last announced window.
        let acknowledged = received;
        let mut sent = received.wrapping_add(in_flight);
        let mut room = 0;
        let mut last_answer: Option<Instant> = None;
        for event in events {
            let segment = match event {
                Event::Later(millis) => {
                    now += Duration::from_millis(millis);
                    continue;
                }
                Event::Sends(bytes, arrives) => {
                    let segment = Segment { length: bytes as usize, window: room, ..bare(sent) };
                    sent = sent.wrapping_add(bytes);
                    if !arrives {
                        continue;
                    }
                    segment
                }
                // A window that has not changed is not announced.
                Event::Room(new) if new == room => continue,
                Event::Room(new) => {
                    room = new;
                    Segment { window: room, ..bare(sent) }
                }
                Event::Keepalive if sent != acknowledged => continue,
                Event::Keepalive => Segment { window: room, ..bare(sent.wrapping_sub(1)) },
                Event::ProbesWindow => Segment { window: room, ..bare(acknowledged.wrapping_sub(1)) },
            };
            if let SegmentKind::Keepalive(answer) = keepalives.hear(&segment, true, now) {
                let number = answer.to.sequence.wrapping_add(1);
                prop_assert!(received.wrapping_sub(number) < u32::MAX / 2, "{number} of {received}");
                prop_assert!(last_answer.is_none_or(|at| now - at >= MIN_ANSWER_INTERVAL));
                last_answer = Some(now);
            }
        }
    }
}
