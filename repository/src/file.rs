//! Small files of settings.

use std::fs::File;
use std::io::{self, ErrorKind, Read};
use std::path::Path;

/// Reads a file of at most `limit` bytes; none if it does not exist.
pub(crate) fn read(path: &Path, limit: u64) -> io::Result<Option<String>> {
    let file = match File::open(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        file => file?,
    };
    let mut text = String::new();
    file.take(limit + 1).read_to_string(&mut text)?;
    match text.len() as u64 > limit {
        true => Err(ErrorKind::FileTooLarge.into()),
        false => Ok(Some(text)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_file_is_none_and_a_large_one_is_not_cut() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("file");
        assert_eq!(read(&path, 4).expect("looked"), None);
        std::fs::write(&path, "1234").expect("written");
        assert_eq!(read(&path, 4).expect("read").as_deref(), Some("1234"));
        let error = read(&path, 3).expect_err("too large");
        assert_eq!(error.kind(), ErrorKind::FileTooLarge);
    }
}
