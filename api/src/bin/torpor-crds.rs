//! Writes the CustomResourceDefinitions: `torpor-crds <folder>`.

use std::{env, fs, path::PathBuf, process::ExitCode};

fn main() -> ExitCode {
    let Some(folder) = env::args_os().nth(1).map(PathBuf::from) else {
        eprintln!("usage: torpor-crds <folder>");
        return ExitCode::from(2);
    };
    match write(&folder) {
        Ok(count) => {
            println!("{count} definitions written to {}", folder.display());
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("torpor-crds: {error}");
            ExitCode::FAILURE
        }
    }
}

fn write(folder: &PathBuf) -> Result<usize, Box<dyn std::error::Error>> {
    fs::create_dir_all(folder)?;
    let files = torpor_api::crds::files()?;
    for (name, text) in &files {
        fs::write(folder.join(name), text)?;
    }
    Ok(files.len())
}
