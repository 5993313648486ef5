//! Time that gVisor alone needs to restore many Pods, each of a pause container and a program of
//! 30 MB. The time of `many` for hibernated sandboxes contains as much.

use std::{
    fs,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use anyhow::Context as _;
use clap::Args;
use futures::{StreamExt, TryStreamExt, stream};
use serde_json::{Value, json};
use torpor_tests::{node::Node, wait};

use crate::{
    node,
    runsc::{Runsc, Spec},
    stop::Stop,
};

const EXPEDITED: &str = "/sys/kernel/rcu_expedited";
const FOLIOS: &str = "/sys/kernel/mm/transparent_hugepage/hugepages-64kB/shmem_enabled";
/// Platform of gVisor that Torpor has here.
const PLATFORM: &str = "systrap";
/// Time for a program to have its memory.
const FULL: Duration = Duration::from_secs(60);
const PROGRAM: &str = "import os,time; held = bytearray(os.urandom(26 << 20)); \
                       print(len(held), flush=True); time.sleep(1e6)";

#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Pods that are restored
    #[arg(default_value_t = 50)]
    pods: usize,
    /// Pods that are restored at a time, once for each number
    #[arg(default_values_t = [2, 4])]
    at_once: Vec<usize>,
    /// The runsc to measure; by default that of the Torpor that is installed here
    #[arg(long)]
    runsc: Option<PathBuf>,
}

pub(crate) async fn run(options: &Options, stop: &mut Stop) -> anyhow::Result<()> {
    let program = match &options.runsc {
        Some(program) => program.clone(),
        None => Node::here()?.config.runsc,
    };
    let pause = pause_beside(&program)?;
    println!("{}", node::describe()?);
    stop.unless(measure(options, &program, pause.as_deref()))
        .await
}

/// Returns the pause containers' root file system, which Torpor places beside runsc. Without it a
/// gofer serves them.
fn pause_beside(runsc: &Path) -> anyhow::Result<Option<PathBuf>> {
    let dir = fs::read_dir(runsc.parent().context("runsc is in no directory")?)?;
    let mut paths = dir.filter_map(|entry| Some(entry.ok()?.path()));
    Ok(paths.find(|path| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        name.starts_with("pause-") && name.ends_with(".erofs")
    }))
}

async fn measure(options: &Options, program: &Path, pause: Option<&Path>) -> anyhow::Result<()> {
    let mut runsc = Runsc::new(program, PLATFORM)?;
    save(&mut runsc, pause).await?;
    for number in 1..=options.pods {
        prepare(&mut runsc, number, pause)?;
    }
    for &at_once in &options.at_once {
        // Torpor changes these settings for the time of a wake.
        let settings = [Setting::set(EXPEDITED, "1")?, Setting::folios()?];
        let (begin, before) = (Instant::now(), node::busy()?);
        stream::iter(1..=options.pods)
            .map(|number| restore(&runsc, number))
            .buffer_unordered(at_once)
            .try_collect::<()>()
            .await?;
        let (took, used) = (begin.elapsed(), node::busy()? - before);
        drop(settings);
        println!(
            "{} pods restored by bare runsc, {at_once} at a time: {:6} ms; {} ms of processor time each",
            options.pods,
            took.as_millis(),
            used.as_millis() / options.pods.max(1) as u128,
        );
        runsc.kill_all().await?;
    }
    Ok(())
}

/// Makes one image for all: a Pod's spec differs from another's in its network namespace only,
/// which runsc does not compare.
async fn save(runsc: &mut Runsc, pause: Option<&Path>) -> anyhow::Result<()> {
    prepare(runsc, 0, pause)?;
    runsc.create("pause-0").await?;
    runsc.start("pause-0", None).await?;
    runsc.create("main-0").await?;
    let printed = tempfile::NamedTempFile::new()?;
    runsc.start("main-0", Some(printed.reopen()?)).await?;
    // The program prints once it has its memory.
    wait::until("the program has its memory", FULL, async || {
        let length = printed.as_file().metadata()?.len();
        wait::holds(length > 0, || "it has printed nothing".to_owned())
    })
    .await?;
    runsc.checkpoint("pause-0").await?;
    runsc.kill_all().await
}

/// Writes the bundles of a Pod and creates its network namespace.
fn prepare(runsc: &mut Runsc, number: usize, pause: Option<&Path>) -> anyhow::Result<()> {
    let network = runsc.network(&format!("torpor-bare-{number}"))?;
    let (sandbox, main) = (format!("pause-{number}"), format!("main-{number}"));
    let mut annotations = json!({"io.kubernetes.cri.container-type": "sandbox"});
    let args: &[&str] = if let Some(pause) = pause {
        annotations["dev.gvisor.spec.rootfs.source"] = json!(pause);
        annotations["dev.gvisor.spec.rootfs.type"] = json!("erofs");
        &["/pause"]
    } else {
        &["/bin/sleep", "infinity"]
    };
    let bundle = |args, annotations: Value| Spec {
        root: Path::new("/"),
        args,
        annotations,
        network: &network,
    };
    runsc.write_bundle(&sandbox, &bundle(args, annotations))?;
    let annotations = json!({
        "io.kubernetes.cri.container-type": "container",
        "io.kubernetes.cri.container-name": "main",
        "io.kubernetes.cri.sandbox-id": sandbox,
    });
    let python = python()?;
    let args = [python.as_str(), "-c", PROGRAM];
    runsc.write_bundle(&main, &bundle(&args, annotations))
}

/// Returns the path of this machine's Python, whose root file system the sandboxes share.
fn python() -> anyhow::Result<String> {
    let ran = std::process::Command::new("python3")
        .args([
            "-c",
            "import os, sys; print(os.path.realpath(sys.executable))",
        ])
        .output()
        .context("python3")?;
    Ok(String::from_utf8(ran.stdout)?.trim().to_owned())
}

async fn restore(runsc: &Runsc, number: usize) -> anyhow::Result<()> {
    runsc.restore(&format!("pause-{number}")).await?;
    runsc.restore(&format!("main-{number}")).await
}

/// A setting of the kernel, which is set back when this is dropped.
#[derive(Debug)]
struct Setting {
    path: &'static str,
    before: Option<String>,
}

impl Setting {
    fn set(path: &'static str, value: &str) -> anyhow::Result<Self> {
        let before = fs::read_to_string(path).context(path)?;
        fs::write(path, value).context(path)?;
        Ok(Self {
            path,
            before: Some(before.trim().to_owned()),
        })
    }

    /// Lets shared memory have large folios, unless the setting is another than `never`.
    fn folios() -> anyhow::Result<Self> {
        let text = fs::read_to_string(FOLIOS).unwrap_or_default();
        let never = chosen(&text).filter(|word| *word == "never");
        if never.is_some() {
            fs::write(FOLIOS, "always").context(FOLIOS)?;
        }
        Ok(Self {
            path: FOLIOS,
            before: never.map(str::to_owned),
        })
    }
}

impl Drop for Setting {
    fn drop(&mut self) {
        if let Some(before) = &self.before
            && let Err(error) = fs::write(self.path, before)
        {
            eprintln!("{} is not as before: {error}", self.path);
        }
    }
}

/// Returns the word in brackets of a setting with several words.
fn chosen(text: &str) -> Option<&str> {
    text.split_once('[')?.1.split(']').next()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_chosen_word_of_a_setting_is_in_brackets() {
        assert_eq!(chosen("always inherit [never]\n"), Some("never"));
        assert_eq!(chosen(""), None);
    }
}
