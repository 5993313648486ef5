//! Tokens that open one sandbox, as upstream's router takes them: `<payload>.<HMAC-SHA256 of the payload's text>`, both in unpadded URL-safe base64; the payload is JSON
//! with namespace, name and expiry. Pure.

use aws_lc_rs::hmac;
use base64::{Engine as _, engine::general_purpose::URL_SAFE_NO_PAD};
use serde::{Deserialize, Serialize};

/// Shortest secret, in bytes without surrounding white space. Whoever sees one token can try secrets without asking anybody.
pub const SHORTEST_SECRET: usize = 32;

/// What a token says.
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

/// The shared secret.
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

    /// What the token says, if it was made with this secret and is not void at `now` (seconds since 1970).
    pub fn verify(&self, token: &str, now: i64) -> Option<Claims> {
        let (payload, signature) = token.split_once('.')?;
        let signature = URL_SAFE_NO_PAD.decode(signature).ok()?;
        // Before a byte of the payload is looked at; in constant time.
        hmac::verify(&self.0, payload.as_bytes(), &signature).ok()?;
        let payload = URL_SAFE_NO_PAD.decode(payload).ok()?;
        let claims: Claims = serde_json::from_slice(&payload).ok()?;
        (now < claims.exp).then_some(claims)
    }

    /// A token, as whoever creates sandboxes makes it. The router itself never does.
    pub fn sign(&self, claims: &Claims) -> Result<String, serde_json::Error> {
        let payload = URL_SAFE_NO_PAD.encode(serde_json::to_vec(claims)?);
        let signature = hmac::sign(&self.0, payload.as_bytes());
        Ok(format!("{payload}.{}", URL_SAFE_NO_PAD.encode(signature)))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn secret() -> Secret {
        Secret::new(b"  0123456789abcdef0123456789abcdef\n").unwrap()
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
        assert_eq!(secret().verify(&token, 999), Some(claims()));
        assert_eq!(secret().verify(&token, 1000), None);
        let other = Secret::new(&[b'x'; 32]).unwrap();
        assert_eq!(other.verify(&token, 0), None);
    }

    #[test]
    fn upstreams_tokens_are_read() {
        // {"ns":"team","name":"box","exp":1000}
        let payload = "eyJucyI6InRlYW0iLCJuYW1lIjoiYm94IiwiZXhwIjoxMDAwfQ";
        assert_eq!(
            secret().sign(&claims()).unwrap().split_once('.').unwrap().0,
            payload
        );
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
                prop_assert_eq!(secret().verify(&changed, 0), None);
            }
        }

        #[test]
        fn nothing_makes_it_panic(token in "\\PC{0,80}") {
            prop_assert_eq!(secret().verify(&token, 0), None);
        }
    }
}
