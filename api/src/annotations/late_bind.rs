//! Additions that a claim may bring to a sandbox that runs already (`torpor.dev/late-bind`).

use std::collections::BTreeMap;

use super::{InvalidAnnotation, LATE_BIND, ON_CLAIM_EXEC, values::invalid};

/// Kinds of additions that reach a running sandbox. Syntax: words, separated by commas.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LateBind {
    /// The claim's environment variables.
    pub env: bool,
}

/// Reports whether a claim arrives in a Sandbox with these annotations by the node agent: the claim
/// waits for that.
pub fn binds(sandbox: &BTreeMap<String, String>) -> bool {
    [LATE_BIND, ON_CLAIM_EXEC]
        .iter()
        .any(|key| sandbox.contains_key(*key))
}

impl LateBind {
    /// Parses the annotation's value.
    pub fn parse(value: &str) -> Result<Self, InvalidAnnotation> {
        let mut parsed = Self::default();
        for word in value.split(',').map(str::trim) {
            match word {
                "env" => parsed.env = true,
                _ => return Err(invalid(LATE_BIND, value, "env")),
            }
        }
        Ok(parsed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_words_of_the_annotation_are_known_or_named() {
        assert!(LateBind::parse("env").unwrap().env);
        assert!(LateBind::parse(" env , env").unwrap().env);
        for value in ["", "env,", "ENV", "env,secrets", "true"] {
            let error = LateBind::parse(value).unwrap_err().to_string();
            assert!(error.contains("torpor.dev/late-bind"), "{error}");
            assert!(error.contains("allowed: env"), "{error}");
        }
    }
}
