//! The planner's decisions as one table, for people to read and for changes to be seen: every state of a sandbox that it may
//! be found in, by what is wanted.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use jiff::Timestamp;
use torpor_core::{
    Desired, Entry, ImageId, ImageObserved, ImageState, LedgerState, Live, Observed, PodPresence,
    PodUid, Policy, Power, Record, SandboxId, SnapshotIntent, SnapshotReason, SnapshotUid,
    SnapshotWish, plan,
};

fn image() -> ImageId {
    ImageId::parse("pod-a.1").expect("an image's name")
}

fn entries(names: &str) -> Vec<Entry> {
    let of = |name| match name {
        "saving" => Entry::Saving {
            image: image(),
            snapshots: BTreeSet::new(),
        },
        "committed" => Entry::Committed { image: image() },
        "asleep" => Entry::Asleep { image: image() },
        "waking" => Entry::Waking { image: image() },
        "failed" => Entry::WakeFailed {
            image: image(),
            reason: "RestoreFailed".to_owned(),
        },
        _ => Entry::Awake,
    };
    names.split_whitespace().map(of).collect()
}

/// A ledger, and what of its image lies in the store.
const LEDGERS: [(&str, Option<ImageState>); 8] = [
    ("", None),
    ("saving", Some(ImageState::Partial)),
    ("saving", Some(ImageState::Committed)),
    ("saving committed", Some(ImageState::Committed)),
    ("saving committed asleep", Some(ImageState::Committed)),
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

fn observed(live: Live, ledger: &str, stored: Option<ImageState>, noted: bool) -> Observed {
    Observed {
        sandbox: Some(SandboxId::new("5".repeat(64)).expect("an id")),
        live,
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
        power,
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
        ("gone", wish(Gone, Power::Awake, None)),
    ]
}

#[test]
fn the_decisions_are_these() {
    let mut table = String::new();
    for (live, noted) in [
        (Live::Running, false),
        (Live::Paused, false),
        (Live::None, false),
        (Live::None, true),
    ] {
        for (ledger, stored) in LEDGERS {
            let observed = observed(live, ledger, stored, noted);
            let image = stored.map_or_else(|| "none".to_owned(), |state| format!("{state:?}"));
            let note = if noted { ", noted asleep" } else { "" };
            let _ = writeln!(table, "{live:?}{note}; ledger: {ledger}; image: {image}");
            for (name, desired) in wishes() {
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
