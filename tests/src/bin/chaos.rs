//! The kill test as a command: see `torpor_tests::chaos`. `hack/chaos` runs it.

use std::io::Write;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::Context;
use clap::Parser;
use torpor_tests::case::alone_within;
use torpor_tests::chaos::schedule::Victim;
use torpor_tests::chaos::{self, Plan};

/// Kills agent, keepers, shims, containerd and gVisor at random points while sandboxes go to sleep and wake under load, and
/// checks that nothing is lost, stuck or left over.
#[derive(Debug, Parser)]
#[command(name = "hack/chaos")]
struct Args {
    /// What happens when; printed by each run, so that it can be run again [default: another one each time]
    #[arg(long)]
    seed: Option<u64>,
    #[arg(long, default_value_t = 1000)]
    cycles: u64,
    /// Number of the first cycle
    #[arg(long, default_value_t = 0)]
    from: u64,
    /// Sandboxes at the same time
    #[arg(long, default_value_t = 8)]
    lanes: usize,
    /// No cycle begins after this many seconds
    #[arg(long)]
    seconds: Option<u64>,
    /// Who is never killed; may be given more than once
    #[arg(long)]
    spare: Vec<Victim>,
    /// Where progress goes line by line, with the cluster's words after a failure
    #[arg(long, default_value = "/tmp/torpor-chaos.log")]
    log: PathBuf,
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    let plan = Plan {
        seed: args.seed.unwrap_or_else(|| fastrand::u64(..1 << 32)),
        from: args.from,
        cycles: args.cycles,
        lanes: args.lanes,
        time: args.seconds.map(Duration::from_secs),
        spared: args.spare,
    };
    let Plan {
        seed,
        from,
        cycles,
        lanes,
        ..
    } = &plan;
    let path = args.log.display();
    let log = std::fs::File::create(&args.log);
    let log = log.with_context(|| format!("cannot write {path}"))?;
    let began = Instant::now();
    let tell = |line: &str| {
        let at = began.elapsed().as_secs_f64();
        // A log on a full disk ends no run.
        let _ = writeln!(&log, "[{at:7.1}] {line}");
        println!("[{at:7.1}] {}", line.lines().next().unwrap_or_default());
    };
    tell(&format!(
        "seed {seed}, cycles {from} to {}, {lanes} sandboxes at a time; log: {path}",
        from + cycles,
    ));
    let hours = Duration::from_secs(24 * 3600);
    let mut clean = false;
    alone_within(hours, "chaos", async |case| {
        let tally = chaos::run(case, &plan, tell).await?;
        println!("{tally}");
        let _ = writeln!(&log, "{tally}");
        tell(&format!("seed {seed}: over"));
        clean = tally.is_clean();
        Ok(())
    })
    .await?;
    anyhow::ensure!(clean, "see {path}");
    Ok(())
}
