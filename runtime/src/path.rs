//! Paths as clients write them, before any file is looked at. Pure.

use std::ffi::CString;

/// Longest path, in bytes, as the kernel has it.
const MAX_BYTES: usize = 4096;
/// Most components: each directory on the way is held open while a path is resolved.
pub const MAX_COMPONENTS: usize = 256;

/// A step of a path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Component {
    Name(CString),
    Up,
}

/// The path cannot be below the root.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    #[error("the path leads out of the root")]
    Escape,
    #[error("the path holds a NUL")]
    Nul,
    #[error("the path is too long")]
    Long,
}

/// Takes one layer of percent signs off. What is no UTF-8 then is replaced.
pub fn decode(text: &str) -> String {
    percent_encoding::percent_decode_str(text)
        .decode_utf8_lossy()
        .into_owned()
}

/// The steps of a client's path from the root. A leading `/` is the root, as with upstream. What leads out by its words alone is refused, whatever exists.
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

/// The path with `..` taken out by its words alone, as upstream does. Empty for the root.
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

/// The steps of a path, wherever they lead.
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
    fn a_path_stays_below_the_root_by_its_words(
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
