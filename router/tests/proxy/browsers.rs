//! Browsers, which send their token in a cookie.

use http::Request;
use torpor_router::{
    authz::Authorizer,
    browser::{Browsers, SameSite},
    scoped_token::{Claims, Secret},
};

use crate::{
    backend::Backend,
    client::{Answer, Raw, nothing, send},
    streaming::websocket,
    world::{NS, Setup, World},
};

const SECRET: [u8; 32] = [7; 32];

/// Returns a token that opens one sandbox.
fn token(sandbox: &str) -> String {
    let claims = Claims {
        namespace: NS.into(),
        name: sandbox.into(),
        exp: i64::MAX,
    };
    Secret::new(&SECRET).unwrap().sign(&claims).unwrap()
}

/// Starts a router with the running sandbox `my-box`.
async fn world() -> World {
    let secret = Secret::new(&SECRET).unwrap();
    let mut setup = Setup {
        authorizer: Box::new(|_| Authorizer::ScopedToken(secret.into())),
        ..Setup::default()
    };
    setup.settings.browsers = Some(Browsers {
        cookie: "__Host-session".into(),
        parameter: Some("access".into()),
        same_site: SameSite::Lax,
        secure: true,
        origins: vec![],
        of_paths: false,
    });
    let world = World::with(setup).await;
    world.running("my-box", "127.0.0.1").await;
    world
}

fn host(port: u16, sandbox: &str) -> String {
    format!("{port}-{sandbox}.{NS}.sandboxes.example.com")
}

async fn ask(world: &World, host: &str, path: &str, headers: &[(&str, &str)]) -> Answer {
    let request = headers.iter().fold(
        Request::builder().uri(path).header("host", host),
        |request, (name, value)| request.header(*name, *value),
    );
    send(world, request.body(nothing()).unwrap()).await
}

#[tokio::test]
async fn a_token_in_an_address_becomes_a_cookie_that_the_sandbox_does_not_see() {
    let (world, backend) = (world().await, Backend::echo().await);
    let (host, token) = (host(backend.port, "my-box"), token("my-box"));
    assert_eq!(ask(&world, &host, "/p?a=1", &[]).await.status, 401);
    let address = format!("/p?a=1&access={token}&b");
    let answer = ask(&world, &host, &address, &[]).await;
    assert_eq!(answer.status, 302);
    assert_eq!(answer.headers["location"], "/p?a=1&b");
    let cookie = answer.headers["set-cookie"].to_str().unwrap();
    let (cookie, attributes) = cookie.split_once("; ").unwrap();
    assert_eq!(attributes, "Path=/; HttpOnly; Secure; SameSite=Lax");
    assert_eq!(backend.connections(), 0);
    let cookies = format!("theme=dark; {cookie}; lang=en");
    let answer = ask(&world, &host, "/p?a=1&b", &[("cookie", cookies.as_str())]).await;
    assert_eq!(answer.status, 200);
    assert!(answer.body.starts_with("GET /p?a=1&b\n"), "{}", answer.body);
    assert!(answer.body.contains("cookie: theme=dark; lang=en\n"));
    assert!(!answer.body.contains(&token), "{}", answer.body);
}

#[tokio::test]
async fn a_cookie_opens_no_other_sandbox_and_no_request_by_headers() {
    let (world, backend) = (world().await, Backend::echo().await);
    let cookie = format!("__Host-session={}", token("my-box"));
    let cookie = [("cookie", cookie.as_str())];
    let evil = host(backend.port, "evil");
    assert_eq!(ask(&world, &evil, "/", &cookie).await.status, 403);
    let address = format!("/?access={}", token("my-box"));
    let answer = ask(&world, &evil, &address, &[]).await;
    assert_eq!(answer.status, 403);
    assert!(!answer.headers.contains_key("set-cookie"));
    // Clients that name a sandbox by headers must send `Authorization`.
    let by_headers = [
        cookie[0],
        ("x-sandbox-id", "my-box"),
        ("x-sandbox-namespace", NS),
    ];
    assert_eq!(
        ask(&world, "router", &address, &by_headers).await.status,
        401
    );
    assert_eq!(backend.connections(), 0);
}

#[tokio::test]
async fn another_sandboxs_page_gets_nothing_by_the_cookie() {
    let (world, backend) = (world().await, websocket().await);
    let (host, evil) = (host(backend.port, "my-box"), host(backend.port, "evil"));
    let cookie = format!("__Host-session={}", token("my-box"));
    let origin = format!("https://{evil}");
    for foreign in [("origin", origin.as_str()), ("sec-fetch-site", "same-site")] {
        let answer = ask(&world, &host, "/", &[("cookie", cookie.as_str()), foreign]).await;
        assert_eq!(
            answer.line(),
            r#"403 {"detail":"origin not allowed for cookie-authenticated request"}"#
        );
    }
    let handshake = |origin: &str| {
        format!(
            "GET /ws HTTP/1.1\r\nHost: {host}\r\nOrigin: https://{origin}\r\nCookie: {cookie}\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\
             Sec-WebSocket-Key: k\r\nSec-WebSocket-Version: 13\r\n\r\n"
        )
    };
    let mut page = Raw::open(&world).await;
    page.write(handshake(&evil)).await;
    let refused = page.read_until("\r\n\r\n").await;
    assert!(refused.starts_with("HTTP/1.1 403 "), "{refused}");
    assert_eq!(backend.connections(), 0);
    let mut page = Raw::open(&world).await;
    page.write(handshake(&host)).await;
    let head = page.read_until("\r\n\r\n").await;
    assert!(head.starts_with("HTTP/1.1 101 "), "{head}");
    page.write("hello").await;
    assert_eq!(page.read_until("hello").await, "hello");
}
