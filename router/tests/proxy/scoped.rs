//! Scoped tokens of version 2, which open one Sandbox by its UID.

use aws_lc_rs::signature::{Ed25519KeyPair, KeyPair as _};
use base64::{Engine as _, engine::general_purpose::URL_SAFE_NO_PAD};
use serde_json::{Value, json};
use torpor_router::{
    authz::Authorizer,
    scoped_token::{
        Tokens,
        keys::{CONTEXT, Claims, Keys},
    },
};

use crate::{
    backend::Backend,
    client::{nothing, request, send},
    world::{NS, Setup, World, until},
};

fn pair() -> Ed25519KeyPair {
    Ed25519KeyPair::from_seed_unchecked(&[7; 32]).unwrap()
}

/// Returns the keys that verify the tokens of [`token`].
pub(crate) fn tokens() -> Tokens {
    let public = URL_SAFE_NO_PAD.encode(pair().public_key());
    let file = json!({"keys": [{"kid": "current", "publicKey": public}]}).to_string();
    Tokens {
        keys: Some(Keys::read(file.as_bytes()).unwrap()),
        ..Tokens::default()
    }
}

/// Returns a token for a whole sandbox.
pub(crate) fn token(sandbox: &str, uid: &str) -> String {
    token_for(Claims {
        namespace: NS.into(),
        name: sandbox.into(),
        uid: uid.into(),
        port: 0,
        method: String::new(),
        path: String::new(),
        exp: i64::MAX,
    })
}

pub(crate) fn token_for(claims: Claims) -> String {
    let payload = serde_json::to_vec(&claims).unwrap();
    let signed = format!("current.{}", URL_SAFE_NO_PAD.encode(payload));
    let signature = pair().sign(format!("{CONTEXT}{signed}").as_bytes());
    format!("v2.{signed}.{}", URL_SAFE_NO_PAD.encode(signature))
}

async fn world() -> World {
    World::with(Setup {
        authorizer: Box::new(|_| Authorizer::ScopedToken(tokens())),
        ..Setup::default()
    })
    .await
}

async fn ask(world: &World, port: u16, token: &str, (method, path): (&str, &str)) -> String {
    let request = request("s", port)
        .method(method)
        .uri(path)
        .header("authorization", format!("Bearer {token}"));
    send(world, request.body(nothing()).unwrap()).await.line()
}

const FORBIDDEN: &str = r#"403 {"detail":"forbidden"}"#;

#[tokio::test]
async fn a_token_for_a_request_opens_that_request_alone() {
    let (world, backend) = (world().await, Backend::named("s").await);
    let uid = world.running("s", "127.0.0.1").await;
    let port = backend.port;
    let token = token_for(Claims {
        port,
        method: "POST".into(),
        path: "/exec/a%2Fb".into(),
        ..serde_json::from_value(
            json!({"ns": NS, "name": "s", "uid": uid, "exp": 9_999_999_999_i64}),
        )
        .unwrap()
    });
    // The query is not signed.
    for path in ["/exec/a%2Fb", "/exec/a%2fb?x=1"] {
        assert_eq!(ask(&world, port, &token, ("POST", path)).await, "200 s");
    }
    for other in [("GET", "/exec/a%2Fb"), ("POST", "/exec/a/b"), ("POST", "/")] {
        assert_eq!(ask(&world, port, &token, other).await, FORBIDDEN);
    }
    assert_eq!(
        ask(&world, port - 1, &token, ("POST", "/exec/a%2Fb")).await,
        FORBIDDEN
    );
}

#[tokio::test]
async fn a_token_for_a_sandbox_opens_no_later_one_of_its_name() {
    let (world, backend) = (world().await, Backend::named("s").await);
    let uid = world.running("s", "127.0.0.1").await;
    let token = token("s", &uid);
    for (method, path) in [("GET", "/"), ("PUT", "/any/path")] {
        assert_eq!(
            ask(&world, backend.port, &token, (method, path)).await,
            "200 s"
        );
    }
    world.api.remove("pods", NS, "s");
    world.api.remove("sandboxes", NS, "s");
    until("it is gone", || world.directory.look_up(NS, "s").is_none()).await;
    assert_eq!(
        ask(&world, backend.port, &token, ("GET", "/")).await,
        FORBIDDEN
    );
    let later = world.running("s", "127.0.0.1").await;
    assert_ne!(later, uid);
    assert_eq!(
        ask(&world, backend.port, &token, ("GET", "/")).await,
        FORBIDDEN
    );
    let token = self::token("s", &later);
    assert_eq!(
        ask(&world, backend.port, &token, ("GET", "/")).await,
        "200 s"
    );
}

#[tokio::test]
async fn a_member_of_a_pool_is_opened_by_its_uid_and_not_by_its_name() {
    let (world, backend) = (world().await, Backend::named("s").await);
    let pooled: Value =
        json!({"metadata": {"labels": {"agents.x-k8s.io/warm-pool-sandbox": "pool"}}});
    let uid = world.sandbox("s", pooled).await;
    world.pod("s", &uid, "127.0.0.1").await;
    let there = || {
        let view = world.directory.look_up(NS, "s");
        view.is_some_and(|view| view.unclaimed && view.pod.is_some())
    };
    until("the Pod is known", there).await;
    let token = token("s", &uid);
    assert_eq!(
        ask(&world, backend.port, &token, ("GET", "/")).await,
        FORBIDDEN
    );
    let by_uid = request("s", backend.port)
        .header("x-sandbox-uid", &uid)
        .header("authorization", format!("Bearer {token}"));
    let answer = send(&world, by_uid.body(nothing()).unwrap()).await;
    assert_eq!(answer.line(), "200 s");
}
