//! Reviews tokens, and the right of their users to connect to a sandbox, at the apiserver; caches
//! the decisions for a time.
//!
//! Concurrent requests with one token (and for one sandbox) share one review. The number of reviews
//! in flight is limited: inventing tokens costs a client nothing, and each review takes a
//! connection to the apiserver.
//!
//! Decisions are cached for each sandbox, since the right to connect can be bound to one by its
//! name. A decision on a sandbox includes the validity of the token: a revoked token opens nothing
//! for longer than the decision stays cached.

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

use crate::authz_cache::{AuthzCache, Cached, Decision, Key, Review};

/// Longest time of one review; upstream's. Also the longest time that a token waits for its review.
const TIMEOUT: Duration = Duration::from_secs(3);

/// Verb of the right that a client needs, on the subresource `proxy` of the Sandbox.
///
/// `kubectl port-forward` and `kubectl proxy` need similar rights on subresources of a Pod.
const VERB: &str = "connect";
const GROUP: &str = "agents.x-k8s.io";
const RESOURCE: &str = "sandboxes";
const SUBRESOURCE: &str = "proxy";

/// Sandbox that a client wants to reach.
#[derive(Clone, Copy, Debug)]
pub struct Sandbox<'a> {
    pub namespace: &'a str,
    pub name: &'a str,
}

/// Settings of the reviews.
#[derive(Clone, Debug)]
pub struct ReviewOptions {
    /// Time for which a decision is cached.
    pub ttl: Duration,
    /// Most cached decisions.
    pub size: usize,
    /// Requests without a token are refused.
    pub require_token: bool,
    /// Audiences, of which the token must name at least one; empty: any.
    pub audiences: Vec<String>,
    /// Most reviews in flight.
    pub at_once: usize,
    /// Most tokens that wait for a review.
    pub waiting: usize,
}

/// Reviews tokens at the apiserver.
pub struct Reviewer {
    client: Client,
    options: ReviewOptions,
    cache: Mutex<AuthzCache>,
    /// Queue of tokens that their last review found valid. Invented tokens cannot delay them.
    valid_tokens: Queue,
    other_tokens: Queue,
}

impl fmt::Debug for Reviewer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Reviewer({:?})", self.options)
    }
}

impl Reviewer {
    /// Returns a reviewer that calls the apiserver through `client`.
    pub fn new(client: Client, options: ReviewOptions) -> Self {
        let queue = || Queue::new(options.at_once, options.waiting);
        Self {
            client,
            cache: Mutex::new(AuthzCache::new(options.ttl, options.size)),
            valid_tokens: queue(),
            other_tokens: queue(),
            options,
        }
    }

    /// Reports whether a request needs a token.
    pub fn requires_token(&self) -> bool {
        self.options.require_token
    }

    /// Returns the apiserver's decision on the token and, if `sandbox` is set, on the right of its
    /// user to connect to the sandbox. The decision may come from the cache.
    pub async fn review(&self, token: &str, sandbox: Option<Sandbox<'_>>) -> Decision {
        let mut review = match self.find_or_start(token, sandbox) {
            Cached::Decided(decision) => return decision,
            Cached::InReview(review) => review,
        };
        // Every review ends with a decision, unless the process ends.
        let decision = review.wait_for(Option::is_some).await;
        decision.map_or(Decision::Unknown, |decision| {
            decision.unwrap_or(Decision::Unknown)
        })
    }

    fn find_or_start(&self, token: &str, sandbox: Option<Sandbox<'_>>) -> Cached {
        let (key, now) = (key(token, sandbox), Instant::now());
        let mut cache = self.cache();
        if let Some(known) = cache.find(&key, now) {
            return known;
        }
        let queue = if cache.was_valid(&key) {
            &self.valid_tokens
        } else {
            &self.other_tokens
        };
        // This decision is not cached, so that it evicts no other.
        let Some(slot) = queue.enter() else {
            return Cached::Decided(Decision::QueueFull);
        };
        let review = self.start(token, sandbox, slot);
        cache.insert(key, review.clone(), now);
        Cached::InReview(review)
    }

    /// Starts a review.
    ///
    /// The review does not depend on the request: a client that disconnects does not cancel it for
    /// others, and does not free a slot for its next token.
    fn start(&self, token: &str, sandbox: Option<Sandbox<'_>>, slot: QueueSlot) -> Review {
        let (sender, review) = watch::channel(None);
        let client = self.client.clone();
        let spec = TokenReviewSpec {
            token: token.to_owned(),
            audiences: Some(self.options.audiences.clone()).filter(|all| !all.is_empty()),
        };
        let attributes = sandbox.map(attributes_of);
        tokio::spawn(async move {
            let decision = match slot.wait_to_start(TIMEOUT).await {
                Some(_review_slot) => decide(client, spec, attributes).await,
                None => Decision::QueueFull,
            };
            drop(slot);
            sender.send_replace(Some(decision));
        });
        review
    }

    // Each change is complete, so that a poisoned lock still guards valid data.
    fn cache(&self) -> MutexGuard<'_, AuthzCache> {
        self.cache.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn key(token: &str, sandbox: Option<Sandbox<'_>>) -> Key {
    let mut all = digest::Context::new(&digest::SHA256);
    all.update(token.as_bytes());
    for name in sandbox.iter().flat_map(|one| [one.namespace, one.name]) {
        // Tokens, namespaces and names come from headers, which cannot contain this byte.
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

async fn decide(
    client: Client,
    spec: TokenReviewSpec,
    attributes: Option<ResourceAttributes>,
) -> Decision {
    let audiences = spec.audiences.clone().unwrap_or_default();
    let review = TokenReview {
        spec,
        ..TokenReview::default()
    };
    let Some(answer) = create_review(&client, "token", &review).await else {
        return Decision::Unknown;
    };
    let status = answer.status.unwrap_or_default();
    if !is_valid(&status, &audiences) {
        return Decision::Unauthenticated;
    }
    let Some(attributes) = attributes else {
        return Decision::Allowed;
    };
    let review = SubjectAccessReview {
        spec: subject(status.user.unwrap_or_default(), attributes),
        ..SubjectAccessReview::default()
    };
    match create_review(&client, "right to connect", &review).await {
        None => Decision::Unknown,
        Some(answer) if answer.status.as_ref().is_some_and(is_allowed) => Decision::Allowed,
        Some(_) => Decision::Forbidden,
    }
}

/// Creates a review and returns it with its status; `None`: the apiserver did not respond or
/// refused.
async fn create_review<K>(client: &Client, what: &str, review: &K) -> Option<K>
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

/// Returns the spec of a review for the user of a token.
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

/// Reports whether the authorizer allowed the request; an authorizer without an opinion did not.
fn is_allowed(status: &SubjectAccessReviewStatus) -> bool {
    status.allowed && status.denied != Some(true)
}

/// Reports whether the token is valid and names one of `audiences`; empty: any.
///
/// An authenticator that does not support audiences returns none, and has validated the token for
/// the apiserver's own audience. The API leaves this check to its clients.
fn is_valid(status: &TokenReviewStatus, audiences: &[String]) -> bool {
    let named = status.audiences.as_deref().unwrap_or_default();
    let meant = audiences.is_empty() || audiences.iter().any(|one| named.contains(one));
    meant && status.authenticated == Some(true)
}

/// Queue of tokens in review and of tokens that wait for a review.
#[derive(Debug)]
struct Queue {
    /// Slots for all tokens of the queue.
    slots: Arc<Semaphore>,
    /// Slots for tokens in review.
    reviews: Arc<Semaphore>,
}

impl Queue {
    fn new(at_once: usize, waiting: usize) -> Self {
        let semaphore = |permits: usize| {
            let permits = permits.min(Semaphore::MAX_PERMITS);
            Arc::new(Semaphore::new(permits))
        };
        Self {
            slots: semaphore(at_once.saturating_add(waiting)),
            reviews: semaphore(at_once),
        }
    }

    /// Returns a slot at the end of the queue; `None`: the queue is full.
    fn enter(&self) -> Option<QueueSlot> {
        Some(QueueSlot {
            _slot: Arc::clone(&self.slots).try_acquire_owned().ok()?,
            reviews: Arc::clone(&self.reviews),
        })
    }
}

/// Slot in a queue, freed on drop.
#[derive(Debug)]
struct QueueSlot {
    _slot: OwnedSemaphorePermit,
    reviews: Arc<Semaphore>,
}

impl QueueSlot {
    /// Waits until the review may start, at most `limit` long.
    async fn wait_to_start(&self, limit: Duration) -> Option<SemaphorePermit<'_>> {
        timeout(limit, self.reviews.acquire()).await.ok()?.ok()
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;

    use futures::poll;
    use rstest::rstest;
    use torpor_test_apiserver::{Apiserver, Fault, FaultAnswer};

    use super::*;

    /// Makes the apiserver lose the response to the next TokenReview.
    fn lose_answer(api: &Apiserver) {
        api.fail(Fault {
            verb: "create",
            kind: "tokenreviews",
            answer: FaultAnswer::LoseAnswer,
        });
    }

    /// Waits for reviews at the apiserver and returns their number.
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
    async fn one_token_is_reviewed_one_waits_and_the_next_is_refused_at_once() {
        let api = Apiserver::new();
        lose_answer(&api);
        let reviewer = reviewer(&api, HOUR, 1);
        let mut first = pin!(reviewer.review("a", None));
        let mut second = pin!(reviewer.review("b", None));
        assert!(poll!(first.as_mut()).is_pending());
        assert!(poll!(second.as_mut()).is_pending());
        assert_eq!(reviewer.review("c", None).await, Decision::QueueFull);
        let mut as_first = pin!(reviewer.review("a", None));
        assert!(
            poll!(as_first.as_mut()).is_pending(),
            "it shares the review"
        );
        assert_eq!(asked(&api).await, 1);
    }

    #[tokio::test]
    async fn a_slot_is_freed_by_the_decision_and_not_by_a_client_that_disconnects() {
        let api = Apiserver::new();
        api.accept_token("good");
        let reviewer = reviewer(&api, HOUR, 0);
        assert_eq!(reviewer.review("a", None).await, Decision::Unauthenticated);
        assert_eq!(reviewer.review("good", None).await, Decision::Allowed);
        lose_answer(&api);
        {
            let mut gone = pin!(reviewer.review("b", None));
            assert!(poll!(gone.as_mut()).is_pending());
        }
        assert_eq!(reviewer.review("c", None).await, Decision::QueueFull);
        assert_eq!(reviewer.review("good", None).await, Decision::Allowed);
    }

    #[tokio::test]
    async fn a_token_that_was_good_does_not_wait_behind_invented_ones() {
        let api = Apiserver::new();
        api.accept_token("good");
        // No decision stays cached.
        let reviewer = reviewer(&api, Duration::ZERO, 0);
        assert_eq!(reviewer.review("good", None).await, Decision::Allowed);
        asked(&api).await;
        lose_answer(&api);
        let mut invented = pin!(reviewer.review("a", None));
        assert!(poll!(invented.as_mut()).is_pending());
        asked(&api).await;
        assert_eq!(reviewer.review("b", None).await, Decision::QueueFull);
        assert_eq!(reviewer.review("good", None).await, Decision::Allowed);
    }

    #[rstest]
    #[case::any(&[], &[], true)]
    #[case::any_and_some_are_named(&["a"], &[], true)]
    #[case::one_of_them(&["a", "b"], &["b", "c"], true)]
    #[case::another(&["a"], &["b"], false)]
    #[case::not_supported(&[], &["b"], false)]
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
            assert_eq!(is_valid(&status, &asked), known && good);
        }
    }

    #[tokio::test]
    async fn a_review_that_names_no_audience_authorizes_no_client() {
        let api = Apiserver::new();
        api.accept_token("good");
        let options = ReviewOptions {
            audiences: vec!["router".to_owned()],
            ..options(HOUR, 0)
        };
        let reviewer = Reviewer::new(api.client(), options);
        assert_eq!(
            reviewer.review("good", None).await,
            Decision::Unauthenticated
        );
    }

    #[test]
    fn a_decision_is_about_one_token_and_one_sandbox() {
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
    fn a_user_that_is_denied_or_not_allowed_lacks_the_right(
        #[case] allowed: bool,
        #[case] denied: Option<bool>,
        #[case] expected: bool,
    ) {
        let status = SubjectAccessReviewStatus {
            allowed,
            denied,
            ..SubjectAccessReviewStatus::default()
        };
        assert_eq!(is_allowed(&status), expected);
    }

    #[tokio::test]
    async fn the_wait_for_a_review_is_bounded() {
        let queue = Queue::new(1, 1);
        let (first, second) = (queue.enter().unwrap(), queue.enter().unwrap());
        assert!(queue.enter().is_none());
        let started = first.wait_to_start(HOUR).await;
        assert!(started.is_some());
        let short = Duration::from_millis(1);
        assert!(second.wait_to_start(short).await.is_none());
        drop(started);
        assert!(second.wait_to_start(short).await.is_some());
        drop(first);
        assert!(queue.enter().is_some());
    }
}
