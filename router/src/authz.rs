//! Authorizes clients in upstream's modes and Torpor's own. The modes that need no apiserver are
//! pure.

use std::{fmt, sync::Arc};

use aws_lc_rs::{constant_time, digest};
use http::{HeaderMap, Method, header};

use crate::{
    authz_cache::Decision,
    refusal::Refusal,
    scoped_token::{Tokens, VerifiedClaims},
    target::{POD_IP, Target},
    token_review::{Reviewer, Sandbox},
};

/// Authorization of requests.
#[derive(Debug)]
pub enum Authorizer {
    /// Every client may reach every sandbox. Upstream's default: a layer in front of the router
    /// decides.
    AllowAll,
    /// All clients share one token, as with the Python router (`ROUTER_AUTH_TOKEN`).
    SharedToken(SharedToken),
    /// Each token opens the sandbox that it names.
    ScopedToken(Tokens),
    /// A client with a token of the cluster may reach every sandbox.
    TokenReview(Reviewer),
    /// Torpor's: the user of the token may reach the sandboxes for which the cluster's authorizer
    /// grants the right to connect.
    SubjectAccessReview(Reviewer),
}

/// Target of a request, with the parts of the request that authorization reads.
#[derive(Clone, Copy)]
pub struct AuthzRequest<'a> {
    pub target: &'a Target,
    pub method: &'a Method,
    pub headers: &'a HeaderMap,
    /// Path that the sandbox receives, without the query.
    pub path: &'a str,
    /// Returns the UID of the target's Sandbox in the watch cache.
    pub uid: &'a (dyn Fn() -> Option<Arc<str>> + Sync),
}

impl fmt::Debug for AuthzRequest<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The headers hold the token.
        f.debug_struct("AuthzRequest")
            .field("target", self.target)
            .field("method", self.method)
            .field("path", &self.path)
            .finish_non_exhaustive()
    }
}

/// UID of the only Sandbox that a request may reach, if its token is bound to one.
pub type BoundUid = Option<Arc<str>>;

impl Authorizer {
    /// Authorizes a request by the token that the client sent, if any.
    ///
    /// `now` is in seconds since 1970.
    pub async fn authorize(
        &self,
        token: Option<&str>,
        request: AuthzRequest<'_>,
        now: i64,
    ) -> Result<BoundUid, Refusal> {
        match self {
            Self::AllowAll => {}
            Self::SharedToken(expected) => expected.check(token)?,
            Self::ScopedToken(tokens) => return check_scoped(tokens, token, request, now),
            Self::TokenReview(reviewer) => {
                if token.is_some() || reviewer.requires_token() {
                    review(reviewer, token, None).await?;
                }
            }
            Self::SubjectAccessReview(reviewer) => {
                review(reviewer, token, Some(request.target)).await?;
            }
        }
        Ok(None)
    }
}

/// Token that all clients share. Memory holds only its digest.
#[derive(Debug)]
pub struct SharedToken(digest::Digest);

impl SharedToken {
    /// Returns an authorizer that expects `token`.
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
    tokens: &Tokens,
    token: Option<&str>,
    request: AuthzRequest<'_>,
    now: i64,
) -> Result<BoundUid, Refusal> {
    let token = token.ok_or(Refusal::Unauthenticated)?;
    let opened = tokens.verify(token, now).ok_or(Refusal::Unauthenticated)?;
    let (namespace, name) = match &opened {
        VerifiedClaims::V1(claims) => (&claims.namespace, &claims.name),
        VerifiedClaims::V2(claims) => (&claims.namespace, &claims.name),
    };
    let target = request.target;
    // Upstream dials that address and therefore refuses it here. This router never dials it, and
    // refuses it so that clients get the same response.
    let address = request.headers.get(&POD_IP);
    let names_an_address = address.is_some_and(|value| !value.is_empty());
    if names_an_address || *namespace != target.namespace || *name != target.id {
        return Err(Refusal::Forbidden);
    }
    let VerifiedClaims::V2(claims) = opened else {
        return Ok(None);
    };
    // The UID tells the token's Sandbox from a later one of the same name. A Sandbox that the
    // directory does not hold matches no token.
    let uid = (request.uid)().filter(|uid| **uid == *claims.uid);
    let covered = claims.covers(target.port, request.method, request.path);
    let uid = uid.filter(|_| covered).ok_or(Refusal::Forbidden)?;
    Ok(Some(uid))
}

/// Reviews the token and, if `sandbox` is set, the right of the token's user to connect to it.
async fn review(
    reviewer: &Reviewer,
    token: Option<&str>,
    sandbox: Option<&Target>,
) -> Result<(), Refusal> {
    let token = token.ok_or(Refusal::Unauthenticated)?;
    // A target that cannot exist has no namespace; a review without a namespace would ask about the
    // right in all namespaces.
    if sandbox.is_some_and(|target| target.namespace.is_empty() || target.id.is_empty()) {
        return Err(Refusal::Forbidden);
    }
    let sandbox = sandbox.map(|target| Sandbox {
        namespace: &target.namespace,
        name: &target.id,
    });
    match reviewer.review(token, sandbox).await {
        Decision::Allowed => Ok(()),
        Decision::Unauthenticated => Err(Refusal::Unauthenticated),
        Decision::Forbidden => Err(Refusal::Forbidden),
        Decision::Unknown => Err(Refusal::ReviewFailed),
        Decision::QueueFull => Err(Refusal::TooManyReviews),
    }
}

/// Returns the token of the Authorization header. The case of the scheme does not matter.
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
    use crate::scoped_token::{
        Claims, Secret,
        keys::{CONTEXT, Keys},
    };

    fn headers(authorization: &str, address: Option<&'static str>) -> HeaderMap {
        let mut headers = HeaderMap::new();
        headers.insert(header::AUTHORIZATION, authorization.parse().unwrap());
        if let Some(address) = address {
            headers.insert(POD_IP, http::HeaderValue::from_static(address));
        }
        headers
    }

    async fn decide(
        authorizer: &Authorizer,
        headers: &HeaderMap,
        now: i64,
    ) -> Result<BoundUid, Refusal> {
        decide_with(authorizer, headers, Some("uid"), now).await
    }

    /// Authorizes a request while the watch cache holds a Sandbox with this `uid`.
    async fn decide_with(
        authorizer: &Authorizer,
        headers: &HeaderMap,
        uid: Option<&str>,
        now: i64,
    ) -> Result<BoundUid, Refusal> {
        let request = AuthzRequest {
            target: &target(),
            method: &Method::GET,
            headers,
            path: "/run",
            uid: &|| uid.map(Into::into),
        };
        authorizer.authorize(bearer(headers), request, now).await
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
    #[case("Bearer secret", Ok(None))]
    #[tokio::test]
    async fn the_shared_token_is_asked_for_as_the_python_router_does(
        #[case] value: &str,
        #[case] answer: Result<BoundUid, Refusal>,
    ) {
        let authorizer = Authorizer::SharedToken(SharedToken::new("secret"));
        assert_eq!(decide(&authorizer, &headers(value, None), 0).await, answer);
    }

    #[rstest]
    #[case::its_sandbox("team", "box", 999, None, Ok(None))]
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
        #[case] answer: Result<BoundUid, Refusal>,
    ) {
        let secret = Secret::new(&[7; 32]).unwrap();
        let claims = Claims {
            namespace: namespace.into(),
            name: name.into(),
            exp: 1000,
        };
        let token = secret.sign(&claims).unwrap();
        let authorizer = Authorizer::ScopedToken(secret.into());
        let headers = headers(&format!("Bearer {token}"), address);
        assert_eq!(decide(&authorizer, &headers, now).await, answer);
    }

    #[tokio::test]
    async fn a_request_without_a_valid_scoped_token_is_refused() {
        let authorizer = Authorizer::ScopedToken(Secret::new(&[7; 32]).unwrap().into());
        for value in [
            "",
            "Bearer x",
            "Bearer a.b",
            "Bearer v1.a.b",
            "Bearer v2.k.a.b",
        ] {
            let answer = decide(&authorizer, &headers(value, None), 0).await;
            assert_eq!(answer, Err(Refusal::Unauthenticated), "{value}");
        }
        assert_eq!(
            decide(&Authorizer::AllowAll, &HeaderMap::new(), 0).await,
            Ok(None)
        );
    }

    #[rstest]
    #[case::its_sandbox(r#""uid":"uid","#, Some("uid"), None, Ok(Some("uid")))]
    #[case::its_request(
        r#""uid":"uid","port":80,"method":"GET","path":"/run","#,
        Some("uid"),
        None,
        Ok(Some("uid"))
    )]
    #[case::another_request(
        r#""uid":"uid","port":80,"method":"PUT","path":"/run","#,
        Some("uid"),
        None,
        Err(Refusal::Forbidden)
    )]
    #[case::a_later_sandbox_of_that_name(
        r#""uid":"uid","#,
        Some("other"),
        None,
        Err(Refusal::Forbidden)
    )]
    #[case::no_sandbox(r#""uid":"uid","#, None, None, Err(Refusal::Forbidden))]
    #[case::with_an_address(
        r#""uid":"uid","#,
        Some("uid"),
        Some("10.0.0.1"),
        Err(Refusal::Forbidden)
    )]
    #[tokio::test]
    async fn a_token_of_version_2_opens_one_sandbox_and_no_later_one(
        #[case] claims: &str,
        #[case] uid: Option<&str>,
        #[case] address: Option<&'static str>,
        #[case] answer: Result<Option<&str>, Refusal>,
    ) {
        use aws_lc_rs::signature::{Ed25519KeyPair, KeyPair as _};
        use base64::{Engine as _, engine::general_purpose::URL_SAFE_NO_PAD};

        let pair = Ed25519KeyPair::from_seed_unchecked(&[7; 32]).unwrap();
        let public = URL_SAFE_NO_PAD.encode(pair.public_key());
        let file = format!(r#"{{"keys":[{{"kid":"k","publicKey":"{public}"}}]}}"#);
        let authorizer = Authorizer::ScopedToken(Tokens {
            keys: Some(Keys::read(file.as_bytes()).unwrap()),
            ..Tokens::default()
        });
        let payload = format!(r#"{{"ns":"team","name":"box",{claims}"exp":1000}}"#);
        let signed = format!("k.{}", URL_SAFE_NO_PAD.encode(payload));
        let signature = pair.sign(format!("{CONTEXT}{signed}").as_bytes());
        let token = format!("v2.{signed}.{}", URL_SAFE_NO_PAD.encode(signature));
        let headers = headers(&format!("Bearer {token}"), address);
        let decided = decide_with(&authorizer, &headers, uid, 999).await;
        assert_eq!(decided, answer.map(|uid| uid.map(Into::into)));
    }
}
