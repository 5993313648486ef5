//! What this process remembers of pools between passes: members that it has asked for or deleted and that the watch has not shown yet, and the times that shape refills. After a
//! restart nothing of it is needed: the first list shows everything that was done.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use kube::ResourceExt;
use torpor_api::{Sandbox, SandboxWarmPool};

use super::{
    advice::{self, Told},
    plan::Plan,
    status,
};
use crate::{events::Note, settings::PoolSettings};

/// After this an expectation is given up, as upstream: the watch was down while the member came and went.
const FORGET_AFTER: Duration = Duration::from_secs(300);

/// What this process remembers of pools, by UID.
#[derive(Debug, Default)]
pub struct Memory(Mutex<HashMap<String, Pool>>);

#[derive(Debug, Default)]
struct Pool {
    creating: BTreeMap<String, Creating>,
    deleting: BTreeMap<String, Instant>,
    /// Members that were held: when they were first seen to be so no more; `None`: they were at the last look, however long ago that was.
    held: BTreeMap<String, Option<Instant>>,
    /// Since when no member is made because the template's NetworkPolicy is not in place.
    unisolated: Option<Instant>,
    /// Until when nothing is made, because members have left.
    hold: Option<Instant>,
    tokens: Option<(f64, Instant)>,
    status_written: Option<Instant>,
    /// When the pool was last said not to progress, unless it was said since that it does.
    stall_told: Option<Instant>,
    /// No member was held at the last look.
    eased: bool,
    /// What another process said last was taken from the status.
    inherited: bool,
    /// The pool's user was told what there is to know.
    advised: bool,
    /// Makes names differ from pass to pass.
    names: u64,
}

#[derive(Debug)]
struct Creating {
    since: Instant,
    /// There was no answer.
    uncertain: bool,
}

/// What a pass gets to see of it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Remembered {
    /// Names of members that were asked for and are not to be seen yet.
    pub creating: BTreeSet<String>,
    /// Those of them whose create had no answer.
    pub uncertain: BTreeSet<String>,
    /// UIDs of members that were deleted and are still to be seen.
    pub deleting: BTreeSet<String>,
    /// How long ago members, by UID, were first seen to wait no more for something that no other in their place would have had either; 0 for those that waited at the last look.
    pub held: BTreeMap<String, Duration>,
    /// For how long no member was made because the template's NetworkPolicy was not in place.
    pub unisolated: Duration,
    /// How long nothing is made.
    pub hold: Option<Duration>,
    /// How many may be made now; `None`: no limit.
    pub allowance: Option<usize>,
    /// How long until one more may be made.
    pub next_token: Option<Duration>,
    /// How long until the first of those in `creating` and `deleting` is given up.
    pub forgotten_in: Option<Duration>,
    /// Differs from pass to pass and from process to process.
    pub salt: u64,
}

impl Memory {
    /// What is remembered of a pool at a time. What is too old then is forgotten.
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
            hold: pool
                .hold
                .and_then(|until| until.checked_duration_since(now)),
            allowance,
            next_token,
            forgotten_in: pool.forgotten_in(now),
            salt: salt(pool.names),
        }
    }

    /// Whether the last pass made no member because the template's NetworkPolicy was not in place.
    pub fn unisolated(&self, uid: &str, waits: bool, now: Instant) {
        let mut all = self.lock();
        let pool = all.entry(uid.to_owned()).or_default();
        pool.unisolated = waits.then(|| pool.unisolated.unwrap_or(now));
    }

    /// A member is about to be made.
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

    /// The member was made.
    pub fn created(&self, uid: &str, name: &str) {
        if let Some(pool) = self.lock().get_mut(uid)
            && let Some(creating) = pool.creating.get_mut(name)
        {
            creating.uncertain = false;
        }
    }

    /// The member was not made.
    pub fn not_created(&self, uid: &str, name: &str) {
        if let Some(pool) = self.lock().get_mut(uid) {
            pool.creating.remove(name);
        }
    }

    /// The member is being deleted.
    pub fn deleting(&self, uid: &str, member: &str) {
        let mut all = self.lock();
        let pool = all.entry(uid.to_owned()).or_default();
        pool.deleting.insert(member.to_owned(), Instant::now());
    }

    /// These members are held, and no others: once what they wait for has come they have their time anew.
    pub fn held(&self, uid: &str, members: &BTreeSet<String>, now: Instant) {
        let mut all = self.lock();
        let pool = all.entry(uid.to_owned()).or_default();
        for over in pool.held.values_mut() {
            *over = over.or(Some(now));
        }
        pool.held
            .extend(members.iter().map(|member| (member.clone(), None)));
    }

    /// The watch has shown a Sandbox, or that it is gone.
    pub fn seen(&self, pool_uid: &str, sandbox: &Sandbox, gone: bool) {
        if let Some(pool) = self.lock().get_mut(pool_uid) {
            pool.creating.remove(&sandbox.name_any());
            if gone {
                pool.deleting.remove(&sandbox.uid().unwrap_or_default());
            }
        }
    }

    /// A member has left the pool.
    pub fn left(&self, pool_uid: &str, delay: Duration) {
        if delay.is_zero() {
            return;
        }
        if let Some(pool) = self.lock().get_mut(pool_uid) {
            pool.hold = Some(Instant::now() + delay);
        }
    }

    /// The pool is gone.
    pub fn forget(&self, uid: &str) {
        self.lock().remove(uid);
    }

    /// How long the status has to wait; `None`: it is written now. A settled pool's status does not wait.
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

    /// The Event for a pool that does not progress, or progresses again, if it is time for one.
    pub fn note(&self, pool: &SandboxWarmPool, plan: &Plan, now: Instant) -> Option<Note> {
        let uid = pool.uid().unwrap_or_default();
        let mut all = self.lock();
        let known = all.entry(uid).or_default();
        if !known.inherited {
            known.inherited = true;
            known.stall_told = status::is_stalled(pool).then_some(now);
        }
        let told = known.stall_told.map(|told| match known.eased {
            true => Told::Eased,
            false => Told::Stalls(now.saturating_duration_since(told)),
        });
        known.eased = plan.stalled.is_none();
        let note = advice::progress(plan.stalled.as_deref(), plan.placed, told)?;
        known.stall_told = plan.stalled.as_ref().map(|_| now);
        Some(note)
    }

    /// Whether the pool's user was told what there is to know.
    pub fn is_advised(&self, uid: &str) -> bool {
        self.lock().get(uid).is_some_and(|pool| pool.advised)
    }

    /// The pool's user is told.
    pub fn advised(&self, uid: &str) {
        self.lock().entry(uid.to_owned()).or_default().advised = true;
    }

    // A panic elsewhere leaves the map as it was.
    fn lock(&self) -> MutexGuard<'_, HashMap<String, Pool>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// How long something is still remembered.
fn left(since: Instant, now: Instant) -> Option<Duration> {
    let left = FORGET_AFTER.checked_sub(now.saturating_duration_since(since));
    left.filter(|left| !left.is_zero())
}

impl Pool {
    /// When something is given up that the watch has not shown.
    fn forgotten_in(&self, now: Instant) -> Option<Duration> {
        let made = self.creating.values().map(|creating| creating.since);
        let all = made.chain(self.deleting.values().copied());
        all.filter_map(|since| left(since, now)).min()
    }

    /// A token bucket that holds what a second brings, and at least one.
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

/// A number that differs between processes, because the standard library's hasher is seeded anew in each.
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
    fn what_was_asked_for_is_remembered_until_it_is_seen() {
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
    fn how_long_a_pool_waits_for_its_policy_is_counted_from_the_first_pass_that_waited() {
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
    fn what_was_deleted_is_remembered_until_it_is_gone() {
        let memory = Memory::default();
        memory.deleting("p", "u");
        memory.seen("p", &sandbox("a", "u"), false);
        assert!(of(&memory).deleting.contains("u"));
        memory.seen("p", &sandbox("a", "u"), true);
        assert!(of(&memory).deleting.is_empty());
    }

    #[test]
    fn what_the_watch_never_shows_is_given_up_and_the_pool_looked_at_then() {
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

    /// However seldom it is looked at: what it was at the last look is not forgotten before the next.
    #[test]
    fn what_was_held_is_remembered_as_long_as_a_member_may_take() {
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
    fn a_refill_takes_what_a_second_brings_and_then_waits() {
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
    fn members_that_leave_hold_the_refill_up_and_each_begins_the_wait_anew() {
        let memory = Memory::default();
        of(&memory);
        memory.left("p", Duration::ZERO);
        assert_eq!(of(&memory).hold, None);
        memory.left("p", Duration::from_secs(5));
        memory.left("p", Duration::from_secs(60));
        assert!(of(&memory).hold.unwrap() > Duration::from_secs(50));
    }

    #[test]
    fn a_pool_that_stalls_is_told_of_again_an_hour_later_and_once_when_it_goes_on() {
        let (memory, pool) = (Memory::default(), SandboxWarmPool::default());
        let begin = Instant::now();
        let told = |minutes: u64, stalled: bool| {
            let plan = Plan {
                stalled: stalled.then(|| "full".to_owned()),
                placed: !stalled,
                ..Plan::default()
            };
            let now = begin + Duration::from_secs(60 * minutes);
            memory.note(&pool, &plan, now).map(|note| note.reason)
        };
        let (stalls, goes_on) = (Some("WarmPoolNotProgressing"), Some("WarmPoolProgressing"));
        assert_eq!(told(0, false), None);
        assert_eq!([told(1, true), told(2, true)], [stalls, None]);
        assert_eq!([told(61, true), told(62, true)], [stalls, None]);
        assert_eq!([told(63, false), told(64, false)], [goes_on, None]);
        assert_eq!(told(65, true), stalls, "anew");
    }

    #[test]
    fn a_pool_that_stalls_anew_with_other_members_is_told_of_and_not_said_to_have_gone_on() {
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
        let told = |plan: &Plan| memory.note(&pool, plan, now).map(|note| note.reason);
        let (stalls, goes_on) = (Some("WarmPoolNotProgressing"), Some("WarmPoolProgressing"));
        assert_eq!([told(&held), told(&held)], [stalls, None]);
        // Others were made instead, and have their time.
        assert_eq!([told(&Plan::default()), told(&Plan::default())], [None; 2]);
        assert_eq!([told(&held), told(&held)], [stalls, None]);
        assert_eq!([told(&Plan::default()), told(&placed)], [None, goes_on]);
        assert_eq!([told(&Plan::default()), told(&placed)], [None; 2]);
    }

    #[test]
    fn what_the_status_says_already_another_process_does_not_tell_anew() {
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
        let told = |plan: &Plan| memory.note(&pool, plan, now).map(|note| note.reason);
        assert_eq!([told(&held), told(&held)], [None; 2]);
        let goes_on = Some("WarmPoolProgressing");
        assert_eq!([told(&placed), told(&placed)], [goes_on, None]);
        assert_eq!(told(&held), Some("WarmPoolNotProgressing"));
    }

    #[test]
    fn the_status_of_a_pool_in_a_storm_is_written_now_and_then() {
        let memory = Memory::default();
        let interval = Duration::from_secs(60);
        assert_eq!(memory.status_wait("p", interval, false), None);
        assert!(memory.status_wait("p", interval, false).is_some());
        assert_eq!(memory.status_wait("p", interval, true), None);
    }
}
