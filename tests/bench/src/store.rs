//! Time and memory of a sweep of a repository with many images, in this process; beside a bare walk
//! over the same files.

use std::fs::{self, File};
use std::io::Write as _;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use clap::Args;
use object_store::local::LocalFileSystem;
use torpor_repository::{ImageName, Keys, LocalFile, Pace, Progress, Repository};

use crate::{node, table};

const CLUSTER: &str = "c";
const NAMESPACE: &str = "n";
/// Folder of the chunks (docs/snapshot-format.md).
const CHUNKS: &str = "torpor-v2/c/n/chunks";

#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Images
    #[arg(default_value_t = 10_000)]
    images: usize,
    /// Chunks of each image
    #[arg(long, default_value_t = 50)]
    chunks: usize,
}

pub(crate) fn run(options: &Options) -> anyhow::Result<()> {
    let root = tempfile::tempdir()?;
    let objects = LocalFileSystem::new_with_prefix(root.path())?;
    let repository = Repository::in_store(Arc::new(objects), CLUSTER, Keys::default());
    let runtime = tokio::runtime::Runtime::new()?;
    runtime.block_on(fill(&repository, root.path(), options))?;
    println!(
        "{} images of {} chunks, {}",
        options.images,
        options.chunks,
        node::describe()?
    );
    let own = i32::try_from(std::process::id())?;
    let before = node::resident_mib(own)?;
    let began = Instant::now();
    let files = walk(root.path())?;
    let bare = began.elapsed();
    print(&format!("a bare walk over {files} files"), bare, bare);
    let began = Instant::now();
    let listed = runtime.block_on(repository.images(NAMESPACE))?;
    print("images listed", began.elapsed(), bare);
    ensure!(listed.len() == options.images, "{} images", listed.len());
    let began = Instant::now();
    let swept = runtime.block_on(repository.sweep(NAMESPACE))?;
    print("swept", began.elapsed(), bare);
    ensure!(
        swept.chunks >= (options.images * options.chunks) as u64 && swept.deleted == 0,
        "{} chunks, {} deleted",
        swept.chunks,
        swept.deleted
    );
    // Before the listing goes.
    let memory = node::peak_mib(own)? - before;
    println!("{}", table::value("memory of both", memory, "MiB", None));
    drop(listed);
    Ok(())
}

fn print(words: &str, took: Duration, base: Duration) {
    let (took, base) = (took.as_secs_f64(), Some(base.as_secs_f64()));
    println!("{}", table::value(words, took, "s", base));
}

/// Uploads small images, and adds the other chunks as files that no image names.
async fn fill(repository: &Repository, root: &Path, options: &Options) -> anyhow::Result<()> {
    let pace = Pace::new(None);
    for number in 0..options.images {
        let mut file = tempfile::tempfile()?;
        file.write_all(&number.to_le_bytes())?;
        let name = ImageName::new(NAMESPACE, &format!("pod-{number}.1")).context("a name")?;
        let files = vec![LocalFile {
            name: "pages.img".to_owned(),
            file,
        }];
        let progress = Progress::default();
        let uploaded = repository.upload(&name, b"manifest".to_vec(), files, &progress, &pace);
        uploaded.await?;
    }
    for number in options.images..options.images * options.chunks {
        let name = blake3::hash(&number.to_be_bytes()).to_hex();
        let folder = root.join(CHUNKS).join(&name[..2]);
        fs::create_dir_all(&folder)?;
        File::create(folder.join(name.as_str()))?;
    }
    Ok(())
}

/// Reads the metadata of all files below a directory; returns their number.
fn walk(dir: &Path) -> anyhow::Result<usize> {
    let mut files = 0;
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        match entry.metadata()?.is_dir() {
            true => files += walk(&entry.path())?,
            false => files += 1,
        }
    }
    Ok(files)
}
