//! Memory of pools between passes: requested and deleted members that the watch has not shown yet,
//! and the times that limit refills. A restart needs none of it: the first list shows all members.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use kube::ResourceExt;
use torpor_api::{Sandbox, SandboxWarmPool};

use super::{
    advice::{self, Published},
    plan::Plan,
    status,
};
use crate::{events::Note, settings::PoolSettings};

/// Time after which a pending member is given up, as upstream: the watch was down while the member
/// came and went.
const FORGET_AFTER: Duration = Duration::from_secs(300);

/// Longest time for which a pool neither creates nor wakes a member after a claim took one that
/// sleeps. A wake takes a tenth of a second of both processors of a small node, and the claim waits
/// for it.
const WAKE_PAUSE: Duration = Duration::from_millis(300);

/// Memory of pools, by UID.
#[derive(Debug, Default)]
pub struct Memory(Mutex<HashMap<String, Pool>>);

#[derive(Debug, Default)]
struct Pool {
    creating: BTreeMap<String, Creating>,
    deleting: BTreeMap<String, Instant>,
    /// Held members by UID: the time at which they were first seen not held; `None` if they were
    /// held at the last pass, however long ago.
    held: BTreeMap<String, Option<Instant>>,
    /// Time since which no member is created because the template's NetworkPolicy is not in place.
    unisolated: Option<Instant>,
    /// Time since which the template has no golden image yet.
    awaits_golden: Option<Instant>,
    /// End of the delay after members have left.
    hold: Option<Instant>,
    pause: Option<Pause>,
    tokens: Option<(f64, Instant)>,
    status_written: Option<Instant>,
    /// Time of the last Event about a stall, unless an Event about its end followed.
    stall_published: Option<Instant>,
    /// True if no member was held at the last pass.
    eased: bool,
    /// True if the last report of another process was taken from the status.
    inherited: bool,
    /// True if the pool's user got the advice.
    advised: bool,
    /// Message of the last Event about the pool's annotation.
    told: Option<String>,
    /// Counter that makes names differ from pass to pass.
    names: u64,
}

/// Pause while a member that a claim took wakes.
#[derive(Debug)]
struct Pause {
    /// Latest end.
    until: Instant,
    /// UID of the Sandbox that wakes.
    sandbox: String,
}

#[derive(Debug)]
struct Creating {
    since: Instant,
    /// True if the create has no answer yet.
    uncertain: bool,
}

/// Memory of a pool as a pass sees it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Remembered {
    /// Names of requested members that the watch has not shown yet.
    pub creating: BTreeSet<String>,
    /// Names in `creating` whose create has had no answer.
    pub uncertain: BTreeSet<String>,
    /// UIDs of deleted members that the cache still shows.
    pub deleting: BTreeSet<String>,
    /// Time by UID since members were first seen not held; 0 for members held at the last pass. A
    /// member is held while it waits for something that a replacement would lack, too.
    pub held: BTreeMap<String, Duration>,
    /// Time for which no member was created because the template's NetworkPolicy was not in place.
    pub unisolated: Duration,
    /// Time for which the template has had no golden image yet.
    pub awaits_golden: Duration,
    /// Time for which no member is created.
    pub hold: Option<Duration>,
    /// Time for which no member is created or woken, because one that a claim took wakes.
    pub pause: Option<Duration>,
    /// Number of members that may be created now; `None`: no limit.
    pub allowance: Option<usize>,
    /// Time until one more member may be created.
    pub next_token: Option<Duration>,
    /// Time until the first of `creating` and `deleting` is given up.
    pub forgotten_in: Option<Duration>,
    /// Differs from pass to pass and from process to process.
    pub salt: u64,
}

impl Memory {
    /// Returns the memory of a pool at a time; forgets outdated entries.
    pub fn remembered(&self, uid: &str, settings: &PoolSettings, now: Instant) -> Remembered {
        let mut all = self.lock();
        let pool = all.entry(uid.to_owned()).or_default();
        pool.creating
            .retain(|_, creating| left(creating.since, now).is_some());
        pool.deleting.retain(|_, since| left(*since, now).is_some());
        let ago = |since: Instant| now.saturating_duration_since(since);
        pool.held
            .retain(|_, over| over.is_none_or(|over| ago(over) <= settings.readiness_grace));
        pool.names = pool.names.wrapping_add(1);
        let (allowance, next_token) = pool.allowance(settings.max_refill_rate, now);
        Remembered {
            uncertain: pool
                .creating
                .iter()
                .filter(|(_, creating)| creating.uncertain)
                .map(|(name, _)| name.clone())
                .collect(),
            creating: pool.creating.keys().cloned().collect(),
            deleting: pool.deleting.keys().cloned().collect(),
            held: pool
                .held
                .iter()
                .map(|(member, over)| (member.clone(), over.map(ago).unwrap_or_default()))
                .collect(),
            unisolated: pool.unisolated.map(ago).unwrap_or_default(),
            awaits_golden: pool.awaits_golden.map(ago).unwrap_or_default(),
            hold: pool
                .hold
                .and_then(|until| until.checked_duration_since(now)),
            pause: pool
                .pause
                .as_ref()
                .and_then(|pause| pause.until.checked_duration_since(now)),
            allowance,
            next_token,
            forgotten_in: pool.forgotten_in(now),
            salt: salt(pool.names),
        }
    }

    /// Records whether the last pass created no member because the template's NetworkPolicy was not
    /// in place.
    pub fn unisolated(&self, uid: &str, waits: bool, now: Instant) {
        let mut all = self.lock();
        let pool = all.entry(uid.to_owned()).or_default();
        pool.unisolated = waits.then(|| pool.unisolated.unwrap_or(now));
    }

    /// Records whether the template has no golden image yet.
    pub fn awaits_golden(&self, uid: &str, waits: bool, now: Instant) {
        let mut all = self.lock();
        let pool = all.entry(uid.to_owned()).or_default();
        pool.awaits_golden = waits.then(|| pool.awaits_golden.unwrap_or(now));
    }

    /// Records a create before its call.
    pub fn creating(&self, uid: &str, name: &str) {
        let mut all = self.lock();
        let pool = all.entry(uid.to_owned()).or_default();
        let creating = Creating {
            since: Instant::now(),
            uncertain: true,
        };
        // A repeated create takes no second token.
        if pool.creating.insert(name.to_owned(), creating).is_none()
            && let Some((tokens, _)) = &mut pool.tokens
        {
            *tokens -= 1.0;
        }
    }

    /// Records the success of a create.
    pub fn created(&self, uid: &str, name: &str) {
        if let Some(pool) = self.lock().get_mut(uid)
            && let Some(creating) = pool.creating.get_mut(name)
        {
            creating.uncertain = false;
        }
    }

    /// Records the failure of a create.
    pub fn not_created(&self, uid: &str, name: &str) {
        if let Some(pool) = self.lock().get_mut(uid) {
            pool.creating.remove(name);
        }
    }

    /// Records the deletion of a member.
    pub fn deleting(&self, uid: &str, member: &str) {
        let mut all = self.lock();
        let pool = all.entry(uid.to_owned()).or_default();
        pool.deleting.insert(member.to_owned(), Instant::now());
    }

    /// Records the held members. A member that is no longer held has its grace period from now on.
    pub fn held(&self, uid: &str, members: &BTreeSet<String>, now: Instant) {
        let mut all = self.lock();
        let pool = all.entry(uid.to_owned()).or_default();
        for over in pool.held.values_mut() {
            *over = over.or(Some(now));
        }
        pool.held
            .extend(members.iter().map(|member| (member.clone(), None)));
    }

    /// Records a Sandbox that the watch has shown, or its deletion.
    pub fn seen(&self, pool_uid: &str, sandbox: &Sandbox, gone: bool) {
        if let Some(pool) = self.lock().get_mut(pool_uid) {
            pool.creating.remove(&sandbox.name_any());
            if gone {
                pool.deleting.remove(&sandbox.uid().unwrap_or_default());
            }
        }
    }

    /// Records that a member has left the pool.
    pub fn left(&self, pool_uid: &str, delay: Duration) {
        if delay.is_zero() {
            return;
        }
        if let Some(pool) = self.lock().get_mut(pool_uid) {
            pool.hold = Some(Instant::now() + delay);
        }
    }

    /// Records that a claim took a member that sleeps. A pause is not prolonged: a pool with many
    /// claims would get no member.
    pub fn wakes(&self, pool_uid: &str, sandbox_uid: String, now: Instant) {
        if let Some(pool) = self.lock().get_mut(pool_uid)
            && pool.pause.as_ref().is_none_or(|pause| pause.until <= now)
        {
            pool.pause = Some(Pause {
                until: now + WAKE_PAUSE,
                sandbox: sandbox_uid,
            });
        }
    }

    /// Records that a Sandbox sleeps no more. Returns the UID of the pool that waited for it.
    pub fn woke(&self, sandbox_uid: &str) -> Option<String> {
        let mut all = self.lock();
        let is_of = |pool: &Pool| {
            let pause = pool.pause.as_ref();
            pause.is_some_and(|pause| pause.sandbox == sandbox_uid)
        };
        let (uid, pool) = all.iter_mut().find(|(_, pool)| is_of(pool))?;
        pool.pause = None;
        Some(uid.clone())
    }

    /// Forgets a deleted pool.
    pub fn forget(&self, uid: &str) {
        self.lock().remove(uid);
    }

    /// Returns the delay before the status may be written; `None`: now. The status of a settled
    /// pool is written at once.
    pub fn status_wait(&self, uid: &str, interval: Duration, settled: bool) -> Option<Duration> {
        let now = Instant::now();
        let mut all = self.lock();
        let pool = all.entry(uid.to_owned()).or_default();
        let due = pool.status_written.map(|written| written + interval);
        let wait = due.and_then(|due| due.checked_duration_since(now));
        let wait = wait.filter(|wait| !settled && !wait.is_zero());
        if wait.is_none() {
            pool.status_written = Some(now);
        }
        wait
    }

    /// Returns the Event for a pool that stalls, or makes progress again, if one is due.
    pub fn note(&self, pool: &SandboxWarmPool, plan: &Plan, now: Instant) -> Option<Note> {
        let uid = pool.uid().unwrap_or_default();
        let mut all = self.lock();
        let known = all.entry(uid).or_default();
        if !known.inherited {
            known.inherited = true;
            known.stall_published = status::is_stalled(pool).then_some(now);
        }
        let published = known.stall_published.map(|published| match known.eased {
            true => Published::Eased,
            false => Published::Stalled(now.saturating_duration_since(published)),
        });
        known.eased = plan.stalled.is_none();
        let note = advice::progress(plan.stalled.as_deref(), plan.placed, published)?;
        known.stall_published = plan.stalled.as_ref().map(|_| now);
        Some(note)
    }

    /// Reports whether the pool's user has not got this Event about its annotation yet. Records it
    /// as published.
    pub fn is_new(&self, uid: &str, note: &Note) -> bool {
        let mut all = self.lock();
        let pool = all.entry(uid.to_owned()).or_default();
        let is_new = pool.told.as_ref() != Some(&note.message);
        pool.told = Some(note.message.clone());
        is_new
    }

    /// Reports whether the pool's user got the advice.
    pub fn is_advised(&self, uid: &str) -> bool {
        self.lock().get(uid).is_some_and(|pool| pool.advised)
    }

    /// Records that the pool's user got the advice.
    pub fn advised(&self, uid: &str) {
        self.lock().entry(uid.to_owned()).or_default().advised = true;
    }

    // A panic elsewhere leaves the map unchanged.
    fn lock(&self) -> MutexGuard<'_, HashMap<String, Pool>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns the time for which an entry is kept.
fn left(since: Instant, now: Instant) -> Option<Duration> {
    let left = FORGET_AFTER.checked_sub(now.saturating_duration_since(since));
    left.filter(|left| !left.is_zero())
}

impl Pool {
    /// Returns the time until the first pending entry is given up.
    fn forgotten_in(&self, now: Instant) -> Option<Duration> {
        let made = self.creating.values().map(|creating| creating.since);
        let all = made.chain(self.deleting.values().copied());
        all.filter_map(|since| left(since, now)).min()
    }

    /// Returns the number of members that may be created and the time until the next. The token
    /// bucket holds the tokens of one second, and at least one.
    fn allowance(&mut self, rate: f64, now: Instant) -> (Option<usize>, Option<Duration>) {
        if rate <= 0.0 {
            self.tokens = None;
            return (None, None);
        }
        let most = rate.max(1.0);
        let (tokens, since) = self.tokens.unwrap_or((most, now));
        let tokens = most.min(tokens + (now - since).as_secs_f64() * rate);
        self.tokens = Some((tokens, now));
        let whole = tokens.max(0.0).floor();
        // A rate is far below what a usize holds, and the value is not negative.
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
        let allowance = whole as usize;
        let missing = (1.0 - tokens.fract()).max(0.0) / rate;
        (Some(allowance), Duration::try_from_secs_f64(missing).ok())
    }
}

/// Returns a number that differs between processes: each seeds the standard library's hasher anew.
fn salt(number: u64) -> u64 {
    use std::hash::{BuildHasher, RandomState};
    RandomState::new().hash_one(number)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::pool::plan::Observed;

    fn sandbox(name: &str, uid: &str) -> Sandbox {
        let mut sandbox = Sandbox::default();
        sandbox.metadata.name = Some(name.into());
        sandbox.metadata.uid = Some(uid.into());
        sandbox
    }

    fn of(memory: &Memory) -> Remembered {
        at(memory, Duration::ZERO)
    }

    fn at(memory: &Memory, later: Duration) -> Remembered {
        memory.remembered("p", &PoolSettings::default(), Instant::now() + later)
    }

    #[test]
    fn a_requested_member_is_remembered_until_the_watch_shows_it() {
        let memory = Memory::default();
        memory.creating("p", "a");
        assert!(of(&memory).uncertain.contains("a"));
        memory.created("p", "a");
        let remembered = of(&memory);
        assert!(remembered.creating.contains("a") && remembered.uncertain.is_empty());
        memory.seen("p", &sandbox("a", "u"), false);
        assert!(of(&memory).creating.is_empty());
        memory.creating("p", "b");
        memory.not_created("p", "b");
        assert!(of(&memory).creating.is_empty());
    }

    #[test]
    fn the_wait_for_a_policy_counts_from_the_first_pass_that_waited() {
        let (memory, begin) = (Memory::default(), Instant::now());
        let second = Duration::from_secs(1);
        let waited = |at: Instant| {
            let settings = PoolSettings::default();
            memory.remembered("p", &settings, at).unisolated
        };
        memory.unisolated("p", true, begin);
        memory.unisolated("p", true, begin + second);
        assert_eq!(waited(begin + 2 * second), 2 * second);
        memory.unisolated("p", false, begin + 2 * second);
        assert_eq!(waited(begin + 3 * second), Duration::ZERO);
    }

    #[test]
    fn a_deleted_member_is_remembered_until_it_is_gone() {
        let memory = Memory::default();
        memory.deleting("p", "u");
        memory.seen("p", &sandbox("a", "u"), false);
        assert!(of(&memory).deleting.contains("u"));
        memory.seen("p", &sandbox("a", "u"), true);
        assert!(of(&memory).deleting.is_empty());
    }

    #[test]
    fn a_member_that_the_watch_never_shows_is_given_up_and_the_pool_reconciled_then() {
        let second = Duration::from_secs(1);
        for made in [true, false] {
            let memory = Memory::default();
            assert_eq!(of(&memory).forgotten_in, None);
            if made {
                memory.creating("p", "a");
                memory.created("p", "a");
            } else {
                memory.deleting("p", "u");
            }
            let expected = |seen: &Remembered| seen.creating.len() + seen.deleting.len();
            let before = at(&memory, FORGET_AFTER - second);
            assert_eq!(expected(&before), 1);
            assert!(before.forgotten_in.unwrap() <= second + second);
            let after = at(&memory, FORGET_AFTER);
            assert_eq!((expected(&after), after.forgotten_in), (0, None));
        }
    }

    /// The state at the last pass is kept until the next one, however late.
    #[test]
    fn a_held_member_is_remembered_for_its_grace_period() {
        let memory = Memory::default();
        let (begin, grace) = (Instant::now(), PoolSettings::default().readiness_grace);
        let look = |later: Duration, held: bool| {
            let held = held.then(|| "u".to_owned()).into_iter().collect();
            memory.held("p", &held, begin + later);
        };
        let ago = |later: Duration| {
            let settings = PoolSettings::default();
            let remembered = memory.remembered("p", &settings, begin + later);
            remembered.held.get("u").copied()
        };
        let minute = Duration::from_secs(60);
        look(Duration::ZERO, true);
        look(minute, true);
        let over = minute + 2 * grace;
        assert_eq!(ago(over), Some(Duration::ZERO));
        look(over, false);
        look(over + minute, false);
        assert_eq!(ago(over + minute), Some(minute));
        assert_eq!(ago(over + grace), Some(grace));
        assert_eq!(ago(over + grace + minute), None);
    }

    #[test]
    fn a_refill_takes_the_tokens_of_a_second_and_then_waits() {
        let memory = Memory::default();
        let settings = PoolSettings {
            max_refill_rate: 3.0,
            ..PoolSettings::default()
        };
        assert_eq!(
            memory.remembered("p", &settings, Instant::now()).allowance,
            Some(3)
        );
        for name in ["a", "b", "c"] {
            memory.creating("p", name);
        }
        let remembered = memory.remembered("p", &settings, Instant::now());
        assert_eq!(remembered.allowance, Some(0));
        let wait = remembered.next_token.unwrap();
        assert!(wait <= Duration::from_secs_f64(0.34), "{wait:?}");
        assert_eq!(of(&memory).allowance, None);
    }

    #[test]
    fn each_member_that_leaves_restarts_the_delay_of_the_refill() {
        let memory = Memory::default();
        of(&memory);
        memory.left("p", Duration::ZERO);
        assert_eq!(of(&memory).hold, None);
        memory.left("p", Duration::from_secs(5));
        memory.left("p", Duration::from_secs(60));
        assert!(of(&memory).hold.unwrap() > Duration::from_secs(50));
    }

    #[test]
    fn a_pool_pauses_while_a_claims_member_wakes_and_no_longer() {
        let (memory, begin) = (Memory::default(), Instant::now());
        let pause = |at: Duration| {
            let settings = PoolSettings::default();
            memory.remembered("p", &settings, begin + at).pause
        };
        assert_eq!(pause(Duration::ZERO), None);
        memory.wakes("p", "first".to_owned(), begin);
        memory.wakes("p", "second".to_owned(), begin + WAKE_PAUSE / 2);
        assert_eq!(pause(WAKE_PAUSE / 2), Some(WAKE_PAUSE / 2));
        assert_eq!(pause(WAKE_PAUSE + Duration::from_millis(1)), None);
        assert_eq!(memory.woke("second"), None);
        assert_eq!(memory.woke("first").as_deref(), Some("p"));
        assert_eq!(pause(WAKE_PAUSE / 2), None);
    }

    #[test]
    fn a_stall_is_published_again_after_an_hour_and_its_end_once() {
        let (memory, pool) = (Memory::default(), SandboxWarmPool::default());
        let begin = Instant::now();
        let published = |minutes: u64, stalled: bool| {
            let plan = Plan {
                stalled: stalled.then(|| "full".to_owned()),
                placed: !stalled,
                ..Plan::default()
            };
            let now = begin + Duration::from_secs(60 * minutes);
            memory.note(&pool, &plan, now).map(|note| note.reason)
        };
        let (stalls, goes_on) = (Some("WarmPoolNotProgressing"), Some("WarmPoolProgressing"));
        assert_eq!(published(0, false), None);
        assert_eq!([published(1, true), published(2, true)], [stalls, None]);
        assert_eq!([published(61, true), published(62, true)], [stalls, None]);
        assert_eq!(
            [published(63, false), published(64, false)],
            [goes_on, None]
        );
        assert_eq!(published(65, true), stalls, "a new stall");
    }

    #[test]
    fn a_stall_of_new_members_is_published_without_an_end_in_between() {
        let (memory, pool) = (Memory::default(), SandboxWarmPool::default());
        let held = Plan {
            stalled: Some("full".to_owned()),
            ..Plan::default()
        };
        let placed = Plan {
            placed: true,
            ..Plan::default()
        };
        let now = Instant::now();
        let published = |plan: &Plan| memory.note(&pool, plan, now).map(|note| note.reason);
        let (stalls, goes_on) = (Some("WarmPoolNotProgressing"), Some("WarmPoolProgressing"));
        assert_eq!([published(&held), published(&held)], [stalls, None]);
        // New members were created instead and are within their grace period.
        assert_eq!(
            [published(&Plan::default()), published(&Plan::default())],
            [None; 2]
        );
        assert_eq!([published(&held), published(&held)], [stalls, None]);
        assert_eq!(
            [published(&Plan::default()), published(&placed)],
            [None, goes_on]
        );
        assert_eq!([published(&Plan::default()), published(&placed)], [None; 2]);
    }

    #[test]
    fn a_stall_in_the_status_is_not_published_again_by_another_process() {
        let mut pool = SandboxWarmPool::default();
        let held = Plan {
            stalled: Some("full".to_owned()),
            ..Plan::default()
        };
        let placed = Plan {
            placed: true,
            ..Plan::default()
        };
        let view = Observed {
            template: Some(Arc::default()),
            ..Observed::default()
        };
        pool.status = Some(status::next(&view, &held, jiff::Timestamp::UNIX_EPOCH));
        let memory = Memory::default();
        let now = Instant::now();
        let published = |plan: &Plan| memory.note(&pool, plan, now).map(|note| note.reason);
        assert_eq!([published(&held), published(&held)], [None; 2]);
        let goes_on = Some("WarmPoolProgressing");
        assert_eq!([published(&placed), published(&placed)], [goes_on, None]);
        assert_eq!(published(&held), Some("WarmPoolNotProgressing"));
    }

    #[test]
    fn the_status_of_a_changing_pool_is_written_once_an_interval() {
        let memory = Memory::default();
        let interval = Duration::from_secs(60);
        assert_eq!(memory.status_wait("p", interval, false), None);
        assert!(memory.status_wait("p", interval, false).is_some());
        assert_eq!(memory.status_wait("p", interval, true), None);
    }
}
