//! Uploads and downloads of the legacy API.

use std::{
    fs,
    io::{Read as _, Write as _},
    os::unix::fs::symlink,
};

use rstest::rstest;
use serde_json::json;

use crate::world::{Runtime, answer, form_end, form_head, form_kind, send_chunked, until};

/// File size, many times the memory that the process may use.
const LARGE: usize = 256 << 20;
const PIECE: usize = 1 << 20;

#[test]
fn a_file_is_uploaded_listed_and_downloaded() {
    let runtime = Runtime::start(&[]);
    fs::create_dir(runtime.file("sub")).unwrap();
    let content: Vec<u8> = (0..=255).cycle().take(100_000).collect();
    let answer = runtime.upload("sub/a b.bin", &content);
    assert_eq!(answer.status, 200);
    let message = "File 'sub/a b.bin' uploaded successfully.";
    assert_eq!(answer.json(), json!({"message": message}));
    let there = runtime.get("/exists/sub%2Fa%20b.bin");
    assert_eq!(there.json(), json!({"path": "sub/a b.bin", "exists": true}));
    let missing = runtime.get("/exists/b");
    assert_eq!(
        (missing.status, missing.json()),
        (200, json!({"path": "b", "exists": false}))
    );
    let listing = runtime.get("/list/sub").json();
    assert_eq!(listing.as_array().unwrap().len(), 1);
    assert!(listing[0]["mod_time"].is_f64());
    assert_eq!(
        (
            &listing[0]["name"],
            &listing[0]["size"],
            &listing[0]["type"]
        ),
        (&json!("a b.bin"), &json!(100_000), &json!("file"))
    );
    assert_eq!(runtime.get("/list/%2F").json()[0]["type"], "directory");
    assert_eq!(runtime.get("/list/").json()[0]["name"], "sub");
    let out = runtime.get("/download/sub%2Fa%20b.bin");
    assert_eq!((out.status, out.body == content), (200, true));
    assert!(out.head.contains("content-type: application/octet-stream"));
    assert!(
        out.head.contains("filename*=utf-8''sub/a%20b.bin"),
        "{}",
        out.head
    );
}

#[rstest]
#[case("/download/missing", 404, "File not found")]
#[case("/download/sub", 404, "File not found")]
#[case("/download/pipe", 404, "File not found")]
#[case("/list/missing", 404, "Path is not a directory")]
#[case("/list/file", 404, "Path is not a directory")]
#[case("/download/..%2Fsecret", 403, "Access denied")]
#[case("/download/../secret", 403, "Access denied")]
#[case("/download/%252e%252e%252fsecret", 403, "Access denied")]
#[case("/download/file%00", 403, "Access denied")]
#[case("/download/out", 403, "Access denied")]
#[case("/list/sub%2F..%2F..", 403, "Access denied")]
#[case("/list/out-dir", 403, "Access denied")]
#[case("/exists/..", 403, "Access denied")]
#[case("/exists/out", 403, "Access denied")]
fn a_missing_path_or_one_outside_is_refused(
    #[case] path: &str,
    #[case] status: u16,
    #[case] message: &str,
) {
    let runtime = Runtime::start(&[]);
    let root = runtime.file("");
    fs::write(runtime.file("../secret"), "secret").unwrap();
    fs::write(runtime.file("file"), "").unwrap();
    fs::create_dir(runtime.file("sub")).unwrap();
    symlink("../secret", root.join("out")).unwrap();
    symlink("/", root.join("out-dir")).unwrap();
    assert_eq!(runtime.execute("mkfifo pipe")["exit_code"], 0);
    let answer = runtime.get(path);
    assert_eq!(
        (answer.status, answer.json()),
        (status, json!({"message": message}))
    );
}

#[test]
fn an_absolute_path_is_relative_to_the_root() {
    let runtime = Runtime::start(&[]);
    assert_eq!(runtime.upload("/file", b"x").status, 200);
    assert_eq!(fs::read(runtime.file("file")).unwrap(), b"x");
    assert_eq!(
        runtime.get("/exists/%2Fetc%2Fpasswd").json()["exists"],
        false
    );
}

#[rstest]
#[case("../new", 403, "Access denied")]
#[case("out", 403, "Access denied")]
#[case("missing/new", 500, "File upload failed: no such file or directory")]
#[case("sub", 500, "File upload failed: not a regular file")]
fn an_upload_to_an_invalid_path_is_refused(
    #[case] name: &str,
    #[case] status: u16,
    #[case] message: &str,
) {
    let runtime = Runtime::start(&[]);
    fs::create_dir(runtime.file("sub")).unwrap();
    symlink("../new", runtime.file("out")).unwrap();
    let answer = runtime.upload(name, b"x");
    assert_eq!(
        (answer.status, answer.json()),
        (status, json!({"message": message}))
    );
    assert!(!runtime.file("../new").exists());
}

#[test]
fn a_form_without_the_file_is_refused() {
    let runtime = Runtime::start(&[]);
    let other = [form_head("other", "a"), form_end()].concat();
    assert_eq!(
        runtime.send("POST /upload", &form_kind(), &other).status,
        422
    );
    assert_eq!(runtime.send("POST /upload", "text/plain", b"x").status, 422);
    assert_eq!(runtime.send("POST /upload", &form_kind(), b"x").status, 400);
    let open = form_head("file", "a");
    assert_eq!(
        runtime.send("POST /upload", &form_kind(), &open).status,
        400
    );
    assert_eq!(fs::read_dir(runtime.file("")).unwrap().count(), 0);
}

#[test]
fn an_upload_that_is_too_large_is_refused_with_and_without_a_length() {
    let runtime = Runtime::start(&["--max-upload-bytes=1000"]);
    assert_eq!(runtime.upload("a", &[0; 2000]).status, 413);
    let head = format!("POST /upload HTTP/1.1\r\nContent-Type: {}", form_kind());
    let mut stream = runtime.open(&format!("{head}\r\nTransfer-Encoding: chunked"));
    let body = [form_head("file", "a"), vec![0; 2000], form_end()].concat();
    send_chunked(&mut stream, &body);
    assert_eq!(answer(&mut stream).status, 413);
    assert_eq!(fs::read_dir(runtime.file("")).unwrap().count(), 0);
}

#[test]
fn an_interrupted_upload_leaves_the_old_file() {
    let runtime = Runtime::start(&[]);
    fs::write(runtime.file("a"), "old").unwrap();
    let head = format!("POST /upload HTTP/1.1\r\nContent-Type: {}", form_kind());
    let mut stream = runtime.open(&format!("{head}\r\nContent-Length: 1000000"));
    let begun = [b"\r\n".to_vec(), form_head("file", "a"), vec![0; 100_000]].concat();
    stream.write_all(&begun).unwrap();
    let count = || fs::read_dir(runtime.file("")).unwrap().count();
    until("the upload to begin", || count() == 2);
    drop(stream);
    until("the upload to be given up", || count() == 1);
    assert_eq!(fs::read(runtime.file("a")).unwrap(), b"old");
}

#[test]
fn a_large_file_is_transferred_without_being_held_in_memory() {
    let runtime = Runtime::start(&[]);
    let (head, end) = (form_head("file", "large"), form_end());
    let length = head.len() + LARGE + end.len();
    let kind = form_kind();
    let mut stream = runtime.open(&format!(
        "POST /upload HTTP/1.1\r\nContent-Type: {kind}\r\nContent-Length: {length}"
    ));
    stream.write_all(&[b"\r\n", &head[..]].concat()).unwrap();
    let piece: Vec<u8> = (0..=250).cycle().take(PIECE).collect();
    for _ in 0..LARGE / PIECE {
        stream.write_all(&piece).unwrap();
    }
    stream.write_all(&end).unwrap();
    assert_eq!(answer(&mut stream).status, 200);
    let mut stream = runtime.open("GET /download/large HTTP/1.1");
    stream.write_all(b"\r\n").unwrap();
    let mut answer = Vec::new();
    let mut byte = [0];
    while !answer.ends_with(b"\r\n\r\n") {
        stream.read_exact(&mut byte).unwrap();
        answer.push(byte[0]);
    }
    let mut read = vec![0; PIECE];
    for _ in 0..LARGE / PIECE {
        stream.read_exact(&mut read).unwrap();
        assert!(read == piece);
    }
    assert_eq!(stream.read(&mut byte).unwrap(), 0);
    assert!(
        runtime.peak_memory() < 64 * 1024,
        "{} KiB",
        runtime.peak_memory()
    );
}
