//! Files over sandboxd's REST API.

use std::{
    fs,
    io::{Read as _, Write as _},
    os::unix::fs::{PermissionsExt as _, symlink},
    time::{Duration, SystemTime},
};

use rstest::rstest;
use serde_json::{Value, json};

use crate::world::{
    Answer, Runtime, answer, form_end, form_head, form_kind, open, send_chunked, until,
};

/// Sends a request and reads the answer.
pub(crate) fn call(runtime: &Runtime, line: &str, headers: &str, body: &[u8]) -> Answer {
    let length = body.len();
    let head = format!("{line} HTTP/1.1\r\nContent-Length: {length}{headers}");
    let mut stream = open(runtime.rest, &head);
    stream.write_all(b"\r\n").unwrap();
    // The runtime may refuse and close the connection before all is sent.
    let _sent = stream.write_all(body);
    answer(&mut stream)
}

pub(crate) fn plain(runtime: &Runtime, line: &str) -> Answer {
    call(runtime, line, "", b"")
}

/// Sends a request and returns status and code of the refusal.
pub(crate) fn refused(runtime: &Runtime, line: &str, body: &[u8]) -> (u16, String) {
    let answer = call(runtime, line, "", body);
    let told = answer.json();
    assert!(!told["message"].as_str().unwrap().is_empty());
    (answer.status, told["code"].as_str().unwrap().to_owned())
}

#[test]
fn a_file_is_written_read_listed_and_removed() {
    let runtime = Runtime::start(&[]);
    let put = call(
        &runtime,
        "PUT /v1/files/dir%2Fsub%2Frun.sh?mode=0755",
        "",
        b"one",
    );
    assert_eq!((put.status, put.body.len()), (204, 0));
    assert_eq!(
        call(&runtime, "PUT /v1/files/dir/b", "", b"two!").status,
        204
    );
    let file = runtime.file("dir/sub/run.sh");
    assert_eq!(
        fs::metadata(&file).unwrap().permissions().mode() & 0o7777,
        0o755
    );
    let got = plain(&runtime, "GET /v1/files/dir/sub/run.sh");
    assert_eq!((got.status, &got.body[..]), (200, &b"one"[..]));
    for header in [
        "content-type: application/octet-stream",
        "accept-ranges: bytes",
        "last-modified: ",
    ] {
        assert!(got.head.contains(header), "{}", got.head);
    }
    symlink("b", runtime.file("dir/link")).unwrap();
    symlink("../../outside", runtime.file("dir/out")).unwrap();
    symlink("nothing", runtime.file("dir/dangling")).unwrap();
    let listed = plain(&runtime, "GET /v1/files/dir").json();
    assert_eq!(listed["path"], "/dir");
    let named = |entry: &Value| (entry["name"].clone(), entry["type"].clone());
    let names: Vec<_> = listed["entries"]
        .as_array()
        .unwrap()
        .iter()
        .map(named)
        .collect();
    assert_eq!(
        names,
        [("b", "file"), ("link", "file"), ("sub", "directory")].map(|(a, b)| (json!(a), json!(b)))
    );
    assert_eq!(
        (&listed["entries"][0]["size"], &listed["entries"][0]["mode"]),
        (&json!(4), &json!("0644"))
    );
    let time = listed["entries"][0]["modified_at"].as_str().unwrap();
    time.parse::<jiff::Timestamp>().unwrap();
    assert_eq!(plain(&runtime, "DELETE /v1/files/dir/link").status, 204);
    assert!(runtime.file("dir/b").exists());
    assert_eq!(
        refused(&runtime, "DELETE /v1/files/dir", b""),
        (409, "CONFLICT".into())
    );
    assert_eq!(
        plain(&runtime, "DELETE /v1/files/dir?recursive=true").status,
        204
    );
    assert!(!runtime.file("dir").exists());
    assert_eq!(
        refused(&runtime, "DELETE /v1/files/dir", b""),
        (404, "NOT_FOUND".into())
    );
}

#[test]
fn a_file_with_a_time_outside_of_the_range_of_headers_is_sent_without_it() {
    let runtime = Runtime::start(&[]);
    let file = fs::File::create(runtime.file("old")).unwrap();
    // The time of `touch -t 197001010000` in a zone east of Greenwich.
    let before = SystemTime::UNIX_EPOCH - Duration::from_secs(3600);
    file.set_modified(before).unwrap();
    let got = plain(&runtime, "GET /v1/files/old");
    assert_eq!(got.status, 200);
    assert!(!got.head.contains("last-modified"), "{}", got.head);
    assert_eq!(plain(&runtime, "GET /v1/health").status, 200);
}

/// Returns status line and headers, and the number of bytes of a body.
fn head(runtime: &Runtime, path: &str) -> (String, usize) {
    let mut stream = open(runtime.rest, &format!("HEAD {path} HTTP/1.1"));
    stream.write_all(b"\r\n").unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    let (head, body) = text.split_once("\r\n\r\n").unwrap();
    (head.to_owned(), body.len())
}

#[rstest]
#[case("/v1/files/file", "200", "content-length: 5")]
#[case("/v1/files/", "200", "content-type: application/json")]
#[case("/v1/files/missing", "404", "content-type: application/json")]
#[case("/v1/files/..", "403", "content-type: application/json")]
fn a_head_request_reports_existence_without_a_body(
    #[case] path: &str,
    #[case] status: &str,
    #[case] header: &str,
) {
    let runtime = Runtime::start(&[]);
    fs::write(runtime.file("file"), "12345").unwrap();
    let (head, body) = head(&runtime, path);
    assert_eq!((head.split(' ').nth(1), body), (Some(status), 0));
    assert!(head.contains(header), "{head}");
}

#[test]
fn the_root_can_be_emptied_and_not_removed() {
    let runtime = Runtime::start(&[]);
    assert_eq!(
        plain(&runtime, "GET /v1/files/").json(),
        json!({"path": "/", "entries": []})
    );
    assert_eq!(call(&runtime, "PUT /v1/files/a/b", "", b"x").status, 204);
    assert_eq!(
        refused(&runtime, "DELETE /v1/files/", b""),
        (409, "CONFLICT".into())
    );
    assert_eq!(plain(&runtime, "DELETE /v1/files/?recursive=1").status, 204);
    assert_eq!(fs::read_dir(runtime.file("")).unwrap().count(), 0);
}

#[rstest]
#[case("GET /v1/files/missing", 404, "NOT_FOUND")]
#[case("GET /v1/files/file/below", 404, "NOT_FOUND")]
#[case("DELETE /v1/files/file/below", 404, "NOT_FOUND")]
#[case("DELETE /v1/files/missing?recursive=banana", 404, "NOT_FOUND")]
#[case("DELETE /v1/files/file?recursive=banana", 400, "INVALID_ARGUMENT")]
#[case("PUT /v1/files/file?mode=0999", 400, "INVALID_ARGUMENT")]
#[case("PUT /v1/files/sub", 400, "INVALID_ARGUMENT")]
#[case("PUT /v1/files/file/below", 400, "INVALID_ARGUMENT")]
#[case("GET /v1/files/pipe", 400, "INVALID_ARGUMENT")]
#[case("GET /v1/files/..%2Fsecret", 403, "PERMISSION_DENIED")]
#[case("GET /v1/files/../secret", 403, "PERMISSION_DENIED")]
#[case("GET /v1/files/%2E%2E/secret", 403, "PERMISSION_DENIED")]
#[case("GET /v1/files/file%00", 403, "PERMISSION_DENIED")]
#[case("GET /v1/files/out", 403, "PERMISSION_DENIED")]
#[case("GET /v1/files/out-dir%2Fetc", 403, "PERMISSION_DENIED")]
#[case("PUT /v1/files/%2E%2E/secret", 403, "PERMISSION_DENIED")]
#[case("PUT /v1/files/out", 403, "PERMISSION_DENIED")]
#[case("PUT /v1/files/out-dir/tmp/x/y", 403, "PERMISSION_DENIED")]
#[case("PUT /v1/files/a%00b", 403, "PERMISSION_DENIED")]
#[case("DELETE /v1/files/%2E%2E/secret", 403, "PERMISSION_DENIED")]
#[case("DELETE /v1/files/out-dir/tmp", 403, "PERMISSION_DENIED")]
#[case(
    "DELETE /v1/files/sub%2F..%2F..%2Fsecret?recursive=true",
    403,
    "PERMISSION_DENIED"
)]
fn an_impossible_call_is_refused(#[case] line: &str, #[case] status: u16, #[case] code: &str) {
    let runtime = Runtime::start(&[]);
    fs::write(runtime.file("../secret"), "secret").unwrap();
    fs::write(runtime.file("file"), "").unwrap();
    fs::create_dir(runtime.file("sub")).unwrap();
    symlink("../secret", runtime.file("out")).unwrap();
    symlink("/", runtime.file("out-dir")).unwrap();
    assert_eq!(runtime.execute("mkfifo pipe")["exit_code"], 0);
    assert_eq!(refused(&runtime, line, b"new"), (status, code.to_owned()));
    assert_eq!(fs::read(runtime.file("../secret")).unwrap(), b"secret");
}

#[test]
fn an_absolute_path_is_relative_to_the_root() {
    let runtime = Runtime::start(&[]);
    assert_eq!(
        call(&runtime, "PUT /v1/files/%2Fetc%2Fpasswd", "", b"x").status,
        204
    );
    assert_eq!(fs::read(runtime.file("etc/passwd")).unwrap(), b"x");
}

#[rstest]
#[case("GET /", 404, "404 page not found\n")]
#[case("GET /v1/nothing", 404, "404 page not found\n")]
#[case("PATCH /v1/files/a", 405, "Method Not Allowed\n")]
#[case("DELETE /v1/health", 405, "Method Not Allowed\n")]
fn an_unknown_call_is_refused(#[case] line: &str, #[case] status: u16, #[case] body: &str) {
    let runtime = Runtime::start(&[]);
    let answer = plain(&runtime, line);
    assert_eq!((answer.status, &answer.body[..]), (status, body.as_bytes()));
}

#[rstest]
#[case("Range: bytes=1-3", 206, "bcd", Some("bytes 1-3/6"))]
#[case("Range: bytes=-2", 206, "ef", Some("bytes 4-5/6"))]
#[case(
    "Range: bytes=9-",
    416,
    "invalid range: failed to overlap\n",
    Some("bytes */6")
)]
#[case("Range: lines=1", 416, "invalid range\n", None)]
#[case("If-None-Match: *", 304, "", None)]
#[case("If-Match: \"a\"", 412, "", None)]
fn a_part_of_a_file_is_sent(
    #[case] header: &str,
    #[case] status: u16,
    #[case] body: &str,
    #[case] range: Option<&str>,
) {
    let runtime = Runtime::start(&[]);
    fs::write(runtime.file("file"), "abcdef").unwrap();
    let answer = call(
        &runtime,
        "GET /v1/files/file",
        &format!("\r\n{header}"),
        b"",
    );
    assert_eq!(
        (answer.status, String::from_utf8_lossy(&answer.body)),
        (status, body.into())
    );
    let told = answer
        .head
        .lines()
        .find_map(|line| line.strip_prefix("content-range: "));
    assert_eq!(told, range);
}

#[test]
fn several_parts_are_sent_as_one_body() {
    let runtime = Runtime::start(&[]);
    fs::write(runtime.file("file"), "abcdef").unwrap();
    let answer = call(
        &runtime,
        "GET /v1/files/file",
        "\r\nRange: bytes=0-1,4-4",
        b"",
    );
    assert_eq!(answer.status, 206);
    let kind = answer
        .head
        .split("content-type: multipart/byteranges; boundary=")
        .nth(1);
    let boundary = kind.unwrap().lines().next().unwrap();
    let part = |range: &str, body: &str| {
        let kind = "application/octet-stream";
        format!(
            "--{boundary}\r\nContent-Range: bytes {range}/6\r\nContent-Type: {kind}\r\n\r\n{body}\r\n"
        )
    };
    let expected = format!(
        "{}{}--{boundary}--\r\n",
        part("0-1", "ab"),
        part("4-4", "e")
    );
    assert_eq!(String::from_utf8_lossy(&answer.body), expected);
}

#[test]
fn a_file_may_be_sent_as_a_form() {
    let runtime = Runtime::start(&[]);
    let kind = format!("\r\nContent-Type: {}", form_kind());
    let form = [form_head("file", "any"), b"content".to_vec(), form_end()].concat();
    assert_eq!(call(&runtime, "PUT /v1/files/a", &kind, &form).status, 204);
    assert_eq!(fs::read(runtime.file("a")).unwrap(), b"content");
    let other = [form_head("other", "any"), form_end()].concat();
    let refused = call(&runtime, "PUT /v1/files/b", &kind, &other);
    assert_eq!(
        (refused.status, &refused.json()["code"]),
        (400, &json!("INVALID_ARGUMENT"))
    );
    let broken = call(&runtime, "PUT /v1/files/b", &kind, b"no form");
    assert_eq!(broken.status, 400);
    assert_eq!(fs::read_dir(runtime.file("")).unwrap().count(), 1);
}

#[test]
fn a_body_that_is_too_large_is_refused_with_and_without_a_length() {
    let runtime = Runtime::start(&["--max-upload-bytes=1000"]);
    assert_eq!(
        refused(&runtime, "PUT /v1/files/a", &[0; 1001]),
        (413, "RESOURCE_EXHAUSTED".into())
    );
    let kind = form_kind();
    for (kind, body) in [
        ("text/plain", vec![0; 1001]),
        (
            &kind,
            [form_head("file", "a"), vec![0; 1001], form_end()].concat(),
        ),
    ] {
        let head = format!("PUT /v1/files/a HTTP/1.1\r\nContent-Type: {kind}");
        let mut stream = open(
            runtime.rest,
            &format!("{head}\r\nTransfer-Encoding: chunked"),
        );
        send_chunked(&mut stream, &body);
        assert_eq!(answer(&mut stream).status, 413);
    }
    assert_eq!(fs::read_dir(runtime.file("")).unwrap().count(), 0);
}

#[test]
fn an_interrupted_body_leaves_the_old_file() {
    let runtime = Runtime::start(&["--read-body-timeout=300ms"]);
    fs::write(runtime.file("a"), "old").unwrap();
    let head = "PUT /v1/files/a HTTP/1.1\r\nContent-Length: 1000000";
    let count = || fs::read_dir(runtime.file("")).unwrap().count();
    let mut stream = open(runtime.rest, head);
    stream.write_all(b"\r\nbegun").unwrap();
    until("the upload to begin", || count() == 2);
    drop(stream);
    until("the upload to be given up", || count() == 1);
    let mut stream = open(runtime.rest, head);
    stream.write_all(b"\r\nbegun").unwrap();
    let slow = answer(&mut stream);
    assert_eq!(
        (slow.status, &slow.json()["code"]),
        (408, &json!("DEADLINE_EXCEEDED"))
    );
    until("the upload to be given up", || count() == 1);
    assert_eq!(fs::read(runtime.file("a")).unwrap(), b"old");
}

#[test]
fn a_missing_head_ends_the_connection_at_the_time_limit() {
    let runtime = Runtime::start(&["--read-header-timeout=200ms"]);
    let mut stream = open(runtime.rest, "GET /v1/health HTTP/1.1");
    let mut rest = Vec::new();
    let _ended = stream.read_to_end(&mut rest);
    assert!(!String::from_utf8_lossy(&rest).contains("200 OK"));
}

#[test]
fn health_and_metadata_are_served() {
    let runtime = Runtime::start(&[]);
    let health = plain(&runtime, "GET /v1/health").json();
    assert_eq!(health["status"], "ok");
    assert!(health["uptime_seconds"].as_u64().unwrap() < 60);
    let told = plain(&runtime, "GET /v1/metadata").json();
    let names = ["SANDBOX_ID", "SANDBOX_API_TOKEN", "PATH"];
    let values = names.map(|name| told["env"].get(name).cloned());
    assert_eq!(values, [Some(json!("one")), None, None]);
}

/// The end-to-end test shows that the mark keeps a sandbox awake, and for how long.
#[test]
fn a_busy_call_without_a_volume_names_the_missing_volume() {
    let runtime = Runtime::start(&["--busy-dir=."]);
    let told = plain(&runtime, "GET /v1/busy").json();
    assert_eq!(told, json!({"busy": false, "seconds_left": 0.0}));
    let answer = plain(&runtime, "PUT /v1/busy?for=5s");
    assert_eq!(answer.status, 501);
    let told = answer.json();
    assert_eq!(told["code"], "FAILED_PRECONDITION");
    let message = told["message"].as_str().unwrap();
    assert!(message.contains("emptyDir of the name torpor"), "{message}");
    assert_eq!(
        refused(&runtime, "PUT /v1/busy?for=48h", b""),
        (400, "INVALID_ARGUMENT".into())
    );
    assert_eq!(plain(&runtime, "DELETE /v1/busy").status, 204);
}
