//! One schedule: a random life, then quiet.

use std::collections::BTreeMap;
use std::time::Duration;

use torpor_core::pressure::{self, Limits, Readings, Watch};
use torpor_core::transition::{self, Delivery, Found, Place, Refusal, Source};
use torpor_core::{
    Failures, ImageId, Live, PodPresence, Power, SleepAfter, SnapshotReason, SnapshotWish,
};

use crate::agent::{Agent, Faults};
use crate::node::{Fault, NodeSandbox};
use crate::world::{ENOUGH_IDLE, World};

mod quiet;

/// Events of a random life.
const EVENTS: u32 = 120;
/// Events that must occur in the schedules together.
pub(crate) const EXERCISED: &[&str] = &[
    "pause",
    "freeze",
    "resume",
    "checkpoint",
    "commit",
    "end",
    "wake",
    "record",
    "bind",
    "taken by a claim",
    "forget sleep",
    "stale",
    "runs on",
    "discard partial",
    "discard image",
    "discard ledger",
    "agent died",
    "step not done",
    "append failed",
    "tail dropped",
    "exec wake",
    "exec wake died",
    "exec resume",
    "stale",
    "runs on",
    "exec resume died",
    "exec refused",
    "exec failed",
    "signal",
    "gofer killed",
    "gofer gone",
    "taken back",
    "ended unheard",
    "caught up",
    "boot restore",
    "boot restore died",
    "slept on",
    "cold start",
    "sentry killed",
    "reboot",
    "pod gone",
    "fell asleep",
    "idle",
    "doze",
    "reclaim",
    "doze resumed",
    "turn awaited",
    "asleep for the node",
    "evicted asleep",
    "claimed late",
    "asked",
    "given up",
    "back to last image",
    "back to last image died",
    "snapshot",
    "snapshot released",
];

/// SplitMix64.
#[derive(Debug)]
pub(crate) struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub(crate) fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }

    /// An index below `len`.
    pub(crate) fn pick(&mut self, len: usize) -> usize {
        usize::try_from(self.below(len as u64)).expect("less than a usize")
    }

    /// `n` in a thousand.
    pub(crate) fn chance(&mut self, n: u64) -> bool {
        n > 0 && self.below(1000) < n
    }
}

pub(crate) struct Schedule {
    random: Random,
    world: World,
    agent: Agent,
    faults: Faults,
    snapshots_made: u32,
}

impl Schedule {
    pub(crate) fn new(seed: u64, verbose: bool) -> Self {
        let mut random = Random(seed);
        // Some lives are calm, some are hell.
        let level = [0, 10, 40, 120][random.pick(4)];
        let faults = Faults {
            fail: level,
            unknown: level / 2,
            die: level / 2,
            tell: level,
        };
        let world = World::new(verbose);
        Self {
            random,
            world,
            agent: Agent::default(),
            faults,
            snapshots_made: 0,
        }
    }

    pub(crate) fn run(mut self) -> BTreeMap<&'static str, u64> {
        for _ in 0..EVENTS {
            self.event();
            self.world.runs();
            self.world.now += i64::try_from(self.random.below(4)).unwrap();
            self.world.check();
            if self.world.pod == PodPresence::Gone && self.random.chance(50) {
                break;
            }
        }
        self.quiet();
        self.world.counts
    }

    fn event(&mut self) {
        let fail = self.faults;
        match self.random.below(100) {
            0..46 => {
                if let Ok(planned) = self.agent.look(&mut self.world, &mut self.random, fail) {
                    while self.random.chance(150) {
                        self.between(fail);
                        self.world.check();
                    }
                    let (world, random) = (&mut self.world, &mut self.random);
                    self.agent.take(world, random, fail, &planned);
                }
            }
            46..49 => self.node(),
            49..52 => self.world.refresh_cache(),
            52..55 => self.world.refresh_pod(),
            55..58 => self.idle(),
            58..66 => self.kubelet(fail),
            66..74 => self.set_power(),
            74..79 => self.call(fail),
            79..83 => self.make_snapshot(),
            83..86 => self.delete_snapshot(),
            86 => self.is_taken(),
            87..89 => self.controller_suspends(),
            89..91 => self.world.sessions = u32::try_from(self.random.below(2)).unwrap(),
            91..94 => self.disk(),
            94 => self.kill(),
            95 => self.kill_gofer(),
            96 => self.reboot(),
            97 => self.restart_agent(),
            98 => self.world.now += 400,
            _ => self.delete_pod(),
        }
    }

    /// Something happens after a plan was made and before its steps are taken: the lock is free
    /// meanwhile.
    fn between(&mut self, faults: Faults) {
        match self.random.below(8) {
            0..3 => self.call(faults),
            3 => self.kubelet(faults),
            4 => self.world.sessions = u32::try_from(self.random.below(2)).unwrap(),
            5 => self.kill(),
            6 => self.kill_gofer(),
            // The shim goes on without the agent that asked.
            _ => self.restart_agent(),
        }
    }

    fn set_power(&mut self) {
        let power = [Power::Awake, Power::Asleep, Power::Asleep, Power::Frozen];
        let power = power[self.random.pick(4)];
        self.world.power = power;
        self.world.say("power", || format!("{power:?}"));
    }

    /// Nothing goes on in the sandbox from now on, or something does; and whether it may fall
    /// asleep by itself.
    fn idle(&mut self) {
        let world = &mut self.world;
        match self.random.below(3) {
            0 => {
                let mut after = |n| {
                    let seconds = self.random.below(60);
                    self.random.chance(n).then(|| Duration::from_secs(seconds))
                };
                let (doze, hibernate) = (after(600), after(600));
                world.sleep = SleepAfter { doze, hibernate };
            }
            1 => world.sleep = SleepAfter::default(),
            _ if world.live == Live::Running => {
                let idle = self.random.chance(700).then_some(world.now);
                world.idle_since = idle;
                world.say("idle", || format!("{idle:?}"));
            }
            _ => {}
        }
    }

    /// Changes the node's resources, and the settings for a shortage of them.
    fn node(&mut self) {
        let world = &mut self.world;
        match self.random.below(6) {
            5 if world.pod == PodPresence::Present => world.evicted = self.random.chance(300),
            0 => world.may_be_pressed = self.random.chance(800),
            1 => world.keep_last = self.random.chance(400),
            2 => world.save_turn = self.random.chance(600),
            _ => self.press(),
        }
    }

    /// The node is short of memory from now on, or is not any more.
    fn press(&mut self) {
        let world = &mut self.world;
        if self.random.chance(700) {
            // A node that is short of memory is full of sandboxes that have long been idle.
            world.may_be_pressed = true;
            world.power = Power::Awake;
            world.sessions = 0;
            world.idle_since = (world.live == Live::Running).then_some(world.now - 60);
        }
        let limits = Limits {
            available: Some(10),
            stalled: None,
            swap_free: Some(10),
            idle: ENOUGH_IDLE,
            settle: Duration::ZERO,
            answer: Duration::from_secs(10),
        };
        let mut share = || self.random.below(20);
        let readings = Readings {
            memory_total: 100,
            memory_available: share(),
            swap_total: 100,
            swap_free: share(),
            stalled: None,
        };
        let mut watch = Watch::default();
        watch.read(&readings, &limits);
        let observed = world.observe(&Failures::default());
        let candidate = pressure::candidate(&world.desired(None), &observed);
        let candidates: Vec<_> = candidate.into_iter().collect();
        watch.choose(&candidates, &limits, world.time());
        world.pressed = watch.asked().cloned();
    }

    fn make_snapshot(&mut self) {
        if self.world.pod == PodPresence::Present && self.world.snapshots.len() < 4 {
            self.snapshots_made += 1;
            let suspend = self.random.chance(400);
            let reason = match suspend {
                true => SnapshotReason::Suspend,
                false => SnapshotReason::Manual,
            };
            self.world.add_snapshot(self.snapshots_made, reason);
        }
    }

    /// A claim takes the Pod, for the rest of its life.
    fn is_taken(&mut self) {
        if self.world.pod == PodPresence::Present {
            self.world.say("taken by a claim", String::new);
            self.world.claimed = true;
        }
    }

    fn delete_snapshot(&mut self) {
        if self.world.snapshots.is_empty() {
            return;
        }
        let which = self.random.pick(self.world.snapshots.len());
        let intent = &mut self.world.snapshots[which].intent;
        intent.wish = SnapshotWish::Delete;
        let uid = intent.uid.clone();
        if self.world.pod == PodPresence::Gone {
            // Its deletion gives the memory up.
            self.world.owed = None;
        }
        self.world.say("snapshot deleted", || uid.to_string());
    }

    /// The controller deletes the Pod once its Suspend snapshot says Committed.
    fn controller_suspends(&mut self) {
        let ready = self.world.snapshots.iter().any(|s| {
            let intent = &s.intent;
            let suspend = intent.reason == SnapshotReason::Suspend;
            suspend && intent.wish == SnapshotWish::Keep && intent.image.is_some() && !s.stale
        });
        if ready && self.world.pod == PodPresence::Present {
            self.world.say("suspended", String::new);
            self.world.pod = PodPresence::Terminating;
            self.world.by_user = !self.world.evicted;
        }
    }

    /// A user deletes the Pod, or a drain evicts it. The controller makes a snapshot of a sandbox
    /// that sleeps, unless it is away.
    fn delete_pod(&mut self) {
        if self.world.pod == PodPresence::Gone {
            return self.controller_returns();
        }
        if self.world.pod == PodPresence::Present && self.random.chance(300) {
            self.world.say("pod deleted", String::new);
            self.world.pod = PodPresence::Terminating;
            self.world.evicted = self.world.evicted || self.random.chance(500);
            self.world.by_user = !self.world.evicted;
            let asleep = self.world.live == Live::None && self.world.record.is_some();
            if asleep && self.world.evicted && self.random.chance(500) {
                self.world.say("evicted asleep", String::new);
                self.claim();
            }
        }
    }

    /// The controller was away while the Pod went. It finds the memory that the node still has, and
    /// makes a snapshot of it.
    fn controller_returns(&mut self) {
        let world = &self.world;
        let suspended = |s: &crate::world::Snapshot| s.intent.reason == SnapshotReason::Suspend;
        let found = world.owed.is_some() && world.is_owed() && world.restorable().is_some();
        if found && !world.snapshots.iter().any(suspended) {
            self.world.say("claimed late", String::new);
            self.claim();
        }
    }

    fn claim(&mut self) {
        self.snapshots_made += 1;
        self.world
            .add_snapshot(self.snapshots_made, SnapshotReason::Suspend);
    }

    fn disk(&mut self) {
        self.world.disk_full = !self.world.disk_full && self.faults.fail > 0;
        let full = self.world.disk_full;
        self.world.say("disk", || format!("full: {full}"));
    }

    fn kill(&mut self) {
        if matches!(self.world.live, Live::Running | Live::Paused) {
            self.world.say("sentry killed", String::new);
            self.world.dies();
        }
    }

    fn reboot(&mut self) {
        self.world.say("reboot", String::new);
        self.world.record = None;
        self.world.dies();
        self.world.containers = false;
        self.world.sessions = 0;
        self.restart_agent();
    }

    fn restart_agent(&mut self) {
        self.agent = Agent::default();
        // Since when it is idle is in the agent's memory.
        self.world.idle_since = None;
        self.world.refresh_cache();
        self.world.refresh_pod();
    }

    /// A process in the Pod needs the sandbox (exec, a packet), or a container gets a signal that
    /// does not end it. A command of the shim brings the sandbox there, and can die on the way.
    fn call(&mut self, faults: Faults) {
        if !self.world.containers {
            return;
        }
        let paused = self.world.live == Live::Paused;
        let is_signal = self.random.chance(300);
        let sandbox = NodeSandbox::new(&mut self.world, &mut self.random, faults);
        let result = match is_signal {
            false => transition::wake_up(&sandbox).map(|found| match found {
                Found::Hibernated => "exec wake",
                Found::Dozing => "exec resume",
                Found::Awake => "exec",
            }),
            true => transition::before_signal(&sandbox, false, || false).map(|delivery| {
                assert_eq!(delivery, Delivery::Program);
                "signal"
            }),
        };
        let what = match result {
            Ok(what) => what,
            Err(Fault::Died) if paused => "exec resume died",
            Err(Fault::Died) => "exec wake died",
            Err(Fault::Refused(Refusal::Frozen)) => "exec refused",
            Err(_) => "exec failed",
        };
        self.world.say(what, String::new);
    }

    /// A gofer of a paused sandbox ends. gVisor ends one that runs.
    fn kill_gofer(&mut self) {
        if self.world.live == Live::Paused {
            self.world.say("gofer killed", String::new);
            self.world.gofers = false;
        }
    }

    /// Brings containers back while the Pod is there, ends them when it is being deleted.
    fn kubelet(&mut self, faults: Faults) {
        let world = &mut self.world;
        match world.pod {
            PodPresence::Gone => {}
            PodPresence::Terminating => {
                world.record = None;
                world.dies();
                world.containers = false;
                world.pod = PodPresence::Gone;
                world.gone_at = Some(world.now);
                if world
                    .snapshots
                    .iter()
                    .any(|s| s.intent.wish == SnapshotWish::Delete)
                {
                    world.owed = None;
                }
                world.say("pod gone", String::new);
            }
            PodPresence::Present if world.containers => {}
            PodPresence::Present => self.boot(faults),
        }
    }

    /// The shim makes a sandbox: from the image that is its memory if there is one.
    fn boot(&mut self, faults: Faults) {
        let world = &mut self.world;
        assert_eq!(world.live, Live::None);
        let last = world.last_image().filter(|_| world.keep_last);
        let held = |image: &ImageId| world.held(image);
        let found = transition::source(world.ledger(), held, None, false, last);
        let image = match found {
            Source::Cold => return self.starts_cold(),
            Source::Image { image, .. } => image,
        };
        // Also when an earlier try failed.
        let goes_back = world.ledger().was_left(&image);
        let what = match goes_back {
            true => ["back to last image", "back to last image died"],
            false => ["boot restore", "boot restore died"],
        };
        world.say(what[0], || image.to_string());
        let asleep = world.power == Power::Asleep;
        let mut sandbox = NodeSandbox::new(world, &mut self.random, faults);
        if goes_back {
            sandbox = sandbox.going_back();
        }
        let ledger = transition::Sandbox::ledger(&sandbox).expect("it is read");
        let restored = match transition::rests(&ledger, &image, true, false, asleep) {
            Some(origin) => transition::rest(&sandbox, &image, origin, true),
            None => {
                let place = Place::Anew {
                    takes: false,
                    tries_again: true,
                    never_ran: false,
                };
                transition::restore(&sandbox, &image, place)
            }
        };
        if restored == Err(Fault::Died) {
            self.world.say(what[1], String::new);
        }
    }

    fn starts_cold(&mut self) {
        let world = &mut self.world;
        assert_eq!(
            world.owed, None,
            "cold start although memory was to be kept"
        );
        world.say("cold start", String::new);
        world.sandboxes += 1;
        world.containers = true;
        world.starts(world.newest);
    }
}
