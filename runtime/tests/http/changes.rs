//! Calls of sandboxd's REST API other than read: description, creation, moves and copies.

use std::{
    fs,
    os::unix::fs::{PermissionsExt as _, symlink},
};

use rstest::rstest;
use serde_json::{Value, json};

use crate::{
    rest::{call, plain, refused},
    world::Runtime,
};

/// Starts a runtime whose root has a file, a directory with a file, and links that lead out.
fn world() -> Runtime {
    let runtime = Runtime::start(&["--max-upload-bytes=1000"]);
    fs::write(runtime.file("../secret"), "secret").unwrap();
    fs::write(runtime.file("file"), "content").unwrap();
    fs::create_dir(runtime.file("sub")).unwrap();
    fs::write(runtime.file("sub/b"), "b").unwrap();
    symlink("../secret", runtime.file("out")).unwrap();
    symlink("/", runtime.file("out-dir")).unwrap();
    runtime
}

#[test]
fn a_path_is_described_as_an_entry_of_a_listing() {
    let runtime = world();
    fs::set_permissions(runtime.file("file"), fs::Permissions::from_mode(0o640)).unwrap();
    let mut told = plain(&runtime, "GET /v1/files/file?stat=true").json();
    let time = told["modified_at"].take();
    time.as_str().unwrap().parse::<jiff::Timestamp>().unwrap();
    assert_eq!(
        told,
        json!({"name": "file", "size": 7, "type": "file", "mode": "0640", "modified_at": null})
    );
    let listed = plain(&runtime, "GET /v1/files/").json();
    assert_eq!(listed["entries"][0]["modified_at"], time);
    let told = plain(&runtime, "GET /v1/files/sub?stat=1").json();
    assert_eq!(
        (&told["name"], &told["type"]),
        (&json!("sub"), &json!("directory"))
    );
    let told = plain(&runtime, "GET /v1/files/?stat=true").json();
    assert_eq!(
        (&told["name"], &told["type"]),
        (&json!("/"), &json!("directory"))
    );
}

#[test]
fn a_directory_is_listed_recursively() {
    let runtime = world();
    fs::create_dir_all(runtime.file("sub/c/d")).unwrap();
    fs::write(runtime.file("sub/c/d/e"), "12").unwrap();
    symlink("c", runtime.file("sub/link")).unwrap();
    let listed = plain(&runtime, "GET /v1/files/sub?recursive=true").json();
    assert_eq!(listed["path"], "/sub");
    let entry = |entry: &Value| (entry["name"].clone(), entry["type"].clone());
    let entries = listed["entries"].as_array().unwrap();
    let entries: Vec<_> = entries.iter().map(entry).collect();
    let expected = [
        ("b", "file"),
        ("c", "directory"),
        ("c/d", "directory"),
        ("c/d/e", "file"),
        ("link", "directory"),
    ];
    assert_eq!(
        entries,
        expected.map(|(name, kind)| (json!(name), json!(kind)))
    );
    let all = plain(&runtime, "GET /v1/files/?recursive=1").json();
    let all = all.to_string();
    // Entries outside are neither listed nor revealed.
    assert!(!all.contains("out") && !all.contains("secret"), "{all}");
}

#[test]
fn a_write_without_overwrite_replaces_nothing() {
    let runtime = world();
    for (line, headers, status, code) in [
        ("PUT /v1/files/file?overwrite=false", "", 409, "CONFLICT"),
        (
            "PUT /v1/files/file",
            "\r\nIf-None-Match: *",
            412,
            "FAILED_PRECONDITION",
        ),
        (
            "PUT /v1/files/file?overwrite=false",
            "\r\nIf-None-Match: \"tag\"",
            409,
            "CONFLICT",
        ),
    ] {
        let answer = call(&runtime, line, headers, b"new");
        assert_eq!(
            (answer.status, &answer.json()["code"]),
            (status, &json!(code))
        );
    }
    assert_eq!(fs::read(runtime.file("file")).unwrap(), b"content");
    let made = call(&runtime, "PUT /v1/files/x/new?overwrite=false", "", b"new");
    assert_eq!(made.status, 204);
    assert_eq!(fs::read(runtime.file("x/new")).unwrap(), b"new");
    let made = call(
        &runtime,
        "PUT /v1/files/other",
        "\r\nIf-None-Match: *",
        b"new",
    );
    assert_eq!(made.status, 204);
}

#[test]
fn directories_are_created_and_files_are_moved_and_copied() {
    let runtime = world();
    let done = |line: &str| {
        let answer = plain(&runtime, line);
        assert_eq!((answer.status, answer.body.len()), (204, 0), "{line}");
    };
    done("POST /v1/files/made%2Fbelow?op=mkdir&mode=0700");
    done("POST /v1/files/made/below?op=mkdir");
    let mode = fs::metadata(runtime.file("made/below"))
        .unwrap()
        .permissions()
        .mode();
    assert_eq!(mode & 0o7777, 0o700);
    done("POST /v1/files/file?op=copy&to=made%2Ffile");
    done("POST /v1/files/sub?op=copy&to=%2Fmade%2Fsub");
    done("POST /v1/files/made/sub/b?op=move&to=new%2Fb%20c");
    assert_eq!(fs::read(runtime.file("made/file")).unwrap(), b"content");
    assert_eq!(fs::read(runtime.file("new/b c")).unwrap(), b"b");
    assert!(!runtime.file("made/sub/b").exists() && runtime.file("sub/b").exists());
    done("POST /v1/files/new/b%20c?op=move&to=file&overwrite=true");
    assert_eq!(fs::read(runtime.file("file")).unwrap(), b"b");
}

#[rstest]
#[case("GET /v1/files/missing?stat=true", 404, "NOT_FOUND")]
#[case("GET /v1/files/file/below?stat=true", 404, "NOT_FOUND")]
#[case("GET /v1/files/out?stat=true", 403, "PERMISSION_DENIED")]
#[case("GET /v1/files/%2E%2E/secret?stat=true", 403, "PERMISSION_DENIED")]
#[case("GET /v1/files/file?stat=maybe", 400, "INVALID_ARGUMENT")]
#[case("GET /v1/files/missing?recursive=true", 404, "NOT_FOUND")]
#[case("GET /v1/files/file?recursive=true", 400, "INVALID_ARGUMENT")]
#[case("GET /v1/files/out-dir?recursive=true", 403, "PERMISSION_DENIED")]
#[case("GET /v1/files/..?recursive=true", 403, "PERMISSION_DENIED")]
#[case("POST /v1/files/file", 400, "INVALID_ARGUMENT")]
#[case("POST /v1/files/file?op=chmod", 400, "INVALID_ARGUMENT")]
#[case("POST /v1/files/file?op=mkdir", 409, "CONFLICT")]
#[case("POST /v1/files/file/below?op=mkdir", 400, "INVALID_ARGUMENT")]
#[case("POST /v1/files/x?op=mkdir&mode=4755", 400, "INVALID_ARGUMENT")]
#[case("POST /v1/files/out-dir/tmp/x?op=mkdir", 403, "PERMISSION_DENIED")]
#[case("POST /v1/files/%2E%2E%2Fx?op=mkdir", 403, "PERMISSION_DENIED")]
#[case("POST /v1/files/a%00b?op=mkdir", 403, "PERMISSION_DENIED")]
#[case("POST /v1/files/file?op=move", 400, "INVALID_ARGUMENT")]
#[case("POST /v1/files/missing?op=move&to=x", 404, "NOT_FOUND")]
#[case("POST /v1/files/file/below?op=move&to=x", 404, "NOT_FOUND")]
#[case("POST /v1/files/file?op=move&to=sub%2Fb", 409, "CONFLICT")]
#[case("POST /v1/files/file?op=move&to=sub&overwrite=true", 409, "CONFLICT")]
#[case("POST /v1/files/sub?op=move&to=file&overwrite=true", 409, "CONFLICT")]
#[case("POST /v1/files/sub?op=move&to=sub%2Fx%2Fy", 400, "INVALID_ARGUMENT")]
#[case("POST /v1/files/?op=move&to=x", 400, "INVALID_ARGUMENT")]
#[case("POST /v1/files/file?op=move&to=..%2Fx", 403, "PERMISSION_DENIED")]
#[case(
    "POST /v1/files/file?op=move&to=out-dir%2Ftmp%2Fx",
    403,
    "PERMISSION_DENIED"
)]
#[case("POST /v1/files/..%2Fsecret?op=move&to=x", 403, "PERMISSION_DENIED")]
#[case("POST /v1/files/out-dir/etc?op=move&to=x", 403, "PERMISSION_DENIED")]
#[case("POST /v1/files/file?op=move&to=%00", 403, "PERMISSION_DENIED")]
#[case("POST /v1/files/out?op=copy&to=x", 403, "PERMISSION_DENIED")]
#[case("POST /v1/files/out-dir/etc?op=copy&to=x", 403, "PERMISSION_DENIED")]
#[case("POST /v1/files/file?op=copy&to=..%2Fsecret", 403, "PERMISSION_DENIED")]
#[case(
    "POST /v1/files/file?op=copy&to=out-dir%2Ftmp%2Fx",
    403,
    "PERMISSION_DENIED"
)]
#[case("POST /v1/files/file?op=copy&to=sub%2Fb", 409, "CONFLICT")]
#[case("POST /v1/files/sub?op=copy&to=sub%2Fx", 400, "INVALID_ARGUMENT")]
#[case("POST /v1/files/large?op=copy&to=x", 413, "RESOURCE_EXHAUSTED")]
#[case("POST /v1/files/pipe?op=copy&to=x", 400, "INVALID_ARGUMENT")]
fn an_invalid_stat_move_or_copy_is_refused(
    #[case] line: &str,
    #[case] status: u16,
    #[case] code: &str,
) {
    let runtime = world();
    fs::write(runtime.file("large"), [0; 1001]).unwrap();
    assert_eq!(runtime.execute("mkfifo pipe")["exit_code"], 0);
    assert_eq!(refused(&runtime, line, b""), (status, code.to_owned()));
    assert_eq!(fs::read(runtime.file("../secret")).unwrap(), b"secret");
    assert_eq!(fs::read(runtime.file("file")).unwrap(), b"content");
    assert_eq!(fs::read(runtime.file("sub/b")).unwrap(), b"b");
    assert!(!runtime.file("x").exists());
    let left = fs::read_dir(runtime.file("../")).unwrap().count();
    assert_eq!(left, 2);
}

#[test]
fn a_page_of_another_origin_changes_nothing() {
    let runtime = world();
    for site in ["cross-site", "same-site"] {
        let header = format!("\r\nSec-Fetch-Site: {site}");
        let line = "POST /v1/files/made?op=mkdir";
        let answer = call(&runtime, line, &header, b"");
        assert_eq!(
            (answer.status, &answer.json()["code"]),
            (403, &json!("PERMISSION_DENIED"))
        );
        let kind = format!("application/json{header}");
        let body = br#"{"command": "mkdir made"}"#;
        assert_eq!(runtime.send("POST /execute", &kind, body).status, 403);
    }
    assert!(!runtime.file("made").exists());
    let own = "\r\nSec-Fetch-Site: same-origin";
    let answer = call(&runtime, "POST /v1/files/made?op=mkdir", own, b"");
    assert_eq!(answer.status, 204);
}
