//! What the installer has put on this node, as the agent sees it. The installer is another Pod: it
//! may come later than the agent, and it may replace what it has installed while the agent runs.
//!
//! The agent reads the installation once, when it starts. It waits for one that is not there yet,
//! and ends when another one has taken its place: the kubelet starts it again at once, and it reads
//! the new one. So whichever of the two DaemonSets an upgrade rolls out first, the agent goes by
//! what is installed: builds of runsc and keepers of the versions before are left to their Pods by
//! each installer, and an agent of any version serves them.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use torpor_records::config::{self, Config, FILE_NAME};

use crate::args::NodePaths;
use crate::report::server::Readiness;

/// How often the agent looks for an installation that is not there yet.
const LOOK: Duration = Duration::from_secs(1);

/// The installation that the agent goes by.
#[derive(Debug)]
pub(crate) struct Installed {
    path: PathBuf,
    config: Config,
}

/// What became of the installation since it was read.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum News {
    None,
    /// It cannot be read at the moment, and may be the same.
    Unread(String),
    /// The agent has to start again to go by what is there now.
    Other(&'static str),
}

impl Installed {
    /// Waits until the installer has written down where its files are. Until then the agent is not
    /// ready, and says why.
    pub(crate) async fn found(paths: &NodePaths, ready: &Readiness) -> Self {
        let path = paths.bin_dir().join(FILE_NAME);
        let mut told = String::new();
        loop {
            match Config::read(&path) {
                Ok(config) => return Self { path, config },
                Err(error) => {
                    let why = waits_for(&path, &error);
                    if why != told {
                        tracing::warn!(why, "waiting for the installer");
                        ready.not_yet(why.clone());
                        told = why;
                    }
                }
            }
            tokio::time::sleep(LOOK).await;
        }
    }

    pub(crate) fn config(&self) -> &Config {
        &self.config
    }

    /// Looks again.
    pub(crate) fn news(&self) -> News {
        news(&self.config, Config::read(&self.path))
    }
}

/// Keeps others out of a directory that the kubelet may have made: after a reboot the agent may be
/// there before the installer.
pub(crate) fn close(dir: &Path) {
    let closed = std::fs::set_permissions(dir, Permissions::from_mode(0o700));
    if let Err(error) = closed {
        tracing::warn!(dir = %dir.display(), %error, "cannot make the directory private");
    }
}

fn waits_for(path: &Path, error: &config::Error) -> String {
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

fn news(own: &Config, now: Result<Config, config::Error>) -> News {
    // Revoked builds are read anew by each report, and by torpor-oci.
    let is_same = |now: &Config| {
        let revoked_runsc = own.revoked_runsc.clone();
        *own == Config {
            revoked_runsc,
            ..now.clone()
        }
    };
    match now {
        Ok(now) if is_same(&now) => News::None,
        Ok(_) => {
            News::Other("the installer has installed another version or other settings on the node")
        }
        Err(config::Error::Read { source, .. })
            if source.kind() == std::io::ErrorKind::NotFound =>
        {
            News::Other("the runtime was uninstalled from the node")
        }
        Err(error) => News::Unread(crate::reconcile::observe::words(&error)),
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
        assert_eq!(news(&config(), Ok(config())), News::None);
        assert!(matches!(news(&config(), Ok(other)), News::Other(_)));
        let gone = unread(ErrorKind::NotFound);
        assert!(matches!(news(&config(), gone), News::Other(_)));
        for kind in [ErrorKind::PermissionDenied, ErrorKind::Interrupted] {
            let seen = news(&config(), unread(kind));
            assert!(matches!(seen, News::Unread(_)), "{kind}: {seen:?}");
        }
    }

    #[tokio::test]
    async fn an_agent_that_is_there_first_waits_says_for_whom_and_goes_on_when_it_is_installed() {
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
        assert_eq!(found.news(), News::None);
        fs::remove_file(bin.join(FILE_NAME)).expect("removed");
        assert!(matches!(found.news(), News::Other(_)));
    }
}
