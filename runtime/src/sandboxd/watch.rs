//! Changes of files over gRPC: the service of upstream's `watcher.proto`.
//!
//! Directories are watched by descriptors that [`Root`] opened, so that no link leads a watch
//! outside. Events are batched for a moment, as in upstream, because one write causes several.

use std::{
    collections::{BTreeMap, VecDeque},
    io,
    mem::MaybeUninit,
    os::fd::{AsRawFd as _, OwnedFd},
    pin::Pin,
    sync::Arc,
    time::Duration,
};

use futures::Stream;
use rustix::{
    fs::inotify::{self, CreateFlags, ReadFlags, Reader, WatchFlags},
    io::Errno,
};
use tokio::{
    io::unix::AsyncFd,
    sync::{OwnedSemaphorePermit, Semaphore},
    time::{Instant, sleep_until},
};
use tonic::{Request, Response, Status, async_trait};

use crate::{
    files::blocking,
    path,
    proto::watcher::{
        FileEvent, FileEventType, WatchDirRequest, file_watcher_service_server::FileWatcherService,
    },
    root::{self, Root},
    sandboxd::polled::polled,
};

/// Time for which events are batched, as in upstream.
const BATCH_TIME: Duration = Duration::from_millis(250);
/// Maximum number of events of a batch; a full batch is sent at once, and further events wait in
/// the kernel.
const MAX_BATCH: usize = 4096;
/// Maximum number of directories of one watch; changes below further directories are not reported.
const MAX_DIRECTORIES: usize = 8192;
/// Bytes of events that are read at once.
const BUFFER: usize = 16 * 1024;

/// Implementation of the service.
#[derive(Clone, Debug)]
pub struct WatchService {
    root: Arc<Root>,
    slots: Arc<Semaphore>,
    limit: usize,
}

impl WatchService {
    /// Returns the service for directories of `root`, with at most `limit` watches at once.
    pub fn new(root: Arc<Root>, limit: usize) -> Self {
        let slots = Arc::new(Semaphore::new(limit.min(Semaphore::MAX_PERMITS)));
        Self { root, slots, limit }
    }
}

#[async_trait]
impl FileWatcherService for WatchService {
    type WatchDirStream = Pin<Box<dyn Stream<Item = Result<FileEvent, Status>> + Send>>;

    async fn watch_dir(
        &self,
        request: Request<WatchDirRequest>,
    ) -> Result<Response<Self::WatchDirStream>, Status> {
        let WatchDirRequest { path, recursive } = request.into_inner();
        let top = path::clean(&path).map_err(|error| root_error(&path, &error.into()))?;
        let Ok(permit) = Arc::clone(&self.slots).try_acquire_owned() else {
            let text = format!("too many concurrent file watches (limit {})", self.limit);
            return Err(Status::resource_exhausted(text));
        };
        let made = blocking(&self.root, move |root| Watches::new(root, top, recursive)).await;
        let watches = made.map_err(|error| root_error(&path, &error))?;
        let watch = Watch {
            root: Arc::clone(&self.root),
            watches: Some(watches),
            batch: VecDeque::new(),
            sending: false,
            due: None,
            _permit: permit,
        };
        let events = futures::stream::unfold(Some(watch), |watch| async {
            let mut watch = watch?;
            match watch.next().await {
                Ok(event) if event.r#type() == FileEventType::Error => Some((Ok(event), None)),
                Ok(event) => Some((Ok(event), Some(watch))),
                Err(error) => {
                    let status = Status::internal(format!("file watch failed: {error}"));
                    Some((Err(status), None))
                }
            }
        });
        Ok(Response::new(Box::pin(events)))
    }
}

/// Call of `WatchDir`.
struct Watch {
    root: Arc<Root>,
    /// Watched directories; `None` while another thread adds to them.
    watches: Option<Watches>,
    batch: VecDeque<FileEvent>,
    sending: bool,
    /// Time at which the batch is sent.
    due: Option<Instant>,
    _permit: OwnedSemaphorePermit,
}

/// Watched directories.
struct Watches {
    inotify: AsyncFd<OwnedFd>,
    /// Paths relative to the root, by watch descriptors of inotify.
    paths: BTreeMap<i32, String>,
    top: i32,
    recursive: bool,
}

/// Event of inotify.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Change {
    watch: i32,
    flags: ReadFlags,
    name: Option<String>,
}

impl Watch {
    async fn next(&mut self) -> io::Result<FileEvent> {
        loop {
            if self.sending {
                if let Some(event) = self.batch.pop_front() {
                    return Ok(event);
                }
                (self.sending, self.due) = (false, None);
            }
            let lost = || io::Error::other("the watch has ended by an earlier error");
            let watches = self.watches.as_ref().ok_or_else(lost)?;
            let due = self.due;
            tokio::select! {
                changes = watches.read() => self.add_to_batch(changes?).await?,
                () = async { sleep_until(due.unwrap_or_else(Instant::now)).await }, if due.is_some() => {
                    self.sending = true;
                }
            }
        }
    }

    async fn add_to_batch(&mut self, changes: Vec<Change>) -> io::Result<()> {
        for change in changes {
            let Some(watches) = &mut self.watches else {
                continue;
            };
            self.batch.extend(watches.event(&change));
            if let Some(path) = watches.changed_directory(&change) {
                watches.forget(&path);
                if change
                    .flags
                    .intersects(ReadFlags::CREATE | ReadFlags::MOVED_TO)
                {
                    self.add(path).await?;
                }
            }
        }
        if self.due.is_none() && !self.batch.is_empty() {
            self.due = Some(Instant::now() + BATCH_TIME);
        }
        self.sending = self.batch.len() >= MAX_BATCH;
        Ok(())
    }

    /// Watches a new directory, with all directories below it.
    async fn add(&mut self, path: String) -> io::Result<()> {
        let Some(mut watches) = self.watches.take() else {
            return Ok(());
        };
        let added = blocking(&self.root, move |root| {
            watches.add_tree(root, path);
            Ok(watches)
        });
        self.watches = Some(added.await.map_err(io::Error::other)?);
        Ok(())
    }
}

impl Watches {
    fn new(root: &Root, top: String, recursive: bool) -> Result<Self, root::Error> {
        let inotify = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)?;
        let directory = root.directory(&top)?;
        let number = add(&inotify, &directory)?;
        drop(directory);
        let inotify = polled(inotify)
            .map_err(|error| root::Error::Io(Errno::from_io_error(&error).unwrap_or(Errno::IO)))?;
        let mut watches = Self {
            inotify,
            paths: BTreeMap::from([(number, top.clone())]),
            top: number,
            recursive,
        };
        if recursive {
            watches.add_below(root, &top);
        }
        Ok(watches)
    }

    /// Watches a directory and all directories below it.
    ///
    /// A directory that is gone or cannot be watched is left out, as in upstream.
    fn add_tree(&mut self, root: &Root, path: String) {
        let full = self.paths.len() >= MAX_DIRECTORIES;
        let opened = if full {
            Err(root::Error::TooMany)
        } else {
            root.directory_itself(&path)
        };
        let added = opened.and_then(|directory| Ok(add(self.inotify.get_ref(), &directory)?));
        match added {
            Ok(number) => {
                self.paths.insert(number, path.clone());
                self.add_below(root, &path);
            }
            Err(error) => tracing::debug!(%error, path, "a directory is not watched"),
        }
    }

    /// Watches the directories below a directory. The maximum length of a path limits the depth.
    fn add_below(&mut self, root: &Root, path: &str) {
        for entry in root.list(path).unwrap_or_default() {
            if entry.is_directory && self.paths.len() < MAX_DIRECTORIES {
                self.add_tree(root, joined(path, &entry.name));
            }
        }
    }

    async fn read(&self) -> io::Result<Vec<Change>> {
        loop {
            let mut ready = self.inotify.readable().await?;
            let mut buffer = [MaybeUninit::uninit(); BUFFER];
            let mut reader = Reader::new(self.inotify.get_ref(), &mut buffer);
            let mut changes = Vec::new();
            loop {
                match reader.next() {
                    Ok(event) => changes.push(Change {
                        watch: event.wd(),
                        flags: event.events(),
                        name: event
                            .file_name()
                            .map(|name| name.to_string_lossy().into_owned()),
                    }),
                    Err(Errno::AGAIN) => {
                        ready.clear_ready();
                        break;
                    }
                    Err(Errno::INTR) => {}
                    Err(errno) => return Err(errno.into()),
                }
                if reader.is_buffer_empty() {
                    break;
                }
            }
            if !changes.is_empty() {
                return Ok(changes);
            }
        }
    }

    /// Returns the event for a client.
    fn event(&mut self, change: &Change) -> Option<FileEvent> {
        let flags = change.flags;
        if flags.contains(ReadFlags::QUEUE_OVERFLOW) {
            return Some(failure("events were lost: too many changes at once"));
        }
        let directory = self.paths.get(&change.watch)?;
        if change.watch == self.top
            && flags.intersects(ReadFlags::DELETE_SELF | ReadFlags::MOVE_SELF | ReadFlags::UNMOUNT)
        {
            return Some(failure("watched directory was removed or renamed"));
        }
        if flags.contains(ReadFlags::IGNORED) {
            self.paths.remove(&change.watch);
            return None;
        }
        let name = change.name.as_ref()?;
        Some(FileEvent {
            r#type: kind(flags)?.into(),
            path: joined(directory, name),
            ..FileEvent::default()
        })
    }

    /// Returns the path of a directory that appeared or disappeared, in a recursive watch.
    fn changed_directory(&self, change: &Change) -> Option<String> {
        let moved = ReadFlags::CREATE | ReadFlags::MOVED_TO | ReadFlags::MOVED_FROM;
        let concerns = self.recursive
            && change.flags.contains(ReadFlags::ISDIR)
            && change.flags.intersects(moved);
        let directory = self.paths.get(&change.watch).filter(|_| concerns)?;
        Some(joined(directory, change.name.as_ref()?))
    }

    /// Ends the watches of a directory and of those below it: after a move their paths are wrong.
    fn forget(&mut self, path: &str) {
        let inside = format!("{path}/");
        let gone = |at: &str| at == path || at.starts_with(&inside);
        let numbers: Vec<_> = self.paths.iter().filter(|(_, at)| gone(at)).collect();
        let numbers: Vec<_> = numbers.into_iter().map(|(number, _)| *number).collect();
        for number in numbers {
            self.paths.remove(&number);
            // The kernel has ended the watch of a deleted directory.
            let _forgotten = inotify::remove_watch(self.inotify.get_ref(), number);
        }
    }
}

/// Adds a watch of a directory, by the path of its descriptor: inotify takes only a path.
fn add(inotify: &OwnedFd, directory: &OwnedFd) -> Result<i32, Errno> {
    let events = WatchFlags::CREATE
        | WatchFlags::DELETE
        | WatchFlags::MODIFY
        | WatchFlags::MOVE
        | WatchFlags::ATTRIB
        | WatchFlags::DELETE_SELF
        | WatchFlags::MOVE_SELF
        | WatchFlags::ONLYDIR;
    let path = format!("/proc/self/fd/{}", directory.as_raw_fd());
    inotify::add_watch(inotify, path, events)
}

fn kind(flags: ReadFlags) -> Option<FileEventType> {
    let is = |which| flags.intersects(which);
    Some(if is(ReadFlags::CREATE | ReadFlags::MOVED_TO) {
        FileEventType::Create
    } else if is(ReadFlags::DELETE) {
        FileEventType::Remove
    } else if is(ReadFlags::MOVED_FROM) {
        FileEventType::Rename
    } else if is(ReadFlags::MODIFY) {
        FileEventType::Write
    } else if is(ReadFlags::ATTRIB) {
        FileEventType::Chmod
    } else {
        return None;
    })
}

fn failure(text: &str) -> FileEvent {
    FileEvent {
        r#type: FileEventType::Error.into(),
        error: text.to_owned(),
        ..FileEvent::default()
    }
}

fn joined(directory: &str, name: &str) -> String {
    match directory {
        "" => name.to_owned(),
        directory => format!("{directory}/{name}"),
    }
}

fn root_error(path: &str, error: &root::Error) -> Status {
    match error {
        root::Error::Denied => {
            let text =
                format!("watch path: access denied: path {path:?}: path escapes sandbox root");
            Status::permission_denied(text)
        }
        root::Error::Missing => Status::not_found(format!("watch path does not exist: {path}")),
        root::Error::NotADirectory => {
            Status::invalid_argument(format!("watch path is not a directory: {path}"))
        }
        _ => Status::internal(format!("watch path: {error}")),
    }
}
