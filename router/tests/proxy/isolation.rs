//! Isolation of sandboxes from each other.

use serde_json::json;
use torpor_router::address::AddressPolicy;

use crate::{
    backend::Backend,
    client::{get, request, send},
    world::{NS, Setup, World, until},
};

#[tokio::test]
async fn a_sandbox_connections_are_used_again_for_that_sandbox() {
    let world = World::new().await;
    let backend = Backend::named("s").await;
    world.running("s", "127.0.0.1").await;
    for _ in 0..5 {
        assert_eq!(get(&world, "s", backend.port).await.connection(), "1");
    }
    assert_eq!(backend.connections(), 1);
}

#[tokio::test]
async fn an_address_that_goes_to_another_sandbox_takes_no_connection_with_it() {
    let world = World::new().await;
    let backend = Backend::named("x").await;
    world.running("a", "127.0.0.1").await;
    assert_eq!(get(&world, "a", backend.port).await.connection(), "1");
    // The address now belongs to another sandbox.
    world.api.remove("pods", NS, "a");
    world.running("b", "127.0.0.1").await;
    assert_eq!(get(&world, "b", backend.port).await.connection(), "2");
    until("a's Pod is gone", || {
        world
            .directory
            .look_up(NS, "a")
            .is_some_and(|view| view.pod.is_none())
    })
    .await;
    assert_eq!(get(&world, "a", backend.port).await.status, 502);
}

#[tokio::test]
async fn a_sandbox_that_was_made_anew_gets_no_connection_of_the_old_one() {
    let world = World::new().await;
    let backend = Backend::named("s").await;
    let old = world.running("s", "127.0.0.1").await;
    assert_eq!(get(&world, "s", backend.port).await.connection(), "1");
    world.api.remove("pods", NS, "s");
    world.api.remove("sandboxes", NS, "s");
    until("it is gone", || world.directory.look_up(NS, "s").is_none()).await;
    world.running("s", "127.0.0.1").await;
    assert_eq!(get(&world, "s", backend.port).await.connection(), "2");
    // A request with the old UID does not reach the new Sandbox.
    let request = request("s", backend.port).header("x-sandbox-uid", old);
    assert_eq!(
        send(&world, request.body(crate::client::nothing()).unwrap())
            .await
            .status,
        502
    );
}

#[tokio::test]
async fn one_clients_connection_serves_several_sandboxes_without_mixing_them() {
    let world = World::new().await;
    let (a, b) = (Backend::named("a").await, Backend::named("b").await);
    world.running("a", "127.0.0.1").await;
    world.running("b", "127.0.0.2").await;
    let mut client = crate::client::Raw::open(&world).await;
    for _ in 0..3 {
        for (name, port) in [("a", a.port), ("b", b.port)] {
            // Nothing listens on 127.0.0.2: to the router that Pod is another machine.
            let head = format!(
                "GET / HTTP/1.1\r\nHost: r\r\nX-Sandbox-ID: {name}\r\nX-Sandbox-Namespace: ns\r\nX-Sandbox-Port: {port}\r\n\r\n"
            );
            client.write(head).await;
            let answer = client
                .read_until(if name == "a" {
                    "\r\n\r\na"
                } else {
                    "sandbox: b\"}"
                })
                .await;
            assert_eq!(answer.contains("HTTP/1.1 200"), name == "a", "{answer}");
        }
    }
    assert_eq!(b.connections(), 0);
}

#[tokio::test]
async fn an_address_that_the_pod_has_left_is_not_dialled_again() {
    let mut setup = Setup::default();
    setup.dialling.first_delay = std::time::Duration::from_secs(1);
    setup.dialling.longest_delay = std::time::Duration::from_secs(1);
    let world = World::with(setup).await;
    world.running("s", "127.0.0.1").await;
    let port = Backend::named("gone").await.port;
    let waiting = async {
        let retries = r#"sandbox_router_upstream_retries_total{sandbox_namespace="ns"}"#;
        until("the first attempt fails", || world.metric(retries) == 1).await;
        world.api.remove("pods", NS, "s");
        // The next Pod with this address would get the request.
        tokio::net::TcpListener::bind(("127.0.0.1", port))
            .await
            .unwrap()
    };
    let (answer, listener) = tokio::join!(get(&world, "s", port), waiting);
    assert_eq!(answer.status, 502);
    assert_eq!(
        world.metric(r#"sandbox_router_cache_invalidations_total{sandbox_namespace="ns"}"#),
        1
    );
    assert!(
        futures::FutureExt::now_or_never(listener.accept()).is_none(),
        "no connection"
    );
}

#[tokio::test]
async fn a_pod_that_claims_the_routers_own_loopback_is_not_routed_to() {
    let setup = Setup {
        policy: AddressPolicy::default(),
        ..Setup::default()
    };
    let world = World::with(setup).await;
    let backend = Backend::named("router's own").await;
    let uid = world.sandbox("s", json!({})).await;
    for address in ["127.0.0.1", "::1", "0.0.0.0", "169.254.169.254"] {
        world.pod("s", &uid, address).await;
        assert_eq!(
            get(&world, "s", backend.port).await.status,
            502,
            "{address}"
        );
        world.api.remove("pods", NS, "s");
    }
    assert_eq!(backend.connections(), 0);
}
