//! Names of objects. Parts of a name come from API objects and from listings, and are checked.

use object_store::path::Path;

/// Version of the layout, and the only one that is read.
const ROOT: &str = "torpor-v2";
/// Length of a chunk's name: 64 hexadecimal digits.
const CHUNK_NAME: usize = 64;

/// An image of a namespace.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ImageName {
    namespace: String,
    image: String,
}

impl ImageName {
    /// Returns the name, or `None` unless both parts are DNS subdomain names (RFC 1123): such a
    /// part is one part of an object's name.
    pub fn new(namespace: &str, image: &str) -> Option<Self> {
        (is_part(namespace) && is_part(image)).then(|| Self {
            namespace: namespace.to_owned(),
            image: image.to_owned(),
        })
    }

    pub fn namespace(&self) -> &str {
        &self.namespace
    }

    /// Returns the image's id.
    pub fn image(&self) -> &str {
        &self.image
    }
}

pub(crate) fn is_part(text: &str) -> bool {
    let plain = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b"-.".contains(&b);
    let edge = |b: Option<&u8>| b.is_some_and(u8::is_ascii_alphanumeric);
    let bytes = text.as_bytes();
    bytes.len() <= 253
        && bytes.iter().copied().all(plain)
        && edge(bytes.first())
        && edge(bytes.last())
}

/// Name of a chunk: the digest of its content, keyed where there is a key.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct ChunkName(pub(crate) [u8; 32]);

impl std::fmt::Debug for ChunkName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.hex())
    }
}

impl ChunkName {
    pub(crate) fn hex(&self) -> String {
        blake3::Hash::from_bytes(self.0).to_hex().to_string()
    }

    /// Returns `None` unless the text is 64 hexadecimal digits in lower case.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let name = Self(*blake3::Hash::from_hex(text).ok()?.as_bytes());
        (text.len() == CHUNK_NAME && name.hex() == text).then_some(name)
    }
}

/// Names of the objects of one cluster.
#[derive(Debug, Clone)]
pub(crate) struct Names {
    root: Path,
    cluster: String,
}

impl Names {
    pub(crate) fn new(prefix: &Path, cluster: &str) -> Self {
        Self {
            root: prefix.clone().join(ROOT).join(cluster),
            cluster: cluster.to_owned(),
        }
    }

    pub(crate) fn cluster(&self) -> &str {
        &self.cluster
    }

    pub(crate) fn root(&self) -> &Path {
        &self.root
    }

    pub(crate) fn clock(&self) -> Path {
        self.root.clone().join("clock")
    }

    pub(crate) fn image(&self, name: &ImageName) -> Path {
        self.images(&name.namespace).join(name.image.as_str())
    }

    pub(crate) fn pending(&self, name: &ImageName) -> Path {
        self.all_pending(&name.namespace).join(name.image.as_str())
    }

    pub(crate) fn images(&self, namespace: &str) -> Path {
        self.root.clone().join(namespace).join("images")
    }

    pub(crate) fn all_pending(&self, namespace: &str) -> Path {
        self.root.clone().join(namespace).join("pending")
    }

    pub(crate) fn archive(&self, name: &ImageName) -> Path {
        self.archives(&name.namespace).join(name.image.as_str())
    }

    pub(crate) fn archives(&self, namespace: &str) -> Path {
        self.root.clone().join(namespace).join("archives")
    }

    /// Returns the folder of the marks of sweeps that may be deleting chunks.
    pub(crate) fn sweeps(&self, namespace: &str) -> Path {
        self.root.clone().join(namespace).join("sweeps")
    }

    pub(crate) fn chunks(&self, namespace: &str) -> Path {
        self.root.clone().join(namespace).join("chunks")
    }

    pub(crate) fn chunk(&self, namespace: &str, chunk: &ChunkName) -> Path {
        let hex = chunk.hex();
        self.chunks(namespace).join(&hex[..2]).join(hex.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_that_could_leave_its_folder_is_none() {
        let uid = "0a1b2c3d-4e5f-6071-8293-a4b5c6d7e8f9.1";
        assert!(ImageName::new("team-a", uid).is_some());
        for bad in [
            "",
            ".",
            "..",
            "a/b",
            "A",
            "a..",
            ".a",
            "a\0b",
            &"a".repeat(254),
        ] {
            assert_eq!(ImageName::new(bad, uid), None, "{bad:?}");
            assert_eq!(ImageName::new("team-a", bad), None, "{bad:?}");
        }
    }

    #[test]
    fn a_chunks_name_has_one_spelling() {
        let name = ChunkName([0xab; 32]);
        assert_eq!(ChunkName::parse(&name.hex()), Some(name));
        for bad in [
            "",
            "ab",
            &name.hex().to_uppercase(),
            &format!("{}0", name.hex()),
        ] {
            assert_eq!(ChunkName::parse(bad), None, "{bad:?}");
        }
    }
}
