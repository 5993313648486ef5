//! Extraction of tar archives.
//!
//! The crate `tar` reads headers. This module reads extension records (long names of GNU and pax),
//! because the crate would hold a record of any size in memory. [`Unpacking`] creates the entries.

use std::{
    ffi::CString,
    io::{self, Read},
};

use bytes::{Buf as _, Bytes};
use futures::{Stream, StreamExt as _};
use tar::{Archive, Entry, EntryType, PaxExtensions};
use tokio::runtime::Handle;

use crate::{
    path::{self, Component},
    root::{self, unpack::Unpacking},
    sandboxd::refusal::Refusal,
};

/// Maximum size of an extension record in bytes: two paths of maximum length and other keys.
const MAX_RECORD: u64 = 64 * 1024;

/// Prefix of the keys of GNU's sparse files in pax.
const SPARSE: &[u8] = b"GNU.sparse.";

/// Body as a blocking reader.
pub struct Incoming<S> {
    pieces: S,
    handle: Handle,
    ahead: Bytes,
    left: u64,
    /// The stream has ended and must not be polled again.
    ended: bool,
    failure: Option<Refusal>,
}

impl<S: Stream<Item = Result<Bytes, Refusal>> + Unpin> Incoming<S> {
    /// Returns a reader of at most `limit` bytes.
    pub fn new(pieces: S, handle: Handle, limit: u64) -> Self {
        Self {
            pieces,
            handle,
            ahead: Bytes::new(),
            left: limit,
            ended: false,
            failure: None,
        }
    }

    fn fail(&mut self, failure: Refusal) -> io::Error {
        let error = io::Error::other(failure.to_string());
        self.failure = Some(failure);
        error
    }
}

impl<S: Stream<Item = Result<Bytes, Refusal>> + Unpin> Read for Incoming<S> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self.ahead.is_empty() && !self.ended {
            match self.handle.block_on(self.pieces.next()) {
                None => self.ended = true,
                Some(Err(refusal)) => return Err(self.fail(refusal)),
                Some(Ok(piece)) => match self.left.checked_sub(piece.len() as u64) {
                    Some(left) => (self.left, self.ahead) = (left, piece),
                    None => return Err(self.fail(Refusal::TooLarge)),
                },
            }
        }
        let length = buffer.len().min(self.ahead.len());
        self.ahead.copy_to_slice(&mut buffer[..length]);
        Ok(length)
    }
}

impl<S> std::fmt::Debug for Incoming<S> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Incoming")
            .field("left", &self.left)
            .finish_non_exhaustive()
    }
}

/// Unpacks an archive, and returns the number of its entries.
///
/// The first refused entry ends the extraction; the entries before it stay. The call blocks.
pub fn extract<S: Stream<Item = Result<Bytes, Refusal>> + Unpin>(
    archive: Incoming<S>,
    into: &mut Unpacking<'_>,
) -> Result<usize, Refusal> {
    let mut archive = Archive::new(archive);
    let mut done = 0;
    let result = unpack(&mut archive, into, &mut done);
    let mut incoming = archive.into_inner();
    // Padding at the end is read too; unread bytes would end the connection.
    let rest = match result {
        Ok(()) => io::copy(&mut incoming, &mut io::sink()).map(drop),
        Err(_) => Ok(()),
    };
    // A failure of the body is the cause of the archive reader's error.
    match (incoming.failure, result, rest) {
        (None, Ok(()), Ok(())) => Ok(done),
        (Some(failure), Ok(()), _) => Err(failure),
        (_, Ok(()), Err(error)) => Err(Refusal::Internal(error.to_string())),
        (failure, Err((entry, cause)), _) => {
            let cause = Box::new(failure.unwrap_or(cause));
            Err(Refusal::Entry { entry, cause, done })
        }
    }
}

type Refused = (String, Refusal);

fn unpack(
    archive: &mut Archive<impl Read>,
    into: &mut Unpacking<'_>,
    done: &mut usize,
) -> Result<(), Refused> {
    let unreadable = |error: io::Error| (String::new(), malformed(&error.to_string()));
    let mut records = Records::default();
    for entry in archive.entries().map_err(unreadable)?.raw(true) {
        let mut entry = entry.map_err(unreadable)?;
        let header = entry.header().entry_type();
        let refused = |entry: &Entry<'_, _>, cause| (text(&entry.path_bytes()), cause);
        let counted = into.budget.entry().map_err(Refusal::from);
        counted.map_err(|cause| refused(&entry, cause))?;
        if records
            .take(header, &mut entry)
            .map_err(|cause| refused(&entry, cause))?
        {
            continue;
        }
        let item = std::mem::take(&mut records).finish(&entry);
        let name = text(&item.path);
        put(&item, &mut entry, into).map_err(|cause| (name, cause))?;
        *done += 1;
    }
    match records.seen.is_empty() {
        true => Ok(()),
        false => Err((
            String::new(),
            malformed("extension records at the end belong to no entry"),
        )),
    }
}

/// Extension records of the next entry.
#[derive(Debug, Default)]
struct Records {
    seen: Vec<EntryType>,
    path: Option<Vec<u8>>,
    link: Option<Vec<u8>>,
    size: Option<Vec<u8>>,
    /// The entry is one of GNU's sparse files in pax, whose content is not contiguous.
    sparse: bool,
}

/// Entry with its extension records applied.
#[derive(Debug)]
struct Item {
    path: Vec<u8>,
    link: Vec<u8>,
    kind: EntryType,
    mode: u32,
    size: u64,
    /// The records contradict the header's size, or the file is sparse.
    ///
    /// Readers of archives differ in where such an entry ends, and so would see different archives.
    ambiguous: bool,
}

/// Sets a value of a record. A second value is refused: readers differ in which one they use.
fn set(field: &mut Option<Vec<u8>>, value: Vec<u8>) -> Result<(), Refusal> {
    match field.replace(value) {
        None => Ok(()),
        Some(_) => Err(malformed("extension records set a value twice")),
    }
}

/// Checks a global record, which holds for all entries after it.
///
/// Readers differ in whether they apply it, so that it must not name a path or a size.
fn global(record: &[u8]) -> Result<(), Refusal> {
    for extension in PaxExtensions::new(record) {
        let extension = extension.map_err(|error| malformed(&error.to_string()))?;
        let key = extension.key_bytes();
        if matches!(key, b"path" | b"linkpath" | b"size") || key.starts_with(SPARSE) {
            return Err(malformed("a global record sets a path or a size"));
        }
    }
    Ok(())
}

impl Records {
    /// Reads an entry that is a record; returns `false` for other entries.
    fn take(&mut self, kind: EntryType, entry: &mut impl Read) -> Result<bool, Refusal> {
        match kind {
            EntryType::XGlobalHeader => return global(&record(entry)?).map(|()| true),
            EntryType::GNULongName => set(&mut self.path, without_nul(record(entry)?))?,
            EntryType::GNULongLink => set(&mut self.link, without_nul(record(entry)?))?,
            EntryType::XHeader => self.extend(&record(entry)?)?,
            _ => return Ok(false),
        }
        if self.seen.contains(&kind) {
            return Err(malformed("an entry has two records of one kind"));
        }
        self.seen.push(kind);
        Ok(true)
    }

    fn extend(&mut self, record: &[u8]) -> Result<(), Refusal> {
        for extension in PaxExtensions::new(record) {
            let extension = extension.map_err(|error| malformed(&error.to_string()))?;
            let value = extension.value_bytes().to_vec();
            match extension.key_bytes() {
                b"path" => set(&mut self.path, value)?,
                b"linkpath" => set(&mut self.link, value)?,
                b"size" => set(&mut self.size, value)?,
                key if key.starts_with(SPARSE) => self.sparse = true,
                _ => {}
            }
        }
        Ok(())
    }

    fn finish(self, entry: &Entry<'_, impl Read>) -> Item {
        let header = entry.header();
        let size = entry.size();
        let differs = self
            .size
            .is_some_and(|recorded| recorded != size.to_string().as_bytes());
        let link = || header.link_name_bytes().map(|link| link.into_owned());
        Item {
            path: self
                .path
                .unwrap_or_else(|| header.path_bytes().into_owned()),
            link: self.link.or_else(link).unwrap_or_default(),
            kind: header.entry_type(),
            // No permissions if the field is no number.
            mode: header.mode().unwrap_or(0),
            size,
            ambiguous: differs || self.sparse,
        }
    }
}

fn put(item: &Item, content: &mut dyn Read, into: &mut Unpacking<'_>) -> Result<(), Refusal> {
    if item.ambiguous {
        return Err(malformed(
            "extension records contradict the header, or the file is sparse",
        ));
    }
    let names = names(&item.path)?;
    match item.kind {
        // Archives before POSIX mark directories by a slash at the end.
        EntryType::Regular | EntryType::Continuous if !item.path.ends_with(b"/") => {
            into.file(&names, item.mode, item.size, content)?;
        }
        // Some readers skip such content, others read it as the next entry.
        _ if item.size != 0 => return Err(malformed("an entry that is no file has content")),
        EntryType::Directory | EntryType::Regular => into.directory(&names, item.mode)?,
        EntryType::Symlink => into.link(&names, &target(&names, &item.link)?)?,
        EntryType::Link => into.hard_link(&names, &self::names(&item.link)?)?,
        EntryType::Char | EntryType::Block | EntryType::Fifo => {
            return Err(root::Error::Special.into());
        }
        other => {
            let kind = char::from(other.as_byte());
            return Err(malformed(&format!(
                "entries of the type {kind:?} are not supported"
            )));
        }
    }
    Ok(())
}

/// Returns the components of a path below the directory; none for the directory itself.
fn names(path: &[u8]) -> Result<Vec<CString>, Refusal> {
    if path.starts_with(b"/") {
        return Err(Refusal::Escape);
    }
    let steps = path::split(path).map_err(root::Error::from)?;
    let names = steps.into_iter().map(|step| match step {
        Component::Name(name) => Ok(name),
        Component::Up => Err(Refusal::Escape),
    });
    names.collect()
}

/// Returns the target of a link, which lexically must be below the directory.
fn target(names: &[CString], link: &[u8]) -> Result<CString, Refusal> {
    if link.starts_with(b"/") || link.is_empty() {
        return Err(Refusal::Escape);
    }
    let mut depth = names.len().saturating_sub(1);
    for step in path::split(link).map_err(root::Error::from)? {
        depth = match step {
            Component::Name(_) => depth + 1,
            Component::Up => depth.checked_sub(1).ok_or(Refusal::Escape)?,
        };
    }
    CString::new(link).map_err(|_| Refusal::Escape)
}

/// Reads the content of an extension record.
fn record(entry: &mut impl Read) -> Result<Vec<u8>, Refusal> {
    let mut content = Vec::new();
    let read = entry.take(MAX_RECORD + 1).read_to_end(&mut content);
    read.map_err(|error| malformed(&error.to_string()))?;
    match content.len() as u64 > MAX_RECORD {
        true => Err(malformed(&format!(
            "an extension record has more than {MAX_RECORD} bytes"
        ))),
        false => Ok(content),
    }
}

fn without_nul(mut name: Vec<u8>) -> Vec<u8> {
    while name.last() == Some(&0) {
        name.pop();
    }
    name
}

fn malformed(what: &str) -> Refusal {
    Refusal::Invalid(format!("invalid tar archive: {what}"))
}

fn text(path: &[u8]) -> String {
    String::from_utf8_lossy(path).into_owned()
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case("a/b", Some(&["a", "b"][..]))]
    #[case("./a//b/", Some(&["a", "b"][..]))]
    #[case("./", Some(&[][..]))]
    #[case("...", Some(&["..."][..]))]
    #[case("/etc/passwd", None)]
    #[case("../a", None)]
    #[case("a/../b", None)]
    #[case("a\0b", None)]
    #[case(&"a/".repeat(257), None)]
    #[case(&"a".repeat(4097), None)]
    fn a_name_is_lexically_below_the_directory(
        #[case] path: &str,
        #[case] expected: Option<&[&str]>,
    ) {
        let words = names(path.as_bytes()).ok().map(|names| {
            let words = names.iter().map(|name| name.to_str().unwrap().to_owned());
            words.collect::<Vec<_>>()
        });
        let expected = expected.map(|words| words.iter().map(|word| (*word).to_owned()).collect());
        assert_eq!(words, expected);
    }

    #[rstest]
    #[case("link", "file", true)]
    #[case("a/b/link", "../../file", true)]
    #[case("a/link", "../b/../file", true)]
    #[case("link", "/etc/passwd", false)]
    #[case("link", "..", false)]
    #[case("link", "", false)]
    #[case("a/link", "../../outside", false)]
    #[case("a/link", "b/../../../outside", false)]
    fn a_link_leads_lexically_below_the_directory(
        #[case] path: &str,
        #[case] link: &str,
        #[case] allowed: bool,
    ) {
        let names = names(path.as_bytes()).unwrap();
        assert_eq!(target(&names, link.as_bytes()).is_ok(), allowed);
    }

    #[test]
    fn a_record_is_limited_in_size() {
        let long = record(&mut io::repeat(b'a'));
        assert!(matches!(long, Err(Refusal::Invalid(_))), "{long:?}");
        let most = record(&mut io::repeat(b'a').take(MAX_RECORD));
        assert_eq!(most.unwrap().len() as u64, MAX_RECORD);
    }
}
