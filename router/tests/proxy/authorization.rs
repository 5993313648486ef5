//! Who may reach a sandbox.

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

/// Where rights are asked about, and the user `good` may connect to Sandbox `s`.
async fn reviewing_rights(at_once: usize) -> World {
    let world = world_of(Authorizer::SubjectAccessReview, false, at_once).await;
    world.api.grant("good", right("s"));
    world
}

/// To connect to a Sandbox of namespace `ns`.
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

/// How many questions of a kind there were since the last call.
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
async fn who_is_not_known_gets_nowhere() {
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
async fn without_an_answer_of_the_apiserver_nobody_is_let_in() {
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
async fn only_so_many_verdicts_are_remembered() {
    let world = reviewing(true).await;
    let backend = Backend::named("s").await;
    world.api.accept_token("better");
    for token in ["good", "better", "b", "good"] {
        ask(&world, backend.port, Some(token)).await;
    }
    assert_eq!(reviews(&world), 4, "the oldest made room");
}

#[tokio::test]
async fn who_invents_tokens_does_not_have_a_good_one_forgotten() {
    let world = reviewing(true).await;
    let backend = Backend::named("s").await;
    for token in ["good", "a", "b", "c", "good"] {
        ask(&world, backend.port, Some(token)).await;
    }
    assert_eq!(reviews(&world), 4);
}

#[tokio::test]
async fn who_invents_tokens_does_not_flood_the_apiserver_nor_keep_good_ones_out() {
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
    let inventor = Arc::clone(&world);
    let first = tokio::spawn(async move { ask(&inventor, port, Some("a")).await });
    until("it is asked about", || reviews(&world) == 1).await;
    assert_eq!(
        ask(&world, port, Some("b")).await,
        r#"503 {"detail":"Too many tokens wait to be checked."}"#
    );
    assert_eq!(ask(&world, port, Some("good")).await, "200 s");
    assert_eq!(reviews(&world), 0, "nobody else was asked about");
    let refusals =
        r#"torpor_router_refusals_total{sandbox_namespace="ns",reason="TooManyReviews"}"#;
    assert_eq!(world.metric(refusals), 1);
    first.abort();
}

#[tokio::test]
async fn whose_right_it_is_reaches_the_sandbox_and_nobody_else() {
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
async fn a_right_to_one_sandbox_opens_no_other_and_each_is_asked_about_once() {
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
async fn without_an_answer_about_the_right_nobody_is_let_in() {
    for kind in ["tokenreviews", "subjectaccessreviews"] {
        let world = reviewing_rights(64).await;
        let backend = Backend::named("s").await;
        let answer = FaultAnswer::Refuse(403);
        let verb = "create";
        world.api.fail(Fault { verb, kind, answer });
        let said = ask(&world, backend.port, Some("good")).await;
        assert!(said.starts_with("500 "), "{kind}: {said}");
        assert_eq!(backend.connections(), 0);
    }
}

#[tokio::test]
async fn who_invents_tokens_keeps_nobody_out_whose_right_is_known() {
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
    let inventor = Arc::clone(&world);
    let first = tokio::spawn(async move { ask(&inventor, port, Some("a")).await });
    until("it is asked about", || reviews(&world) == 1).await;
    assert_eq!(
        ask(&world, port, Some("b")).await,
        r#"503 {"detail":"Too many tokens wait to be checked."}"#
    );
    assert_eq!(ask(&world, port, Some("good")).await, "200 s");
    first.abort();
}
