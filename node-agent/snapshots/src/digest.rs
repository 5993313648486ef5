//! BLAKE3 digests of bytes and of large files, which several threads hash.

use std::fmt;
use std::io;
use std::os::fd::BorrowedFd;
use std::thread;

use blake3::hazmat::{self, ChainingValue, HasherExt, Mode};
use serde::{Deserialize, Serialize};

const PREFIX: &str = "blake3:";
/// Bytes per read.
const BUFFER: usize = 256 * 1024;
/// Least bytes for a second thread. With fewer bytes the thread costs more time than it saves.
const WORTH_A_THREAD: u64 = 4 << 20;

/// A BLAKE3 digest of 32 bytes, written `blake3:<64 hexadecimal digits>`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Digest([u8; 32]);

/// Error: the text is not a digest.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a digest (blake3: and 64 hexadecimal digits in lower case)")]
pub struct InvalidDigest(pub String);

impl Digest {
    /// Returns the digest of `bytes`.
    pub fn of(bytes: &[u8]) -> Self {
        Self(*blake3::hash(bytes).as_bytes())
    }

    pub fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }

    /// Returns the digest of the first `len` bytes of an open file. Up to `threads` threads read
    /// the file; its position is not used. Error: `UnexpectedEof` if the file is shorter.
    pub fn of_file(file: BorrowedFd<'_>, len: u64, threads: usize) -> io::Result<Self> {
        if threads < 2 || len < WORTH_A_THREAD {
            let mut hasher = blake3::Hasher::new();
            read_into(&mut hasher, file, 0, len)?;
            return Ok(Self(*hasher.finalize().as_bytes()));
        }
        let (left, right) = halves(file, 0, len, threads)?;
        Ok(Self(
            *hazmat::merge_subtrees_root(&left, &right, Mode::Hash).as_bytes(),
        ))
    }
}

/// Returns the chaining values of the two subtrees of `len` bytes at `offset`. Each subtree has its
/// own thread.
fn halves(
    file: BorrowedFd<'_>,
    offset: u64,
    len: u64,
    threads: usize,
) -> io::Result<(ChainingValue, ChainingValue)> {
    let left_len = hazmat::left_subtree_len(len);
    let left_threads = threads.div_ceil(2);
    thread::scope(|scope| {
        let right = scope.spawn(move || {
            subtree(
                file,
                offset + left_len,
                len - left_len,
                threads - left_threads,
            )
        });
        let left = subtree(file, offset, left_len, left_threads)?;
        let right = right
            .join()
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        Ok((left, right))
    })
}

fn subtree(
    file: BorrowedFd<'_>,
    offset: u64,
    len: u64,
    threads: usize,
) -> io::Result<ChainingValue> {
    if threads > 1 && len >= WORTH_A_THREAD {
        let (left, right) = halves(file, offset, len, threads)?;
        return Ok(hazmat::merge_subtrees_non_root(&left, &right, Mode::Hash));
    }
    let mut hasher = blake3::Hasher::new();
    hasher.set_input_offset(offset);
    read_into(&mut hasher, file, offset, len)?;
    Ok(hasher.finalize_non_root())
}

fn read_into(
    hasher: &mut blake3::Hasher,
    file: BorrowedFd<'_>,
    mut offset: u64,
    len: u64,
) -> io::Result<()> {
    let end = offset + len;
    let mut buffer = vec![0; BUFFER];
    while offset < end {
        let want = usize::try_from(end - offset).unwrap_or(BUFFER).min(BUFFER);
        match rustix::io::pread(file, &mut buffer[..want], offset) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(read) => {
                hasher.update(&buffer[..read]);
                offset += read as u64;
            }
            Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
    Ok(())
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(PREFIX)?;
        f.write_str(&blake3::Hash::from_bytes(self.0).to_hex())
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl From<Digest> for String {
    fn from(digest: Digest) -> String {
        digest.to_string()
    }
}

impl TryFrom<String> for Digest {
    type Error = InvalidDigest;

    fn try_from(text: String) -> Result<Self, InvalidDigest> {
        let lower = !text.bytes().any(|b| b.is_ascii_uppercase());
        let hash = text.strip_prefix(PREFIX).filter(|_| lower);
        match hash.map(blake3::Hash::from_hex) {
            Some(Ok(hash)) => Ok(Self(*hash.as_bytes())),
            Some(Err(_)) | None => Err(InvalidDigest(text.chars().take(80).collect())),
        }
    }
}

impl std::str::FromStr for Digest {
    type Err = InvalidDigest;

    fn from_str(text: &str) -> Result<Self, InvalidDigest> {
        Self::try_from(text.to_owned())
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn threads_do_not_change_the_digest() {
        let mut file = tempfile::tempfile().unwrap();
        let bytes: Vec<u8> = (0..9_000_001_u32)
            .map(|n| (n.wrapping_mul(2_654_435_761) >> 24) as u8)
            .collect();
        file.write_all(&bytes).unwrap();
        for len in [
            0,
            1,
            1024,
            1025,
            (4 << 20) - 1,
            4 << 20,
            (4 << 20) + 1,
            (8 << 20) + 1,
            9_000_001,
        ] {
            let expected = Digest::of(&bytes[..len]);
            for threads in 1..=5 {
                let found = Digest::of_file(file.as_fd(), len as u64, threads).unwrap();
                assert_eq!(found, expected, "{len} bytes, {threads} threads");
            }
        }
    }

    #[test]
    fn a_file_that_is_shorter_than_stated_is_an_error() {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(b"short").unwrap();
        let error = Digest::of_file(file.as_fd(), 6, 2).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
    }

    #[test]
    fn a_digest_has_one_spelling() {
        let digest = Digest::of(b"x");
        assert_eq!(digest.to_string().parse::<Digest>().unwrap(), digest);
        let upper = digest
            .to_string()
            .to_uppercase()
            .replace("BLAKE3", "blake3");
        for text in [
            "",
            "blake3:",
            "sha256:00",
            upper.as_str(),
            &digest.to_string()[7..],
        ] {
            assert!(text.parse::<Digest>().is_err(), "{text}");
        }
    }
}
