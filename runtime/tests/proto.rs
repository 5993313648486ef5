//! Checks that the code in `src/proto/` is generated from the files in `proto/`.
//!
//! `UPDATE_PROTO=1 cargo test -p torpor-runtime --test proto` generates the code anew.

use std::{fs, path::Path};

use prost::Message as _;

const FILES: [&str; 2] = ["process/v1/process.proto", "watcher/v1/watcher.proto"];

#[test]
fn generated_code_is_that_of_the_files() {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let set = protox::compile(FILES, [here.join("proto")]).unwrap();
    let out = tempfile::tempdir().unwrap();
    // The descriptors for reflection leave out positions and comments of the files.
    let mut bare = set.clone();
    for file in &mut bare.file {
        file.source_code_info = None;
    }
    fs::write(out.path().join("descriptors.bin"), bare.encode_to_vec()).unwrap();
    tonic_prost_build::configure()
        .out_dir(out.path())
        .bytes(".")
        .btree_map(".")
        .compile_fds(set)
        .unwrap();
    for name in ["process.v1.rs", "watcher.v1.rs", "descriptors.bin"] {
        let (made, kept) = (out.path().join(name), here.join("src/proto").join(name));
        if std::env::var_os("UPDATE_PROTO").is_some() {
            fs::copy(&made, &kept).unwrap();
        }
        let same = fs::read(&made).unwrap() == fs::read(&kept).unwrap_or_default();
        assert!(
            same,
            "{name} is outdated: run this test with UPDATE_PROTO=1"
        );
    }
}
