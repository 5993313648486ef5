//! The kill test as a command: see `torpor_tests::chaos`. `hack/chaos` runs it.

use std::io::Write;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::Context;
use clap::Parser;
use torpor_tests::case::alone_within;
use torpor_tests::chaos::schedule::Victim;
use torpor_tests::chaos::{self, Plan};
use torpor_tests::moves::schedule::Round;
use torpor_tests::{explain, moves, two_nodes};

/// Kills agent, shims, their commands, containerd and gVisor at random points while sandboxes go to
/// sleep and wake under load, and checks that nothing is lost, stuck or left over.
#[derive(Debug, Parser)]
#[command(name = "hack/chaos")]
struct Args {
    /// Seed of the schedule; each run prints its seed, so that it can be repeated [default: random]
    #[arg(long)]
    seed: Option<u64>,
    /// Number of cycles
    #[arg(long, default_value_t = 1000)]
    cycles: u64,
    /// Number of the first cycle
    #[arg(long, default_value_t = 0)]
    from: u64,
    /// Number of sandboxes at the same time
    #[arg(long, default_value_t = 8)]
    lanes: usize,
    /// Seconds after which no cycle begins
    #[arg(long)]
    seconds: Option<u64>,
    /// Victim that is never killed; may be given more than once
    #[arg(long)]
    spare: Vec<Victim>,
    /// Moves the sandboxes between two nodes through an S3 server, which fails with agents and the
    /// controller, in each cycle; needs `hack/cluster up --nodes 2`, `hack/cluster store up` and
    /// hack/repository.yaml
    #[arg(long, conflicts_with_all = ["seconds", "spare"])]
    moves: bool,
    /// File for the progress, line by line, and for the cluster's state after a failure
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
    let report = |line: &str| {
        let at = began.elapsed().as_secs_f64();
        // A full disk must not end the run.
        let _ = writeln!(&log, "[{at:7.1}] {line}");
        println!("[{at:7.1}] {}", line.lines().next().unwrap_or_default());
    };
    report(&format!(
        "seed {seed}, cycles {from} to {}, {lanes} sandboxes at a time; log: {path}",
        from + cycles,
    ));
    let hours = Duration::from_secs(24 * 3600);
    if args.moves {
        let numbers = *from..from + cycles;
        let rounds = numbers.map(|number| (number, Round::of(*seed, number)));
        return alone_within(hours, "moves", async |case| {
            two_nodes::on_both(case, async || {
                let done = moves::run(case, *lanes, rounds, report).await;
                match &done {
                    Ok(tally) => report(&tally.to_string()),
                    Err(_) => report(&explain::explain(case).await),
                }
                done.map(drop)
            })
            .await
        })
        .await;
    }
    let mut clean = false;
    alone_within(hours, "chaos", async |case| {
        let tally = chaos::run(case, &plan, report).await?;
        println!("{tally}");
        let _ = writeln!(&log, "{tally}");
        report(&format!("seed {seed}: over"));
        clean = tally.is_clean();
        Ok(())
    })
    .await?;
    anyhow::ensure!(clean, "see {path}");
    Ok(())
}
