//! Time from the pause of a sandbox to its committed image, by the agent's log.

use std::{
    fs::{self, File},
    io::Write as _,
    path::Path,
    time::{Duration, Instant},
};

use torpor_tests::{agent, case::Case, kubectl::Kubectl};

use crate::{sleeper::Sleeper, stats::Times, table};

/// Steps of a save in the agent's log, the last ends it.
const STEPS: [&str; 3] = ["Pause", "Checkpoint", "Commit"];
/// Number of files that are written for comparison, and their size in MiB.
const FILES: usize = 5;
const MEBIBYTES: usize = 105;

/// Prints the time of the Pod's saves so far, beside that of a file of the same size on the same
/// disk.
pub(super) async fn measure(case: &Case, pod: &str) -> anyhow::Result<()> {
    let pod = Sleeper::of(case, pod).await?;
    let kubectl = Kubectl {
        program: case.cluster.kubectl.clone(),
        namespace: agent::NAMESPACE.to_owned(),
    };
    let log = ["logs", "daemonset/torpor-agent", "-c", "agent", "--tail=-1"];
    let saves = saves(&kubectl.ok(&log).await?, &pod.uid);
    let mut writes = Vec::new();
    for _ in 0..FILES {
        writes.push(write(&case.node.config.store_dir.join(".bench"))?);
    }
    let (saves, writes) = (Times::of(&saves), Times::of(&writes));
    let words = format!("a file of {MEBIBYTES} MiB, fsynced, on the same disk");
    println!("{}", table::row(&words, &writes, &writes));
    println!(
        "{}",
        table::row("100 MB: pause to committed, fsynced image", &saves, &writes)
    );
    Ok(())
}

/// Returns the time of each save of a Pod in the agent's log: of its pause, checkpoint and commit.
fn saves(log: &str, uid: &str) -> Vec<Duration> {
    let of_pod = format!("pod={uid}");
    let (mut saves, mut sum) = (Vec::new(), Duration::ZERO);
    for line in log.lines().filter(|line| line.contains(&of_pod)) {
        let field = |name: &str| {
            let mut words = line.split_whitespace();
            words.find_map(|word| word.strip_prefix(name))
        };
        let took = field("took_ms=").and_then(|word| word.parse().ok());
        let step = field("kind=").filter(|step| STEPS.contains(step));
        let (Some(step), Some(took)) = (step, took) else {
            continue;
        };
        if step == STEPS[0] {
            sum = Duration::ZERO;
        }
        sum += Duration::from_millis(took);
        if step == STEPS[2] {
            saves.push(sum);
        }
    }
    saves
}

/// Writes a file through to the disk, and removes it.
fn write(path: &Path) -> anyhow::Result<Duration> {
    let begin = Instant::now();
    let written = File::create(path).and_then(|mut file| {
        let block = vec![0; 1 << 20];
        for _ in 0..MEBIBYTES {
            file.write_all(&block)?;
        }
        file.sync_all()
    });
    let took = begin.elapsed();
    fs::remove_file(path)?;
    written?;
    Ok(took)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_save_is_the_sum_of_its_steps() {
        let log = "INFO driver: step done pod=a kind=Pause took_ms=2 seq=1
INFO driver: step done pod=b kind=Checkpoint took_ms=1000 seq=1
INFO driver: step done pod=a kind=Checkpoint took_ms=30 seq=2
INFO driver: step done pod=a kind=Wake took_ms=500 seq=3
INFO driver: step done pod=a kind=Commit took_ms=10 seq=4
INFO driver: step done pod=a kind=Pause took_ms=7 seq=5
";
        assert_eq!(saves(log, "a"), [Duration::from_millis(42)]);
        assert!(saves(log, "c").is_empty());
    }
}
