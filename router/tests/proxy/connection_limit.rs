//! More clients than --max-connections allows.

use std::{sync::Arc, time::Duration};

use rstest::rstest;
use tokio::sync::Semaphore;

use crate::{
    backend::{Backend, full},
    client::{Raw, http2, nothing, read, request, send, start},
    streaming::{open_websocket, websocket},
    world::{Setup, World, soon, until},
};

/// Timeout that never expires in a test.
const LONG: Duration = Duration::from_secs(3600);

async fn with_limit(connections: usize) -> World {
    let mut setup = Setup {
        connections,
        ..Setup::default()
    };
    setup.timeouts.head = LONG;
    setup.timeouts.idle = LONG;
    World::with(setup).await
}

/// Sends a request that the router answers itself; the connection stays open.
async fn ask(client: &mut Raw) {
    client
        .write("GET /healthz HTTP/1.1\r\nHost: r\r\n\r\n")
        .await;
    client.read_until(r#"{"status":"ok"}"#).await;
}

/// Connects clients one after the other; each gets a response and stays connected.
async fn connect(world: &World, count: usize) -> Vec<Raw> {
    let mut clients = Vec::new();
    for _ in 0..count {
        let mut client = Raw::open(world).await;
        ask(&mut client).await;
        clients.push(client);
    }
    clients
}

/// Starts a sandbox that answers after a permit of `go_on`.
async fn slow(go_on: &Arc<Semaphore>) -> Backend {
    let held = Arc::clone(go_on);
    Backend::start(move |_| {
        let held = Arc::clone(&held);
        async move {
            held.acquire().await.unwrap().forget();
            http::Response::new(full("done"))
        }
    })
    .await
}

#[rstest]
#[case::silent("")]
#[case::dripping("GET / HT")]
#[case::http2_without_a_request("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0")]
#[tokio::test]
async fn clients_without_requests_do_not_keep_other_clients_out(#[case] bytes: &str) {
    let world = with_limit(2).await;
    let mut idle = Vec::new();
    for _ in 0..2 {
        let mut client = Raw::open(&world).await;
        client.write(bytes).await;
        idle.push(client);
    }
    let _others = connect(&world, 2).await;
    for mut client in idle {
        let answer = client.rest().await;
        assert!(!answer.contains("200"), "{answer}");
    }
}

#[tokio::test]
async fn the_connection_that_is_idle_longest_is_evicted() {
    let world = with_limit(2).await;
    let (mut first, mut second) = (Raw::open(&world).await, Raw::open(&world).await);
    ask(&mut second).await;
    // Times have a resolution of one millisecond.
    tokio::time::sleep(Duration::from_millis(5)).await;
    ask(&mut first).await;
    let _third = connect(&world, 1).await;
    assert_eq!(second.rest().await, "");
    ask(&mut first).await;
    assert_eq!(world.metric("torpor_router_connections_made_way_total"), 1);
}

#[tokio::test]
async fn requests_and_websockets_in_flight_are_not_evicted() {
    let world = with_limit(2).await;
    let go_on = Arc::new(Semaphore::new(0));
    let (slow, echo) = (slow(&go_on).await, websocket().await);
    world.running("s", "127.0.0.1").await;
    let mut tunnel = open_websocket(&world, echo.port).await;
    let request = request("s", slow.port).body(nothing()).unwrap();
    let answer = tokio::spawn(start(world.address, request));
    until("the request is in flight", || slow.connections() == 1).await;
    // Each new connection evicts the one before it.
    let _others = connect(&world, 4).await;
    tunnel.write("still there").await;
    assert_eq!(tunnel.read_until("still there").await, "still there");
    go_on.add_permits(1);
    let answer = soon("the answer", answer).await.unwrap();
    assert_eq!(read(answer).await.line(), "200 done");
}

#[tokio::test]
async fn a_client_at_the_limit_waits_until_a_request_has_ended() {
    let world = with_limit(1).await;
    let go_on = Arc::new(Semaphore::new(0));
    let slow = slow(&go_on).await;
    world.running("s", "127.0.0.1").await;
    let mut busy = http2(&world).await;
    let asked = request("s", slow.port).uri("http://router/");
    let answer = tokio::spawn(busy.send_request(asked.body(nothing()).unwrap()));
    until("the request is in flight", || slow.connections() == 1).await;
    let mut waiting = Raw::open(&world).await;
    let waited = tokio::time::timeout(Duration::from_millis(300), ask(&mut waiting));
    waited.await.unwrap_err();
    go_on.add_permits(1);
    let answer = soon("the answer", answer).await.unwrap().unwrap();
    assert_eq!(read(answer).await.line(), "200 done");
    // The request that the waiting client has sent is answered now.
    waiting.read_until(r#"{"status":"ok"}"#).await;
    let after = request("s", slow.port).body(nothing()).unwrap();
    go_on.add_permits(1);
    assert_eq!(send(&world, after).await.line(), "200 done");
}
