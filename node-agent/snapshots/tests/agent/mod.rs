//! An agent after a crash: it plans from the store's contents and executes the plan.

use std::collections::BTreeSet;

use jiff::Timestamp;
use torpor_core::pressure::Pressure;
use torpor_core::{
    Action, Answer, Desired, ImageId, ImageObserved, LedgerState, Live, Memory, Observed, Plan,
    PodPresence, PodUid, Policy, Power, Record, SandboxId, SleepAfter, SnapshotIntent,
    SnapshotReason, SnapshotUid, SnapshotWish, Step, plan,
};
use torpor_snapshots::Store;

use crate::common::{POD, namespace};

/// Limit of plans; no crash needs so many.
const MOST_PLANS: usize = 10;

pub(crate) fn pod() -> PodUid {
    PodUid::new(POD).unwrap()
}

/// Returns the id of the snapshot that adopts the image.
pub(crate) fn snapshot() -> SnapshotUid {
    SnapshotUid::new("snapshot-a").unwrap()
}

/// The agent's view of one Pod: the store, and the Pod's state outside the store.
pub(crate) struct Agent<'a> {
    store: &'a Store,
    live: Live,
    /// Note under /run that the sandbox is hibernated in this image.
    note: Option<ImageId>,
}

impl<'a> Agent<'a> {
    /// Makes the agent after a crash of the agent alone: the sandbox has the state of the last
    /// entry.
    pub(crate) fn new(store: &'a Store) -> Self {
        let state = read(store);
        let (live, note) = match state.memory {
            Memory::Live if state.seq > 0 => (Live::Running, None),
            Memory::Live | Memory::Saving { .. } | Memory::Committed { .. } => (Live::Paused, None),
            Memory::Asleep { image, .. }
            | Memory::Waking { image }
            | Memory::WakeFailed { image, .. } => (Live::None, Some(image)),
        };
        Self { store, live, note }
    }

    /// Makes the agent after a reboot: only the disk's contents are left.
    pub(crate) fn rebooted(store: &'a Store) -> Self {
        let (live, note) = (Live::None, None);
        Self { store, live, note }
    }

    /// Asserts that no plan removes the image of a sandbox without processes or the image of a
    /// snapshot.
    pub(crate) fn assert_keeps_what_is_needed(&self, point: &str) {
        let state = read(self.store);
        let memory = state.memory.image().filter(|_| self.live == Live::None);
        let kept = state.image_of(&snapshot());
        for power in [Power::Awake, Power::Asleep, Power::Frozen] {
            for (snapshots, kept) in [(vec![], None), (vec![wish()], kept)] {
                let gone = discarded(self.plan(power, &snapshots));
                for image in memory.into_iter().chain(kept) {
                    assert!(!gone.contains(image), "{point}: {power:?}, {image}");
                }
            }
        }
    }

    /// Requests a running sandbox and executes plans until a plan is empty.
    pub(crate) fn settle(&mut self, point: &str) {
        for _ in 0..MOST_PLANS {
            let plan = self.plan(Power::Awake, &[]);
            if plan.steps.is_empty() {
                assert_eq!(self.live, Live::Running, "{point}: {:?}", plan.why);
                return;
            }
            for step in &plan.steps {
                self.execute(step);
            }
        }
        panic!("{point}: there is always something to do");
    }

    fn plan(&self, power: Power, snapshots: &[SnapshotIntent]) -> Plan {
        let desired = desired(power, snapshots);
        let now = Timestamp::UNIX_EPOCH;
        plan(&desired, &self.observe(), &Policy::default(), now)
    }

    fn observe(&self) -> Observed {
        let listed = self.store.list_pod(&pod()).unwrap();
        let images = listed.into_iter().map(|image| ImageObserved {
            id: image.id,
            state: image.state,
            consumed_by: image.consumed_by,
            being_restored: false,
        });
        Observed {
            sandbox: Some(SandboxId::new("5".repeat(64)).unwrap()),
            live: self.live,
            record: self.note.clone().map(|image| Record { image }),
            ledger: Ok(read(self.store)),
            images: images.collect(),
            ..Observed::nothing()
        }
    }

    fn execute(&mut self, step: &Step) {
        let ledger = self.store.ledger(&pod()).unwrap();
        if let Some(before) = &step.before {
            ledger.append_at(step.fence.ledger_seq, before).unwrap();
        }
        self.act(&step.action);
        if let Some(after) = &step.after {
            ledger.append(after).unwrap();
        }
    }

    fn act(&mut self, action: &Action) {
        let (store, namespace) = (self.store, namespace());
        match action {
            Action::Record => {}
            Action::Resume => self.live = Live::Running,
            Action::Wake { image } => {
                let found = store.image(&namespace, image).unwrap();
                found.verify().unwrap();
                (self.live, self.note) = (Live::Running, None);
            }
            Action::Commit { image } => {
                store.recommit(&namespace, image).unwrap();
            }
            Action::DiscardPartial { image } => {
                store.remove_partial(&namespace, image).unwrap();
            }
            Action::DiscardImage { image } => {
                let memory = read(store).memory;
                assert_ne!(memory.image(), Some(image), "it is the sandbox's memory");
                store.remove_image(&namespace, image).unwrap();
            }
            other => panic!("{other:?} is planned for a sandbox that is to run"),
        }
    }
}

fn read(store: &Store) -> LedgerState {
    store.ledger(&pod()).unwrap().read().unwrap()
}

/// Returns the committed images that a plan removes.
fn discarded(plan: Plan) -> BTreeSet<ImageId> {
    let images = plan.steps.into_iter().filter_map(|step| match step.action {
        Action::DiscardImage { image } => Some(image),
        _ => None,
    });
    images.collect()
}

fn desired(power: Power, snapshots: &[SnapshotIntent]) -> Desired {
    Desired {
        pod_uid: pod(),
        pod: PodPresence::Present,
        departure: None,
        // The apiserver has the Pod, whenever it is asked.
        answer: Some(Answer {
            has_pod: true,
            ..Answer::default()
        }),
        power,
        sleep: SleepAfter::default(),
        pressure: Pressure::default(),
        evicted: false,
        keep_last_image: false,
        wake_up: BTreeSet::new(),
        snapshots: snapshots.to_vec(),
        claim: None,
        has_sleep_condition: false,
        containers: BTreeSet::new(),
        ready: true,
    }
}

/// Makes a snapshot whose status does not name its image yet, although the ledger does.
fn wish() -> SnapshotIntent {
    SnapshotIntent {
        uid: snapshot(),
        name: "team-a/snapshot-a".to_owned(),
        pod_uid: pod(),
        reason: SnapshotReason::Manual,
        image: None,
        wish: SnapshotWish::Keep,
    }
}
