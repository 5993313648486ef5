//! Reads files that flags name, up to a size.

use std::{
    fs, io,
    io::Read as _,
    path::{Path, PathBuf},
};

/// Error of reading a file.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    #[error("cannot read {}", path.display())]
    Io {
        path: PathBuf,
        #[source]
        error: io::Error,
    },
    #[error("{} has more than {most} bytes", path.display())]
    TooLarge { path: PathBuf, most: usize },
}

/// Reads a file of at most `most` bytes. Blocks: call it before the router serves clients.
pub fn read(path: &Path, most: usize) -> Result<Vec<u8>, ReadError> {
    let mut content = Vec::new();
    // One more byte tells a file that is too large from one of exactly `most` bytes.
    let limit = u64::try_from(most).unwrap_or(u64::MAX).saturating_add(1);
    fs::File::open(path)
        .and_then(|file| file.take(limit).read_to_end(&mut content))
        .map_err(|error| ReadError::Io {
            path: path.to_owned(),
            error,
        })?;
    if content.len() > most {
        let path = path.to_owned();
        return Err(ReadError::TooLarge { path, most });
    }
    Ok(content)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_read_up_to_a_size() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("f");
        fs::write(&path, "four").unwrap();
        assert_eq!(read(&path, 4).unwrap(), b"four");
        let error = read(&path, 3).unwrap_err();
        assert!(matches!(error, ReadError::TooLarge { most: 3, .. }));
        let error = read(&directory.path().join("none"), 4).unwrap_err();
        assert!(matches!(error, ReadError::Io { .. }));
    }

    #[test]
    fn an_endless_file_is_read_up_to_the_limit_only() {
        let error = read(Path::new("/dev/zero"), 4).unwrap_err();
        assert!(matches!(error, ReadError::TooLarge { .. }));
    }
}
