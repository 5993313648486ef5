//! Encryption keys of repositories that a KMS plug-in seals, and their rotation: `deploy/kms` with
//! the plug-in of `hack/kms.yaml`.

use anyhow::{Context, ensure};
use k8s_openapi::api::apps::v1::DaemonSet;
use k8s_openapi::api::core::v1::Secret;
use kube::Api;
use kube::api::{Patch, PatchParams};
use serde_json::{Value, json};
use torpor_tests::agent::NAMESPACE;
use torpor_tests::case::Case;
use torpor_tests::kubectl::Kubectl;
use torpor_tests::two_nodes::objects;
use torpor_tests::{wait, witness};

use super::{LIMIT, case_within, continues_on, start_on, upload_is};

const PLUGIN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../hack/kms.yaml");
const COMPONENT: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/../deploy/kms/kustomization.yaml"
);
/// Objects that the component changes.
const PARTS: [&str; 2] = [
    "daemonset/torpor-agent",
    "deployment/agent-sandbox-controller",
];
const KEYS: &str = "torpor-repository-keys";
/// Time of the test: Torpor is rolled out five times.
const TEST: std::time::Duration = std::time::Duration::from_secs(900);

/// Torpor's namespace as it was before the test.
struct System {
    kubectl: Kubectl,
    keys: String,
    templates: Vec<Value>,
}

impl System {
    async fn of(case: &Case) -> anyhow::Result<Self> {
        let kubectl = Kubectl {
            namespace: NAMESPACE.to_owned(),
            ..case.kubectl.clone()
        };
        let mut templates = Vec::new();
        for part in PARTS {
            let get = ["get", part, "-o", "jsonpath={.spec.template}"];
            templates.push(serde_json::from_str(&kubectl.ok(&get).await?)?);
        }
        let keys = secrets(case).get(KEYS).await?.data.unwrap_or_default();
        let keys = keys.get("keys").context("the Secret has no keys")?;
        let keys = String::from_utf8(keys.0.clone())?;
        Ok(Self {
            kubectl,
            keys,
            templates,
        })
    }

    /// Adds `deploy/kms` to what runs.
    async fn add_component(&self) -> anyhow::Result<()> {
        let component: Value = serde_saphyr::from_str(&std::fs::read_to_string(COMPONENT)?)?;
        for (part, patch) in PARTS
            .iter()
            .zip(component["patches"].as_array().context("none")?)
        {
            let named = format!("/{}", patch["target"]["name"].as_str().unwrap_or_default());
            ensure!(part.ends_with(&named), "{part} is not {named}");
            let patch = patch["patch"].as_str().context("no patch")?;
            self.kubectl
                .ok(&["patch", part, "--type=json", "-p", patch])
                .await?;
        }
        self.rolled_out().await
    }

    /// Puts everything back, as far as possible; returns the first error.
    async fn put_back(&self, case: &Case) -> anyhow::Result<()> {
        let mut done = vec![set_keys(case, &self.keys).await];
        for (part, template) in PARTS.iter().zip(&self.templates) {
            let patch = json!({ "spec": { "template": template } }).to_string();
            let patch = ["patch", part, "--type=merge", "-p", &patch];
            done.push(self.kubectl.ok(&patch).await.map(drop));
        }
        let delete = ["delete", "--ignore-not-found", "-f", PLUGIN];
        done.push(self.kubectl.ok(&delete).await.map(drop));
        done.push(self.restart().await);
        done.into_iter().collect()
    }

    /// Restarts Torpor, so that its Pods have the Secret as it is now.
    async fn restart(&self) -> anyhow::Result<()> {
        for part in PARTS {
            self.kubectl.ok(&["rollout", "restart", part]).await?;
        }
        self.rolled_out().await
    }

    async fn rolled_out(&self) -> anyhow::Result<()> {
        for part in PARTS {
            wait::until(part, LIMIT, async || {
                let status = ["rollout", "status", part, "--timeout=20s"];
                let ran = self.kubectl.run(&status).await?;
                Ok(if ran.code == 0 { Ok(()) } else { Err(ran.err) })
            })
            .await?;
        }
        Ok(())
    }

    /// Starts the plug-in on all nodes.
    async fn start_plugin(&self, case: &Case) -> anyhow::Result<()> {
        self.kubectl.ok(&["apply", "-f", PLUGIN]).await?;
        let sets: Api<DaemonSet> = Api::namespaced(case.client(), NAMESPACE);
        wait::object(sets, "kms", "runs on both nodes", LIMIT, |set| {
            let ready = set.and_then(|set| set.status).map(|one| one.number_ready);
            if ready == Some(2) {
                Ok(())
            } else {
                Err(format!("{ready:?} are ready"))
            }
        })
        .await
    }

    /// Seals lines of keys in an agent.
    async fn seal_keys(&self, lines: &str, more: &[&str]) -> anyhow::Result<String> {
        let mut command = vec!["exec", "-i", PARTS[0], "-c", "agent", "--"];
        command.extend(["torpor-agent", "seal-keys"]);
        command.extend(more);
        let sealed = self.kubectl.run_with(&command, Some(lines.as_bytes()));
        Ok(sealed.await?.ok()? + "\n")
    }
}

fn secrets(case: &Case) -> Api<Secret> {
    Api::namespaced(case.client(), NAMESPACE)
}

async fn set_keys(case: &Case, keys: &str) -> anyhow::Result<()> {
    let patch = Patch::Merge(json!({ "data": null, "stringData": { "keys": keys } }));
    secrets(case)
        .patch(KEYS, &PatchParams::default(), &patch)
        .await?;
    Ok(())
}

/// Returns the ids of the keys of all indexes in the bucket.
fn keys_in_use(case: &Case) -> anyhow::Result<Vec<String>> {
    let indexes = objects(case, "/images/").into_iter();
    let keys = indexes.map(|path| {
        let bytes = std::fs::read(path)?;
        let line = bytes.split(|byte| *byte == b'\n').next();
        let header: Value = serde_json::from_slice(line.unwrap_or_default())?;
        let key = header["key"]["id"].as_str();
        Ok(key.context("the index is in clear")?.to_owned())
    });
    keys.collect()
}

#[tokio::test]
async fn images_are_read_by_a_key_that_only_a_kms_opens_and_rotation_keeps_them()
-> anyhow::Result<()> {
    case_within(TEST, "nodes-kms", async |case| {
        let system = System::of(case).await?;
        let done = keys_are_sealed_and_rotated(case, &system).await;
        let back = system.put_back(case).await;
        done.and(back)
    })
    .await
}

async fn keys_are_sealed_and_rotated(case: &Case, system: &System) -> anyhow::Result<()> {
    let first = start_on(case, "node-0", 5).await?;
    let before = witness::ask(&first).await?;
    case.suspend("s").await?;
    upload_is(case, "True", "Uploaded").await?;
    ensure!(keys_in_use(case)? == ["dev"]);

    system.start_plugin(case).await?;
    system.add_component().await?;
    let lines = system.seal_keys(&system.keys, &["--add", "sealed"]).await?;
    let ids: Vec<&str> = lines
        .lines()
        .filter_map(|line| line.split(':').next())
        .collect();
    ensure!(ids == ["sealed", "dev"], "{ids:?}");
    ensure!(
        lines.lines().all(|line| line.contains(":kms:")),
        "a key is in clear"
    );
    set_keys(case, &lines).await?;
    system.restart().await?;

    // The second sweep that finds the new key wraps the image's key with it.
    wait::until("no image needs the older key", LIMIT, async || {
        let keys = keys_in_use(case)?;
        wait::holds(keys == ["sealed"], || format!("{keys:?}"))
    })
    .await?;
    let newest = lines.lines().next().unwrap_or_default();
    set_keys(case, newest).await?;
    system.restart().await?;
    case.cordon("node-0", true).await?;
    let second = case.resume("s").await?;
    continues_on(&second, "node-1", &before).await?;

    // Without the KMS an agent that has just started opens no key.
    system.kubectl.ok(&["delete", "-f", PLUGIN]).await?;
    system.restart().await?;
    case.suspend("s").await?;
    let shut = upload_is(case, "False", "KeyServiceUnavailable").await?;
    let message = serde_json::to_string(&shut.status)?;
    ensure!(message.contains("/run/torpor-kms/kms.sock"), "{message}");
    system.start_plugin(case).await?;
    upload_is(case, "True", "Uploaded").await?;
    ensure!(keys_in_use(case)?.iter().all(|key| key == "sealed"));
    Ok(())
}
