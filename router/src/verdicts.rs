//! Verdicts on tokens: how long each stands, and which are forgotten when there are too many. Nobody waits here, and no clock is read.

use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

use tokio::sync::watch;

/// What the apiserver says of a token, or of a token and a sandbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The token is somebody's, who may do what was asked about, if anything was.
    Allowed,
    /// The token is nobody's.
    Unauthenticated,
    /// The token is somebody's, who may not.
    Forbidden,
    /// It could not be asked.
    Unknown,
    /// It was not asked: too many tokens were there before this one.
    Crowded,
}

impl Verdict {
    fn lasts(self, ttl: Duration) -> Duration {
        match self {
            Self::Allowed | Self::Unauthenticated | Self::Forbidden => ttl,
            // What could not be found out is asked again sooner; upstream's rule.
            Self::Unknown => (ttl / 3).max(Duration::from_secs(1)),
            Self::Crowded => Duration::ZERO,
        }
    }
}

/// A review, which is under way for as long as there is no verdict.
pub type Review = watch::Receiver<Option<Verdict>>;

/// SHA-256 of a token, or of a token and a sandbox: who reads this memory shall not find tokens.
pub type Key = [u8; 32];

/// What is known of a token.
#[derive(Clone, Debug)]
pub enum Known {
    Stands(Verdict),
    UnderWay(Review),
}

/// What is remembered.
#[derive(Debug)]
pub struct Verdicts {
    ttl: Duration,
    size: usize,
    by_token: HashMap<Key, Remembered>,
}

#[derive(Debug)]
struct Remembered {
    since: Instant,
    /// By the review before this one.
    was_good: bool,
    review: Review,
}

/// What is lost with a token that is forgotten.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Worth {
    Nothing,
    /// The next request with it makes another review.
    UnderWay,
    Good,
}

impl Remembered {
    fn verdict(&self) -> Option<Verdict> {
        *self.review.borrow()
    }

    fn stands(&self, ttl: Duration, now: Instant) -> bool {
        let age = now.saturating_duration_since(self.since);
        self.verdict()
            .is_none_or(|verdict| age < verdict.lasts(ttl))
    }

    /// As far as anybody knows.
    fn is_good(&self) -> bool {
        match self.verdict() {
            Some(Verdict::Allowed) => true,
            Some(Verdict::Unauthenticated | Verdict::Forbidden) => false,
            Some(Verdict::Unknown | Verdict::Crowded) | None => self.was_good,
        }
    }

    fn worth(&self) -> Worth {
        match self.verdict() {
            _ if self.is_good() => Worth::Good,
            None => Worth::UnderWay,
            Some(_) => Worth::Nothing,
        }
    }
}

impl Verdicts {
    /// Remembers at most `size` tokens; a verdict stands for `ttl`.
    pub fn new(ttl: Duration, size: usize) -> Self {
        Self {
            ttl,
            size,
            by_token: HashMap::new(),
        }
    }

    /// What is known of a token, unless it has to be asked about.
    pub fn find(&self, key: &Key, now: Instant) -> Option<Known> {
        let remembered = self.by_token.get(key)?;
        match remembered.verdict() {
            None => Some(Known::UnderWay(remembered.review.clone())),
            Some(verdict) => remembered
                .stands(self.ttl, now)
                .then_some(Known::Stands(verdict)),
        }
    }

    /// Whether the token was good when it was last asked about.
    pub fn was_good(&self, key: &Key) -> bool {
        self.by_token.get(key).is_some_and(Remembered::is_good)
    }

    /// Remembers a review that has just begun.
    pub fn insert(&mut self, key: Key, review: Review, now: Instant) {
        let was_good = self.was_good(&key);
        if self.by_token.len() >= self.size && !self.by_token.contains_key(&key) {
            self.make_room(now);
        }
        let new = Remembered {
            since: now,
            was_good,
            review,
        };
        self.by_token.insert(key, new);
    }

    /// Forgets what no longer stands, but for tokens that were good: so they are told from invented ones when they come again. If that is not enough, the oldest of those
    /// that are worth least go, an eighth at once, since looking at all of them takes a while. Whoever invents tokens does not have those forgotten that are good.
    fn make_room(&mut self, now: Instant) {
        let ttl = self.ttl;
        self.by_token
            .retain(|_, remembered| remembered.is_good() || remembered.stands(ttl, now));
        let room = (self.size / 8).max(1);
        let excess = (self.by_token.len() + room).saturating_sub(self.size);
        if excess == 0 {
            return;
        }
        let all = self.by_token.iter();
        let mut all: Vec<_> = all
            .map(|(key, remembered)| (remembered.worth(), remembered.since, *key))
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

    fn said(verdict: Verdict) -> Review {
        watch::channel(Some(verdict)).1
    }

    fn under_way() -> Review {
        watch::channel(None).1
    }

    #[rstest]
    #[case::good(Verdict::Allowed, TTL, 29, true)]
    #[case::good_and_old(Verdict::Allowed, TTL, 30, false)]
    #[case::bad(Verdict::Unauthenticated, TTL, 29, true)]
    #[case::without_the_right(Verdict::Forbidden, TTL, 29, true)]
    #[case::without_the_right_and_old(Verdict::Forbidden, TTL, 30, false)]
    #[case::not_found_out(Verdict::Unknown, TTL, 9, true)]
    #[case::not_found_out_and_old(Verdict::Unknown, TTL, 10, false)]
    #[case::never_at_once(Verdict::Unknown, Duration::ZERO, 0, true)]
    #[case::not_asked(Verdict::Crowded, TTL, 0, false)]
    fn a_verdict_stands_for_its_time(
        #[case] verdict: Verdict,
        #[case] ttl: Duration,
        #[case] age: u64,
        #[case] stands: bool,
    ) {
        let (mut verdicts, now) = (Verdicts::new(ttl, 1), Instant::now());
        verdicts.insert([1; 32], said(verdict), now);
        let found = verdicts.find(&[1; 32], now + Duration::from_secs(age));
        assert_eq!(
            matches!(found, Some(Known::Stands(same)) if same == verdict),
            stands
        );
        assert_eq!(found.is_some(), stands);
    }

    #[test]
    fn a_review_that_is_under_way_is_shared_however_long_it_takes() {
        let (mut verdicts, now) = (Verdicts::new(TTL, 1), Instant::now());
        verdicts.insert([1; 32], under_way(), now);
        let found = verdicts.find(&[1; 32], now + 2 * TTL);
        assert!(matches!(found, Some(Known::UnderWay(_))), "{found:?}");
        assert!(verdicts.find(&[2; 32], now).is_none());
    }

    #[rstest]
    #[case::good(&[Verdict::Allowed], true)]
    #[case::bad(&[Verdict::Unauthenticated], false)]
    #[case::not_found_out(&[Verdict::Unknown], false)]
    #[case::good_and_not_found_out(&[Verdict::Allowed, Verdict::Unknown], true)]
    #[case::good_and_not_asked(&[Verdict::Allowed, Verdict::Crowded, Verdict::Crowded], true)]
    #[case::good_no_more(&[Verdict::Allowed, Verdict::Unauthenticated], false)]
    #[case::may_no_more(&[Verdict::Allowed, Verdict::Forbidden], false)]
    fn a_good_token_is_known_until_the_apiserver_says_otherwise(
        #[case] said_of_it: &[Verdict],
        #[case] good: bool,
    ) {
        let (mut verdicts, now) = (Verdicts::new(TTL, 1), Instant::now());
        for verdict in said_of_it {
            verdicts.insert([1; 32], said(*verdict), now);
        }
        assert_eq!(verdicts.was_good(&[1; 32]), good);
        verdicts.insert([1; 32], under_way(), now);
        assert_eq!(verdicts.was_good(&[1; 32]), good);
    }

    #[test]
    fn invented_tokens_go_first_then_what_is_under_way_then_the_oldest_good_one() {
        let (mut verdicts, now) = (Verdicts::new(TTL, 4), Instant::now());
        let at = |second| now + Duration::from_secs(second);
        verdicts.insert([0; 32], said(Verdict::Allowed), at(0));
        verdicts.insert([1; 32], under_way(), at(1));
        verdicts.insert([2; 32], said(Verdict::Allowed), at(2));
        verdicts.insert([3; 32], said(Verdict::Unauthenticated), at(3));
        for (new, gone) in [(4, 3), (5, 1), (6, 0)] {
            verdicts.insert([new; 32], said(Verdict::Allowed), at(4));
            assert!(verdicts.find(&[gone; 32], at(4)).is_none(), "{gone}");
            assert_eq!(verdicts.by_token.len(), 4);
        }
    }

    #[test]
    fn what_stands_no_longer_makes_room_but_for_what_was_good() {
        let (mut verdicts, now) = (Verdicts::new(TTL, 3), Instant::now());
        verdicts.insert([0; 32], said(Verdict::Allowed), now);
        verdicts.insert([1; 32], said(Verdict::Unauthenticated), now);
        verdicts.insert([2; 32], said(Verdict::Unauthenticated), now + TTL);
        verdicts.insert([3; 32], under_way(), now + TTL);
        assert!(verdicts.was_good(&[0; 32]));
        assert!(verdicts.find(&[0; 32], now + TTL).is_none(), "asked again");
        let mut left: Vec<u8> = verdicts.by_token.keys().map(|key| key[0]).collect();
        left.sort_unstable();
        assert_eq!(left, [0, 2, 3]);
    }

    proptest! {
        #[test]
        fn no_good_token_is_forgotten_while_another_is_there(
            size in 1_usize..40, tokens in prop::collection::vec((any::<u8>(), any::<bool>()), 0..200),
        ) {
            let (mut verdicts, now) = (Verdicts::new(TTL, size), Instant::now());
            for (token, good) in tokens {
                let key = [token; 32];
                let before: Vec<Key> = verdicts.by_token.keys().copied().collect();
                let good_before: Vec<Key> =
                    before.into_iter().filter(|key| verdicts.was_good(key)).collect();
                let verdict = if good { Verdict::Allowed } else { Verdict::Unauthenticated };
                verdicts.insert(key, said(verdict), now);
                prop_assert!(verdicts.by_token.len() <= size);
                let lost = good_before.iter().any(|key| !verdicts.by_token.contains_key(key));
                let others = verdicts.by_token.keys().filter(|other| **other != key);
                let bad = others.filter(|other| !verdicts.was_good(other)).count();
                prop_assert!(!lost || bad == 0, "{} others are left", bad);
            }
        }
    }
}
