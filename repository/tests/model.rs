//! A model of concurrent uploads, deletions, crashes and sweeps, in an object store with a clock of
//! its own. Each request takes effect at some time within the longest one that a client waits, also
//! if its caller is gone by then. A schedule follows from its seed, but for the threads that hash.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::fs::File;
use std::io::{Read, Seek, Write};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use futures::future::BoxFuture;
use futures::stream::{self, BoxStream};
use futures::{FutureExt, StreamExt};
use object_store::path::Path;
use object_store::{
    CopyOptions, GetOptions, GetResult, GetResultPayload, ListResult, MultipartUpload, ObjectMeta,
    ObjectStore, PutMultipartOptions, PutOptions, PutPayload, PutResult, Result,
};
use tokio::sync::oneshot;
use tokio::task::JoinSet;
use torpor_repository::{ImageName, Keys, LocalFile, Pace, Progress, Repository, Timer};

/// Schedules, unless the environment variable TORPOR_MODEL_SEEDS has another number.
const SEEDS: u64 = 60;
/// Seconds after which a request has taken effect, at the latest.
const LONGEST_REQUEST: u64 = 100;
/// Contents of files, each of one chunk.
const CONTENTS: u64 = 6;
const HOUR: u64 = 3600;
/// Age at which an object that nothing names is deleted, and more.
const OLD: u64 = HOUR + HOUR / 2;

/// The object store and the time. Every wait is in `waiting`, by the second at which it ends.
#[derive(Default)]
struct State {
    now: u64,
    objects: BTreeMap<Path, (Bytes, u64)>,
    waiting: BTreeMap<(u64, u64), oneshot::Sender<()>>,
    waits: u64,
    random: fastrand::Rng,
    /// Images that a SandboxSnapshot names, with their files once they are uploaded.
    named: BTreeMap<String, Option<Vec<u64>>>,
    deleted_chunks: u64,
    crashes: u64,
}

#[derive(Clone)]
struct World {
    state: Arc<Mutex<State>>,
    /// Requests take no time: the view of a bystander.
    is_instant: bool,
}

impl fmt::Debug for World {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("World")
    }
}

impl fmt::Display for World {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("World")
    }
}

impl World {
    fn new(seed: u64) -> Self {
        let state = State {
            random: fastrand::Rng::with_seed(seed),
            ..State::default()
        };
        Self {
            state: Arc::new(Mutex::new(state)),
            is_instant: false,
        }
    }

    fn bystander(&self) -> Self {
        Self {
            is_instant: true,
            ..self.clone()
        }
    }

    fn with<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        change(&mut self.state.lock().expect("no panic while it is held"))
    }

    /// Waits for so many seconds of the world.
    async fn pass(&self, seconds: u64) {
        let ended = self.with(|state| {
            let (sender, ended) = oneshot::channel();
            state.waits += 1;
            let at = (state.now + seconds, state.waits);
            state.waiting.insert(at, sender);
            ended
        });
        let _ = ended.await;
    }

    /// Waits for a part of a request. Most requests are short.
    async fn request(&self) {
        if self.is_instant {
            return;
        }
        let seconds = self.with(|state| match state.random.u8(..16) {
            0..4 => state.random.u64(..LONGEST_REQUEST / 2),
            _ => state.random.u64(..3),
        });
        self.pass(seconds).await;
    }

    /// Runs a request that takes effect even if its caller is gone.
    async fn takes_effect(&self, effect: impl FnOnce(&mut State) + Send + 'static) {
        let world = self.clone();
        let effect = async move {
            world.request().await;
            world.with(effect);
        };
        match self.is_instant {
            true => effect.await,
            false => tokio::spawn(effect).await.expect("no panic"),
        }
        self.request().await;
    }

    fn meta(location: &Path, (content, written): &(Bytes, u64)) -> ObjectMeta {
        ObjectMeta {
            location: location.clone(),
            last_modified: (SystemTime::UNIX_EPOCH + Duration::from_secs(*written)).into(),
            size: content.len() as u64,
            e_tag: None,
            version: None,
        }
    }

    /// Returns the first object of the prefix after this one, as it is now.
    fn next(&self, prefix: &Path, after: Option<&Path>) -> Option<ObjectMeta> {
        self.with(|state| {
            let mut objects = state.objects.iter();
            let found = objects.find(|(path, _)| {
                path.prefix_matches(prefix) && after.is_none_or(|after| *path > after)
            });
            found.map(|(path, object)| Self::meta(path, object))
        })
    }
}

#[async_trait::async_trait]
impl ObjectStore for World {
    async fn put_opts(
        &self,
        location: &Path,
        payload: PutPayload,
        _: PutOptions,
    ) -> Result<PutResult> {
        let (path, content) = (location.clone(), Bytes::from(payload));
        let put = move |state: &mut State| {
            let now = state.now;
            state.objects.insert(path, (content, now));
        };
        self.takes_effect(put).await;
        Ok(PutResult {
            e_tag: None,
            version: None,
            extensions: Default::default(),
        })
    }

    async fn put_multipart_opts(
        &self,
        _: &Path,
        _: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        Err(object_store::Error::NotImplemented {
            operation: "put_multipart_opts".to_owned(),
            implementer: "World".to_owned(),
        })
    }

    async fn get_opts(&self, location: &Path, _: GetOptions) -> Result<GetResult> {
        self.request().await;
        let found = self.with(|state| state.objects.get(location).cloned());
        self.request().await;
        let found = found.ok_or_else(|| object_store::Error::NotFound {
            path: location.to_string(),
            source: "there is none".into(),
        })?;
        let meta = Self::meta(location, &found);
        let range = 0..meta.size;
        Ok(GetResult {
            payload: GetResultPayload::Stream(stream::iter([Ok(found.0)]).boxed()),
            meta,
            range,
            attributes: Default::default(),
            extensions: Default::default(),
        })
    }

    fn delete_stream(
        &self,
        locations: BoxStream<'static, Result<Path>>,
    ) -> BoxStream<'static, Result<Path>> {
        let world = self.clone();
        let delete = move |location: Result<Path>| {
            let world = world.clone();
            async move {
                let location = location?;
                let path = location.clone();
                let delete = move |state: &mut State| {
                    state.objects.remove(&path);
                    state.deleted_chunks += u64::from(path.to_string().contains("/chunks/"));
                };
                world.takes_effect(delete).await;
                Ok(location)
            }
        };
        locations.then(delete).boxed()
    }

    /// Lists object by object, so that a listing sees some changes that happen meanwhile.
    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        let (world, prefix) = (self.clone(), prefix.cloned().unwrap_or_default());
        let next = move |after: Option<Path>| {
            let (world, prefix) = (world.clone(), prefix.clone());
            async move {
                world.request().await;
                let found = world.next(&prefix, after.as_ref())?;
                let after = Some(found.location.clone());
                Some((Ok(found), after))
            }
        };
        stream::unfold(None, next).boxed()
    }

    async fn list_with_delimiter(&self, _: Option<&Path>) -> Result<ListResult> {
        Err(object_store::Error::NotImplemented {
            operation: "list_with_delimiter".to_owned(),
            implementer: "World".to_owned(),
        })
    }

    async fn copy_opts(&self, _: &Path, _: &Path, _: CopyOptions) -> Result<()> {
        Err(object_store::Error::NotImplemented {
            operation: "copy_opts".to_owned(),
            implementer: "World".to_owned(),
        })
    }
}

impl Timer for World {
    fn now(&self) -> Duration {
        Duration::from_secs(self.with(|state| state.now))
    }

    fn sleep(&self, time: Duration) -> BoxFuture<'static, ()> {
        let world = self.clone();
        async move { world.pass(time.as_secs()).await }.boxed()
    }
}

fn repository(world: &World) -> Repository {
    let keys = Keys::parse("k:AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=").expect("a key");
    let objects = Arc::new(world.clone());
    Repository::in_store(objects, "c", keys).with_timer(Arc::new(world.clone()))
}

fn name(image: &str) -> ImageName {
    ImageName::new("n", image).expect("a name")
}

/// Returns one of the contents of files. Images share them.
fn content(number: u64) -> Vec<u8> {
    let mut random = fastrand::Rng::with_seed(number);
    std::iter::repeat_with(|| random.u8(..))
        .take(20_000)
        .collect()
}

fn files(contents: &[u64]) -> Vec<LocalFile> {
    let file = |number: &u64| {
        let mut file = tempfile::tempfile().expect("a file");
        file.write_all(&content(*number)).expect("written");
        LocalFile {
            name: format!("{number}.img"),
            file,
        }
    };
    contents.iter().map(file).collect()
}

/// An agent. Its first image loses its snapshot at once, so its chunks are garbage, and old when
/// the second image needs some of them.
async fn agent(world: World, number: u64) {
    for (image, begins, is_kept) in [(0, 0, false), (1, OLD, true)] {
        let id = format!("p{number}.{image}");
        let (contents, begins) = world.with(|state| {
            let mut contents: Vec<u64> = (0..CONTENTS).collect();
            state.random.shuffle(&mut contents);
            contents.truncate(state.random.usize(1..4));
            contents.sort_unstable();
            let begins = begins + state.random.u64(..400);
            (contents, begins.saturating_sub(state.now))
        });
        world.pass(begins).await;
        world.with(|state| state.named.insert(id.clone(), None));
        while !upload(&world, &id, &contents).await {
            let pause = world.with(|state| {
                state.crashes += 1;
                state.random.u64(..200)
            });
            world.pass(pause).await;
        }
        world.with(|state| match is_kept {
            true => state.named.insert(id.clone(), Some(contents)),
            false => state.named.remove(&id),
        });
    }
}

/// Uploads an image. Returns false if the agent dies meanwhile.
async fn upload(world: &World, id: &str, contents: &[u64]) -> bool {
    let repository = repository(world);
    let (name, progress, pace) = (name(id), Progress::default(), Pace::new(None));
    let manifest = id.as_bytes().to_vec();
    let upload = repository.upload(&name, manifest, files(contents), &progress, &pace);
    let death = world.with(|state| match state.random.u8(..3) {
        0 => state.random.u64(..300),
        _ => 10 * HOUR,
    });
    // Cancel-safe: a dropped upload is one that the death of its agent cut off.
    tokio::select! {
        done = upload => done.map(|_| true).expect("the store answers"),
        () = world.pass(death) => false,
    }
}

async fn sweep_images(world: &World, repository: &Repository) {
    let images = repository.images("n").await.expect("listed");
    for image in images.iter().filter(|image| image.may_be_deleted()) {
        let is_named = |state: &mut State| state.named.contains_key(image.name.image());
        if image.is_garbage() || !world.with(is_named) {
            repository.delete_image(image).await.expect("deleted");
        }
    }
}

/// A controller: sweeps as `controller/src/sweep.rs` does. Two of them run at a change of leaders.
async fn controller(world: World) {
    let repository = repository(&world);
    world.pass(OLD).await;
    for _ in 0..5 {
        let pause = world.with(|state| state.random.u64(..200));
        world.pass(pause).await;
        sweep_images(&world, &repository).await;
        repository.sweep("n").await.expect("swept");
    }
}

/// Checks that each image that is uploaded and named can be restored.
async fn check(world: &World) {
    let repository = repository(&world.bystander());
    let uploaded = world.with(|state| state.named.clone());
    for (id, contents) in uploaded {
        let Some(contents) = contents else { continue };
        let image = repository.image(&name(&id)).await.expect("an index");
        let empty = contents
            .iter()
            .map(|_| tempfile::tempfile().expect("a file"));
        let mut into: Vec<File> = empty.collect();
        let copies = into.iter().map(|file| file.try_clone().expect("a file"));
        let progress = Progress::default();
        let fetched = repository.fetch(&image, copies.collect(), &progress);
        fetched
            .await
            .unwrap_or_else(|error| panic!("{id}: {error}"));
        for (file, number) in into.iter_mut().zip(contents) {
            let mut bytes = Vec::new();
            file.rewind().expect("rewound");
            file.read_to_end(&mut bytes).expect("read");
            assert!(bytes == content(number), "{id}: content {number}");
        }
    }
}

/// Lets all tasks run until each waits for the world's time. The runtime has one thread for work
/// that blocks, so such work is over when later work is.
async fn settle() {
    for _ in 0..3 {
        for _ in 0..20 {
            tokio::task::yield_now().await;
        }
        tokio::task::spawn_blocking(|| ()).await.expect("no panic");
    }
}

/// Lets the world's time pass until all tasks have ended.
async fn run(world: &World, mut tasks: JoinSet<()>) {
    loop {
        settle().await;
        while let Some(ended) = tasks.try_join_next() {
            ended.expect("no panic");
        }
        if tasks.is_empty() {
            return;
        }
        let next = world.with(|state| {
            let ((at, _), waiter) = state.waiting.pop_first()?;
            state.now = at;
            Some(waiter)
        });
        if let Some(waiter) = next {
            // A caller that is gone does not wait any more.
            let _ = waiter.send(());
        }
    }
}

/// Checks that two sweeps leave nothing but the images that are named.
async fn check_garbage(world: &World) {
    let later = world.with(|state| {
        state.now += 25 * HOUR;
        state.now
    });
    let bystander = world.bystander();
    let repository = repository(&bystander);
    for _ in 0..2 {
        sweep_images(&bystander, &repository).await;
        repository.sweep("n").await.expect("swept");
    }
    world.with(|state| {
        assert_eq!(state.now, later);
        let files = state.named.values().flatten().flatten();
        let needed: BTreeSet<u64> = files.copied().collect();
        let left = |part: &str| {
            let paths = state.objects.keys();
            paths.filter(|path| path.to_string().contains(part)).count()
        };
        assert_eq!(left("/chunks/"), needed.len());
        assert_eq!(left("/images/"), state.named.len());
        assert_eq!(left("/pending/"), 0);
    });
}

#[test]
fn no_schedule_of_uploads_deletions_crashes_and_sweeps_loses_an_image_or_keeps_garbage() {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .max_blocking_threads(1)
        .build()
        .expect("a runtime");
    let wanted = std::env::var("TORPOR_MODEL_SEEDS").ok();
    let seeds = wanted.map_or(SEEDS, |text| text.parse().expect("a number of seeds"));
    let (mut deleted, mut crashes) = (0, 0);
    for seed in 0..seeds {
        println!("seed {seed}");
        let world = World::new(seed);
        runtime.block_on(async {
            let mut tasks = JoinSet::new();
            for number in 0..3 {
                tasks.spawn(agent(world.clone(), number));
            }
            for _ in 0..2 {
                tasks.spawn(controller(world.clone()));
            }
            run(&world, tasks).await;
            check(&world).await;
            check_garbage(&world).await;
        });
        world.with(|state| {
            deleted += state.deleted_chunks;
            crashes += state.crashes;
        });
    }
    println!("{deleted} chunks were deleted, {crashes} uploads were cut off");
    let least = seeds / 2;
    assert!(
        deleted > least && crashes > least,
        "the schedules are too calm"
    );
}
