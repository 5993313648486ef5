//! Calls that need a token.

use std::{fs, io::Write as _, process::Command};

use rstest::rstest;
use serde_json::json;
use tonic::{Code, metadata::MetadataValue};
use tonic_reflection::pb::v1::{
    ServerReflectionRequest, server_reflection_client::ServerReflectionClient,
};
use torpor_runtime::proto::{
    process::{ExecuteRequest, StartRequest},
    watcher::{WatchDirRequest, file_watcher_service_client::FileWatcherServiceClient},
};

use crate::{
    client::{Client, channel, connect, shell, soon},
    world::{Answer, PROGRAM, Runtime, answer, open},
};

const TOKEN: &str = "s3cret-of-this-sandbox";

fn closed() -> Runtime {
    Runtime::start_with("SANDBOXD_AUTH_TOKEN", TOKEN)
}

fn bearer(token: &str) -> String {
    format!("\r\nAuthorization: Bearer {token}")
}

/// Sends a request to the REST API, or to the legacy one.
fn call(runtime: &Runtime, legacy: bool, line: &str, headers: &str) -> Answer {
    let address = match legacy {
        true => runtime.address,
        false => runtime.rest,
    };
    let mut stream = open(address, &format!("{line} HTTP/1.1{headers}"));
    stream.write_all(b"\r\n").unwrap();
    answer(&mut stream)
}

#[rstest]
#[case("GET /v1/files/file")]
#[case("GET /v1/files/file?stat=true")]
#[case("DELETE /v1/files/file")]
#[case("GET /v1/metadata")]
#[case("PUT /v1/busy")]
#[case("GET /v1/health/")]
#[case("GET //v1/health")]
#[case("GET /v1/health%2F..%2Ffiles")]
#[case("GET /nothing")]
fn a_rest_call_without_the_token_is_refused_and_changes_nothing(#[case] line: &str) {
    let runtime = closed();
    fs::write(runtime.file("file"), "x").unwrap();
    for headers in [String::new(), bearer("wrong"), bearer("")] {
        let refused = call(&runtime, false, line, &headers);
        assert_eq!(
            (refused.status, &refused.json()["code"]),
            (401, &json!("UNAUTHENTICATED")),
            "{headers}"
        );
        assert!(refused.head.contains("www-authenticate: Bearer"));
    }
    assert!(runtime.file("file").exists());
}

#[test]
fn calls_with_the_token_and_probes_without_it_are_accepted() {
    let runtime = closed();
    fs::write(runtime.file("file"), "x").unwrap();
    let got = call(&runtime, false, "GET /v1/files/file", &bearer(TOKEN));
    assert_eq!((got.status, &got.body[..]), (200, &b"x"[..]));
    assert_eq!(call(&runtime, false, "GET /v1/health", "").status, 200);
    assert_eq!(call(&runtime, true, "GET /", "").status, 200);
    let told = call(&runtime, false, "GET /v1/metadata", &bearer(TOKEN));
    assert!(!String::from_utf8_lossy(&told.body).contains(TOKEN));
}

/// An open legacy API would make the token of the other APIs useless.
#[test]
fn the_legacy_api_needs_the_token_too() {
    let runtime = closed();
    fs::write(runtime.file("file"), "x").unwrap();
    for line in [
        "GET /list/",
        "GET /download/file",
        "POST /execute",
        "POST /upload",
    ] {
        let refused = call(&runtime, true, line, &bearer("wrong"));
        assert_eq!(refused.status, 401, "{line}");
        assert_eq!(refused.json(), json!({"detail": "invalid bearer token"}));
    }
    assert_eq!(
        call(&runtime, true, "GET /list/", &bearer(TOKEN)).status,
        200
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn grpc_calls_need_the_token() {
    let runtime = closed();
    let mut client: Client = connect(&runtime).await;
    let config = shell("echo ran > ran");
    let asked = ExecuteRequest {
        config: config.clone(),
    };
    let executed = soon(client.execute(asked.clone())).await;
    assert_eq!(executed.unwrap_err().code(), Code::Unauthenticated);
    let started = soon(client.start(StartRequest { config, pty: None })).await;
    assert_eq!(started.unwrap_err().code(), Code::Unauthenticated);
    let mut watcher = FileWatcherServiceClient::new(channel(&runtime).await);
    let watched = soon(watcher.watch_dir(WatchDirRequest::default())).await;
    assert_eq!(watched.unwrap_err().code(), Code::Unauthenticated);
    let mut reflection = ServerReflectionClient::new(channel(&runtime).await);
    let question = futures::stream::iter([ServerReflectionRequest::default()]);
    let described = soon(reflection.server_reflection_info(question)).await;
    assert_eq!(described.unwrap_err().code(), Code::Unauthenticated);
    assert!(!runtime.file("ran").exists());

    let mut request = tonic::Request::new(asked);
    let token = MetadataValue::try_from(format!("Bearer {TOKEN}")).unwrap();
    request.metadata_mut().insert("authorization", token);
    assert_eq!(
        soon(client.execute(request))
            .await
            .unwrap()
            .get_ref()
            .exit_code,
        0
    );
    assert!(runtime.file("ran").exists());
}

#[test]
fn a_token_in_a_file_may_change_at_run_time() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("token");
    fs::write(&path, "one\n").unwrap();
    let runtime = Runtime::start(&[&format!("--auth-token-file={}", path.display())]);
    let status = |token| call(&runtime, false, "GET /v1/metadata", &bearer(token)).status;
    assert_eq!((status("one"), status("two")), (200, 401));
    fs::write(&path, "two\n").unwrap();
    assert_eq!((status("one"), status("two")), (401, 200));
    fs::remove_file(&path).unwrap();
    assert_eq!((status("one"), status("two")), (401, 401));
}

/// The APIs are not served then, and the user's program does not start.
#[rstest]
#[case(&[], Some(""))]
#[case(&["--auth-token-file=missing"], None)]
#[case(&["--auth-token-file="], Some("good"))]
fn an_unreadable_token_ends_the_runtime_at_its_start(
    #[case] flags: &[&str],
    #[case] variable: Option<&str>,
) {
    let directory = tempfile::tempdir().unwrap();
    let mut command = Command::new(PROGRAM);
    command.current_dir(directory.path()).args(flags);
    command.args(["run", "--", "touch", "started"]);
    if let Some(variable) = variable {
        command.env("SANDBOXD_AUTH_TOKEN", variable);
    }
    let ended = command.output().unwrap();
    assert!(!ended.status.success());
    let told = String::from_utf8_lossy(&ended.stderr);
    assert!(told.contains("token"), "{told}");
    assert!(!directory.path().join("started").exists());
}
