//! The ledger of one sandbox: what was begun and what was done with its memory, append-only.
//!
//! This module holds the bytes' meaning; files are read and written by `torpor-snapshots`.
//!
//! ```text
//! "TORPORL1"  8 bytes   magic
//! version     u32 LE    1
//! record      any number of:
//!   len       u32 LE    bytes of JSON, 2 ..= 65536
//!   crc32     u32 LE    IEEE CRC of those bytes
//!   JSON      len bytes one object: Entry
//! ```
//!
//! A record is written by one append and is durable before what it announces happens. So the only damage that a crash can leave
//! is at the end: a record cut short, or zero bytes (the file grew, the data did not follow). That tail is dropped. Everything
//! else (a wrong checksum, an unknown version, a record that no longer fits) is corruption, and then nothing is restored or
//! removed on the ledger's word.
//!
//! # Which image may be restored without being asked for by name
//! The one that [`Memory`] names: from [`Entry::Committed`] (the sandbox has been paused since before its memory was read) until
//! [`Entry::Awake`], which is written before a sandbox is resumed, or after it was restored. From then on the image is stale. (Where the sandbox
//! ended with the word to run on unread, [`Entry::Committed`] follows, and the image is its memory as before.)
//! [`Entry::Waking`] without an outcome means that a restore was begun and may have got anywhere. If the sandbox runs, it is
//! awake. If it does not, nothing of it ran to its end that anybody waited for (every caller of a wake waits for
//! [`Entry::Awake`]), and the same image may be restored once more.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use crate::ids::{ImageId, SnapshotUid};

/// The first eight bytes of every ledger.
pub const MAGIC: &[u8; 8] = b"TORPORL1";
/// The version written; the only one read so far.
pub const VERSION: u32 = 1;
/// Bytes before the first record.
pub const HEADER_LEN: usize = 12;
/// Largest record body, in bytes.
pub const MAX_RECORD: usize = 64 * 1024;
const RECORD_HEAD: usize = 8;

/// One record.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "entry", deny_unknown_fields)]
pub enum Entry {
    /// The sandbox is paused and its memory is about to be read into `image`, on behalf of `snapshots` (may be none).
    Saving {
        image: ImageId,
        #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
        snapshots: BTreeSet<SnapshotUid>,
    },
    /// `image` is complete, durable and in its final place; the sandbox is still paused. Written again after [`Entry::Awake`] when the sandbox ended before it
    /// was resumed.
    Committed { image: ImageId },
    /// `image`, committed before, is also the image of these snapshots.
    Adopted {
        image: ImageId,
        snapshots: BTreeSet<SnapshotUid>,
    },
    /// The sandbox's processes are being ended; its memory is `image`. Written again when only `by_itself` changes.
    Asleep {
        image: ImageId,
        /// Nobody asked for it: it was idle.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        by_itself: bool,
    },
    /// A restore of `image` begins.
    Waking { image: ImageId },
    /// The sandbox runs, or is about to be resumed: no image is its memory any more.
    Awake,
    /// A restore of `image` ended without a sandbox; `reason` is CamelCase.
    WakeFailed { image: ImageId, reason: String },
    /// The bytes of `image` are gone.
    Discarded { image: ImageId },
    /// All earlier records, folded: the first record of a ledger that was rewritten because it had grown long.
    Folded { state: LedgerState },
}

/// What follows the last good record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tail {
    /// Nothing.
    Clean,
    /// `len` bytes from `offset` on belong to a record that never became whole; drop them before appending.
    Torn { offset: u64, len: u64 },
}

/// Why bytes are not a ledger. Offsets count from the start of the file.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    #[error("the ledger does not begin with {MAGIC:?}")]
    Magic,
    #[error("the ledger has version {found}, this program reads version {VERSION}")]
    Version { found: u32 },
    #[error("the ledger is corrupt at byte {offset}: {fault}")]
    Corrupt { offset: u64, fault: Fault },
    #[error("the record has {len} bytes, at most {MAX_RECORD} are allowed")]
    TooLarge { len: usize },
}

/// What is wrong with a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    #[error("a record length of {0} is not possible")]
    Length(u32),
    #[error("the checksum does not match")]
    Checksum,
    #[error("the record is not an entry that this version knows")]
    Entry,
}

impl Error {
    /// Stable name for conditions and metrics.
    pub fn reason(&self) -> &'static str {
        "LedgerCorrupt"
    }
}

/// The header of a new ledger.
pub fn encode_header() -> [u8; HEADER_LEN] {
    let mut header = [0; HEADER_LEN];
    header[..MAGIC.len()].copy_from_slice(MAGIC);
    header[MAGIC.len()..].copy_from_slice(&VERSION.to_le_bytes());
    header
}

/// One record, ready to be appended by a single write.
pub fn encode(entry: &Entry) -> Result<Vec<u8>, Error> {
    let json = serde_json::to_vec(entry)
        .expect("an entry holds only strings, numbers and maps with string keys");
    let len = u32::try_from(json.len())
        .ok()
        .filter(|_| json.len() <= MAX_RECORD);
    let len = len.ok_or(Error::TooLarge { len: json.len() })?;
    let mut record = Vec::with_capacity(RECORD_HEAD + json.len());
    record.extend_from_slice(&len.to_le_bytes());
    record.extend_from_slice(&crc32fast::hash(&json).to_le_bytes());
    record.extend_from_slice(&json);
    Ok(record)
}

/// Reads a whole ledger. Bytes shorter than the header that are its beginning (a crash at creation) are an empty torn ledger.
pub fn decode(bytes: &[u8]) -> Result<(Vec<Entry>, Tail), Error> {
    if bytes.len() < HEADER_LEN {
        let torn = encode_header().starts_with(bytes) || bytes.iter().all(|b| *b == 0);
        return match torn {
            true => Ok((Vec::new(), tail_at(bytes, 0))),
            false => Err(Error::Magic),
        };
    }
    if !bytes.starts_with(MAGIC) {
        return Err(Error::Magic);
    }
    let version = read_u32(bytes, MAGIC.len());
    if version != VERSION {
        return Err(Error::Version { found: version });
    }
    let mut entries = Vec::new();
    let mut offset = HEADER_LEN;
    loop {
        match record_at(bytes, offset)? {
            Found::Entry(entry, next) => {
                entries.push(entry);
                offset = next;
            }
            Found::End => return Ok((entries, tail_at(bytes, offset))),
        }
    }
}

enum Found {
    Entry(Entry, usize),
    End,
}

fn tail_at(bytes: &[u8], offset: usize) -> Tail {
    match bytes.len() - offset {
        0 => Tail::Clean,
        len => Tail::Torn {
            offset: offset as u64,
            len: len as u64,
        },
    }
}

fn read_u32(bytes: &[u8], at: usize) -> u32 {
    let mut word = [0; 4];
    word.copy_from_slice(&bytes[at..at + 4]);
    u32::from_le_bytes(word)
}

fn record_at(bytes: &[u8], offset: usize) -> Result<Found, Error> {
    let rest = &bytes[offset..];
    if rest.len() < RECORD_HEAD || rest.iter().all(|b| *b == 0) {
        return Ok(Found::End);
    }
    let corrupt = |fault| {
        Err(Error::Corrupt {
            offset: offset as u64,
            fault,
        })
    };
    let len = read_u32(rest, 0);
    let Some(body_len) = usize::try_from(len)
        .ok()
        .filter(|len| (2..=MAX_RECORD).contains(len))
    else {
        return corrupt(Fault::Length(len));
    };
    let body = &rest[RECORD_HEAD..];
    if body.len() < body_len {
        // Cut short, or the length itself was damaged? The beginning of one JSON object never holds a whole one.
        return match holds_whole_value(body) {
            true => corrupt(Fault::Length(len)),
            false => Ok(Found::End),
        };
    }
    let json = &body[..body_len];
    if crc32fast::hash(json) != read_u32(rest, 4) {
        return corrupt(Fault::Checksum);
    }
    match serde_json::from_slice(json) {
        Ok(entry) => Ok(Found::Entry(entry, offset + RECORD_HEAD + body_len)),
        Err(_) => corrupt(Fault::Entry),
    }
}

fn holds_whole_value(bytes: &[u8]) -> bool {
    let mut values =
        serde_json::Deserializer::from_slice(bytes).into_iter::<serde::de::IgnoredAny>();
    matches!(values.next(), Some(Ok(_)))
}

/// Where the newest memory of the sandbox is, as far as the ledger knows.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(tag = "in", deny_unknown_fields)]
pub enum Memory {
    /// In the sandbox, if there is one. Every image is stale.
    #[default]
    Live,
    /// In the paused sandbox; `image` may or may not have become whole.
    Saving { image: ImageId },
    /// In the paused sandbox and, the same, in `image`.
    Committed { image: ImageId },
    /// In `image`.
    Asleep {
        image: ImageId,
        /// Nobody asked for it: it sleeps until somebody needs it.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        by_itself: bool,
    },
    /// In `image`, unless the sandbox turns out to run.
    Waking { image: ImageId },
    /// In `image`; the last restore ended without a sandbox.
    WakeFailed { image: ImageId, reason: String },
}

impl Memory {
    /// The image named by this state.
    pub fn image(&self) -> Option<&ImageId> {
        match self {
            Memory::Live => None,
            Memory::Saving { image }
            | Memory::Committed { image }
            | Memory::Asleep { image, .. }
            | Memory::Waking { image }
            | Memory::WakeFailed { image, .. } => Some(image),
        }
    }
}

/// What the ledger knows about one image.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ImageRecord {
    /// It became whole.
    pub committed: bool,
    /// The sandbox ran on after it, or is about to: who restores it goes back in time.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub left: bool,
    /// The snapshots it was made for or adopted by.
    pub snapshots: BTreeSet<SnapshotUid>,
}

/// A ledger, folded.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LedgerState {
    /// Records so far, those of a rewritten ledger included. 0: there is no ledger. Plans are fenced by it.
    pub seq: u64,
    /// Highest image number ever named; never goes back, so that a number is used once.
    pub last_number: u32,
    /// Where the newest memory is.
    pub memory: Memory,
    /// Images named and not discarded.
    pub images: BTreeMap<ImageId, ImageRecord>,
}

impl LedgerState {
    /// Folds entries in order.
    pub fn fold<'a>(entries: impl IntoIterator<Item = &'a Entry>) -> Self {
        let mut state = Self::default();
        for entry in entries {
            state.apply(entry);
        }
        state
    }

    /// Adds one entry.
    pub fn apply(&mut self, entry: &Entry) {
        if let Entry::Folded { state } = entry {
            self.clone_from(state);
            return;
        }
        self.seq += 1;
        match entry {
            Entry::Saving { image, snapshots } => {
                self.last_number = self.last_number.max(image.number());
                let record = self.images.entry(image.clone()).or_default();
                record.snapshots.extend(snapshots.iter().cloned());
                self.memory = Memory::Saving {
                    image: image.clone(),
                };
            }
            Entry::Committed { image } => {
                self.last_number = self.last_number.max(image.number());
                let record = self.images.entry(image.clone()).or_default();
                record.committed = true;
                // Again after Awake: it ended before it ran.
                record.left = false;
                self.memory = Memory::Committed {
                    image: image.clone(),
                };
            }
            Entry::Adopted { image, snapshots } => {
                let record = self.images.entry(image.clone()).or_default();
                record.snapshots.extend(snapshots.iter().cloned());
            }
            Entry::Asleep { image, by_itself } => {
                self.memory = Memory::Asleep {
                    image: image.clone(),
                    by_itself: *by_itself,
                }
            }
            Entry::Waking { image } => {
                self.memory = Memory::Waking {
                    image: image.clone(),
                }
            }
            Entry::Awake => {
                let image = self.memory.image().cloned();
                if let Some(record) = image.and_then(|image| self.images.get_mut(&image)) {
                    record.left = true;
                }
                self.memory = Memory::Live;
            }
            Entry::WakeFailed { image, reason } => {
                self.memory = Memory::WakeFailed {
                    image: image.clone(),
                    reason: reason.clone(),
                };
            }
            Entry::Discarded { image } => {
                self.images.remove(image);
                if self.memory.image() == Some(image) {
                    self.memory = Memory::Live;
                }
            }
            Entry::Folded { .. } => {}
        }
    }

    /// The image that may be restored without being asked for by name, given which images lie whole in the store (`held`).
    ///
    /// [`Memory::Saving`] counts when the image is held: it was moved to its place, and the crash came before the ledger said so.
    /// A caller must know that the sandbox does not run.
    pub fn restorable(&self, held: impl Fn(&ImageId) -> bool) -> Option<&ImageId> {
        self.memory.image().filter(|image| held(image))
    }

    /// Whether the sandbox ran on after `image` was made: restore it only when asked for by name.
    pub fn is_stale(&self, image: &ImageId) -> bool {
        self.memory.image() != Some(image)
    }

    /// Whether the sandbox ran on after `image`, also when it was asked for by name since and is its memory again.
    pub fn was_left(&self, image: &ImageId) -> bool {
        self.images.get(image).is_some_and(|record| record.left)
    }

    /// The newest committed image made for, or adopted by, a snapshot.
    pub fn image_of(&self, snapshot: &SnapshotUid) -> Option<&ImageId> {
        let mine = |record: &ImageRecord| record.committed && record.snapshots.contains(snapshot);
        self.images
            .iter()
            .rev()
            .find(|(_, record)| mine(record))
            .map(|(image, _)| image)
    }
}

#[cfg(test)]
mod tests;
