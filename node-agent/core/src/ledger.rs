//! The ledger of a sandbox: the append-only record of the actions begun and done with its memory.
//!
//! This module gives the bytes their meaning; `torpor-snapshots` reads and writes the files.
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
//! One append writes a record, and the record is durable before the action that it announces
//! begins. A crash can therefore damage only the end: a record is cut short, or bytes are zero (the
//! file grew, the data did not follow). This tail is dropped. Any other damage (an impossible
//! length, a wrong checksum, an unknown version or entry) is corruption. On the basis of a corrupt
//! ledger nothing is restored or removed.
//!
//! # The image that may be restored without a request by name
//! [`Memory`] names the image. The image is the sandbox's memory from [`Entry::Committed`] on,
//! because the sandbox has been paused since before its memory was read. The last record of this
//! state is [`Entry::Awake`], written before a sandbox is resumed, or after it was restored. From
//! then on the image is stale. (If the sandbox ended before it read the request to resume,
//! [`Entry::Committed`] follows and the image is its memory again.)
//!
//! [`Entry::Waking`] without an outcome means that a restore began and may have reached any point.
//! If the sandbox runs, it is awake. If it does not run, no caller has received a result from it,
//! because every caller of a wake waits for [`Entry::Awake`]. The same image may then be restored
//! once more.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use crate::ids::{ImageId, SnapshotUid};

/// The first eight bytes of every ledger.
pub const MAGIC: &[u8; 8] = b"TORPORL1";
/// The version that is written, and the only one that is read so far.
pub const VERSION: u32 = 1;
/// Bytes before the first record.
pub const HEADER_LEN: usize = 12;
/// Largest record body, in bytes.
pub const MAX_RECORD: usize = 64 * 1024;
const RECORD_HEAD: usize = 8;

/// A record of a ledger.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "entry", deny_unknown_fields)]
pub enum Entry {
    /// The sandbox is paused and its memory is about to be written to `image`, on behalf of
    /// `snapshots` (may be empty).
    Saving {
        image: ImageId,
        #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
        snapshots: BTreeSet<SnapshotUid>,
    },
    /// `image` is complete, durable and in its final place; the sandbox is still paused. The entry
    /// is written again after [`Entry::Awake`] if the sandbox ended before it was resumed.
    Committed { image: ImageId },
    /// `image`, committed before, becomes the image of these snapshots, too.
    Adopted {
        image: ImageId,
        snapshots: BTreeSet<SnapshotUid>,
    },
    /// The sandbox's processes are being ended; its memory is in `image`. The entry is written
    /// again if only `by_itself` changes.
    Asleep {
        image: ImageId,
        /// The sandbox sleeps because it was idle, without a request.
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
    /// The sum of all earlier records: the first record of a ledger that was rewritten because it
    /// had grown long.
    Folded { state: LedgerState },
}

/// The bytes that follow the last good record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tail {
    /// There are no further bytes.
    Clean,
    /// `len` bytes from `offset` on belong to a record that is not whole. The next append must drop
    /// these bytes first.
    Torn { offset: u64, len: u64 },
}

/// The error of bytes that are not a ledger. Offsets count from the start of the file.
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

/// The fault of a record.
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
    /// Returns a stable name for conditions and metrics.
    pub fn reason(&self) -> &'static str {
        "LedgerCorrupt"
    }
}

/// Returns the header of a new ledger.
pub fn encode_header() -> [u8; HEADER_LEN] {
    let mut header = [0; HEADER_LEN];
    header[..MAGIC.len()].copy_from_slice(MAGIC);
    header[MAGIC.len()..].copy_from_slice(&VERSION.to_le_bytes());
    header
}

/// Returns the bytes of a record, ready for one append. Errors: the record is larger than
/// [`MAX_RECORD`].
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

/// Reads a whole ledger. Bytes shorter than the header that are its beginning, or zero (a crash at
/// creation), are an empty ledger with a torn tail.
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
        // The record was cut short, or its length is damaged. The beginning of a JSON object never
        // contains a whole value, so a whole value proves a damaged length.
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

/// The place of the sandbox's newest memory, by the ledger.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(tag = "in", deny_unknown_fields)]
pub enum Memory {
    /// The memory is in the sandbox, if there is one. Every image is stale.
    #[default]
    Live,
    /// The memory is in the paused sandbox; `image` may or may not be whole.
    Saving { image: ImageId },
    /// The memory is in the paused sandbox, and the same memory is in `image`.
    Committed { image: ImageId },
    /// The memory is in `image`.
    Asleep {
        image: ImageId,
        /// The sandbox sleeps without a request, until a caller needs it.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        by_itself: bool,
    },
    /// The memory is in `image`, unless the sandbox turns out to run.
    Waking { image: ImageId },
    /// The memory is in `image`; the last restore ended without a sandbox.
    WakeFailed { image: ImageId, reason: String },
}

impl Memory {
    /// Returns the image that this state names.
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

/// The state of an image, by the ledger.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ImageRecord {
    /// The image became whole.
    pub committed: bool,
    /// The sandbox ran on after the image was made, or is about to. A restore of the image goes
    /// back in time.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub left: bool,
    /// The snapshots that the image was made for, and those that adopted it.
    pub snapshots: BTreeSet<SnapshotUid>,
}

/// The sum of a ledger's records.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LedgerState {
    /// Number of records so far, those before a rewrite of the ledger included; 0: there is no
    /// ledger. The number is part of a plan's fence.
    pub seq: u64,
    /// Highest image number that any record named. The number never decreases, so that a number is
    /// used once.
    pub last_number: u32,
    /// The sandbox has run since the Pod was made, or may have. False: its image is a link to a
    /// golden image, and holds no memory of its own.
    #[serde(default = "yes", skip_serializing_if = "is_yes")]
    pub ran: bool,
    /// The place of the newest memory.
    pub memory: Memory,
    /// Images that were named and not discarded.
    pub images: BTreeMap<ImageId, ImageRecord>,
}

/// Value of [`LedgerState::ran`] in records that do not have it.
fn yes() -> bool {
    true
}

fn is_yes(value: &bool) -> bool {
    *value
}

impl LedgerState {
    /// Returns the sum of `entries`, in their order.
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
        // A sandbox that sleeps without having run has only Committed and Asleep.
        self.ran |= !matches!(entry, Entry::Committed { .. } | Entry::Asleep { .. });
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
                // A second Committed after Awake: the sandbox ended before it ran.
                record.left = false;
                self.memory = Memory::Committed {
                    image: image.clone(),
                };
            }
            Entry::Adopted { image, snapshots } => {
                let record = self.images.entry(image.clone()).or_default();
                record.committed = true;
                record.snapshots.extend(snapshots.iter().cloned());
            }
            Entry::Asleep { image, by_itself } => {
                self.note_whole(image);
                self.memory = Memory::Asleep {
                    image: image.clone(),
                    by_itself: *by_itself,
                }
            }
            Entry::Waking { image } => {
                self.note_whole(image);
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

    /// The image became whole, also where the crash came before [`Entry::Committed`]: a sandbox
    /// sleeps in, and wakes from, whole images only.
    fn note_whole(&mut self, image: &ImageId) {
        if let Some(record) = self.images.get_mut(image) {
            record.committed = true;
        }
    }

    /// Returns the image that may be restored without a request by name. `held` returns whether an
    /// image lies whole in the store. The caller must have made sure that the sandbox does not run.
    ///
    /// The image of [`Memory::Saving`] counts if `held` is true for the image: the image was moved
    /// to its place, and the crash came before the ledger recorded that.
    pub fn restorable(&self, held: impl Fn(&ImageId) -> bool) -> Option<&ImageId> {
        self.memory.image().filter(|image| held(image))
    }

    /// Returns whether the sandbox ran on after `image` was made. A stale image is restored only by
    /// name.
    pub fn is_stale(&self, image: &ImageId) -> bool {
        self.memory.image() != Some(image)
    }

    /// Returns whether the sandbox ever ran on after `image` was made. Unlike [`Self::is_stale`]
    /// this holds also after a restore by name made the image the sandbox's memory again.
    pub fn was_left(&self, image: &ImageId) -> bool {
        self.images.get(image).is_some_and(|record| record.left)
    }

    /// Returns whether the sandbox had gone back to `image` after a crash and never ran again: the
    /// image is its memory, and older than what it did. Another Pod that continues from it goes
    /// back in time, too.
    pub fn has_gone_back_to(&self, image: &ImageId) -> bool {
        !self.is_stale(image) && self.was_left(image)
    }

    /// Returns the newest committed image that was made for the snapshot or adopted by it.
    pub fn image_of(&self, snapshot: &SnapshotUid) -> Option<&ImageId> {
        let is_its = |record: &ImageRecord| record.committed && record.snapshots.contains(snapshot);
        self.images
            .iter()
            .rev()
            .find(|(_, record)| is_its(record))
            .map(|(image, _)| image)
    }
}

#[cfg(test)]
mod tests;
