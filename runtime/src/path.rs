//! Paths of clients, checked without access to the file system. Pure.

use std::ffi::CString;

/// Maximum length of a path in bytes, as in the kernel.
const MAX_BYTES: usize = 4096;
/// Maximum number of components: the resolution of a path holds each directory open.
pub const MAX_COMPONENTS: usize = 256;

/// Component of a path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Component {
    Name(CString),
    Up,
}

/// Invalid path.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    #[error("the path leads out of the root")]
    Escape,
    #[error("the path contains a NUL byte")]
    Nul,
    #[error("the path is too long")]
    Long,
}

/// Decodes one layer of percent-encoding. Invalid UTF-8 is replaced.
pub fn decode(text: &str) -> String {
    percent_encoding::percent_decode_str(text)
        .decode_utf8_lossy()
        .into_owned()
}

/// Returns the components of a client's path from the root.
///
/// A leading `/` is the root, as in upstream. A path whose `..` leads out of the root is refused,
/// whatever exists.
pub fn components(path: &str) -> Result<Vec<Component>, Error> {
    let steps = split(path.as_bytes())?;
    let mut depth = 0_usize;
    for step in &steps {
        depth = match step {
            Component::Name(_) => depth + 1,
            Component::Up => depth.checked_sub(1).ok_or(Error::Escape)?,
        };
    }
    Ok(steps)
}

/// Returns the path without `..`, resolved lexically as upstream does; empty for the root.
pub fn clean(path: &str) -> Result<String, Error> {
    components(path)?;
    let mut kept = Vec::new();
    for part in path.split('/') {
        match part {
            "" | "." => {}
            ".." => drop(kept.pop()),
            name => kept.push(name),
        }
    }
    Ok(kept.join("/"))
}

/// Returns the components of a path, without a check of `..`.
pub fn split(path: &[u8]) -> Result<Vec<Component>, Error> {
    if path.len() > MAX_BYTES {
        return Err(Error::Long);
    }
    let parts = path.split(|byte| *byte == b'/');
    let steps = parts
        .filter(|part| !matches!(*part, b"" | b"."))
        .map(|part| match part {
            b".." => Ok(Component::Up),
            name => CString::new(name)
                .map(Component::Name)
                .map_err(|_| Error::Nul),
        })
        .collect::<Result<Vec<_>, _>>()?;
    if steps.len() > MAX_COMPONENTS {
        return Err(Error::Long);
    }
    Ok(steps)
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case("/a/./b//c/", "a/b/c")]
    #[case("a/../b", "b")]
    #[case("a/b/..", "a")]
    #[case("a/..", "")]
    #[case("/", "")]
    fn a_clean_path_has_names_only(#[case] path: &str, #[case] cleaned: &str) {
        assert_eq!(clean(path).as_deref(), Ok(cleaned));
    }

    #[rstest]
    #[case("a/b.txt", Ok("a/b.txt"))]
    #[case("/a//./b/", Ok("a/b"))]
    #[case("/etc/passwd", Ok("etc/passwd"))]
    #[case("", Ok(""))]
    #[case("/", Ok(""))]
    #[case("a/../b", Ok("a/../b"))]
    #[case("...", Ok("..."))]
    #[case("..", Err(Error::Escape))]
    #[case("a/../../b", Err(Error::Escape))]
    #[case("/../etc/passwd", Err(Error::Escape))]
    #[case("missing/../../../etc/passwd", Err(Error::Escape))]
    #[case("a\0b", Err(Error::Nul))]
    #[case("\0../etc/passwd", Err(Error::Nul))]
    #[case(&"a/".repeat(257), Err(Error::Long))]
    #[case(&"a".repeat(4097), Err(Error::Long))]
    fn a_path_stays_below_the_root_lexically(
        #[case] path: &str,
        #[case] steps: Result<&str, Error>,
    ) {
        let words = |steps: Vec<Component>| {
            let words = steps.iter().map(|step| match step {
                Component::Name(name) => name.to_str().unwrap(),
                Component::Up => "..",
            });
            words.collect::<Vec<_>>().join("/")
        };
        assert_eq!(components(path).map(words), steps.map(str::to_owned));
        assert_eq!(clean(path).is_ok(), components(path).is_ok());
    }
}
