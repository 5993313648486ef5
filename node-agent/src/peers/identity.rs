//! Key and certificate of this agent, and the check of the other end's certificate.

use std::fmt::{self, Display};
use std::sync::Arc;

use ::aws_lc_rs::digest::{SHA256, digest};
use rcgen::{CertificateParams, KeyPair};
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, aws_lc_rs, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer, ServerName, UnixTime};
use rustls::server::NoServerSessionStorage;
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::version::TLS13;
use rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, DistinguishedName, Error, ServerConfig,
    SignatureScheme,
};

/// Name in all certificates. Nothing depends on it: the digest of the certificate counts.
const NAME: &str = "torpor-agent";

/// Error: this agent's certificate cannot be made or used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum IdentityError {
    #[error("cannot make a certificate: {0}")]
    Make(#[from] rcgen::Error),
    #[error("cannot use the certificate: {0}")]
    Use(#[from] Error),
}

/// SHA-256 of a certificate, in hex digits.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct CertificateDigest(String);

impl CertificateDigest {
    fn of(certificate: &CertificateDer<'_>) -> Self {
        let bytes = digest(&SHA256, certificate);
        Self(
            bytes
                .as_ref()
                .iter()
                .map(|byte| format!("{byte:02x}"))
                .collect(),
        )
    }

    /// Reads the digest of a SandboxNode's status.
    pub(super) fn written(text: &str) -> Self {
        Self(text.to_owned())
    }

    /// Returns the digest of the certificate of a connection's other end.
    pub(super) fn of_peer(certificates: Option<&[CertificateDer<'_>]>) -> Option<Self> {
        certificates?.first().map(Self::of)
    }
}

impl Display for CertificateDigest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Key and certificate of this agent, made at its start.
pub(crate) struct Identity {
    certificate: CertificateDer<'static>,
    key: PrivateKeyDer<'static>,
}

impl fmt::Debug for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Identity({})", self.digest())
    }
}

impl Identity {
    pub(crate) fn new() -> Result<Self, IdentityError> {
        let key = KeyPair::generate()?;
        let certificate = CertificateParams::new([NAME.to_owned()])?.self_signed(&key)?;
        Ok(Self {
            certificate: certificate.der().clone(),
            key: PrivatePkcs8KeyDer::from(key.serialize_der()).into(),
        })
    }

    pub(crate) fn digest(&self) -> CertificateDigest {
        CertificateDigest::of(&self.certificate)
    }

    /// Returns the server's side of TLS. It takes each certificate of a client: the request is
    /// admitted by its digest.
    pub(super) fn server(&self) -> Result<Arc<ServerConfig>, IdentityError> {
        let provider = Arc::new(aws_lc_rs::default_provider());
        let peer = Arc::new(Peer::new(None, &provider));
        let mut config = ServerConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&TLS13])?
            .with_client_cert_verifier(peer)
            .with_single_cert(vec![self.certificate.clone()], self.key.clone_key())?;
        // No client resumes a session, and each would hold its certificate in memory.
        config.send_tls13_tickets = 0;
        config.session_storage = Arc::new(NoServerSessionStorage {});
        Ok(Arc::new(config))
    }

    /// Returns the client's side of TLS for the server with this certificate.
    pub(super) fn client(
        &self,
        server: CertificateDigest,
    ) -> Result<Arc<ClientConfig>, IdentityError> {
        let provider = Arc::new(aws_lc_rs::default_provider());
        let peer = Arc::new(Peer::new(Some(server), &provider));
        let config = ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&TLS13])?
            .dangerous()
            .with_custom_certificate_verifier(peer)
            .with_client_auth_cert(vec![self.certificate.clone()], self.key.clone_key())?;
        Ok(Arc::new(config))
    }

    /// Returns the name that a client sends. It is in every agent's certificate.
    pub(super) fn server_name() -> ServerName<'static> {
        ServerName::try_from(NAME).unwrap_or_else(|_| unreachable!("a DNS name"))
    }
}

/// Check of the other end's certificate: the digest, and the proof that the peer has the key. No
/// authority signs these certificates, and they do not expire: they last as long as their agent.
#[derive(Debug)]
struct Peer {
    /// Digest of the only accepted certificate; none if another check follows.
    expected: Option<CertificateDigest>,
    provider: Arc<CryptoProvider>,
}

impl Peer {
    fn new(expected: Option<CertificateDigest>, provider: &Arc<CryptoProvider>) -> Self {
        Self {
            expected,
            provider: provider.clone(),
        }
    }

    fn check(&self, certificate: &CertificateDer<'_>) -> Result<(), Error> {
        match &self.expected {
            Some(expected) if CertificateDigest::of(certificate) != *expected => Err(
                Error::InvalidCertificate(CertificateError::ApplicationVerificationFailure),
            ),
            _ => Ok(()),
        }
    }

    fn check_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        verify_tls13_signature(message, certificate, signature, algorithms)
    }

    fn schemes(&self) -> Vec<SignatureScheme> {
        let algorithms = &self.provider.signature_verification_algorithms;
        algorithms.supported_schemes()
    }
}

/// Error of a handshake with a version of TLS that is not offered.
fn old_version() -> Error {
    Error::General("only TLS 1.3 is spoken".to_owned())
}

impl ServerCertVerifier for Peer {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        self.check(end_entity)?;
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _certificate: &CertificateDer<'_>,
        _signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Err(old_version())
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.check_signature(message, certificate, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.schemes()
    }
}

impl ClientCertVerifier for Peer {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        self.check(end_entity)?;
        Ok(ClientCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _certificate: &CertificateDer<'_>,
        _signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Err(old_version())
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.check_signature(message, certificate, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.schemes()
    }
}
