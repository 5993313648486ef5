//! The rights of the agent's user on a node: what an agent that is taken over can touch.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, ensure};
use rustix::fs::{Gid, Uid};
use rustix::thread::{set_thread_res_gid, set_thread_res_uid};
use torpor_core::state::Live;
use torpor_messages::service::{self, Answer, Request};
use torpor_runsc::command::NodeRunsc;
use torpor_snapshots::AGENT_ID;
use torpor_tests::agent::Agent;
use torpor_tests::case::{case, uid};
use torpor_tests::pods::{COUNT, shell_pod};

const LIMIT: Duration = Duration::from_secs(10);

/// Returns the paths below a directory that `find` prints as the agent's user with this test.
fn found(dir: &Path, test: &[&str]) -> anyhow::Result<Vec<String>> {
    let ids = [format!("--reuid={AGENT_ID}"), format!("--regid={AGENT_ID}")];
    let ran = Command::new("setpriv")
        .args(ids)
        .args(["--clear-groups", "--no-new-privs", "find"])
        .arg(dir)
        .args(test)
        .output()
        .context("cannot run setpriv and find")?;
    // find fails where it may not enter a directory.
    let text = String::from_utf8(ran.stdout)?;
    Ok(text.lines().map(str::to_owned).collect())
}

#[tokio::test]
async fn the_agents_user_writes_images_and_its_own_notes_and_nothing_that_a_shim_runs()
-> anyhow::Result<()> {
    case("agentuser", async |case| {
        let pod = case.start(shell_pod("p", COUNT)).await?;
        case.hibernate("p").await?;
        case.wake("p").await?;
        let config = &case.node.config;
        let state = &config.state_dir;
        let sandbox = case.node.sandbox_of(&uid(&pod))?.sandbox;
        let pod_dir = case.node.records.pod_dir(&sandbox);
        ensure!(
            found(&pod_dir, &["-readable", "-name", "pod.json"])?.len() == 1,
            "the check sees no record"
        );
        let reports = state.join("reports");
        let is_own = |path: &String| {
            Path::new(path).starts_with(&reports) || path.ends_with(service::SOCKET)
        };
        let mut written = found(state, &["-writable", "!", "-type", "l"])?;
        written.retain(|path| !is_own(path));
        ensure!(written.is_empty(), "the agent may write {written:?}");
        let programs = config.runsc.parent().context("runsc has a directory")?;
        let programs = found(programs, &["-writable", "!", "-type", "l"])?;
        ensure!(programs.is_empty(), "the agent may write {programs:?}");
        // The OCI specs have the programs' environment; the keepers and gVisor obey who connects.
        let control = NodeRunsc::new(config).root_of(&sandbox);
        let mut dirs = vec![pod_dir, control];
        for container in case.node.records.containers_of(&sandbox)? {
            dirs.push(case.node.records.container_dir(&container.id));
        }
        ensure!(dirs.len() == 4, "the check sees no containers: {dirs:?}");
        for dir in dirs {
            for (secret, right) in [
                ("config.json", "-readable"),
                ("lock", "-readable"),
                ("keeper.sock", "-writable"),
                ("runsc-*.sock", "-writable"),
            ] {
                let open = found(&dir, &["-name", secret, right])?;
                ensure!(open.is_empty(), "the agent may open {open:?}");
            }
        }
        let images = found(
            &config.store_dir.join("images"),
            &["-type", "d", "-writable"],
        )?;
        ensure!(!images.is_empty(), "the agent cannot remove images");
        Ok(())
    })
    .await
}

/// Observes the sandbox as another user of this machine.
fn observe_as(user: u32, dir: &Path) -> anyhow::Result<Result<Answer, service::Error>> {
    let dir = dir.to_owned();
    let asked = std::thread::spawn(move || -> anyhow::Result<_> {
        let (group, user) = (Gid::from_raw(AGENT_ID), Uid::from_raw(user));
        // Of this thread only.
        set_thread_res_gid(group, group, group)?;
        set_thread_res_uid(user, user, user)?;
        Ok(service::ask(&dir, Request::Observe { idle: false }, LIMIT))
    });
    asked.join().map_err(|_| anyhow::anyhow!("a panic"))?
}

#[tokio::test]
async fn a_shim_answers_the_agent_and_no_other_user() -> anyhow::Result<()> {
    case("shimuser", async |case| {
        let pod = case.start(shell_pod("p", COUNT)).await?;
        let sandbox = case.node.sandbox_of(&uid(&pod))?.sandbox;
        let dir = case.node.records.pod_dir(&sandbox);
        let Answer::Observed(observed) = observe_as(AGENT_ID, &dir)?? else {
            anyhow::bail!("no observation");
        };
        ensure!(observed.basis.live == Live::Running, "{observed:?}");
        // A user of the agent's group may connect, and is sent away.
        let other = observe_as(AGENT_ID - 1, &dir)?;
        ensure!(other.is_err_and(|error| error.is_end()), "it was served");
        Ok(())
    })
    .await
}

#[tokio::test]
async fn the_agents_process_has_a_user_of_its_own_and_no_capability() -> anyhow::Result<()> {
    let agent = Agent::running().await?;
    let status = std::fs::read_to_string(format!("/proc/{}/status", agent.process.pid))?;
    let line = |name: &str| status.lines().find_map(|line| line.strip_prefix(name));
    let user = format!("\t{AGENT_ID}").repeat(4);
    assert_eq!(line("Uid:"), Some(user.as_str()));
    assert_eq!(line("CapEff:"), Some("\t0000000000000000"));
    assert_eq!(line("NoNewPrivs:"), Some("\t1"));
    Ok(())
}
