//! Values of annotations: their types, parsers and the error of an invalid value.

use jiff::Timestamp;

use super::{HIBERNATE, NETWORK_POLICY, ON_CRASH, ON_RESTORE_FAILURE, SUSPENSION_STRATEGY};

/// Most bytes of [`ON_RESTORE_EXEC`].
const MAX_COMMAND: usize = 4096;

/// Effect of `operatingMode: Suspended` on the Pod.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SuspensionStrategy {
    /// Saves memory to an image, then deletes the Pod. Without a capable runtime it acts as `Stop`.
    #[default]
    Hibernate,
    /// Pauses the sandbox and keeps the Pod.
    Freeze,
    /// Deletes the Pod, as upstream does; memory is lost.
    Stop,
}

/// Action when a sandbox's memory cannot be restored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnRestoreFailure {
    /// Does not start, keeps the image and reports the reason.
    #[default]
    Fail,
    /// Starts without the memory.
    ColdStart,
}

impl OnRestoreFailure {
    /// Returns the annotation's value.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Fail => "Fail",
            Self::ColdStart => "ColdStart",
        }
    }
}

/// Source of a sandbox's start after a crash while awake.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnCrash {
    /// The program, as Kubernetes starts it.
    #[default]
    ColdStart,
    /// The newest image of the Pod, which is kept for this purpose; later changes are lost.
    LastImage,
}

impl OnCrash {
    /// Returns the annotation's value.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::ColdStart => "ColdStart",
            Self::LastImage => "LastImage",
        }
    }
}

/// NetworkPolicy of a Sandbox without a SandboxTemplate.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum NetworkIsolation {
    /// The namespace's strict default policy with `--default-network-policy`, else none.
    #[default]
    Default,
    /// None.
    None,
}

/// Value that its annotation does not allow.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("annotation {key}: value {value:?} is not allowed; allowed: {allowed}")]
pub struct InvalidAnnotation {
    pub key: &'static str,
    pub value: String,
    pub allowed: &'static str,
}

/// Parses the value of [`SUSPENSION_STRATEGY`].
pub fn parse_strategy(value: &str) -> Result<SuspensionStrategy, InvalidAnnotation> {
    match value {
        "Hibernate" => Ok(SuspensionStrategy::Hibernate),
        "Freeze" => Ok(SuspensionStrategy::Freeze),
        "Stop" => Ok(SuspensionStrategy::Stop),
        _ => Err(invalid(
            SUSPENSION_STRATEGY,
            value,
            "Hibernate, Freeze, Stop",
        )),
    }
}

/// Parses the value of [`HIBERNATE`].
pub fn parse_hibernate(value: &str) -> Result<bool, InvalidAnnotation> {
    parse_flag(HIBERNATE, value)
}

pub(super) fn parse_flag(key: &'static str, value: &str) -> Result<bool, InvalidAnnotation> {
    match value {
        "true" => Ok(true),
        "false" => Ok(false),
        _ => Err(invalid(key, value, "true, false")),
    }
}

/// Parses the value of [`ON_RESTORE_FAILURE`].
pub fn parse_policy(value: &str) -> Result<OnRestoreFailure, InvalidAnnotation> {
    match value {
        "Fail" => Ok(OnRestoreFailure::Fail),
        "ColdStart" => Ok(OnRestoreFailure::ColdStart),
        _ => Err(invalid(ON_RESTORE_FAILURE, value, "Fail, ColdStart")),
    }
}

/// Parses the value of [`ON_CRASH`].
pub fn parse_on_crash(value: &str) -> Result<OnCrash, InvalidAnnotation> {
    match value {
        "ColdStart" => Ok(OnCrash::ColdStart),
        "LastImage" => Ok(OnCrash::LastImage),
        _ => Err(invalid(ON_CRASH, value, "ColdStart, LastImage")),
    }
}

/// Parses the command in the value of the annotation `key`.
pub fn parse_command(key: &'static str, value: &str) -> Result<Vec<String>, InvalidAnnotation> {
    let words = serde_json::from_str::<Vec<String>>(value).ok();
    let words = words.filter(|words| words.first().is_some_and(|program| !program.is_empty()));
    words.filter(|_| value.len() <= MAX_COMMAND).ok_or_else(|| {
        let allowed = "a command as a JSON array of words of up to 4096 bytes, such as [\"/bin/sh\",\"-c\",\"kill -USR1 1\"]";
        invalid(key, value, allowed)
    })
}

/// Parses the value of [`NETWORK_POLICY`].
pub fn parse_isolation(value: &str) -> Result<NetworkIsolation, InvalidAnnotation> {
    match value {
        "default" => Ok(NetworkIsolation::Default),
        "none" => Ok(NetworkIsolation::None),
        _ => Err(invalid(NETWORK_POLICY, value, "default, none")),
    }
}

/// Parses the RFC 3339 time of the annotation `key`.
pub fn parse_time(key: &'static str, value: &str) -> Result<Timestamp, InvalidAnnotation> {
    let allowed = "a time as RFC 3339 has it, such as 2026-06-06T11:58:00Z";
    value.parse().map_err(|_| invalid(key, value, allowed))
}

pub(super) fn parse_name(key: &'static str, value: &str) -> Result<String, InvalidAnnotation> {
    if is_dns_subdomain(value) {
        Ok(value.to_owned())
    } else {
        Err(invalid(
            key,
            value,
            "the name of an object (a DNS-1123 subdomain)",
        ))
    }
}

pub(super) fn invalid(key: &'static str, value: &str, allowed: &'static str) -> InvalidAnnotation {
    InvalidAnnotation {
        key,
        value: value.to_owned(),
        allowed,
    }
}

/// Reports whether a text is an RFC 1123 subdomain of at most 253 characters, as Kubernetes
/// requires of object names.
pub fn is_dns_subdomain(text: &str) -> bool {
    let label = |part: &str| {
        let edge =
            |c: Option<char>| c.is_some_and(|c| c.is_ascii_lowercase() || c.is_ascii_digit());
        edge(part.chars().next())
            && edge(part.chars().next_back())
            && part
                .chars()
                .all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-')
    };
    text.len() <= 253 && text.split('.').all(label)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::annotations::ON_RESTORE_EXEC;

    #[test]
    fn names_are_dns_subdomains() {
        for good in ["a", "a-b", "a.b-c.d", "0", "sandbox-1a2b3c4d"] {
            assert!(is_dns_subdomain(good), "{good}");
        }
        let long = "a".repeat(254);
        for bad in [
            "",
            "-a",
            "a-",
            "A",
            "a..b",
            "a_b",
            ".",
            "a.",
            "ä",
            long.as_str(),
        ] {
            assert!(!is_dns_subdomain(bad), "{bad}");
        }
    }

    #[test]
    fn a_command_has_a_program() {
        let words = parse_command(ON_RESTORE_EXEC, r#"["/bin/sh","-c","kill -USR1 1"]"#);
        assert_eq!(
            words,
            Ok(["/bin/sh", "-c", "kill -USR1 1"]
                .map(str::to_owned)
                .to_vec())
        );
        let long = format!("[\"{}\"]", "x".repeat(MAX_COMMAND));
        for bad in ["", "[]", "[\"\"]", "[1]", "{}", long.as_str()] {
            assert!(
                parse_command(ON_RESTORE_EXEC, bad).is_err_and(|why| why.key == ON_RESTORE_EXEC),
                "{bad}"
            );
        }
    }
}
