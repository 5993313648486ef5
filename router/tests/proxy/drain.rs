//! Graceful shutdown.

use std::{sync::Arc, time::Duration};

use tokio::{net::TcpStream, sync::Semaphore};

use crate::{
    backend::{Backend, full},
    client::{Raw, nothing, read, request, start},
    world::{LIMIT, World, soon, until},
};

#[tokio::test]
async fn requests_in_flight_end_and_no_new_ones_begin() {
    let world = World::new().await;
    let go_on = Arc::new(Semaphore::new(0));
    let held = Arc::clone(&go_on);
    let backend = Backend::start(move |_| {
        let held = Arc::clone(&held);
        async move {
            held.acquire().await.unwrap().forget();
            http::Response::new(full("done"))
        }
    })
    .await;
    world.running("s", "127.0.0.1").await;
    let mut idle = Raw::open(&world).await;
    idle.write("GET /healthz HTTP/1.1\r\nHost: r\r\n\r\n").await;
    idle.read_until("ok").await;
    let answer = tokio::spawn(start(
        world.address,
        request("s", backend.port).body(nothing()).unwrap(),
    ));
    until("the request is in flight", || backend.connections() == 1).await;
    let server = Arc::clone(&world.server);
    let drained = tokio::spawn(async move { server.drain(LIMIT).await });
    assert_eq!(idle.rest().await, "", "an idle connection ends at once");
    go_on.add_permits(1);
    assert_eq!(
        read(soon("the answer", answer).await.unwrap()).await.line(),
        "200 done"
    );
    soon("the drain ends", drained).await.unwrap();
    TcpStream::connect(world.address).await.unwrap_err();
}

#[tokio::test]
async fn connections_that_do_not_end_in_time_are_closed() {
    let world = World::new().await;
    let backend = Backend::start(|_| std::future::pending()).await;
    world.running("s", "127.0.0.1").await;
    let mut client = Raw::open(&world).await;
    client.write(format!("GET / HTTP/1.1\r\nHost: r\r\nX-Sandbox-ID: s\r\nX-Sandbox-Namespace: ns\r\nX-Sandbox-Port: {}\r\n\r\n", backend.port)).await;
    until("the request is in flight", || backend.connections() == 1).await;
    soon("the end", world.server.drain(Duration::from_millis(20))).await;
    assert_eq!(client.rest().await, "");
}
