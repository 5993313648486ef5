//! Identifiers, checked when they are made.
//!
//! Each identifier becomes a path component or an argument of a command somewhere on the node.
//! Most identifiers come from API objects that a tenant wrote. A value of these types therefore
//! proves that its text is harmless: short, lower case, without separators, without a part that
//! climbs in a path.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Length of the longest identifier that becomes a file name, in bytes.
pub const MAX_ID_LEN: usize = 63;
/// Length of the longest pod or snapshot UID, in bytes. A `.` and ten digits still fit into
/// [`MAX_ID_LEN`].
pub const MAX_UID_LEN: usize = 52;
/// Length of a containerd container id, in hexadecimal digits.
pub const CONTAINER_ID_LEN: usize = 64;

/// The error of a text that is not an identifier of the wanted kind.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is not a {kind}: {fault}")]
pub struct InvalidId {
    /// Kind of the wanted identifier, in words.
    pub kind: &'static str,
    /// The refused text, cut to 80 characters.
    pub text: String,
    pub fault: Fault,
}

/// The fault of a text that is not an identifier.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    #[error("it is empty")]
    Empty,
    /// The text has more bytes than its kind allows.
    #[error("it is longer than {0} characters")]
    TooLong(usize),
    /// The text has another length than the only one that its kind allows.
    #[error("it is not {0} characters long")]
    WrongLength(usize),
    /// The text has a character outside the alphabet of its kind.
    #[error("the character {0:?} is not allowed")]
    Character(char),
    /// The first or last character is punctuation.
    #[error("it must begin and end with a letter or digit")]
    Edge,
    /// The image id does not end in `.<number>`, or its number is 0, padded or too large.
    #[error("it does not end in a dot and a number from 1 to 4294967295")]
    Number,
}

/// The length rule of a kind of identifier, in bytes.
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
            /// Checks `text` by the rules of the type.
            pub fn new(text: impl Into<String>) -> Result<Self, InvalidId> {
                let text = text.into();
                match check(&text, $length, $allowed) {
                    Ok(()) => Ok(Self(text)),
                    Err(fault) => Err(invalid($kind, &text, fault)),
                }
            }

            /// Returns the text.
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
    /// A Pod's `metadata.uid`: lower-case letters, digits and `-`, at most [`MAX_UID_LEN`] bytes. A
    /// UUID has 36 bytes, a static Pod's hash 32.
    PodUid,
    "pod UID",
    Length::UpTo(MAX_UID_LEN),
    label_char
);
text_id!(
    /// A SandboxSnapshot's `metadata.uid`, in the shape of a [`PodUid`].
    SnapshotUid,
    "snapshot UID",
    Length::UpTo(MAX_UID_LEN),
    label_char
);
text_id!(
    /// A SandboxClaim's `metadata.uid`, in the shape of a [`PodUid`].
    ClaimUid,
    "claim UID",
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
    /// The container id of a Pod's sandbox (its pause container), in the shape of a
    /// [`ContainerId`]. Each new sandbox of the Pod has another id.
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

/// The name of an image: `<UID of the Pod that was saved>.<number>`. Numbers begin at 1 and are
/// never used twice for one Pod.
///
/// Image names are ordered by Pod, then by number.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct ImageId {
    pod: PodUid,
    number: u32,
}

const IMAGE_ID: &str = "image id (<pod UID>.<number>)";

impl ImageId {
    /// Makes the name of image `number` of a Pod. Errors: `number` is 0.
    pub fn new(pod: PodUid, number: u32) -> Result<Self, InvalidId> {
        if number == 0 {
            return Err(invalid(IMAGE_ID, &format!("{pod}.0"), Fault::Number));
        }
        Ok(Self { pod, number })
    }

    /// Parses `<pod UID>.<number>`. The number has no sign and no leading zero, so that an image
    /// has exactly one spelling.
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

    /// Returns the Pod whose memory the image holds.
    pub fn pod(&self) -> &PodUid {
        &self.pod
    }

    /// Returns the number of the image; the first image has number 1.
    pub fn number(&self) -> u32 {
        self.number
    }

    /// Returns the next image name of the same Pod; `None` after image 4,294,967,295.
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
    fn a_text_that_could_leave_a_directory_is_no_id() {
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
