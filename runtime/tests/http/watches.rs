//! Changes of files over sandboxd's gRPC API.

use std::{fs, os::unix::fs::symlink};

use rstest::rstest;
use tonic::{Code, Status, Streaming};
use torpor_runtime::proto::watcher::{
    FileEvent,
    FileEventType::{self, Chmod, Create, Error, Remove, Rename, Write},
    WatchDirRequest,
    file_watcher_service_client::FileWatcherServiceClient,
};

use crate::{
    client::{channel, soon},
    world::Runtime,
};

async fn watch(
    runtime: &Runtime,
    path: &str,
    recursive: bool,
) -> Result<Streaming<FileEvent>, Status> {
    let mut client = FileWatcherServiceClient::new(channel(runtime).await);
    let path = path.to_owned();
    let watched = soon(client.watch_dir(WatchDirRequest { path, recursive })).await;
    watched.map(tonic::Response::into_inner)
}

/// Returns the events up to this one.
async fn expect(
    events: &mut Streaming<FileEvent>,
    last: (FileEventType, &str),
) -> Vec<(FileEventType, String)> {
    let mut seen = Vec::new();
    loop {
        let event = soon(events.message()).await.unwrap().expect("an event");
        assert_eq!(event.old_path, "");
        let event = (event.r#type(), event.path);
        let over = (event.0, event.1.as_str()) == last;
        seen.push(event);
        if over {
            return seen;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn changes_are_reported() {
    let runtime = Runtime::start(&[]);
    fs::create_dir_all(runtime.file("top/sub")).unwrap();
    let mut events = watch(&runtime, "/top/.", false).await.unwrap();
    let file = runtime.file("top/a");
    fs::write(&file, "x").unwrap();
    fs::set_permissions(&file, fs::metadata(runtime.file("")).unwrap().permissions()).unwrap();
    fs::rename(&file, runtime.file("top/b")).unwrap();
    fs::write(runtime.file("top/sub/unseen"), "x").unwrap();
    fs::remove_file(runtime.file("top/b")).unwrap();
    let seen = expect(&mut events, (Remove, "top/b")).await;
    let expected = [
        (Create, "top/a"),
        (Write, "top/a"),
        (Chmod, "top/a"),
        (Rename, "top/a"),
        (Create, "top/b"),
        (Remove, "top/b"),
    ];
    assert_eq!(seen, expected.map(|(kind, path)| (kind, path.to_owned())));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn directories_below_are_watched_including_later_ones() {
    let runtime = Runtime::start(&[]);
    fs::create_dir_all(runtime.file("old/deep")).unwrap();
    fs::create_dir(runtime.file("../outside")).unwrap();
    symlink("../outside", runtime.file("link")).unwrap();
    let mut events = watch(&runtime, "", true).await.unwrap();
    fs::write(runtime.file("old/deep/a"), "").unwrap();
    expect(&mut events, (Create, "old/deep/a")).await;
    fs::create_dir(runtime.file("new")).unwrap();
    expect(&mut events, (Create, "new")).await;
    fs::write(runtime.file("new/b"), "").unwrap();
    expect(&mut events, (Create, "new/b")).await;
    // The moved directory is reported under its new path.
    fs::rename(runtime.file("new"), runtime.file("old/moved")).unwrap();
    expect(&mut events, (Create, "old/moved")).await;
    fs::write(runtime.file("../outside/c"), "").unwrap();
    fs::write(runtime.file("old/moved/d"), "").unwrap();
    let seen = expect(&mut events, (Create, "old/moved/d")).await;
    assert_eq!(seen, [(Create, "old/moved/d".to_owned())]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_removal_of_the_directory_ends_the_watch() {
    let runtime = Runtime::start(&[]);
    fs::create_dir(runtime.file("top")).unwrap();
    let mut events = watch(&runtime, "top", false).await.unwrap();
    fs::remove_dir(runtime.file("top")).unwrap();
    let last = soon(events.message()).await.unwrap().expect("an event");
    assert_eq!(
        (last.r#type(), last.path.as_str(), last.error.as_str()),
        (Error, "", "watched directory was removed or renamed")
    );
    assert_eq!(soon(events.message()).await.unwrap(), None);
}

#[rstest]
#[case("missing", Code::NotFound)]
#[case("file", Code::InvalidArgument)]
#[case("..", Code::PermissionDenied)]
#[case("out", Code::PermissionDenied)]
#[case("a\0b", Code::PermissionDenied)]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_invalid_watch_is_refused(#[case] path: &str, #[case] code: Code) {
    let runtime = Runtime::start(&[]);
    fs::write(runtime.file("file"), "").unwrap();
    symlink("/", runtime.file("out")).unwrap();
    let refused = watch(&runtime, path, true).await.unwrap_err();
    assert_eq!(refused.code(), code, "{refused}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_number_of_watches_is_limited() {
    let runtime = Runtime::start(&["--max-watches=1"]);
    let first = watch(&runtime, "", false).await.unwrap();
    let refused = watch(&runtime, "", false).await.unwrap_err();
    assert_eq!(refused.code(), Code::ResourceExhausted);
    drop(first);
    while watch(&runtime, "", false).await.is_err() {}
}
