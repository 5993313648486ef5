//! Objects that describe an image: a header in clear, and a body that a key of the object seals.
//!
//! ```text
//! header   one line of JSON, in clear: format, image, chunks' names, the wrapped key
//! body     zstd of JSON, sealed where the header has a key
//! ```
//!
//! The header is enough to find the chunks that an image needs. So a sweep, which reads no keys,
//! can delete the others.

use std::io::Read;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::{Deserialize, Serialize};

use crate::keys::{KeyShut, Keys};
use crate::names::{ChunkName, ImageName};
use crate::seal::{self, KEY, Sealer};

/// Version of all kinds of objects.
const VERSION: u32 = 2;

/// A kind of object.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Kind {
    magic: &'static str,
    /// Text that binds sealed bytes to this kind of object.
    about: &'static str,
    /// Largest object, in bytes.
    pub(crate) largest: u64,
    /// Largest body, unpacked, in bytes.
    largest_body: u64,
}

/// Index of an image. Its largest size is that of an image of about 150 GiB.
pub(crate) const IMAGE: Kind = Kind {
    magic: "torpor-repository-image",
    about: "",
    largest: 64 << 20,
    largest_body: 256 << 20,
};

/// Record of an archived Sandbox.
pub(crate) const ARCHIVE: Kind = Kind {
    magic: "torpor-repository-archive",
    about: "archive/",
    largest: 4 << 20,
    largest_body: 4 << 20,
};

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Header {
    magic: String,
    version: u32,
    cluster: String,
    namespace: String,
    image: String,
    /// Key that seals the body; null in clear.
    key: Option<WrappedKey>,
    /// Names of the chunks, each once.
    chunks: Vec<String>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct WrappedKey {
    /// Id of the key in the Secret.
    id: String,
    /// The object's key, sealed, in base64.
    wrapped: String,
}

const NOT_OPENED: &str = "it does not open with its key";

impl WrappedKey {
    /// Wraps the key of an object, by the key with this id.
    fn of(key: &[u8; KEY], id: String, sealer: &Sealer, about: &[u8]) -> Self {
        let wrapped = STANDARD.encode(sealer.wrap(key, about));
        Self { id, wrapped }
    }

    fn opened(
        &self,
        keys: &Keys,
        cluster: &str,
        name: &ImageName,
        about: &[u8],
    ) -> Result<[u8; KEY], Unreadable> {
        let sealer = keys.named(&self.id, cluster, name.namespace())?;
        let sealer = sealer.ok_or_else(|| Unreadable::KeyMissing(self.id.clone()))?;
        let wrapped = STANDARD.decode(&self.wrapped).map_err(|e| e.to_string())?;
        let opened = sealer.unwrap(wrapped, about);
        opened.map_err(|_| Unreadable::Damaged(NOT_OPENED.to_owned()))
    }
}

/// Reason why an object cannot be read.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Unreadable {
    Damaged(String),
    /// The keys lack the one with this id.
    KeyMissing(String),
    KeyShut(KeyShut),
}

impl From<String> for Unreadable {
    fn from(why: String) -> Self {
        Self::Damaged(why)
    }
}

impl From<KeyShut> for Unreadable {
    fn from(shut: KeyShut) -> Self {
        Self::KeyShut(shut)
    }
}

/// Result of [`Kind::rewrap`].
#[derive(Debug)]
pub(crate) enum Rewrap {
    /// The object is in clear, needs only the newest key, or cannot be read.
    Settled,
    Done {
        /// Id of the key that wrapped the object's key before.
        older: String,
        bytes: Vec<u8>,
    },
    /// The older key or the newest one cannot be used.
    Impossible { older: String },
}

/// Content of an object.
#[derive(Debug)]
pub(crate) struct Content {
    pub(crate) chunks: Vec<ChunkName>,
    pub(crate) body: Vec<u8>,
    pub(crate) is_sealed: bool,
}

impl Kind {
    /// Returns the text that binds sealed bytes to one object.
    fn about(self, cluster: &str, name: &ImageName) -> Vec<u8> {
        let (namespace, image) = (name.namespace(), name.image());
        format!("{}{cluster}/{namespace}/{image}", self.about).into_bytes()
    }

    /// Returns the bytes of an object. A new random key seals the body.
    pub(crate) fn encode(
        self,
        cluster: &str,
        name: &ImageName,
        chunks: &[ChunkName],
        body: &[u8],
        sealer: Option<&(String, Sealer)>,
    ) -> Result<Vec<u8>, String> {
        let mut body = zstd::bulk::compress(body, 3).map_err(|e| e.to_string())?;
        let about = self.about(cluster, name);
        let key = sealer.map(|(id, sealer)| {
            let key = seal::random_key();
            body = seal::seal(&key, std::mem::take(&mut body), &about);
            WrappedKey::of(&key, id.clone(), sealer, &about)
        });
        let header = Header {
            magic: self.magic.to_owned(),
            version: VERSION,
            cluster: cluster.to_owned(),
            namespace: name.namespace().to_owned(),
            image: name.image().to_owned(),
            key,
            chunks: chunks.iter().map(ChunkName::hex).collect(),
        };
        self.joined(&header, &body)
    }

    /// Returns the bytes of an object, from its header and its body as it is stored.
    fn joined(self, header: &Header, body: &[u8]) -> Result<Vec<u8>, String> {
        let mut bytes = serde_json::to_vec(header).map_err(|e| e.to_string())?;
        bytes.push(b'\n');
        bytes.extend(body);
        match bytes.len() as u64 > self.largest {
            true => Err(format!(
                "it would have {} bytes, at most {} are allowed",
                bytes.len(),
                self.largest
            )),
            false => Ok(bytes),
        }
    }

    /// Reads the bytes of an object, which must be the one of this cluster and image.
    pub(crate) fn decode(
        self,
        bytes: &[u8],
        cluster: &str,
        name: &ImageName,
        keys: &Keys,
    ) -> Result<Content, Unreadable> {
        let (header, body) = self.header(bytes, cluster, name)?;
        let chunks = header.names()?;
        let about = self.about(cluster, name);
        let mut body = body.to_vec();
        if let Some(key) = &header.key {
            let key = key.opened(keys, cluster, name, &about)?;
            let wrong = |_| NOT_OPENED.to_owned();
            body = seal::open(&key, body, &about).map_err(wrong)?;
        }
        Ok(Content {
            chunks,
            body: unpack(&body, self.largest_body)?,
            is_sealed: header.key.is_some(),
        })
    }

    /// Wraps the key of an object with the newest key. The body stays as it is.
    pub(crate) fn rewrap(
        self,
        bytes: &[u8],
        cluster: &str,
        name: &ImageName,
        keys: &Keys,
    ) -> Rewrap {
        let Ok((mut header, body)) = self.header(bytes, cluster, name) else {
            return Rewrap::Settled;
        };
        let Some(key) = header.key.as_mut() else {
            return Rewrap::Settled;
        };
        if keys.newest_id() == Some(&key.id) {
            return Rewrap::Settled;
        }
        let older = key.id.clone();
        let about = self.about(cluster, name);
        let opened = key.opened(keys, cluster, name, &about);
        let newest = keys.newest(cluster, name.namespace());
        let (Ok(opened), Ok(Some((id, newest)))) = (opened, newest) else {
            return Rewrap::Impossible { older };
        };
        *key = WrappedKey::of(&opened, id, &newest, &about);
        match self.joined(&header, body) {
            Ok(bytes) => Rewrap::Done { older, bytes },
            Err(_) => Rewrap::Impossible { older },
        }
    }

    /// Reads the header of an object; returns it and the body as it is stored.
    pub(crate) fn header<'a>(
        self,
        bytes: &'a [u8],
        cluster: &str,
        name: &ImageName,
    ) -> Result<(Header, &'a [u8]), String> {
        let end = bytes.iter().position(|byte| *byte == b'\n');
        let (line, body) = bytes.split_at(end.ok_or("it has no header")?);
        let header: Header = serde_json::from_slice(line).map_err(|e| e.to_string())?;
        if header.magic != self.magic || header.version != VERSION {
            let (magic, version) = (&header.magic, header.version);
            return Err(format!(
                "it is {magic:?} of version {version}, not {:?} of {VERSION}",
                self.magic
            ));
        }
        let (in_namespace, is) = (&header.namespace, &header.image);
        if header.cluster != cluster || in_namespace != name.namespace() || is != name.image() {
            return Err(format!("it is image {is} of namespace {in_namespace}"));
        }
        Ok((header, &body[1..]))
    }
}

impl Header {
    pub(crate) fn names(&self) -> Result<Vec<ChunkName>, String> {
        let names = self.chunks.iter().map(|name| {
            let parsed = ChunkName::parse(name);
            parsed.ok_or_else(|| format!("{name:?} is not the name of a chunk"))
        });
        names.collect()
    }
}

fn unpack(packed: &[u8], largest: u64) -> Result<Vec<u8>, String> {
    let unpacked = zstd::stream::Decoder::new(packed).map_err(|e| e.to_string())?;
    let mut body = Vec::new();
    let mut limited = unpacked.take(largest + 1);
    limited.read_to_end(&mut body).map_err(|e| e.to_string())?;
    match body.len() as u64 > largest {
        true => Err(format!("its body has more than {largest} bytes")),
        false => Ok(body),
    }
}
