//! The installation on this node, as the agent reads it. The installer is another Pod. The
//! installer may start later than the agent, and it may replace the installation while the agent
//! runs.
//!
//! The agent reads the installation once, when the agent starts. If there is no installation yet,
//! the agent waits for it. If the installation changes later, the agent exits; the kubelet starts
//! the agent again at once, and the agent reads the new installation.
//!
//! An upgrade may therefore roll out either of the two DaemonSets first: the agent always follows
//! the installation on its node. An installer leaves runsc builds and shims of earlier versions to
//! their Pods.

use std::path::{Path, PathBuf};
use std::time::Duration;

use torpor_records::config::{self, Config, FILE_NAME};

use crate::args::NodePaths;
use crate::report::server::Readiness;

/// Interval at which the agent looks for an installation that does not exist yet.
const SEARCH_INTERVAL: Duration = Duration::from_secs(1);

/// The installation that the agent has read.
#[derive(Debug)]
pub(crate) struct Installed {
    path: PathBuf,
    config: Config,
}

/// A change of the installation since the agent read it.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Change {
    None,
    /// The installation cannot be read at the moment and may be unchanged. Holds the error.
    Unreadable(String),
    /// The installation was replaced or removed: the agent must start again. Holds the reason.
    Restart(&'static str),
}

impl Installed {
    /// Waits until the installer has written its configuration file, and reads that file. Until
    /// then `ready` holds the reason for which the agent is not ready.
    pub(crate) async fn found(paths: &NodePaths, ready: &Readiness) -> Self {
        let path = paths.bin_dir().join(FILE_NAME);
        let mut logged = String::new();
        loop {
            match Config::read(&path) {
                Ok(config) => return Self { path, config },
                Err(error) => {
                    let why = reason_to_wait(&path, &error);
                    if why != logged {
                        tracing::warn!(why, "waiting for the installer");
                        ready.not_yet(why.clone());
                        logged = why;
                    }
                }
            }
            tokio::time::sleep(SEARCH_INTERVAL).await;
        }
    }

    pub(crate) fn config(&self) -> &Config {
        &self.config
    }

    /// Reads the installation again and returns its change.
    pub(crate) fn change(&self) -> Change {
        change(&self.config, Config::read(&self.path))
    }
}

fn reason_to_wait(path: &Path, error: &config::Error) -> String {
    match error {
        config::Error::Read { source, .. } if source.kind() == std::io::ErrorKind::NotFound => {
            format!(
                "{} does not exist: DaemonSet torpor-installer has not installed the runtime on this node yet",
                path.display()
            )
        }
        error => crate::reconcile::observe::words(error),
    }
}

fn change(own: &Config, now: Result<Config, config::Error>) -> Change {
    // A change of the revoked builds needs no restart: each report and each command of a shim reads
    // them anew.
    let is_same = |now: &Config| {
        let revoked_runsc = own.revoked_runsc.clone();
        *own == Config {
            revoked_runsc,
            ..now.clone()
        }
    };
    match now {
        Ok(now) if is_same(&now) => Change::None,
        Ok(_) => Change::Restart(
            "the installer has installed another version or other settings on the node",
        ),
        Err(config::Error::Read { source, .. })
            if source.kind() == std::io::ErrorKind::NotFound =>
        {
            Change::Restart("the runtime was uninstalled from the node")
        }
        Err(error) => Change::Unreadable(crate::reconcile::observe::words(&error)),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io::ErrorKind;

    use super::*;

    const CONFIG: &str = r#"{"runsc":"/r","runsc_digest":"blake3:00","state_dir":"/s","store_dir":"/i","kubelet_root":"/k"}"#;

    fn config() -> Config {
        serde_json::from_str(CONFIG).expect("understood")
    }

    fn unread(kind: ErrorKind) -> Result<Config, config::Error> {
        Err(config::Error::Read {
            path: "/x".into(),
            source: kind.into(),
        })
    }

    #[test]
    fn another_installation_ends_the_agent_and_one_that_cannot_be_read_does_not() {
        let other = Config {
            runsc_digest: "blake3:01".to_owned(),
            ..config()
        };
        assert_eq!(change(&config(), Ok(config())), Change::None);
        assert!(matches!(change(&config(), Ok(other)), Change::Restart(_)));
        let gone = unread(ErrorKind::NotFound);
        assert!(matches!(change(&config(), gone), Change::Restart(_)));
        for kind in [ErrorKind::PermissionDenied, ErrorKind::Interrupted] {
            let change = change(&config(), unread(kind));
            assert!(
                matches!(change, Change::Unreadable(_)),
                "{kind}: {change:?}"
            );
        }
    }

    #[tokio::test]
    async fn an_agent_before_its_installation_waits_reports_this_and_goes_on_afterwards() {
        let dir = tempfile::tempdir().expect("a directory");
        let paths = NodePaths {
            install_dir: dir.path().to_owned(),
            state_dir: "/s".into(),
            store_dir: "/i".into(),
            kubelet_root: "/k".into(),
        };
        let ready = Readiness::default();
        let found = {
            let ready = ready.clone();
            tokio::spawn(async move { Installed::found(&paths, &ready).await })
        };
        while !ready.words().contains("torpor-installer") {
            tokio::task::yield_now().await;
        }
        let bin = dir.path().join("bin");
        fs::create_dir(&bin).expect("made");
        fs::write(bin.join("half"), "{").expect("written");
        fs::rename(bin.join("half"), bin.join(FILE_NAME)).expect("moved");
        while !ready.words().contains("not a valid") {
            tokio::task::yield_now().await;
        }
        assert!(!found.is_finished());
        fs::write(bin.join("whole"), CONFIG).expect("written");
        fs::rename(bin.join("whole"), bin.join(FILE_NAME)).expect("moved");
        let found = found.await.expect("found");
        assert_eq!(*found.config(), config());
        assert_eq!(found.change(), Change::None);
        fs::remove_file(bin.join(FILE_NAME)).expect("removed");
        assert!(matches!(found.change(), Change::Restart(_)));
    }
}
