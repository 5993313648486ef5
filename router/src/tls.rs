//! TLS for clients, with or without client certificates.
//!
//! The server's certificate and the clients' CA are reloaded from disk without a restart.

use std::{
    fmt, fs, io,
    path::{Path, PathBuf},
    sync::{Arc, PoisonError, RwLock},
    time::Duration,
};

use clap::ValueEnum;
use rustls::{
    RootCertStore, ServerConfig,
    crypto::CryptoProvider,
    pki_types::{CertificateDer, PrivateKeyDer, pem, pem::PemObject},
    server::{WebPkiClientVerifier, danger::ClientCertVerifier},
};
use tokio::net::TcpStream;
use tokio_rustls::{Accept, TlsAcceptor};

use crate::metrics::{Metrics, OutcomeLabel};

/// Mode of client certificates.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum MutualTls {
    #[default]
    Off,
    /// The router verifies a client certificate if the client sends one.
    Optional,
    Required,
}

/// Paths of the TLS files.
#[derive(Clone, Debug)]
pub struct Files {
    pub certificate: PathBuf,
    pub key: PathBuf,
    /// CA certificates that sign clients' certificates.
    pub client_ca: Option<PathBuf>,
    pub mutual: MutualTls,
}

/// Error of the TLS files.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot read {path}")]
    Read {
        path: PathBuf,
        #[source]
        error: io::Error,
    },
    #[error("{path} does not hold the expected kind of PEM")]
    Pem {
        path: PathBuf,
        #[source]
        error: pem::Error,
    },
    #[error("cannot use the certificate and its key")]
    Key(#[source] rustls::Error),
    #[error("{path} holds a certificate that cannot be a CA's")]
    Authority {
        path: PathBuf,
        #[source]
        error: rustls::Error,
    },
    #[error("cannot use the clients' CA")]
    ClientCa(#[source] rustls::server::VerifierBuilderError),
    #[error("cannot verify client certificates without a CA")]
    NoClientCa,
}

impl Error {
    /// Returns a CamelCase reason for logs.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Read { .. } => "Read",
            Self::Pem { .. } => "Pem",
            Self::Key(_) => "Key",
            Self::Authority { .. } => "Authority",
            Self::ClientCa(_) => "ClientCa",
            Self::NoClientCa => "NoClientCa",
        }
    }

    /// Reports whether a later read may succeed: the files may be in the middle of a replacement.
    pub fn retry(&self) -> bool {
        !matches!(self, Self::NoClientCa)
    }
}

/// Acceptor of TLS connections. Clones share it.
#[derive(Clone)]
pub struct Acceptor(Arc<Shared>);

struct Shared {
    files: Files,
    current: RwLock<Current>,
}

struct Current {
    content: Content,
    config: Arc<ServerConfig>,
}

/// Content of the files.
#[derive(PartialEq, Eq)]
struct Content {
    certificate: Vec<u8>,
    key: Vec<u8>,
    client_ca: Option<Vec<u8>>,
}

impl fmt::Debug for Acceptor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Acceptor({:?})", self.0.files.certificate)
    }
}

/// Reads the files and returns an acceptor.
pub fn acceptor(files: Files) -> Result<Acceptor, Error> {
    let content = read_all(&files)?;
    let config = config(&files, &content)?;
    let current = RwLock::new(Current { content, config });
    Ok(Acceptor(Arc::new(Shared { files, current })))
}

impl Acceptor {
    /// Performs the TLS handshake with a client.
    pub fn accept(&self, stream: TcpStream) -> Accept<TcpStream> {
        let current = self.0.current.read();
        let current = current.unwrap_or_else(PoisonError::into_inner);
        TlsAcceptor::from(Arc::clone(&current.config)).accept(stream)
    }

    /// Reloads the files if they have changed; reports whether they had.
    ///
    /// Invalid files leave the old configuration in place. A reload invalidates TLS sessions: a
    /// client whose CA was removed cannot resume one.
    pub fn reload(&self) -> Result<bool, Error> {
        let (files, current) = (&self.0.files, &self.0.current);
        let content = read_all(files)?;
        let in_use = current.read().unwrap_or_else(PoisonError::into_inner);
        if in_use.content == content {
            return Ok(false);
        }
        drop(in_use);
        let config = config(files, &content)?;
        *current.write().unwrap_or_else(PoisonError::into_inner) = Current { content, config };
        Ok(true)
    }

    /// Reloads the files periodically.
    ///
    /// A mounted Secret changes by the rename of a parent directory, which a watch of the files
    /// does not report.
    pub async fn keep_fresh(&self, metrics: &Metrics, every: Duration) {
        loop {
            tokio::time::sleep(every).await;
            let outcome = match self.reload() {
                Ok(false) => continue,
                Ok(true) => {
                    tracing::info!("certificates reloaded");
                    "success"
                }
                Err(error) => {
                    let source = std::error::Error::source(&error).map(ToString::to_string);
                    tracing::warn!(%error, source, reason = error.reason(), "certificates not reloaded");
                    "failure"
                }
            };
            metrics
                .cert_reloads
                .get_or_create(&OutcomeLabel { outcome })
                .inc();
        }
    }
}

fn provider() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::aws_lc_rs::default_provider())
}

fn config(files: &Files, content: &Content) -> Result<Arc<ServerConfig>, Error> {
    let provider = provider();
    let verifier = client_verifier(files, content, &provider)?;
    let builder = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(Error::Key)?;
    let builder = match verifier {
        Some(verifier) => builder.with_client_cert_verifier(verifier),
        None => builder.with_no_client_auth(),
    };
    let chain = certificates(&files.certificate, &content.certificate)?;
    let key = PrivateKeyDer::from_pem_slice(&content.key).map_err(|error| Error::Pem {
        path: files.key.clone(),
        error,
    })?;
    // `with_single_cert` also checks that the key belongs to the certificate.
    let mut config = builder.with_single_cert(chain, key).map_err(Error::Key)?;
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(Arc::new(config))
}

fn client_verifier(
    files: &Files,
    content: &Content,
    provider: &Arc<CryptoProvider>,
) -> Result<Option<Arc<dyn ClientCertVerifier>>, Error> {
    if files.mutual == MutualTls::Off {
        return Ok(None);
    }
    let (Some(path), Some(authorities)) = (&files.client_ca, &content.client_ca) else {
        return Err(Error::NoClientCa);
    };
    let mut roots = RootCertStore::empty();
    for certificate in certificates(path, authorities)? {
        roots.add(certificate).map_err(|error| Error::Authority {
            path: path.clone(),
            error,
        })?;
    }
    let builder =
        WebPkiClientVerifier::builder_with_provider(Arc::new(roots), Arc::clone(provider));
    let builder = if files.mutual == MutualTls::Optional {
        builder.allow_unauthenticated()
    } else {
        builder
    };
    builder.build().map(Some).map_err(Error::ClientCa)
}

fn read_all(files: &Files) -> Result<Content, Error> {
    let client_ca = match (files.mutual, &files.client_ca) {
        // The CA is not used, and its file need not exist.
        (MutualTls::Off, _) => None,
        (MutualTls::Optional | MutualTls::Required, Some(path)) => Some(read(path)?),
        (MutualTls::Optional | MutualTls::Required, None) => return Err(Error::NoClientCa),
    };
    Ok(Content {
        certificate: read(&files.certificate)?,
        key: read(&files.key)?,
        client_ca,
    })
}

fn certificates(path: &Path, bytes: &[u8]) -> Result<Vec<CertificateDer<'static>>, Error> {
    let wrong = |error| Error::Pem {
        path: path.to_owned(),
        error,
    };
    let all: Vec<_> = CertificateDer::pem_slice_iter(bytes)
        .collect::<Result<_, _>>()
        .map_err(wrong)?;
    if all.is_empty() {
        return Err(wrong(pem::Error::NoItemsFound));
    }
    Ok(all)
}

fn read(path: &Path) -> Result<Vec<u8>, Error> {
    fs::read(path).map_err(|error| Error::Read {
        path: path.to_owned(),
        error,
    })
}
