//! Sandboxes named by hosts, for browsers.

use http::Request;
use serde_json::json;

use torpor_router::authz::{Authorizer, SharedToken};

use crate::{
    backend::Backend,
    client::{Answer, nothing, send},
    world::{Setup, World},
};

async fn ask(world: &World, host: String) -> Answer {
    // A page of another sandbox may set these headers; the router ignores them.
    let request = Request::builder()
        .uri("/p?q")
        .header("host", host)
        .header("x-sandbox-id", "other");
    send(world, request.body(nothing()).unwrap()).await
}

#[tokio::test]
async fn a_browser_reaches_a_sandbox_by_its_host() {
    let world = World::new().await;
    let backend = Backend::echo().await;
    world.running("my-box", "127.0.0.1").await;
    let port = backend.port;
    for host in [
        format!("{port}-my-box-ns.sandboxes.example.com"),
        format!("{port}-my-box.ns.sandboxes.example.com:8080"),
    ] {
        let answer = ask(&world, host.clone()).await;
        assert_eq!(answer.status, 200, "{answer:?}");
        assert!(answer.body.starts_with("GET /p?q\n"), "{}", answer.body);
        assert!(
            answer.body.contains(&format!("x-forwarded-host: {host}\n")),
            "{}",
            answer.body
        );
        assert!(!answer.body.contains("x-sandbox-"), "{}", answer.body);
    }
}

#[tokio::test]
async fn a_host_that_two_sandboxes_could_mean_is_refused_and_the_dotted_one_is_not() {
    let world = World::new().await;
    let backend = Backend::named("my-box of ns").await;
    let port = backend.port;
    world.running("my-box", "127.0.0.1").await;
    let host = format!("{port}-my-box-ns.sandboxes.example.com");
    assert_eq!(ask(&world, host.clone()).await.status, 200);
    // Sandbox `my` in namespace `box-ns` has the same host.
    world
        .sandbox("my", json!({"metadata": {"namespace": "box-ns"}}))
        .await;
    let answer = ask(&world, host).await;
    assert_eq!(
        answer.line(),
        r#"400 {"detail":"Ambiguous host; use <port>-<sandbox>.<namespace>.sandboxes.example.com."}"#
    );
    let dotted = format!("{port}-my-box.ns.sandboxes.example.com");
    assert_eq!(ask(&world, dotted).await.line(), "200 my-box of ns");
}

#[tokio::test]
async fn a_host_that_names_nothing_is_refused() {
    let world = World::new().await;
    assert_eq!(
        ask(&world, "my-box.sandboxes.example.com".into())
            .await
            .status,
        400
    );
    assert_eq!(
        ask(&world, "80-no-such-ns.sandboxes.example.com".into())
            .await
            .status,
        502
    );
}

#[tokio::test]
async fn an_unauthorized_client_cannot_tell_which_sandboxes_exist() {
    let authorizer = Authorizer::SharedToken(SharedToken::new("secret"));
    let setup = Setup {
        authorizer: Box::new(|_| authorizer),
        ..Setup::default()
    };
    let world = World::with(setup).await;
    world.running("my-box", "127.0.0.1").await;
    for host in [
        "80-my-box-ns",
        "80-no-such-ns",
        "80-my-box.ns",
        "80-no-such.ns",
    ] {
        let answer = ask(&world, format!("{host}.sandboxes.example.com")).await;
        assert_eq!(
            answer.line(),
            r#"401 {"detail":"Missing or invalid Authorization header."}"#
        );
    }
}
