//! Retention of snapshots: validated parameters of a SnapshotClass.

use std::{collections::BTreeMap, time::Duration};

use crate::snapshot::{REPOSITORY_PARAMETERS, REPOSITORY_PROVISIONER, SnapshotClassSpec};

/// Parameter of a SnapshotClass: time for which a snapshot is kept after its commit.
pub const TTL: &str = "ttl";
/// Parameter of a SnapshotClass: number of a Sandbox's newest snapshots that are kept.
pub const KEEP_LAST: &str = "keepLast";

const MIN_TTL: Duration = Duration::from_secs(60);
const MAX_TTL: Duration = Duration::from_secs(8760 * 3600);
const MAX_KEPT: usize = 1000;

/// Rules that delete manual snapshots. Without a rule they are kept until a user deletes them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Retention {
    pub ttl: Option<Duration>,
    pub keep_last: Option<usize>,
    /// One entry for each invalid or unknown parameter. An invalid one deletes nothing.
    pub problems: Vec<InvalidParameter>,
}

/// Invalid or unknown parameter.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidParameter {
    #[error("parameter {key}: value {value:?} is not allowed; allowed: {allowed}")]
    Value {
        key: &'static str,
        value: String,
        allowed: &'static str,
    },
    #[error("parameter {0:?} is not known; known: keepLast, ttl")]
    Unknown(String),
}

impl Retention {
    /// Reads the parameters of a SnapshotClass. Those of a repository are no rules, and no
    /// problems.
    pub fn of(class: &SnapshotClassSpec) -> Self {
        let is_known = |key: &String| {
            class.provisioner == REPOSITORY_PROVISIONER
                && REPOSITORY_PARAMETERS.contains(&key.as_str())
        };
        let mut rules = class.parameters.clone();
        rules.retain(|key, _| !is_known(key));
        Self::read(&rules)
    }

    /// Reads parameters that are all rules.
    pub fn read(parameters: &BTreeMap<String, String>) -> Self {
        let mut read = Self::default();
        for (key, value) in parameters {
            let wrong = |key, allowed| InvalidParameter::Value {
                key,
                value: value.clone(),
                allowed,
            };
            match key.as_str() {
                TTL => match ttl(value) {
                    Some(ttl) => read.ttl = Some(ttl),
                    None => read.problems.push(wrong(
                        TTL,
                        "a duration from 1m to 8760h, such as 72h or 1h30m",
                    )),
                },
                KEEP_LAST => match keep_last(value) {
                    Some(count) => read.keep_last = Some(count),
                    None => read
                        .problems
                        .push(wrong(KEEP_LAST, "a number from 1 to 1000")),
                },
                _ => read.problems.push(InvalidParameter::Unknown(key.clone())),
            }
        }
        read
    }

    /// Reports whether any rule is set.
    pub fn has_rules(&self) -> bool {
        self.ttl.is_some() || self.keep_last.is_some()
    }
}

fn ttl(value: &str) -> Option<Duration> {
    let parsed = value.parse::<jiff::SignedDuration>().ok()?;
    let ttl = Duration::try_from(parsed).ok()?;
    (MIN_TTL..=MAX_TTL).contains(&ttl).then_some(ttl)
}

fn keep_last(value: &str) -> Option<usize> {
    let digits = value.bytes().all(|digit| digit.is_ascii_digit());
    let count = value.parse().ok().filter(|_| digits)?;
    (1..=MAX_KEPT).contains(&count).then_some(count)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(parameters: &[(&str, &str)]) -> Retention {
        let parameters = parameters.iter();
        let owned = parameters.map(|(key, value)| ((*key).to_owned(), (*value).to_owned()));
        Retention::read(&owned.collect())
    }

    #[test]
    fn without_parameters_everything_is_kept() {
        assert!(!read(&[]).has_rules());
        assert_eq!(read(&[]), Retention::default());
    }

    #[test]
    fn both_rules_are_read() {
        let both = read(&[("ttl", "72h"), ("keepLast", "3")]);
        assert_eq!(both.ttl, Some(Duration::from_secs(72 * 3600)));
        assert_eq!((both.keep_last, both.problems), (Some(3), vec![]));
    }

    #[test]
    fn an_invalid_value_is_reported_with_the_allowed_values_and_deletes_nothing() {
        for wrong in ["", "soon", "30", "59s", "-1h", "8761h"] {
            let read = read(&[("ttl", wrong)]);
            assert!(!read.has_rules(), "{wrong:?}");
            let message = read.problems[0].to_string();
            let expected = format!(
                "parameter ttl: value {wrong:?} is not allowed; allowed: a duration from 1m to 8760h, such as 72h or 1h30m"
            );
            assert_eq!(message, expected);
        }
        for wrong in ["", "0", "-1", "+1", "1.5", "1001", "99999999999999999999"] {
            let read = read(&[("keepLast", wrong), ("ttl", "1m")]);
            assert_eq!(read.keep_last, None, "{wrong:?}");
            assert!(read.ttl.is_some() && read.problems.len() == 1);
        }
        let unknown = read(&[("keeplast", "1")]);
        let message = unknown.problems[0].to_string();
        assert_eq!(
            message,
            r#"parameter "keeplast" is not known; known: keepLast, ttl"#
        );
    }
}
