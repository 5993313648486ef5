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

use crate::names::ChunkName;

/// Bytes of a key.
pub(crate) const KEY: usize = 32;
/// Contexts of the derivations (BLAKE3, section 5.2: fixed and unique texts).
const NAMESPACE: &str = "torpor.dev 2026-11-27 repository: namespace";
const NAMES: &str = "torpor.dev 2026-11-27 repository: chunk names";
const CHUNKS: &str = "torpor.dev 2026-11-27 repository: chunk keys";
const WRAP: &str = "torpor.dev 2026-11-27 repository: image keys";

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
    pub(crate) fn new(key: &[u8; KEY], cluster: &str, namespace: &str) -> Self {
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

/// Returns 16 random hexadecimal digits.
pub(crate) fn random_word() -> String {
    ChunkName(random_key()).hex()[..16].to_owned()
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
