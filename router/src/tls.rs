//! TLS towards clients, with or without certificates of theirs. A certificate that is renewed on disk is taken up without a restart.

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
    server::{ClientHello, ResolvesServerCert, WebPkiClientVerifier, danger::ClientCertVerifier},
    sign::CertifiedKey,
};
use tokio_rustls::TlsAcceptor;

use crate::metrics::{Metrics, OutcomeLabel};

/// Makes TLS of a connection.
pub type Acceptor = TlsAcceptor;

/// Whether clients show certificates.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum MutualTls {
    #[default]
    Off,
    /// A certificate is checked if one is shown.
    Optional,
    Required,
}

/// Where the files lie.
#[derive(Clone, Debug)]
pub struct Files {
    pub certificate: PathBuf,
    pub key: PathBuf,
    /// Whoever signed clients' certificates.
    pub client_ca: Option<PathBuf>,
    pub mutual: MutualTls,
}

/// TLS cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{path}")]
    Read {
        path: PathBuf,
        #[source]
        error: io::Error,
    },
    #[error("{path} holds no PEM of the kind")]
    Pem {
        path: PathBuf,
        #[source]
        error: pem::Error,
    },
    #[error("certificate and key cannot be used")]
    Key(#[source] rustls::Error),
    #[error("the clients' CA cannot be used")]
    ClientCa(#[source] rustls::server::VerifierBuilderError),
    #[error("certificates of clients cannot be checked without a CA")]
    NoClientCa,
}

impl Error {
    /// One word for logs.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Read { .. } => "Read",
            Self::Pem { .. } => "Pem",
            Self::Key(_) => "Key",
            Self::ClientCa(_) => "ClientCa",
            Self::NoClientCa => "NoClientCa",
        }
    }

    /// Whether the files may be right a moment later, as while they are being replaced.
    pub fn retry(&self) -> bool {
        !matches!(self, Self::NoClientCa)
    }
}

/// The certificate in use.
pub struct Certificate {
    files: Files,
    current: RwLock<Current>,
}

struct Current {
    /// What was read from the files.
    bytes: (Vec<u8>, Vec<u8>),
    key: Arc<CertifiedKey>,
}

impl fmt::Debug for Certificate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Certificate({:?})", self.files.certificate)
    }
}

impl ResolvesServerCert for Certificate {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        let current = self.current.read().unwrap_or_else(PoisonError::into_inner);
        Some(Arc::clone(&current.key))
    }
}

/// Reads the files and makes what accepts TLS connections.
pub fn acceptor(files: Files) -> Result<(Acceptor, Arc<Certificate>), Error> {
    let provider = provider();
    let verifier = client_verifier(&files, &provider)?;
    let current = load(&files)?;
    let certificate = Arc::new(Certificate {
        files,
        current: RwLock::new(current),
    });
    let builder = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(Error::Key)?;
    let builder = match verifier {
        Some(verifier) => builder.with_client_cert_verifier(verifier),
        None => builder.with_no_client_auth(),
    };
    let resolver: Arc<dyn ResolvesServerCert> = Arc::clone(&certificate) as _;
    let mut config = builder.with_cert_resolver(resolver);
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok((TlsAcceptor::from(Arc::new(config)), certificate))
}

impl Certificate {
    /// Takes up the files if they have changed; says whether they had. What cannot be used leaves the old certificate in place.
    pub fn reload(&self) -> Result<bool, Error> {
        let bytes = (read(&self.files.certificate)?, read(&self.files.key)?);
        if self
            .current
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .bytes
            == bytes
        {
            return Ok(false);
        }
        let new = certified(&self.files, bytes)?;
        *self.current.write().unwrap_or_else(PoisonError::into_inner) = new;
        Ok(true)
    }

    /// Looks at the files again and again. A mounted Secret changes by renaming a directory above them, which no watch of the files themselves shows.
    pub async fn keep_fresh(&self, metrics: &Metrics, every: Duration) {
        loop {
            tokio::time::sleep(every).await;
            let outcome = match self.reload() {
                Ok(false) => continue,
                Ok(true) => {
                    tracing::info!("certificate reloaded");
                    "success"
                }
                Err(error) => {
                    let source = std::error::Error::source(&error).map(ToString::to_string);
                    tracing::warn!(%error, source, reason = error.reason(), "certificate not reloaded");
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

fn client_verifier(
    files: &Files,
    provider: &Arc<CryptoProvider>,
) -> Result<Option<Arc<dyn ClientCertVerifier>>, Error> {
    if files.mutual == MutualTls::Off {
        return Ok(None);
    }
    let path = files.client_ca.as_ref().ok_or(Error::NoClientCa)?;
    let mut roots = RootCertStore::empty();
    for certificate in certificates(path, &read(path)?)? {
        roots.add(certificate).map_err(Error::Key)?;
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

fn load(files: &Files) -> Result<Current, Error> {
    certified(files, (read(&files.certificate)?, read(&files.key)?))
}

fn certified(files: &Files, bytes: (Vec<u8>, Vec<u8>)) -> Result<Current, Error> {
    let chain = certificates(&files.certificate, &bytes.0)?;
    let key = PrivateKeyDer::from_pem_slice(&bytes.1).map_err(|error| Error::Pem {
        path: files.key.clone(),
        error,
    })?;
    // Also checks that the key is the certificate's.
    let key = CertifiedKey::from_der(chain, key, &provider()).map_err(Error::Key)?;
    Ok(Current {
        bytes,
        key: Arc::new(key),
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
