//! TLS for clients.

use std::{fs, path::Path, sync::Arc};

use hyper_util::rt::TokioIo;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use rustls::{
    ClientConfig, RootCertStore,
    pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer, ServerName},
};
use tempfile::TempDir;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use torpor_router::tls::{self, Acceptor, Files, MutualTls};

use crate::{
    backend::Backend,
    client::{nothing, read, request},
    world::{Setup, World, soon},
};

type Issuer = CertifiedIssuer<'static, KeyPair>;

fn authority() -> Issuer {
    let mut params = CertificateParams::new(vec![]).unwrap();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap()
}

fn issue(authority: &Issuer, name: &str) -> (CertificateDer<'static>, String, KeyPair) {
    let key = KeyPair::generate().unwrap();
    let params = CertificateParams::new(vec![name.to_owned()]).unwrap();
    let certificate = params.signed_by(&key, authority).unwrap();
    (certificate.der().clone(), certificate.pem(), key)
}

fn write_server(folder: &Path, authority: &Issuer, name: &str) {
    let (_, pem, key) = issue(authority, name);
    fs::write(folder.join("tls.crt"), pem).unwrap();
    fs::write(folder.join("tls.key"), key.serialize_pem()).unwrap();
}

struct Secured {
    world: World,
    backend: Backend,
    folder: TempDir,
    authority: Issuer,
    acceptor: Acceptor,
}

async fn secured(mutual: MutualTls) -> Secured {
    let folder = tempfile::tempdir().unwrap();
    let authority = authority();
    write_server(folder.path(), &authority, "router");
    fs::write(folder.path().join("ca.crt"), authority.pem()).unwrap();
    let files = Files {
        certificate: folder.path().join("tls.crt"),
        key: folder.path().join("tls.key"),
        client_ca: Some(folder.path().join("ca.crt")),
        mutual,
    };
    let acceptor = tls::acceptor(files).unwrap();
    let world = World::with(Setup {
        tls: Some(acceptor.clone()),
        ..Setup::default()
    })
    .await;
    world.running("s", "127.0.0.1").await;
    Secured {
        world,
        backend: Backend::echo().await,
        folder,
        authority,
        acceptor,
    }
}

impl Secured {
    /// Sends a request over TLS to a server of that name, with a client certificate of `own`.
    /// Returns the body of the response, or the error.
    async fn ask(&self, name: &'static str, own: Option<&Issuer>) -> Result<String, String> {
        let mut roots = RootCertStore::empty();
        roots.add(self.authority.der().clone()).unwrap();
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let builder = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap();
        let builder = builder.with_root_certificates(roots);
        let config = match own {
            Some(issuer) => {
                let (certificate, _, key) = issue(issuer, "client");
                let key = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(key.serialize_der()));
                builder
                    .with_client_auth_cert(vec![certificate], key)
                    .unwrap()
            }
            None => builder.with_no_client_auth(),
        };
        let stream = TcpStream::connect(self.world.address).await.unwrap();
        let connector = TlsConnector::from(Arc::new(config));
        let stream = connector
            .connect(ServerName::try_from(name).unwrap(), stream)
            .await;
        let stream = stream.map_err(|error| error.to_string())?;
        let handshake = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await;
        let (mut sender, connection) = handshake.map_err(|error| error.to_string())?;
        tokio::spawn(connection);
        let request = request("s", self.backend.port).body(nothing()).unwrap();
        // With TLS 1.3 the refusal of a certificate arrives only here.
        let answer = soon("an answer", sender.send_request(request))
            .await
            .map_err(|error| error.to_string())?;
        Ok(read(answer).await.body)
    }
}

#[tokio::test]
async fn a_request_over_tls_has_the_forwarded_protocol_https() {
    let secured = secured(MutualTls::Off).await;
    let body = secured.ask("router", None).await.unwrap();
    assert!(body.contains("x-forwarded-proto: https\n"), "{body}");
}

#[tokio::test]
async fn clients_certificates_are_asked_for_and_checked() {
    let foreign = authority();
    let required = secured(MutualTls::Required).await;
    required.ask("router", None).await.unwrap_err();
    required.ask("router", Some(&foreign)).await.unwrap_err();
    required
        .ask("router", Some(&required.authority))
        .await
        .unwrap();
    let optional = secured(MutualTls::Optional).await;
    optional.ask("router", None).await.unwrap();
    optional.ask("router", Some(&foreign)).await.unwrap_err();
    optional
        .ask("router", Some(&optional.authority))
        .await
        .unwrap();
    assert_eq!(required.backend.connections(), 1);
}

#[tokio::test]
async fn a_renewed_certificate_is_taken_up_and_a_broken_one_is_not() {
    let secured = secured(MutualTls::Off).await;
    assert!(!secured.acceptor.reload().unwrap(), "nothing changed");
    secured.ask("renewed", None).await.unwrap_err();
    write_server(secured.folder.path(), &secured.authority, "renewed");
    assert!(secured.acceptor.reload().unwrap());
    secured.ask("renewed", None).await.unwrap();
    // This key does not belong to the certificate.
    let other = KeyPair::generate().unwrap().serialize_pem();
    fs::write(secured.folder.path().join("tls.key"), other).unwrap();
    secured.acceptor.reload().unwrap_err();
    fs::write(secured.folder.path().join("tls.crt"), "nonsense").unwrap();
    secured.acceptor.reload().unwrap_err();
    secured.ask("renewed", None).await.unwrap();
}

#[tokio::test]
async fn a_clients_ca_that_is_replaced_counts_from_then_on_and_a_broken_one_does_not() {
    let secured = secured(MutualTls::Required).await;
    let (old, new) = (&secured.authority, &authority());
    secured.ask("router", Some(old)).await.unwrap();
    secured.ask("router", Some(new)).await.unwrap_err();
    let ca = secured.folder.path().join("ca.crt");
    fs::write(&ca, new.pem()).unwrap();
    assert!(secured.acceptor.reload().unwrap());
    assert!(!secured.acceptor.reload().unwrap(), "nothing changed");
    secured.ask("router", Some(new)).await.unwrap();
    secured.ask("router", Some(old)).await.unwrap_err();
    for broken in ["", "nonsense"] {
        fs::write(&ca, broken).unwrap();
        secured.acceptor.reload().unwrap_err();
    }
    fs::remove_file(&ca).unwrap();
    secured.acceptor.reload().unwrap_err();
    secured.ask("router", Some(new)).await.unwrap();
    secured.ask("router", None).await.unwrap_err();
}

#[test]
fn files_that_cannot_be_used_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let files = Files {
        certificate: folder.path().join("none.crt"),
        key: folder.path().join("none.key"),
        client_ca: None,
        mutual: MutualTls::Off,
    };
    let error = tls::acceptor(files.clone()).err().unwrap();
    assert!(error.to_string().contains("none.crt"), "{error}");
    let error = tls::acceptor(Files {
        mutual: MutualTls::Required,
        ..files
    })
    .err()
    .unwrap();
    assert_eq!(error.reason(), "NoClientCa");
}
