//! Authorization of clients by a bearer token, if one is configured. Upstream's sandboxd has this
//! since 1.0.7.

use std::{
    fs::OpenOptions,
    io::{self, Read as _},
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
    sync::Arc,
};

use http::{HeaderMap, header};
use rustix::fs::OFlags;
use subtle::ConstantTimeEq as _;

/// Environment variable with the token; a token file takes precedence.
pub const VARIABLE: &str = "SANDBOXD_AUTH_TOKEN";
/// Maximum length of a token in bytes, and of its file including line ends.
const MAX_BYTES: usize = 4096;

/// Invalid configuration of the token.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot read the token file {}", .path.display())]
    Read {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("the token in {0} is empty, longer than {MAX_BYTES} bytes, or not of visible ASCII")]
    Malformed(String),
}

/// Reason why a call is not authorized.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Closed {
    #[error("missing bearer token")]
    Missing,
    #[error("invalid bearer token")]
    Wrong,
    /// The token file is missing or invalid.
    #[error("the bearer token cannot be checked: the token file is missing or invalid")]
    Unknown,
}

/// Condition on which a call is authorized.
#[derive(Debug)]
pub enum Gate {
    /// Each call.
    Open,
    /// Calls with this token.
    Fixed(Vec<u8>),
    /// Calls with the token that is in this file at the time of the call.
    ///
    /// A changed Secret holds at once, also in a sandbox that was restored from an older image.
    File(PathBuf),
}

impl Gate {
    /// Returns the gate of a configuration: the file, else the variable, else open.
    ///
    /// An invalid token is an error, and not an open gate.
    pub fn new(file: Option<PathBuf>, variable: Option<Vec<u8>>) -> Result<Arc<Self>, Error> {
        let gate = match (file, variable) {
            (Some(path), _) => {
                read(&path)?;
                Self::File(path)
            }
            (None, Some(value)) => Self::Fixed(token(&value, VARIABLE)?),
            (None, None) => Self::Open,
        };
        Ok(Arc::new(gate))
    }

    /// Checks the token in the headers of a request.
    pub async fn check(&self, headers: &HeaderMap) -> Result<(), Closed> {
        match self {
            Self::Open => Ok(()),
            Self::Fixed(expected) => compare(shown(headers)?, expected),
            Self::File(path) => {
                let shown = shown(headers)?;
                let path = path.clone();
                let expected = tokio::task::spawn_blocking(move || read(&path)).await;
                match expected {
                    Ok(Ok(expected)) => compare(shown, &expected),
                    Ok(Err(error)) => {
                        let error = &error as &dyn std::error::Error;
                        tracing::warn!(error, "cannot read the token; calls are refused");
                        Err(Closed::Unknown)
                    }
                    // The task fails only by a panic or at the end of the process.
                    Err(_) => Err(Closed::Unknown),
                }
            }
        }
    }
}

/// Returns the token of `Authorization: Bearer …`. The scheme's case is ignored (RFC 9110, 11.1).
fn shown(headers: &HeaderMap) -> Result<&[u8], Closed> {
    let mut values = headers.get_all(header::AUTHORIZATION).iter();
    let value = values.next().ok_or(Closed::Missing)?.as_bytes();
    // A proxy before the runtime may have checked another one of several.
    if values.next().is_some() {
        return Err(Closed::Wrong);
    }
    match value.split_at_checked(7) {
        Some((scheme, token)) if scheme.eq_ignore_ascii_case(b"bearer ") => Ok(token.trim_ascii()),
        _ => Err(Closed::Missing),
    }
}

/// Compares in a time that reveals only the length of the token.
fn compare(shown: &[u8], expected: &[u8]) -> Result<(), Closed> {
    match bool::from(shown.ct_eq(expected)) {
        true => Ok(()),
        false => Err(Closed::Wrong),
    }
}

fn read(path: &Path) -> Result<Vec<u8>, Error> {
    let content = content(path).map_err(|source| {
        let path = path.to_path_buf();
        Error::Read { path, source }
    })?;
    token(&content, &path.display().to_string())
}

/// Reads one byte more than the maximum, so that a longer file is detected.
fn content(path: &Path) -> io::Result<Vec<u8>> {
    let mut content = Vec::new();
    let mut options = OpenOptions::new();
    // Opening a FIFO would block.
    options.read(true);
    options.custom_flags(OFlags::NONBLOCK.bits().cast_signed());
    let file = options.open(path)?;
    file.take(MAX_BYTES as u64 + 1).read_to_end(&mut content)?;
    Ok(content)
}

fn token(content: &[u8], place: &str) -> Result<Vec<u8>, Error> {
    let token = content.trim_ascii();
    let usable =
        !token.is_empty() && content.len() <= MAX_BYTES && token.iter().all(u8::is_ascii_graphic);
    match usable {
        true => Ok(token.to_vec()),
        false => Err(Error::Malformed(place.to_owned())),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use http::HeaderValue;
    use rstest::rstest;

    use super::*;

    fn headers(values: &[&str]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for value in values {
            let value = HeaderValue::from_str(value).unwrap();
            headers.append(header::AUTHORIZATION, value);
        }
        headers
    }

    fn gate(token: &str) -> Arc<Gate> {
        Gate::new(None, Some(token.as_bytes().to_vec())).unwrap()
    }

    #[rstest]
    #[case(&["Bearer s3cret"], Ok(()))]
    #[case(&["bearer  s3cret "], Ok(()))]
    #[case(&[], Err(Closed::Missing))]
    #[case(&["Basic s3cret"], Err(Closed::Missing))]
    #[case(&["s3cret"], Err(Closed::Missing))]
    #[case(&["Bearer"], Err(Closed::Missing))]
    #[case(&["Bearer "], Err(Closed::Wrong))]
    #[case(&["Bearer s3cre"], Err(Closed::Wrong))]
    #[case(&["Bearer s3cretx"], Err(Closed::Wrong))]
    #[case(&["Bearer S3CRET"], Err(Closed::Wrong))]
    #[case(&["Bearer s3cret", "Bearer s3cret"], Err(Closed::Wrong))]
    #[tokio::test]
    async fn only_the_right_token_is_accepted(
        #[case] shown: &[&str],
        #[case] expected: Result<(), Closed>,
    ) {
        assert_eq!(gate("s3cret\n").check(&headers(shown)).await, expected);
    }

    #[tokio::test]
    async fn without_a_configuration_every_client_may_call() {
        let open = Gate::new(None, None).unwrap();
        assert_eq!(open.check(&headers(&[])).await, Ok(()));
        assert_eq!(open.check(&headers(&["Bearer any"])).await, Ok(()));
    }

    #[rstest]
    #[case("")]
    #[case(" \n")]
    #[case("two words")]
    #[case("t\u{e4}g")]
    #[case(&"x".repeat(MAX_BYTES + 1))]
    fn an_invalid_token_does_not_leave_the_gate_open(#[case] token: &str) {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("token");
        fs::write(&path, token).unwrap();
        for refused in [
            Gate::new(None, Some(token.as_bytes().to_vec())),
            Gate::new(Some(path), None),
        ] {
            assert!(matches!(refused, Err(Error::Malformed(_))), "{refused:?}");
        }
    }

    #[test]
    fn a_missing_file_and_a_pipe_do_not_block() {
        let directory = tempfile::tempdir().unwrap();
        let missing = Gate::new(Some(directory.path().join("missing")), None);
        assert!(matches!(missing, Err(Error::Read { .. })), "{missing:?}");
        let pipe = directory.path().join("pipe");
        let (kind, mode) = (rustix::fs::FileType::Fifo, 0o600.into());
        rustix::fs::mknodat(rustix::fs::CWD, &pipe, kind, mode, 0).unwrap();
        Gate::new(Some(pipe), None).unwrap_err();
    }

    #[tokio::test]
    async fn the_current_content_of_the_file_counts_and_not_the_variable() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("token");
        fs::write(&path, "first\n").unwrap();
        let gate = Gate::new(Some(path.clone()), Some(b"other".to_vec())).unwrap();
        let (first, second) = (headers(&["Bearer first"]), headers(&["Bearer second"]));
        assert_eq!(gate.check(&first).await, Ok(()));
        assert_eq!(
            gate.check(&headers(&["Bearer other"])).await,
            Err(Closed::Wrong)
        );
        fs::write(&path, "second").unwrap();
        assert_eq!(gate.check(&first).await, Err(Closed::Wrong));
        assert_eq!(gate.check(&second).await, Ok(()));
        fs::remove_file(&path).unwrap();
        assert_eq!(gate.check(&second).await, Err(Closed::Unknown));
    }
}
