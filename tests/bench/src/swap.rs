//! Swap of a benchmark's own, which is used before the node's.

use std::{
    fs,
    io::Write as _,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, ensure};
use clap::ValueEnum;
use nix::fcntl::{FallocateFlags, fallocate};
use tempfile::NamedTempFile;

const ZRAM_CONTROL: &str = "/sys/class/zram-control";
/// Highest priority of swap: it is used first.
const PRIORITY: &str = "32767";

/// Kind of the swap.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Kind {
    /// zram, as torpor-agent makes it with --doze-swap=zram; a file where the kernel has no zram
    Zram,
    /// A file in /var/tmp
    File,
    /// The node's swap as it is
    Node,
}

/// Swap that is removed at the end.
#[derive(Debug)]
pub(crate) enum Swap {
    Zram(u32),
    File(NamedTempFile),
    Node,
}

impl Swap {
    /// Makes swap of that kind and size, and switches it on.
    pub(crate) fn on(kind: Kind, mebibytes: u64) -> anyhow::Result<Self> {
        let swap = match kind {
            Kind::Node => return Ok(Self::Node),
            Kind::Zram if Path::new(ZRAM_CONTROL).exists() => Self::zram(mebibytes)?,
            Kind::Zram | Kind::File => Self::file(mebibytes)?,
        };
        let path = swap.path();
        run(Command::new("mkswap").arg("-q").arg(&path))?;
        run(Command::new("swapon")
            .args(["--priority", PRIORITY])
            .arg(&path))?;
        Ok(swap)
    }

    fn zram(mebibytes: u64) -> anyhow::Result<Self> {
        let number = read(&Path::new(ZRAM_CONTROL).join("hot_add"))?.parse()?;
        // From here on the device is removed when this is dropped.
        let swap = Self::Zram(number);
        let sys = PathBuf::from(format!("/sys/block/zram{number}"));
        write(&sys.join("disksize"), &format!("{mebibytes}M"))?;
        let device = swap.path();
        if !device.exists() {
            let numbers = read(&sys.join("dev"))?;
            let (major, minor) = numbers.split_once(':').context("no device numbers")?;
            run(Command::new("mknod").arg(device).args(["b", major, minor]))?;
        }
        Ok(swap)
    }

    fn file(mebibytes: u64) -> anyhow::Result<Self> {
        // The file has mode 0600.
        let file = tempfile::Builder::new()
            .prefix("torpor-bench-swap-")
            .tempfile_in("/var/tmp")?;
        let size = i64::try_from(mebibytes << 20)?;
        // A file with holes is refused.
        fallocate(file.as_file(), FallocateFlags::empty(), 0, size).context("no room for swap")?;
        Ok(Self::File(file))
    }

    fn path(&self) -> PathBuf {
        match self {
            Self::Zram(number) => format!("/dev/zram{number}").into(),
            Self::File(file) => file.path().to_owned(),
            Self::Node => PathBuf::new(),
        }
    }

    /// Describes the swap that is used first.
    pub(crate) fn describe(&self) -> anyhow::Result<String> {
        if !matches!(self, Self::Node) {
            return Ok(self.path().display().to_string());
        }
        let swaps = read(Path::new("/proc/swaps"))?;
        let first = swaps
            .lines()
            .nth(1)
            .and_then(|line| line.split_whitespace().next());
        Ok(first.unwrap_or("none").to_owned())
    }
}

impl Drop for Swap {
    fn drop(&mut self) {
        if matches!(self, Self::Node) {
            return;
        }
        let path = self.path();
        // The swap's content goes back to memory. If that fails, the swap stays on.
        let is_on = || {
            let swaps = fs::read_to_string("/proc/swaps").unwrap_or_default();
            swaps
                .lines()
                .any(|line| line.starts_with(&format!("{} ", path.display())))
        };
        if is_on()
            && let Err(error) = run(Command::new("swapoff").arg(&path))
        {
            eprintln!("swap stays: {error:#}");
        }
        if let Self::Zram(number) = self {
            let removed = write(
                &Path::new(ZRAM_CONTROL).join("hot_remove"),
                &number.to_string(),
            );
            if let Err(error) = removed {
                eprintln!("zram stays: {error:#}");
            }
        }
    }
}

/// Returns the free swap of the machine in MiB.
pub(crate) fn free_mebibytes() -> anyhow::Result<u64> {
    let text = read(Path::new("/proc/meminfo"))?;
    let line = text.lines().find_map(|line| line.strip_prefix("SwapFree:"));
    let kib = line.and_then(|line| line.split_whitespace().next());
    Ok(kib
        .context("no SwapFree in /proc/meminfo")?
        .parse::<u64>()?
        >> 10)
}

fn read(path: &Path) -> anyhow::Result<String> {
    let text = fs::read_to_string(path).with_context(|| path.display().to_string())?;
    Ok(text.trim().to_owned())
}

fn write(path: &Path, text: &str) -> anyhow::Result<()> {
    let file = fs::OpenOptions::new().write(true).open(path);
    file.and_then(|mut file| file.write_all(text.as_bytes()))
        .with_context(|| path.display().to_string())
}

fn run(command: &mut Command) -> anyhow::Result<()> {
    let done = command.output().with_context(|| format!("{command:?}"))?;
    let errors = String::from_utf8_lossy(&done.stderr);
    ensure!(done.status.success(), "{command:?}: {errors}");
    Ok(())
}
