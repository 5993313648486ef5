//! Many sandboxes on one node: time until all answer that are woken at the same instant, and the
//! cost of many that sleep, beside what they cost awake.

use std::{
    collections::{BTreeMap, HashSet},
    fs,
    ops::Range,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use anyhow::Context as _;
use clap::Args;
use futures::future::{join_all, try_join_all};
use serde_json::Value;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};
use torpor_api::annotations::{DOZE_AFTER, HIBERNATE_AFTER};
use torpor_tests::{
    case::Case,
    machine::{self, Process},
    pods::{PYTHON, annotated},
};

use crate::{
    node, setup,
    sleeper::{PORT, Sleep, Sleeper},
    stats::Times,
    stop::Stop,
    swap::{self, Kind, Swap},
    table,
};

const NAMESPACE: &str = "torpor-bench-many";
/// Pods that start at the same time; more would only wait for one another.
const WAVE: usize = 10;
/// Megabytes that the program of a woken sandbox holds; Python takes the rest of 30.
const HELD: &str = "26";
/// Hierarchies that have every process, on cgroup v1 and v2.
const CGROUP_ROOTS: [&str; 3] = [
    "/sys/fs/cgroup/pids",
    "/sys/fs/cgroup/memory",
    "/sys/fs/cgroup",
];
/// Sandboxes of a crowd that are awake at once.
const GROUP: usize = 50;
/// Swap in MiB: for each sandbox, and beside them.
const SWAP_EACH: u64 = 60;
const SWAP_BESIDE: u64 = 512;
/// Time for all to fall asleep: until dozing, and until hibernated.
const ASLEEP: Duration = Duration::from_secs(300);
const HIBERNATED: Duration = Duration::from_secs(900);
/// Time for all to answer.
const ANSWERS: Duration = Duration::from_secs(120);
/// Time that all sleep before they are woken: part of the measurement.
const REST: Duration = Duration::from_secs(3);
/// Time over which the agent is measured.
const SHARE: Duration = Duration::from_secs(60);

/// Holds as much as the argument says, and answers each connection with what it drew at its start.
const PROGRAM: &str = r#"
import os, socket, sys
held = bytearray(os.urandom(int(sys.argv[1]) << 20))
name = held[:8].hex().encode()
s = socket.create_server(("", 8080), backlog=64)
open("/tmp/ready", "w").close()
while True:
  c, _ = s.accept(); c.recv(100); c.sendall(name); c.close()"#;

#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Sandboxes of 30 MB that are woken at the same instant; may be 0
    #[arg(default_value_t = 50)]
    woken: usize,
    /// Sandboxes whose cost is measured while they sleep; may be 0 (300 need 10 GB of memory and
    /// 10 of disk for swap)
    #[arg(default_value_t = 300)]
    asleep: usize,
    /// Sandboxes that hibernate while the next ones start, more than could run at once, and are all
    /// woken afterwards; may be 0 (1,000 need 30 GB of disk)
    #[arg(long, default_value_t = 0)]
    crowd: usize,
    /// Swap that is used before the node's; a file only where the node has too little
    #[arg(long, value_enum, default_value_t = Kind::File)]
    swap: Kind,
    /// Seconds that all have slept when their cost is measured (Go's runtime, of the shims too,
    /// gives memory back in the minutes after it was used)
    #[arg(long, default_value_t = 20.0)]
    rest: f64,
}

pub(crate) async fn run(options: &Options, stop: &mut Stop) -> anyhow::Result<()> {
    let most = options.woken.max(options.asleep);
    let wanted = u64::try_from(most)? * SWAP_EACH + SWAP_BESIDE;
    let enough = options.swap == Kind::File && swap::free_mebibytes()? >= wanted;
    let _swap = Swap::on(if enough { Kind::Node } else { options.swap }, wanted)?;
    setup::namespaced(NAMESPACE, stop, async |case| {
        println!(
            "{}, {:.0} GiB of memory",
            node::describe()?,
            node::memory_gib()?
        );
        if options.woken > 0 {
            let pods = start(case, 0..options.woken, HELD, None).await?;
            print_cost(&format!("{} awake, 30 MB", pods.len()), &pods, None)?;
            woken(case, &pods).await?;
            setup::delete_pods(case).await?;
        }
        if options.asleep > 0 {
            asleep(case, options).await?;
        }
        if options.crowd > 0 {
            crowd(case, options).await?;
        }
        Ok(())
    })
    .await
}

/// Starts Pods in waves: a kubelet that starts hundreds at once serves none of them in time.
/// `sleep`: the annotation by which they fall asleep after a second.
async fn start(
    case: &Case,
    numbers: Range<usize>,
    megabytes: &str,
    sleep: Option<&str>,
) -> anyhow::Result<Vec<Sleeper>> {
    let last = numbers.end;
    for first in numbers.step_by(WAVE) {
        let end = last.min(first + WAVE);
        let wave = (first..end).map(|number| pod(number, megabytes, sleep));
        setup::start(case, wave.collect()).await?;
        if first % 50 == 0 {
            eprintln!("    {end} of {last} run");
        }
    }
    Ok(Sleeper::all(case).await?.into_values().collect())
}

fn pod(number: usize, megabytes: &str, sleep: Option<&str>) -> Value {
    let command = ["python3", "-c", PROGRAM, megabytes];
    let pod = setup::pod(&format!("p{number}"), PYTHON, &command, setup::ready_file());
    match sleep {
        Some(key) => annotated(pod, key, "1s"),
        None => pod,
    }
}

/// Connects to the Pod; returns the time until it had answered since `begin`, and the answer.
async fn ask(pod: &Sleeper, begin: Instant) -> anyhow::Result<(Duration, Vec<u8>)> {
    let mut stream = TcpStream::connect((pod.address.as_str(), PORT)).await?;
    stream.write_all(b"x").await?;
    let mut answer = vec![0; 100];
    let length = stream.read(&mut answer).await?;
    answer.truncate(length);
    Ok((begin.elapsed(), answer))
}

/// Connects to all at the same instant; returns the time until each had answered, and the answers.
async fn ask_all(pods: &[Sleeper]) -> anyhow::Result<(Vec<Duration>, Vec<Vec<u8>>)> {
    let begin = Instant::now();
    let asked = try_join_all(pods.iter().map(|pod| ask(pod, begin)));
    let answers = tokio::time::timeout(ANSWERS, asked).await;
    Ok(answers.context("not all answer")??.into_iter().unzip())
}

/// As [`ask_all`]; prints a connection that fails, and opens another.
async fn ask_each(pods: &[Sleeper]) -> anyhow::Result<(Vec<Duration>, Vec<Vec<u8>>)> {
    let begin = Instant::now();
    let asked = pods.iter().map(|pod| async move {
        loop {
            match ask(pod, begin).await {
                Ok(answer) => return answer,
                Err(error) => println!("    {}: {error:#}", pod.name),
            }
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
    });
    let answers = tokio::time::timeout(ANSWERS, join_all(asked)).await;
    Ok(answers.context("not all answer")?.into_iter().unzip())
}

async fn woken(case: &Case, pods: &[Sleeper]) -> anyhow::Result<()> {
    let count = pods.len();
    let (times, names) = ask_all(pods).await?;
    let base = Times::of(&times);
    println!(
        "{}",
        table::row_to_last(&format!("{count} awake, all asked at once"), &base, &base)
    );
    for how in [Sleep::Dozing, Sleep::Hibernated] {
        how.begin(case, pods, ASLEEP).await?;
        tokio::time::sleep(REST).await;
        let (times, answers) = ask_all(pods).await?;
        let lost = names
            .iter()
            .zip(&answers)
            .filter(|(before, after)| before != after)
            .count();
        let words = format!("{count} {}: answered since all were asked", how.name());
        println!("{}", table::row_to_last(&words, &Times::of(&times), &base));
        println!("    {lost} lost");
        how.end(case).await?;
    }
    Ok(())
}

async fn asleep(case: &Case, options: &Options) -> anyhow::Result<()> {
    let rest = Duration::from_secs_f64(options.rest);
    let pods = start(case, 0..WAVE, "1", None).await?;
    let awake = print_cost(&format!("{WAVE} awake, small"), &pods, None)?;
    setup::delete_pods(case).await?;
    let pods = start(case, 0..options.asleep, "1", Some(DOZE_AFTER)).await?;
    for how in [Sleep::Dozing, Sleep::Hibernated] {
        match how {
            Sleep::Dozing => how.until(&pods, ASLEEP).await?,
            Sleep::Hibernated => how.begin(case, &pods, HIBERNATED).await?,
        }
        tokio::time::sleep(rest).await;
        let words = format!("{} {}", pods.len(), how.name());
        print_cost(&words, &pods, Some(awake))?;
        print_agent(&words).await?;
    }
    Ok(())
}

/// Each sandbox hibernates while the next ones start. Then all are woken, group by group, and must
/// answer with what they drew at their start.
async fn crowd(case: &Case, options: &Options) -> anyhow::Result<()> {
    let mut names = BTreeMap::new();
    let mut pods = Vec::new();
    for first in (0..options.crowd).step_by(GROUP) {
        let group = first..options.crowd.min(first + GROUP);
        pods = start(case, group, "1", Some(HIBERNATE_AFTER)).await?;
        let fresh = pods.iter().filter(|pod| !names.contains_key(&pod.name));
        let fresh: Vec<Sleeper> = fresh.cloned().collect();
        let (_, answers) = ask_each(&fresh).await?;
        names.extend(fresh.into_iter().map(|pod| pod.name).zip(answers));
    }
    Sleep::Hibernated.until(&pods, HIBERNATED).await?;
    tokio::time::sleep(Duration::from_secs_f64(options.rest)).await;
    let words = format!("{} hibernated", pods.len());
    print_cost(&words, &pods, None)?;
    print_agent(&words).await?;
    let (mut times, mut lost) = (Vec::new(), 0);
    for group in pods.chunks(GROUP) {
        let (took, answers) = ask_each(group).await?;
        times.extend(took);
        let known = group.iter().map(|pod| names.get(&pod.name));
        lost += known
            .zip(&answers)
            .filter(|(before, after)| *before != Some(after))
            .count();
    }
    let times = Times::of(&times);
    println!(
        "{}",
        table::row_to_last(
            &format!("{words}: woken {GROUP} at once, answered since asked"),
            &times,
            &times
        )
    );
    println!("    {lost} lost");
    Ok(())
}

/// Prints the memory of a Pod on average and returns it, in MiB.
fn print_cost(words: &str, pods: &[Sleeper], awake: Option<f64>) -> anyhow::Result<f64> {
    let (sandboxes, shims) = processes(pods);
    let each = |all: &[Process]| node::pss_kib(all) as f64 / 1024.0 / pods.len() as f64;
    let memory = each(&sandboxes) + each(&shims);
    let words = format!("{words}, shim included");
    let row = table::value(&words, memory, "MB PSS each", awake);
    println!("{row}, {:.1} of them the shim's", each(&shims));
    Ok(memory)
}

/// Returns the processes in the Pods' cgroups without shims, and the Pods' shims.
fn processes(pods: &[Sleeper]) -> (Vec<Process>, Vec<Process>) {
    let pids: HashSet<i32> = pods
        .iter()
        .flat_map(|pod| pids_below(pod.pod_cgroup()))
        .collect();
    let sandboxes: HashSet<&str> = pods.iter().map(|pod| pod.sandbox.as_str()).collect();
    let is_shim = |process: &Process| {
        process.command.contains("containerd-shim")
            && process
                .command
                .split(' ')
                .any(|word| sandboxes.contains(word))
    };
    let (shims, others): (Vec<_>, Vec<_>) = machine::processes().into_iter().partition(is_shim);
    let own = others
        .into_iter()
        .filter(|process| pids.contains(&process.pid));
    (own.collect(), shims)
}

/// Returns the processes in a cgroup and in all below it.
fn pids_below(cgroup: &Path) -> HashSet<i32> {
    let mut left: Vec<PathBuf> = CGROUP_ROOTS
        .iter()
        .map(|root| Path::new(root).join(cgroup))
        .filter(|path| path.is_dir())
        .take(1)
        .collect();
    let mut found = HashSet::new();
    while let Some(dir) = left.pop() {
        let procs = fs::read_to_string(dir.join("cgroup.procs")).unwrap_or_default();
        found.extend(procs.lines().filter_map(|line| line.parse::<i32>().ok()));
        let entries = fs::read_dir(dir).into_iter().flatten().flatten();
        left.extend(
            entries
                .map(|entry| entry.path())
                .filter(|path| path.is_dir()),
        );
    }
    found
}

/// Prints what the agent uses, and beside it what the node does for every Pod, also one that
/// sleeps: containerd and its shims.
async fn print_agent(words: &str) -> anyhow::Result<()> {
    let agent = [node::agent()?];
    let mut containerds = machine::processes();
    containerds.retain(|process| {
        let program = process.command.split(' ').next().unwrap_or_default();
        let name = program.rsplit('/').next().unwrap_or_default();
        name.starts_with("containerd")
    });
    let used = || -> anyhow::Result<[Duration; 3]> {
        let containerds = node::processor_time(&containerds);
        Ok([node::processor_time(&agent), containerds, node::busy()?])
    };
    let before = used()?;
    tokio::time::sleep(SHARE).await;
    let after = used()?;
    let share = |number: usize| node::percent(after[number] - before[number], SHARE);
    println!(
        "the agent, while {words}: {:.1} MB RSS, {:.2} % of a processor over {} s",
        node::resident_mib(agent[0].pid)?,
        share(0),
        SHARE.as_secs()
    );
    println!(
        "    containerd and shims {:.1} %, the whole machine {:.1} %",
        share(1),
        share(2)
    );
    Ok(())
}
