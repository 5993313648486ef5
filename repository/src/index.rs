//! Index of an image: which chunks make its files, and its manifest. An object of kind
//! [`object::IMAGE`], whose body has the manifest and the files.

use serde::{Deserialize, Serialize};

use crate::chunk::{self, Piece};
use crate::keys::Keys;
use crate::names::{ChunkName, ImageName};
use crate::object::{self, Unreadable};
use crate::seal::Sealer;

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Body {
    /// Content of the image's `manifest.json`.
    manifest: String,
    files: Vec<FileBody>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct FileBody {
    name: String,
    pieces: Vec<PieceBody>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct PieceBody {
    /// Place in the header's `chunks`.
    chunk: usize,
    len: u32,
    /// Key of the chunk, in hexadecimal digits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    key: Option<String>,
}

/// Files of an image and its manifest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Index {
    pub(crate) manifest: Vec<u8>,
    pub(crate) files: Vec<(String, Vec<Piece>)>,
}

impl Index {
    /// Returns the names of the chunks, sorted, each once.
    pub(crate) fn chunks(&self) -> Vec<ChunkName> {
        let pieces = self.files.iter().flat_map(|(_, pieces)| pieces);
        let mut names: Vec<ChunkName> = pieces.map(|piece| piece.name).collect();
        names.sort_unstable();
        names.dedup();
        names
    }

    /// Returns the size of all files, in bytes.
    pub(crate) fn size(&self) -> u64 {
        let pieces = self.files.iter().flat_map(|(_, pieces)| pieces);
        pieces.map(|piece| u64::from(piece.len)).sum()
    }

    /// Returns the bytes of the index's object.
    pub(crate) fn encode(
        &self,
        cluster: &str,
        name: &ImageName,
        sealer: Option<&(String, Sealer)>,
    ) -> Result<Vec<u8>, String> {
        let chunks = self.chunks();
        let place = |name: &ChunkName| chunks.binary_search(name).map_err(|_| "no chunk");
        let mut files = Vec::new();
        for (file, pieces) in &self.files {
            let pieces = pieces.iter().map(|piece| {
                let key = piece.key.map(|key| ChunkName(key).hex());
                let (chunk, len) = (place(&piece.name)?, piece.len);
                Ok(PieceBody { chunk, len, key })
            });
            let pieces: Result<_, &str> = pieces.collect();
            let (name, pieces) = (file.clone(), pieces?);
            files.push(FileBody { name, pieces });
        }
        let manifest = String::from_utf8(self.manifest.clone()).map_err(|e| e.to_string())?;
        let body = serde_json::to_vec(&Body { manifest, files }).map_err(|e| e.to_string())?;
        object::IMAGE.encode(cluster, name, &chunks, &body, sealer)
    }

    /// Reads the bytes of an index's object.
    pub(crate) fn decode(
        bytes: &[u8],
        cluster: &str,
        name: &ImageName,
        keys: &Keys,
    ) -> Result<Self, Unreadable> {
        let content = object::IMAGE.decode(bytes, cluster, name, keys)?;
        let body: Body = serde_json::from_slice(&content.body).map_err(|e| e.to_string())?;
        let mut files = Vec::new();
        for file in body.files {
            let pieces = pieces_of(&file.pieces, &content.chunks, content.is_sealed)?;
            files.push((file.name, pieces));
        }
        let manifest = body.manifest.into_bytes();
        Ok(Self { manifest, files })
    }
}

fn pieces_of(read: &[PieceBody], chunks: &[ChunkName], sealed: bool) -> Result<Vec<Piece>, String> {
    let mut offset = 0;
    let pieces = read.iter().map(|piece| {
        let chunk = chunks.get(piece.chunk).ok_or("it names no chunk")?;
        let key = piece.key.as_deref().map(|key| {
            let key = ChunkName::parse(key).ok_or("a chunk's key is not one");
            key.map(|key| key.0)
        });
        let key = key.transpose()?;
        if piece.len == 0 || piece.len as usize > chunk::LARGEST || key.is_some() != sealed {
            return Err("a piece is not one".to_owned());
        }
        let at = offset;
        offset += u64::from(piece.len);
        Ok(Piece {
            offset: at,
            len: piece.len,
            name: *chunk,
            key,
        })
    });
    pieces.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn image(id: &str) -> ImageName {
        ImageName::new("n", id).expect("a name")
    }

    fn index(key: Option<[u8; 32]>) -> Index {
        let piece = |offset, len, byte| Piece {
            offset,
            len,
            name: ChunkName([byte; 32]),
            key,
        };
        Index {
            manifest: b"{}\n".to_vec(),
            files: vec![
                ("a.img".to_owned(), vec![piece(0, 10, 2), piece(10, 5, 1)]),
                ("b.img".to_owned(), vec![piece(0, 10, 2)]),
                ("empty".to_owned(), Vec::new()),
            ],
        }
    }

    fn keys() -> Keys {
        Keys::parse("k:AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=").expect("a key")
    }

    fn sealer(keys: &Keys) -> (String, Sealer) {
        keys.newest("c", "n").expect("open").expect("a key")
    }

    #[test]
    fn an_index_comes_back_and_names_each_chunk_once() {
        let index = index(None);
        assert_eq!(index.size(), 25);
        let bytes = index.encode("c", &image("i"), None).expect("encoded");
        let read = Index::decode(&bytes, "c", &image("i"), &Keys::default()).expect("read");
        assert_eq!(read, index);
        let (header, _) = object::IMAGE
            .header(&bytes, "c", &image("i"))
            .expect("a header");
        assert_eq!(
            header.names().expect("names"),
            [ChunkName([1; 32]), ChunkName([2; 32])]
        );
    }

    #[test]
    fn a_sealed_index_needs_its_key_and_its_place() {
        let index = index(Some([3; 32]));
        let keys = keys();
        let bytes = index
            .encode("c", &image("i"), Some(&sealer(&keys)))
            .expect("encoded");
        let read = Index::decode(&bytes, "c", &image("i"), &keys).expect("read");
        assert_eq!(read, index);
        let refused =
            |keys: &Keys| Index::decode(&bytes, "c", &image("i"), keys).expect_err("refused");
        assert_eq!(
            refused(&Keys::default()),
            Unreadable::KeyMissing("k".to_owned())
        );
        let other = Keys::parse("k:AQAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=").expect("a key");
        assert!(matches!(refused(&other), Unreadable::Damaged(_)));
        // The same bytes at another place: the header names the image.
        for (cluster, name) in [("d", image("i")), ("c", image("j"))] {
            Index::decode(&bytes, cluster, &name, &keys).expect_err("another place");
        }
        // The header of another image around this body: the seal is about the image.
        let text = String::from_utf8_lossy(
            &bytes[..bytes.iter().position(|b| *b == b'\n').expect("a line")],
        )
        .replace("\"image\":\"i\"", "\"image\":\"j\"");
        let (_, body) = object::IMAGE
            .header(&bytes, "c", &image("i"))
            .expect("a header");
        let moved = [text.as_bytes(), b"\n", body].concat();
        Index::decode(&moved, "c", &image("j"), &keys).expect_err("moved");
    }

    #[test]
    fn an_index_with_wrong_or_inconsistent_content_is_refused() {
        let plain = index(None).encode("c", &image("i"), None).expect("encoded");
        let refuse = |bytes: &[u8]| {
            Index::decode(bytes, "c", &image("i"), &Keys::default()).expect_err("refused");
        };
        for cut in [0, 1, plain.len() / 2, plain.len() - 1] {
            refuse(&plain[..cut]);
        }
        let end = plain.iter().position(|b| *b == b'\n').expect("a line");
        let header = String::from_utf8(plain[..end].to_vec()).expect("text");
        for (from, to) in [
            ("\"version\":2", "\"version\":3"),
            ("torpor-repository-image", "other"),
            (&*ChunkName([1; 32]).hex(), "../../../etc/passwd"),
            ("\"chunks\":[", "\"more\":1,\"chunks\":["),
        ] {
            let changed = header.replace(from, to);
            assert_ne!(changed, header);
            refuse(&[changed.as_bytes(), &plain[end..]].concat());
        }
        let body = |pieces: &str| {
            let body = format!(r#"{{"manifest":"","files":[{{"name":"a","pieces":[{pieces}]}}]}}"#);
            let body = zstd::bulk::compress(body.as_bytes(), 3).expect("packed");
            [header.as_bytes(), b"\n", &body].concat()
        };
        refuse(&body(r#"{"chunk":2,"len":1}"#));
        refuse(&body(r#"{"chunk":0,"len":0}"#));
        refuse(&body(r#"{"chunk":0,"len":1048577}"#));
        refuse(&body(&format!(
            r#"{{"chunk":0,"len":1,"key":"{}"}}"#,
            ChunkName([1; 32]).hex()
        )));
        let name = image("i");
        Index::decode(
            &body(r#"{"chunk":0,"len":1}"#),
            "c",
            &name,
            &Keys::default(),
        )
        .expect("read");
    }
}
