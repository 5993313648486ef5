//! Client of a KMS plug-in: a server on a Unix socket that speaks version 2 of Kubernetes' KMS API
//! (`k8s.io/kms/apis/v2/api.proto`). The plug-ins of the cloud providers for the encryption of
//! Secrets speak it.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use http::uri::PathAndQuery;
use serde::{Deserialize, Serialize};
use tonic::client::Grpc;
use tonic::transport::{Channel, Endpoint};
use tonic_prost::ProstCodec;

use crate::error::words;
use crate::seal;

/// Time limit of one call. It is that of `kube-apiserver` by default.
const LIMIT: Duration = Duration::from_secs(3);
/// Largest sealed key, and largest id of a key in the KMS, in bytes. The API sets both.
const LARGEST: usize = 1 << 10;
/// Most bytes of annotations, names included. The API sets it.
const LARGEST_ANNOTATIONS: usize = 32 << 10;
/// Longest message of a plug-in that is passed on, in characters.
const LONGEST_MESSAGE: usize = 300;

/// A KMS plug-in.
#[derive(Debug, Clone)]
pub struct Kms {
    socket: PathBuf,
}

/// Error of a call to a KMS plug-in.
#[derive(Debug, thiserror::Error)]
#[error("cannot {doing} the KMS plug-in at {}: {why}", socket.display())]
pub struct KmsError {
    doing: &'static str,
    socket: PathBuf,
    why: String,
}

/// A key that a KMS has sealed, with all that the plug-in needs to open it.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub(crate) struct SealedKey {
    /// Id of the KMS' key.
    key_id: String,
    /// In base64.
    ciphertext: String,
    /// Values of the plug-in, in base64.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    annotations: BTreeMap<String, String>,
}

impl SealedKey {
    /// Reads the text of [`Self::text`].
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let json = STANDARD.decode(text).ok()?;
        serde_json::from_slice(&json).ok()
    }

    /// Returns one word of text: JSON in base64.
    pub(crate) fn text(&self) -> String {
        STANDARD.encode(serde_json::to_vec(self).expect("strings"))
    }
}

impl Kms {
    /// Names the plug-in of a socket. Makes no call.
    pub fn at(socket: &Path) -> Self {
        Self {
            socket: socket.to_owned(),
        }
    }

    /// Checks that the plug-in speaks version 2 and can reach its KMS.
    pub async fn check(&self) -> Result<(), KmsError> {
        let doing = "ask for the state of";
        let status: Status = self
            .call(doing, "/v2.KeyManagementService/Status", Empty {})
            .await?;
        check_status(&status).map_err(|why| self.failed(doing, &why))
    }

    /// Seals a key with the KMS' newest key.
    pub(crate) async fn seal(&self, key: &[u8; seal::KEY]) -> Result<SealedKey, KmsError> {
        let doing = "seal a key with";
        let request = EncryptRequest {
            plaintext: key.to_vec(),
            uid: seal::random_word(),
        };
        let answer: EncryptResponse = self
            .call(doing, "/v2.KeyManagementService/Encrypt", request)
            .await?;
        check_answer(&answer).map_err(|why| self.failed(doing, why))?;
        let annotations = answer.annotations.into_iter();
        Ok(SealedKey {
            key_id: answer.key_id,
            ciphertext: STANDARD.encode(answer.ciphertext),
            annotations: annotations
                .map(|(name, value)| (name, STANDARD.encode(value)))
                .collect(),
        })
    }

    /// Opens a key that the KMS has sealed.
    pub(crate) async fn open(&self, key: &SealedKey) -> Result<[u8; seal::KEY], KmsError> {
        let doing = "open a key with";
        let decoded = |text: &String| {
            let bytes = STANDARD.decode(text);
            bytes.map_err(|_| self.failed(doing, "the sealed key is not in base64"))
        };
        let annotations = key.annotations.iter();
        let annotations = annotations.map(|(name, value)| Ok((name.clone(), decoded(value)?)));
        let request = DecryptRequest {
            ciphertext: decoded(&key.ciphertext)?,
            uid: seal::random_word(),
            key_id: key.key_id.clone(),
            annotations: annotations.collect::<Result<_, KmsError>>()?,
        };
        let answer: DecryptResponse = self
            .call(doing, "/v2.KeyManagementService/Decrypt", request)
            .await?;
        let opened = answer.plaintext.try_into();
        opened.map_err(|_| self.failed(doing, "the opened key does not have 32 bytes"))
    }

    async fn call<Q, A>(
        &self,
        doing: &'static str,
        method: &'static str,
        request: Q,
    ) -> Result<A, KmsError>
    where
        Q: prost::Message + Send + Sync + 'static,
        A: prost::Message + Default + Send + Sync + 'static,
    {
        let answered = async {
            let channel = self.connect().await.map_err(|e| words(&e))?;
            let mut client = Grpc::new(channel);
            client.ready().await.map_err(|e| words(&e))?;
            let path = PathAndQuery::from_static(method);
            let request = tonic::Request::new(request);
            let answered = client.unary(request, path, ProstCodec::<Q, A>::default());
            let answered = answered.await.map_err(|status| {
                let message: String = status.message().chars().take(LONGEST_MESSAGE).collect();
                format!("{:?}: {message}", status.code())
            })?;
            Ok(answered.into_inner())
        };
        match tokio::time::timeout(LIMIT, answered).await {
            Ok(answered) => answered.map_err(|why: String| self.failed(doing, &why)),
            Err(_) => Err(self.failed(doing, &format!("no answer within {LIMIT:?}"))),
        }
    }

    async fn connect(&self) -> Result<Channel, tonic::transport::Error> {
        let endpoint = Endpoint::from_shared(format!("unix://{}", self.socket.display()))?;
        endpoint.connect().await
    }

    pub(crate) fn failed(&self, doing: &'static str, why: &str) -> KmsError {
        KmsError {
            doing,
            socket: self.socket.clone(),
            why: why.to_owned(),
        }
    }
}

fn check_status(status: &Status) -> Result<(), String> {
    let (version, healthz) = (&status.version, &status.healthz);
    match version.starts_with("v2") && healthz == "ok" {
        true => Ok(()),
        false => Err(format!(
            "its version is {version:?} (v2 is needed) and its state {healthz:?}"
        )),
    }
}

/// Checks an answer by the limits of the API, as `kube-apiserver` does.
fn check_answer(answer: &EncryptResponse) -> Result<(), &'static str> {
    let annotations = answer.annotations.iter();
    let annotations: usize = annotations
        .map(|(name, value)| name.len() + value.len())
        .sum();
    match (answer.key_id.len(), answer.ciphertext.len()) {
        (0, _) => Err("its answer has no key_id"),
        (_, 0) => Err("its answer has no ciphertext"),
        (id, _) if id > LARGEST => Err("its key_id has more than 1 KiB"),
        (_, sealed) if sealed > LARGEST => Err("its ciphertext has more than 1 KiB"),
        _ if annotations > LARGEST_ANNOTATIONS => Err("its annotations have more than 32 KiB"),
        _ => Ok(()),
    }
}

#[derive(Clone, PartialEq, prost::Message)]
struct Empty {}

#[derive(Clone, PartialEq, prost::Message)]
struct Status {
    #[prost(string, tag = "1")]
    version: String,
    #[prost(string, tag = "2")]
    healthz: String,
    #[prost(string, tag = "3")]
    key_id: String,
}

#[derive(Clone, PartialEq, prost::Message)]
#[prost(skip_debug)]
struct EncryptRequest {
    #[prost(bytes = "vec", tag = "1")]
    plaintext: Vec<u8>,
    #[prost(string, tag = "2")]
    uid: String,
}

#[derive(Clone, PartialEq, prost::Message)]
struct EncryptResponse {
    #[prost(bytes = "vec", tag = "1")]
    ciphertext: Vec<u8>,
    #[prost(string, tag = "2")]
    key_id: String,
    #[prost(map = "string, bytes", tag = "3")]
    annotations: HashMap<String, Vec<u8>>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct DecryptRequest {
    #[prost(bytes = "vec", tag = "1")]
    ciphertext: Vec<u8>,
    #[prost(string, tag = "2")]
    uid: String,
    #[prost(string, tag = "3")]
    key_id: String,
    #[prost(map = "string, bytes", tag = "4")]
    annotations: HashMap<String, Vec<u8>>,
}

#[derive(Clone, PartialEq, prost::Message)]
#[prost(skip_debug)]
struct DecryptResponse {
    #[prost(bytes = "vec", tag = "1")]
    plaintext: Vec<u8>,
}

// Both messages have a key in clear.

impl std::fmt::Debug for EncryptRequest {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "EncryptRequest({})", self.uid)
    }
}

impl std::fmt::Debug for DecryptResponse {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("DecryptResponse")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(key_id: &str, ciphertext: usize, annotation: usize) -> EncryptResponse {
        let annotations = [("a.example.com".to_owned(), vec![0; annotation])];
        EncryptResponse {
            ciphertext: vec![1; ciphertext],
            key_id: key_id.to_owned(),
            annotations: annotations.into(),
        }
    }

    #[test]
    fn an_answer_beyond_the_limits_of_the_api_is_refused() {
        check_answer(&answer("1", 60, 10)).expect("an answer");
        for (bad, named) in [
            (answer("", 60, 10), "no key_id"),
            (answer("1", 0, 10), "no ciphertext"),
            (answer(&"1".repeat(1025), 60, 10), "key_id"),
            (answer("1", 1025, 10), "ciphertext"),
            (answer("1", 60, 32 << 10), "annotations"),
        ] {
            let why = check_answer(&bad).expect_err(named);
            assert!(why.contains(named), "{why}");
        }
    }

    #[test]
    fn a_plug_in_of_another_version_or_without_its_kms_is_refused() {
        let status = |version: &str, healthz: &str| Status {
            version: version.to_owned(),
            healthz: healthz.to_owned(),
            key_id: "1".to_owned(),
        };
        check_status(&status("v2", "ok")).expect("v2");
        check_status(&status("v2beta1", "ok")).expect("a version of v2");
        for bad in [status("v1beta1", "ok"), status("v2", "no connection")] {
            let why = check_status(&bad).expect_err("refused");
            assert!(
                why.contains(&bad.version) && why.contains(&bad.healthz),
                "{why}"
            );
        }
    }

    #[test]
    fn messages_with_a_key_do_not_show_it() {
        let plaintext = vec![77; 3];
        let shown = format!(
            "{:?} {:?}",
            EncryptRequest {
                plaintext: plaintext.clone(),
                uid: "u".to_owned()
            },
            DecryptResponse { plaintext },
        );
        assert!(!shown.contains("77"), "{shown}");
    }

    #[test]
    fn a_sealed_key_is_one_word_and_comes_back() {
        let key = SealedKey {
            key_id: "arn:1".to_owned(),
            ciphertext: STANDARD.encode(b"sealed"),
            annotations: [("a".to_owned(), STANDARD.encode(b"v"))].into(),
        };
        let text = key.text();
        assert!(!text.contains([':', ' ', '\n']), "{text}");
        assert_eq!(SealedKey::parse(&text), Some(key));
        assert_eq!(SealedKey::parse("bm90IGpzb24="), None);
    }

    #[tokio::test]
    async fn a_missing_plug_in_is_named() {
        let kms = Kms::at(Path::new("/nonexistent/kms.sock"));
        let error = kms.check().await.expect_err("no socket").to_string();
        assert!(error.contains("/nonexistent/kms.sock"), "{error}");
        assert!(error.contains("No such file"), "{error}");
    }
}
