//! Requests whose path names the sandbox, from browsers without a wildcard record in DNS.

use bytes::Bytes;
use http::{Request, Response};
use hyper::body::Incoming;
use torpor_router::{
    authz::Authorizer,
    browser::{Browsers, SameSite},
};

use crate::{
    backend::{Backend, full},
    client::{Answer, Raw, nothing, send},
    scoped::{token, tokens},
    streaming::websocket,
    world::{NS, Setup, World},
};

async fn ask(world: &World, path: &str, headers: &[(&str, &str)]) -> Answer {
    let request = headers.iter().fold(
        Request::builder().uri(path).header("host", "outside.dev"),
        |request, (name, value)| request.header(*name, *value),
    );
    send(world, request.body(nothing()).unwrap()).await
}

fn base(port: u16) -> String {
    format!("/router/{NS}/s/{port}")
}

#[tokio::test]
async fn a_path_names_a_sandbox_which_receives_the_rest_and_no_names() {
    let (world, backend) = (World::new().await, Backend::echo().await);
    world.running("s", "127.0.0.1").await;
    let path = format!("{}/a%2Fb/c?d=/e", base(backend.port));
    let names = [("x-sandbox-id", "s"), ("x-sandbox-timeout", "1")];
    let answer = ask(&world, &path, &names).await;
    assert_eq!(answer.status, 200);
    assert!(
        answer.body.starts_with("GET /a%2Fb/c?d=/e\n"),
        "{}",
        answer.body
    );
    assert!(!answer.body.contains("x-sandbox-"), "{}", answer.body);
    assert!(answer.body.contains("x-forwarded-host: outside.dev\n"));
    let answer = ask(&world, &base(backend.port), &[]).await;
    assert!(answer.body.starts_with("GET /\n"), "{}", answer.body);
}

#[tokio::test]
async fn a_path_that_names_no_sandbox_is_refused_in_upstreams_words() {
    let world = World::new().await;
    world.running("s", "127.0.0.1").await;
    let form = r#"400 {"detail":"Path-routed request must have the form <prefix>/<namespace>/<id>/<port>/..."}"#;
    // Headers do not replace the path.
    let header = [("x-sandbox-id", "s"), ("x-sandbox-namespace", NS)];
    for (path, line) in [
        ("/router/", form),
        ("/router/ns/s", form),
        (
            "/router/NS/s/80/",
            r#"400 {"detail":"Invalid namespace format."}"#,
        ),
        (
            "/router/ns/S/80/",
            r#"400 {"detail":"Invalid sandbox ID format."}"#,
        ),
        (
            "/router/ns/s/x/",
            r#"400 {"detail":"Invalid port format."}"#,
        ),
        (
            "/router/ns/s%/1/",
            r#"400 {"detail":"Invalid percent-encoding in path."}"#,
        ),
        (
            "/router/ns/none/80/",
            r#"400 {"detail":"X-Sandbox-* headers contradict the path."}"#,
        ),
    ] {
        assert_eq!(ask(&world, path, &header).await.line(), line, "{path}");
    }
    let answer = ask(&world, "/router/ns/none/80/", &[]).await;
    assert_eq!(
        answer.line(),
        r#"502 {"detail":"Could not connect to the backend sandbox: none"}"#
    );
    let answer = ask(&world, "/routers/ns/s/80/", &[]).await;
    assert_eq!(
        answer.line(),
        r#"400 {"detail":"X-Sandbox-ID header is required."}"#
    );
}

/// Starts a sandbox that redirects to its own host and sets a cookie for the client's domain.
async fn redirecting() -> Backend {
    Backend::start(|request: Request<Incoming>| async move {
        let host = request.headers()["host"].to_str().unwrap();
        Response::builder()
            .status(302)
            .header("location", format!("http://{host}/login"))
            .header("set-cookie", "a=b; Path=/; Domain=outside.dev")
            .header("service-worker-allowed", "/")
            .body(full(Bytes::new()))
            .unwrap()
    })
    .await
}

#[tokio::test]
async fn a_response_stays_below_the_path_unless_rewriting_is_off() {
    for rewritten in [true, false] {
        let mut setup = Setup::default();
        setup.settings.rewrite_responses = rewritten;
        let (world, backend) = (World::with(setup).await, redirecting().await);
        world.running("s", "127.0.0.1").await;
        let base = base(backend.port);
        let answer = ask(&world, &format!("{base}/x"), &[]).await;
        let own = format!("http://127.0.0.1:{}", backend.port);
        let (location, cookie) = if rewritten {
            (format!("{base}/login"), format!("a=b; Path={base}/"))
        } else {
            (
                format!("{own}/login"),
                "a=b; Path=/; Domain=outside.dev".into(),
            )
        };
        assert_eq!(answer.headers["location"], location);
        assert_eq!(answer.headers["set-cookie"], cookie);
        assert!(!answer.headers.contains_key("service-worker-allowed"));
        // The response stays unchanged if headers name the sandbox.
        let headers = [
            ("x-sandbox-id", "s"),
            ("x-sandbox-namespace", NS),
            ("x-sandbox-port", &backend.port.to_string()),
        ];
        let answer = ask(&world, "/x", &headers).await;
        assert_eq!(answer.headers["location"], format!("{own}/login"));
        assert_eq!(answer.headers["service-worker-allowed"], "/");
    }
}

/// Starts a router with sandbox `s` that accepts its tokens and turns them into cookies. Returns a
/// token.
async fn closed() -> (World, String) {
    let mut setup = Setup {
        authorizer: Box::new(|_| Authorizer::ScopedToken(tokens())),
        ..Setup::default()
    };
    setup.settings.domain = None;
    setup.settings.browsers = Some(Browsers {
        cookie: "session".into(),
        parameter: Some("access".into()),
        same_site: SameSite::Lax,
        secure: true,
        origins: vec![],
        of_paths: true,
    });
    let world = World::with(setup).await;
    let uid = world.running("s", "127.0.0.1").await;
    (world, token("s", &uid))
}

#[tokio::test]
async fn a_token_in_an_address_becomes_a_cookie_of_its_path() {
    let ((world, token), backend) = (closed().await, Backend::echo().await);
    let base = base(backend.port);
    assert_eq!(ask(&world, &format!("{base}/p"), &[]).await.status, 401);
    let answer = ask(&world, &format!("{base}/p?a=1&access={token}"), &[]).await;
    assert_eq!(answer.status, 302);
    assert_eq!(answer.headers["location"], format!("{base}/p?a=1"));
    let cookie = answer.headers["set-cookie"].to_str().unwrap();
    let (cookie, attributes) = cookie.split_once("; ").unwrap();
    assert_eq!(
        attributes,
        format!("Path={base}/; HttpOnly; Secure; SameSite=Lax")
    );
    assert_eq!(backend.connections(), 0);
    let answer = ask(&world, &format!("{base}/p?a=1"), &[("cookie", cookie)]).await;
    assert!(answer.body.starts_with("GET /p?a=1\n"), "{}", answer.body);
    assert!(!answer.body.contains(&token), "{}", answer.body);
    let other = format!("/router/{NS}/other/{}/p", backend.port);
    assert_eq!(ask(&world, &other, &[("cookie", cookie)]).await.status, 403);
    let foreign = [("cookie", cookie), ("origin", "https://evil.dev")];
    assert_eq!(
        ask(&world, &format!("{base}/p"), &foreign).await.status,
        403
    );
}

#[tokio::test]
async fn a_websocket_opens_by_a_path_and_a_cookie() {
    let ((world, token), backend) = (closed().await, websocket().await);
    let base = base(backend.port);
    let mut page = Raw::open(&world).await;
    page.write(format!(
        "GET {base}/ws HTTP/1.1\r\nHost: outside.dev\r\nOrigin: https://outside.dev\r\nCookie: session={token}\r\nConnection: Upgrade\r\n\
         Upgrade: websocket\r\nSec-WebSocket-Key: k\r\nSec-WebSocket-Version: 13\r\n\r\n"
    ))
    .await;
    let head = page.read_until("\r\n\r\n").await;
    assert!(head.starts_with("HTTP/1.1 101 "), "{head}");
    page.write("hello").await;
    assert_eq!(page.read_until("hello").await, "hello");
}
