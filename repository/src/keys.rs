//! The file of encryption keys, one on each line.
//!
//! ```text
//! <id>:<32 bytes in base64>   a key in clear
//! <id>:kms:<word>             a key that a KMS has sealed (kms.rs)
//! ```
//!
//! The first key seals new objects. All keys open older ones.

use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use futures::future::join_all;

use crate::file;
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
    /// The key is sealed and was not opened; holds the reason.
    Shut(String),
}

/// Error: a sealed key was not opened.
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
    #[error("{}: {invalid}", path.display())]
    File { path: PathBuf, invalid: InvalidKeys },
    #[error(transparent)]
    Lines(#[from] InvalidKeys),
    #[error("key {id:?} is there already: choose another id")]
    Taken { id: String },
    #[error("{id:?} is not an id of a key: it needs a character, and no colon or white space")]
    Id { id: String },
    #[error("cannot seal key {id:?}")]
    Kms {
        id: String,
        #[source]
        source: KmsError,
    },
}

/// Error: a text does not hold keys.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "line {line} of the encryption keys is neither `<id>:<32 bytes in base64>` nor `<id>:kms:<sealed key>` with an id of its own"
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

    /// Returns the ids, that of the key for new objects first.
    pub fn ids(&self) -> impl Iterator<Item = &str> {
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

/// Time for which a key that the KMS did not open is not asked for again.
const SHUT_FOR: Duration = Duration::from_secs(15);

/// A file of keys, and the KMS plug-in that opens those that are sealed.
pub struct KeyFile {
    path: PathBuf,
    kms: Option<Kms>,
    /// Answers of the plug-in. Keys stay open while it does not answer.
    answers: Mutex<HashMap<SealedKey, Answer>>,
}

#[derive(Clone)]
enum Answer {
    Opened([u8; KEY]),
    Failed { why: String, at: Instant },
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
            answers: Mutex::default(),
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

    async fn opened(&self, sealed: &SealedKey) -> Result<[u8; KEY], String> {
        let Some(kms) = &self.kms else {
            return Err("a KMS has sealed it, and no --repository-kms is set".to_owned());
        };
        match self.answers().get(sealed) {
            Some(Answer::Opened(key)) => return Ok(*key),
            Some(Answer::Failed { why, at }) if at.elapsed() < SHUT_FOR => return Err(why.clone()),
            _ => {}
        }
        let (answer, opened) = match kms.open(sealed).await {
            Ok(key) => (Answer::Opened(key), Ok(key)),
            Err(error) => {
                let (why, at) = (error.to_string(), Instant::now());
                (
                    Answer::Failed {
                        why: why.clone(),
                        at,
                    },
                    Err(why),
                )
            }
        };
        self.answers().insert(sealed.clone(), answer);
        opened
    }

    fn answers(&self) -> std::sync::MutexGuard<'_, HashMap<SealedKey, Answer>> {
        self.answers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lines(&self) -> Result<Vec<(String, Line)>, KeysError> {
        let text = file::read(&self.path, LARGEST).map_err(|source| KeysError::Read {
            path: self.path.clone(),
            source,
        })?;
        let text = text.unwrap_or_default();
        lines(&text).map_err(|invalid| KeysError::File {
            path: self.path.clone(),
            invalid,
        })
    }
}

/// Returns the lines of `text` with each key sealed by the newest key of the KMS, after the line of
/// a new random key with the id `add`.
///
/// No line is returned unless the KMS has sealed all keys and opens them again.
pub async fn seal_keys(text: &str, kms: &Kms, add: Option<&str>) -> Result<String, KeysError> {
    let lines = lines(text)?;
    let mut all = Vec::new();
    if let Some(id) = add {
        check_id(id, &lines)?;
        all.push((id.to_owned(), Line::Clear(seal::random_key())));
    }
    all.extend(lines);
    let mut sealed = String::new();
    for (id, line) in all {
        let word = sealed_word(line, kms).await;
        let word = word.map_err(|source| KeysError::Kms {
            id: id.clone(),
            source,
        })?;
        sealed.push_str(&format!("{id}:kms:{word}\n"));
    }
    Ok(sealed)
}

async fn sealed_word(line: Line, kms: &Kms) -> Result<String, KmsError> {
    let key = match line {
        Line::Clear(key) => key,
        Line::Sealed(sealed) => kms.open(&sealed).await?,
    };
    let sealed = kms.seal(&key).await?;
    match kms.open(&sealed).await? == key {
        true => Ok(sealed.text()),
        false => Err(kms.failed("seal a key with", "it opens the sealed key as another one")),
    }
}

/// Key of one line.
enum Line {
    Clear([u8; KEY]),
    Sealed(SealedKey),
}

/// Reads lines, each with an id of its own. Empty lines are ignored.
fn lines(text: &str) -> Result<Vec<(String, Line)>, InvalidKeys> {
    let mut ids = HashSet::new();
    let lines = text.lines().map(str::trim).enumerate();
    let lines = lines.filter(|(_, line)| !line.is_empty());
    let parsed = lines.map(|(at, line)| {
        let parsed = line.split_once(':').and_then(|(id, key)| {
            let key = match key.strip_prefix("kms:") {
                Some(sealed) => Line::Sealed(SealedKey::parse(sealed)?),
                None => Line::Clear(STANDARD.decode(key).ok()?.try_into().ok()?),
            };
            let is_new = !id.is_empty() && ids.insert(id);
            is_new.then(|| (id.to_owned(), key))
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
    fn two_keys_with_one_id_are_refused() {
        let twice = line("a", 1) + &line("b", 1) + &line("a", 2);
        assert_eq!(Keys::parse(&twice).err(), Some(InvalidKeys { line: 3 }));
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
    async fn no_line_is_sealed_unless_all_are() {
        let kms = Kms::at(Path::new("/nonexistent/kms.sock"));
        let refused = async |text: &str, add| {
            let sealed = seal_keys(text, &kms, add).await;
            let error = sealed.expect_err("refused");
            let source = std::error::Error::source(&error).map(ToString::to_string);
            format!("{error} {}", source.unwrap_or_default())
        };
        let text = line("a", 1);
        assert!(refused(&text, Some("a")).await.contains("is there already"));
        for id in ["b:c", "", "b c"] {
            assert!(
                refused(&text, Some(id)).await.contains("is not an id"),
                "{id}"
            );
        }
        assert!(refused("nonsense", None).await.contains("line 1"));
        let words = refused(&text, None).await;
        assert!(
            words.contains("\"a\"") && words.contains("kms.sock"),
            "{words}"
        );
    }
}
