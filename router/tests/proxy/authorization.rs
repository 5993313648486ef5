//! Authorization of clients by the apiserver.

use std::{sync::Arc, time::Duration};

use serde_json::{Value, json};
use torpor_router::{
    authz::Authorizer,
    token_review::{ReviewOptions, Reviewer},
};
use torpor_test_apiserver::{Fault, FaultAnswer};

use crate::{
    backend::Backend,
    client::{nothing, request, send},
    world::{Setup, World, until},
};

async fn reviewing(require_token: bool) -> World {
    reviewing_at_once(require_token, 64).await
}

async fn reviewing_at_once(require_token: bool, at_once: usize) -> World {
    world_of(Authorizer::TokenReview, require_token, at_once).await
}

/// Starts a router that reviews rights; the user `good` may connect to Sandbox `s`.
async fn reviewing_rights(at_once: usize) -> World {
    let world = world_of(Authorizer::SubjectAccessReview, false, at_once).await;
    world.api.grant("good", right("s"));
    world
}

/// Returns the right to connect to a Sandbox of namespace `ns`.
fn right(name: &str) -> Value {
    json!({
        "verb": "connect", "group": "agents.x-k8s.io", "resource": "sandboxes", "subresource": "proxy",
        "namespace": "ns", "name": name,
    })
}

async fn world_of(mode: fn(Reviewer) -> Authorizer, require_token: bool, at_once: usize) -> World {
    let setup = Setup {
        authorizer: Box::new(move |api| {
            let options = ReviewOptions {
                ttl: Duration::from_secs(600),
                size: 2,
                require_token,
                audiences: vec![],
                at_once,
                waiting: 0,
            };
            mode(Reviewer::new(api.client(), options))
        }),
        ..Setup::default()
    };
    let world = World::with(setup).await;
    world.api.accept_token("good");
    world.running("s", "127.0.0.1").await;
    world.api.take_writes();
    world
}

async fn ask(world: &World, port: u16, token: Option<&str>) -> String {
    let mut request = request("s", port);
    if let Some(token) = token {
        request = request.header("authorization", format!("Bearer {token}"));
    }
    send(world, request.body(nothing()).unwrap()).await.line()
}

fn reviews(world: &World) -> usize {
    asked(world, "tokenreviews")
}

/// Returns the number of reviews of a kind since the last call.
fn asked(world: &World, kind: &str) -> usize {
    let writes = world.api.take_writes();
    writes.iter().filter(|write| write.kind == kind).count()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_token_is_reviewed_once_for_many_requests() {
    let world = Arc::new(reviewing(true).await);
    let backend = Backend::named("s").await;
    let port = backend.port;
    let requests: Vec<_> = (0..50)
        .map(|_| {
            let world = Arc::clone(&world);
            tokio::spawn(async move { ask(&world, port, Some("good")).await })
        })
        .collect();
    for request in requests {
        assert_eq!(request.await.unwrap(), "200 s");
    }
    assert_eq!(reviews(&world), 1);
    let decisions =
        r#"sandbox_router_authz_decisions_total{sandbox_namespace="ns",decision="allow"}"#;
    assert_eq!(world.metric(decisions), 50);
}

#[tokio::test]
async fn clients_without_a_valid_token_reach_no_sandbox() {
    let world = reviewing(true).await;
    let backend = Backend::named("s").await;
    assert_eq!(
        ask(&world, backend.port, None).await,
        r#"401 {"detail":"unauthenticated"}"#
    );
    assert_eq!(
        ask(&world, backend.port, Some("bad")).await,
        r#"401 {"detail":"unauthenticated"}"#
    );
    assert_eq!(backend.connections(), 0);
    let decisions =
        r#"sandbox_router_authz_decisions_total{sandbox_namespace="ns",decision="deny"}"#;
    assert_eq!(world.metric(decisions), 2);
}

#[tokio::test]
async fn a_token_may_be_left_out_where_none_is_required_but_not_be_wrong() {
    let world = reviewing(false).await;
    let backend = Backend::named("s").await;
    assert_eq!(ask(&world, backend.port, None).await, "200 s");
    assert_eq!(
        ask(&world, backend.port, Some("bad")).await,
        r#"401 {"detail":"unauthenticated"}"#
    );
}

#[tokio::test]
async fn without_a_response_of_the_apiserver_no_client_is_authorized() {
    let world = reviewing(false).await;
    let backend = Backend::named("s").await;
    let refuse = Fault {
        verb: "create",
        kind: "tokenreviews",
        answer: FaultAnswer::Refuse(403),
    };
    world.api.fail(refuse);
    let answer = ask(&world, backend.port, Some("good")).await;
    assert_eq!(
        answer,
        r#"500 {"detail":"tokenreview: the apiserver could not be asked"}"#
    );
    assert_eq!(backend.connections(), 0);
}

#[tokio::test]
async fn the_number_of_cached_decisions_is_bounded() {
    let world = reviewing(true).await;
    let backend = Backend::named("s").await;
    world.api.accept_token("better");
    for token in ["good", "better", "b", "good"] {
        ask(&world, backend.port, Some(token)).await;
    }
    assert_eq!(reviews(&world), 4, "the oldest was evicted");
}

#[tokio::test]
async fn invented_tokens_do_not_evict_a_valid_one() {
    let world = reviewing(true).await;
    let backend = Backend::named("s").await;
    for token in ["good", "a", "b", "c", "good"] {
        ask(&world, backend.port, Some(token)).await;
    }
    assert_eq!(reviews(&world), 4);
}

#[tokio::test]
async fn invented_tokens_neither_flood_the_apiserver_nor_keep_valid_ones_out() {
    let world = Arc::new(reviewing_at_once(true, 1).await);
    let backend = Backend::named("s").await;
    let port = backend.port;
    assert_eq!(ask(&world, port, Some("good")).await, "200 s");
    assert_eq!(reviews(&world), 1);
    let lose = Fault {
        verb: "create",
        kind: "tokenreviews",
        answer: FaultAnswer::LoseAnswer,
    };
    world.api.fail(lose);
    let other = Arc::clone(&world);
    let first = tokio::spawn(async move { ask(&other, port, Some("a")).await });
    until("the review has begun", || reviews(&world) == 1).await;
    assert_eq!(
        ask(&world, port, Some("b")).await,
        r#"503 {"detail":"Too many tokens wait to be checked."}"#
    );
    assert_eq!(ask(&world, port, Some("good")).await, "200 s");
    assert_eq!(reviews(&world), 0, "no further review");
    let refusals =
        r#"torpor_router_refusals_total{sandbox_namespace="ns",reason="TooManyReviews"}"#;
    assert_eq!(world.metric(refusals), 1);
    first.abort();
}

#[tokio::test]
async fn only_a_user_with_the_right_reaches_the_sandbox() {
    let world = reviewing_rights(64).await;
    world.api.accept_token("other");
    let backend = Backend::named("s").await;
    let port = backend.port;
    let refused = r#"401 {"detail":"unauthenticated"}"#;
    assert_eq!(ask(&world, port, None).await, refused);
    assert_eq!(ask(&world, port, Some("bad")).await, refused);
    let forbidden = r#"403 {"detail":"forbidden"}"#;
    assert_eq!(ask(&world, port, Some("other")).await, forbidden);
    assert_eq!(backend.connections(), 0);
    assert_eq!(ask(&world, port, Some("good")).await, "200 s");
}

#[tokio::test]
async fn a_right_to_one_sandbox_opens_no_other_and_each_is_reviewed_once() {
    let world = reviewing_rights(64).await;
    world.running("t", "127.0.0.1").await;
    let backend = Backend::named("s").await;
    let port = backend.port;
    world.api.take_writes();
    let to = async |sandbox: &str| {
        let request = request(sandbox, port).header("authorization", "Bearer good");
        send(&world, request.body(nothing()).unwrap()).await.line()
    };
    for _ in 0..3 {
        assert_eq!(to("s").await, "200 s");
        assert_eq!(to("t").await, r#"403 {"detail":"forbidden"}"#);
    }
    assert_eq!(asked(&world, "subjectaccessreviews"), 2);
}

#[tokio::test]
async fn without_a_review_of_the_right_no_client_is_authorized() {
    for kind in ["tokenreviews", "subjectaccessreviews"] {
        let world = reviewing_rights(64).await;
        let backend = Backend::named("s").await;
        let answer = FaultAnswer::Refuse(403);
        let verb = "create";
        world.api.fail(Fault { verb, kind, answer });
        let answer_line = ask(&world, backend.port, Some("good")).await;
        assert!(answer_line.starts_with("500 "), "{kind}: {answer_line}");
        assert_eq!(backend.connections(), 0);
    }
}

#[tokio::test]
async fn invented_tokens_do_not_keep_a_user_with_a_known_right_out() {
    let world = Arc::new(reviewing_rights(1).await);
    let backend = Backend::named("s").await;
    let port = backend.port;
    assert_eq!(ask(&world, port, Some("good")).await, "200 s");
    world.api.take_writes();
    world.api.fail(Fault {
        verb: "create",
        kind: "tokenreviews",
        answer: FaultAnswer::LoseAnswer,
    });
    let other = Arc::clone(&world);
    let first = tokio::spawn(async move { ask(&other, port, Some("a")).await });
    until("the review has begun", || reviews(&world) == 1).await;
    assert_eq!(
        ask(&world, port, Some("b")).await,
        r#"503 {"detail":"Too many tokens wait to be checked."}"#
    );
    assert_eq!(ask(&world, port, Some("good")).await, "200 s");
    first.abort();
}
