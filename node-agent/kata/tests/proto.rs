//! Test that the code in `src/proto/` is generated from the files in `proto/`.
//!
//! `UPDATE_PROTO=1 cargo test -p torpor-kata --test proto` generates the code again.

use std::{fs, path::Path};

const FILES: [&str; 2] = ["containers.proto", "tasks.proto"];

#[test]
fn generated_code_is_that_of_the_files() {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let set = protox::compile(FILES, [here.join("proto")]).unwrap();
    let out = tempfile::tempdir().unwrap();
    tonic_prost_build::configure()
        .out_dir(out.path())
        .compile_fds(set)
        .unwrap();
    for name in [
        "containerd.services.containers.v1.rs",
        "containerd.services.tasks.v1.rs",
    ] {
        let (made, kept) = (out.path().join(name), here.join("src/proto").join(name));
        if std::env::var_os("UPDATE_PROTO").is_some() {
            fs::copy(&made, &kept).unwrap();
        }
        let same = fs::read(&made).unwrap() == fs::read(&kept).unwrap_or_default();
        assert!(same, "{name} is old: run this test with UPDATE_PROTO=1");
    }
}
