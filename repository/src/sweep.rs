//! Removal of images that no API object names, and of chunks that no image needs.
//!
//! A sweep lists the chunks, writes a mark, reads the indexes, deletes chunks, and removes its
//! mark. A chunk that is deleted
//! - was written more than [`KEPT_FOR`] before the listing, by the object store's clock,
//! - and is in no index that was written before the mark.
//!
//! An upload writes its pending index before it looks for marks. If it finds none, each sweep that
//! may delete chunks from then on has read that index. Else it waits until those marks are gone,
//! and looks for its chunks again. A sweep deletes for at most [`DELETES_FOR`] after it began to
//! write its mark, so a mark that its sweep has left behind counts for [`MARK_COUNTS_FOR`].
//!
//! The age of a chunk alone would not do: a sweep deletes by name, also a chunk that was written
//! again since it was listed (`repository/tests/model.rs`).

use std::collections::{BTreeMap, HashMap, HashSet};
use std::time::Duration;

use bytes::Bytes;
use futures::stream::FuturesUnordered;
use futures::{StreamExt, TryStreamExt};
use jiff::{SignedDuration, Timestamp};
use object_store::path::Path;

use crate::clock::modified;
use crate::names::{ChunkName, ImageName};
use crate::object;
use crate::seal;
use crate::settings::LONGEST_REQUEST;
use crate::{Error, PARALLEL, Repository};

/// Age below which nothing is deleted.
const KEPT_FOR: SignedDuration = SignedDuration::from_hours(1);
/// Age from which on a pending index of a whole image belongs to no upload.
const LEFT_OVER_FOR: SignedDuration = SignedDuration::from_hours(24);
/// Time for which one sweep deletes chunks.
const DELETES_FOR: Duration = Duration::from_secs(60);
/// Age of a mark, by the object store's clock, from which on its sweep deletes nothing any more.
const MARK_COUNTS_FOR: Duration = DELETES_FOR.saturating_add(LONGEST_REQUEST);
/// Interval at which an upload looks for marks again.
const LOOK_AGAIN: Duration = Duration::from_secs(2);

/// An object of an image in a repository.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImageLeft {
    pub name: ImageName,
    pub part: Part,
    /// Time since the object was written.
    pub age: SignedDuration,
    /// The object is the pending index of an image that is whole.
    pub is_left_over: bool,
}

/// Kind of an object of an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// Index of a whole image.
    Image,
    /// Index of an image that is being uploaded.
    Pending,
    /// Record of an archived Sandbox.
    Archive,
}

impl ImageLeft {
    /// Reports whether the object is a pending index that a request of a dead agent left behind. A
    /// young one is that of an upload under way.
    pub fn is_garbage(&self) -> bool {
        self.is_left_over && self.age > LEFT_OVER_FOR
    }

    /// Reports whether the image is old enough to be deleted.
    pub fn may_be_deleted(&self) -> bool {
        self.age > KEPT_FOR
    }
}

/// Result of a sweep of a namespace's chunks.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Swept {
    /// Chunks that the namespace had.
    pub chunks: u64,
    /// Chunks that were deleted.
    pub deleted: u64,
    /// Chunks that no image needs, and for which there was no time.
    pub left: u64,
    /// State of each image whose index is in `images/`, by the image's id.
    pub images: BTreeMap<String, Health>,
}

/// State of an image in a repository, as far as listings and indexes show it. The content of chunks
/// is not read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Health {
    Whole,
    /// The image cannot be restored; holds the reason.
    Damaged(String),
}

/// Result of the reading of all indexes of a namespace.
#[derive(Debug, Default)]
struct Needed {
    /// Chunks of each whole image that the listing lacks.
    unlisted: BTreeMap<String, Vec<ChunkName>>,
    /// Indexes that cannot be read: the image, whether the index is one of a whole image, and the
    /// reason.
    unreadable: Vec<(String, bool, String)>,
}

/// Mark of a sweep: its path, and when it was written.
pub(crate) type Mark = (Path, Timestamp);

/// The chunks of a listing. A namespace may have a million of them.
type Chunks = HashMap<ChunkName, Listed>;

/// A chunk in a listing.
#[derive(Debug, Clone, Copy)]
struct Listed {
    /// The chunk was written more than [`KEPT_FOR`] ago.
    is_old: bool,
    /// An index names the chunk; a pending one counts.
    is_needed: bool,
}

impl Repository {
    /// Returns the namespaces that have objects.
    pub async fn namespaces(&self) -> Result<Vec<String>, Error> {
        let root = self.names.root();
        let listed = self.objects.list_with_delimiter(Some(root)).await;
        let listed = listed.map_err(|e| self.failed("list", root, e))?;
        let names = listed.common_prefixes.iter().filter_map(Path::filename);
        Ok(names.map(str::to_owned).collect())
    }

    /// Returns the images of a namespace, whole and pending, and its archives.
    pub async fn images(&self, namespace: &str) -> Result<Vec<ImageLeft>, Error> {
        let now = self.now().await?;
        let places = [
            (self.names.images(namespace), Part::Image),
            (self.names.all_pending(namespace), Part::Pending),
            (self.names.archives(namespace), Part::Archive),
        ];
        let mut images = Vec::new();
        for (place, part) in places {
            let mut listed = self.objects.list(Some(&place));
            while let Some(meta) = self.next(&mut listed, &place).await? {
                let image = meta.location.filename().unwrap_or_default();
                // Objects of other programs are left alone.
                if let Some(name) = ImageName::new(namespace, image) {
                    let age = now.duration_since(modified(&meta));
                    let is_left_over = false;
                    images.push(ImageLeft {
                        name,
                        part,
                        age,
                        is_left_over,
                    });
                }
            }
        }
        let whole = images.iter().filter(|one| one.part == Part::Image);
        let whole: HashSet<ImageName> = whole.map(|one| one.name.clone()).collect();
        for one in images.iter_mut().filter(|one| one.part == Part::Pending) {
            one.is_left_over = whole.contains(&one.name);
        }
        Ok(images)
    }

    async fn next(
        &self,
        listed: &mut (
                 impl TryStreamExt<Ok = object_store::ObjectMeta, Error = object_store::Error> + Unpin
             ),
        place: &Path,
    ) -> Result<Option<object_store::ObjectMeta>, Error> {
        listed
            .try_next()
            .await
            .map_err(|e| self.failed("list", place, e))
    }

    /// Deletes an object of an image. The image's chunks go with the next sweep after its index,
    /// unless other images need them.
    pub async fn delete_image(&self, image: &ImageLeft) -> Result<(), Error> {
        let path = match image.part {
            Part::Image => self.names.image(&image.name),
            Part::Pending => self.names.pending(&image.name),
            Part::Archive => self.names.archive(&image.name),
        };
        self.delete(&path).await
    }

    /// Deletes the chunks of a namespace that no index names, and examines its images. While an
    /// index cannot be read, nothing is deleted: the chunks that it names are not known.
    pub async fn sweep(&self, namespace: &str) -> Result<Swept, Error> {
        let now = self.now().await?;
        self.delete_old_marks(namespace, now).await?;
        let mut chunks = self.list_chunks(namespace, now).await?;
        let begun = self.timer.now();
        let mark = self.mark(namespace).await?;
        let needed = match self.needed(namespace, &mut chunks).await {
            Ok(needed) => needed,
            Err(error) => {
                // Nothing has been deleted, so no upload needs to wait for this sweep.
                self.delete(&mark).await?;
                return Err(error);
            }
        };
        let mut swept = Swept {
            chunks: chunks.len() as u64,
            ..Swept::default()
        };
        if needed.unreadable.is_empty() {
            let mut doomed: Vec<ChunkName> = doomed(&chunks).collect();
            doomed.sort_unstable();
            let deleted = self.delete_doomed(namespace, doomed, begun).await?;
            (swept.deleted, swept.left) = deleted;
        }
        // A deletion that failed may still take effect; then this line is not reached.
        self.delete(&mark).await?;
        swept.images = self.examine(namespace, needed).await?;
        Ok(swept)
    }

    /// Writes a mark, and returns its path.
    async fn mark(&self, namespace: &str) -> Result<Path, Error> {
        let path = self.names.sweeps(namespace).join(seal::random_word());
        self.put(&path, Bytes::from_static(b"torpor")).await?;
        Ok(path)
    }

    async fn delete_old_marks(&self, namespace: &str, now: Timestamp) -> Result<(), Error> {
        for (path, written) in self.marks(namespace).await? {
            if now.duration_since(written) > KEPT_FOR {
                self.delete(&path).await?;
            }
        }
        Ok(())
    }

    /// Returns the marks of a namespace, each with its time.
    pub(crate) async fn marks(&self, namespace: &str) -> Result<Vec<Mark>, Error> {
        let place = self.names.sweeps(namespace);
        let mut listed = self.objects.list(Some(&place));
        let mut marks = Vec::new();
        while let Some(meta) = self.next(&mut listed, &place).await? {
            let written = modified(&meta);
            marks.push((meta.location, written));
        }
        Ok(marks)
    }

    /// Waits until the sweeps of these marks delete no chunks any more.
    pub(crate) async fn outlast(
        &self,
        mut sweeps: Vec<Mark>,
        namespace: &str,
    ) -> Result<(), Error> {
        loop {
            let now = self.now().await?;
            let there = self.marks(namespace).await?;
            sweeps.retain(|mark| there.contains(mark) && counts(mark.1, now));
            if sweeps.is_empty() {
                return Ok(());
            }
            self.timer.sleep(LOOK_AGAIN).await;
        }
    }

    /// Deletes chunks, as long as there is time. Returns how many went and how many are left.
    async fn delete_doomed(
        &self,
        namespace: &str,
        doomed: Vec<ChunkName>,
        begun: Duration,
    ) -> Result<(u64, u64), Error> {
        let all = doomed.len() as u64;
        let mut deleted = 0;
        let mut doomed = doomed.into_iter();
        let mut under_way = FuturesUnordered::new();
        loop {
            while under_way.len() < 2 * PARALLEL
                && self.timer.now().saturating_sub(begun) < DELETES_FOR
                && let Some(chunk) = doomed.next()
            {
                let path = self.names.chunk(namespace, &chunk);
                under_way.push(async move { self.delete(&path).await });
            }
            match under_way.next().await {
                Some(done) => done?,
                None => return Ok((deleted, all - deleted)),
            }
            deleted += 1;
        }
    }

    /// Returns the state of each image. A chunk that the listing lacks may have been written since,
    /// so the object store is asked for it.
    async fn examine(
        &self,
        namespace: &str,
        needed: Needed,
    ) -> Result<BTreeMap<String, Health>, Error> {
        let mut images: BTreeMap<String, Health> = BTreeMap::new();
        for (image, chunks) in needed.unlisted {
            let mut health = Health::Whole;
            for chunk in chunks {
                let path = self.names.chunk(namespace, &chunk);
                if self.modified(&path).await?.is_none() {
                    health = Health::Damaged(format!("{path} in {} does not exist", self.shown));
                    break;
                }
            }
            images.insert(image, health);
        }
        let unreadable = needed.unreadable.into_iter();
        let whole = unreadable.filter(|(_, is_whole, _)| *is_whole);
        images.extend(whole.map(|(image, _, why)| (image, Health::Damaged(why))));
        Ok(images)
    }

    /// Returns the state of one image. Asks for each of its chunks.
    pub async fn health(&self, name: &ImageName) -> Result<Health, Error> {
        let path = self.names.image(name);
        let chunks = match self.chunks_of(&path, name).await {
            Ok(Some(chunks)) => chunks,
            Ok(None) => {
                let why = format!("{path} in {} does not exist", self.shown);
                return Ok(Health::Damaged(why));
            }
            Err(error @ Error::Damaged { .. }) => return Ok(Health::Damaged(error.to_string())),
            Err(error) => return Err(error),
        };
        let mut rest = chunks.iter();
        let mut under_way = FuturesUnordered::new();
        loop {
            while under_way.len() < 2 * PARALLEL
                && let Some(chunk) = rest.next()
            {
                let path = self.names.chunk(name.namespace(), chunk);
                under_way.push(self.if_missing(path));
            }
            match under_way.next().await {
                Some(asked) => {
                    if let Some(path) = asked? {
                        let why = format!("{path} in {} does not exist", self.shown);
                        return Ok(Health::Damaged(why));
                    }
                }
                None => return Ok(Health::Whole),
            }
        }
    }

    /// Returns the path if there is no such object.
    async fn if_missing(&self, path: Path) -> Result<Option<Path>, Error> {
        let found = self.modified(&path).await?;
        Ok(found.is_none().then_some(path))
    }

    /// Reports whether the index of an image is there.
    pub async fn has_index(&self, image: &ImageName) -> Result<bool, Error> {
        Ok(self.modified(&self.names.image(image)).await?.is_some())
    }

    /// Lists the chunks of a namespace. Objects of other programs are left out.
    async fn list_chunks(&self, namespace: &str, now: Timestamp) -> Result<Chunks, Error> {
        let place = self.names.chunks(namespace);
        let mut listed = self.objects.list(Some(&place));
        let mut chunks = Chunks::new();
        while let Some(meta) = self.next(&mut listed, &place).await? {
            let name = meta.location.filename().and_then(ChunkName::parse);
            let name = name.filter(|name| self.names.chunk(namespace, name) == meta.location);
            let chunk = Listed {
                is_old: now.duration_since(modified(&meta)) > KEPT_FOR,
                is_needed: false,
            };
            chunks.extend(name.map(|name| (name, chunk)));
        }
        Ok(chunks)
    }

    /// Reads all indexes of a namespace, and marks the chunks that they name. Objects of other
    /// programs are left alone.
    async fn needed(&self, namespace: &str, known: &mut Chunks) -> Result<Needed, Error> {
        let mut needed = Needed::default();
        for (place, is_whole) in [
            (self.names.all_pending(namespace), false),
            (self.names.images(namespace), true),
        ] {
            let mut listed = self.objects.list(Some(&place));
            let mut is_listed = false;
            let mut under_way = FuturesUnordered::new();
            loop {
                while !is_listed && under_way.len() < 2 * PARALLEL {
                    match self.next(&mut listed, &place).await? {
                        Some(meta) => under_way.push(self.index_of(namespace, meta.location)),
                        None => is_listed = true,
                    }
                }
                let Some(read) = under_way.next().await else {
                    break;
                };
                let Some((name, chunks)) = read? else {
                    continue;
                };
                let image = name.image().to_owned();
                match chunks {
                    Ok(mut chunks) => {
                        chunks.retain(|chunk| match known.get_mut(chunk) {
                            Some(listed) => {
                                listed.is_needed = true;
                                false
                            }
                            None => true,
                        });
                        if is_whole {
                            needed.unlisted.insert(image, chunks);
                        }
                    }
                    Err(why) => needed.unreadable.push((image, is_whole, why)),
                }
            }
        }
        Ok(needed)
    }

    /// Reads an index of a listing: its image and the chunks that it names, or why it cannot be
    /// read. None for an object of another program, and for a pending index that is gone: it goes
    /// when its image is committed, and is then listed again.
    async fn index_of(
        &self,
        namespace: &str,
        path: Path,
    ) -> Result<Option<(ImageName, Result<Vec<ChunkName>, String>)>, Error> {
        let name = path.filename();
        let Some(name) = name.and_then(|name| ImageName::new(namespace, name)) else {
            return Ok(None);
        };
        match self.chunks_of(&path, &name).await {
            Ok(chunks) => Ok(chunks.map(|chunks| (name, Ok(chunks)))),
            Err(error @ Error::Damaged { .. }) => Ok(Some((name, Err(error.to_string())))),
            Err(error) => Err(error),
        }
    }

    /// Returns the chunks that an index names; none if it does not exist.
    async fn chunks_of(
        &self,
        path: &Path,
        name: &ImageName,
    ) -> Result<Option<Vec<ChunkName>>, Error> {
        let Some(bytes) = self.read(path, object::IMAGE.largest).await? else {
            return Ok(None);
        };
        let damaged = |why| self.damaged(path, why);
        let header = object::IMAGE.header(&bytes, self.names.cluster(), name);
        let (header, _) = header.map_err(damaged)?;
        header.names().map(Some).map_err(damaged)
    }
}

/// Reports whether the sweep of a mark may still delete.
fn counts(written: Timestamp, now: Timestamp) -> bool {
    let age = Duration::try_from(now.duration_since(written)).unwrap_or_default();
    // The object store's clock has whole seconds.
    age <= MARK_COUNTS_FOR + Duration::from_secs(1)
}

/// Returns the chunks to delete.
fn doomed(chunks: &Chunks) -> impl Iterator<Item = ChunkName> {
    let doomed = chunks
        .iter()
        .filter(|(_, chunk)| chunk.is_old && !chunk.is_needed);
    doomed.map(|(name, _)| *name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pending_index_is_garbage_once_its_image_is_whole_and_it_is_a_day_old() {
        let pending = |hours, is_left_over| ImageLeft {
            name: ImageName::new("n", "p.1").expect("a name"),
            part: Part::Pending,
            age: SignedDuration::from_hours(hours),
            is_left_over,
        };
        assert!(pending(25, true).is_garbage());
        assert!(!pending(23, true).is_garbage());
        assert!(!pending(25, false).is_garbage());
    }

    #[test]
    fn a_mark_counts_until_its_sweep_can_delete_nothing_any_more() {
        let now = Timestamp::UNIX_EPOCH + SignedDuration::from_secs(1000);
        let counts = |age: i64| counts(now - SignedDuration::from_secs(age), now);
        assert!(counts(-5) && counts(0) && counts(181));
        assert!(!counts(182));
    }

    #[test]
    fn a_chunk_goes_when_it_is_old_and_no_index_names_it() {
        let chunk = |byte, is_old, is_needed| {
            let listed = Listed { is_old, is_needed };
            (ChunkName([byte; 32]), listed)
        };
        let chunks = [
            chunk(1, true, false),
            chunk(2, true, true),
            chunk(3, false, false),
            chunk(4, false, true),
        ];
        let gone: Vec<_> = doomed(&chunks.into()).collect();
        assert_eq!(gone, [ChunkName([1; 32])]);
    }
}
