//! Client of the cluster that the kubeconfig and kubectl's flags name.

use std::future::Future;
use std::path::{Path, PathBuf};
use std::time::Duration;

use kube::api::{Api, DeleteParams, Preconditions};
use kube::config::{KubeConfigOptions, Kubeconfig, KubeconfigError};
use kube::core::NamespaceResourceScope;
use kube::{Client, Config, Resource, ResourceExt};
use serde::de::DeserializeOwned;

use crate::args::Connection;
use crate::error::Error;

/// Time limit of one call to the apiserver.
pub const CALL_LIMIT: Duration = Duration::from_secs(30);

/// Client of a cluster, and the default namespace.
#[derive(Clone)]
pub struct Cluster {
    pub client: Client,
    pub namespace: String,
}

impl Cluster {
    /// Returns the objects of a kind in the default namespace.
    pub(crate) fn api<K>(&self) -> Api<K>
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope>,
    {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    /// Deletes this object, and no other that got its name meanwhile.
    pub(crate) async fn delete<K>(&self, object: &K) -> Result<(), Error>
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope>
            + Clone
            + DeserializeOwned
            + std::fmt::Debug,
    {
        let parameters = DeleteParams {
            preconditions: Some(Preconditions {
                uid: object.uid(),
                ..Preconditions::default()
            }),
            ..DeleteParams::default()
        };
        let name = object.name_any();
        let doing = format!("delete {} {name}", K::kind(&()));
        let deleted = self.api::<K>();
        call(&doing, deleted.delete(&name, &parameters))
            .await
            .map(drop)
    }
}

impl std::fmt::Debug for Cluster {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Cluster")
            .field("namespace", &self.namespace)
            .finish_non_exhaustive()
    }
}

/// Reads the kubeconfig and creates the client, without a call.
///
/// In a Pod without a kubeconfig the Pod's service account is used, as by kubectl.
pub async fn connect(connection: &Connection) -> Result<Cluster, Error> {
    let of = match (&connection.kubeconfig, &connection.context) {
        (_, Some(context)) => format!(", context {context}"),
        (Some(file), None) => format!(" {}", file.display()),
        (None, None) => String::new(),
    };
    let failed = |source| Error::Kubeconfig {
        of: of.clone(),
        source: Box::new(source),
    };
    let options = KubeConfigOptions {
        context: connection.context.clone(),
        ..KubeConfigOptions::default()
    };
    let config = match &connection.kubeconfig {
        Some(file) => {
            let kubeconfig = Kubeconfig::read_from(file).map_err(failed)?;
            Config::from_custom_kubeconfig(kubeconfig, &options).await
        }
        None => by_default(&options).await,
    };
    let config = config.map_err(failed)?;
    let namespace = connection.namespace.clone();
    Ok(Cluster {
        namespace: namespace.unwrap_or_else(|| config.default_namespace.clone()),
        client: Client::try_from(config).map_err(|error| Error::Client(Box::new(error)))?,
    })
}

async fn by_default(options: &KubeConfigOptions) -> Result<Config, KubeconfigError> {
    let named = std::env::var_os("KUBECONFIG").unwrap_or_default();
    let files = std::env::split_paths(&named);
    if let Some(kubeconfig) = merged(files, |file| Kubeconfig::read_from(file))? {
        return Config::from_custom_kubeconfig(kubeconfig, options).await;
    }
    match Config::from_kubeconfig(options).await {
        Err(error) if options.context.is_none() && is_absent(&error) => {
            Config::incluster().map_err(|_| error)
        }
        read => read,
    }
}

/// Merges several kubeconfig files as kubectl does; `None` if no file exists.
///
/// Unlike in kube, missing files are skipped, and an empty current context counts as none.
fn merged(
    files: impl Iterator<Item = PathBuf>,
    read: impl Fn(&Path) -> Result<Kubeconfig, KubeconfigError>,
) -> Result<Option<Kubeconfig>, KubeconfigError> {
    let mut merged: Option<Kubeconfig> = None;
    for file in files {
        let mut next = match read(&file) {
            Err(error) if is_absent(&error) => continue,
            read => read?,
        };
        next.current_context = next.current_context.filter(|name| !name.is_empty());
        merged = Some(match merged {
            Some(first) => first.merge(next)?,
            None => next,
        });
    }
    Ok(merged)
}

/// Reports whether the kubeconfig does not exist, as opposed to an invalid one.
fn is_absent(error: &KubeconfigError) -> bool {
    match error {
        KubeconfigError::FindPath => true,
        KubeconfigError::ReadConfig(error, _) => error.kind() == std::io::ErrorKind::NotFound,
        _ => false,
    }
}

/// Awaits one call, at most for [`CALL_LIMIT`]. `doing` follows "cannot" in the error.
pub async fn call<T>(
    doing: &str,
    call: impl Future<Output = Result<T, kube::Error>>,
) -> Result<T, Error> {
    match tokio::time::timeout(CALL_LIMIT, call).await {
        Ok(Ok(answer)) => Ok(answer),
        Ok(Err(source)) => Err(Error::api(doing, source)),
        Err(_) => Err(Error::NoAnswer {
            doing: doing.to_owned(),
            limit: CALL_LIMIT,
        }),
    }
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;

    #[test]
    fn missing_kubeconfig_files_are_skipped() {
        let config = |context: &str| Kubeconfig {
            current_context: Some(context.to_owned()),
            ..Kubeconfig::default()
        };
        let read = |file: &Path| match file.to_str() {
            Some("none") => Ok(config("")),
            Some("a" | "b") => Ok(config(&file.display().to_string())),
            Some("secret") => {
                let denied = io::ErrorKind::PermissionDenied.into();
                Err(KubeconfigError::ReadConfig(denied, file.into()))
            }
            _ => {
                let missing = io::ErrorKind::NotFound.into();
                Err(KubeconfigError::ReadConfig(missing, file.into()))
            }
        };
        let all = |names: &[&str]| merged(names.iter().map(PathBuf::from), read);
        let current = |names: &[&str]| {
            all(names)
                .unwrap()
                .and_then(|config| config.current_context)
        };
        assert_eq!(current(&["gone", "none", "b", "a"]).as_deref(), Some("b"));
        assert_eq!(current(&["none"]), None);
        assert!(all(&["", "gone"]).unwrap().is_none());
        all(&["a", "secret"]).unwrap_err();
    }

    #[test]
    fn a_pod_uses_its_service_account_only_without_a_kubeconfig() {
        let unread = |kind: io::ErrorKind| KubeconfigError::ReadConfig(kind.into(), "/k".into());
        assert!(is_absent(&unread(io::ErrorKind::NotFound)));
        assert!(is_absent(&KubeconfigError::FindPath));
        assert!(!is_absent(&unread(io::ErrorKind::PermissionDenied)));
        assert!(!is_absent(&KubeconfigError::CurrentContextNotSet));
    }
}
