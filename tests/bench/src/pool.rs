//! Claims from a warm pool on a real node: members that run, members that sleep in a golden image,
//! and a pool without members, whose claims start cold. Each until the claim is Ready, and until
//! the program has answered its first request.

use std::os::unix::fs::MetadataExt;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use clap::Args;
use kube::ResourceExt;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams};
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use torpor_api::annotations::{GOLDEN, HEAT, LATE_BIND};
use torpor_api::conditions::find;
use torpor_api::{SandboxClaim, SandboxWarmPool};
use torpor_tests::case::{Case, uid};
use torpor_tests::pods::{PYTHON, annotated, pod_spec, with};
use torpor_tests::pools::extension;
use torpor_tests::wait;

use crate::{node, setup, stats::Times, stop::Stop, table};

const NAMESPACE: &str = "torpor-bench-pool";
/// Time limit of a pool to be filled, and of a claim.
const FILLED: Duration = Duration::from_secs(280);
/// Time after which the pool does not count a claim as demand any more.
const CALM: Duration = Duration::from_secs(4);

/// Holds random memory, and answers each connection.
pub(crate) const PROGRAM: &str = r#"
import os, socket, sys
held = bytearray(os.urandom(int(sys.argv[1]) << 20))
s = socket.create_server(("", 8080), backlog=64)
open("/tmp/ready", "w").close()
while True:
  c, _ = s.accept(); d = c.recv(100); c.sendall(d); c.close()"#;

#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Members of the pool
    #[arg(long, default_value_t = 20)]
    members: u32,
    /// Memory of a sandbox in MiB
    #[arg(long, default_value_t = 30)]
    megabytes: u32,
    /// Claims of each kind
    #[arg(long, default_value_t = 20)]
    claims: u32,
    /// Claims one by one, each from a pool of its own whose members sleep
    #[arg(long, default_value_t = 6)]
    calm: u32,
    /// Claims that bring a variable, from members that run and from members that sleep
    #[arg(long, default_value_t = 10)]
    late: u32,
    /// Milliseconds between two claims
    #[arg(long, default_value_t = 500)]
    pause: u64,
}

pub(crate) async fn run(options: &Options, stop: &mut Stop) -> anyhow::Result<()> {
    setup::namespaced(NAMESPACE, stop, async |case| {
        println!(
            "{} members of {} MiB, {} claims every {} ms, {}",
            options.members,
            options.megabytes,
            options.claims,
            options.pause,
            node::describe()?
        );
        template(case, "plain", options, false, false).await?;
        template(case, "golden", options, true, false).await?;
        template(case, "late", options, false, true).await?;
        template(case, "late-golden", options, true, true).await?;
        let pause = Duration::from_millis(options.pause);

        let began = Instant::now();
        pool(case, "hot", "plain", options.members, "hot=rest").await?;
        filled(case, "hot", options.members).await?;
        let cold_rate = f64::from(options.members) / began.elapsed().as_secs_f64();
        let hot = claims(case, "hot", options.claims, pause, false).await?;
        remove(case).await?;

        pool(case, "cold", "plain", 0, "hot=rest").await?;
        let cold = claims(case, "cold", options.claims.min(8), pause, false).await?;
        remove(case).await?;

        // The golden image first: it is not part of the rate.
        pool(case, "asleep", "golden", 1, "hot=0,asleep=rest").await?;
        filled(case, "asleep", 1).await?;
        let began = Instant::now();
        scale(case, "asleep", options.members + 1).await?;
        filled(case, "asleep", options.members + 1).await?;
        let rate = f64::from(options.members) / began.elapsed().as_secs_f64();
        let (memory, disk) = cost(case).await?;
        let asleep = claims(case, "asleep", options.claims, pause, false).await?;
        remove(case).await?;
        let calm = calm_claims(case, options.calm).await?;

        let late = late_claims(case, "late", "hot=rest", options).await?;
        let late_asleep = late_claims(case, "late-golden", "hot=0,asleep=rest", options).await?;

        let base = Times::of(&hot.ready);
        let answers = Times::of(&hot.answered);
        for (words, found) in [
            ("members that run", &hot),
            ("members that run, claims with a variable", &late),
            ("members that sleep, one claim at a time", &calm),
            ("members that sleep, claims with a variable", &late_asleep),
            ("members that sleep, woken ahead of demand", &asleep),
            ("no members: cold starts", &cold),
        ] {
            let (ready, answered) = (Times::of(&found.ready), Times::of(&found.answered));
            let words_ready = format!("{words}: Ready");
            println!("{}", table::row(&words_ready, &ready, &base));
            let words = format!("{words}: first answer");
            println!("{}", table::row(&words, &answered, &answers));
        }
        let per_second = "members per second";
        let words = "a pool fills with members that start cold";
        println!("{}", table::value(words, cold_rate, per_second, None));
        let words = "a pool fills with members that sleep in a golden image";
        println!("{}", table::value(words, rate, per_second, Some(cold_rate)));
        let words = "memory of a sleeping member, its shim";
        println!("{}", table::value(words, memory, "MB PSS", None));
        let words = "disk of a sleeping member beside the golden image";
        println!("{}", table::value(words, disk, "MB", None));
        Ok(())
    })
    .await
}

async fn template(
    case: &Case,
    name: &str,
    options: &Options,
    golden: bool,
    late: bool,
) -> anyhow::Result<()> {
    let megabytes = options.megabytes.to_string();
    let container = json!({
        "name": setup::MAIN, "image": PYTHON, "imagePullPolicy": "Never",
        "command": ["python3", "-c", PROGRAM, megabytes],
    });
    let container = with(container, setup::ready_file());
    let spec = json!({
        "podTemplate": { "spec": pod_spec(json!({ "containers": [container] })) },
        "networkPolicyManagement": "Unmanaged",
        "envVarsInjectionPolicy": "Allowed",
    });
    let mut template = extension("SandboxTemplate", name, spec);
    if golden {
        template = annotated(template, GOLDEN, "true");
    }
    if late {
        template = annotated(template, LATE_BIND, "env");
    }
    case.create(template).await
}

async fn pool(
    case: &Case,
    name: &str,
    template: &str,
    replicas: u32,
    heat: &str,
) -> anyhow::Result<()> {
    let spec = json!({ "replicas": replicas, "sandboxTemplateRef": { "name": template } });
    let pool = extension("SandboxWarmPool", name, spec);
    case.create(annotated(pool, HEAT, heat)).await
}

async fn filled(case: &Case, pool: &str, members: u32) -> anyhow::Result<()> {
    let (pools, words) = (case.api::<SandboxWarmPool>(), "the pool is full");
    wait::object(pools, pool, words, FILLED, |found| {
        let status = found.and_then(|pool| pool.status).unwrap_or_default();
        match status.ready_replicas == i32::try_from(members).ok() {
            true => Ok(()),
            false => Err(format!("{status:?}")),
        }
    })
    .await
}

async fn scale(case: &Case, pool: &str, members: u32) -> anyhow::Result<()> {
    let patch = Patch::Merge(json!({ "spec": { "replicas": members } }));
    let pools = case.api::<SandboxWarmPool>();
    pools.patch(pool, &PatchParams::default(), &patch).await?;
    Ok(())
}

/// Deletes the pools with their members and claims.
async fn remove(case: &Case) -> anyhow::Result<()> {
    let (background, all) = (DeleteParams::background(), ListParams::default());
    let claims = case.api::<SandboxClaim>();
    claims.delete_collection(&background, &all).await?;
    let pools = case.api::<SandboxWarmPool>();
    pools.delete_collection(&background, &all).await?;
    wait::none(&case.sandboxes(), "the end of the pools' Sandboxes", FILLED).await?;
    setup::delete_pods(case).await
}

/// Times of claims, from the client's create on.
#[derive(Default)]
struct Figures {
    ready: Vec<Duration>,
    answered: Vec<Duration>,
}

/// Makes claims that bring a variable, one at a time, from a pool of this heat.
async fn late_claims(
    case: &Case,
    template: &str,
    heat: &str,
    options: &Options,
) -> anyhow::Result<Figures> {
    let members = options.late.div_ceil(2).max(2);
    pool(case, template, template, members, heat).await?;
    filled(case, template, members).await?;
    let figures = claims(case, template, options.late, CALM, true).await?;
    remove(case).await?;
    Ok(figures)
}

/// Makes claims, one at a time, each from a pool of its own with two members that sleep. A pool
/// that had a claim lately keeps a member awake for the next one.
async fn calm_claims(case: &Case, count: u32) -> anyhow::Result<Figures> {
    let name = |number: u32| format!("calm-{number}");
    for number in 0..count {
        pool(case, &name(number), "golden", 2, "hot=0,asleep=rest").await?;
    }
    for number in 0..count {
        filled(case, &name(number), 2).await?;
    }
    let mut figures = Figures::default();
    for number in 0..count {
        let found = claims(case, &name(number), 1, CALM, false).await?;
        figures.ready.extend(found.ready);
        figures.answered.extend(found.answered);
    }
    remove(case).await?;
    Ok(figures)
}

/// Makes claims, one every `pause`, and asks each sandbox as soon as its claim is Ready. `late`:
/// each brings a variable.
async fn claims(
    case: &Case,
    pool: &str,
    count: u32,
    pause: Duration,
    late: bool,
) -> anyhow::Result<Figures> {
    let mut figures = Figures::default();
    for number in 0..count {
        let name = format!("{pool}-{}-{number}", pause.as_millis());
        let began = Instant::now();
        let mut claim = json!({ "warmPoolRef": { "name": pool } });
        if late {
            claim["env"] = json!([{ "name": "CLAIM", "value": name }]);
        }
        case.create(extension("SandboxClaim", &name, claim)).await?;
        let address = ready(case, &name).await?;
        figures.ready.push(began.elapsed());
        answer(&address).await.with_context(|| name.clone())?;
        figures.answered.push(began.elapsed());
        tokio::time::sleep(pause.saturating_sub(began.elapsed())).await;
    }
    Ok(figures)
}

/// Waits until the claim is Ready; returns the address of its sandbox.
async fn ready(case: &Case, claim: &str) -> anyhow::Result<String> {
    let claims = case.api::<SandboxClaim>();
    wait::object(claims, claim, "the claim is Ready", FILLED, |found| {
        let status = found.and_then(|claim| claim.status).unwrap_or_default();
        let ready = find(&status.conditions, "Ready").is_some_and(|c| c.status == "True");
        let address = status
            .sandbox
            .and_then(|found| found.pod_ips.into_iter().next());
        address
            .filter(|_| ready)
            .ok_or_else(|| format!("{:?}", status.conditions))
    })
    .await
}

/// Asks the program, once: a sandbox whose claim is Ready answers.
pub(crate) async fn answer(address: &str) -> anyhow::Result<()> {
    let mut stream = TcpStream::connect((address, 8080)).await?;
    stream.write_all(b"x").await?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).await?;
    anyhow::ensure!(answer == b"x", "the program answered {answer:?}");
    Ok(())
}

/// Returns the memory of a sleeping member's processes and the disk of its image that no other
/// image shares, both in MB on average.
async fn cost(case: &Case) -> anyhow::Result<(f64, f64)> {
    let (mut memory, mut disk, mut count) = (0_u64, 0_u64, 0_u64);
    for member in case.members().await? {
        let pod = case.pods().get(&member.name_any()).await?;
        let shim = case.node.shim(&uid(&pod))?;
        memory += shim.pss_kib().context("the shim has ended")? << 10;
        for process in case.node.sandbox_processes(&uid(&pod))? {
            memory += process.pss_kib().unwrap_or_default() << 10;
        }
        for image in case.node.images_of(&case.namespace, &uid(&pod)) {
            for file in std::fs::read_dir(image)? {
                let found = file?.metadata()?;
                disk += found.blocks() * 512 * u64::from(found.nlink() == 1);
            }
        }
        count += 1;
    }
    let each = |bytes: u64| bytes as f64 / count.max(1) as f64 / 1e6;
    Ok((each(memory), each(disk)))
}
