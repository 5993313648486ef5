//! gVisor alone: runsc's own commands with Torpor's flags, without Kubernetes, containerd and
//! Torpor.

use std::{
    fs::{self, File},
    path::{Path, PathBuf},
    process::{Command as SyncCommand, Stdio},
    time::Duration,
};

use anyhow::{Context as _, ensure};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::process::Command;
use torpor_tests::machine;

/// Flags that shape Torpor's sandboxes (`SANDBOX_FLAGS` in node-agent/runsc/src/command.rs).
const FLAGS: [&str; 3] = [
    "--ignore-cgroups",
    "--network=sandbox",
    "--allow-connected-on-save",
];
/// Flags of a checkpoint as Torpor makes it.
const CHECKPOINT: [&str; 3] = [
    "--leave-running",
    "--compression=none",
    "--exclude-committed-zero-pages",
];
/// Time for a command of runsc.
const LIMIT: Duration = Duration::from_secs(120);

/// A runsc with a directory of its own, whose sandboxes are killed at the end.
#[derive(Debug)]
pub(crate) struct Runsc {
    program: PathBuf,
    platform: String,
    dir: TempDir,
    networks: Vec<Network>,
}

impl Runsc {
    pub(crate) fn new(program: &Path, platform: &str) -> anyhow::Result<Self> {
        Ok(Self {
            program: program.to_owned(),
            platform: format!("--platform={platform}"),
            dir: tempfile::Builder::new().prefix("torpor-bench-").tempdir()?,
            networks: Vec::new(),
        })
    }

    pub(crate) fn image(&self) -> PathBuf {
        self.dir.path().join("image")
    }

    /// Returns the directory of a container's bundle.
    pub(crate) fn bundle(&self, container: &str) -> PathBuf {
        self.dir.path().join(container)
    }

    fn root(&self) -> PathBuf {
        self.dir.path().join("root")
    }

    /// Creates a network namespace, which is removed at the end.
    pub(crate) fn network(&mut self, name: &str) -> anyhow::Result<PathBuf> {
        let network = Network::create(name)?;
        let path = network.path();
        self.networks.push(network);
        Ok(path)
    }

    /// Writes the bundle of a container.
    pub(crate) fn write_bundle(&self, container: &str, spec: &Spec<'_>) -> anyhow::Result<()> {
        let dir = self.bundle(container);
        fs::create_dir_all(&dir)?;
        let spec = serde_json::to_vec(&spec.oci())?;
        Ok(fs::write(dir.join("config.json"), spec)?)
    }

    fn command(&self, args: &[&str]) -> anyhow::Result<Command> {
        let log = self.dir.path().join("runsc.log");
        let log = File::options().create(true).append(true).open(log)?;
        let mut command = Command::new(&self.program);
        command
            .arg("--root")
            .arg(self.root())
            .args(FLAGS)
            .arg(&self.platform)
            .args(args)
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .kill_on_drop(true);
        Ok(command)
    }

    async fn run(&self, args: &[&str]) -> anyhow::Result<()> {
        self.finish(self.command(args)?, args).await
    }

    async fn finish(&self, mut command: Command, args: &[&str]) -> anyhow::Result<()> {
        let words = || format!("runsc {}", args.join(" "));
        let status = tokio::time::timeout(LIMIT, command.status()).await;
        let status = status.with_context(words)?.with_context(words)?;
        let log = || fs::read_to_string(self.dir.path().join("runsc.log")).unwrap_or_default();
        ensure!(status.success(), "{}: {status}: {}", words(), log());
        Ok(())
    }

    pub(crate) async fn create(&self, container: &str) -> anyhow::Result<()> {
        let bundle = text(&self.bundle(container))?;
        self.run(&["create", "--bundle", &bundle, container]).await
    }

    /// Starts a container; the container has the streams of this command.
    ///
    /// `output` gets what the container writes, instead of the log.
    pub(crate) async fn start(&self, container: &str, output: Option<File>) -> anyhow::Result<()> {
        let args = ["start", container];
        let mut command = self.command(&args)?;
        if let Some(output) = output {
            command.stdout(output);
        }
        self.finish(command, &args).await
    }

    /// Saves the sandbox of a container into [`Self::image`].
    pub(crate) async fn checkpoint(&self, container: &str) -> anyhow::Result<()> {
        let image = format!("--image-path={}", self.image().display());
        let args = [&["checkpoint"], &CHECKPOINT[..], &[&image, container]].concat();
        self.run(&args).await
    }

    pub(crate) async fn restore(&self, container: &str) -> anyhow::Result<()> {
        let (bundle, image) = (text(&self.bundle(container))?, text(&self.image())?);
        let args = [
            "restore",
            "--detach",
            "--bundle",
            &bundle,
            "--image-path",
            &image,
            container,
        ];
        self.run(&args).await
    }

    pub(crate) async fn delete(&self, container: &str) -> anyhow::Result<()> {
        self.run(&["delete", "--force", container]).await
    }

    /// Returns the memory of a container's sandbox in bytes.
    pub(crate) async fn usage(&self, container: &str) -> anyhow::Result<u64> {
        let ran = self
            .command(&["usage", container])?
            .stdout(Stdio::piped())
            .output();
        let ran = tokio::time::timeout(LIMIT, ran).await??;
        let usage: Value = serde_json::from_slice(&ran.stdout).unwrap_or_default();
        Ok(usage["Total"].as_u64().unwrap_or_default())
    }

    /// Kills every process of this runsc, whose command lines name its directory, and removes
    /// runsc's records: its own removal takes a second or two for each sandbox.
    pub(crate) async fn kill_all(&self) -> anyhow::Result<()> {
        let root = [text(&self.root())?];
        torpor_tests::wait::until("runsc's processes end", LIMIT, async || {
            let left = machine::processes_naming(&root);
            for process in &left {
                // It may have ended meanwhile.
                let _ = process.kill();
            }
            torpor_tests::wait::holds(left.is_empty(), || format!("{left:?}"))
        })
        .await?;
        for entry in fs::read_dir(self.root())? {
            let path = entry?.path();
            let is_record = |kind| ["state", "lock", "sock"].iter().any(|known| kind == *known);
            if path.extension().is_some_and(is_record) {
                fs::remove_file(path)?;
            }
        }
        Ok(())
    }
}

impl Drop for Runsc {
    fn drop(&mut self) {
        for process in machine::processes_naming(&[self.root().display().to_string()]) {
            let _ = process.kill();
        }
        // gVisor's empty network namespace, which exists after some commands.
        let _ = nix::mount::umount(&self.root().join("null-netns"));
    }
}

fn text(path: &Path) -> anyhow::Result<String> {
    let text = path.to_str();
    Ok(text.context("a path that is not UTF-8")?.to_owned())
}

/// The part of an OCI spec in which containers differ here.
#[derive(Debug)]
pub(crate) struct Spec<'a> {
    pub root: &'a Path,
    pub args: &'a [&'a str],
    pub annotations: Value,
    pub network: &'a Path,
}

impl Spec<'_> {
    fn oci(&self) -> Value {
        json!({
            "ociVersion": "1.2.0",
            "root": {"path": self.root, "readonly": true},
            "annotations": self.annotations,
            "process": {
                "user": {"uid": 0, "gid": 0},
                "args": self.args,
                "cwd": "/",
                "env": ["PATH=/usr/bin:/bin:/usr/local/bin"],
            },
            "mounts": [
                {"destination": "/proc", "type": "proc", "source": "proc"},
                {"destination": "/tmp", "type": "tmpfs", "source": "tmpfs"},
            ],
            "linux": {"namespaces": [
                {"type": "pid"}, {"type": "mount"}, {"type": "network", "path": self.network},
            ]},
        })
    }
}

/// A network namespace with a name, which is removed at the end.
#[derive(Debug)]
struct Network(String);

impl Network {
    fn create(name: &str) -> anyhow::Result<Self> {
        let network = Self(name.to_owned());
        // One of a run that was killed may be left.
        if network.path().exists() {
            network.remove()?;
        }
        let done = SyncCommand::new("ip")
            .args(["netns", "add", name])
            .status()?;
        ensure!(done.success(), "ip netns add {name}: {done}");
        Ok(network)
    }

    fn path(&self) -> PathBuf {
        Path::new("/run/netns").join(&self.0)
    }

    fn remove(&self) -> anyhow::Result<()> {
        let done = SyncCommand::new("ip")
            .args(["netns", "del", &self.0])
            .status()?;
        ensure!(done.success(), "ip netns del {}: {done}", self.0);
        Ok(())
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        if let Err(error) = self.remove() {
            eprintln!("{error:#}");
        }
    }
}
