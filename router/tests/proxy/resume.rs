//! Requests for suspended sandboxes.

use std::{sync::Arc, time::Duration};

use http::{HeaderMap, HeaderName, HeaderValue};
use http_body::Frame;
use rstest::rstest;
use serde_json::{Value, json};
use tokio::sync::mpsc;
use torpor_router::gate::Limits;
use torpor_test_apiserver::{Fault, FaultAnswer};

use crate::{
    backend::{Backend, data, frames, full},
    client::{Raw, get, nothing, read, request, send, start},
    world::{NS, Setup, World, soon, until},
};

fn resumable() -> Value {
    json!({
        "metadata": {"annotations": {"torpor.dev/resume-on-request": "true"}},
        "spec": {"operatingMode": "Suspended"},
    })
}

fn mode(world: &World) -> String {
    let sandbox = world.api.get("sandboxes", NS, "s").unwrap();
    sandbox["spec"]["operatingMode"]
        .as_str()
        .unwrap()
        .to_owned()
}

fn limits(change: impl FnOnce(&mut Limits)) -> Setup {
    let mut setup = Setup::default();
    change(&mut setup.limits);
    setup
}

async fn resumed(world: &World) {
    until("it is resumed", || mode(world) == "Running").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_thousand_requests_make_one_resume_and_all_are_answered() {
    let world = Arc::new(World::new().await);
    let backend = Backend::named("awake").await;
    let uid = world.sandbox("s", resumable()).await;
    let port = backend.port;
    let requests: Vec<_> = (0..1000)
        .map(|_| {
            let world = Arc::clone(&world);
            tokio::spawn(async move { get(&world, "s", port).await })
        })
        .collect();
    until("all of them wait", || world.proxy.gate.held() == 1000).await;
    resumed(&world).await;
    world.pod("s", &uid, "127.0.0.1").await;
    for request in requests {
        assert_eq!(
            soon("each is answered", request).await.unwrap().line(),
            "200 awake"
        );
    }
    assert_eq!(world.patches(), [200], "one patch");
    assert_eq!(world.proxy.gate.held(), 0);
}

#[tokio::test]
async fn a_sandbox_that_does_not_allow_a_resume_stays_suspended() {
    let world = World::new().await;
    world
        .sandbox("s", json!({"spec": {"operatingMode": "Suspended"}}))
        .await;
    let answer = get(&world, "s", 80).await;
    assert_eq!(
        answer.line(),
        r#"503 {"detail":"Sandbox s is suspended. Set spec.operatingMode to Running, or annotate it with torpor.dev/resume-on-request: \"true\"."}"#
    );
    assert_eq!(
        (world.patches(), mode(&world)),
        (vec![], "Suspended".to_owned())
    );
    let refusals = r#"torpor_router_refusals_total{sandbox_namespace="ns",reason="Suspended"}"#;
    assert_eq!(world.metric(refusals), 1);
}

#[tokio::test]
async fn a_websocket_wakes_its_sandbox_too() {
    let world = World::new().await;
    let backend = Backend::start(|_| async {
        let answer = http::Response::builder()
            .status(101)
            .header("connection", "upgrade");
        answer
            .header("upgrade", "websocket")
            .body(crate::backend::full(""))
            .unwrap()
    })
    .await;
    let uid = world.sandbox("s", resumable()).await;
    let mut client = Raw::open(&world).await;
    let port = backend.port;
    client.write(format!("GET / HTTP/1.1\r\nHost: r\r\nX-Sandbox-ID: s\r\nX-Sandbox-Namespace: ns\r\nX-Sandbox-Port: {port}\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n")).await;
    resumed(&world).await;
    world.pod("s", &uid, "127.0.0.1").await;
    assert!(
        client
            .read_until("\r\n\r\n")
            .await
            .starts_with("HTTP/1.1 101 ")
    );
}

const GET: &str = "GET / HTTP/1.1\r\nHost: r\r\nX-Sandbox-ID: s\r\nX-Sandbox-Namespace: ns\r\n";
const POST: &str = "POST / HTTP/1.1\r\nHost: r\r\nX-Sandbox-ID: s\r\nX-Sandbox-Namespace: ns\r\n";

#[rstest]
#[case::without_a_body(GET, "\r\n")]
#[case::with_a_body(POST, "Content-Length: 4\r\n\r\nbody")]
#[case::in_chunks(POST, "Transfer-Encoding: chunked\r\n\r\n4\r\nbody\r\n0\r\n\r\n")]
#[case::in_the_middle_of_its_body(POST, "Content-Length: 9\r\n\r\nbody")]
#[tokio::test]
async fn a_client_that_disconnects_frees_its_slot_and_leaves_the_resume_to_others(
    #[case] head: &str,
    #[case] rest: &str,
) {
    let world = World::new().await;
    let backend = Backend::named("awake").await;
    let uid = world.sandbox("s", resumable()).await;
    let mut client = Raw::open(&world).await;
    client.write(format!("{head}{rest}")).await;
    until("it waits", || world.proxy.gate.held() == 1).await;
    drop(client);
    until("its slot is free", || world.proxy.gate.held() == 0).await;
    resumed(&world).await;
    world.pod("s", &uid, "127.0.0.1").await;
    assert_eq!(get(&world, "s", backend.port).await.line(), "200 awake");
    assert_eq!(world.patches(), [200]);
}

/// The part of the body that the router read while it held the request precedes the rest.
#[rstest]
#[case::of_a_known_length(false, 5)]
#[case::in_chunks(true, 5)]
#[case::more_than_is_read_meanwhile(false, 100_000)]
#[case::more_of_it_in_chunks(true, 100_000)]
#[tokio::test]
async fn a_request_that_waited_arrives_whole(#[case] chunked: bool, #[case] length: usize) {
    let world = World::new().await;
    let backend = Backend::echo().await;
    let uid = world.sandbox("s", resumable()).await;
    let (sender, pieces) = mpsc::unbounded_channel();
    let content = "x".repeat(length);
    let asked = || request("s", backend.port).method("POST");
    let answer = if chunked {
        for piece in content.as_bytes().chunks(1000) {
            sender.send(data(str::from_utf8(piece).unwrap())).unwrap();
        }
        let trailers = HeaderMap::from_iter([(
            HeaderName::from_static("x-sum"),
            HeaderValue::from_static("1"),
        )]);
        sender.send(Frame::trailers(trailers)).unwrap();
        drop(sender);
        let asked = asked().header("trailer", "x-sum").body(frames(pieces));
        tokio::spawn(start(world.address, asked.unwrap()))
    } else {
        let asked = asked().body(full(content.clone())).unwrap();
        tokio::spawn(start(world.address, asked))
    };
    until("it waits", || world.proxy.gate.held() == 1).await;
    resumed(&world).await;
    world.pod("s", &uid, "127.0.0.1").await;
    let answer = read(soon("the answer", answer).await.unwrap()).await;
    assert_eq!(answer.status, 200);
    assert!(answer.body.ends_with(&format!("\n{content}")));
    let framing = match chunked {
        true => "transfer-encoding: chunked\n".to_owned(),
        false => format!("content-length: {length}\n"),
    };
    assert!(answer.body.contains(&framing));
}

#[tokio::test]
async fn held_requests_are_bounded_in_total_and_for_each_sandbox() {
    for setup in [
        limits(|limits| limits.held.all = 1),
        limits(|limits| limits.held.each = 1),
    ] {
        let world = World::with(setup).await;
        world.sandbox("s", resumable()).await;
        let first = async {
            let mut client = Raw::open(&world).await;
            client.write("GET / HTTP/1.1\r\nHost: r\r\nX-Sandbox-ID: s\r\nX-Sandbox-Namespace: ns\r\n\r\n").await;
            until("it waits", || world.proxy.gate.held() == 1).await;
            client
        };
        let _first = first.await;
        let answer = get(&world, "s", 80).await;
        assert_eq!(
            answer.line(),
            r#"503 {"detail":"Too many requests wait for sandboxes that are not ready."}"#
        );
        assert_eq!(answer.headers["retry-after"], "1");
    }
}

#[tokio::test]
async fn a_request_held_too_long_is_refused() {
    let world = World::with(limits(|limits| limits.resume = Duration::from_millis(50))).await;
    world.sandbox("s", resumable()).await;
    let answer = get(&world, "s", 80).await;
    assert_eq!(
        answer.line(),
        r#"504 {"detail":"Sandbox s is being resumed and did not become ready in time."}"#
    );
}

#[tokio::test]
async fn a_resume_that_the_apiserver_refuses_is_not_repeated_for_each_request() {
    let world = World::new().await;
    world.sandbox("s", resumable()).await;
    world.api.fail(Fault {
        verb: "patch",
        kind: "sandboxes",
        answer: FaultAnswer::Refuse(403),
    });
    for _ in 0..3 {
        let answer = get(&world, "s", 80).await;
        assert_eq!(
            answer.line(),
            r#"503 {"detail":"Sandbox s is suspended and could not be resumed: Forbidden"}"#
        );
    }
    assert_eq!(world.patches(), [403]);
}

#[tokio::test]
async fn another_version_of_the_sandbox_is_decided_on_again() {
    let world = World::new().await;
    let uid = world.sandbox("s", resumable()).await;
    let backend = Backend::named("awake").await;
    world.api.fail(Fault {
        verb: "patch",
        kind: "sandboxes",
        answer: FaultAnswer::Refuse(409),
    });
    let meanwhile = async {
        until("the first try fails", || world.patches() == [409]).await;
        world.api.edit(
            "sandboxes",
            NS,
            "s",
            &json!({"metadata": {"labels": {"new": "version"}}}),
        );
        resumed(&world).await;
        world.pod("s", &uid, "127.0.0.1").await;
    };
    let (answer, ()) = tokio::join!(get(&world, "s", backend.port), meanwhile);
    assert_eq!(answer.line(), "200 awake");
    assert_eq!(world.patches(), [200]);
}

#[tokio::test]
async fn a_resume_ends_if_the_user_removes_the_permission() {
    let world = World::new().await;
    world.sandbox("s", resumable()).await;
    world.api.fail(Fault {
        verb: "patch",
        kind: "sandboxes",
        answer: FaultAnswer::Refuse(409),
    });
    let meanwhile = async {
        until("the first try fails", || world.patches() == [409]).await;
        let change = json!({"metadata": {"annotations": {"torpor.dev/resume-on-request": null}}});
        world.api.edit("sandboxes", NS, "s", &change);
    };
    let (answer, ()) = tokio::join!(get(&world, "s", 80), meanwhile);
    assert!(answer.body.contains("Set spec.operatingMode"), "{answer:?}");
    assert_eq!(mode(&world), "Suspended");
}

#[tokio::test]
async fn the_watch_reports_a_patch_whose_response_is_lost() {
    let setup = Setup {
        api_timeout: Duration::from_millis(50),
        ..Setup::default()
    };
    let world = World::with(setup).await;
    let backend = Backend::named("awake").await;
    let uid = world.sandbox("s", resumable()).await;
    world.api.fail(Fault {
        verb: "patch",
        kind: "sandboxes",
        answer: FaultAnswer::LoseAnswer,
    });
    let meanwhile = async {
        resumed(&world).await;
        world.pod("s", &uid, "127.0.0.1").await;
    };
    let (answer, ()) = tokio::join!(get(&world, "s", backend.port), meanwhile);
    assert_eq!(answer.line(), "200 awake");
    assert_eq!(world.patches(), [200]);
}

#[tokio::test]
async fn a_resume_that_the_apiserver_cannot_do_now_is_tried_again() {
    let world = World::new().await;
    let backend = Backend::named("awake").await;
    let uid = world.sandbox("s", resumable()).await;
    world.api.fail(Fault {
        verb: "patch",
        kind: "sandboxes",
        answer: FaultAnswer::Refuse(503),
    });
    let meanwhile = async {
        resumed(&world).await;
        world.pod("s", &uid, "127.0.0.1").await;
    };
    let (answer, ()) = tokio::join!(get(&world, "s", backend.port), meanwhile);
    assert_eq!(answer.line(), "200 awake");
    assert_eq!(world.patches(), [503, 200]);
}

#[tokio::test]
async fn a_held_request_does_not_resume_a_sandbox_that_a_user_suspends_again() {
    let world = World::new().await;
    world.sandbox("s", resumable()).await;
    let meanwhile = async {
        resumed(&world).await;
        let change = json!({"spec": {"operatingMode": "Suspended"}});
        world.api.edit("sandboxes", NS, "s", &change);
    };
    let (answer, ()) = tokio::join!(get(&world, "s", 80), meanwhile);
    assert_eq!(
        answer.line(),
        r#"503 {"detail":"Sandbox s is suspended and could not be resumed: it was suspended again"}"#
    );
    assert_eq!(
        (world.patches(), mode(&world)),
        (vec![200], "Suspended".to_owned())
    );
}

#[tokio::test]
async fn a_request_is_held_no_longer_than_its_time_limit() {
    let mut setup = Setup::default();
    setup.settings.proxy_timeout = Duration::from_millis(50);
    let world = World::with(setup).await;
    world.sandbox("s", resumable()).await;
    assert_eq!(get(&world, "s", 80).await.status, 504);
}

#[tokio::test]
async fn a_request_is_held_no_longer_than_the_clients_timeout() {
    let world = World::new().await;
    world.sandbox("s", resumable()).await;
    let asked = request("s", 80).header("x-sandbox-timeout", "0.05");
    let answer = send(&world, asked.body(nothing()).unwrap()).await;
    assert_eq!(answer.status, 504);
}

#[tokio::test]
async fn requests_for_unknown_names_take_no_slots_from_sandboxes() {
    let world = World::with(limits(|limits| {
        limits.held.all = 4;
        limits.dial = crate::world::LIMIT;
    }))
    .await;
    let backend = Backend::named("awake").await;
    let uid = world.sandbox("s", resumable()).await;
    let mut ghosts = Vec::new();
    for number in 0..2 {
        let mut ghost = Raw::open(&world).await;
        ghost
            .write(format!(
                "GET / HTTP/1.1\r\nHost: r\r\nX-Sandbox-ID: ghost-{number}\r\n\r\n"
            ))
            .await;
        ghosts.push(ghost);
        until("it waits", || world.proxy.gate.held() == ghosts.len()).await;
    }
    assert_eq!(get(&world, "another-ghost", 80).await.status, 503);
    let meanwhile = async {
        resumed(&world).await;
        world.pod("s", &uid, "127.0.0.1").await;
    };
    let (answer, ()) = tokio::join!(get(&world, "s", backend.port), meanwhile);
    assert_eq!(answer.line(), "200 awake");
}
