//! Tar archives that are unpacked by sandboxd's REST API.

use std::{
    fs,
    io::Write as _,
    os::unix::fs::{MetadataExt as _, PermissionsExt as _, symlink},
};

use rstest::rstest;
use serde_json::json;
use tar::{Builder, EntryType, Header};

use crate::{
    rest::{call, refused},
    world::{Answer, Runtime, answer, open, send_chunked, until},
};

const LINE: &str = "POST /v1/files/into?op=extract";

/// Returns a header with an unchecked name and link name.
fn header(kind: EntryType, path: &[u8], link: &[u8], size: u64) -> Header {
    let mut header = Header::new_gnu();
    header.set_entry_type(kind);
    header.set_mode(0o4755);
    header.set_size(size);
    let old = header.as_old_mut();
    old.name[..path.len()].copy_from_slice(path);
    old.linkname[..link.len()].copy_from_slice(link);
    header.set_cksum();
    header
}

fn entry(kind: EntryType, path: &str, link: &str, content: &[u8]) -> (Header, Vec<u8>) {
    let size = content.len() as u64;
    let header = header(kind, path.as_bytes(), link.as_bytes(), size);
    (header, content.to_vec())
}

fn file(path: &str, content: &str) -> (Header, Vec<u8>) {
    entry(EntryType::Regular, path, "", content.as_bytes())
}

fn archive(entries: &[(Header, Vec<u8>)]) -> Vec<u8> {
    let mut builder = Builder::new(Vec::new());
    for (header, content) in entries {
        builder.append(header, &content[..]).unwrap();
    }
    builder.into_inner().unwrap()
}

fn extract(runtime: &Runtime, archive: &[u8]) -> Answer {
    call(
        runtime,
        LINE,
        "\r\nContent-Type: application/x-tar",
        archive,
    )
}

/// Starts a runtime with a file `outside/secret` beside its root.
fn world(flags: &[&str]) -> Runtime {
    let runtime = Runtime::start(flags);
    fs::create_dir(runtime.file("../outside")).unwrap();
    fs::write(runtime.file("../outside/secret"), "secret").unwrap();
    runtime
}

#[test]
fn an_archive_becomes_files_directories_and_links() {
    let runtime = world(&[]);
    fs::create_dir(runtime.file("into")).unwrap();
    fs::write(runtime.file("into/old"), "old").unwrap();
    symlink("../outside/secret", runtime.file("into/was-link")).unwrap();
    let long = "n".repeat(150);
    let mut builder = Builder::new(Vec::new());
    for (header, content) in [
        entry(EntryType::Directory, "./", "", b""),
        entry(EntryType::Directory, "dir/", "", b""),
        file("dir/a", "a"),
        file("made/on/the/way", "way"),
        file("old", "new"),
        file("was-link", "file"),
        entry(EntryType::Symlink, "dir/link", "../old", b""),
        entry(EntryType::Link, "hard", "dir/a", b""),
        entry(
            EntryType::XGlobalHeader,
            "pax_global_header",
            "",
            b"20 comment=a commit\n",
        ),
    ] {
        builder.append(&header, &content[..]).unwrap();
    }
    // Long names in the formats of GNU and pax.
    let mut header = Header::new_gnu();
    header.set_size(4);
    header.set_mode(0o600);
    builder
        .append_data(&mut header, &long, &b"long"[..])
        .unwrap();
    let pax = format!("pax/{long}");
    builder
        .append_pax_extensions([("path", pax.as_bytes())])
        .unwrap();
    let (header, content) = file("short", "pax");
    builder.append(&header, &content[..]).unwrap();
    let extracted = extract(&runtime, &builder.into_inner().unwrap());
    assert_eq!(
        (extracted.status, extracted.json()),
        (200, json!({"entries": 10}))
    );

    let read = |path: &str| fs::read_to_string(runtime.file(&format!("into/{path}"))).unwrap();
    assert_eq!(
        (read("dir/a"), read("made/on/the/way")),
        ("a".into(), "way".into())
    );
    assert_eq!(
        (read("old"), read("dir/link")),
        ("new".into(), "new".into())
    );
    assert_eq!((read(&long), read(&pax)), ("long".into(), "pax".into()));
    assert_eq!(read("was-link"), "file");
    assert!(!runtime.file("into/was-link").is_symlink());
    let kind = |path: &str| fs::metadata(runtime.file(&format!("into/{path}"))).unwrap();
    assert_eq!(kind("hard").ino(), kind("dir/a").ino());
    // Only permission bits are kept, not set-user-ID.
    assert_eq!(kind("dir/a").permissions().mode() & 0o7777, 0o755);
    assert_eq!(kind("dir").permissions().mode() & 0o7777, 0o755);
    assert_eq!(
        fs::read(runtime.file("../outside/secret")).unwrap(),
        b"secret"
    );
}

#[test]
fn an_archive_may_be_sent_in_chunks_without_a_length() {
    let runtime = world(&[]);
    let content = "x".repeat(300_000);
    let body = archive(&[file("large", &content), file("after", "1")]);
    let mut stream = open(
        runtime.rest,
        &format!("{LINE} HTTP/1.1\r\nTransfer-Encoding: chunked"),
    );
    send_chunked(&mut stream, &body);
    assert_eq!(answer(&mut stream).status, 200);
    assert_eq!(
        fs::read_to_string(runtime.file("into/large")).unwrap(),
        content
    );
    assert_eq!(extract(&runtime, b"").json(), json!({"entries": 0}));
}

#[rstest]
#[case::absolute(file("/abs", "x"), 403, "PERMISSION_DENIED")]
#[case::up(file("../up", "x"), 403, "PERMISSION_DENIED")]
#[case::winding(file("ok/../../up", "x"), 403, "PERMISSION_DENIED")]
#[case::within(file("a/../b", "x"), 403, "PERMISSION_DENIED")]
#[case::through_a_link(file("out-dir/new", "x"), 400, "INVALID_ARGUMENT")]
#[case::through_a_link_within(file("in-dir/new", "x"), 400, "INVALID_ARGUMENT")]
#[case::below_a_file(file("ok/below", "x"), 400, "INVALID_ARGUMENT")]
#[case::over_a_directory(file("dir", "x"), 400, "INVALID_ARGUMENT")]
#[case::the_directory_itself(file(".", "x"), 400, "INVALID_ARGUMENT")]
#[case::directory_over_a_link(entry(EntryType::Directory, "out-dir", "", b""), 409, "CONFLICT")]
#[case::link_absolute(
    entry(EntryType::Symlink, "l", "/etc/passwd", b""),
    403,
    "PERMISSION_DENIED"
)]
#[case::link_up(
    entry(EntryType::Symlink, "l", "../outside", b""),
    403,
    "PERMISSION_DENIED"
)]
#[case::link_winding(
    entry(EntryType::Symlink, "d/l", "x/../../../outside", b""),
    403,
    "PERMISSION_DENIED"
)]
#[case::link_nowhere(entry(EntryType::Symlink, "l", "", b""), 403, "PERMISSION_DENIED")]
#[case::hard_link_absolute(
    entry(EntryType::Link, "h", "/etc/passwd", b""),
    403,
    "PERMISSION_DENIED"
)]
#[case::hard_link_up(
    entry(EntryType::Link, "h", "../../outside/secret", b""),
    403,
    "PERMISSION_DENIED"
)]
#[case::hard_link_to_a_link(entry(EntryType::Link, "h", "out", b""), 400, "INVALID_ARGUMENT")]
#[case::hard_link_through_a_link(
    entry(EntryType::Link, "h", "out-dir/secret", b""),
    400,
    "INVALID_ARGUMENT"
)]
#[case::hard_link_to_nothing(entry(EntryType::Link, "h", "missing", b""), 404, "NOT_FOUND")]
#[case::device(entry(EntryType::Char, "null", "", b""), 400, "INVALID_ARGUMENT")]
#[case::block(entry(EntryType::Block, "disk", "", b""), 400, "INVALID_ARGUMENT")]
#[case::pipe(entry(EntryType::Fifo, "pipe", "", b""), 400, "INVALID_ARGUMENT")]
#[case::sparse(
    entry(EntryType::GNUSparse, "sparse", "", b""),
    400,
    "INVALID_ARGUMENT"
)]
#[case::unknown(
    entry(EntryType::new(b'V'), "volume", "", b""),
    400,
    "INVALID_ARGUMENT"
)]
fn an_entry_that_leads_out_or_is_special_ends_the_extraction_and_is_named(
    #[case] hostile: (Header, Vec<u8>),
    #[case] status: u16,
    #[case] code: &str,
) {
    let runtime = world(&[]);
    fs::create_dir_all(runtime.file("into/dir")).unwrap();
    fs::create_dir(runtime.file("in")).unwrap();
    symlink("../../outside", runtime.file("into/out-dir")).unwrap();
    symlink("../../outside/secret", runtime.file("into/out")).unwrap();
    symlink("../in", runtime.file("into/in-dir")).unwrap();
    let name = String::from_utf8_lossy(&hostile.0.path_bytes()).into_owned();
    let extracted = extract(
        &runtime,
        &archive(&[file("ok", "1"), hostile, file("after", "1")]),
    );
    assert_eq!(
        (extracted.status, &extracted.json()["code"]),
        (status, &json!(code))
    );
    let message = extracted.json()["message"].as_str().unwrap().to_owned();
    assert!(
        message.starts_with(&format!("entry {name:?}: ")),
        "{message}"
    );
    assert!(
        message.ends_with("; 1 entries before it were extracted"),
        "{message}"
    );
    assert!(runtime.file("into/ok").exists() && !runtime.file("into/after").exists());
    let outside = fs::read_dir(runtime.file("../outside")).unwrap();
    assert_eq!(outside.count(), 1);
    assert_eq!(
        fs::read(runtime.file("../outside/secret")).unwrap(),
        b"secret"
    );
    assert_eq!(fs::read_dir(runtime.file("in")).unwrap().count(), 0);
    assert!(!runtime.file("up").exists() && !runtime.file("../up").exists());
    // No incomplete file is left.
    let names = fs::read_dir(runtime.file("into")).unwrap();
    let hidden = names.filter(|name| {
        let name = name.as_ref().unwrap().file_name();
        name.to_string_lossy().starts_with(".torpor")
    });
    assert_eq!(hidden.count(), 0);
}

/// A link that the archive itself creates is not followed by later entries, out of the root or
/// within.
#[test]
fn a_link_of_the_archive_is_not_followed() {
    let runtime = world(&[]);
    let extracted = extract(
        &runtime,
        &archive(&[
            entry(EntryType::Directory, "dir", "", b""),
            entry(EntryType::Symlink, "link", "dir", b""),
            file("link/x", "x"),
        ]),
    );
    assert_eq!(extracted.status, 400);
    assert_eq!(fs::read_dir(runtime.file("into/dir")).unwrap().count(), 0);
    // A file may replace the link.
    let extracted = extract(&runtime, &archive(&[file("link", "file")]));
    assert_eq!(extracted.status, 200);
    assert!(!runtime.file("into/link").is_symlink());
}

/// Returns an entry with pax records.
fn pax(kind: EntryType, pairs: &[(&str, &str)]) -> (Header, Vec<u8>) {
    let lines = pairs.iter().map(|(key, value)| {
        // Two digits of the length, a space, an equals sign and a line feed.
        let length = key.len() + value.len() + 5;
        format!("{length} {key}={value}\n")
    });
    entry(kind, "record", "", lines.collect::<String>().as_bytes())
}

#[rstest]
#[case::global_path(vec![pax(EntryType::XGlobalHeader, &[("path", "other")])])]
#[case::global_link(vec![pax(EntryType::XGlobalHeader, &[("linkpath", "other")])])]
#[case::global_size(vec![pax(EntryType::XGlobalHeader, &[("size", "1234")])])]
#[case::global_sparse(vec![pax(EntryType::XGlobalHeader, &[("GNU.sparse.major", "1")])])]
#[case::two_of_pax(vec![
    pax(EntryType::XHeader, &[("path", "other")]),
    pax(EntryType::XHeader, &[("comment", "second")]),
])]
#[case::two_names(vec![
    entry(EntryType::GNULongName, "record", "", b"one\0"),
    entry(EntryType::GNULongName, "record", "", b"two\0"),
])]
#[case::names_of_both_kinds(vec![
    entry(EntryType::GNULongName, "record", "", b"one\0"),
    pax(EntryType::XHeader, &[("path", "other")]),
])]
#[case::a_key_twice(vec![pax(EntryType::XHeader, &[("path", "one"), ("path", "two")])])]
#[case::link_with_content(vec![entry(EntryType::Symlink, "link", "ok", &[0; 512])])]
#[case::directory_with_content(vec![entry(EntryType::Directory, "dir", "", &[0; 512])])]
#[case::old_directory_with_content(vec![entry(EntryType::Regular, "dir/", "", &[0; 512])])]
fn entries_that_readers_interpret_differently_are_refused(#[case] odd: Vec<(Header, Vec<u8>)>) {
    let runtime = world(&[]);
    let entries = [vec![file("ok", "1")], odd, vec![file("after", "1")]].concat();
    let extracted = extract(&runtime, &archive(&entries));
    assert_eq!(
        (extracted.status, &extracted.json()["code"]),
        (400, &json!("INVALID_ARGUMENT"))
    );
    let there = fs::read_dir(runtime.file("into")).unwrap();
    let there: Vec<_> = there.map(|name| name.unwrap().file_name()).collect();
    assert_eq!(there, ["ok"]);
}

#[test]
fn extension_records_need_an_entry() {
    let runtime = world(&[]);
    let left_over = pax(EntryType::XHeader, &[("path", "other")]);
    let extracted = extract(&runtime, &archive(&[file("ok", "1"), left_over]));
    assert_eq!(extracted.status, 400);
    // A global record as git writes it.
    let comment = pax(EntryType::XGlobalHeader, &[("comment", "5f4cdb7")]);
    let extracted = extract(&runtime, &archive(&[comment, file("fine", "1")]));
    assert_eq!(extracted.status, 200);
    assert!(runtime.file("into/fine").exists());
}

#[test]
fn an_archive_that_readers_could_read_as_two_is_refused() {
    let runtime = world(&[]);
    let mut builder = Builder::new(Vec::new());
    builder
        .append_pax_extensions([("size", &b"512"[..])])
        .unwrap();
    let (header, content) = file("a", "x");
    builder.append(&header, &content[..]).unwrap();
    let extracted = extract(&runtime, &builder.into_inner().unwrap());
    assert_eq!(extracted.status, 400);
    let mut builder = Builder::new(Vec::new());
    let sparse = [("GNU.sparse.realsize", &b"99"[..]), ("path", b"../../up")];
    builder.append_pax_extensions(sparse).unwrap();
    builder.append(&header, &content[..]).unwrap();
    assert_eq!(
        extract(&runtime, &builder.into_inner().unwrap()).status,
        400
    );
    assert_eq!(fs::read_dir(runtime.file("into")).unwrap().count(), 0);
}

#[test]
fn an_invalid_or_truncated_archive_is_refused() {
    let runtime = world(&[]);
    let noise = vec![b'x'; 2048];
    assert_eq!(
        refused(&runtime, LINE, &noise),
        (400, "INVALID_ARGUMENT".into())
    );
    let whole = archive(&[file("a", "1"), file("b", &"x".repeat(2000))]);
    let extracted = extract(&runtime, &whole[..3 * 512]);
    assert_eq!(extracted.status, 400);
    let extracted = extract(&runtime, &whole[..3 * 512 + 700]);
    assert_eq!(extracted.status, 400);
    let message = extracted.json()["message"].as_str().unwrap().to_owned();
    assert!(message.contains("entry \"b\""), "{message}");
    let names = fs::read_dir(runtime.file("into")).unwrap();
    let names: Vec<_> = names.map(|name| name.unwrap().file_name()).collect();
    assert_eq!(names, ["a"]);
}

#[rstest]
#[case::long_name(EntryType::GNULongName)]
#[case::long_link(EntryType::GNULongLink)]
#[case::pax(EntryType::XHeader)]
fn a_record_of_any_size_is_not_held_in_memory(#[case] kind: EntryType) {
    let runtime = world(&[]);
    let large = vec![b'a'; 64 << 20];
    let body = archive(&[(header(kind, b"record", b"", large.len() as u64), large)]);
    assert_eq!(
        refused(&runtime, LINE, &body),
        (400, "INVALID_ARGUMENT".into())
    );
    assert!(
        runtime.peak_memory() < 48 * 1024,
        "{} KiB",
        runtime.peak_memory()
    );
}

#[test]
fn the_size_of_an_archive_is_limited_with_and_without_a_length() {
    let runtime = world(&["--max-upload-bytes=4096"]);
    let body = archive(&[file("a", "1"), file("b", &"x".repeat(5000))]);
    assert_eq!(
        refused(&runtime, LINE, &body),
        (413, "RESOURCE_EXHAUSTED".into())
    );
    assert!(!runtime.file("into").exists());
    let mut stream = open(
        runtime.rest,
        &format!("{LINE} HTTP/1.1\r\nTransfer-Encoding: chunked"),
    );
    send_chunked(&mut stream, &body);
    let extracted = answer(&mut stream);
    assert_eq!(
        (extracted.status, &extracted.json()["code"]),
        (413, &json!("RESOURCE_EXHAUSTED"))
    );
    let body = archive(&[file("a", "1")]);
    assert_eq!(extract(&runtime, &body).status, 200);
}

#[test]
fn an_interrupted_archive_leaves_its_complete_entries() {
    let runtime = world(&["--read-body-timeout=300ms"]);
    let body = archive(&[file("a", "1"), file("b", &"x".repeat(5000))]);
    let head = format!("{LINE} HTTP/1.1\r\nContent-Length: {}", body.len());
    let count = || match fs::read_dir(runtime.file("into")) {
        Ok(names) => names.count(),
        Err(_) => 0,
    };
    let begin = || {
        let mut stream = open(runtime.rest, &head);
        stream.write_all(b"\r\n").unwrap();
        stream.write_all(&body[..4 * 512]).unwrap();
        stream
    };
    let stream = begin();
    until("the second file to begin", || count() == 2);
    drop(stream);
    until("it to be given up", || count() == 1);
    let slow = answer(&mut begin());
    assert_eq!(
        (slow.status, &slow.json()["code"]),
        (408, &json!("DEADLINE_EXCEEDED"))
    );
    until("it to be given up", || count() == 1);
    assert!(runtime.file("into/a").exists());
}

#[rstest]
#[case("POST /v1/files/..%2Foutside?op=extract", 403, "PERMISSION_DENIED")]
#[case("POST /v1/files/out?op=extract", 403, "PERMISSION_DENIED")]
#[case("POST /v1/files/file?op=extract", 409, "CONFLICT")]
fn an_archive_is_extracted_below_the_root_only(
    #[case] line: &str,
    #[case] status: u16,
    #[case] code: &str,
) {
    let runtime = world(&[]);
    symlink("../outside", runtime.file("out")).unwrap();
    fs::write(runtime.file("file"), "").unwrap();
    let body = archive(&[file("a", "1")]);
    assert_eq!(refused(&runtime, line, &body), (status, code.to_owned()));
    assert_eq!(fs::read_dir(runtime.file("../outside")).unwrap().count(), 1);
}
