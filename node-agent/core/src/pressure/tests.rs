use proptest::prelude::*;

use super::*;

const LIMITS: Limits = Limits {
    available: Some(10),
    stalled: Some(20),
    swap_free: Some(10),
    idle: Duration::from_secs(30),
    settle: Duration::from_secs(3),
    answer: Duration::from_secs(20),
};

fn at(second: i64) -> Timestamp {
    Timestamp::from_second(second).unwrap()
}

fn uid(name: &str) -> PodUid {
    PodUid::new(name).unwrap()
}

fn readings(available: u64, swap: u64) -> Readings {
    Readings {
        memory_total: 1000,
        memory_available: available,
        swap_total: 1000,
        swap_free: swap,
        stalled: None,
    }
}

fn watch(readings: &Readings) -> Watch {
    let mut watch = Watch::default();
    watch.read(readings, &LIMITS);
    watch
}

fn short(watch: &Watch) -> Vec<Resource> {
    watch.short().keys().copied().collect()
}

fn awake(name: &str, since: i64) -> Candidate {
    Candidate {
        pod: uid(name),
        idle_since: at(since),
        dozes: false,
        may_doze: true,
        may_hibernate: true,
    }
}

fn dozing(name: &str, since: i64) -> Candidate {
    Candidate {
        dozes: true,
        ..awake(name, since)
    }
}

/// A candidate for which an annotation switches hibernation off.
fn stays(name: &str, since: i64) -> Candidate {
    Candidate {
        may_hibernate: false,
        ..awake(name, since)
    }
}

fn stays_dozing(name: &str, since: i64) -> Candidate {
    Candidate {
        may_hibernate: false,
        ..dozing(name, since)
    }
}

fn asked(watch: &Watch) -> Option<(&str, Resource, bool)> {
    let ask = watch.asked()?;
    Some((ask.pod.as_str(), ask.short_of, ask.doze))
}

#[test]
fn a_resource_is_short_below_its_limit_until_half_as_much_again_is_free() {
    use Resource::{Memory, Swap};
    let mut watch = Watch::default();
    for (available, swap, expected) in [
        (100, 100, &[][..]),
        (99, 100, &[Memory]),
        (149, 99, &[Memory, Swap]),
        (150, 149, &[Swap]),
        (100, 150, &[]),
    ] {
        watch.read(&readings(available, swap), &LIMITS);
        assert_eq!(short(&watch), expected, "{available} {swap}");
    }
}

#[test]
fn stalled_time_counts_as_shortage_and_a_node_without_swap_is_not_short_of_swap() {
    let mut watch = Watch::default();
    for (stalled, expected) in [(20.0, 0), (21.0, 1), (11.0, 1), (10.0, 0)] {
        let readings = Readings {
            stalled: Some(stalled),
            swap_total: 0,
            ..readings(500, 0)
        };
        watch.read(&readings, &LIMITS);
        assert_eq!(watch.short().len(), expected, "{stalled}");
    }
}

#[test]
fn a_limit_that_is_switched_off_is_ignored() {
    let off = Limits {
        available: None,
        stalled: None,
        swap_free: None,
        ..LIMITS
    };
    let mut watch = Watch::default();
    watch.read(&readings(0, 0), &off);
    assert!(watch.short().is_empty());
}

#[test]
fn the_message_has_the_figures_from_the_begin_of_a_shortage() {
    let mut watch = watch(&readings(40, 900));
    watch.read(&readings(50, 900), &LIMITS);
    assert_eq!(
        watch.short()[&Resource::Memory],
        "4 % of the node's memory is available; the limit is 10 %"
    );
}

#[test]
fn pressure_picks_the_longest_idle_sandbox_and_none_used_a_moment_ago() {
    let mut watch = watch(&readings(40, 900));
    let candidates = [awake("b", 50), awake("a", 20), awake("new", 980)];
    watch.choose(&candidates, &LIMITS, at(1000));
    assert_eq!(asked(&watch), Some(("a", Resource::Memory, true)));
    let busy = [awake("new", 980)];
    let mut other = super::Watch {
        asked: None,
        ..watch.clone()
    };
    other.choose(&busy, &LIMITS, at(1000));
    assert_eq!(asked(&other), None);
}

#[test]
fn the_short_resource_decides_which_sandbox_sleeps_and_how_deep() {
    use Resource::{Memory, Swap};
    let hibernates = Candidate {
        may_doze: false,
        ..awake("h", 20)
    };
    for (readings, candidates, expected) in [
        (
            readings(40, 900),
            vec![awake("a", 20), dozing("d", 10)],
            Some(("a", Memory, true)),
        ),
        // There is no swap left for a doze.
        (
            readings(40, 40),
            vec![awake("a", 20)],
            Some(("a", Memory, false)),
        ),
        (
            readings(40, 900),
            vec![hibernates],
            Some(("h", Memory, false)),
        ),
        // No sandbox is awake: a dozing one may be in compressed memory.
        (
            readings(40, 900),
            vec![dozing("d", 10)],
            Some(("d", Memory, false)),
        ),
        (
            readings(40, 40),
            vec![awake("a", 20), dozing("d", 30)],
            Some(("d", Swap, false)),
        ),
        // A sandbox that is not to hibernate dozes. If that does not help, another one is chosen.
        (
            readings(40, 900),
            vec![stays("s", 10), awake("a", 20)],
            Some(("s", Memory, true)),
        ),
        (
            readings(40, 40),
            vec![stays("s", 10), awake("a", 20)],
            Some(("a", Memory, false)),
        ),
        (
            readings(40, 40),
            vec![stays_dozing("s", 10), dozing("d", 20)],
            Some(("d", Swap, false)),
        ),
        (readings(40, 40), vec![stays("s", 10)], None),
        (readings(40, 900), vec![stays_dozing("s", 10)], None),
        // An awake sandbox takes no swap.
        (readings(900, 40), vec![awake("a", 20)], None),
        (
            readings(900, 900),
            vec![awake("a", 20), dozing("d", 10)],
            None,
        ),
    ] {
        let mut watch = watch(&readings);
        watch.choose(&candidates, &LIMITS, at(1000));
        assert_eq!(asked(&watch), expected, "{readings:?} {candidates:?}");
    }
}

#[test]
fn pressure_picks_one_sandbox_at_a_time_and_delays_the_repeat_of_a_vain_request() {
    let mut watch = watch(&readings(40, 900));
    let both = [awake("a", 20), awake("b", 50)];
    watch.choose(&both, &LIMITS, at(1000));
    watch.choose(&both, &LIMITS, at(1010));
    assert_eq!(asked(&watch).unwrap().0, "a", "still");
    // The sandbox dozes: after a pause the next one is chosen.
    let then = [dozing("a", 20), awake("b", 50)];
    watch.choose(&then, &LIMITS, at(1011));
    assert_eq!(asked(&watch), None);
    watch.choose(&then, &LIMITS, at(1014));
    assert_eq!(asked(&watch).unwrap().0, "b");
    // The next sandbox does not fall asleep.
    watch.choose(&then, &LIMITS, at(1034));
    watch.choose(&then, &LIMITS, at(1037));
    assert_eq!(asked(&watch), Some(("a", Resource::Memory, false)));
    watch.choose(&[awake("b", 50)], &LIMITS, at(1038));
    watch.choose(&[awake("b", 50)], &LIMITS, at(1100));
    assert_eq!(asked(&watch), None, "asked in vain a minute ago");
    watch.choose(&[awake("b", 50)], &LIMITS, at(1240));
    assert_eq!(asked(&watch).unwrap().0, "b");
}

#[test]
fn pressure_picks_no_sandbox_once_the_node_has_enough() {
    let mut watch = watch(&readings(40, 900));
    watch.choose(&[awake("a", 20)], &LIMITS, at(1000));
    assert!(watch.asked().is_some());
    watch.read(&readings(500, 900), &LIMITS);
    watch.choose(&[awake("a", 20)], &LIMITS, at(1001));
    assert_eq!(watch.asked(), None);
}

proptest! {
    /// One sandbox at a time is requested to sleep. The chosen sandbox may sleep and has been idle
    /// for long enough. No sandbox that could give as much has been idle for longer.
    #[test]
    fn pressure_picks_only_the_longest_idle_sandbox_of_its_kind(
        available in 0..300_u64,
        swap in 0..300_u64,
        idle in proptest::collection::vec((0..1000_i64, any::<[bool; 3]>()), 0..8),
    ) {
        let candidates: Vec<Candidate> = idle.iter().enumerate().map(|(n, (since, [dozes, may_doze, may_hibernate]))| Candidate {
            pod: uid(&format!("p{n}")),
            idle_since: at(*since),
            dozes: *dozes,
            may_doze: *may_doze,
            may_hibernate: *may_hibernate,
        }).collect();
        let mut watch = watch(&readings(available, swap));
        watch.choose(&candidates, &LIMITS, at(1000));
        let Some(ask) = watch.asked() else { return Ok(()); };
        let chosen = candidates.iter().find(|c| c.pod == ask.pod).unwrap();
        prop_assert!(watch.short().contains_key(&ask.short_of));
        prop_assert!(chosen.idle_since <= at(970));
        prop_assert!(!ask.doze || chosen.may_doze && !chosen.dozes);
        prop_assert!(ask.doze || chosen.may_hibernate);
        let doze = |c: &Candidate| c.may_doze && !c.dozes && !watch.short().contains_key(&Resource::Swap);
        let same = candidates.iter().filter(|c| c.dozes == chosen.dozes && (c.may_hibernate || doze(c)));
        prop_assert!(same.map(|c| c.idle_since).min() == Some(chosen.idle_since));
    }
}
