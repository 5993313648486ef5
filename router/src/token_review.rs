//! Asks the apiserver whose a token is, and remembers the answer for a while. Many requests with one token make one review.

use std::{
    collections::HashMap,
    fmt,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use aws_lc_rs::digest;
use k8s_openapi::api::authentication::v1::{TokenReview, TokenReviewSpec};
use kube::{Api, Client, api::PostParams};
use tokio::sync::OnceCell;

/// How long one review may take; upstream's.
const TIMEOUT: Duration = Duration::from_secs(3);

/// What the apiserver says of a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    Authenticated,
    Unauthenticated,
    /// It could not be asked.
    Unknown,
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
}

/// Reviews tokens.
pub struct Reviewer {
    client: Client,
    options: ReviewOptions,
    /// By SHA-256 of the token: who reads this memory shall not find tokens.
    remembered: Mutex<HashMap<[u8; 32], Arc<Remembered>>>,
}

struct Remembered {
    since: Instant,
    verdict: OnceCell<Verdict>,
}

impl Remembered {
    /// What could not be found out is asked again sooner; upstream's rule.
    fn stands(&self, ttl: Duration) -> bool {
        let ttl = match self.verdict.get() {
            Some(Verdict::Unknown) => (ttl / 3).max(Duration::from_secs(1)),
            _ => ttl,
        };
        self.since.elapsed() < ttl
    }

    fn is_good(&self) -> bool {
        self.verdict.get() == Some(&Verdict::Authenticated)
    }
}

impl fmt::Debug for Reviewer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Reviewer({:?})", self.options)
    }
}

impl Reviewer {
    /// Asks through `client`.
    pub fn new(client: Client, options: ReviewOptions) -> Self {
        Self {
            client,
            options,
            remembered: Mutex::default(),
        }
    }

    /// Whether a request needs a token.
    pub fn requires_token(&self) -> bool {
        self.options.require_token
    }

    /// What the apiserver says of the token, or said lately.
    pub async fn review(&self, token: &str) -> Verdict {
        let remembered = self.remembered(token);
        // When the request that asks goes away, the next one that waits asks anew.
        *remembered.verdict.get_or_init(|| self.ask(token)).await
    }

    fn remembered(&self, token: &str) -> Arc<Remembered> {
        let mut key = [0; 32];
        key.copy_from_slice(digest::digest(&digest::SHA256, token.as_bytes()).as_ref());
        let ttl = self.options.ttl;
        let mut all = self
            .remembered
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if let Some(found) = all.get(&key).filter(|found| found.stands(ttl)) {
            return Arc::clone(found);
        }
        if all.len() >= self.options.size {
            all.retain(|_, other| other.stands(ttl));
        }
        if all.len() >= self.options.size {
            // Whoever invents tokens does not have those forgotten that are good.
            let oldest = all
                .iter()
                .min_by_key(|(_, other)| (other.is_good(), other.since))
                .map(|(key, _)| *key);
            oldest.map(|key| all.remove(&key));
        }
        let new = Arc::new(Remembered {
            since: Instant::now(),
            verdict: OnceCell::new(),
        });
        all.insert(key, Arc::clone(&new));
        new
    }

    async fn ask(&self, token: &str) -> Verdict {
        let review = TokenReview {
            spec: TokenReviewSpec {
                token: token.to_owned(),
                audiences: Some(self.options.audiences.clone()).filter(|all| !all.is_empty()),
            },
            ..TokenReview::default()
        };
        let api: Api<TokenReview> = Api::all(self.client.clone());
        let params = PostParams::default();
        match tokio::time::timeout(TIMEOUT, api.create(&params, &review)).await {
            Ok(Ok(answer)) => match answer.status.and_then(|status| status.authenticated) {
                Some(true) => Verdict::Authenticated,
                _ => Verdict::Unauthenticated,
            },
            Ok(Err(error)) => {
                tracing::warn!(%error, "token not reviewed");
                Verdict::Unknown
            }
            Err(_) => {
                tracing::warn!("token not reviewed: no answer in {TIMEOUT:?}");
                Verdict::Unknown
            }
        }
    }
}
