//! Flags that one build of runsc gets beside the flags of all builds. A build refuses unknown
//! flags, and Pods keep their build after an upgrade.

use std::ffi::OsString;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::run::{Error, capture};

/// Flags of the builds that support them, with the name that `runsc flags` prints.
///
/// gVisor from August 2026 on shares one empty network namespace among the gofers of a root
/// directory, and pins the namespace by a mount there. Torpor has some 250 root directories, and no
/// process would remove the mounts.
const WANTED: [(&str, &str); 1] = [("-gofer-network-namespace", "--gofer-network-namespace=new")];

/// Bytes that are read of a build's file of flags. The list is short.
const MAX_BYTES: u64 = 4 << 10;

/// Returns the flags of [`WANTED`] that the build's `runsc flags` lists, one in a line. Empty: the
/// build gets none. The installer writes the text to [`file_of`] the build.
///
/// # Errors
///
/// `runsc flags` fails or does not end in time.
pub fn wanted_by(runsc: &Path, limit: Duration) -> Result<String, Error> {
    let supported = capture(runsc, "flags", &[], limit)?;
    let has = |name: &str| {
        let mut words = supported
            .lines()
            .filter_map(|line| line.split_whitespace().next());
        words.any(|word| word == name)
    };
    let wanted = WANTED.into_iter().filter(|(name, _)| has(name));
    Ok(wanted.map(|(_, flag)| format!("{flag}\n")).collect())
}

/// Returns the path of the file with the flags of an installed build. The installer writes the file
/// before it names the build in the node's configuration.
pub fn file_of(runsc: &Path) -> PathBuf {
    let mut name = OsString::from(runsc);
    name.push(".flags");
    name.into()
}

/// Returns the flags of an installed build. A build without such a file (installed before the
/// installer wrote one), or with an unreadable file, gets none: every build runs without them.
pub(super) fn of_build(runsc: &Path) -> Vec<String> {
    let mut text = String::new();
    let read =
        File::open(file_of(runsc)).and_then(|file| file.take(MAX_BYTES).read_to_string(&mut text));
    match read {
        Ok(_) => text.lines().map(str::to_owned).collect(),
        Err(_) => Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_secs(20);

    #[test]
    fn a_build_gets_the_flags_that_it_supports() {
        let programs = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../testdata"));
        for (build, flags) in [
            ("runsc-released", "--gofer-network-namespace=new\n"),
            ("runsc-of-july", ""),
        ] {
            let wanted = wanted_by(&programs.join(build), LIMIT);
            assert_eq!(wanted.expect("asked"), flags, "{build}");
        }
        wanted_by(&programs.join("none"), LIMIT).expect_err("no program");
    }

    #[test]
    fn flags_are_read_beside_the_build() {
        let runsc = Path::new("/nowhere/runsc-0");
        assert_eq!(file_of(runsc), Path::new("/nowhere/runsc-0.flags"));
        assert_eq!(of_build(runsc), Vec::<String>::new());
        let dir = tempfile::tempdir().expect("a directory");
        let runsc = dir.path().join("runsc-0");
        std::fs::write(file_of(&runsc), "--a=b\n--c\n").expect("written");
        assert_eq!(of_build(&runsc), ["--a=b", "--c"]);
    }
}
