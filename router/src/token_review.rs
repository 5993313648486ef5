//! Asks the apiserver whose a token is, and whether its user may connect to a sandbox, and
//! remembers the answer for a while. Many requests with one token (and to one sandbox) make one
//! review; and only so many reviews are under way at once, since inventing a token costs nothing,
//! and each review takes a connection to the apiserver.
//!
//! Verdicts are kept for each sandbox, since the right to connect can be bound to one by its name.
//! A verdict on a sandbox holds the whole way to it, token included: so a token that is revoked
//! opens nothing longer than a verdict stands.

use std::{
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use aws_lc_rs::digest;
use k8s_openapi::api::{
    authentication::v1::{TokenReview, TokenReviewSpec, TokenReviewStatus, UserInfo},
    authorization::v1::{
        ResourceAttributes, SubjectAccessReview, SubjectAccessReviewSpec, SubjectAccessReviewStatus,
    },
};
use kube::{Api, Client, api::PostParams, core::ClusterResourceScope};
use serde::{Serialize, de::DeserializeOwned};
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore, SemaphorePermit, watch},
    time::timeout,
};

use crate::verdicts::{Key, Known, Review, Verdict, Verdicts};

/// How long one question to the apiserver may take; upstream's. Also how long a token waits for its
/// turn.
const TIMEOUT: Duration = Duration::from_secs(3);

/// The right that a client needs: this verb on this subresource of the Sandbox, as `kubectl
/// port-forward` and `kubectl proxy` need theirs of a Pod.
const VERB: &str = "connect";
const GROUP: &str = "agents.x-k8s.io";
const RESOURCE: &str = "sandboxes";
const SUBRESOURCE: &str = "proxy";

/// The sandbox that a client wants to reach.
#[derive(Clone, Copy, Debug)]
pub struct Sandbox<'a> {
    pub namespace: &'a str,
    pub name: &'a str,
}

/// Settings of the reviews.
#[derive(Clone, Debug)]
pub struct ReviewOptions {
    /// How long a verdict stands.
    pub ttl: Duration,
    /// How many verdicts are remembered.
    pub size: usize,
    /// A request without a token is refused.
    pub require_token: bool,
    /// Audiences of which the token must name one; none: any.
    pub audiences: Vec<String>,
    /// How many tokens are asked about at once.
    pub at_once: usize,
    /// How many wait for that.
    pub waiting: usize,
}

/// Reviews tokens.
pub struct Reviewer {
    client: Client,
    options: ReviewOptions,
    verdicts: Mutex<Verdicts>,
    /// Tokens that were good when they were last asked about. Whoever invents tokens does not keep them waiting.
    acquainted: Line,
    strangers: Line,
}

impl fmt::Debug for Reviewer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Reviewer({:?})", self.options)
    }
}

impl Reviewer {
    /// Asks through `client`.
    pub fn new(client: Client, options: ReviewOptions) -> Self {
        let line = || Line::new(options.at_once, options.waiting);
        Self {
            client,
            verdicts: Mutex::new(Verdicts::new(options.ttl, options.size)),
            acquainted: line(),
            strangers: line(),
            options,
        }
    }

    /// Whether a request needs a token.
    pub fn requires_token(&self) -> bool {
        self.options.require_token
    }

    /// What the apiserver says of the token and of its user's right to connect to the sandbox, if
    /// one is named; or said lately.
    pub async fn review(&self, token: &str, sandbox: Option<Sandbox<'_>>) -> Verdict {
        let mut review = match self.find_or_ask(token, sandbox) {
            Known::Stands(verdict) => return verdict,
            Known::UnderWay(review) => review,
        };
        // Each review comes to a verdict, unless the process ends.
        let verdict = review.wait_for(Option::is_some).await;
        verdict.map_or(Verdict::Unknown, |verdict| {
            verdict.unwrap_or(Verdict::Unknown)
        })
    }

    fn find_or_ask(&self, token: &str, sandbox: Option<Sandbox<'_>>) -> Known {
        let (key, now) = (key(token, sandbox), Instant::now());
        let mut verdicts = self.verdicts();
        if let Some(known) = verdicts.find(&key, now) {
            return known;
        }
        let line = if verdicts.was_good(&key) {
            &self.acquainted
        } else {
            &self.strangers
        };
        // Not remembered: it makes no other token forgotten.
        let Some(place) = line.enter() else {
            return Known::Stands(Verdict::Crowded);
        };
        let review = self.ask(token, sandbox, place);
        verdicts.insert(key, review.clone(), now);
        Known::UnderWay(review)
    }

    /// Begins a review. It does not depend on the request that wants it: whoever goes away takes nothing from the others, and makes no room for the next token.
    fn ask(&self, token: &str, sandbox: Option<Sandbox<'_>>, place: Place) -> Review {
        let (sender, review) = watch::channel(None);
        let client = self.client.clone();
        let spec = TokenReviewSpec {
            token: token.to_owned(),
            audiences: Some(self.options.audiences.clone()).filter(|all| !all.is_empty()),
        };
        let attributes = sandbox.map(attributes_of);
        tokio::spawn(async move {
            let verdict = match place.turn(TIMEOUT).await {
                Some(_turn) => verdict_on(client, spec, attributes).await,
                None => Verdict::Crowded,
            };
            drop(place);
            sender.send_replace(Some(verdict));
        });
        review
    }

    // A poisoned lock only says that somebody panicked; each change is whole.
    fn verdicts(&self) -> MutexGuard<'_, Verdicts> {
        self.verdicts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn key(token: &str, sandbox: Option<Sandbox<'_>>) -> Key {
    let mut all = digest::Context::new(&digest::SHA256);
    all.update(token.as_bytes());
    for name in sandbox.iter().flat_map(|one| [one.namespace, one.name]) {
        // No token, no namespace and no name has this byte: clients send them in headers.
        all.update(&[0]);
        all.update(name.as_bytes());
    }
    let mut key = [0; 32];
    key.copy_from_slice(all.finish().as_ref());
    key
}

fn attributes_of(sandbox: Sandbox<'_>) -> ResourceAttributes {
    ResourceAttributes {
        verb: Some(VERB.to_owned()),
        group: Some(GROUP.to_owned()),
        resource: Some(RESOURCE.to_owned()),
        subresource: Some(SUBRESOURCE.to_owned()),
        namespace: Some(sandbox.namespace.to_owned()),
        name: Some(sandbox.name.to_owned()),
        ..ResourceAttributes::default()
    }
}

async fn verdict_on(
    client: Client,
    spec: TokenReviewSpec,
    attributes: Option<ResourceAttributes>,
) -> Verdict {
    let audiences = spec.audiences.clone().unwrap_or_default();
    let review = TokenReview {
        spec,
        ..TokenReview::default()
    };
    let Some(answer) = asked(&client, "token", &review).await else {
        return Verdict::Unknown;
    };
    let status = answer.status.unwrap_or_default();
    if !is_good(&status, &audiences) {
        return Verdict::Unauthenticated;
    }
    let Some(attributes) = attributes else {
        return Verdict::Allowed;
    };
    let review = SubjectAccessReview {
        spec: subject(status.user.unwrap_or_default(), attributes),
        ..SubjectAccessReview::default()
    };
    match asked(&client, "right to connect", &review).await {
        None => Verdict::Unknown,
        Some(answer) if answer.status.as_ref().is_some_and(may) => Verdict::Allowed,
        Some(_) => Verdict::Forbidden,
    }
}

/// The apiserver's answer to a review; none where it gave none.
async fn asked<K>(client: &Client, what: &str, review: &K) -> Option<K>
where
    K: kube::Resource<Scope = ClusterResourceScope>
        + Serialize
        + Clone
        + DeserializeOwned
        + fmt::Debug,
    K::DynamicType: Default,
{
    let api: Api<K> = Api::all(client.clone());
    let params = PostParams::default();
    match timeout(TIMEOUT, api.create(&params, review)).await {
        Ok(Ok(answer)) => Some(answer),
        Ok(Err(error)) => {
            tracing::warn!(%error, "{what} not reviewed");
            None
        }
        Err(_) => {
            tracing::warn!("{what} not reviewed: no answer in {TIMEOUT:?}");
            None
        }
    }
}

/// The user of a token, as the authorizer wants it.
fn subject(user: UserInfo, attributes: ResourceAttributes) -> SubjectAccessReviewSpec {
    SubjectAccessReviewSpec {
        user: user.username,
        uid: user.uid,
        groups: user.groups,
        extra: user.extra,
        resource_attributes: Some(attributes),
        ..SubjectAccessReviewSpec::default()
    }
}

/// An authorizer that could not decide has allowed nothing.
fn may(status: &SubjectAccessReviewStatus) -> bool {
    status.allowed && status.denied != Some(true)
}

/// Whether the token is somebody's and names one of `audiences`; none: any. Who is asked and knows nothing of audiences names none, and speaks of the apiserver's own: so the API
/// leaves it to its clients to look.
fn is_good(status: &TokenReviewStatus, audiences: &[String]) -> bool {
    let named = status.audiences.as_deref().unwrap_or_default();
    let meant = audiences.is_empty() || audiences.iter().any(|one| named.contains(one));
    meant && status.authenticated == Some(true)
}

/// Tokens that are asked about, and those that wait for it.
#[derive(Debug)]
struct Line {
    /// For all of them.
    places: Arc<Semaphore>,
    /// For those that are asked about.
    turns: Arc<Semaphore>,
}

impl Line {
    fn new(at_once: usize, waiting: usize) -> Self {
        let semaphore = |permits: usize| {
            let permits = permits.min(Semaphore::MAX_PERMITS);
            Arc::new(Semaphore::new(permits))
        };
        Self {
            places: semaphore(at_once.saturating_add(waiting)),
            turns: semaphore(at_once),
        }
    }

    /// A place at the end, unless it is full.
    fn enter(&self) -> Option<Place> {
        Some(Place {
            _place: Arc::clone(&self.places).try_acquire_owned().ok()?,
            turns: Arc::clone(&self.turns),
        })
    }
}

/// A place in a line, given back when it is dropped.
#[derive(Debug)]
struct Place {
    _place: OwnedSemaphorePermit,
    turns: Arc<Semaphore>,
}

impl Place {
    /// Waits for its turn, at most `limit` long.
    async fn turn(&self, limit: Duration) -> Option<SemaphorePermit<'_>> {
        timeout(limit, self.turns.acquire()).await.ok()?.ok()
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;

    use futures::poll;
    use rstest::rstest;
    use torpor_test_apiserver::{Apiserver, Fault, FaultAnswer};

    use super::*;

    /// The next review has no answer.
    fn lose_answer(api: &Apiserver) {
        api.fail(Fault {
            verb: "create",
            kind: "tokenreviews",
            answer: FaultAnswer::LoseAnswer,
        });
    }

    /// Waits until the apiserver has been asked, and says about how many tokens.
    async fn asked(api: &Apiserver) -> usize {
        loop {
            tokio::time::sleep(Duration::from_millis(1)).await;
            let asked = api.take_writes().len();
            if asked > 0 {
                return asked;
            }
        }
    }

    fn options(ttl: Duration, waiting: usize) -> ReviewOptions {
        ReviewOptions {
            ttl,
            size: 64,
            require_token: true,
            audiences: vec![],
            at_once: 1,
            waiting,
        }
    }

    fn reviewer(api: &Apiserver, ttl: Duration, waiting: usize) -> Reviewer {
        Reviewer::new(api.client(), options(ttl, waiting))
    }

    const HOUR: Duration = Duration::from_secs(3600);

    #[tokio::test]
    async fn one_token_is_asked_about_and_one_waits_and_the_next_is_told_so_at_once() {
        let api = Apiserver::new();
        lose_answer(&api);
        let reviewer = reviewer(&api, HOUR, 1);
        let mut first = pin!(reviewer.review("a", None));
        let mut second = pin!(reviewer.review("b", None));
        assert!(poll!(first.as_mut()).is_pending());
        assert!(poll!(second.as_mut()).is_pending());
        assert_eq!(reviewer.review("c", None).await, Verdict::Crowded);
        let mut as_first = pin!(reviewer.review("a", None));
        assert!(poll!(as_first.as_mut()).is_pending(), "it shares the place");
        assert_eq!(asked(&api).await, 1);
    }

    #[tokio::test]
    async fn a_place_is_given_back_with_the_verdict_and_kept_when_the_client_goes_away() {
        let api = Apiserver::new();
        api.accept_token("good");
        let reviewer = reviewer(&api, HOUR, 0);
        assert_eq!(reviewer.review("a", None).await, Verdict::Unauthenticated);
        assert_eq!(reviewer.review("good", None).await, Verdict::Allowed);
        lose_answer(&api);
        {
            let mut gone = pin!(reviewer.review("b", None));
            assert!(poll!(gone.as_mut()).is_pending());
        }
        assert_eq!(reviewer.review("c", None).await, Verdict::Crowded);
        assert_eq!(reviewer.review("good", None).await, Verdict::Allowed);
    }

    #[tokio::test]
    async fn a_token_that_was_good_does_not_wait_behind_invented_ones() {
        let api = Apiserver::new();
        api.accept_token("good");
        // No verdict stands.
        let reviewer = reviewer(&api, Duration::ZERO, 0);
        assert_eq!(reviewer.review("good", None).await, Verdict::Allowed);
        asked(&api).await;
        lose_answer(&api);
        let mut invented = pin!(reviewer.review("a", None));
        assert!(poll!(invented.as_mut()).is_pending());
        asked(&api).await;
        assert_eq!(reviewer.review("b", None).await, Verdict::Crowded);
        assert_eq!(reviewer.review("good", None).await, Verdict::Allowed);
    }

    #[rstest]
    #[case::any(&[], &[], true)]
    #[case::any_and_some_are_named(&["a"], &[], true)]
    #[case::one_of_them(&["a", "b"], &["b", "c"], true)]
    #[case::another(&["a"], &["b"], false)]
    #[case::not_looked_at(&[], &["b"], false)]
    fn a_token_is_good_for_the_audiences_that_are_named(
        #[case] named: &[&str],
        #[case] asked: &[&str],
        #[case] good: bool,
    ) {
        let texts = |all: &[&str]| all.iter().map(|text| (*text).to_owned()).collect();
        let (named, asked): (Vec<_>, Vec<_>) = (texts(named), texts(asked));
        for known in [true, false] {
            let status = TokenReviewStatus {
                authenticated: Some(known),
                audiences: Some(named.clone()),
                ..TokenReviewStatus::default()
            };
            assert_eq!(is_good(&status, &asked), known && good);
        }
    }

    #[tokio::test]
    async fn who_is_asked_about_audiences_and_says_nothing_of_them_lets_nobody_in() {
        let api = Apiserver::new();
        api.accept_token("good");
        let options = ReviewOptions {
            audiences: vec!["router".to_owned()],
            ..options(HOUR, 0)
        };
        let reviewer = Reviewer::new(api.client(), options);
        assert_eq!(
            reviewer.review("good", None).await,
            Verdict::Unauthenticated
        );
    }

    #[test]
    fn a_verdict_is_about_one_token_and_one_sandbox() {
        let sandbox = |namespace, name| Some(Sandbox { namespace, name });
        let keys = [
            key("t", None),
            key("u", None),
            key("t", sandbox("a", "b")),
            key("u", sandbox("a", "b")),
            key("t", sandbox("a", "bc")),
            key("t", sandbox("ab", "c")),
            key("tab", None),
        ];
        let different: std::collections::HashSet<Key> = keys.into_iter().collect();
        assert_eq!(different.len(), keys.len());
    }

    #[rstest]
    #[case(true, None, true)]
    #[case(true, Some(false), true)]
    #[case(true, Some(true), false)]
    #[case(false, None, false)]
    #[case(false, Some(true), false)]
    fn whoever_is_denied_or_not_allowed_may_not(
        #[case] allowed: bool,
        #[case] denied: Option<bool>,
        #[case] expected: bool,
    ) {
        let status = SubjectAccessReviewStatus {
            allowed,
            denied,
            ..SubjectAccessReviewStatus::default()
        };
        assert_eq!(may(&status), expected);
    }

    #[tokio::test]
    async fn nobody_waits_for_a_turn_without_end() {
        let line = Line::new(1, 1);
        let (first, second) = (line.enter().unwrap(), line.enter().unwrap());
        assert!(line.enter().is_none());
        let turn = first.turn(HOUR).await;
        assert!(turn.is_some());
        let short = Duration::from_millis(1);
        assert!(second.turn(short).await.is_none());
        drop(turn);
        assert!(second.turn(short).await.is_some());
        drop(first);
        assert!(line.enter().is_some());
    }
}
