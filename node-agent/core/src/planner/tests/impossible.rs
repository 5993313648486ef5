//! Plans for states that no sequence of events leads to.

use proptest::prelude::*;

use super::*;

pub(super) fn any_entry() -> impl Strategy<Value = Entry> {
    let image = (1..4_u32).prop_map(image);
    (0..8_u8, image, any::<bool>()).prop_map(|(which, image, by_itself)| match which {
        0 => Entry::Saving {
            image,
            snapshots: BTreeSet::new(),
        },
        1 => Entry::Committed { image },
        2 => Entry::Asleep { image, by_itself },
        3 => Entry::Waking { image },
        4 => Entry::Awake,
        5 => Entry::WakeFailed {
            image,
            reason: "X".into(),
        },
        6 => Entry::Discarded { image },
        _ => Entry::Adopted {
            image,
            snapshots: [SnapshotUid::new("s-1").unwrap()].into(),
        },
    })
}

pub(super) fn any_observed() -> impl Strategy<Value = Observed> {
    let live = prop_oneof![
        Just(Live::None),
        Just(Live::Running),
        Just(Live::Paused),
        Just(Live::Unknown)
    ];
    let entries = proptest::collection::vec(any_entry(), 0..8);
    let held = proptest::collection::vec(1..4_u32, 0..4);
    (
        live,
        entries,
        held,
        proptest::option::of(1..4_u32),
        any::<bool>(),
        proptest::option::of(800_i64..1100),
    )
        .prop_map(|(live, entries, held, record, corrupt, idle)| {
            let mut observed = observed(live, &entries, &held);
            observed.record = record.map(|number| Record {
                image: image(number),
            });
            observed.idle_since = idle.map(at);
            observed.doze = idle.filter(|at| at % 3 > 0).map(|at| Doze {
                reclaimed: at % 3 == 1,
            });
            if corrupt && entries.len() > 6 {
                observed.ledger = Err("corrupt".into());
            }
            observed
        })
}

proptest! {
    /// For states that no history leads to, the planner restores and removes no wrong image, too.
    #[test]
    fn plans_for_impossible_states_are_safe(
        observed in any_observed(),
        power in prop_oneof![Just(Power::Awake), Just(Power::Asleep), Just(Power::Frozen)],
        pod in prop_oneof![Just(PodPresence::Present), Just(PodPresence::Terminating), Just(PodPresence::Gone)],
        may in prop_oneof![Just(desired(Power::Awake)), Just(idle_hibernates()), Just(idle_dozes())],
        keep_last_image in any::<bool>(),
        evicted in any::<bool>(),
        save_turn in any::<bool>(),
    ) {
        let may_sleep = may.sleep.first().is_some();
        let mut desired = Desired { power, keep_last_image, evicted, ..may };
        desired.pod = pod;
        let observed = Observed { save_turn, ..observed };
        let newest = observed.images.iter().map(|image| image.id.number()).max();
        let plan = planned(&desired, &observed);
        let again: Plan = serde_json::from_str(&serde_json::to_string(&plan).unwrap()).unwrap();
        prop_assert_eq!(&again, &plan);
        let memory = observed.ledger.clone().unwrap_or_default().memory;
        let idle = may_sleep && power == Power::Awake && observed.idle_since.is_some_and(|since| since <= at(900));
        let moves_on = evicted && observed.doze.is_some() && observed.live == Live::Paused;
        let noted = observed.record.as_ref().map(|record| &record.image);
        let held = |image: &ImageId| observed.images.iter().any(|it| it.id == *image);
        let end_begun = observed.live == Live::Paused && noted.is_some_and(|image| memory.image() == Some(image) && held(image));
        if power == Power::Awake && !idle && !moves_on && !end_begun && observed.live != Live::None {
            let saved = plan.steps.iter().any(|s| s.action.kind() == StepKind::End);
            prop_assert!(!saved, "put to sleep although nobody asked and it is not idle");
        }
        for step in &plan.steps {
            match &step.action {
                Action::Checkpoint { .. } | Action::Doze if !save_turn => {
                    let settles = step.action.kind() == StepKind::Doze && observed.live == Live::Paused;
                    prop_assert!(settles, "saved without its turn");
                }
                Action::DiscardImage { image } if keep_last_image && pod != PodPresence::Gone => {
                    prop_assert_ne!(Some(image.number()), newest);
                }
                Action::Wake { image } => {
                    prop_assert_eq!(observed.live, Live::None);
                    prop_assert_eq!(memory.image(), Some(image));
                }
                Action::DiscardImage { image } if observed.live == Live::None => {
                    let memory_stays = pod == PodPresence::Gone || memory.image() != Some(image);
                    prop_assert!(memory_stays);
                }
                Action::Resume => {
                    let stale = step.before == Some(Entry::Awake) || memory.image().is_none_or(|image| !observed.images.iter().any(|held| held.id == *image));
                    prop_assert!(stale || observed.ledger.is_err() || plan.steps.iter().any(|s| s.action.kind() == StepKind::Checkpoint));
                }
                Action::Reclaim { image } => {
                    prop_assert_eq!(observed.live, Live::Paused);
                    prop_assert!(image.is_some());
                    prop_assert_eq!(memory.image(), image.as_ref());
                }
                Action::End { .. } => prop_assert!(observed.live == Live::Paused || observed.live == Live::Running),
                _ => {}
            }
        }
    }
}
