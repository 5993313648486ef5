//! Crashes of sandboxes that are awake, and the image that is kept for a crash.

use torpor_api::annotations::ON_CRASH;
use torpor_api::conditions::POD_RESTORED;
use torpor_api::reasons::restored;
use torpor_tests::case::{Case, START_LIMIT, case, condition, uid};
use torpor_tests::pods::{annotated, shell_pod};
use torpor_tests::sleep::SLEEP_LIMIT;
use torpor_tests::wait;

/// Shell line of an idle program.
const IDLE: &str = "sleep 1000000";
/// Shell line that writes a random id at its start into the sandbox's own files: only an image
/// brings the id back.
const BEGINNING: &str = "cat /proc/sys/kernel/random/uuid >/begun; sleep 1000000";

/// Puts the Pod to sleep once, wakes it, writes a file and kills it; returns the id of its start.
async fn crash_awake(case: &Case, pod: &str) -> anyhow::Result<String> {
    let begun = case.written(pod, "a", "/begun").await?;
    case.hibernate(pod).await?;
    let awake = case.wake(pod).await?;
    case.sh(pod, "a", "touch /later").await?;
    case.node.sentry(&uid(&awake))?.kill()?;
    Ok(begun)
}

/// Waits until the next sandbox has the right files.
async fn found_after(
    case: &Case,
    pod: &str,
    is_right: impl Fn(&str) -> bool,
) -> anyhow::Result<()> {
    wait::until("another sandbox", START_LIMIT, async || {
        let found = case.sh(pod, "a", "cat /begun; ls /later || true").await;
        wait::holds(found.as_ref().is_ok_and(|found| is_right(found)), || {
            format!("{found:?}")
        })
    })
    .await
}

#[tokio::test]
async fn a_sandbox_that_crashes_awake_is_rolled_back_to_its_last_image_only_on_request()
-> anyhow::Result<()> {
    case("oncrash", async |case| {
        let pod = |name| shell_pod(name, BEGINNING);
        case.create(annotated(pod("back"), ON_CRASH, "LastImage"))
            .await?;
        case.create(pod("anew")).await?;
        for name in ["back", "anew"] {
            case.ready(name).await?;
        }
        let begun = crash_awake(case, "anew").await?;
        found_after(case, "anew", |found| !found.contains(&begun)).await?;
        let anew = case.pods().get("anew").await?;
        assert_eq!(condition(&anew, POD_RESTORED).1, "");
        // The changes since the image are lost.
        let begun = crash_awake(case, "back").await?;
        found_after(case, "back", |found| found == begun).await?;
        let told = |pod: &k8s_openapi::api::core::v1::Pod| {
            let (status, reason, message) = condition(pod, POD_RESTORED);
            status == "True" && reason == restored::ROLLED_BACK && message.contains(" s before")
        };
        let back = case
            .pod_until(
                "back",
                "its condition reports the roll back",
                SLEEP_LIMIT,
                told,
            )
            .await?;
        // A second roll back is possible.
        let images = case.node.images_of(&case.namespace, &uid(&back));
        assert_eq!(images.len(), 1, "{images:?}");
        case.node.sentry(&uid(&back))?.kill()?;
        found_after(case, "back", |found| found == begun).await
    })
    .await
}

#[tokio::test]
async fn an_image_kept_for_a_crash_is_removed_once_the_annotation_is_gone() -> anyhow::Result<()> {
    case("oncrashoff", async |case| {
        case.start(annotated(shell_pod("p", IDLE), ON_CRASH, "LastImage"))
            .await?;
        case.hibernate("p").await?;
        let uid = uid(&case.wake("p").await?);
        let images = || case.node.images_of(&case.namespace, &uid);
        assert_eq!(images().len(), 1);
        case.annotate("p", ON_CRASH, None).await?;
        case.no_image_left(&uid).await
    })
    .await
}
