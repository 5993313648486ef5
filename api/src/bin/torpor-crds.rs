//! Writes the CustomResourceDefinitions into the folders `crds` and `podsnapshots` of a given
//! folder: `torpor-crds deploy`.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::ExitCode,
};

use torpor_api::crds;

fn main() -> ExitCode {
    let folder = env::args_os().nth(1).map(PathBuf::from);
    let Some(folder) = folder.filter(|folder| folder.is_dir()) else {
        eprintln!("usage: torpor-crds <folder that exists>");
        return ExitCode::from(2);
    };
    match write(&folder) {
        Ok(count) => {
            println!("wrote {count} definitions to {}", folder.display());
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("torpor-crds: {error}");
            ExitCode::FAILURE
        }
    }
}

fn write(folder: &Path) -> Result<usize, Box<dyn std::error::Error>> {
    let mut count = 0;
    for (name, definitions) in [
        ("crds", crds::definitions()),
        ("podsnapshots", crds::pod_snapshot_definitions()),
    ] {
        let below = folder.join(name);
        fs::create_dir_all(&below)?;
        for (file, text) in crds::files(definitions)? {
            fs::write(below.join(file), text)?;
            count += 1;
        }
    }
    Ok(count)
}
