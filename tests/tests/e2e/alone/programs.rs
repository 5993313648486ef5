//! The programs of all sandboxes stay in main memory.
//!
//! Runs alone: a Pod of another test that dozes has the programs read again too, and one that runs
//! keeps them.

use std::fs::File;
use std::path::Path;

use anyhow::Context;
use rustix::fs::Advice;
use tokio::process::Command;
use torpor_api::annotations::DOZE_AFTER;
use torpor_runsc::programs;
use torpor_tests::case::case_alone;
use torpor_tests::pods::{annotated, shell_pod};
use torpor_tests::sleep::SLEEP_LIMIT;
use torpor_tests::swap::Swap;
use torpor_tests::wait;

/// Returns the bytes of a file that are in main memory.
async fn resident(file: &Path) -> anyhow::Result<u64> {
    let mut fincore = Command::new("fincore");
    fincore.args(["--bytes", "--noheadings", "--output", "RES"]);
    let said = fincore.arg(file).output().await?;
    let said = String::from_utf8(said.stdout)?;
    said.trim()
        .parse()
        .with_context(|| format!("fincore: {said:?}"))
}

/// The reclaim of a Pod's memory takes along the pages of files that the Pod touched first.
#[tokio::test]
async fn programs_of_all_sandboxes_are_in_main_memory_after_a_doze() -> anyhow::Result<()> {
    let _swap = Swap::on()?;
    case_alone("dozeprograms", async |case| {
        let sleepy = annotated(shell_pod("p", "sleep 1000000"), DOZE_AFTER, "6s");
        case.start(sleepy).await?;
        let runsc = &case.node.config.runsc;
        let wanted = programs::keep_in_memory(runsc)?;
        // Only pages that no process uses at this moment can be dropped.
        wait::until("some of it is on the disk", SLEEP_LIMIT, async || {
            rustix::fs::fadvise(File::open(runsc)?, 0, None, Advice::DontNeed)?;
            let left = resident(runsc).await?;
            wait::holds(left < wanted * 19 / 20, || {
                format!("{left} of {wanted} bytes")
            })
        })
        .await?;
        case.dozes("p").await?;
        wait::until("it was read again", SLEEP_LIMIT, async || {
            let found = resident(runsc).await?;
            wait::holds(found >= wanted * 19 / 20, || {
                format!("{found} of {wanted} bytes")
            })
        })
        .await
    })
    .await
}
