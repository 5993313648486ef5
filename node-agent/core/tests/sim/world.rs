//! A node and its API objects, as far as one Pod is concerned. Memory is a number that grows while
//! the sandbox runs.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use jiff::Timestamp;
use torpor_core::ledger::{self, Tail};
use torpor_core::pressure::{Ask, Pressure};
use torpor_core::{
    Answer, ClaimUid, Departure, Desired, Doze, Entry, Failures, ImageId, ImageObserved,
    ImageState, LedgerState, Live, Memory, Observed, PodPresence, PodUid, Power, Record, Restore,
    SandboxId, SleepAfter, SnapshotIntent, SnapshotReason, SnapshotUid, SnapshotWish,
};

/// Idle time after which a sandbox may sleep for the node's sake.
pub(crate) const ENOUGH_IDLE: Duration = Duration::from_secs(5);
/// Time for which the image of an evicted Pod is kept.
pub(crate) const GRACE: Duration = Duration::from_secs(600);

#[derive(Debug, Clone)]
pub(crate) struct Image {
    pub(crate) memory: u64,
    pub(crate) state: ImageState,
}

#[derive(Debug, Clone)]
pub(crate) struct Snapshot {
    pub(crate) intent: SnapshotIntent,
    /// The memory in the image when the API was told of it.
    pub(crate) memory: Option<u64>,
    pub(crate) stale: bool,
}

/// Facts from one look at the Pod in the API.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SeenPod {
    pub(crate) presence: PodPresence,
    pub(crate) evicted: bool,
}

#[derive(Debug)]
pub(crate) struct World {
    pub(crate) verbose: bool,
    pub(crate) uid: PodUid,
    pub(crate) now: i64,
    pub(crate) pod: PodPresence,
    /// The Pod in the agent's cache. The cache lags behind, less than that of the snapshots.
    pub(crate) seen: SeenPod,
    /// A user deleted the Pod to remove it.
    pub(crate) by_user: bool,
    /// When the API had the Pod no more.
    pub(crate) gone_at: Option<i64>,
    pub(crate) power: Power,
    pub(crate) sleep: SleepAfter,
    /// It may be put to sleep for the node's sake.
    pub(crate) may_be_pressed: bool,
    /// It is asked to.
    pub(crate) pressed: Option<Ask>,
    /// It goes back to its last image when it crashes.
    pub(crate) keep_last: bool,
    pub(crate) evicted: bool,
    /// It is its turn to save.
    pub(crate) save_turn: bool,
    /// Since when nothing has been going on in the sandbox; a new one is busy.
    pub(crate) idle_since: Option<i64>,
    pub(crate) snapshots: Vec<Snapshot>,
    /// The snapshots in the agent's cache, which lags behind.
    pub(crate) cached: Vec<SnapshotIntent>,
    pub(crate) capable: bool,
    /// The kubelet has the Pod's containers: keepers are alive.
    pub(crate) containers: bool,
    /// Counts sandboxes, for their ids.
    pub(crate) sandboxes: u32,
    pub(crate) live: Live,
    /// The processes that serve its files live.
    pub(crate) gofers: bool,
    /// Memory of the live sandbox.
    pub(crate) memory: u64,
    /// The newest memory that ever ran.
    pub(crate) newest: u64,
    /// The memory that a wake began with which died before the ledger knew that it ran.
    pub(crate) unseen: Option<u64>,
    /// Memory that must not be lost.
    pub(crate) owed: Option<u64>,
    pub(crate) record: Option<ImageId>,
    /// The sandbox that the record is about has not run since it was made.
    pub(crate) unstarted: bool,
    pub(crate) doze: Option<Doze>,
    /// A claim has taken the Pod.
    pub(crate) claimed: bool,
    /// The sandbox in which the claim arrived, by [`Self::sandboxes`].
    pub(crate) bound: Option<u32>,
    /// The file.
    pub(crate) ledger: Vec<u8>,
    /// The ledger, folded: read anew after each torn write, compared at the end.
    state: LedgerState,
    torn: bool,
    pub(crate) images: BTreeMap<ImageId, Image>,
    pub(crate) disk_full: bool,
    pub(crate) sessions: u32,
    pub(crate) counts: BTreeMap<&'static str, u64>,
}

/// The one claim of this world.
fn claim() -> ClaimUid {
    ClaimUid::new("c1a1").unwrap()
}

impl World {
    pub(crate) fn new(verbose: bool) -> Self {
        Self {
            verbose,
            uid: PodUid::new("0b7e6c1a-4f0e-4a52-9c1f-2b8f5f3f9d10").unwrap(),
            now: 1_800_000_000,
            pod: PodPresence::Present,
            seen: SeenPod {
                presence: PodPresence::Present,
                evicted: false,
            },
            by_user: false,
            gone_at: None,
            power: Power::Awake,
            sleep: SleepAfter::default(),
            may_be_pressed: false,
            pressed: None,
            keep_last: false,
            evicted: false,
            save_turn: true,
            idle_since: None,
            snapshots: Vec::new(),
            cached: Vec::new(),
            capable: true,
            containers: false,
            sandboxes: 0,
            live: Live::None,
            gofers: true,
            memory: 0,
            newest: 0,
            unseen: None,
            owed: None,
            record: None,
            unstarted: false,
            doze: None,
            claimed: false,
            bound: None,
            ledger: Vec::new(),
            state: LedgerState::default(),
            torn: false,
            images: BTreeMap::new(),
            disk_full: false,
            sessions: 0,
            counts: BTreeMap::new(),
        }
    }

    pub(crate) fn say(&mut self, what: &'static str, detail: impl FnOnce() -> String) {
        *self.counts.entry(what).or_insert(0) += 1;
        if self.verbose {
            println!("{} {what} {}", self.now - 1_800_000_000, detail());
        }
    }

    pub(crate) fn time(&self) -> Timestamp {
        Timestamp::from_second(self.now).unwrap()
    }

    pub(crate) fn ledger(&self) -> &LedgerState {
        &self.state
    }

    fn read_ledger(&self) -> (LedgerState, Tail) {
        let (entries, tail) =
            ledger::decode(&self.ledger).expect("crashes do not corrupt a ledger");
        (LedgerState::fold(&entries), tail)
    }

    pub(crate) fn check_ledger_bytes(&self) {
        assert_eq!(
            self.read_ledger().0,
            self.state,
            "the file says something else"
        );
    }

    pub(crate) fn discard_ledger(&mut self) {
        self.ledger.clear();
        self.state = LedgerState::default();
    }

    /// Cuts a torn tail, makes a header, appends. `cut`: the process dies while writing.
    pub(crate) fn append(&mut self, entry: &Entry, cut: Option<usize>) -> bool {
        if self.disk_full {
            self.say("append failed", || format!("{entry:?}"));
            return false;
        }
        if self.torn {
            let (_, tail) = self.read_ledger();
            if let Tail::Torn { offset, .. } = tail {
                self.say("tail dropped", String::new);
                self.ledger.truncate(usize::try_from(offset).unwrap());
            }
            self.torn = false;
        }
        if self.ledger.is_empty() {
            self.ledger.extend(ledger::encode_header());
        }
        let record = ledger::encode(entry).unwrap();
        let len = cut.map_or(record.len(), |cut| cut % record.len());
        self.ledger.extend(&record[..len]);
        match cut {
            None => self.state.apply(entry),
            Some(_) => {
                self.state = self.read_ledger().0;
                self.torn = true;
            }
        }
        self.say("ledger", || {
            format!("{entry:?}{}", if cut.is_some() { " CUT" } else { "" })
        });
        true
    }

    pub(crate) fn held(&self, image: &ImageId) -> bool {
        self.images
            .get(image)
            .is_some_and(|i| i.state == ImageState::Committed)
    }

    /// The image that the shim would restore by itself.
    pub(crate) fn restorable(&self) -> Option<ImageId> {
        self.ledger().restorable(|image| self.held(image)).cloned()
    }

    pub(crate) fn observe(&self, failures: &Failures) -> Observed {
        let image = |(id, image): (&ImageId, &Image)| ImageObserved {
            id: id.clone(),
            state: image.state,
            consumed_by: None,
            being_restored: false,
        };
        let sandbox = SandboxId::new(format!("{:064x}", self.sandboxes)).unwrap();
        Observed {
            sandbox: self.containers.then_some(sandbox),
            live: self.live,
            // All containers of this world come and go with its sandbox.
            containers: BTreeSet::new(),
            added: None,
            left_by_exec: Vec::new(),
            record: self.record.clone().map(|image| Record { image }),
            doze: self.doze,
            can_doze: Ok(()),
            ledger: Ok(self.state.clone()),
            images: self.images.iter().map(image).collect(),
            capable: match self.capable {
                true => Ok(()),
                false => Err("no hibernation here".into()),
            },
            dozes_unsaved: false,
            restore: Restore::NotAsked,
            save_turn: self.save_turn,
            held_back: false,
            sessions: self.sessions,
            idle_since: self
                .idle_since
                .map(|second| Timestamp::from_second(second).unwrap()),
            idle_known: Ok(()),
            awake_since: None,
            woke_at: None,
            not_watched: None,
            asleep_since: None,
            bound: self.is_bound().then(claim),
            failures: failures.clone(),
            busy: false,
        }
    }

    /// The claim has arrived in the sandbox that is there now.
    pub(crate) fn is_bound(&self) -> bool {
        self.bound == Some(self.sandboxes)
    }

    /// `departure`: what the agent knows of how the Pod went.
    pub(crate) fn desired(&self, departure: Option<Departure>) -> Desired {
        let desired = Desired {
            pod_uid: self.uid.clone(),
            pod: self.seen.presence,
            departure,
            answer: None,
            power: self.power,
            sleep: self.sleep,
            pressure: Pressure {
                may: self.may_be_pressed,
                ..Pressure::default()
            },
            evicted: self.seen.evicted,
            keep_last_image: self.keep_last,
            claim: self.claimed.then(claim),
            has_sleep_condition: false,
            wake_up: BTreeSet::new(),
            snapshots: self.cached.clone(),
            containers: BTreeSet::new(),
            ready: true,
        };
        match &self.pressed {
            Some(ask) => ask.shorten(desired, ENOUGH_IDLE),
            None => desired,
        }
    }

    /// The image that it goes back to when it crashes.
    pub(crate) fn last_image(&self) -> Option<ImageId> {
        let held = self.images.keys().filter(|image| self.held(image));
        held.max_by_key(|image| image.number()).cloned()
    }

    /// Returns whether the sandbox dozes, and an image has its memory.
    pub(crate) fn dozes_in_image(&self) -> bool {
        let dozes = (self.live, self.doze) == (Live::Paused, Some(Doze { reclaimed: true }));
        dozes && self.restorable().is_some()
    }

    /// Memory newer than this image is given up, as the user wishes for a crash.
    pub(crate) fn leaves_behind(&mut self, image: &ImageId) {
        let memory = self.images[image].memory;
        // An earlier restore of it may have died before the ledger said that it ran.
        let again = self.owed == Some(memory);
        assert!(
            self.owed.is_none() || again,
            "{image} replaces newer memory"
        );
        self.unseen = Some(memory);
    }

    /// The watch of the snapshots catches up.
    pub(crate) fn refresh_cache(&mut self) {
        self.cached = self.snapshots.iter().map(|s| s.intent.clone()).collect();
    }

    /// The watch of the Pods catches up.
    pub(crate) fn refresh_pod(&mut self) {
        self.seen = SeenPod {
            presence: self.pod,
            evicted: self.evicted,
        };
    }

    /// The apiserver, asked: the truth.
    pub(crate) fn answer(&self) -> Answer {
        let those = |wish| {
            let snapshots = self.snapshots.iter();
            let those = snapshots.filter(move |s| s.intent.wish == wish);
            those.map(|s| s.intent.uid.clone()).collect()
        };
        Answer {
            has_pod: self.pod != PodPresence::Gone,
            snapshots: those(SnapshotWish::Keep),
            deleting: those(SnapshotWish::Delete),
        }
    }

    /// Returns whether owed memory must still be there for the next Pod: always while there is a
    /// Pod; after an eviction for the grace time, and for as long as a snapshot claims it.
    pub(crate) fn is_owed(&self) -> bool {
        let Some(gone_at) = self.gone_at else {
            return true;
        };
        let in_grace = self.now < gone_at + i64::try_from(GRACE.as_secs()).unwrap();
        !self.by_user && (in_grace || self.is_claimed())
    }

    fn is_claimed(&self) -> bool {
        self.snapshots.iter().any(|snapshot| {
            let intent = &snapshot.intent;
            intent.reason == SnapshotReason::Suspend && intent.wish == SnapshotWish::Keep
        })
    }

    /// A sandbox begins to run with this memory.
    pub(crate) fn starts(&mut self, memory: u64) {
        assert_eq!(self.live, Live::None, "two live copies of one sandbox");
        self.idle_since = None;
        self.live = Live::Running;
        self.gofers = true;
        self.memory = memory;
        self.runs();
    }

    /// The program does something.
    pub(crate) fn runs(&mut self) {
        if self.live == Live::Running {
            self.newest += 1;
            self.memory = self.newest;
            self.owed = Some(self.memory);
        }
    }

    /// The paused sandbox runs on. Its programs are killed if a gofer has ended (gVisor).
    pub(crate) fn resumes(&mut self) {
        assert_eq!(self.live, Live::Paused);
        let image = self.restorable();
        assert_eq!(
            image, None,
            "resumed while an image could still be restored"
        );
        // The record is written before the first process of a sandbox is killed.
        assert_eq!(self.record, None, "resumed although its end was begun");
        self.live = Live::Running;
        self.idle_since = None;
        match self.gofers {
            true => self.runs(),
            false => self.dies(),
        }
    }

    /// A new sandbox sleeps in the image, without a process.
    pub(crate) fn sleeps_unstarted(&mut self, image: &ImageId) {
        assert_eq!(self.live, Live::None);
        assert_eq!(self.restorable().as_ref(), Some(image));
        self.say("slept on", String::new);
        self.sandboxes += 1;
        self.record = Some(image.clone());
        self.unstarted = true;
        self.containers = true;
    }

    /// The node records that the sandbox runs.
    pub(crate) fn wakes(&mut self) {
        self.record = None;
        self.unstarted = false;
    }

    /// The paused sandbox ends with the call to run on unread.
    pub(crate) fn ends_unheard(&mut self) {
        assert_eq!(self.live, Live::Paused);
        self.say("ended unheard", String::new);
        self.dies();
    }

    /// The ledger says again that `image` is the memory of the sandbox, which did not run.
    pub(crate) fn takes_back(&mut self, image: &ImageId) {
        self.say("taken back", String::new);
        if self.live == Live::None {
            self.owed = Some(self.images[image].memory);
        }
    }

    /// The record of the sandbox' end is written.
    pub(crate) fn begins_end(&mut self, image: &ImageId) {
        assert_eq!(
            self.restorable().as_ref(),
            Some(image),
            "ended for an image that is not its memory"
        );
        self.record = Some(image.clone());
        self.unstarted = false;
    }

    /// Its processes are ended; returns whether there were any.
    pub(crate) fn ends(&mut self) -> bool {
        if self.live == Live::None {
            return false;
        }
        assert_eq!(self.live, Live::Paused, "ended while it ran");
        self.live = Live::None;
        self.doze = None;
        true
    }

    /// Processes of a sandbox whose end or wake was cut off are ended before it is restored. No
    /// peer has received anything from one that woke.
    pub(crate) fn removes_remains(&mut self) {
        if self.live == Live::Running {
            let woken = matches!(self.ledger().memory, Memory::Waking { .. });
            assert!(woken, "two live copies of one sandbox");
            self.dies();
        }
        self.live = Live::None;
        self.doze = None;
        self.sandboxes += 1;
    }

    /// A restore that no user asked for by name: only of the newest memory, or of the memory of a
    /// wake whose end no caller saw.
    pub(crate) fn restores(&mut self, image: &ImageId) {
        assert!(
            self.held(image),
            "restore of {image}, which is not in the store"
        );
        let memory = self.images[image].memory;
        let again = self.unseen == Some(memory);
        assert!(
            memory == self.newest || again,
            "{image} is stale: {memory} of {}",
            self.newest
        );
        self.starts(memory);
    }

    /// The sandbox's processes end, not by the agent. Keepers end with it unless the note says that
    /// it sleeps.
    pub(crate) fn dies(&mut self) {
        let saved = self.restorable().map(|image| self.images[&image].memory);
        match self.live {
            Live::Running => {
                // Without its wake in the ledger it counts as never woken: its image must be there
                // to be woken again.
                self.unseen = saved;
                self.owed = saved;
            }
            Live::Paused if saved == Some(self.memory) => {}
            Live::Paused => self.owed = None,
            Live::None | Live::Unknown => return,
        }
        self.live = Live::None;
        self.doze = None;
        if self.record.is_none() {
            self.containers = false;
        }
    }

    /// Checks the invariants that hold at every moment.
    pub(crate) fn check(&self) {
        if let (Some(owed), true) = (self.owed, self.is_owed()) {
            let live = self.live != Live::None && self.memory == owed;
            let image = self.restorable().map(|image| self.images[&image].memory);
            assert!(
                live || image == Some(owed),
                "memory {owed} is lost (live {live}, image {image:?})"
            );
        }
        for snapshot in &self.snapshots {
            let (Some(image), SnapshotWish::Keep) = (&snapshot.intent.image, snapshot.intent.wish)
            else {
                continue;
            };
            let found = self
                .images
                .get(image)
                .filter(|i| i.state == ImageState::Committed);
            let memory = found.map(|i| i.memory);
            assert_eq!(
                memory, snapshot.memory,
                "{} lost its image {image}",
                snapshot.intent.name
            );
        }
    }

    pub(crate) fn add_snapshot(&mut self, number: u32, reason: SnapshotReason) {
        let uid = SnapshotUid::new(format!("snapshot-{number}")).unwrap();
        self.say("snapshot", || format!("{uid} {reason:?}"));
        self.snapshots.push(Snapshot {
            intent: SnapshotIntent {
                name: format!("default/{uid}"),
                uid,
                pod_uid: self.uid.clone(),
                reason,
                image: None,
                wish: SnapshotWish::Keep,
            },
            memory: None,
            stale: false,
        });
    }
}
