//! Chunks: where a file is cut, and the bytes of a chunk's object.
//!
//! A file is cut where its content says so (FastCDC). gVisor writes only pages that are in use, one
//! after another, so one more page moves all later ones; cuts by content move with them.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use fastcdc::v2020::StreamCDC;

use crate::names::ChunkName;
use crate::seal::{self, Sealer};

/// Smallest, average and largest chunk, in bytes.
const SMALLEST: usize = 64 << 10;
const AVERAGE: usize = 256 << 10;
pub(crate) const LARGEST: usize = 1 << 20;
/// zstd's default level.
const LEVEL: i32 = 3;

/// A chunk of a file: its place, its name, and its key if it is sealed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Piece {
    pub(crate) offset: u64,
    pub(crate) len: u32,
    pub(crate) name: ChunkName,
    pub(crate) key: Option<[u8; 32]>,
}

/// Returns a chunk's name, and its key where chunks are sealed.
fn identity(content: &[u8], sealer: Option<&Sealer>) -> (ChunkName, Option<[u8; 32]>) {
    match sealer {
        Some(sealer) => (sealer.name(content), Some(sealer.chunk_key(content))),
        None => (ChunkName(*blake3::hash(content).as_bytes()), None),
    }
}

/// Reads a file from its beginning and returns its pieces. Blocks.
pub(crate) fn cut(file: &File, sealer: Option<&Sealer>) -> io::Result<Vec<Piece>> {
    let from_start = Positioned { file, offset: 0 };
    let chunks = StreamCDC::new(from_start, SMALLEST, AVERAGE, LARGEST);
    let pieces = chunks.map(|chunk| {
        let chunk = chunk.map_err(io::Error::from)?;
        let (name, key) = identity(&chunk.data, sealer);
        let len = u32::try_from(chunk.data.len()).map_err(io::Error::other)?;
        Ok(Piece {
            offset: chunk.offset,
            len,
            name,
            key,
        })
    });
    pieces.collect()
}

/// Reader that leaves the file's own position alone.
struct Positioned<'a> {
    file: &'a File,
    offset: u64,
}

impl io::Read for Positioned<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.file.read_at(buffer, self.offset)?;
        self.offset += read as u64;
        Ok(read)
    }
}

/// Returns the bytes of a piece's object, or `None` if the file has changed. Blocks.
pub(crate) fn pack(
    file: &File,
    piece: &Piece,
    sealer: Option<&Sealer>,
) -> io::Result<Option<Vec<u8>>> {
    let mut content = vec![0; piece.len as usize];
    file.read_exact_at(&mut content, piece.offset)?;
    if identity(&content, sealer) != (piece.name, piece.key) {
        return Ok(None);
    }
    let packed = zstd::bulk::compress(&content, LEVEL)?;
    Ok(Some(match &piece.key {
        Some(key) => seal::seal(key, packed, &piece.name.0),
        None => packed,
    }))
}

/// Returns the content of a piece from its object, or why the object is damaged. Blocks.
///
/// The name of a sealed piece is authenticated with its object, so that its content is not hashed
/// again. Another holder of the repository's keys can seal other content under that name; the
/// digests of the image's files show that.
pub(crate) fn unpack(object: Vec<u8>, piece: &Piece) -> Result<Vec<u8>, String> {
    let packed = match &piece.key {
        Some(key) => seal::open(key, object, &piece.name.0)
            .map_err(|_| "it does not open with its key".to_owned())?,
        None => object,
    };
    let content = zstd::bulk::decompress(&packed, piece.len as usize).map_err(|e| e.to_string())?;
    if content.len() != piece.len as usize {
        return Err(format!("it has {} bytes, not {}", content.len(), piece.len));
    }
    match piece.key.is_some() || identity(&content, None).0 == piece.name {
        true => Ok(content),
        false => Err("its content does not match its name".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::io::Write;

    use super::*;

    fn file(content: &[u8]) -> File {
        let mut file = tempfile::tempfile().expect("a file");
        file.write_all(content).expect("written");
        file
    }

    fn random(bytes: usize) -> Vec<u8> {
        let mut random = fastrand::Rng::with_seed(7);
        std::iter::repeat_with(|| random.u8(..))
            .take(bytes)
            .collect()
    }

    fn sealer() -> Sealer {
        let text = "k:AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=";
        let keys = crate::Keys::parse(text).expect("a key");
        keys.newest("c", "n").expect("open").expect("a key").1
    }

    #[test]
    fn pieces_cover_the_file_and_come_back() {
        let content = random(3 << 20);
        let sealer = sealer();
        for sealer in [None, Some(&sealer)] {
            let file = file(&content);
            let pieces = cut(&file, sealer).expect("cut");
            assert!(pieces.len() > 3);
            let mut whole = Vec::new();
            for piece in &pieces {
                assert_eq!(piece.offset, whole.len() as u64);
                let object = pack(&file, piece, sealer)
                    .expect("read")
                    .expect("unchanged");
                whole.extend(unpack(object, piece).expect("unpacked"));
            }
            assert!(whole == content);
        }
        assert_eq!(cut(&file(b""), None).expect("cut"), []);
    }

    #[test]
    fn an_inserted_page_changes_few_chunks() {
        let before = random(8 << 20);
        let mut after = before.clone();
        after.splice(4 << 20..4 << 20, [1; 4096]);
        let names = |content: &[u8]| -> HashSet<ChunkName> {
            let pieces = cut(&file(content), None).expect("cut");
            pieces.iter().map(|piece| piece.name).collect()
        };
        let (before, after) = (names(&before), names(&after));
        let new = after.difference(&before).count();
        assert!((1..=3).contains(&new), "{new} of {}", after.len());
    }

    #[test]
    fn a_changed_object_and_a_changed_file_are_found() {
        let content = random(100_000);
        let source = file(&content);
        let sealer = sealer();
        for sealer in [None, Some(&sealer)] {
            let piece = cut(&source, sealer).expect("cut").remove(0);
            let object = pack(&source, &piece, sealer)
                .expect("read")
                .expect("unchanged");
            let mut flipped = object.clone();
            flipped[object.len() / 2] ^= 1;
            unpack(flipped, &piece).expect_err("flipped");
            unpack(object[..object.len() - 1].to_vec(), &piece).expect_err("cut short");
            let lies = Piece {
                len: piece.len - 1,
                ..piece.clone()
            };
            unpack(object, &lies).expect_err("another size");
            let changed = file(&[0; 100_000]);
            assert_eq!(pack(&changed, &piece, sealer).expect("read"), None);
        }
    }
}
