//! The server's side of TLS for probes over HTTPS.
//!
//! The kubelet takes every certificate (InsecureSkipVerify), so this one may be public.
//! `certificate.der` and `key.der` are the same everywhere and protect nothing: the health of a
//! sandbox is no secret, and an impostor of the Pod could use a certificate of its own. They were
//! made with
//!
//! ```sh
//! openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -noenc -days 36500 \
//!     -subj /CN=asleep \
//!     -addext subjectAltName=DNS:asleep -config <(printf '[req]\ndistinguished_name=d\n[d]\n') \
//!     -outform DER -out certificate.der -keyout /dev/stdout |
//!     openssl pkcs8 -topk8 -nocrypt -outform DER -out key.der
//! ```

use std::io::{self, Read, Write};
use std::sync::{Arc, OnceLock};

use rustls::pki_types::{CertificateDer, PrivatePkcs8KeyDer};
use rustls::server::NoServerSessionStorage;
use rustls::{ServerConfig, ServerConnection};

const CERTIFICATE: &[u8] = include_bytes!("certificate.der");
const KEY: &[u8] = include_bytes!("key.der");
/// The type of the first record (RFC 8446 §5.1). No request of HTTP begins with this byte.
const HANDSHAKE: u8 = 22;

/// Reports whether a client's first bytes are TLS.
pub(super) fn begins(bytes: &[u8]) -> bool {
    bytes.first() == Some(&HANDSHAKE)
}

/// Does work in advance that the first probe over TLS would wait for.
///
/// aws-lc seeds itself from the processor's jitter. This takes up to 100 ms of processor time:
/// with a tenth of a processor for a Pod, the whole second that the kubelet waits.
pub(super) fn prepare() {
    if let Some(config) = config() {
        // If there is no randomness, a handshake reports the error later.
        let _ = config.crypto_provider().secure_random.fill(&mut [0]);
    }
}

/// The server's side of one connection. rustls bounds its memory: one record, and one message of a
/// handshake.
#[derive(Debug)]
pub(super) struct Tls(Box<ServerConnection>);

impl Tls {
    pub(super) fn new() -> Option<Self> {
        let connection = ServerConnection::new(config()?).ok()?;
        Some(Self(Box::new(connection)))
    }

    /// Decrypts `sealed` and appends the data to `plain`. No data comes after an error.
    pub(super) fn open(&mut self, mut sealed: &[u8], plain: &mut Vec<u8>) -> io::Result<()> {
        // Bytes after the client's close_notify are dropped.
        while !sealed.is_empty() && self.0.read_tls(&mut sealed)? > 0 {
            let state = self.0.process_new_packets().map_err(io::Error::other)?;
            let mut opened = vec![0; state.plaintext_bytes_to_read()];
            self.0.reader().read_exact(&mut opened)?;
            plain.append(&mut opened);
        }
        Ok(())
    }

    /// Returns the bytes to send by now, `plain` encrypted among them. If `ends`, nothing follows.
    pub(super) fn seal(&mut self, plain: &[u8], ends: bool) -> Vec<u8> {
        // The writer's buffer is larger than all answers.
        let _ = self.0.writer().write_all(plain);
        if ends {
            self.0.send_close_notify();
        }
        let mut sealed = Vec::new();
        while self.0.wants_write() && self.0.write_tls(&mut sealed).is_ok() {}
        sealed
    }
}

/// Returns the configuration of all connections. The first call makes it.
fn config() -> Option<Arc<ServerConfig>> {
    static CONFIG: OnceLock<Option<Arc<ServerConfig>>> = OnceLock::new();
    CONFIG
        .get_or_init(|| new_config().ok().map(Arc::new))
        .clone()
}

/// Makes a configuration without ALPN, for TLS 1.3 alone.
///
/// The kubelet's prober offers HTTP/2, too, and uses HTTP/1.1 with a server that chooses
/// nothing. Its Go offers TLS 1.3 since 1.13.
fn new_config() -> Result<ServerConfig, rustls::Error> {
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let chain = vec![CertificateDer::from(CERTIFICATE)];
    let key = PrivatePkcs8KeyDer::from(KEY);
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])?
        .with_no_client_auth()
        .with_single_cert(chain, key.into())?;
    // No session is resumed: each probe is a connection of its own.
    config.send_tls13_tickets = 0;
    config.session_storage = Arc::new(NoServerSessionStorage {});
    Ok(config)
}
