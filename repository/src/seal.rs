//! Encryption of chunks and indexes: AES-256-GCM, with keys derived by BLAKE3.
//!
//! ```text
//! key of the Secret ── cluster, namespace ──► namespace's keys: names, chunks, wrap
//!   chunk's name = keyed hash of its content, with `names`
//!   chunk's key  = keyed hash of its content, with `chunks`; kept in the image's index
//!   image's key  = random; seals the index; kept beside it, sealed with `wrap`
//! ```
//!
//! Equal chunks of a namespace have one name, so they are stored once, and a name tells nothing to
//! a reader without the key. A chunk can be read only with an index that names it, so the deletion
//! of an image's wrapped key is the deletion of the image.

use aws_lc_rs::aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;

use crate::names::ChunkName;

const KEY: usize = 32;
/// Contexts of the derivations (BLAKE3, section 5.2: fixed and unique texts).
const NAMESPACE: &str = "torpor.dev 2026-11-27 repository: namespace";
const NAMES: &str = "torpor.dev 2026-11-27 repository: chunk names";
const CHUNKS: &str = "torpor.dev 2026-11-27 repository: chunk keys";
const WRAP: &str = "torpor.dev 2026-11-27 repository: image keys";

/// Keys of a repository. Without keys nothing is encrypted.
#[derive(Clone, Default)]
pub struct Keys(Vec<(String, [u8; KEY])>);

/// Error: a text does not hold keys.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("line {line} of the encryption keys is not `<id>:<32 bytes in base64>`")]
pub struct InvalidKeys {
    pub line: usize,
}

impl std::fmt::Debug for Keys {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list()
            .entries(self.0.iter().map(|(id, _)| id))
            .finish()
    }
}

impl Keys {
    /// Reads one key per line, `<id>:<32 bytes in base64>`. The first key seals new images, and all
    /// keys open older ones. Empty lines are ignored.
    pub fn parse(text: &str) -> Result<Self, InvalidKeys> {
        let lines = text.lines().map(str::trim).enumerate();
        let keys = lines
            .filter(|(_, line)| !line.is_empty())
            .map(|(at, line)| {
                let invalid = InvalidKeys { line: at + 1 };
                let (id, key) = line.split_once(':').ok_or_else(|| invalid.clone())?;
                let bytes = STANDARD.decode(key).map_err(|_| invalid.clone())?;
                let key = <[u8; KEY]>::try_from(bytes).map_err(|_| invalid.clone())?;
                match id.is_empty() {
                    true => Err(invalid),
                    false => Ok((id.to_owned(), key)),
                }
            });
        keys.collect::<Result<_, _>>().map(Self)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the id of the key for new images, and its sealer; none without keys.
    pub(crate) fn newest(&self, cluster: &str, namespace: &str) -> Option<(&str, Sealer)> {
        let (id, key) = self.0.first()?;
        Some((id, Sealer::new(key, cluster, namespace)))
    }

    pub(crate) fn named(&self, id: &str, cluster: &str, namespace: &str) -> Option<Sealer> {
        let (_, key) = self.0.iter().find(|(known, _)| known == id)?;
        Some(Sealer::new(key, cluster, namespace))
    }
}

/// Keys of one namespace.
#[derive(Clone)]
pub(crate) struct Sealer {
    names: [u8; KEY],
    chunks: [u8; KEY],
    wrap: [u8; KEY],
}

impl std::fmt::Debug for Sealer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Sealer")
    }
}

/// Error: the bytes were not sealed with this key, or were changed.
#[derive(Debug)]
pub(crate) struct NotSealed;

impl Sealer {
    fn new(key: &[u8; KEY], cluster: &str, namespace: &str) -> Self {
        let mut material = blake3::Hasher::new_derive_key(NAMESPACE);
        material.update(key);
        for part in [cluster, namespace] {
            // The length keeps two pairs with the same text apart.
            material.update(&(part.len() as u64).to_le_bytes());
            material.update(part.as_bytes());
        }
        let of_namespace = material.finalize();
        let derive = |context| blake3::derive_key(context, of_namespace.as_bytes());
        Self {
            names: derive(NAMES),
            chunks: derive(CHUNKS),
            wrap: derive(WRAP),
        }
    }

    pub(crate) fn name(&self, content: &[u8]) -> ChunkName {
        ChunkName(*blake3::keyed_hash(&self.names, content).as_bytes())
    }

    pub(crate) fn chunk_key(&self, content: &[u8]) -> [u8; KEY] {
        *blake3::keyed_hash(&self.chunks, content).as_bytes()
    }

    pub(crate) fn wrap(&self, image_key: &[u8; KEY], about: &[u8]) -> Vec<u8> {
        seal(&self.wrap, image_key.to_vec(), about)
    }

    pub(crate) fn unwrap(&self, wrapped: Vec<u8>, about: &[u8]) -> Result<[u8; KEY], NotSealed> {
        let key = open(&self.wrap, wrapped, about)?;
        key.try_into().map_err(|_| NotSealed)
    }
}

/// Returns a random key.
pub(crate) fn random_key() -> [u8; KEY] {
    let mut key = [0; KEY];
    aws_lc_rs::rand::fill(&mut key).expect("the system's random numbers");
    key
}

fn aead(key: &[u8; KEY]) -> LessSafeKey {
    LessSafeKey::new(UnboundKey::new(&AES_256_GCM, key).expect("a key of 32 bytes"))
}

/// Returns nonce, sealed bytes and tag. `about` is authenticated and not contained.
///
/// The nonce is random: one key seals one content, but compressed by several versions of zstd.
pub(crate) fn seal(key: &[u8; KEY], mut content: Vec<u8>, about: &[u8]) -> Vec<u8> {
    let mut nonce = [0; NONCE_LEN];
    aws_lc_rs::rand::fill(&mut nonce).expect("the system's random numbers");
    let sealing = Nonce::assume_unique_for_key(nonce);
    aead(key)
        .seal_in_place_append_tag(sealing, Aad::from(about), &mut content)
        .expect("content below 64 GiB");
    [&nonce[..], &content].concat()
}

/// Returns the content of what [`seal`] returned.
pub(crate) fn open(
    key: &[u8; KEY],
    mut sealed: Vec<u8>,
    about: &[u8],
) -> Result<Vec<u8>, NotSealed> {
    let (nonce, _) = sealed.split_first_chunk::<NONCE_LEN>().ok_or(NotSealed)?;
    let nonce = Nonce::assume_unique_for_key(*nonce);
    let opened = aead(key).open_within(nonce, Aad::from(about), &mut sealed, NONCE_LEN..);
    let length = opened.map_err(|_| NotSealed)?.len();
    sealed.truncate(length);
    Ok(sealed)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(text: &str) -> Keys {
        Keys::parse(text).expect("keys")
    }

    fn line(id: &str, byte: u8) -> String {
        format!("{id}:{}\n", STANDARD.encode([byte; KEY]))
    }

    #[test]
    fn keys_are_lines_and_the_first_one_seals() {
        let both = keys(&format!("\n{}{}", line("new", 2), line("old", 1)));
        let (id, newest) = both.newest("c", "n").expect("a key");
        assert_eq!(id, "new");
        let old = both.named("old", "c", "n").expect("a key");
        assert_ne!(newest.name(b"x"), old.name(b"x"));
        assert!(both.named("other", "c", "n").is_none());
        assert!(keys("").newest("c", "n").is_none());
        assert!(!format!("{both:?}").contains(&STANDARD.encode([2; KEY])));
        for bad in ["k", "k:AAAA", ":AAAA", &line("", 1), "k:!"] {
            assert_eq!(
                Keys::parse(bad).expect_err(bad),
                InvalidKeys { line: 1 },
                "{bad:?}"
            );
        }
    }

    #[test]
    fn namespaces_and_clusters_share_no_key() {
        let keys = keys(&line("k", 1));
        let name =
            |cluster, namespace| keys.newest(cluster, namespace).expect("a key").1.name(b"x");
        assert_eq!(name("c", "n"), name("c", "n"));
        for (cluster, namespace) in [("c", "m"), ("d", "n"), ("cn", ""), ("", "cn")] {
            assert_ne!(name("c", "n"), name(cluster, namespace));
        }
    }

    #[test]
    fn only_the_same_key_and_the_same_subject_open() {
        let (key, other) = ([1; KEY], [2; KEY]);
        let sealed = seal(&key, b"memory".to_vec(), b"image 1");
        assert!(!sealed.windows(6).any(|part| part == b"memory"));
        assert_eq!(
            open(&key, sealed.clone(), b"image 1").expect("opened"),
            b"memory"
        );
        open(&other, sealed.clone(), b"image 1").expect_err("another key");
        open(&key, sealed.clone(), b"image 2").expect_err("another image");
        for at in 0..sealed.len() {
            let mut changed = sealed.clone();
            changed[at] ^= 1;
            open(&key, changed, b"image 1").expect_err("changed");
        }
        open(&key, sealed[..NONCE_LEN - 1].to_vec(), b"image 1").expect_err("cut");
    }
}
