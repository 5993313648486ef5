//! Damaged images and ledgers, and full disks: refused with a message, nothing lost, and usable
//! again after the repair.

use std::fs;
use std::io::Write as _;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use serde_json::{Value, json};
use torpor_api::annotations::{HIBERNATE, HIBERNATE_AFTER};
use torpor_api::conditions::{COMMITTED, POD_HIBERNATED, find};
use torpor_api::reasons::hibernated::SAVE_FAILED;
use torpor_api::snapshot::suspend_snapshot_name;
use torpor_tests::case::{Case, case, condition, uid};
use torpor_tests::fullness::FullDisk;
use torpor_tests::kubectl::Ran;
use torpor_tests::pods::{COUNT, annotated, mounts, pod, shell, shell_pod, with};
use torpor_tests::sandboxes::{LIMIT, sandbox};
use torpor_tests::sleep::{SLEEP_LIMIT, restarts};
use torpor_tests::{wait, witness};

/// Puts a counting Pod to sleep; returns the Pod, the number that it had reached, and its image.
async fn sleeper(case: &Case) -> anyhow::Result<(Pod, u64, PathBuf)> {
    let pod = case.start(shell_pod("p", COUNT)).await?;
    let counted = case.written("p", "a", "/n").await?.parse()?;
    case.hibernate("p").await?;
    let image = case.node.image_of(&case.namespace, &uid(&pod))?;
    Ok((pod, counted, image))
}

/// Checks that an exec is refused with all of `words`, and that the image still exists.
async fn exec_is_refused(case: &Case, image: &Path, words: &[&str]) -> anyhow::Result<()> {
    let ran = case.exec("p", "a", &["cat", "/n"]).await?;
    is_refusal(&ran, image, words)
}

fn is_refusal(ran: &Ran, image: &Path, words: &[&str]) -> anyhow::Result<()> {
    anyhow::ensure!(ran.code != 0, "the exec was not refused: {ran:?}");
    for word in words {
        anyhow::ensure!(ran.err.contains(word), "{word:?} is not in: {}", ran.err);
    }
    anyhow::ensure!(
        fs::symlink_metadata(image).is_ok(),
        "{} is gone",
        image.display()
    );
    Ok(())
}

/// Writes over a file without emptying it first.
///
/// The agent reads the ledger at any time: an empty one would mean a Pod that never slept, and the
/// agent would discard the Pod's image.
fn write_over(path: &Path, bytes: &[u8]) -> anyhow::Result<()> {
    let mut file = fs::OpenOptions::new().write(true).open(path)?;
    Ok(file.write_all(bytes)?)
}

/// Wakes the repaired Pod and checks that it is the one that went to sleep.
async fn wakes_as_it_was(case: &Case, counted: u64) -> anyhow::Result<()> {
    let awake = case.wake("p").await?;
    let now: u64 = case.written("p", "a", "/n").await?.parse()?;
    anyhow::ensure!(
        now >= counted && restarts(&awake) == 0,
        "{counted} → {now}, restarted"
    );
    Ok(())
}

fn flip_a_byte(path: &Path) -> anyhow::Result<()> {
    let mut bytes = fs::read(path)?;
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    Ok(fs::write(path, bytes)?)
}

/// Returns a claim for a volume of the node.
fn claim() -> Value {
    json!({
        "apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": { "name": "data" },
        "spec": { "accessModes": ["ReadWriteOnce"], "resources": { "requests": { "storage": "1Mi" } } },
    })
}

/// Returns a Pod's spec: the container, with that volume at /data.
fn on_claim(container: Value) -> Value {
    let volume = json!({ "volumeMounts": mounts(&[("data", "/data")]) });
    json!({
        "containers": [with(container, volume)],
        "volumes": [{ "name": "data", "persistentVolumeClaim": { "claimName": "data" } }],
    })
}

/// A deleted pipe that is still open on a volume of the node makes gVisor refuse the save.
///
/// gVisor saves what was deleted and is still open only if it is a file.
#[tokio::test]
async fn a_sandbox_that_gvisor_refuses_to_save_runs_on_with_a_reported_reason_and_delayed_retries()
-> anyhow::Result<()> {
    case("refused", async |case| {
        case.create(claim()).await?;
        let line =
            "mkfifo /data/pipe; exec 3<>/data/pipe; rm /data/pipe; echo kept >/mem; sleep 1000000";
        let spec = on_claim(shell("a", line));
        case.start(annotated(pod("p", spec), HIBERNATE_AFTER, "3s"))
            .await?;
        let failed = |pod: &Pod| condition(pod, POD_HIBERNATED).1 == SAVE_FAILED;
        let refused = case
            .pod_until("p", "gVisor refuses", SLEEP_LIMIT, failed)
            .await?;
        let told = condition(&refused, POD_HIBERNATED).2.to_owned();
        for word in [
            "attempt 1",
            "cannot save the sandbox",
            "deleted=true",
            "next attempt from",
        ] {
            anyhow::ensure!(told.contains(word), "{word:?} is not in: {told}");
        }
        // Without the refusal the save would have been tried again by now.
        tokio::time::sleep(Duration::from_secs(8)).await;
        let now = case.pods().get("p").await?;
        assert_eq!(condition(&now, POD_HIBERNATED).2, told, "asked again");
        let images = case.node.images_of(&case.namespace, &uid(&now));
        assert_eq!(images, Vec::<PathBuf>::new());
        // The same program runs as before.
        assert_eq!(case.sh("p", "a", "cat /mem").await?, "kept");
        assert_eq!(restarts(&case.pods().get("p").await?), 0);
        Ok(())
    })
    .await
}

/// A container ends while the shim, which would have noticed that, is stopped: an image without the
/// container could never be restored.
#[tokio::test]
async fn a_sandbox_that_has_just_lost_a_container_is_not_saved_without_it() -> anyhow::Result<()> {
    case("halved", async |case| {
        let pod = case.start(shell_pod("p", COUNT)).await?;
        let uid = uid(&pod);
        let shim = case.node.shim(&uid)?;
        let gofer = case.node.gofer_of(&uid, "a")?;
        shim.stop()?;
        gofer.kill()?;
        let asked = case.annotate("p", HIBERNATE, Some("true")).await;
        shim.go_on()?;
        asked?;
        // The kubelet starts the container again, and then the Pod sleeps as requested.
        let sleeps = |pod: &Pod| restarts(pod) == 1 && condition(pod, POD_HIBERNATED).0 == "True";
        let limit = SLEEP_LIMIT * 2;
        case.pod_until("p", "it sleeps with a new container", limit, sleeps)
            .await?;
        case.counted("p").await.map(drop)
    })
    .await
}

#[tokio::test]
async fn damage_to_any_file_of_an_image_is_named_and_mending_it_is_enough() -> anyhow::Result<()> {
    case("damage", async |case| {
        let (_, counted, image) = sleeper(case).await?;
        let id = image
            .file_name()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned();
        for name in [
            "pages.img",
            "pages_meta.img",
            "checkpoint.img",
            "manifest.json",
        ] {
            let path = image.join(name);
            let whole = fs::read(&path)?;
            let part = if name == "manifest.json" {
                "manifest"
            } else {
                name
            };
            let words = [id.as_str(), part, "start cold"];

            flip_a_byte(&path)?;
            exec_is_refused(case, &image, &words).await?;
            fs::write(&path, &whole[..whole.len() / 2])?;
            exec_is_refused(case, &image, &words).await?;
            fs::remove_file(&path)?;
            exec_is_refused(case, &image, &[&id]).await?;

            fs::write(&path, &whole)?;
            fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o600))?;
        }
        wakes_as_it_was(case, counted).await
    })
    .await
}

#[tokio::test]
async fn an_image_that_another_user_could_have_put_there_is_refused() -> anyhow::Result<()> {
    case("foreign", async |case| {
        let (_, counted, image) = sleeper(case).await?;
        let aside = image.with_file_name("aside");

        // A symbolic link in place of the directory, and in place of a file.
        fs::rename(&image, &aside)?;
        symlink(&aside, &image)?;
        exec_is_refused(case, &image, &["symbolic link"]).await?;
        fs::remove_file(&image)?;
        fs::rename(&aside, &image)?;
        let pages = image.join("pages.img");
        fs::rename(&pages, &aside)?;
        symlink(&aside, &pages)?;
        exec_is_refused(case, &image, &["pages.img"]).await?;
        fs::remove_file(&pages)?;
        fs::rename(&aside, &pages)?;

        // A file that does not belong there, and a file that everybody may write.
        fs::write(image.join("more"), "x")?;
        exec_is_refused(case, &image, &["more"]).await?;
        fs::remove_file(image.join("more"))?;
        fs::set_permissions(&pages, std::os::unix::fs::PermissionsExt::from_mode(0o666))?;
        exec_is_refused(case, &image, &["pages.img"]).await?;
        fs::set_permissions(&pages, std::os::unix::fs::PermissionsExt::from_mode(0o600))?;
        wakes_as_it_was(case, counted).await
    })
    .await
}

#[tokio::test]
async fn a_wake_that_fails_is_reported_on_the_pod_and_tried_again() -> anyhow::Result<()> {
    case("wakefails", async |case| {
        let (_, counted, image) = sleeper(case).await?;
        let pages = image.join("pages.img");
        let whole = fs::read(&pages)?;
        flip_a_byte(&pages)?;
        case.annotate("p", HIBERNATE, None).await?;
        let told = |pod: &Pod| {
            let (status, _, message) = condition(pod, POD_HIBERNATED);
            status == "True" && message.contains("pages.img") && message.contains("start cold")
        };
        case.pod_until("p", "its condition names the file", SLEEP_LIMIT, told)
            .await?;
        fs::write(&pages, &whole)?;
        wakes_as_it_was(case, counted).await
    })
    .await
}

/// The image is whole, but gVisor cannot restore it: it reopens what the program had open on a
/// volume, and that file is missing.
#[tokio::test]
async fn a_restore_that_fails_consumes_no_image_and_the_next_pod_has_the_memory()
-> anyhow::Result<()> {
    case("notused", async |case| {
        case.create(claim()).await?;
        let program = witness::container(5, &["/data/file"]);
        case.create(sandbox("s", on_claim(program))).await?;
        let before = witness::ask(&case.sandbox_ready("s").await?).await?;
        case.suspend("s").await?;
        let other = on_claim(shell("a", "exec sleep 1000000"));
        case.start(pod("other", other)).await?;
        let moves = async |line: &str| case.sh("other", "a", line).await;
        moves("mv /data/file /data/aside").await?;

        case.set_mode("s", "Running").await?;
        case.sandbox_has("s", "Restored", "False", "RestoreFailed")
            .await?;
        let failed = uid(&case.pods().get("s").await?);
        case.delete_pod_at_once("s").await?;
        let is_another = |pod: &Pod| uid(pod) != failed;
        case.pod_until("s", "another Pod comes", LIMIT, is_another)
            .await?;
        moves("mv /data/aside /data/file").await?;

        let pod = case.sandbox_ready("s").await?;
        case.sandbox_has("s", "Restored", "True", "Restored")
            .await?;
        witness::ask(&pod).await?.goes_on_from(&before)
    })
    .await
}

/// The agent looks every few seconds for the images of Pods that are gone.
#[tokio::test]
async fn a_missing_image_of_a_suspended_sandbox_is_reported_and_used_when_it_is_back()
-> anyhow::Result<()> {
    case("away", async |case| {
        let program = witness::container(5, &[]);
        case.create(sandbox("s", json!({ "containers": [program] })))
            .await?;
        let pod = case.sandbox_ready("s").await?;
        let before = witness::ask(&pod).await?;
        case.suspend("s").await?;
        let image = case.node.image_of(&case.namespace, &uid(&pod))?;
        let aside = image.with_file_name("aside");
        fs::rename(&image, &aside)?;
        symlink(&aside, &image)?;
        is_missed(case, &suspend_snapshot_name("s", &uid(&pod))).await?;

        case.set_mode("s", "Running").await?;
        case.sandbox_has("s", "Restored", "False", "ImageMissing")
            .await?;
        let made = case.pods().get_opt("s").await?;
        anyhow::ensure!(made.is_none(), "a Pod was made without the memory");

        fs::remove_file(&image)?;
        fs::rename(&aside, &image)?;
        let pod = case.sandbox_ready("s").await?;
        witness::ask(&pod).await?.goes_on_from(&before)
    })
    .await
}

/// Waits until the snapshot's condition reports that its image is missing.
async fn is_missed(case: &Case, snapshot: &str) -> anyhow::Result<()> {
    let words = format!("SandboxSnapshot {snapshot}: its image is missing");
    wait::object(case.snapshots(), snapshot, &words, LIMIT, |found| {
        let found = found.ok_or("there is no such SandboxSnapshot")?;
        match find(found.conditions(), COMMITTED) {
            Some(told) if told.status == "False" && told.reason == "ImageMissing" => Ok(()),
            told => Err(format!("{told:?}")),
        }
    })
    .await
}

#[tokio::test]
async fn a_ledger_that_cannot_be_trusted_stops_saves_and_wakes_and_is_named() -> anyhow::Result<()>
{
    case("ledger", async |case| {
        let (pod, counted, image) = sleeper(case).await?;
        let ledger = case.node.ledger_path(&uid(&pod));
        let whole = fs::read(&ledger)?;
        // The damage is in the first record: a torn last record would be left by a crash, and is no
        // damage.
        let mut damaged = whole.clone();
        damaged[whole.len() / 4] ^= 1;
        write_over(&ledger, &damaged)?;
        // Error that a user gets.
        let ran = case.kubectl.exec("p", "a", &["cat", "/n"]).await?;
        is_refusal(&ran, &image, &[&ledger.display().to_string()])?;
        let told = |pod: &Pod| condition(pod, POD_HIBERNATED).2.contains("ledger");
        case.pod_until("p", "its condition names the ledger", SLEEP_LIMIT, told)
            .await?;
        write_over(&ledger, &whole)?;
        wakes_as_it_was(case, counted).await
    })
    .await
}

#[tokio::test]
async fn a_full_disk_fails_the_save_and_the_sandbox_runs_on() -> anyhow::Result<()> {
    case("full", async |case| {
        let pod = case.start(shell_pod("p", COUNT)).await?;
        let dir = case.node.images_dir(&case.namespace);
        let disk = FullDisk::over(dir, 256 << 10)?;
        case.annotate("p", HIBERNATE, Some("true")).await?;
        let told = |pod: &Pod| {
            let (status, reason, message) = condition(pod, POD_HIBERNATED);
            status == "False"
                && reason == "SaveFailed"
                && ["DiskFull", "enlarge the disk"]
                    .iter()
                    .all(|word| message.contains(word))
        };
        case.pod_until(
            "p",
            "its condition says that the disk is full",
            SLEEP_LIMIT,
            told,
        )
        .await?;
        let first: u64 = case.written("p", "a", "/n").await?.parse()?;
        let runs_on = async || {
            let now: u64 = case.written("p", "a", "/n").await?.parse()?;
            torpor_tests::wait::holds(now > first, || format!("{first} → {now}"))
        };
        torpor_tests::wait::until("the sandbox runs on", Duration::from_secs(20), runs_on).await?;
        torpor_tests::wait::until(
            "the partial image is removed",
            Duration::from_secs(20),
            async || {
                let left = disk.content()?;
                torpor_tests::wait::holds(left.is_empty(), || format!("{left:?}"))
            },
        )
        .await?;
        // With room again the next attempt succeeds.
        drop(disk);
        case.asleep("p").await?;
        case.node.image_of(&case.namespace, &uid(&pod))?;
        wakes_as_it_was(case, first).await
    })
    .await
}

#[tokio::test]
async fn a_save_that_failed_is_tried_again_until_the_sandbox_is_suspended() -> anyhow::Result<()> {
    case("retried", async |case| {
        let counting = json!({ "containers": [shell("a", COUNT)] });
        case.create(sandbox("s", counting)).await?;
        case.sandbox_ready("s").await?;
        let before = case.counted("s").await?;
        let dir = case.node.images_dir(&case.namespace);
        let disk = FullDisk::over(dir, 64 << 10)?;
        case.set_mode("s", "Suspended").await?;
        case.sandbox_has("s", "Hibernated", "False", "SaveFailed")
            .await?;
        assert!(case.counted("s").await? >= before, "meanwhile it runs");
        drop(disk);
        case.sandbox_has("s", "Suspended", "True", "PodTerminated")
            .await?;
        case.resume("s").await?;
        assert!(case.counted("s").await? >= before);
        Ok(())
    })
    .await
}
