//! Behaviour that clients of upstream's router depend on.

use rstest::rstest;
use serde_json::json;

use crate::{
    backend::Backend,
    client::{Raw, get, nothing, request, send},
    world::{NS, World, until},
};

#[tokio::test]
async fn a_request_reaches_the_sandbox_with_the_headers_meant_for_it() {
    let world = World::new().await;
    let backend = Backend::echo().await;
    world.running("s", "127.0.0.1").await;
    let request = request("s", backend.port)
        .method("POST")
        .uri("/execute?a=%2F..&b")
        .header("authorization", "Bearer secret")
        .header("x-forwarded-for", "1.2.3.4")
        .header("x-sandbox-pod-ip", "127.0.0.1")
        .body("ls".to_owned())
        .unwrap();
    let answer = send(&world, request).await;
    assert_eq!(answer.status, 200);
    assert!(
        answer.body.starts_with("POST /execute?a=%2F..&b\n"),
        "{}",
        answer.body
    );
    assert!(answer.body.ends_with("\nls"), "{}", answer.body);
    assert!(
        answer
            .body
            .contains(&format!("host: 127.0.0.1:{}\n", backend.port)),
        "{}",
        answer.body
    );
    assert!(
        answer.body.contains("x-forwarded-for: 127.0.0.1\n"),
        "{}",
        answer.body
    );
    assert!(
        answer.body.contains("x-forwarded-host: router\n"),
        "{}",
        answer.body
    );
    assert!(!answer.body.contains("secret"), "{}", answer.body);
    let count = r#"sandbox_router_requests_total{method="POST",code="200",sandbox_namespace="ns"}"#;
    until("it is counted", || world.metric(count) == 1).await;
}

#[rstest]
#[case::no_id("", 400, "X-Sandbox-ID header is required.")]
#[case::dots("X-Sandbox-ID: ..\r\n", 400, "Invalid sandbox ID format.")]
#[case::climbing("X-Sandbox-ID: a/../b\r\n", 400, "Invalid sandbox ID format.")]
#[case::uppercase("X-Sandbox-ID: Box\r\n", 400, "Invalid sandbox ID format.")]
#[case::namespace(
    "X-Sandbox-ID: a\r\nX-Sandbox-Namespace: kube.system\r\n",
    400,
    "Invalid namespace format."
)]
#[case::port(
    "X-Sandbox-ID: a\r\nX-Sandbox-Port: 99999\r\n",
    400,
    "Invalid port format."
)]
#[case::metadata_service(
    "X-Sandbox-ID: a\r\nX-Sandbox-Pod-IP: 169.254.169.254\r\n",
    400,
    "Invalid target IP address."
)]
#[case::unknown(
    "X-Sandbox-ID: ghost\r\n",
    502,
    "Could not connect to the backend sandbox: ghost"
)]
#[tokio::test]
async fn refusals_are_upstreams(#[case] headers: &str, #[case] status: u16, #[case] detail: &str) {
    let world = World::new().await;
    let mut client = Raw::open(&world).await;
    client
        .write(format!(
            "GET /x HTTP/1.1\r\nHost: router\r\nConnection: close\r\n{headers}\r\n"
        ))
        .await;
    let answer = client.rest().await;
    assert!(
        answer.starts_with(&format!("HTTP/1.1 {status} ")),
        "{answer}"
    );
    assert!(
        answer.contains("content-type: application/json\r\n"),
        "{answer}"
    );
    assert!(
        answer.ends_with(&json!({"detail": detail}).to_string()),
        "{answer}"
    );
}

#[tokio::test]
async fn the_python_routers_health_check_is_answered() {
    let world = World::new().await;
    let request = http::Request::builder()
        .uri("/healthz")
        .header("host", "router");
    let answer = send(&world, request.body(nothing()).unwrap()).await;
    assert_eq!(answer.line(), r#"200 {"status":"ok"}"#);
}

#[tokio::test]
async fn a_sandbox_of_another_namespace_is_not_there() {
    let world = World::new().await;
    let backend = Backend::named("s").await;
    let uid = world.running("s", "127.0.0.1").await;
    for uid in [None, Some(uid)] {
        let mut request = request("s", backend.port);
        request
            .headers_mut()
            .unwrap()
            .insert("x-sandbox-namespace", "other".parse().unwrap());
        if let Some(uid) = uid {
            request = request.header("x-sandbox-uid", uid);
        }
        let answer = send(&world, request.body(nothing()).unwrap()).await;
        assert_eq!(
            answer.line(),
            r#"502 {"detail":"Could not connect to the backend sandbox: s"}"#
        );
    }
    assert_eq!(backend.connections(), 0);
}

#[tokio::test]
async fn a_member_of_a_pool_is_reached_only_by_its_uid() {
    let world = World::new().await;
    let backend = Backend::named("s").await;
    let label = "agents.x-k8s.io/warm-pool-sandbox";
    let uid = world
        .sandbox("s", json!({"metadata": {"labels": {label: "h"}}}))
        .await;
    world.pod("s", &uid, "127.0.0.1").await;
    until("the Pod is known", || {
        world
            .directory
            .look_up(NS, "s")
            .is_some_and(|view| view.pod.is_some())
    })
    .await;
    assert_eq!(get(&world, "s", backend.port).await.status, 502);
    let by_uid = request("s", backend.port).header("x-sandbox-uid", &uid);
    assert_eq!(
        send(&world, by_uid.body(nothing()).unwrap()).await.line(),
        "200 s"
    );
    world.api.edit(
        "sandboxes",
        NS,
        "s",
        &json!({"metadata": {"labels": {label: null}}}),
    );
    until("it is claimed", || world.directory.exists(NS, "s")).await;
    assert_eq!(get(&world, "s", backend.port).await.line(), "200 s");
}

#[tokio::test]
async fn a_closed_port_is_tried_as_often_as_upstream_does() {
    let world = World::new().await;
    world.running("s", "127.0.0.1").await;
    // The backend is dropped at once: the port is closed.
    let port = Backend::named("gone").await.port;
    let answer = get(&world, "s", port).await;
    assert_eq!(
        answer.line(),
        r#"502 {"detail":"Could not connect to the backend sandbox: s"}"#
    );
    assert_eq!(
        world.metric(r#"sandbox_router_upstream_retries_total{sandbox_namespace="ns"}"#),
        3
    );
    assert_eq!(
        world.metric(
            r#"sandbox_router_upstream_errors_total{sandbox_namespace="ns",reason="dial"}"#
        ),
        1
    );
}

#[tokio::test]
async fn a_connect_request_is_refused() {
    let world = World::new().await;
    let mut client = Raw::open(&world).await;
    client.write("CONNECT 10.0.0.1:443 HTTP/1.1\r\nHost: 10.0.0.1:443\r\nX-Sandbox-ID: s\r\nConnection: close\r\n\r\n").await;
    let answer = client.rest().await;
    assert!(answer.starts_with("HTTP/1.1 405 "), "{answer}");
}
