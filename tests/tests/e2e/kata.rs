//! The driver of Kata: against the real containerd with containers of runc, which it pauses as it
//! pauses Kata's, and against Kata where a node has it.

use std::path::Path;
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::node::v1::RuntimeClass;
use kube::ResourceExt;
use kube::api::{Api, ListParams};
use serde_json::json;
use torpor_api::annotations::DOZE_AFTER;
use torpor_core::ids::PodUid;
use torpor_core::state::Live;
use torpor_core::steps::{Action, Outcome};
use torpor_kata::containerd::Containerd;
use torpor_kata::driver::{Driver, Seen};
use torpor_tests::case::{Case, case, uid};
use torpor_tests::node::containerd_socket;
use torpor_tests::pods::{COUNT, pod, shell, shell_pod, with};
use torpor_tests::sleep::restarts;
use torpor_tests::swap::Swap;
use torpor_tests::wait;

const LIMIT: Duration = Duration::from_secs(20);
/// Bytes of memory that the test's program holds.
const HELD: u64 = 32 << 20;

struct Subject {
    driver: Driver,
    pod: PodUid,
}

impl Subject {
    async fn of(pod: &Pod) -> anyhow::Result<Self> {
        let containerd = Containerd::at(
            &containerd_socket()?,
            tokio::runtime::Handle::current(),
            LIMIT,
        );
        let runtimes = vec!["io.containerd.runc.v2".to_owned()];
        Ok(Self {
            driver: Driver::new(containerd, runtimes, Path::new("/sys/fs/cgroup"))?,
            pod: PodUid::new(uid(pod))?,
        })
    }

    fn look(&self) -> anyhow::Result<Seen> {
        let seen = self.driver.look(&self.pod)?;
        seen.ok_or_else(|| anyhow::anyhow!("the Pod has no sandbox"))
    }

    /// Acts on a thread that may block, as the agent does.
    async fn act(self, action: Action) -> anyhow::Result<(Self, Outcome)> {
        let done = tokio::task::spawn_blocking(move || {
            let seen = self.look()?;
            let outcome = self.driver.act(&seen.sandbox, &action);
            anyhow::Ok((self, outcome))
        });
        done.await?
    }

    async fn live(self) -> anyhow::Result<(Self, Live)> {
        let looked = tokio::task::spawn_blocking(move || {
            let live = self.look()?.standing.live;
            anyhow::Ok((self, live))
        });
        looked.await?
    }
}

async fn counted(case: &Case) -> anyhow::Result<u64> {
    let text = case.written("p", "b", "/n").await?;
    Ok(text.trim().parse()?)
}

#[tokio::test]
async fn containerd_pauses_and_resumes_a_pod_as_the_driver_expects_and_its_memory_goes_to_swap()
-> anyhow::Result<()> {
    case("kata-driver", async |case| {
        let _swap = Swap::on()?;
        // One shell holds a string, the other one counts.
        let holds = format!(
            "x=$(head -c {HELD} /dev/zero | tr '\\0' x); echo held; while true; do sleep 1; done"
        );
        let mut manifest = pod(
            "p",
            json!({ "containers": [shell("a", &holds), shell("b", COUNT)] }),
        );
        manifest["spec"]["runtimeClassName"] = serde_json::Value::Null;
        let pod = case.start(manifest).await?;
        case.sh("p", "b", "until [ -e /n ]; do sleep 0.1; done")
            .await?;
        torpor_tests::wait::until("the memory to be held", LIMIT, async || {
            let log = case.log("p", "a").await?;
            torpor_tests::wait::holds(log.contains("held"), || log.clone())
        })
        .await?;
        let subject = Subject::of(&pod).await?;
        let (subject, live) = subject.live().await?;
        assert_eq!(live, Live::Running);
        // The sandbox runs, so nothing is reclaimed.
        let (subject, refused) = subject.act(Action::Reclaim { image: None }).await?;
        assert!(
            matches!(&refused, Outcome::Failed { reason, .. } if reason == "NotPaused"),
            "{refused:?}"
        );
        // runc gives up a pause while processes of the container start ("unable to freeze", its
        // freezer of cgroup v1). The agent repeats it at its next turn.
        torpor_tests::wait::until("the Pod to be paused", LIMIT, async || {
            let (_, outcome) = Subject::of(&pod).await?.act(Action::Doze).await?;
            torpor_tests::wait::holds(outcome == Outcome::Done, || format!("{outcome:?}"))
        })
        .await?;
        let (again, outcome) = Subject::of(&pod).await?.act(Action::Doze).await?;
        assert_eq!(
            (outcome, again.live().await?.1),
            (Outcome::Already, Live::Paused)
        );
        let before = subject
            .driver
            .working_set(&blocking_look(&pod).await?.sandbox);
        let (subject, outcome) = subject.act(Action::Reclaim { image: None }).await?;
        assert_eq!(outcome, Outcome::Done);
        let after = subject
            .driver
            .working_set(&blocking_look(&pod).await?.sandbox);
        let gone = before
            .zip(after)
            .map(|(before, after)| before.saturating_sub(after));
        assert!(
            gone > Some(HELD * 3 / 4),
            "of {before:?} bytes {after:?} are left"
        );
        // A user who does not wake the Pod first gets this error.
        let refused = case.kubectl.exec("p", "b", &["true"]).await?.ok();
        let words = format!("{:#}", refused.expect_err("the container is paused"));
        assert!(words.contains("paused"), "{words}");
        for expected in [Outcome::Done, Outcome::Already] {
            let (again, outcome) = Subject::of(&pod).await?.act(Action::Resume).await?;
            assert_eq!((outcome, again.live().await?.1), (expected, Live::Running));
        }
        let first = counted(case).await?;
        torpor_tests::wait::until("the program to count on", LIMIT, async || {
            let now = counted(case).await?;
            torpor_tests::wait::holds(now > first, || format!("{now} after {first}"))
        })
        .await?;
        assert_eq!(restarts(&case.pods().get("p").await?), 0);
        Ok(())
    })
    .await
}

async fn blocking_look(pod: &Pod) -> anyhow::Result<Seen> {
    let subject = Subject::of(pod).await?;
    tokio::task::spawn_blocking(move || subject.look()).await?
}

/// Returns the name of a RuntimeClass of Kata, if this cluster has one.
pub(crate) async fn kata_class(case: &Case) -> anyhow::Result<Option<String>> {
    let classes: Api<RuntimeClass> = Api::all(case.client());
    let classes = classes.list(&ListParams::default()).await?;
    let kata = classes
        .iter()
        .find(|class| class.handler.starts_with("kata"));
    Ok(kata.map(ResourceExt::name_any))
}

#[tokio::test]
async fn a_kata_sandbox_dozes_and_a_packet_wakes_it() -> anyhow::Result<()> {
    case("kata-doze", async |case| {
        let Some(class) = kata_class(case).await? else {
            eprintln!("NOT RUN: this cluster has no RuntimeClass of Kata, so no sandbox of Kata was paused, reclaimed or woken");
            return Ok(());
        };
        let _swap = Swap::on()?;
        let base = shell_pod("p", "nc -lk -p 8080 -e cat");
        let manifest = with(base, json!({
            "metadata": { "annotations": { DOZE_AFTER: "10s" } },
            "spec": { "runtimeClassName": class },
        }));
        let pod = case.start(manifest).await?;
        case.dozes("p").await?;
        let address = pod.status.and_then(|status| status.pod_ip).unwrap_or_default();
        let mut stream = tokio::net::TcpStream::connect((address.as_str(), 8080)).await?;
        tokio::io::AsyncWriteExt::write_all(&mut stream, b"?").await?;
        let mut answer = [0; 1];
        let read = tokio::io::AsyncReadExt::read_exact(&mut stream, &mut answer);
        tokio::time::timeout(wait::scaled(LIMIT), read).await??;
        assert_eq!(&answer, b"?");
        Ok(())
    })
    .await
}
