//! Tokens that open one sandbox, as upstream's router accepts them
//! (sandbox-router/authz/scopedtoken.go). Pure.
//!
//! The text before the first dot is the version: [`Secret`] verifies `v1`, [`keys`] verify `v2`.

pub mod keys;

use aws_lc_rs::hmac;
use base64::{Engine as _, engine::general_purpose::URL_SAFE_NO_PAD};
use serde::{Deserialize, Serialize};

use self::keys::Keys;

/// Shortest secret, in bytes without surrounding white space.
///
/// An attacker with one token can try secrets offline.
pub const SHORTEST_SECRET: usize = 32;
/// Largest file of a secret, in bytes.
pub const LARGEST_SECRET: usize = 4096;
/// First bytes of each signed text: no other use of the secret produces a token.
const CONTEXT: &str = "agent-sandbox/scoped-token/v1.";

/// Keys that verify tokens. Without a secret and without keys no token is valid.
#[derive(Debug, Default)]
pub struct Tokens {
    /// Key of tokens of version 1.
    pub secret: Option<Secret>,
    /// Time in seconds since 1970 from which on tokens of version 1 are invalid, if set.
    pub secret_until: Option<i64>,
    /// Keys of tokens of version 2.
    pub keys: Option<Keys>,
}

/// Claims of a valid token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum VerifiedClaims {
    V1(Claims),
    V2(keys::Claims),
}

impl Tokens {
    /// Returns the claims of a token, if it is valid at `now` (seconds since 1970).
    pub fn verify(&self, token: &str, now: i64) -> Option<VerifiedClaims> {
        match token.split_once('.')? {
            ("v1", rest) if self.secret_until.is_none_or(|until| now < until) => self
                .secret
                .as_ref()?
                .verify(rest, now)
                .map(VerifiedClaims::V1),
            ("v2", rest) => self
                .keys
                .as_ref()?
                .verify(rest, now)
                .map(VerifiedClaims::V2),
            _ => None,
        }
    }
}

impl From<Secret> for Tokens {
    fn from(secret: Secret) -> Self {
        Self {
            secret: Some(secret),
            ..Self::default()
        }
    }
}

/// Claims of a token of version 1.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Claims {
    #[serde(rename = "ns")]
    pub namespace: String,
    pub name: String,
    /// Time in seconds since 1970 from which on the token is invalid.
    pub exp: i64,
}

/// Error of a shared secret that is too short.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("the secret of scoped tokens has {0} bytes; it needs at least {SHORTEST_SECRET}")]
pub struct ShortSecret(pub usize);

/// Shared secret of version 1.
///
/// A token is `v1.<payload>.<HMAC-SHA256 of the context and the payload's text>`. Payload and
/// signature are in unpadded URL-safe base64; the payload is JSON with namespace, name and expiry.
#[derive(Debug)]
pub struct Secret(Box<hmac::Key>);

impl Secret {
    /// Reads the secret from the content of a file, without surrounding white space.
    pub fn new(content: &[u8]) -> Result<Self, ShortSecret> {
        let secret = content.trim_ascii();
        if secret.len() < SHORTEST_SECRET {
            return Err(ShortSecret(secret.len()));
        }
        Ok(Self(Box::new(hmac::Key::new(hmac::HMAC_SHA256, secret))))
    }

    /// Returns the claims of `<payload>.<signature>`, if valid.
    fn verify(&self, token: &str, now: i64) -> Option<Claims> {
        let (payload, signature) = token.split_once('.')?;
        let signature = URL_SAFE_NO_PAD.decode(signature).ok()?;
        // The signature is verified before the payload is parsed, in constant time.
        hmac::verify(&self.0, signed(payload).as_bytes(), &signature).ok()?;
        let payload = URL_SAFE_NO_PAD.decode(payload).ok()?;
        let claims: Claims = serde_json::from_slice(&payload).ok()?;
        (now < claims.exp).then_some(claims)
    }

    /// Signs a token, as an issuer does. The router itself never signs one.
    pub fn sign(&self, claims: &Claims) -> Result<String, serde_json::Error> {
        let payload = URL_SAFE_NO_PAD.encode(serde_json::to_vec(claims)?);
        let signature = hmac::sign(&self.0, signed(&payload).as_bytes());
        let signature = URL_SAFE_NO_PAD.encode(signature);
        Ok(format!("v1.{payload}.{signature}"))
    }
}

fn signed(payload: &str) -> String {
    format!("{CONTEXT}{payload}")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SECRET: &[u8] = b"0123456789abcdef0123456789abcdef";

    fn secret() -> Secret {
        Secret::new(SECRET).unwrap()
    }

    fn tokens() -> Tokens {
        secret().into()
    }

    fn claims() -> Claims {
        Claims {
            namespace: "team".into(),
            name: "box".into(),
            exp: 1000,
        }
    }

    #[test]
    fn a_token_is_valid_until_it_expires_and_with_its_secret_only() {
        let token = secret().sign(&claims()).unwrap();
        assert_eq!(
            tokens().verify(&token, 999),
            Some(VerifiedClaims::V1(claims()))
        );
        assert_eq!(tokens().verify(&token, 1000), None);
        let other = Tokens::from(Secret::new(&[b'x'; 32]).unwrap());
        assert_eq!(other.verify(&token, 0), None);
        assert_eq!(Tokens::default().verify(&token, 0), None);
    }

    #[test]
    fn upstreams_tokens_are_read() {
        // Python's hmac made this token of {"ns":"team","name":"box","exp":1000}.
        let token = "v1.eyJucyI6InRlYW0iLCJuYW1lIjoiYm94IiwiZXhwIjoxMDAwfQ.wObH9bzdwTPOtVVs4IA-gGVh1HucnL0eD5klF6Sp-1o";
        assert_eq!(
            tokens().verify(token, 0),
            Some(VerifiedClaims::V1(claims()))
        );
        let white_space = Secret::new(&[b"  \n", SECRET, b"\n"].concat()).unwrap();
        assert_eq!(white_space.sign(&claims()).unwrap(), token);
        // One token lacks the version, the other has an unknown version.
        for other in [&token[3..], &token.replacen("v1", "v3", 1)] {
            assert_eq!(tokens().verify(other, 0), None);
        }
    }

    #[test]
    fn tokens_of_version_1_are_invalid_from_the_given_time() {
        let token = secret().sign(&claims()).unwrap();
        let tokens = Tokens {
            secret_until: Some(500),
            ..tokens()
        };
        assert!(tokens.verify(&token, 499).is_some());
        assert_eq!(tokens.verify(&token, 500), None);
    }

    #[test]
    fn a_short_secret_is_refused() {
        assert_eq!(Secret::new(b" short \n").unwrap_err(), ShortSecret(5));
    }

    proptest! {
        #[test]
        fn any_changed_byte_makes_a_token_invalid(at in any::<prop::sample::Index>(), byte in any::<u8>()) {
            let token = secret().sign(&claims()).unwrap();
            let mut bytes = token.into_bytes();
            let at = at.index(bytes.len());
            prop_assume!(bytes[at] != byte);
            bytes[at] = byte;
            if let Ok(changed) = String::from_utf8(bytes) {
                prop_assert_eq!(tokens().verify(&changed, 0), None);
            }
        }

        #[test]
        fn no_input_causes_a_panic(token in "(v1\\.)?\\PC{0,80}") {
            prop_assert_eq!(tokens().verify(&token, 0), None);
        }
    }
}
