//! Additions that a claim may bring to a sandbox that runs already (`torpor.dev/late-bind`,
//! `torpor.dev/claim-files`).

use std::{collections::BTreeMap, fmt};

use super::{
    CLAIM_FILES, InvalidAnnotation, LATE_BIND, ON_CLAIM_EXEC, is_dns_subdomain, values::invalid,
};

/// Most sources of files of one claim.
const MOST_SOURCES: usize = 16;

/// Kinds of additions that reach a running sandbox. Syntax: words, separated by commas.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LateBind {
    /// The claim's environment variables.
    pub env: bool,
    /// Secrets and ConfigMaps.
    pub files: bool,
    /// A token of a ServiceAccount.
    pub identity: bool,
}

/// Source of files of a claim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ClaimFile {
    /// The keys of a Secret are the names of the files.
    Secret(String),
    ConfigMap(String),
    /// The file `token` has a token of this ServiceAccount.
    Token(String),
}

/// Settings that the node agent carries out in a sandbox that runs.
pub const BINDING: [&str; 2] = [LATE_BIND, ON_CLAIM_EXEC];

/// Reports whether a claim arrives in a Sandbox with these annotations by the node agent: the claim
/// waits for that.
pub fn binds(sandbox: &BTreeMap<String, String>) -> bool {
    BINDING.iter().any(|key| sandbox.contains_key(*key))
}

impl LateBind {
    /// Reads the annotation of a Sandbox or a template. A missing or wrong value admits nothing.
    pub fn of(annotations: &BTreeMap<String, String>) -> Self {
        let value = annotations.get(LATE_BIND);
        let parsed = value.and_then(|value| Self::parse(value).ok());
        parsed.unwrap_or_default()
    }

    /// Parses the annotation's value.
    pub fn parse(value: &str) -> Result<Self, InvalidAnnotation> {
        let mut parsed = Self::default();
        for word in value.split(',').map(str::trim) {
            match word {
                "env" => parsed.env = true,
                "files" => parsed.files = true,
                "identity" => parsed.identity = true,
                _ => return Err(invalid(LATE_BIND, value, "some of env, files, identity")),
            }
        }
        Ok(parsed)
    }

    /// Reports whether a claim may bring files of the source.
    pub fn admits(self, source: &ClaimFile) -> bool {
        match source {
            ClaimFile::Secret(_) | ClaimFile::ConfigMap(_) => self.files,
            ClaimFile::Token(_) => self.identity,
        }
    }
}

impl fmt::Display for ClaimFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Secret(name) => write!(f, "Secret {name:?}"),
            Self::ConfigMap(name) => write!(f, "ConfigMap {name:?}"),
            Self::Token(name) => write!(f, "ServiceAccount {name:?}"),
        }
    }
}

/// Parses the value of [`CLAIM_FILES`].
pub fn parse_claim_files(value: &str) -> Result<Vec<ClaimFile>, InvalidAnnotation> {
    let allowed = "up to 16 of secret/NAME, configmap/NAME and one token/NAME, each once, separated by commas";
    let refused = || invalid(CLAIM_FILES, value, allowed);
    let mut sources = Vec::new();
    for word in value.split(',').take(MOST_SOURCES + 1).map(str::trim) {
        let (kind, name) = word.split_once('/').ok_or_else(refused)?;
        let name = Some(name).filter(|name| is_dns_subdomain(name));
        let name = name.ok_or_else(refused)?.to_owned();
        let source = match kind {
            "secret" => ClaimFile::Secret(name),
            "configmap" => ClaimFile::ConfigMap(name),
            "token" => ClaimFile::Token(name),
            _ => return Err(refused()),
        };
        if sources.contains(&source) {
            return Err(refused());
        }
        sources.push(source);
    }
    let is_token = |source: &&ClaimFile| matches!(source, ClaimFile::Token(_));
    let tokens = sources.iter().filter(is_token).count();
    match sources.len() <= MOST_SOURCES && tokens <= 1 {
        true => Ok(sources),
        false => Err(refused()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_words_of_the_annotation_are_known_or_named() {
        assert!(LateBind::parse("env").unwrap().env);
        let all = LateBind::parse(" env , files,identity").unwrap();
        assert!(all.env && all.files && all.identity);
        for value in ["", "env,", "ENV", "env,secrets", "true"] {
            let error = LateBind::parse(value).unwrap_err().to_string();
            assert!(error.contains("torpor.dev/late-bind"), "{error}");
            assert!(
                error.contains("allowed: some of env, files, identity"),
                "{error}"
            );
        }
    }

    #[test]
    fn a_source_is_admitted_by_its_word() {
        let files = LateBind::parse("files").unwrap();
        let identity = LateBind::parse("identity").unwrap();
        let sources = parse_claim_files("secret/a, configmap/b.c,token/d").unwrap();
        let admitted = |late: LateBind| -> Vec<bool> {
            sources.iter().map(|source| late.admits(source)).collect()
        };
        assert_eq!(admitted(files), [true, true, false]);
        assert_eq!(admitted(identity), [false, false, true]);
        assert_eq!(sources[1].to_string(), r#"ConfigMap "b.c""#);
    }

    #[test]
    fn a_source_of_another_form_is_named_with_the_allowed_ones() {
        let many: Vec<String> = (0..17).map(|n| format!("secret/s{n}")).collect();
        for value in [
            "",
            "a",
            "secret/",
            "secret/../b",
            "Secret/a",
            "pod/a",
            "secret/a,",
            "secret/a,secret/a",
            "token/a,token/b",
            &many.join(","),
        ] {
            let error = parse_claim_files(value).unwrap_err().to_string();
            assert!(error.contains("torpor.dev/claim-files"), "{error}");
            assert!(error.contains("configmap/NAME"), "{error}");
        }
    }
}
