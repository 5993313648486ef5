//! The quiet after the random events of a schedule, in which everything must come right.

use torpor_core::{ImageState, Live, Memory, PodPresence, Power, SnapshotReason, SnapshotWish};

use super::Schedule;
use crate::agent::{Faults, Pass};

/// Passes after which everything must have come right once nothing interferes.
const QUIET_PASSES: u32 = 60;

impl Schedule {
    /// Nothing interferes any more: within a few passes all must be as it is wanted, and stay so.
    pub(super) fn quiet(&mut self) {
        self.world.say("quiet", String::new);
        self.world.disk_full = false;
        self.world.sessions = 0;
        self.world.save_turn = true;
        self.world.pressed = None;
        let mut returns = self.random.chance(500);
        for _ in 0..QUIET_PASSES {
            self.kubelet(Faults::NONE);
            if self.world.pod == PodPresence::Gone && std::mem::take(&mut returns) {
                self.controller_returns();
            }
            self.world.refresh_cache();
            self.world.refresh_pod();
            self.world.runs();
            let before = format!("{:?}", self.world.snapshots);
            let pass = self
                .agent
                .pass(&mut self.world, &mut self.random, Faults::NONE);
            self.world.check();
            let told = before != format!("{:?}", self.world.snapshots);
            match pass {
                Pass::Idle(None) if !told => return self.check_settled(),
                Pass::Idle(Some(at)) => self.world.now = self.world.now.max(at + 1),
                Pass::Idle(None) | Pass::Worked | Pass::Died => {}
            }
        }
        panic!("no rest after {QUIET_PASSES} passes: {:#?}", self.world);
    }

    fn check_settled(&self) {
        let world = &self.world;
        world.check_ledger_bytes();
        let partial = world
            .images
            .values()
            .any(|image| image.state == ImageState::Partial);
        assert!(!partial, "a partial image was left: {:?}", world.images);
        let memory = world.ledger().memory.clone();
        let kept = |id| {
            let wanted = |s: &&crate::world::Snapshot| s.intent.wish == SnapshotWish::Keep;
            world
                .snapshots
                .iter()
                .filter(wanted)
                .any(|s| s.intent.image.as_ref() == Some(id))
        };
        let present = world.pod == PodPresence::Present;
        for id in world.images.keys() {
            assert!(
                kept(id)
                    || present && memory.image() == Some(id)
                    || present && world.keep_last && world.last_image().as_ref() == Some(id),
                "{id} is of no use"
            );
        }
        for snapshot in &world.snapshots {
            assert_eq!(
                snapshot.intent.wish,
                SnapshotWish::Keep,
                "was not released: {snapshot:?}"
            );
            if present {
                assert!(snapshot.intent.image.is_some(), "never saved: {snapshot:?}");
            } else if snapshot.intent.reason == SnapshotReason::Suspend && !snapshot.stale {
                let is_owed = world.owed.is_some() && world.is_owed();
                assert!(
                    !is_owed || snapshot.intent.image.is_some(),
                    "claimed in vain: {snapshot:?}"
                );
                // A wake may be repeated whose end no caller saw: see the ledger's rules.
                let begun = matches!(memory, Memory::Waking { .. });
                let unseen = snapshot.memory.is_some() && snapshot.memory == world.unseen;
                let newest = snapshot.memory.is_none_or(|memory| memory == world.newest);
                // The restore in the next Pod is reported as rolled back.
                let image = snapshot.intent.image.as_ref();
                let back = image.is_some_and(|image| world.ledger().has_gone_back_to(image));
                assert!(
                    newest || begun || unseen || back,
                    "would turn back time: {snapshot:?}"
                );
            }
        }
        if !present {
            // The store removes a ledger without a whole record.
            let seq = world.ledger().seq;
            assert!(!world.images.is_empty() || seq == 0, "the ledger was left");
            return;
        }
        let asleep = world.live == Live::None && world.record.is_some();
        let desired = world.desired(None);
        match desired.target() {
            // Until a caller needs it, and there is none any more.
            Power::Awake
                if matches!(
                    memory,
                    Memory::Asleep {
                        by_itself: true,
                        ..
                    }
                ) =>
            {
                let hibernates = world.sleep.hibernate.is_some();
                let deepened = world.may_be_pressed || world.evicted;
                // Its end failed, and the node was not short of memory any more.
                let dozes = world.sleep.doze.is_some() && world.dozes_in_image();
                assert!(asleep && (hibernates || deepened) || dozes);
            }
            Power::Awake if world.idle_since.is_some() && world.sleep.hibernate.is_some() => {
                panic!("idle, and not asleep: {:?}", world.live)
            }
            Power::Awake
                if world.sleep.doze.is_some()
                    && (world.idle_since.is_some() || world.live == Live::Paused) =>
            {
                assert!(world.dozes_in_image(), "{:?}, {:?}", world.live, world.doze);
            }
            Power::Awake => {
                assert_eq!(world.live, Live::Running);
                assert!(
                    world.is_bound() || !world.claimed,
                    "the claim never arrived"
                );
            }
            Power::Asleep => assert!(asleep, "{:?}", world.live),
            Power::Frozen => {
                assert!(asleep || world.live == Live::Paused, "{:?}", world.live);
                assert_eq!(world.doze, None, "an exec would resume what is frozen");
            }
            Power::Dozing => panic!("nobody asks for that"),
        }
    }
}
