//! Identifiers, checked where they are made.
//!
//! Each of these becomes a path component or an argument of a command somewhere on the node, and most of them come from API
//! objects that a tenant wrote. A value of these types is therefore proof that the text is harmless: short, lower case, no
//! separators, nothing that a path could climb with.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Longest identifier of any kind that becomes a file name, in bytes.
pub const MAX_ID_LEN: usize = 63;
/// Longest pod or snapshot UID, in bytes: leaves room for `.` and ten digits within [`MAX_ID_LEN`].
pub const MAX_UID_LEN: usize = 52;
/// Length of a containerd container id, in hexadecimal digits.
pub const CONTAINER_ID_LEN: usize = 64;

/// Why a text is not an identifier of the wanted kind.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is not a {kind}: {fault}")]
pub struct InvalidId {
    /// What it should have been, in words.
    pub kind: &'static str,
    /// The offending text, cut to 80 characters.
    pub text: String,
    /// What is wrong with it.
    pub fault: Fault,
}

/// What is wrong with an identifier.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// Empty text.
    #[error("it is empty")]
    Empty,
    /// More bytes than the kind allows.
    #[error("it is longer than {0} characters")]
    TooLong(usize),
    /// Another length than the only one allowed.
    #[error("it is not {0} characters long")]
    WrongLength(usize),
    /// A character outside the kind's alphabet.
    #[error("the character {0:?} is not allowed")]
    Character(char),
    /// The first or last character is punctuation.
    #[error("it must begin and end with a letter or digit")]
    Edge,
    /// An image id without `.<number>` at its end, or with a number that is 0, padded or too large.
    #[error("it does not end in a dot and a number from 1 to 4294967295")]
    Number,
}

/// The length rule of one kind of identifier.
#[derive(Clone, Copy)]
enum Length {
    UpTo(usize),
    Exactly(usize),
}

fn check(text: &str, length: Length, allowed: fn(char) -> bool) -> Result<(), Fault> {
    if text.is_empty() {
        return Err(Fault::Empty);
    }
    match length {
        Length::UpTo(max) if text.len() > max => return Err(Fault::TooLong(max)),
        Length::Exactly(len) if text.len() != len => return Err(Fault::WrongLength(len)),
        Length::UpTo(_) | Length::Exactly(_) => {}
    }
    if let Some(bad) = text.chars().find(|c| !allowed(*c)) {
        return Err(Fault::Character(bad));
    }
    let edge = |c: Option<char>| c.is_some_and(|c| c.is_ascii_alphanumeric());
    if !edge(text.chars().next()) || !edge(text.chars().next_back()) {
        return Err(Fault::Edge);
    }
    Ok(())
}

fn label_char(c: char) -> bool {
    c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-'
}

fn hex_char(c: char) -> bool {
    matches!(c, '0'..='9' | 'a'..='f')
}

fn invalid(kind: &'static str, text: &str, fault: Fault) -> InvalidId {
    InvalidId {
        kind,
        text: text.chars().take(80).collect(),
        fault,
    }
}

macro_rules! text_id {
    ($(#[$doc:meta])* $name:ident, $kind:literal, $length:expr, $allowed:expr) => {
        $(#[$doc])*
        #[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(try_from = "String", into = "String")]
        pub struct $name(String);

        impl $name {
            /// Checks `text`; see the type for what is allowed.
            pub fn new(text: impl Into<String>) -> Result<Self, InvalidId> {
                let text = text.into();
                match check(&text, $length, $allowed) {
                    Ok(()) => Ok(Self(text)),
                    Err(fault) => Err(invalid($kind, &text, fault)),
                }
            }

            /// The text.
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl TryFrom<String> for $name {
            type Error = InvalidId;

            fn try_from(text: String) -> Result<Self, InvalidId> {
                Self::new(text)
            }
        }

        impl std::str::FromStr for $name {
            type Err = InvalidId;

            fn from_str(text: &str) -> Result<Self, InvalidId> {
                Self::new(text)
            }
        }

        impl From<$name> for String {
            fn from(id: $name) -> String {
                id.0
            }
        }

        impl AsRef<str> for $name {
            fn as_ref(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }
    };
}

text_id!(
    /// A Pod's `metadata.uid`: lower-case letters, digits and `-`, at most [`MAX_UID_LEN`] (a UUID has 36, a static Pod's hash 32).
    PodUid,
    "pod UID",
    Length::UpTo(MAX_UID_LEN),
    label_char
);
text_id!(
    /// A SandboxSnapshot's `metadata.uid`, same shape as [`PodUid`].
    SnapshotUid,
    "snapshot UID",
    Length::UpTo(MAX_UID_LEN),
    label_char
);
text_id!(
    /// A namespace: a DNS-1123 label.
    Namespace,
    "namespace",
    Length::UpTo(MAX_ID_LEN),
    label_char
);
text_id!(
    /// The name of a container in a Pod: a DNS-1123 label.
    ContainerName,
    "container name",
    Length::UpTo(MAX_ID_LEN),
    label_char
);
text_id!(
    /// A container's id in containerd's CRI plugin: 64 hexadecimal digits in lower case.
    ContainerId,
    "container id",
    Length::Exactly(CONTAINER_ID_LEN),
    hex_char
);
text_id!(
    /// The container id of a Pod's sandbox (its pause container), same shape as [`ContainerId`]. New with each sandbox of the Pod.
    SandboxId,
    "sandbox id",
    Length::Exactly(CONTAINER_ID_LEN),
    hex_char
);

impl From<SandboxId> for ContainerId {
    fn from(id: SandboxId) -> ContainerId {
        ContainerId(id.0)
    }
}

/// The name of one image: `<UID of the Pod that was saved>.<number>`, numbers from 1, never used twice for one Pod.
///
/// Ordered by Pod, then by number.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct ImageId {
    pod: PodUid,
    number: u32,
}

const IMAGE_ID: &str = "image id (<pod UID>.<number>)";

impl ImageId {
    /// The image `number` of a Pod; numbers start at 1.
    pub fn new(pod: PodUid, number: u32) -> Result<Self, InvalidId> {
        if number == 0 {
            return Err(invalid(IMAGE_ID, &format!("{pod}.0"), Fault::Number));
        }
        Ok(Self { pod, number })
    }

    /// Reads `<pod UID>.<number>`. The number has no sign and no leading zero, so that one image has one spelling.
    pub fn parse(text: &str) -> Result<Self, InvalidId> {
        if text.len() > MAX_ID_LEN {
            return Err(invalid(IMAGE_ID, text, Fault::TooLong(MAX_ID_LEN)));
        }
        let Some((pod, digits)) = text.rsplit_once('.') else {
            return Err(invalid(IMAGE_ID, text, Fault::Number));
        };
        check(pod, Length::UpTo(MAX_UID_LEN), label_char)
            .map_err(|fault| invalid(IMAGE_ID, text, fault))?;
        let plain = digits.bytes().all(|b| b.is_ascii_digit()) && !digits.starts_with('0');
        match digits.parse::<u32>() {
            Ok(number) if plain => Ok(Self {
                pod: PodUid(pod.to_owned()),
                number,
            }),
            Ok(_) | Err(_) => Err(invalid(IMAGE_ID, text, Fault::Number)),
        }
    }

    /// The Pod whose memory it holds.
    pub fn pod(&self) -> &PodUid {
        &self.pod
    }

    /// Its number, from 1.
    pub fn number(&self) -> u32 {
        self.number
    }

    /// The next image of the same Pod; `None` after 4,294,967,295 of them.
    pub fn next(&self) -> Option<Self> {
        Some(Self {
            pod: self.pod.clone(),
            number: self.number.checked_add(1)?,
        })
    }
}

impl fmt::Display for ImageId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.pod, self.number)
    }
}

impl TryFrom<String> for ImageId {
    type Error = InvalidId;

    fn try_from(text: String) -> Result<Self, InvalidId> {
        Self::parse(&text)
    }
}

impl std::str::FromStr for ImageId {
    type Err = InvalidId;

    fn from_str(text: &str) -> Result<Self, InvalidId> {
        Self::parse(text)
    }
}

impl From<ImageId> for String {
    fn from(id: ImageId) -> String {
        id.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn image_ids_have_exactly_one_spelling() {
        let id = ImageId::parse("0b7e6c1a-aaaa.12").unwrap();
        assert_eq!(id.to_string(), "0b7e6c1a-aaaa.12");
        assert_eq!((id.pod().as_str(), id.number()), ("0b7e6c1a-aaaa", 12));
        assert_eq!(id.next().unwrap().number(), 13);
        for text in [
            "a.0",
            "a.01",
            "a.+1",
            "a.",
            "a",
            "a.4294967296",
            "a. 1",
            ".1",
            "a.1.",
            "a.b",
        ] {
            assert!(ImageId::parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn nothing_that_a_path_could_climb_with_is_an_id() {
        for text in [
            "", ".", "..", "../x", "a/b", "a\0b", "-a", "a-", "A", "ä", "a..1", "a/../b.1",
            ".tmp-a.1", "a_b", "a b", "a\n",
        ] {
            assert!(PodUid::new(text).is_err(), "{text:?}");
            assert!(Namespace::new(text).is_err(), "{text:?}");
            assert!(ContainerName::new(text).is_err(), "{text:?}");
            assert!(ImageId::parse(text).is_err(), "{text:?}");
        }
    }

    #[test]
    fn lengths_are_limited() {
        PodUid::new("a".repeat(52)).unwrap();
        PodUid::new("a".repeat(53)).unwrap_err();
        let longest = format!("{}.4294967295", "a".repeat(52));
        assert_eq!(longest.len(), MAX_ID_LEN);
        let id = ImageId::parse(&longest).unwrap();
        assert_eq!(id.next(), None);
        Namespace::new("n".repeat(64)).unwrap_err();
        SandboxId::new("a".repeat(63)).unwrap_err();
        SandboxId::new("g".repeat(64)).unwrap_err();
        SandboxId::new("f".repeat(64)).unwrap();
    }

    #[test]
    fn json_is_checked_like_the_constructors() {
        serde_json::from_str::<ImageId>("\"../../etc.1\"").unwrap_err();
        serde_json::from_str::<PodUid>("\"..\"").unwrap_err();
        let id: ImageId = serde_json::from_str("\"a-b.3\"").unwrap();
        assert_eq!(serde_json::to_string(&id).unwrap(), "\"a-b.3\"");
    }

    #[test]
    fn the_error_names_kind_text_and_fault() {
        let error = Namespace::new("Team").unwrap_err();
        assert_eq!(
            error.to_string(),
            "\"Team\" is not a namespace: the character 'T' is not allowed"
        );
    }
}
