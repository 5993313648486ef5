//! Cache of decisions on tokens: their lifetimes and evictions. No function here waits or reads the
//! clock.

use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

use tokio::sync::watch;

/// Decision of the apiserver on a token, or on a token and a sandbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decision {
    /// The token is valid, and its user has the right in question, if any.
    Allowed,
    /// The token is invalid.
    Unauthenticated,
    /// The token is valid, but its user lacks the right.
    Forbidden,
    /// The apiserver could not be reached or did not respond.
    Unknown,
    /// No review was made: the queue of tokens was full.
    QueueFull,
}

impl Decision {
    fn lifetime(self, ttl: Duration) -> Duration {
        match self {
            Self::Allowed | Self::Unauthenticated | Self::Forbidden => ttl,
            // An unknown decision expires sooner; upstream's rule.
            Self::Unknown => (ttl / 3).max(Duration::from_secs(1)),
            Self::QueueFull => Duration::ZERO,
        }
    }
}

/// Review; `None`: it is in flight.
pub type Review = watch::Receiver<Option<Decision>>;

/// SHA-256 of a token, or of a token and a sandbox: a dump of this memory reveals no token.
pub type Key = [u8; 32];

/// Cached decision on a token, or the review in flight.
#[derive(Clone, Debug)]
pub enum Cached {
    Decided(Decision),
    InReview(Review),
}

/// Cache of decisions.
#[derive(Debug)]
pub struct AuthzCache {
    ttl: Duration,
    size: usize,
    by_token: HashMap<Key, Entry>,
}

#[derive(Debug)]
struct Entry {
    since: Instant,
    /// The review before this one found the token valid.
    was_valid: bool,
    review: Review,
}

/// Loss if an entry is evicted; entries of the smallest loss are evicted first.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Loss {
    None,
    /// The next request with the token makes another review.
    Review,
    ValidToken,
}

impl Entry {
    fn decision(&self) -> Option<Decision> {
        *self.review.borrow()
    }

    fn is_fresh(&self, ttl: Duration, now: Instant) -> bool {
        let age = now.saturating_duration_since(self.since);
        self.decision()
            .is_none_or(|decision| age < decision.lifetime(ttl))
    }

    /// Reports whether the last known decision allowed the token.
    fn is_valid(&self) -> bool {
        match self.decision() {
            Some(Decision::Allowed) => true,
            Some(Decision::Unauthenticated | Decision::Forbidden) => false,
            Some(Decision::Unknown | Decision::QueueFull) | None => self.was_valid,
        }
    }

    fn loss(&self) -> Loss {
        match self.decision() {
            _ if self.is_valid() => Loss::ValidToken,
            None => Loss::Review,
            Some(_) => Loss::None,
        }
    }
}

impl AuthzCache {
    /// Returns an empty cache for at most `size` tokens, with decisions valid for `ttl`.
    pub fn new(ttl: Duration, size: usize) -> Self {
        Self {
            ttl,
            size,
            by_token: HashMap::new(),
        }
    }

    /// Returns the decision on a token or its review in flight; `None`: a new review is needed.
    pub fn find(&self, key: &Key, now: Instant) -> Option<Cached> {
        let entry = self.by_token.get(key)?;
        match entry.decision() {
            None => Some(Cached::InReview(entry.review.clone())),
            Some(decision) => entry
                .is_fresh(self.ttl, now)
                .then_some(Cached::Decided(decision)),
        }
    }

    /// Reports whether the last known decision allowed the token.
    pub fn was_valid(&self, key: &Key) -> bool {
        self.by_token.get(key).is_some_and(Entry::is_valid)
    }

    /// Adds a review that has just begun.
    pub fn insert(&mut self, key: Key, review: Review, now: Instant) {
        let was_valid = self.was_valid(&key);
        if self.by_token.len() >= self.size && !self.by_token.contains_key(&key) {
            self.evict(now);
        }
        let new = Entry {
            since: now,
            was_valid,
            review,
        };
        self.by_token.insert(key, new);
    }

    /// Evicts expired entries except of valid tokens, which thus differ from invented ones later.
    ///
    /// If that is not enough, evicts the oldest entries of the smallest loss: an eighth of the
    /// cache at once, since a pass over all entries takes time. Invented tokens therefore evict no
    /// valid token.
    fn evict(&mut self, now: Instant) {
        let ttl = self.ttl;
        self.by_token
            .retain(|_, entry| entry.is_valid() || entry.is_fresh(ttl, now));
        let room = (self.size / 8).max(1);
        let excess = (self.by_token.len() + room).saturating_sub(self.size);
        if excess == 0 {
            return;
        }
        let all = self.by_token.iter();
        let mut all: Vec<_> = all
            .map(|(key, entry)| (entry.loss(), entry.since, *key))
            .collect();
        all.sort_unstable();
        for (.., key) in all.into_iter().take(excess) {
            self.by_token.remove(&key);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rstest::rstest;

    use super::*;

    const TTL: Duration = Duration::from_secs(30);

    fn decided(decision: Decision) -> Review {
        watch::channel(Some(decision)).1
    }

    fn in_review() -> Review {
        watch::channel(None).1
    }

    #[rstest]
    #[case::good(Decision::Allowed, TTL, 29, true)]
    #[case::good_and_old(Decision::Allowed, TTL, 30, false)]
    #[case::bad(Decision::Unauthenticated, TTL, 29, true)]
    #[case::without_the_right(Decision::Forbidden, TTL, 29, true)]
    #[case::without_the_right_and_old(Decision::Forbidden, TTL, 30, false)]
    #[case::unknown(Decision::Unknown, TTL, 9, true)]
    #[case::unknown_and_old(Decision::Unknown, TTL, 10, false)]
    #[case::at_least_a_second(Decision::Unknown, Duration::ZERO, 0, true)]
    #[case::queue_full(Decision::QueueFull, TTL, 0, false)]
    fn a_decision_is_cached_for_its_lifetime(
        #[case] decision: Decision,
        #[case] ttl: Duration,
        #[case] age: u64,
        #[case] stands: bool,
    ) {
        let (mut cache, now) = (AuthzCache::new(ttl, 1), Instant::now());
        cache.insert([1; 32], decided(decision), now);
        let found = cache.find(&[1; 32], now + Duration::from_secs(age));
        assert_eq!(
            matches!(found, Some(Cached::Decided(same)) if same == decision),
            stands
        );
        assert_eq!(found.is_some(), stands);
    }

    #[test]
    fn a_review_in_flight_is_shared_for_any_time() {
        let (mut cache, now) = (AuthzCache::new(TTL, 1), Instant::now());
        cache.insert([1; 32], in_review(), now);
        let found = cache.find(&[1; 32], now + 2 * TTL);
        assert!(matches!(found, Some(Cached::InReview(_))), "{found:?}");
        assert!(cache.find(&[2; 32], now).is_none());
    }

    #[rstest]
    #[case::good(&[Decision::Allowed], true)]
    #[case::bad(&[Decision::Unauthenticated], false)]
    #[case::unknown(&[Decision::Unknown], false)]
    #[case::good_and_unknown(&[Decision::Allowed, Decision::Unknown], true)]
    #[case::good_and_queue_full(&[Decision::Allowed, Decision::QueueFull, Decision::QueueFull], true)]
    #[case::token_revoked(&[Decision::Allowed, Decision::Unauthenticated], false)]
    #[case::right_lost(&[Decision::Allowed, Decision::Forbidden], false)]
    fn a_valid_token_stays_known_until_the_apiserver_rejects_it(
        #[case] decisions: &[Decision],
        #[case] good: bool,
    ) {
        let (mut cache, now) = (AuthzCache::new(TTL, 1), Instant::now());
        for decision in decisions {
            cache.insert([1; 32], decided(*decision), now);
        }
        assert_eq!(cache.was_valid(&[1; 32]), good);
        cache.insert([1; 32], in_review(), now);
        assert_eq!(cache.was_valid(&[1; 32]), good);
    }

    #[test]
    fn invented_tokens_are_evicted_first_then_reviews_in_flight_then_the_oldest_valid_token() {
        let (mut cache, now) = (AuthzCache::new(TTL, 4), Instant::now());
        let at = |second| now + Duration::from_secs(second);
        cache.insert([0; 32], decided(Decision::Allowed), at(0));
        cache.insert([1; 32], in_review(), at(1));
        cache.insert([2; 32], decided(Decision::Allowed), at(2));
        cache.insert([3; 32], decided(Decision::Unauthenticated), at(3));
        for (new, gone) in [(4, 3), (5, 1), (6, 0)] {
            cache.insert([new; 32], decided(Decision::Allowed), at(4));
            assert!(cache.find(&[gone; 32], at(4)).is_none(), "{gone}");
            assert_eq!(cache.by_token.len(), 4);
        }
    }

    #[test]
    fn expired_decisions_are_evicted_except_those_on_valid_tokens() {
        let (mut cache, now) = (AuthzCache::new(TTL, 3), Instant::now());
        cache.insert([0; 32], decided(Decision::Allowed), now);
        cache.insert([1; 32], decided(Decision::Unauthenticated), now);
        cache.insert([2; 32], decided(Decision::Unauthenticated), now + TTL);
        cache.insert([3; 32], in_review(), now + TTL);
        assert!(cache.was_valid(&[0; 32]));
        assert!(cache.find(&[0; 32], now + TTL).is_none(), "asked again");
        let mut left: Vec<u8> = cache.by_token.keys().map(|key| key[0]).collect();
        left.sort_unstable();
        assert_eq!(left, [0, 2, 3]);
    }

    proptest! {
        #[test]
        fn no_valid_token_is_evicted_while_an_invalid_one_is_cached(
            size in 1_usize..40, tokens in prop::collection::vec((any::<u8>(), any::<bool>()), 0..200),
        ) {
            let (mut cache, now) = (AuthzCache::new(TTL, size), Instant::now());
            for (token, good) in tokens {
                let key = [token; 32];
                let before: Vec<Key> = cache.by_token.keys().copied().collect();
                let good_before: Vec<Key> =
                    before.into_iter().filter(|key| cache.was_valid(key)).collect();
                let decision = if good { Decision::Allowed } else { Decision::Unauthenticated };
                cache.insert(key, decided(decision), now);
                prop_assert!(cache.by_token.len() <= size);
                let lost = good_before.iter().any(|key| !cache.by_token.contains_key(key));
                let others = cache.by_token.keys().filter(|other| **other != key);
                let bad = others.filter(|other| !cache.was_valid(other)).count();
                prop_assert!(!lost || bad == 0, "{} others are left", bad);
            }
        }
    }
}
