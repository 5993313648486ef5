//! Tokens that open one sandbox, as upstream's router takes them
//! (sandbox-router/authz/scopedtoken.go). The word before the first dot is the version: `v1` is
//! [`Secret`]'s, `v2` is [`keys`]'. Pure.

pub mod keys;

use aws_lc_rs::hmac;
use base64::{Engine as _, engine::general_purpose::URL_SAFE_NO_PAD};
use serde::{Deserialize, Serialize};

use self::keys::Keys;

/// Shortest secret, in bytes without surrounding white space. Whoever sees one token can try secrets without asking anybody.
pub const SHORTEST_SECRET: usize = 32;
/// Largest file of a secret, in bytes.
pub const LARGEST_SECRET: usize = 4096;
/// First bytes of each signed text: no other use of the secret makes tokens.
const CONTEXT: &str = "agent-sandbox/scoped-token/v1.";

/// Keys that verify tokens. Without any of the two no token is good.
#[derive(Debug, Default)]
pub struct Tokens {
    /// Key of tokens of version 1.
    pub secret: Option<Secret>,
    /// Second since 1970 from which on tokens of version 1 are void, if there is one.
    pub secret_until: Option<i64>,
    /// Keys of tokens of version 2.
    pub keys: Option<Keys>,
}

/// Claims of a good token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Opened {
    V1(Claims),
    V2(keys::Claims),
}

impl Tokens {
    /// Claims of the token, if it is good at `now` (seconds since 1970).
    pub fn verify(&self, token: &str, now: i64) -> Option<Opened> {
        match token.split_once('.')? {
            ("v1", rest) if self.secret_until.is_none_or(|until| now < until) => {
                self.secret.as_ref()?.verify(rest, now).map(Opened::V1)
            }
            ("v2", rest) => self.keys.as_ref()?.verify(rest, now).map(Opened::V2),
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
    /// Second from which on it is void.
    pub exp: i64,
}

/// The shared secret cannot be used.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("the secret of scoped tokens has {0} bytes; it needs at least {SHORTEST_SECRET}")]
pub struct ShortSecret(pub usize);

/// The shared secret of version 1: `v1.<payload>.<HMAC-SHA256 of the context and the payload's
/// text>`. Payload and signature are in unpadded URL-safe base64; the payload is JSON with
/// namespace, name and expiry.
#[derive(Debug)]
pub struct Secret(Box<hmac::Key>);

impl Secret {
    /// Takes the content of a file; white space around it does not count.
    pub fn new(content: &[u8]) -> Result<Self, ShortSecret> {
        let secret = content.trim_ascii();
        if secret.len() < SHORTEST_SECRET {
            return Err(ShortSecret(secret.len()));
        }
        Ok(Self(Box::new(hmac::Key::new(hmac::HMAC_SHA256, secret))))
    }

    /// Claims of `<payload>.<signature>`.
    fn verify(&self, token: &str, now: i64) -> Option<Claims> {
        let (payload, signature) = token.split_once('.')?;
        let signature = URL_SAFE_NO_PAD.decode(signature).ok()?;
        // Before a byte of the payload is looked at; in constant time.
        hmac::verify(&self.0, signed(payload).as_bytes(), &signature).ok()?;
        let payload = URL_SAFE_NO_PAD.decode(payload).ok()?;
        let claims: Claims = serde_json::from_slice(&payload).ok()?;
        (now < claims.exp).then_some(claims)
    }

    /// A token, as whoever creates sandboxes makes it. The router itself never does.
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
    fn a_token_is_good_until_its_second_and_with_its_secret_only() {
        let token = secret().sign(&claims()).unwrap();
        assert_eq!(tokens().verify(&token, 999), Some(Opened::V1(claims())));
        assert_eq!(tokens().verify(&token, 1000), None);
        let other = Tokens::from(Secret::new(&[b'x'; 32]).unwrap());
        assert_eq!(other.verify(&token, 0), None);
        assert_eq!(Tokens::default().verify(&token, 0), None);
    }

    #[test]
    fn upstreams_tokens_are_read() {
        // By Python's hmac: {"ns":"team","name":"box","exp":1000}.
        let token = "v1.eyJucyI6InRlYW0iLCJuYW1lIjoiYm94IiwiZXhwIjoxMDAwfQ.wObH9bzdwTPOtVVs4IA-gGVh1HucnL0eD5klF6Sp-1o";
        assert_eq!(tokens().verify(token, 0), Some(Opened::V1(claims())));
        let white_space = Secret::new(&[b"  \n", SECRET, b"\n"].concat()).unwrap();
        assert_eq!(white_space.sign(&claims()).unwrap(), token);
        // Without the version, and of one that nobody knows.
        for other in [&token[3..], &token.replacen("v1", "v3", 1)] {
            assert_eq!(tokens().verify(other, 0), None);
        }
    }

    #[test]
    fn tokens_of_version_1_end_together_where_that_is_said() {
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
        fn any_changed_byte_makes_it_void(at in any::<prop::sample::Index>(), byte in any::<u8>()) {
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
        fn nothing_makes_it_panic(token in "(v1\\.)?\\PC{0,80}") {
            prop_assert_eq!(tokens().verify(&token, 0), None);
        }
    }
}
