//! The client, by the kubeconfig and kubectl's flags.

use std::future::Future;
use std::time::Duration;

use kube::config::{KubeConfigOptions, Kubeconfig, KubeconfigError};
use kube::{Client, Config};

use crate::args::Connection;
use crate::error::Error;

/// How long one call may take. Nobody waits longer for a table.
pub const CALL_LIMIT: Duration = Duration::from_secs(30);

/// A cluster, and the namespace that is meant when none is named.
#[derive(Clone)]
pub struct Cluster {
    pub client: Client,
    pub namespace: String,
}

impl std::fmt::Debug for Cluster {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Cluster")
            .field("namespace", &self.namespace)
            .finish_non_exhaustive()
    }
}

/// Reads the kubeconfig; in a Pod without one, as kubectl does, what the Pod knows of its own cluster. Makes no call.
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
        None => match Config::from_kubeconfig(&options).await {
            Err(error) if options.context.is_none() && is_absent(&error) => {
                Config::incluster().map_err(|_| error)
            }
            read => read,
        },
    };
    let config = config.map_err(failed)?;
    let namespace = connection.namespace.clone();
    Ok(Cluster {
        namespace: namespace.unwrap_or_else(|| config.default_namespace.clone()),
        client: Client::try_from(config).map_err(|error| Error::Client(Box::new(error)))?,
    })
}

/// Whether there is no kubeconfig, as against one that is wrong.
fn is_absent(error: &KubeconfigError) -> bool {
    match error {
        KubeconfigError::FindPath => true,
        KubeconfigError::ReadConfig(error, _) => error.kind() == std::io::ErrorKind::NotFound,
        _ => false,
    }
}

/// One call, within [`CALL_LIMIT`]. `doing` goes behind "cannot".
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
    fn only_where_there_is_no_kubeconfig_a_pod_asks_its_own_cluster() {
        let unread = |kind: io::ErrorKind| KubeconfigError::ReadConfig(kind.into(), "/k".into());
        assert!(is_absent(&unread(io::ErrorKind::NotFound)));
        assert!(is_absent(&KubeconfigError::FindPath));
        assert!(!is_absent(&unread(io::ErrorKind::PermissionDenied)));
        assert!(!is_absent(&KubeconfigError::CurrentContextNotSet));
    }
}
