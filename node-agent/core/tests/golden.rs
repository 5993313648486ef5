//! The planner's decisions as one table, for readers and for reviews of changes: each state of a
//! sandbox, by the request.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use jiff::Timestamp;
use torpor_core::{
    Answer, Departure, Desired, Doze, Entry, ImageId, ImageObserved, ImageState, LedgerState, Live,
    Observed, PodPresence, PodUid, Policy, Power, Record, SandboxId, SleepAfter, SnapshotIntent,
    SnapshotReason, SnapshotUid, SnapshotWish, plan,
};

fn image() -> ImageId {
    ImageId::parse("pod-a.1").expect("an image's name")
}

fn entries(names: &str) -> Vec<Entry> {
    let entry = |name| match name {
        "saving" => Entry::Saving {
            image: image(),
            snapshots: BTreeSet::new(),
        },
        "committed" => Entry::Committed { image: image() },
        "asleep" => Entry::Asleep {
            image: image(),
            by_itself: false,
        },
        "idle" => Entry::Asleep {
            image: image(),
            by_itself: true,
        },
        "waking" => Entry::Waking { image: image() },
        "failed" => Entry::WakeFailed {
            image: image(),
            reason: "RestoreFailed".to_owned(),
        },
        _ => Entry::Awake,
    };
    names.split_whitespace().map(entry).collect()
}

/// A ledger, and the state of its image in the store.
const LEDGERS: [(&str, Option<ImageState>); 9] = [
    ("", None),
    ("saving", Some(ImageState::Partial)),
    ("saving", Some(ImageState::Committed)),
    ("saving committed", Some(ImageState::Committed)),
    ("saving committed asleep", Some(ImageState::Committed)),
    ("saving committed idle", Some(ImageState::Committed)),
    ("saving committed asleep", None),
    (
        "saving committed asleep waking",
        Some(ImageState::Committed),
    ),
    (
        "saving committed asleep waking awake",
        Some(ImageState::Committed),
    ),
];

fn observed(
    live: Live,
    ledger: &str,
    stored: Option<ImageState>,
    noted: bool,
    doze: Option<Doze>,
) -> Observed {
    Observed {
        sandbox: Some(SandboxId::new("5".repeat(64)).expect("an id")),
        live,
        // This time has an effect only where the sandbox may fall asleep by itself.
        idle_since: Some(Timestamp::UNIX_EPOCH),
        doze,
        record: noted.then(|| Record { image: image() }),
        ledger: Ok(LedgerState::fold(&entries(ledger))),
        images: stored
            .into_iter()
            .map(|state| ImageObserved {
                id: image(),
                state,
                consumed_by: None,
                being_restored: false,
            })
            .collect(),
        ..Observed::nothing()
    }
}

fn wishes() -> Vec<(&'static str, Desired)> {
    let uid = PodUid::new("pod-a").expect("a uid");
    let wish = |pod, power, reason: Option<SnapshotReason>| Desired {
        pod_uid: uid.clone(),
        pod,
        departure: None,
        answer: None,
        power,
        sleep: SleepAfter::default(),
        pressure: Default::default(),
        evicted: false,
        keep_last_image: false,
        claim: None,
        has_sleep_condition: false,
        wake_up: BTreeSet::new(),
        containers: BTreeSet::new(),
        ready: true,
        snapshots: reason
            .into_iter()
            .map(|reason| SnapshotIntent {
                uid: SnapshotUid::new("s-1").expect("a uid"),
                name: "default/s-1".to_owned(),
                pod_uid: uid.clone(),
                reason,
                image: None,
                wish: SnapshotWish::Keep,
            })
            .collect(),
    };
    use PodPresence::{Gone, Present, Terminating};
    vec![
        ("run", wish(Present, Power::Awake, None)),
        (
            "idle",
            Desired {
                sleep: SleepAfter {
                    doze: Some(std::time::Duration::ZERO),
                    hibernate: Some(std::time::Duration::ZERO),
                },
                ..wish(Present, Power::Awake, None)
            },
        ),
        (
            "doze",
            Desired {
                sleep: SleepAfter {
                    doze: Some(std::time::Duration::ZERO),
                    hibernate: Some(std::time::Duration::from_secs(60)),
                },
                ..wish(Present, Power::Awake, None)
            },
        ),
        ("sleep", wish(Present, Power::Asleep, None)),
        ("freeze", wish(Present, Power::Frozen, None)),
        (
            "suspend",
            wish(Present, Power::Awake, Some(SnapshotReason::Suspend)),
        ),
        (
            "snapshot",
            wish(Present, Power::Awake, Some(SnapshotReason::Manual)),
        ),
        ("end", wish(Terminating, Power::Awake, None)),
        ("gone", gone(wish(Gone, Power::Awake, None), true)),
        ("evicted", gone(wish(Gone, Power::Awake, None), false)),
    ]
}

/// A Pod that is gone now, with its sandbox; the apiserver has nothing of the Pod.
fn gone(wish: Desired, by_user: bool) -> Desired {
    let departure = Departure {
        since: Timestamp::UNIX_EPOCH,
        by_user,
        disk_short: false,
    };
    Desired {
        answer: Some(Answer::default()),
        departure: Some(departure),
        ..wish
    }
}

#[test]
fn the_decisions_are_these() {
    let mut table = String::new();
    let dozing = |reclaimed| Some(Doze { reclaimed });
    for (live, noted, doze) in [
        (Live::Running, false, None),
        (Live::Paused, false, None),
        (Live::Paused, false, dozing(false)),
        (Live::Paused, false, dozing(true)),
        (Live::None, false, None),
        (Live::None, true, None),
    ] {
        for (ledger, stored) in LEDGERS {
            let observed = observed(live, ledger, stored, noted, doze);
            let image = stored.map_or_else(|| "none".to_owned(), |state| format!("{state:?}"));
            let note = match (noted, doze) {
                (true, _) => ", noted asleep",
                (false, None) => "",
                (false, Some(Doze { reclaimed: false })) => ", noted dozing",
                (false, Some(Doze { reclaimed: true })) => ", dozing and reclaimed",
            };
            let _ = writeln!(table, "{live:?}{note}; ledger: {ledger}; image: {image}");
            for (name, desired) in wishes() {
                let is_gone = desired.departure.is_some() && live == Live::None;
                let observed = Observed {
                    sandbox: observed.sandbox.clone().filter(|_| !is_gone),
                    ..observed.clone()
                };
                let plan = plan(
                    &desired,
                    &observed,
                    &Policy::default(),
                    Timestamp::UNIX_EPOCH,
                );
                let steps: Vec<String> = plan
                    .steps
                    .iter()
                    .map(|step| format!("{:?}", step.action.kind()))
                    .collect();
                let steps = if steps.is_empty() {
                    "-".to_owned()
                } else {
                    steps.join(" ")
                };
                let _ = writeln!(table, "    {name:<9} {steps}");
            }
        }
    }
    insta::assert_snapshot!(table);
}
