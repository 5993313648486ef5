//! Settings of a repository: parameters of a SnapshotClass, and files of credentials.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey};
use object_store::azure::{AzureConfigKey, MicrosoftAzureBuilder};
use object_store::gcp::{GoogleCloudStorageBuilder, GoogleConfigKey};
use object_store::local::LocalFileSystem;
use object_store::path::Path as ObjectPath;
use object_store::{Certificate, ClientOptions, ObjectStore, ObjectStoreScheme, RetryConfig};
use url::Url;

use crate::file;
use crate::keys::KeysError;
use crate::names::is_part;

/// File with certificate authorities, in PEM.
const AUTHORITIES: &str = "ca.crt";
/// Largest file of credentials, in bytes.
const LARGEST: u64 = 256 << 10;
/// Time limit of one request, and of all attempts at it. The caller tries again later.
const REQUEST: Duration = Duration::from_secs(30);
const ATTEMPTS: Duration = Duration::from_secs(60);
/// Longest time after which a request that was begun may still have an effect.
pub(crate) const LONGEST_REQUEST: Duration = Duration::from_secs(120);

/// Place of a repository.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settings {
    pub url: Url,
    endpoint: Option<String>,
    region: Option<String>,
    allow_http: bool,
    /// Images are not written without an encryption key.
    pub(crate) encrypted: bool,
    /// UIDs of other clusters whose archives may be restored.
    archives_of: Vec<String>,
    /// Most bytes of images of one namespace.
    pub(crate) max_size: Option<u64>,
}

/// Error: the settings do not name a repository.
#[derive(Debug, thiserror::Error)]
pub enum InvalidSettings {
    #[error("parameter url is missing: set it to s3://<bucket>/<prefix>, gs://, az:// or file://")]
    NoUrl,
    #[error("parameter url {url:?} is not a URL of an object store: {why}")]
    Url { url: String, why: String },
    #[error("parameter allowHTTP is {0:?}, not \"true\" or \"false\"")]
    AllowHttp(String),
    #[error("parameter encryption is {0:?}, not \"required\" or \"none\"")]
    Encryption(String),
    #[error(
        "parameter archivesOf is {0:?}, not a list of UIDs (each that of a cluster's namespace kube-system), separated by commas"
    )]
    ArchivesOf(String),
    #[error("parameter maxSizePerNamespace is {0:?}, not a number of bytes such as 100Gi")]
    MaxSize(String),
    #[error(
        "there is no encryption key: make the Secret torpor-repository-keys, or set parameter encryption: none"
    )]
    NoKeys,
    #[error("cannot read {}", path.display())]
    Credentials {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    #[error("{} holds no certificates: {why}", path.display())]
    Authorities { path: PathBuf, why: String },
    #[error(transparent)]
    Keys(#[from] KeysError),
    #[error(
        "{name:?} is not an option of the client of {scheme} (see the documentation of the crate object_store)"
    )]
    Option { name: String, scheme: &'static str },
    #[error("cannot make a client of {url}: {why}")]
    Client { url: String, why: String },
}

impl Settings {
    /// Reads the parameters of a SnapshotClass: `url`, `endpoint`, `region`, `allowHTTP`,
    /// `encryption`, `archivesOf` and `maxSizePerNamespace`. Others are ignored.
    pub fn parse(parameters: &BTreeMap<String, String>) -> Result<Self, InvalidSettings> {
        let text = parameters.get("url").ok_or(InvalidSettings::NoUrl)?;
        let bad = |why: String| InvalidSettings::Url {
            url: text.clone(),
            why,
        };
        let url = Url::parse(text).map_err(|e| bad(e.to_string()))?;
        ObjectStoreScheme::parse(&url).map_err(|e| bad(e.to_string()))?;
        if !url.username().is_empty() || url.password().is_some() {
            return Err(bad(
                "it holds credentials, which belong in the Secret".to_owned()
            ));
        }
        if url.query().is_some() || url.fragment().is_some() {
            return Err(bad("it has a query, which may hold credentials".to_owned()));
        }
        let allow_http = match parameters.get("allowHTTP").map(String::as_str) {
            None | Some("false") => false,
            Some("true") => true,
            Some(other) => return Err(InvalidSettings::AllowHttp(other.to_owned())),
        };
        let encrypted = match parameters.get("encryption").map(String::as_str) {
            None | Some("required") => true,
            Some("none") => false,
            Some(other) => return Err(InvalidSettings::Encryption(other.to_owned())),
        };
        let max_size = parameters.get("maxSizePerNamespace");
        let bad_size = |text: &String| InvalidSettings::MaxSize(text.clone());
        let max_size = max_size.map(|text| bytes(text).ok_or_else(|| bad_size(text)));
        let max_size = max_size.transpose()?;
        let archives_of = parameters.get("archivesOf").map(String::as_str);
        let archives_of = clusters(archives_of.unwrap_or_default())?;
        Ok(Self {
            url,
            archives_of,
            max_size,
            endpoint: parameters.get("endpoint").cloned(),
            region: parameters.get("region").cloned(),
            allow_http,
            encrypted,
        })
    }

    /// Reports whether archives of another cluster may be restored.
    pub fn reads_archives_of(&self, cluster: &str) -> bool {
        self.archives_of.iter().any(|known| known == cluster)
    }

    /// Makes a client; returns it and the prefix of all objects.
    pub(crate) fn client(
        &self,
        credentials: &Path,
    ) -> Result<(Arc<dyn ObjectStore>, ObjectPath), InvalidSettings> {
        let refused = |why: String| InvalidSettings::Client {
            url: self.url.to_string(),
            why,
        };
        let parsed = ObjectStoreScheme::parse(&self.url).map_err(|e| refused(e.to_string()))?;
        let (scheme, prefix) = parsed;
        let options = options(credentials)?;
        let client = trusted(credentials)?
            .with_timeout(REQUEST)
            .with_allow_http(self.allow_http);
        let retry = RetryConfig {
            retry_timeout: ATTEMPTS,
            max_retries: 4,
            ..RetryConfig::default()
        };
        let built: Result<Arc<dyn ObjectStore>, object_store::Error> = match scheme {
            ObjectStoreScheme::AmazonS3 => {
                let mut builder = AmazonS3Builder::new().with_url(self.url.as_str());
                for (key, value) in keyed::<AmazonS3ConfigKey>(options, "S3")? {
                    builder = builder.with_config(key, value);
                }
                if let Some(endpoint) = &self.endpoint {
                    builder = builder.with_endpoint(endpoint);
                }
                if let Some(region) = &self.region {
                    builder = builder.with_region(region);
                }
                let builder = builder.with_client_options(client).with_retry(retry);
                builder.build().map(|store| Arc::new(store) as _)
            }
            ObjectStoreScheme::GoogleCloudStorage => {
                let mut builder = GoogleCloudStorageBuilder::new().with_url(self.url.as_str());
                for (key, value) in keyed::<GoogleConfigKey>(options, "Google Cloud Storage")? {
                    builder = builder.with_config(key, value);
                }
                let builder = builder.with_client_options(client).with_retry(retry);
                builder.build().map(|store| Arc::new(store) as _)
            }
            ObjectStoreScheme::MicrosoftAzure => {
                let mut builder = MicrosoftAzureBuilder::new().with_url(self.url.as_str());
                for (key, value) in keyed::<AzureConfigKey>(options, "Azure")? {
                    builder = builder.with_config(key, value);
                }
                if let Some(endpoint) = &self.endpoint {
                    builder = builder.with_endpoint(endpoint.clone());
                }
                let builder = builder.with_client_options(client).with_retry(retry);
                builder.build().map(|store| Arc::new(store) as _)
            }
            ObjectStoreScheme::Local => Ok(Arc::new(LocalFileSystem::new().with_fsync(true)) as _),
            other => return Err(refused(format!("{other:?} is not supported"))),
        };
        Ok((built.map_err(|e| refused(e.to_string()))?, prefix))
    }
}

/// Parses a positive number of bytes with or without Ki, Mi, Gi or Ti.
fn bytes(text: &str) -> Option<u64> {
    let units = [("Ki", 10), ("Mi", 20), ("Gi", 30), ("Ti", 40)];
    let with_unit = units
        .iter()
        .find_map(|(unit, power)| Some((text.strip_suffix(unit)?, *power)));
    let (digits, power) = with_unit.unwrap_or((text, 0));
    let number: u64 = digits.parse().ok()?;
    number.checked_mul(1 << power).filter(|bytes| *bytes > 0)
}

fn clusters(text: &str) -> Result<Vec<String>, InvalidSettings> {
    let listed = text.split(',').map(str::trim);
    let listed: Vec<&str> = listed.filter(|one| !one.is_empty()).collect();
    match listed.iter().all(|one| is_part(one)) {
        true => Ok(listed.into_iter().map(str::to_owned).collect()),
        false => Err(InvalidSettings::ArchivesOf(text.to_owned())),
    }
}

/// Returns options of a client that trusts Mozilla's certificate authorities and those of the file
/// `ca.crt`.
fn trusted(credentials: &Path) -> Result<ClientOptions, InvalidSettings> {
    let path = credentials.join(AUTHORITIES);
    let mut client = ClientOptions::new().with_no_system_certificates(true);
    for root in webpki_root_certs::TLS_SERVER_ROOT_CERTS {
        // Certificates that are compiled in can be read.
        if let Ok(root) = Certificate::from_der(root) {
            client = client.with_root_certificate(root);
        }
    }
    let own = read(&path)?.unwrap_or_default();
    let own = Certificate::from_pem_bundle(own.as_bytes());
    let own = own.map_err(|e| InvalidSettings::Authorities {
        path,
        why: e.to_string(),
    })?;
    Ok(own
        .into_iter()
        .fold(client, ClientOptions::with_root_certificate))
}

/// Returns the options with their keys as a client has them.
fn keyed<K: FromStr>(
    options: Vec<(String, String)>,
    scheme: &'static str,
) -> Result<Vec<(K, String)>, InvalidSettings> {
    let keyed = options.into_iter().map(|(name, value)| match name.parse() {
        Ok(key) => Ok((key, value)),
        Err(_) => Err(InvalidSettings::Option { name, scheme }),
    });
    keyed.collect()
}

/// Returns name and content of each file of credentials. A missing directory has none: the client
/// then uses the identity of its Pod or node.
fn options(credentials: &Path) -> Result<Vec<(String, String)>, InvalidSettings> {
    let failed = |source| InvalidSettings::Credentials {
        path: credentials.to_owned(),
        source,
    };
    let listed = match std::fs::read_dir(credentials) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        listed => listed.map_err(failed)?,
    };
    let mut options = Vec::new();
    for entry in listed {
        let entry = entry.map_err(failed)?;
        let name = entry.file_name().to_string_lossy().into_owned();
        // A mounted Secret has directories and links whose names begin with a dot.
        if name.starts_with('.') || name == AUTHORITIES {
            continue;
        }
        if let Some(value) = read(&entry.path())? {
            options.push((name, value.trim_end().to_owned()));
        }
    }
    options.sort();
    Ok(options)
}

fn read(path: &Path) -> Result<Option<String>, InvalidSettings> {
    file::read(path, LARGEST).map_err(|source| InvalidSettings::Credentials {
        path: path.to_owned(),
        source,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(parameters: &[(&str, &str)]) -> Result<Settings, InvalidSettings> {
        let owned = parameters
            .iter()
            .map(|(k, v)| ((*k).to_owned(), (*v).to_owned()));
        Settings::parse(&owned.collect())
    }

    fn refusal(parameters: &[(&str, &str)]) -> String {
        parse(parameters).expect_err("refused").to_string()
    }

    #[test]
    fn wrong_parameters_are_named() {
        assert!(refusal(&[]).contains("url is missing"));
        assert!(refusal(&[("url", "bucket")]).contains("\"bucket\" is not a URL"));
        assert!(refusal(&[("url", "ftp://x/y")]).contains("ftp://x/y"));
        assert!(refusal(&[("url", "s3://key:secret@b/p")]).contains("belong in the Secret"));
        assert!(refusal(&[("url", "s3://b/p"), ("allowHTTP", "yes")]).contains("\"yes\""));
        assert!(refusal(&[("url", "s3://b/p"), ("encryption", "no")]).contains("\"no\""));
        assert!(refusal(&[("url", "az://b/p?sig=x")]).contains("a query"));
        assert!(refusal(&[("url", "s3://b/p"), ("archivesOf", "a,../b")]).contains("\"a,../b\""));
        for size in ["", "0", "x", "-1", "5G", "99999999999Ti"] {
            let refused = refusal(&[("url", "s3://b/p"), ("maxSizePerNamespace", size)]);
            assert!(refused.contains(&format!("{size:?}")), "{refused}");
        }
        let size = |text| parse(&[("url", "s3://b/p"), ("maxSizePerNamespace", text)]);
        assert_eq!(size("2Gi").expect("a size").max_size, Some(2 << 30));
        assert_eq!(size("7").expect("a size").max_size, Some(7));
        parse(&[("url", "s3://b/p"), ("keepLast", "3")]).expect("other parameters are ignored");
    }

    #[test]
    fn archives_of_other_clusters_are_read_only_where_the_class_names_them() {
        let reads = |list: &[(&str, &str)], cluster: &str| {
            let parameters: Vec<_> = [("url", "s3://b/p")].iter().chain(list).copied().collect();
            parse(&parameters)
                .expect("settings")
                .reads_archives_of(cluster)
        };
        assert!(!reads(&[], "a"));
        assert!(!reads(&[("archivesOf", "")], ""));
        assert!(reads(&[("archivesOf", "a, b")], "b"));
        assert!(!reads(&[("archivesOf", "a, b")], "c"));
    }

    #[test]
    fn clients_are_made_from_parameters_and_files() {
        let dir = tempfile::tempdir().expect("a directory");
        let credentials = dir.path();
        let put =
            |name: &str, text: &str| std::fs::write(credentials.join(name), text).expect("written");
        put("aws_access_key_id", "a\n");
        put("aws_secret_access_key", "s\n");
        std::fs::create_dir(credentials.join("..data")).expect("made");
        let s3 = parse(&[
            ("url", "s3://bucket/some/prefix"),
            ("endpoint", "http://127.0.0.1:1"),
            ("allowHTTP", "true"),
        ]);
        let s3 = s3.expect("settings");
        let (client, prefix) = s3.client(credentials).expect("a client");
        assert_eq!(prefix, ObjectPath::from("some/prefix"));
        assert!(client.to_string().contains("bucket"));
        put(AUTHORITIES, "-----BEGIN CERTIFICATE-----\nnonsense");
        let error = s3.client(credentials).expect_err("no certificate");
        assert!(error.to_string().contains("ca.crt"), "{error}");
        std::fs::remove_file(credentials.join(AUTHORITIES)).expect("removed");
        let google = parse(&[("url", "gs://bucket/p")]).expect("settings");
        let error = google
            .client(credentials)
            .expect_err("an option of another");
        assert!(
            error
                .to_string()
                .contains("\"aws_access_key_id\" is not an option"),
            "{error}"
        );
        let nowhere = credentials.join("nowhere");
        assert!(options(&nowhere).expect("no options").is_empty());
    }
}
