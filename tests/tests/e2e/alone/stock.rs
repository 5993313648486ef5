//! gVisor's program as its module builds it, without Torpor's file and linker flag, instead of the
//! shipped one.

use anyhow::{Context, ensure};
use serde_json::json;
use torpor_records::config::Config;
use torpor_tests::agent::Agent;
use torpor_tests::case::{case_alone, uid};
use torpor_tests::pods::{COUNT, shell_pod};
use torpor_tests::sandboxes::sandbox;
use torpor_tests::sleep::restarts;
use torpor_tests::witness;

/// Environment variable: path of that program. `hack/cluster stock-runsc` builds the program and
/// prints the path.
const STOCK: &str = "TORPOR_STOCK_RUNSC";

#[tokio::test]
async fn a_stock_runsc_that_the_installer_is_given_hibernates_and_wakes() -> anyhow::Result<()> {
    case_alone("stock", async |case| {
        Agent::settled(case).await?;
        let stock = std::env::var(STOCK);
        let stock = stock
            .with_context(|| format!("set {STOCK} to what `hack/cluster stock-runsc` prints"))?;
        let shipped = Config::read(&case.node.config_file())?;
        let mut saved = None;
        let install =
            json!({ "name": "install", "env": [{ "name": "TORPOR_RUNSC", "value": stock }] });
        let patch = json!({ "spec": { "template": { "spec": { "initContainers": [install] } } } });
        Agent::with_installer_patch(case, &patch.to_string(), async || {
            let now = Config::read(&case.node.config_file())?;
            ensure!(
                now.runsc_digest != shipped.runsc_digest,
                "the shipped one is installed"
            );
            let pod = case.start(shell_pod("p", COUNT)).await?;
            let record = case.node.sandbox_of(&uid(&pod))?;
            ensure!(record.runsc_digest == now.runsc_digest, "{record:?}");
            let suspended = json!({ "containers": [witness::container(5, &[])] });
            case.create(sandbox("s", suspended)).await?;
            saved = Some(witness::ask(&case.sandbox_ready("s").await?).await?);
            case.suspend("s").await?;
            let mut before = case.counted("p").await?;
            // The first wake is made by runsc or by Torpor; the second one is of a restored
            // sandbox.
            for _ in 0..2 {
                case.hibernate("p").await?;
                let awake = case.wake("p").await?;
                ensure!(restarts(&awake) == 0, "it was restarted");
                let counted = case.counted("p").await?;
                ensure!(counted >= before, "{before} → {counted}");
                before = counted;
            }
            Ok(())
        })
        .await?;
        Agent::settled(case).await?;
        let back = Config::read(&case.node.config_file())?;
        ensure!(
            back.runsc_digest == shipped.runsc_digest,
            "the shipped one is not back"
        );
        // A Pod keeps the build that began it.
        let before = case.counted("p").await?;
        case.hibernate("p").await?;
        case.wake("p").await?;
        ensure!(case.counted("p").await? >= before, "it began anew");
        // So does a suspended Sandbox.
        let saved = saved.context("nothing was suspended")?;
        let resumed = case.resume("s").await?;
        witness::ask(&resumed).await?.goes_on_from(&saved)?;
        let record = case.node.sandbox_of(&uid(&resumed))?;
        ensure!(record.runsc_digest != back.runsc_digest, "{record:?}");
        Ok(())
    })
    .await
}
