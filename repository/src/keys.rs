//! The file of encryption keys, one on each line.
//!
//! ```text
//! <id>:<32 bytes in base64>   a key in clear
//! <id>:kms:<word>             a key that a KMS has sealed (kms.rs)
//! ```
//!
//! The first key seals new objects. All keys open older ones.

use std::collections::HashMap;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use futures::future::join_all;

use crate::kms::{Kms, KmsError, SealedKey};
use crate::seal::{self, KEY, Sealer};

/// Largest file of keys, in bytes: the largest Secret.
const LARGEST: u64 = 1 << 20;

/// Keys of a repository. Without keys nothing is encrypted.
#[derive(Clone, Default)]
pub struct Keys(Vec<(String, Key)>);

#[derive(Clone)]
enum Key {
    Open([u8; KEY]),
    /// The KMS has not opened the key; holds the reason.
    Shut(String),
}

/// Error: the KMS has not opened a key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct KeyShut {
    pub(crate) id: String,
    pub(crate) why: String,
}

/// Error: there are no keys to use.
#[derive(Debug, thiserror::Error)]
pub enum KeysError {
    #[error("cannot read {}", path.display())]
    Read {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    #[error("{}: {source}", path.display())]
    Line { path: PathBuf, source: InvalidKeys },
    #[error("key {id:?} is there already: choose another id")]
    Taken { id: String },
    #[error("{id:?} is not an id of a key: it needs a character, and no colon or white space")]
    Id { id: String },
    #[error("key {id:?}: {source}")]
    Kms { id: String, source: KmsError },
}

/// Error: a text does not hold keys.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "line {line} of the encryption keys is neither `<id>:<32 bytes in base64>` nor `<id>:kms:<sealed key>`"
)]
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
    /// Reads keys in clear. For tests.
    pub fn parse(text: &str) -> Result<Self, InvalidKeys> {
        let lines = lines(text)?.into_iter().enumerate();
        let keys = lines.map(|(at, (id, line))| match line {
            Line::Clear(key) => Ok((id, Key::Open(key))),
            Line::Sealed(_) => Err(InvalidKeys { line: at + 1 }),
        });
        keys.collect::<Result<_, _>>().map(Self)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn ids(&self) -> impl Iterator<Item = &str> {
        self.0.iter().map(|(id, _)| id.as_str())
    }

    /// Returns the id of the key for new objects.
    pub(crate) fn newest_id(&self) -> Option<&str> {
        self.ids().next()
    }

    /// Returns the id of the key for new objects, and its sealer; none without keys.
    pub(crate) fn newest(
        &self,
        cluster: &str,
        namespace: &str,
    ) -> Result<Option<(String, Sealer)>, KeyShut> {
        let Some(id) = self.newest_id() else {
            return Ok(None);
        };
        let sealer = self.named(id, cluster, namespace)?;
        Ok(sealer.map(|sealer| (id.to_owned(), sealer)))
    }

    pub(crate) fn named(
        &self,
        id: &str,
        cluster: &str,
        namespace: &str,
    ) -> Result<Option<Sealer>, KeyShut> {
        match self.0.iter().find(|(known, _)| known == id) {
            None => Ok(None),
            Some((_, Key::Open(key))) => Ok(Some(Sealer::new(key, cluster, namespace))),
            Some((_, Key::Shut(why))) => Err(KeyShut {
                id: id.to_owned(),
                why: why.clone(),
            }),
        }
    }
}

/// A file of keys, and the KMS plug-in that opens those that are sealed.
pub struct KeyFile {
    path: PathBuf,
    kms: Option<Kms>,
    /// Keys that the plug-in has opened, so that images can be read while it does not answer.
    opened: Mutex<HashMap<SealedKey, [u8; KEY]>>,
}

impl std::fmt::Debug for KeyFile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (path, kms) = (&self.path, &self.kms);
        write!(f, "KeyFile({}, {kms:?})", path.display())
    }
}

impl KeyFile {
    /// Names a file and the socket of a KMS plug-in. Reads nothing.
    pub fn new(path: &Path, kms: Option<&Path>) -> Self {
        Self {
            path: path.to_owned(),
            kms: kms.map(Kms::at),
            opened: Mutex::default(),
        }
    }

    /// Reads the file. A missing file has no keys. A key that the KMS does not open is an error
    /// only for what needs that key.
    pub async fn read(&self) -> Result<Keys, KeysError> {
        let keys = self.lines()?.into_iter().map(async |(id, line)| {
            let key = match line {
                Line::Clear(key) => Key::Open(key),
                Line::Sealed(sealed) => match self.opened(&sealed).await {
                    Ok(key) => Key::Open(key),
                    Err(why) => Key::Shut(why),
                },
            };
            (id, key)
        });
        Ok(Keys(join_all(keys).await))
    }

    /// Returns the lines of the file with each key sealed by the newest key of the KMS, after the
    /// line of a new random key with the id `add`.
    ///
    /// It needs all keys: an error keeps a key from being lost.
    pub async fn sealed(&self, kms: &Kms, add: Option<&str>) -> Result<String, KeysError> {
        let mut text = String::new();
        let mut all = Vec::new();
        let lines = self.lines()?;
        if let Some(id) = add {
            check_id(id, &lines)?;
            all.push((id.to_owned(), Line::Clear(seal::random_key())));
        }
        all.extend(lines);
        for (id, line) in all {
            let failed = |source| KeysError::Kms {
                id: id.clone(),
                source,
            };
            let key = match line {
                Line::Clear(key) => key,
                Line::Sealed(sealed) => kms.open(&sealed).await.map_err(failed)?,
            };
            let sealed = kms.seal(&key).await.map_err(failed)?;
            text.push_str(&format!("{id}:kms:{}\n", sealed.text()));
        }
        Ok(text)
    }

    async fn opened(&self, sealed: &SealedKey) -> Result<[u8; KEY], String> {
        let Some(kms) = &self.kms else {
            return Err("a KMS has sealed it, and no --repository-kms is set".to_owned());
        };
        if let Some(key) = self.cache().get(sealed) {
            return Ok(*key);
        }
        let key = kms.open(sealed).await.map_err(|error| error.to_string())?;
        self.cache().insert(sealed.clone(), key);
        Ok(key)
    }

    fn cache(&self) -> std::sync::MutexGuard<'_, HashMap<SealedKey, [u8; KEY]>> {
        self.opened.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lines(&self) -> Result<Vec<(String, Line)>, KeysError> {
        let read = || -> std::io::Result<String> {
            let mut text = String::new();
            let file = std::fs::File::open(&self.path)?;
            file.take(LARGEST).read_to_string(&mut text)?;
            Ok(text)
        };
        let text = match read() {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(source) => {
                let path = self.path.clone();
                return Err(KeysError::Read { path, source });
            }
        };
        lines(&text).map_err(|source| KeysError::Line {
            path: self.path.clone(),
            source,
        })
    }
}

/// Key of one line.
enum Line {
    Clear([u8; KEY]),
    Sealed(SealedKey),
}

/// Reads lines, each with its id. Empty lines are ignored.
fn lines(text: &str) -> Result<Vec<(String, Line)>, InvalidKeys> {
    let lines = text.lines().map(str::trim).enumerate();
    let lines = lines.filter(|(_, line)| !line.is_empty());
    let parsed = lines.map(|(at, line)| {
        let parsed = line.split_once(':').and_then(|(id, key)| {
            let key = match key.strip_prefix("kms:") {
                Some(sealed) => Line::Sealed(SealedKey::parse(sealed)?),
                None => Line::Clear(STANDARD.decode(key).ok()?.try_into().ok()?),
            };
            (!id.is_empty()).then(|| (id.to_owned(), key))
        });
        parsed.ok_or(InvalidKeys { line: at + 1 })
    });
    parsed.collect()
}

fn check_id(id: &str, lines: &[(String, Line)]) -> Result<(), KeysError> {
    let id_text = || id.to_owned();
    if id.is_empty() || id.contains(|c: char| c == ':' || c.is_whitespace()) {
        return Err(KeysError::Id { id: id_text() });
    }
    match lines.iter().any(|(known, _)| known == id) {
        true => Err(KeysError::Taken { id: id_text() }),
        false => Ok(()),
    }
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

    /// Line of a key that no KMS here opens.
    fn sealed(id: &str) -> String {
        let json = format!(
            r#"{{"keyId":"k","ciphertext":"{}"}}"#,
            STANDARD.encode(b"x")
        );
        format!("{id}:kms:{}\n", STANDARD.encode(json))
    }

    #[test]
    fn keys_are_lines_and_the_first_one_seals() {
        let both = keys(&format!("\n{}{}", line("new", 2), line("old", 1)));
        let (id, newest) = both.newest("c", "n").expect("open").expect("a key");
        assert_eq!(id, "new");
        let old = both.named("old", "c", "n").expect("open").expect("a key");
        assert_ne!(newest.name(b"x"), old.name(b"x"));
        assert!(both.named("other", "c", "n").expect("no key").is_none());
        assert!(keys("").newest("c", "n").expect("no key").is_none());
        assert!(!format!("{both:?}").contains(&STANDARD.encode([2; KEY])));
        for bad in ["k", "k:AAAA", ":AAAA", &line("", 1), "k:!", "k:kms:AAAA"] {
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
        let name = |cluster, namespace| {
            let newest = keys.newest(cluster, namespace).expect("open");
            newest.expect("a key").1.name(b"x")
        };
        assert_eq!(name("c", "n"), name("c", "n"));
        for (cluster, namespace) in [("c", "m"), ("d", "n"), ("cn", ""), ("", "cn")] {
            assert_ne!(name("c", "n"), name(cluster, namespace));
        }
    }

    #[tokio::test]
    async fn a_key_that_the_kms_does_not_open_is_an_error_only_for_what_needs_it() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("keys");
        std::fs::write(&path, sealed("new") + &line("old", 1)).expect("written");
        let socket = dir.path().join("kms.sock");
        for (kms, named) in [(None, "--repository-kms"), (Some(&*socket), "kms.sock")] {
            let keys = KeyFile::new(&path, kms).read().await.expect("read");
            assert!(keys.named("old", "c", "n").expect("open").is_some());
            let shut = keys.newest("c", "n").expect_err("shut");
            assert_eq!(shut.id, "new");
            assert!(shut.why.contains(named), "{}", shut.why);
        }
    }

    #[tokio::test]
    async fn a_missing_file_has_no_keys_and_a_wrong_line_is_named() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("keys");
        let file = KeyFile::new(&path, None);
        assert!(file.read().await.expect("no keys").is_empty());
        std::fs::write(&path, line("a", 1) + "nonsense").expect("written");
        let error = file.read().await.expect_err("no key").to_string();
        assert!(error.contains("line 2"), "{error}");
    }

    #[tokio::test]
    async fn nothing_is_printed_unless_all_keys_are_sealed() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("keys");
        std::fs::write(&path, line("a", 1)).expect("written");
        let file = KeyFile::new(&path, None);
        let kms = Kms::at(&dir.path().join("kms.sock"));
        let refused = async |add| {
            let sealed = file.sealed(&kms, add).await;
            sealed.expect_err("refused").to_string()
        };
        assert!(refused(Some("a")).await.contains("is there already"));
        assert!(refused(Some("b:c")).await.contains("is not an id"));
        assert!(refused(None).await.contains("kms.sock"));
    }
}
