//! Images in a repository: in memory, and in a directory, whose files can be made old.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Seek, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use futures::TryStreamExt;
use object_store::local::LocalFileSystem;
use object_store::memory::InMemory;
use object_store::{ObjectMeta, ObjectStore};
use torpor_repository::{
    Error, Health, ImageName, Keys, LocalFile, Pace, Part, Progress, Repository, Rewrapped, Stored,
};

const KEY: &str = "k:AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=";

fn keys() -> Keys {
    Keys::parse(KEY).expect("a key")
}

fn name(id: &str) -> ImageName {
    ImageName::new("n", id).expect("a name")
}

fn random(bytes: usize, seed: u64) -> Vec<u8> {
    let mut random = fastrand::Rng::with_seed(seed);
    std::iter::repeat_with(|| random.u8(..))
        .take(bytes)
        .collect()
}

fn file(content: &[u8]) -> File {
    let mut file = tempfile::tempfile().expect("a file");
    file.write_all(content).expect("written");
    file
}

async fn upload(repository: &Repository, id: &str, content: &[u8]) -> Result<Stored, Error> {
    let files = vec![LocalFile {
        name: "pages.img".to_owned(),
        file: file(content),
    }];
    let manifest = b"manifest".to_vec();
    let pace = Pace::new(None);
    repository
        .upload(&name(id), manifest, files, &Progress::default(), &pace)
        .await
}

async fn fetch(repository: &Repository, id: &str) -> Result<Vec<u8>, Error> {
    let image = repository.image(&name(id)).await?;
    assert_eq!(image.manifest(), b"manifest");
    let mut into = tempfile::tempfile().expect("a file");
    let progress = Progress::default();
    repository
        .fetch(&image, vec![into.try_clone().expect("a file")], &progress)
        .await?;
    let mut content = Vec::new();
    into.rewind().expect("rewound");
    into.read_to_end(&mut content).expect("read");
    assert_eq!(
        (progress.done(), progress.total()),
        (content.len() as u64, content.len() as u64)
    );
    Ok(content)
}

/// A repository in a directory.
struct InDirectory {
    root: tempfile::TempDir,
    repository: Repository,
}

impl InDirectory {
    fn new(keys: Keys) -> Self {
        let root = tempfile::tempdir().expect("a directory");
        let objects = LocalFileSystem::new_with_prefix(root.path()).expect("a store");
        let repository = Repository::in_store(Arc::new(objects), "c", keys);
        Self { root, repository }
    }

    fn files(&self) -> Vec<PathBuf> {
        fn walk(dir: &Path, found: &mut Vec<PathBuf>) {
            for entry in std::fs::read_dir(dir).expect("listed") {
                let path = entry.expect("an entry").path();
                match path.is_dir() {
                    true => walk(&path, found),
                    false => found.push(path),
                }
            }
        }
        let mut found = Vec::new();
        walk(self.root.path(), &mut found);
        found
    }

    fn chunks(&self) -> Vec<PathBuf> {
        let is_chunk = |path: &PathBuf| path.to_string_lossy().contains("/chunks/");
        self.files().into_iter().filter(is_chunk).collect()
    }

    /// Makes every object two hours old.
    fn age(&self) {
        let then = SystemTime::now() - Duration::from_secs(7200);
        for path in self.files() {
            let file = File::options().write(true).open(path).expect("opened");
            file.set_modified(then).expect("set");
        }
    }
}

#[tokio::test]
async fn an_image_comes_back_as_it_was() {
    for keys in [Keys::default(), keys()] {
        let repository = Repository::in_store(Arc::new(InMemory::new()), "c", keys);
        let content = random(5 << 20, 1);
        let stored = upload(&repository, "p.1", &content)
            .await
            .expect("uploaded");
        assert_eq!(stored.size, content.len() as u64);
        assert!(stored.sent >= stored.size, "{stored:?}");
        assert!(fetch(&repository, "p.1").await.expect("fetched") == content);
        let again = upload(&repository, "p.1", &content)
            .await
            .expect("uploaded");
        assert_eq!(again.sent, 0);
        let missing = fetch(&repository, "p.2").await.expect_err("missing");
        assert!(
            missing.is_final() && missing.reason() == "ImageMissing",
            "{missing}"
        );
    }
}

#[tokio::test]
async fn a_second_image_sends_only_changed_chunks() {
    let repository = Repository::in_store(Arc::new(InMemory::new()), "c", keys());
    let mut content = random(32 << 20, 1);
    upload(&repository, "p.1", &content)
        .await
        .expect("uploaded");
    let changed = content.len() / 50;
    content[9 << 20..(9 << 20) + changed].copy_from_slice(&random(changed, 2));
    let second = upload(&repository, "p.2", &content)
        .await
        .expect("uploaded");
    let percent = second.sent * 100 / second.size;
    assert!((2..=5).contains(&percent), "{second:?}");
    assert!(fetch(&repository, "p.2").await.expect("fetched") == content);
}

#[tokio::test]
async fn namespaces_share_no_object() {
    let store = Arc::new(InMemory::new());
    let repository = Repository::in_store(store, "c", Keys::default());
    let content = random(1 << 20, 1);
    upload(&repository, "p.1", &content)
        .await
        .expect("uploaded");
    let other = ImageName::new("m", "p.1").expect("a name");
    repository
        .image(&other)
        .await
        .expect_err("another namespace");
    let files = vec![LocalFile {
        name: "a".to_owned(),
        file: file(&content),
    }];
    let pace = Pace::new(None);
    let uploaded = repository
        .upload(&other, Vec::new(), files, &Progress::default(), &pace)
        .await;
    assert!(uploaded.expect("uploaded").sent >= content.len() as u64);
}

#[tokio::test]
async fn damage_is_found_and_named() {
    let there = InDirectory::new(Keys::default());
    upload(&there.repository, "p.1", &random(1 << 20, 1))
        .await
        .expect("uploaded");
    let chunk = there.chunks().remove(0);
    let whole = std::fs::read(&chunk).expect("read");
    let mut flipped = whole.clone();
    flipped[whole.len() / 2] ^= 1;
    for damage in [&flipped[..], &whole[..10], &vec![0; 4 << 20]] {
        std::fs::write(&chunk, damage).expect("written");
        let error = fetch(&there.repository, "p.1").await.expect_err("damaged");
        assert!(
            error.is_final() && error.reason() == "ImageCorrupt",
            "{error}"
        );
        let hex = chunk.file_name().expect("a name").to_string_lossy();
        assert!(error.to_string().contains(&*hex), "{error}");
    }
    std::fs::remove_file(&chunk).expect("removed");
    let error = fetch(&there.repository, "p.1").await.expect_err("missing");
    assert!(error.to_string().contains("does not exist"), "{error}");
    // The upload finds the lost chunk only when the image itself is uploaded again.
    std::fs::write(&chunk, whole).expect("written");
    fetch(&there.repository, "p.1").await.expect("whole again");
}

#[tokio::test]
async fn an_image_needs_the_key_that_sealed_it() {
    let there = InDirectory::new(keys());
    let content = b"secret of a tenant ".repeat(10_000);
    upload(&there.repository, "p.1", &content)
        .await
        .expect("uploaded");
    for path in there.files() {
        let bytes = std::fs::read(&path).expect("read");
        assert!(
            !bytes.windows(9).any(|part| part == b"of a tena"),
            "{}",
            path.display()
        );
    }
    let objects =
        || Arc::new(LocalFileSystem::new_with_prefix(there.root.path()).expect("a store"));
    let without = Repository::in_store(objects(), "c", Keys::default());
    let error = fetch(&without, "p.1").await.expect_err("no key");
    assert!(
        error.is_final() && error.reason() == "KeyMissing",
        "{error}"
    );
    assert!(error.to_string().contains("\"k\""), "{error}");
    let rotated = format!("new:AQAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=\n{KEY}");
    let rotated = Keys::parse(&rotated).expect("keys");
    let rotated = Repository::in_store(objects(), "c", rotated);
    assert!(fetch(&rotated, "p.1").await.expect("fetched") == content);
    upload(&rotated, "p.2", &content).await.expect("uploaded");
    let error = fetch(&there.repository, "p.2")
        .await
        .expect_err("a newer key");
    assert!(error.to_string().contains("\"new\""), "{error}");
}

#[tokio::test]
async fn a_rotated_key_is_not_needed_once_all_objects_are_wrapped_anew() {
    let objects = Arc::new(InMemory::new());
    let with = |keys: &str| {
        let keys = Keys::parse(keys).expect("keys");
        Repository::in_store(objects.clone(), "c", keys)
    };
    let old = with(KEY);
    let content = random(1 << 20, 1);
    upload(&old, "p.1", &content).await.expect("uploaded");
    let put = old.put_archive(&name("p.1"), b"{}").await;
    put.expect("written");
    let chunks = async || {
        let listed: Vec<_> = objects.list(None).try_collect().await.expect("listed");
        let is_chunk = |one: &ObjectMeta| one.location.as_ref().contains("/chunks/");
        let chunks = listed.into_iter().filter(is_chunk);
        let chunks: BTreeMap<_, _> = chunks.map(|one| (one.location, one.e_tag)).collect();
        chunks
    };
    let before = chunks().await;
    assert!(!before.is_empty());
    let newer = "new:AQAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=";
    let alone = with(newer);
    let left = alone.rewrap("n").await.expect("looked").left;
    assert_eq!(left, [("k".to_owned(), 2)].into(), "both need the old key");
    let both = with(&format!("{newer}\n{KEY}"));
    let rewrapped = both.rewrap("n").await.expect("rewrapped");
    assert_eq!((rewrapped.objects, rewrapped.left.len()), (2, 0));
    let again = both.rewrap("n").await.expect("looked");
    assert_eq!(again, Rewrapped::default());
    assert_eq!(chunks().await, before, "no data is written");
    assert!(fetch(&alone, "p.1").await.expect("fetched") == content);
    let record = alone.archive(&name("p.1")).await;
    assert_eq!(record.expect("read"), b"{}");
    let error = fetch(&old, "p.1").await.expect_err("rotated");
    assert_eq!(error.reason(), "KeyMissing");
}

#[tokio::test]
async fn a_rotation_leaves_a_directory_as_it_is() {
    let there = InDirectory::new(keys());
    upload(&there.repository, "p.1", b"memory")
        .await
        .expect("uploaded");
    let objects = LocalFileSystem::new_with_prefix(there.root.path()).expect("a store");
    let both = format!("new:AQAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=\n{KEY}");
    let both = Keys::parse(&both).expect("keys");
    let both = Repository::in_store(Arc::new(objects), "c", both);
    let left = both.rewrap("n").await.expect("looked").left;
    assert_eq!(left, [("k".to_owned(), 1)].into());
    fetch(&there.repository, "p.1").await.expect("fetched");
}

#[tokio::test]
async fn a_sweep_keeps_chunks_that_an_index_names_and_young_chunks() {
    let there = InDirectory::new(keys());
    let repository = &there.repository;
    let (kept, gone) = (random(2 << 20, 1), random(2 << 20, 2));
    upload(repository, "p.1", &kept).await.expect("uploaded");
    upload(repository, "p.2", &gone).await.expect("uploaded");
    let all = there.chunks().len() as u64;
    assert_eq!(repository.namespaces().await.expect("listed"), ["n"]);
    let images = repository.images("n").await.expect("listed");
    assert!(
        images
            .iter()
            .all(|image| image.part == Part::Image && !image.may_be_deleted()),
        "{images:?}"
    );
    repository.delete_image(&images[1]).await.expect("deleted");
    let swept = repository.sweep("n").await.expect("swept");
    assert_eq!((swept.chunks, swept.deleted), (all, 0), "all are young");
    there.age();
    let images = repository.images("n").await.expect("listed");
    assert!(
        images
            .iter()
            .all(torpor_repository::ImageLeft::may_be_deleted),
        "{images:?}"
    );
    let swept = repository.sweep("n").await.expect("swept");
    assert!(swept.deleted > 0 && swept.deleted < all, "{swept:?}");
    assert!(fetch(repository, "p.1").await.expect("fetched") == kept);
    assert_eq!(repository.sweep("n").await.expect("swept").deleted, 0);
}

#[tokio::test]
async fn a_sweep_keeps_the_chunks_of_an_upload_that_was_cut_off_until_its_index_goes() {
    let there = InDirectory::new(Keys::default());
    let repository = &there.repository;
    let content = random(2 << 20, 1);
    upload(repository, "p.1", &content).await.expect("uploaded");
    // As after a crash before the commit.
    let images = there.root.path().join("torpor-v2/c/n/images/p.1");
    let pending = there.root.path().join("torpor-v2/c/n/pending/p.1");
    std::fs::rename(images, pending).expect("moved");
    there.age();
    assert_eq!(repository.sweep("n").await.expect("swept").deleted, 0);
    fetch(repository, "p.1").await.expect_err("not committed");
    let left = repository.images("n").await.expect("listed").remove(0);
    assert_eq!(left.part, Part::Pending);
    repository.delete_image(&left).await.expect("deleted");
    assert!(repository.sweep("n").await.expect("swept").deleted > 0);
}

#[tokio::test]
async fn a_sweep_deletes_nothing_while_an_index_cannot_be_read() {
    let there = InDirectory::new(Keys::default());
    upload(&there.repository, "p.1", &random(1 << 20, 1))
        .await
        .expect("uploaded");
    let index = there.root.path().join("torpor-v2/c/n/images/p.1");
    std::fs::write(index, b"nonsense").expect("written");
    there.age();
    let swept = there.repository.sweep("n").await.expect("swept");
    assert_eq!(swept.deleted, 0);
    let found = swept.images.get("p.1");
    assert!(
        matches!(found, Some(Health::Damaged(why)) if why.contains("images/p.1")),
        "{found:?}"
    );
}

#[tokio::test]
async fn a_lost_chunk_is_found_by_a_sweep_and_mended_by_another_upload() {
    for keys in [Keys::default(), keys()] {
        let there = InDirectory::new(keys);
        let repository = &there.repository;
        let content = random(2 << 20, 1);
        upload(repository, "p.1", &content).await.expect("uploaded");
        upload(repository, "p.2", &random(2 << 20, 2))
            .await
            .expect("uploaded");
        let all = there.chunks();
        let whole = repository.sweep("n").await.expect("swept").images;
        assert_eq!(whole["p.1"], Health::Whole);
        // Committed chunks of more than an hour are neither deleted nor written again.
        there.age();
        let again = upload(repository, "p.1", &content).await.expect("uploaded");
        assert_eq!(again.sent, 0);

        std::fs::remove_file(&all[0]).expect("removed");
        let images = repository.sweep("n").await.expect("swept").images;
        let damaged: Vec<_> = images
            .iter()
            .filter(|(_, one)| **one != Health::Whole)
            .collect();
        let hex = all[0].file_name().expect("a name").to_string_lossy();
        assert!(
            matches!(&damaged[..], [(_, Health::Damaged(why))] if why.contains(&*hex)),
            "{damaged:?}"
        );
        let mended = upload(repository, "p.1", &content).await.expect("uploaded");
        let mended_too = upload(repository, "p.2", &random(2 << 20, 2))
            .await
            .expect("uploaded");
        let sent = mended.sent + mended_too.sent;
        assert!(
            (1..=1 << 20).contains(&sent),
            "{sent}: the lost chunk alone"
        );
        assert!(fetch(repository, "p.1").await.expect("fetched") == content);
        let images = repository.sweep("n").await.expect("swept").images;
        assert!(
            images.values().all(|one| *one == Health::Whole),
            "{images:?}"
        );
    }
}

#[tokio::test]
async fn an_archive_is_read_only_in_its_place_and_with_its_key() {
    let there = InDirectory::new(keys());
    let repository = &there.repository;
    let record = b"{\"sandbox\":\"of a tenant\"}";
    let missing = repository.archive(&name("p.1")).await.expect_err("missing");
    assert!(missing.is_final(), "{missing}");
    repository
        .put_archive(&name("p.1"), b"an earlier one")
        .await
        .expect("written");
    repository
        .put_archive(&name("p.1"), record)
        .await
        .expect("written");
    assert_eq!(
        repository.archive(&name("p.1")).await.expect("read"),
        record
    );

    let path = there.root.path().join("torpor-v2/c/n/archives/p.1");
    let bytes = std::fs::read(&path).expect("read");
    assert!(!bytes.windows(11).any(|part| part == b"of a tenant"));
    let objects =
        || Arc::new(LocalFileSystem::new_with_prefix(there.root.path()).expect("a store"));
    let without = Repository::in_store(objects(), "c", Keys::default());
    let error = without.archive(&name("p.1")).await.expect_err("no key");
    assert_eq!(error.reason(), "KeyMissing");

    // The same bytes as another object: as another image's archive, and as an image's index.
    for elsewhere in ["archives/p.2", "images/p.1"] {
        let elsewhere = there.root.path().join("torpor-v2/c/n").join(elsewhere);
        std::fs::create_dir_all(elsewhere.parent().expect("a folder")).expect("made");
        std::fs::write(elsewhere, &bytes).expect("written");
    }
    let error = repository.archive(&name("p.2")).await.expect_err("moved");
    assert_eq!(error.reason(), "ImageCorrupt");
    let error = repository.image(&name("p.1")).await.expect_err("no index");
    assert_eq!(error.reason(), "ImageCorrupt");

    let listed = repository.images("n").await.expect("listed");
    let archives = listed.iter().filter(|one| one.part == Part::Archive);
    let archives: Vec<_> = archives.collect();
    assert_eq!(archives.len(), 2);
    repository.delete_image(archives[0]).await.expect("deleted");
    assert!(!path.exists());
}
