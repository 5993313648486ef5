//! Time until a sleeping sandbox answers its first packet, dozing and hibernated, small and with
//! 100 MB, and the cost of a dozing one; beside the same sandbox awake.

use std::time::Duration;

use clap::Args;
use torpor_tests::{case::Case, pods::PYTHON};

use crate::{
    node, setup,
    sleeper::{Sleep, Sleeper, memory_mib, processor_time, wake_each},
    stats::{Times, median},
    stop::Stop,
    swap::{Kind, Swap},
    table,
};

const NAMESPACE: &str = "torpor-bench-doze";
/// Number of small sandboxes that are asked over TCP, and as many by exec.
const SMALL: usize = 4;
const LARGE: usize = 2;
/// Size of the swap in MiB.
const SWAP: u64 = 2048;
/// Time for all Pods to fall asleep.
const ASLEEP: Duration = Duration::from_secs(90);
/// Time over which the processor time of dozing sandboxes is measured.
const SHARE: Duration = Duration::from_secs(20);
/// Rounds of exchanges with awake sandboxes.
const BASE_ROUNDS: usize = 3;

/// Answers "x" at once, and anything else after touching 5 MB of what it holds.
const PROGRAM: &str = r#"
import os, socket, sys
held = bytearray(os.urandom(int(sys.argv[1]) << 20))
s = socket.create_server(("", 8080), backlog=64)
open("/tmp/ready", "w").close()
while True:
  c, _ = s.accept(); d = c.recv(100)
  if d != b"x":
    for at in range(0, min(len(held), 5 << 20), 4096): held[at] ^= 1
  c.sendall(d); c.close()"#;

#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Rounds, each of four small and two large sandboxes
    #[arg(default_value_t = 6)]
    rounds: usize,
    /// Swap that is used before the node's
    #[arg(long, value_enum, default_value_t = Kind::Zram)]
    swap: Kind,
    /// Seconds that all sleep before the first is woken (Go's runtime collects garbage every 120)
    #[arg(long, default_value_t = 2.0)]
    rest: f64,
}

pub(crate) async fn run(options: &Options, stop: &mut Stop) -> anyhow::Result<()> {
    let swap = Swap::on(options.swap, SWAP)?;
    setup::namespaced(NAMESPACE, stop, async |case| {
        let numbers = 1..=SMALL;
        let mut pods: Vec<_> = numbers
            .flat_map(|n| {
                [
                    pod(&format!("small-{n}"), "1"),
                    pod(&format!("exec-{n}"), "1"),
                ]
            })
            .collect();
        pods.extend((1..=LARGE).map(|n| pod(&format!("large-{n}"), "100")));
        setup::start(case, pods).await?;
        println!(
            "{} rounds, {}, swap: {}",
            options.rounds,
            node::describe()?,
            swap.describe()?
        );
        measure(case, options).await
    })
    .await
}

fn pod(name: &str, megabytes: &str) -> serde_json::Value {
    let command = ["python3", "-c", PROGRAM, megabytes];
    setup::pod(name, PYTHON, &command, setup::ready_file())
}

/// The sandboxes, by how they are woken.
#[derive(Debug)]
struct Groups<'a> {
    case: &'a Case,
    small: Vec<Sleeper>,
    large: Vec<Sleeper>,
    exec: Vec<Sleeper>,
}

/// Times of one state of the sandboxes.
#[derive(Debug, Default)]
struct Answers {
    small: Vec<Duration>,
    large: Vec<Duration>,
    exec: Vec<Duration>,
    /// Stages of the wakes of small sandboxes.
    stages: Vec<Vec<(String, Duration)>>,
}

impl<'a> Groups<'a> {
    async fn of(case: &'a Case) -> anyhow::Result<Self> {
        let all = Sleeper::all(case).await?;
        let group = |kind: &str| {
            let of_kind = all.values().filter(|pod| pod.name.starts_with(kind));
            of_kind.cloned().collect()
        };
        Ok(Self {
            case,
            small: group("small"),
            large: group("large"),
            exec: group("exec"),
        })
    }

    fn all(&self) -> Vec<Sleeper> {
        [&self.small[..], &self.large, &self.exec].concat()
    }

    /// Asks one sandbox after the other.
    async fn ask(&self, answers: &mut Answers) -> anyhow::Result<()> {
        let exchange = async |pod: &Sleeper| pod.exchange(b"x").await;
        answers
            .small
            .extend(wake_each(&self.small, exchange).await?);
        answers
            .stages
            .extend(self.small.iter().map(Sleeper::stages));
        let touch = async |pod: &Sleeper| pod.exchange(b"touch").await;
        answers.large.extend(wake_each(&self.large, touch).await?);
        let exec = async |pod: &Sleeper| pod.exec(self.case, &["true"]).await;
        answers.exec.extend(wake_each(&self.exec, exec).await?);
        Ok(())
    }

    /// Returns the memory of a small sandbox in MiB, on average.
    fn memory(&self) -> anyhow::Result<f64> {
        let each = self.small.iter().map(|pod| memory_mib(&pod.cgroup));
        Ok(each.sum::<anyhow::Result<f64>>()? / self.small.len() as f64)
    }

    fn processor_time(&self) -> anyhow::Result<Duration> {
        let each = self.small.iter().map(|pod| processor_time(&pod.cgroup));
        each.sum()
    }

    /// Prints what a small dozing sandbox costs; `awake` is its memory when it was awake.
    async fn print_cost(&self, awake: f64) -> anyhow::Result<()> {
        let memory = self.memory()?;
        println!(
            "{}",
            table::value("dozing, small: memory", memory, "MiB", Some(awake))
        );
        let before = self.processor_time()?;
        tokio::time::sleep(SHARE).await;
        let used = self.processor_time()? - before;
        let share = node::percent(used, SHARE) / self.small.len() as f64;
        println!("    {share:.3} % of a processor over {} s", SHARE.as_secs());
        Ok(())
    }
}

async fn measure(case: &Case, options: &Options) -> anyhow::Result<()> {
    let groups = Groups::of(case).await?;
    // All are let come to rest after they fell asleep: the rest is part of the measurement.
    let rest = Duration::from_secs_f64(options.rest);
    let mut awake = Answers::default();
    for _ in 0..BASE_ROUNDS {
        groups.ask(&mut awake).await?;
    }
    let awake = print_base(&awake);
    let memory = groups.memory()?;
    let (mut dozing, mut hibernated) = (Answers::default(), Answers::default());
    for round in 0..options.rounds {
        for (how, answers) in [
            (Sleep::Dozing, &mut dozing),
            (Sleep::Hibernated, &mut hibernated),
        ] {
            how.begin(case, &groups.all(), ASLEEP).await?;
            tokio::time::sleep(rest).await;
            if round == 0 && how == Sleep::Dozing {
                groups.print_cost(memory).await?;
            }
            groups.ask(answers).await?;
            how.end(case).await?;
        }
    }
    print_results(&dozing, &hibernated, &awake);
    Ok(())
}

/// Bases of the ratios.
#[derive(Debug)]
struct Base {
    small: Times,
    large: Times,
    exec: Times,
}

fn print_base(awake: &Answers) -> Base {
    let base = Base {
        small: Times::of(&awake.small),
        large: Times::of(&awake.large),
        exec: Times::of(&awake.exec),
    };
    let print = |words: &str, times: &Times| println!("{}", table::row(words, times, times));
    print("a TCP exchange, awake, small", &base.small);
    print("the same with 100 MB, 5 MB of them touched", &base.large);
    print("exec, awake", &base.exec);
    base
}

fn print_results(dozing: &Answers, hibernated: &Answers, base: &Base) {
    let print = |words: &str, times: &[Duration], base: &Times| {
        println!("{}", table::row(words, &Times::of(times), base));
    };
    print(
        "dozing, first packet to first byte, small",
        &dozing.small,
        &base.small,
    );
    let first: Vec<Duration> = dozing.small.iter().copied().step_by(SMALL).collect();
    print(
        "    the first of each round, when all others sleep",
        &first,
        &base.small,
    );
    print_stages(&dozing.stages);
    print(
        "dozing, the same, 100 MB of which 5 are touched",
        &dozing.large,
        &base.large,
    );
    print("dozing, exec", &dozing.exec, &base.exec);
    print(
        "hibernated, first packet to first byte, small",
        &hibernated.small,
        &base.small,
    );
    print_stages(&hibernated.stages);
    let small = Times::of(&hibernated.small);
    print(
        "hibernated, the same, 100 MB of which 5 are touched",
        &hibernated.large,
        &small,
    );
    print("hibernated, exec", &hibernated.exec, &base.exec);
}

/// Prints the median of each stage of the wakes.
fn print_stages(wakes: &[Vec<(String, Duration)>]) {
    let of = |name: &str| {
        let times = wakes.iter().map(|stages| {
            let stage = stages.iter().find(|(stage, _)| stage == name);
            stage.map_or(0.0, |(_, took)| took.as_secs_f64() * 1000.0)
        });
        median(&times.collect::<Vec<_>>())
    };
    let names = wakes.first().into_iter().flatten();
    let stages: Vec<String> = names
        .map(|(name, _)| format!("{name} {:.1}", of(name)))
        .collect();
    println!("    stages of it, p50 in ms: {}", stages.join(", "));
}
