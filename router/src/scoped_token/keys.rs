//! Scoped tokens of version 2, as upstream's router accepts them since 1.0.2
//! (sandbox-router/authz/scopedtoken_v2.go, PR #1497). Pure.
//!
//! A token is `v2.<key ID>.<payload>.<signature>`. The signature is Ed25519 over [`CONTEXT`], the
//! key ID, a dot and the payload's text; payload and signature are in unpadded URL-safe base64.
//! The router has only public keys and cannot sign tokens.

use std::collections::HashMap;

use aws_lc_rs::signature::{ED25519, ED25519_PUBLIC_KEY_LEN, ParsedPublicKey};
use base64::{Engine as _, engine::general_purpose::URL_SAFE_NO_PAD};
use http::Method;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use serde::{Deserialize, Serialize};

/// First bytes of each signed text.
pub const CONTEXT: &str = "agent-sandbox/scoped-token/v2.";
/// Longest key ID in bytes; upstream's limit.
const LONGEST_ID: usize = 128;
/// Most keys of a file: one for each issuer, two while an issuer replaces its key.
pub const MOST_KEYS: usize = 256;
/// Largest file of keys in bytes: [`MOST_KEYS`] keys of the longest form, and white space.
pub const LARGEST_FILE: usize = 128 * 1024;

/// Claims of a token.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Claims {
    #[serde(rename = "ns")]
    pub namespace: String,
    pub name: String,
    /// UID of the Sandbox.
    pub uid: String,
    /// Port of the request; a token for the whole sandbox has port 0, no method and no path.
    #[serde(default)]
    pub port: u16,
    #[serde(default)]
    pub method: String,
    /// Path in the form of [`canonical`].
    #[serde(default)]
    pub path: String,
    /// Time in seconds since 1970 from which on the token is invalid.
    pub exp: i64,
}

impl Claims {
    /// Reports whether the token is valid for all ports, methods and paths of its sandbox;
    /// upstream issues such tokens since 1.0.12 (PR #2258).
    fn whole_sandbox(&self) -> bool {
        self.port == 0 && self.method.is_empty() && self.path.is_empty()
    }

    /// Reports whether the token is valid for a request to its sandbox. `path` is the path that the
    /// sandbox receives.
    pub fn covers(&self, port: u16, method: &Method, path: &str) -> bool {
        if self.whole_sandbox() {
            return true;
        }
        // Upstream writes methods in capitals and accepts no other form.
        let method = method.as_str();
        let capitals = !method.bytes().any(|byte| byte.is_ascii_lowercase());
        self.port == port
            && capitals
            && self.method == method
            && canonical(path).is_some_and(|path| path == self.path)
    }
}

/// Characters that a canonical path encodes: Go's set (net/url), as upstream's.
const ESCAPED: &AsciiSet = &NON_ALPHANUMERIC
    .remove(b'-')
    .remove(b'.')
    .remove(b'_')
    .remove(b'~')
    .remove(b'!')
    .remove(b'$')
    .remove(b'&')
    .remove(b'\'')
    .remove(b'(')
    .remove(b')')
    .remove(b'*')
    .remove(b'+')
    .remove(b',')
    .remove(b'/')
    .remove(b':')
    .remove(b';')
    .remove(b'=')
    .remove(b'@')
    .remove(b'[')
    .remove(b']')
    .remove(b'%');

/// Returns a path in the form that tokens contain: escapes in capitals. `None`: an escape is
/// invalid.
fn canonical(path: &str) -> Option<String> {
    let mut pieces = path.split('%');
    let mut written = pieces.next()?.to_owned();
    for piece in pieces {
        let (escape, rest) = piece.split_at_checked(2)?;
        if !escape.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return None;
        }
        written.push('%');
        written.push_str(&escape.to_ascii_uppercase());
        written.push_str(rest);
    }
    Some(utf8_percent_encode(&written, ESCAPED).to_string())
}

/// Error of a file of keys.
#[derive(Debug, thiserror::Error)]
pub enum KeysError {
    #[error("the file with keys of scoped tokens is not readable")]
    Json(#[from] serde_json::Error),
    #[error("the file has no key of scoped tokens")]
    None,
    #[error("the file has {0} keys of scoped tokens; at most {MOST_KEYS} are allowed")]
    TooMany(usize),
    #[error("key ID {0:?} of scoped tokens must have 1 to {LONGEST_ID} letters, digits, - and _")]
    Id(String),
    #[error("the file has key ID {0:?} of scoped tokens twice")]
    Twice(String),
    #[error(
        "key {0:?} of scoped tokens is not {ED25519_PUBLIC_KEY_LEN} bytes of an Ed25519 public key in unpadded URL-safe base64"
    )]
    Key(String),
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    keys: Vec<FileKey>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FileKey {
    kid: String,
    #[serde(rename = "publicKey")]
    public_key: String,
}

/// Public keys of issuers by key ID. Two keys of an issuer may be valid at once while it replaces
/// its key.
#[derive(Debug)]
pub struct Keys(HashMap<String, ParsedPublicKey>);

impl Keys {
    /// Reads `{"keys": [{"kid": ID, "publicKey": unpadded URL-safe base64}]}`.
    pub fn read(content: &[u8]) -> Result<Self, KeysError> {
        let file: File = serde_json::from_slice(content)?;
        match file.keys.len() {
            0 => return Err(KeysError::None),
            1..=MOST_KEYS => {}
            more => return Err(KeysError::TooMany(more)),
        }
        let mut keys = HashMap::new();
        for FileKey { kid, public_key } in file.keys {
            if !is_id(&kid) {
                return Err(KeysError::Id(kid));
            }
            let key = URL_SAFE_NO_PAD.decode(public_key).ok();
            let key = key.filter(|key| key.len() == ED25519_PUBLIC_KEY_LEN);
            let key = key.and_then(|key| ParsedPublicKey::new(&ED25519, key).ok());
            let key = key.ok_or_else(|| KeysError::Key(kid.clone()))?;
            if keys.insert(kid.clone(), key).is_some() {
                return Err(KeysError::Twice(kid));
            }
        }
        Ok(Self(keys))
    }

    /// Returns the claims of `<key ID>.<payload>.<signature>`, if that key signed the token and the
    /// token is valid at `now` (seconds since 1970).
    pub(super) fn verify(&self, token: &str, now: i64) -> Option<Claims> {
        let (signed, signature) = token.rsplit_once('.')?;
        let (id, payload) = signed.split_once('.')?;
        let key = self.0.get(id)?;
        let signature = URL_SAFE_NO_PAD.decode(signature).ok()?;
        // The signature is verified before the payload is parsed.
        key.verify_sig(format!("{CONTEXT}{signed}").as_bytes(), &signature)
            .ok()?;
        let payload = URL_SAFE_NO_PAD.decode(payload).ok()?;
        let claims: Claims = serde_json::from_slice(&payload).ok()?;
        (!claims.uid.is_empty() && now < claims.exp).then_some(claims)
    }
}

fn is_id(text: &str) -> bool {
    let inner = |byte: u8| byte.is_ascii_alphanumeric() || b"-_".contains(&byte);
    (1..=LONGEST_ID).contains(&text.len()) && text.bytes().all(inner)
}

#[cfg(test)]
mod tests;
