//! Flags that one build of runsc gets beside those of all builds: a build refuses what it does not
//! know, and Pods keep their build after an upgrade.

use std::ffi::OsString;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::{Error, capture};

/// Flags that are given to the builds that know them, with the name that `runsc flags` prints.
///
/// gVisor from August 2026 on shares one empty network namespace among the gofers of a root
/// directory, and pins it by a mount there. Torpor has some 250 root directories, and nobody would
/// remove the mounts.
const WANTED: [(&str, &str); 1] = [("-gofer-network-namespace", "--gofer-network-namespace=new")];

/// A list of flags is short.
const MAX_BYTES: u64 = 4 << 10;

/// The flags for the build, one in a line, found by asking it. Empty where it gets none.
/// The installer writes them to [`file_of`] the build.
///
/// # Errors
///
/// Where `runsc flags` fails or does not end in time.
pub fn wanted_by(runsc: &Path, limit: Duration) -> Result<String, Error> {
    let known = capture(runsc, "flags", &[], limit)?;
    let has = |name: &str| {
        let mut words = known
            .lines()
            .filter_map(|line| line.split_whitespace().next());
        words.any(|word| word == name)
    };
    let wanted = WANTED.into_iter().filter(|(name, _)| has(name));
    Ok(wanted.map(|(_, flag)| format!("{flag}\n")).collect())
}

/// Where the flags of an installed build are. The installer writes the file before it names the
/// build in torpor-oci's configuration.
pub fn file_of(runsc: &Path) -> PathBuf {
    let mut name = OsString::from(runsc);
    name.push(".flags");
    name.into()
}

/// The flags of an installed build. None of a build that was installed before there was such a
/// file, nor of one whose file cannot be read: every build runs without them.
pub(super) fn of(runsc: &Path) -> Vec<String> {
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
    fn a_build_gets_the_flags_that_it_knows() {
        let programs = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../testdata"));
        for (build, flags) in [
            ("runsc-released", "--gofer-network-namespace=new\n"),
            ("runsc-of-july", ""),
        ] {
            let asked = wanted_by(&programs.join(build), LIMIT);
            assert_eq!(asked.expect("asked"), flags, "{build}");
        }
        wanted_by(&programs.join("none"), LIMIT).expect_err("no program");
    }

    #[test]
    fn flags_are_read_beside_the_build() {
        let runsc = Path::new("/nowhere/runsc-0");
        assert_eq!(file_of(runsc), Path::new("/nowhere/runsc-0.flags"));
        assert_eq!(of(runsc), Vec::<String>::new());
        let dir = tempfile::tempdir().expect("a directory");
        let runsc = dir.path().join("runsc-0");
        std::fs::write(file_of(&runsc), "--a=b\n--c\n").expect("written");
        assert_eq!(of(&runsc), ["--a=b", "--c"]);
    }
}
