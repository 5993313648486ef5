//! Whether a client may reach a sandbox: upstream's modes. Who needs no apiserver decides purely.

use aws_lc_rs::{constant_time, digest};
use http::{HeaderMap, header};

use crate::{
    refusal::Refusal,
    scoped_token::Secret,
    target::{POD_IP, Target},
    token_review::{Reviewer, Sandbox},
    verdicts::Verdict,
};

/// How requests are authorized.
#[derive(Debug)]
pub enum Authorizer {
    /// Everybody may reach every sandbox. Upstream's default: a layer in front of the router decides.
    AllowAll,
    /// One token for all, as the Python router has it (`ROUTER_AUTH_TOKEN`).
    SharedToken(SharedToken),
    /// A token opens the sandbox that it names.
    ScopedToken(Secret),
    /// Who has a token of the cluster may reach every sandbox.
    TokenReview(Reviewer),
    /// Torpor's: the token's user may reach the sandboxes that the cluster's authorizer lets it
    /// connect to.
    SubjectAccessReview(Reviewer),
}

impl Authorizer {
    /// Decides by the token that the client shows, if it does. `now` is in seconds since 1970.
    pub async fn authorize(
        &self,
        token: Option<&str>,
        headers: &HeaderMap,
        target: &Target,
        now: i64,
    ) -> Result<(), Refusal> {
        match self {
            Self::AllowAll => Ok(()),
            Self::SharedToken(expected) => expected.check(token),
            Self::ScopedToken(secret) => check_scoped(secret, token, headers, target, now),
            Self::TokenReview(reviewer) => match token {
                None if !reviewer.requires_token() => Ok(()),
                token => review(reviewer, token, None).await,
            },
            Self::SubjectAccessReview(reviewer) => review(reviewer, token, Some(target)).await,
        }
    }
}

/// The token that all clients share. Only its digest is kept.
#[derive(Debug)]
pub struct SharedToken(digest::Digest);

impl SharedToken {
    /// Expects `token`.
    pub fn new(token: &str) -> Self {
        Self(digest::digest(&digest::SHA256, token.as_bytes()))
    }

    fn check(&self, token: Option<&str>) -> Result<(), Refusal> {
        let token = token.ok_or(Refusal::NoBearer)?;
        let given = digest::digest(&digest::SHA256, token.as_bytes());
        constant_time::verify_slices_are_equal(given.as_ref(), self.0.as_ref())
            .map_err(|_| Refusal::WrongToken)
    }
}

fn check_scoped(
    secret: &Secret,
    token: Option<&str>,
    headers: &HeaderMap,
    target: &Target,
    now: i64,
) -> Result<(), Refusal> {
    let token = token.ok_or(Refusal::Unauthenticated)?;
    let claims = secret.verify(token, now).ok_or(Refusal::Unauthenticated)?;
    // Upstream would dial that address, and so refuses it here. It is never dialled by us, but a client finds the same answer.
    let names_an_address = headers.get(&POD_IP).is_some_and(|value| !value.is_empty());
    if names_an_address || claims.namespace != target.namespace || claims.name != target.id {
        return Err(Refusal::Forbidden);
    }
    Ok(())
}

/// Asks whose the token is, and whether that user may connect to the sandbox, if one is meant.
async fn review(
    reviewer: &Reviewer,
    token: Option<&str>,
    sandbox: Option<&Target>,
) -> Result<(), Refusal> {
    let token = token.ok_or(Refusal::Unauthenticated)?;
    // A target that cannot exist has no namespace, and a review without one would ask for the right
    // in all of them.
    if sandbox.is_some_and(|target| target.namespace.is_empty() || target.id.is_empty()) {
        return Err(Refusal::Forbidden);
    }
    let sandbox = sandbox.map(|target| Sandbox {
        namespace: &target.namespace,
        name: &target.id,
    });
    match reviewer.review(token, sandbox).await {
        Verdict::Allowed => Ok(()),
        Verdict::Unauthenticated => Err(Refusal::Unauthenticated),
        Verdict::Forbidden => Err(Refusal::Forbidden),
        Verdict::Unknown => Err(Refusal::ReviewFailed),
        Verdict::Crowded => Err(Refusal::TooManyReviews),
    }
}

/// The token of the Authorization header. The scheme's case does not matter, the token's does.
pub(crate) fn bearer(headers: &HeaderMap) -> Option<&str> {
    let value = headers.get(header::AUTHORIZATION)?.to_str().ok()?;
    let (scheme, token) = value.split_at_checked("Bearer ".len())?;
    let token = token.trim();
    (scheme.eq_ignore_ascii_case("Bearer ") && !token.is_empty()).then_some(token)
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;
    use crate::scoped_token::Claims;

    fn headers(authorization: &str, address: Option<&'static str>) -> HeaderMap {
        let mut headers = HeaderMap::new();
        headers.insert(header::AUTHORIZATION, authorization.parse().unwrap());
        if let Some(address) = address {
            headers.insert(POD_IP, http::HeaderValue::from_static(address));
        }
        headers
    }

    async fn decide(authorizer: &Authorizer, headers: &HeaderMap, now: i64) -> Result<(), Refusal> {
        let token = bearer(headers);
        authorizer.authorize(token, headers, &target(), now).await
    }

    fn target() -> Target {
        Target {
            id: "box".into(),
            namespace: "team".into(),
            port: 80,
            uid: None,
        }
    }

    #[rstest]
    #[case("Bearer abc", Some("abc"))]
    #[case("bEARER  abc ", Some("abc"))]
    #[case("Bearer ", None)]
    #[case("Bearer", None)]
    #[case("Basic abc", None)]
    #[case("", None)]
    fn the_scheme_is_bearer_in_any_case(#[case] value: &str, #[case] token: Option<&str>) {
        assert_eq!(bearer(&headers(value, None)), token);
    }

    #[rstest]
    #[case("", Err(Refusal::NoBearer))]
    #[case("Bearer wrong", Err(Refusal::WrongToken))]
    #[case("Bearer secret", Ok(()))]
    #[tokio::test]
    async fn the_shared_token_is_asked_for_as_the_python_router_does(
        #[case] value: &str,
        #[case] answer: Result<(), Refusal>,
    ) {
        let authorizer = Authorizer::SharedToken(SharedToken::new("secret"));
        assert_eq!(decide(&authorizer, &headers(value, None), 0).await, answer);
    }

    #[rstest]
    #[case::its_sandbox("team", "box", 999, None, Ok(()))]
    #[case::another_name("team", "other", 999, None, Err(Refusal::Forbidden))]
    #[case::another_namespace("mate", "box", 999, None, Err(Refusal::Forbidden))]
    #[case::too_late("team", "box", 1000, None, Err(Refusal::Unauthenticated))]
    #[case::with_an_address("team", "box", 999, Some("10.0.0.1"), Err(Refusal::Forbidden))]
    #[tokio::test]
    async fn a_scoped_token_opens_one_sandbox(
        #[case] namespace: &str,
        #[case] name: &str,
        #[case] now: i64,
        #[case] address: Option<&'static str>,
        #[case] answer: Result<(), Refusal>,
    ) {
        let secret = Secret::new(&[7; 32]).unwrap();
        let claims = Claims {
            namespace: namespace.into(),
            name: name.into(),
            exp: 1000,
        };
        let token = secret.sign(&claims).unwrap();
        let authorizer = Authorizer::ScopedToken(secret);
        let headers = headers(&format!("Bearer {token}"), address);
        assert_eq!(decide(&authorizer, &headers, now).await, answer);
    }

    #[tokio::test]
    async fn without_a_good_token_a_scoped_sandbox_stays_shut() {
        let authorizer = Authorizer::ScopedToken(Secret::new(&[7; 32]).unwrap());
        for value in ["", "Bearer x", "Bearer a.b"] {
            let answer = decide(&authorizer, &headers(value, None), 0).await;
            assert_eq!(answer, Err(Refusal::Unauthenticated), "{value}");
        }
        assert_eq!(
            decide(&Authorizer::AllowAll, &HeaderMap::new(), 0).await,
            Ok(())
        );
    }
}
