//! The agent is killed at any moment of a save or a wake: nothing is lost, nothing partial stays.

use std::time::Duration;

use torpor_api::annotations::HIBERNATE;
use torpor_tests::agent::Agent;
use torpor_tests::case::{case_alone, uid};
use torpor_tests::pods::{COUNT, shell_pod};
use torpor_tests::sleep::restarts;

const PODS: [&str; 4] = ["p0", "p1", "p2", "p3"];
/// Delays before a kill.
///
/// A save of a small sandbox takes about 100 ms, a wake about 200: with the Pods' different starts
/// the delays fall into every stage of both.
const DELAYS_MS: [u64; 6] = [20, 45, 110, 75, 200, 150];
const BETWEEN_PODS: Duration = Duration::from_millis(15);

#[tokio::test]
async fn nothing_is_lost_when_the_agent_is_killed_at_any_moment() -> anyhow::Result<()> {
    case_alone("crash", async |case| {
        let mut before = [0; PODS.len()];
        for name in PODS {
            case.create(shell_pod(name, COUNT)).await?;
        }
        for name in PODS {
            case.ready(name).await?;
        }
        for (round, delay) in DELAYS_MS.iter().enumerate() {
            // In even rounds the Pods fall asleep, in odd ones they wake.
            let wish = (round % 2 == 0).then_some("true");
            for name in PODS {
                case.annotate(name, HIBERNATE, wish).await?;
                tokio::time::sleep(BETWEEN_PODS).await;
            }
            tokio::time::sleep(Duration::from_millis(*delay)).await;
            Agent::running()
                .await?
                .kill_and_replace(case.client())
                .await?;
            if wish.is_none() {
                for (name, before) in PODS.iter().zip(&mut before) {
                    let now = case.counted(name).await?;
                    anyhow::ensure!(now >= *before, "{name} after {delay} ms: {before} → {now}");
                    *before = now;
                }
            }
        }
        for name in PODS {
            let awake = case.wake(name).await?;
            anyhow::ensure!(restarts(&awake) == 0, "{name} was restarted");
            case.no_image_left(&uid(&awake)).await?;
        }
        Ok(())
    })
    .await
}
