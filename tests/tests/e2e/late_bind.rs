//! Late binding: what a claim brings reaches a member of a pool that runs already, or that sleeps
//! in a golden image, and the claim is Ready once it has arrived.

use std::path::Path;

use anyhow::{Context, ensure};
use k8s_openapi::api::authentication::v1::TokenReview;
use kube::api::{DeleteParams, PostParams};
use serde_json::{Value, json};
use torpor_api::SandboxClaim;
use torpor_api::annotations::{
    CLAIM_FILES, FORK_OF, GOLDEN, HEAT, INJECT_RUNTIME, LATE_BIND, ON_CLAIM_EXEC,
};
use torpor_api::conditions::{POD_BOUND, find};
use torpor_api::labels::LAUNCH_TYPE;
use torpor_tests::case::{Case, case, condition, uid};
use torpor_tests::forward::Forward;
use torpor_tests::pods::{annotated, pod_spec, shell, with};
use torpor_tests::pools::extension;
use torpor_tests::sandboxes::LIMIT;
use torpor_tests::sleep::restarts;
use torpor_tests::wait;

/// Command of a claim that counts its runs.
const COUNT: &str = r#"["sh","-c","echo $TORPOR_CLAIM $TASK >>/ran"]"#;
const WAIT: &str = "while :; do sleep 1; done";
/// Value of a variable that occurs nowhere else.
const SECRET: &str = "it's 4f1e9c77d0b2 $HOME";

/// Creates a template with these annotations, and a pool of one member.
async fn pool(case: &Case, on_template: &[(&str, &str)], heat: &str) -> anyhow::Result<()> {
    let spec = pod_spec(json!({ "containers": [shell("a", WAIT), shell("b", WAIT)] }));
    let spec = json!({
        "envVarsInjectionPolicy": "Allowed",
        "podTemplate": { "spec": spec },
    });
    let mut template = extension("SandboxTemplate", "t", spec);
    for (key, value) in on_template {
        template = annotated(template, key, value);
    }
    case.create(template).await?;
    let pool = json!({ "replicas": 1, "sandboxTemplateRef": { "name": "t" } });
    let pool = extension("SandboxWarmPool", "w", pool);
    case.create(annotated(pool, HEAT, heat)).await?;
    case.pool_is_ready("w", 1).await
}

/// Claims with the variable; returns the name of the Sandbox, which was a member of the pool.
async fn claim(case: &Case, name: &str) -> anyhow::Result<String> {
    let env = json!({ "env": [{ "name": "TASK", "value": SECRET }] });
    case.begin_claim("w", name, env).await?;
    let sandbox = case.claimed(name).await?;
    let taken = case.sandboxes().get(&sandbox).await?;
    let launched = taken.metadata.labels.context("labels")?;
    ensure!(launched[LAUNCH_TYPE] == "warm", "{launched:?}");
    Ok(sandbox)
}

#[tokio::test]
async fn variables_of_a_claim_reach_a_running_member_and_the_command_runs_once()
-> anyhow::Result<()> {
    case("latebind", async |case| {
        pool(
            case,
            &[(LATE_BIND, "env"), (ON_CLAIM_EXEC, COUNT)],
            "hot=rest",
        )
        .await?;
        let sandbox = claim(case, "c").await?;
        let claim = uid(&case.api::<SandboxClaim>().get("c").await?);
        let sh = async |line: &str| case.sh(&sandbox, "a", line).await;
        let value = format!("{claim} {SECRET}");
        // Everything is there when the claim is Ready: each line is one look.
        assert_eq!(sh("cat /ran").await?, value);
        assert_eq!(
            sh("cat /run/torpor/claim /run/claim/uid").await?,
            format!("{claim}\n{claim}")
        );
        assert_eq!(sh("echo $TASK").await?, SECRET);
        assert_eq!(
            sh("unset TASK; . /run/claim/env; echo $TASK").await?,
            SECRET
        );
        assert_eq!(
            sh("echo x >/run/claim/env || echo refused").await?,
            "refused"
        );
        let other = case
            .sh(
                &sandbox,
                "b",
                "echo ${TASK-none}; ls /run/claim || echo none",
            )
            .await?;
        assert_eq!(other, "none\nnone");

        // Memory that has the claim continues without another run of the command.
        case.suspend(&sandbox).await?;
        case.resume(&sandbox).await?;
        let bound = |pod: &_| condition(pod, POD_BOUND).0 == "True";
        case.pod_until(&sandbox, "the claim is there", LIMIT, bound)
            .await?;
        assert_eq!(sh("cat /ran").await?, value);
        assert_eq!(sh("echo $TASK").await?, SECRET);
        Ok(())
    })
    .await
}

#[tokio::test]
async fn a_container_that_starts_again_has_the_claim_again() -> anyhow::Result<()> {
    case("latebindagain", async |case| {
        pool(
            case,
            &[(LATE_BIND, "env"), (ON_CLAIM_EXEC, COUNT)],
            "hot=rest",
        )
        .await?;
        let sandbox = claim(case, "c").await?;
        case.sh(&sandbox, "a", "kill -KILL 1").await.ok();
        let again = |pod: &_| restarts(pod) > 0 && condition(pod, POD_BOUND).0 == "True";
        case.pod_until(&sandbox, "the claim is there again", LIMIT, again)
            .await?;
        let ran = case.written(&sandbox, "a", "/ran").await?;
        assert!(ran.ends_with(SECRET), "{ran}");
        let of_program = "tr '\\0' '\\n' </proc/1/environ | grep ^TASK=";
        assert_eq!(
            case.sh(&sandbox, "a", of_program).await?,
            format!("TASK={SECRET}")
        );
        Ok(())
    })
    .await
}

/// Reports whether a file of the folder holds the bytes.
fn is_in(folder: &Path, bytes: &[u8]) -> anyhow::Result<bool> {
    for file in std::fs::read_dir(folder)? {
        let content = std::fs::read(file?.path())?;
        if content.windows(bytes.len()).any(|window| window == bytes) {
            return Ok(true);
        }
    }
    Ok(false)
}

#[tokio::test]
async fn variables_reach_a_member_that_sleeps_and_never_its_golden_image() -> anyhow::Result<()> {
    case("latebindgolden", async |case| {
        let on_template = [(GOLDEN, "true"), (LATE_BIND, "env"), (ON_CLAIM_EXEC, COUNT)];
        pool(case, &on_template, "hot=0,asleep=rest").await?;
        for name in ["one", "two"] {
            let sandbox = claim(case, name).await?;
            let claim = uid(&case.api::<SandboxClaim>().get(name).await?);
            let ran = case.sh(&sandbox, "a", "cat /ran").await?;
            assert_eq!(ran, format!("{claim} {SECRET}"));
            assert_eq!(case.sh(&sandbox, "a", "echo $TASK").await?, SECRET);
            let pod = case.ready(&sandbox).await?;
            assert_eq!(restarts(&pod), 0);
            case.pool_is_ready("w", 1).await?;
        }
        let mut images = 0;
        for pod in std::fs::read_dir(case.node.images_dir(&case.namespace))? {
            images += 1;
            let folder = pod?.path();
            assert!(!is_in(&folder, b"4f1e9c77d0b2")?, "{}", folder.display());
        }
        assert!(
            images > 0,
            "the golden image and the next member's are there"
        );
        Ok(())
    })
    .await
}

#[tokio::test]
async fn a_claim_whose_command_fails_is_not_ready_and_reports_why_until_it_succeeds()
-> anyhow::Result<()> {
    case("latebindfails", async |case| {
        let command = r#"["sh","-c","test -e /may || exit 3"]"#;
        pool(case, &[(ON_CLAIM_EXEC, command)], "hot=rest").await?;
        let member = case.members().await?.pop().context("a member")?;
        let sandbox = member.metadata.name.context("its name")?;
        case.begin_claim("w", "c", json!({})).await?;
        says(case, "c", "ended with exit code 3").await?;
        case.sh(&sandbox, "a", "touch /may").await?;
        assert_eq!(case.claimed("c").await?, sandbox);
        Ok(())
    })
    .await
}

#[tokio::test]
async fn a_command_of_the_sdk_has_the_variables() -> anyhow::Result<()> {
    case("latebindsdk", async |case| {
        pool(case, &[(LATE_BIND, "env"), (INJECT_RUNTIME, "true")], "hot=rest").await?;
        let sandbox = claim(case, "c").await?;
        let body = json!({ "command": "sh -c 'echo $TASK'" }).to_string();
        let request = format!(
            "POST /execute HTTP/1.1\r\nHost: sandbox\r\nConnection: close\r\nContent-Length: {}\r\n\r\n{body}",
            body.len()
        );
        let forward = Forward::open(&case.kubectl, &sandbox, 8888).await?;
        let answer = String::from_utf8(forward.exchange(request.as_bytes()).await?)?;
        let (_, answer) = answer.split_once("\r\n\r\n").context("a body")?;
        let answer: Value = serde_json::from_str(answer)?;
        assert_eq!(answer["stdout"], format!("{SECRET}\n"), "{answer}");
        Ok(())
    })
    .await
}

/// Rights of the controller to write claims' files in a namespace.
const RIGHTS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../deploy/late-binding");
const FILES: [(&str, &str); 2] = [(LATE_BIND, "env,files,identity"), (ON_CLAIM_EXEC, SEEN)];
/// Command of a claim that keeps what it found.
const SEEN: &str = r#"["sh","-c","cat /run/claim/key /run/claim/settings >/seen"]"#;

/// Creates a Secret, a ConfigMap and a ServiceAccount.
async fn sources(case: &Case, claimable: &str) -> anyhow::Result<()> {
    let core = |kind: &str, name: &str, fields: Value| {
        let labels = json!({ "torpor.dev/claimable": claimable });
        let object = json!({
            "apiVersion": "v1", "kind": kind, "metadata": { "name": name, "labels": labels },
        });
        with(object, fields)
    };
    let key = json!({ "stringData": { "key": "a key\n" } });
    case.create(core("Secret", "keys", key)).await?;
    let settings = json!({ "data": { "settings": "a setting\n" } });
    case.create(core("ConfigMap", "settings", settings)).await?;
    case.create(core("ServiceAccount", "user", json!({}))).await
}

async fn begin_with_files(case: &Case, name: &str, files: &str) -> anyhow::Result<()> {
    let spec =
        json!({ "warmPoolRef": { "name": "w" }, "lifecycle": { "shutdownPolicy": "Delete" } });
    let claim = extension("SandboxClaim", name, spec);
    case.create(annotated(claim, CLAIM_FILES, files)).await
}

/// Waits until the claim's message has the words.
async fn says(case: &Case, claim: &str, words: &str) -> anyhow::Result<()> {
    let claims = case.api::<SandboxClaim>();
    wait::object(claims, claim, "the claim says why", LIMIT, |found| {
        let status = found.and_then(|claim| claim.status).unwrap_or_default();
        let ready = find(&status.conditions, "Ready");
        match ready.is_some_and(|c| c.message.contains(words)) {
            true => Ok(()),
            false => Err(format!("{:?}", status.conditions)),
        }
    })
    .await
}

/// Returns the user of a token, by the apiserver; `None` if the token is not valid.
async fn user_of(case: &Case, token: &str) -> anyhow::Result<Option<String>> {
    let review: TokenReview = serde_json::from_value(json!({ "spec": { "token": token } }))?;
    let reviews: kube::Api<TokenReview> = kube::Api::all(case.client());
    let reviewed = reviews.create(&PostParams::default(), &review).await?;
    Ok(reviewed.status.and_then(|status| status.user?.username))
}

#[tokio::test]
async fn files_and_a_token_of_a_claim_reach_a_member_that_sleeps_and_end_with_the_claim()
-> anyhow::Result<()> {
    case("latebindfiles", async |case| {
        case.kubectl.ok(&["apply", "-k", RIGHTS]).await?;
        sources(case, "true").await?;
        let golden = [&FILES[..], &[(GOLDEN, "true")]].concat();
        pool(case, &golden, "hot=0,asleep=rest").await?;
        begin_with_files(case, "c", "secret/keys,configmap/settings,token/user").await?;
        let sandbox = case.claimed("c").await?;
        let sh = async |line: &str| case.sh(&sandbox, "a", line).await;
        assert_eq!(sh("cat /seen").await?, "a key\na setting");
        assert_eq!(
            sh("echo x >/run/claim/key || echo refused").await?,
            "refused"
        );
        let token = sh("cat /run/claim/token").await?;
        let user = format!("system:serviceaccount:{}:user", case.namespace);
        assert_eq!(user_of(case, &token).await?, Some(user));

        // Another member of the pool has nothing of it.
        case.pool_is_ready("w", 1).await?;
        begin_with_files(case, "d", "configmap/settings").await?;
        says(case, "d", "on-claim-exec").await?;
        let claims = case.api::<SandboxClaim>();
        let held = claims
            .get("d")
            .await?
            .status
            .and_then(|status| status.sandbox);
        let other = held.context("a Sandbox")?.name;
        let files = case.sh(&other, "a", "ls /run/claim").await?;
        assert_eq!(files, "env\nfiles\nsettings\nuid");

        let parameters = DeleteParams::background();
        claims.delete("c", &parameters).await?;
        wait::until("the token ends with the claim", LIMIT, async || {
            let user = user_of(case, &token).await?;
            wait::holds(user.is_none(), || format!("{user:?}"))
        })
        .await
    })
    .await
}

#[tokio::test]
async fn files_need_the_rights_of_the_controller_and_the_label_of_their_owner() -> anyhow::Result<()>
{
    case("latebindclosed", async |case| {
        sources(case, "false").await?;
        pool(case, &FILES, "hot=rest").await?;
        begin_with_files(case, "c", "secret/keys,configmap/settings").await?;
        says(case, "c", "-k deploy/late-binding").await?;
        case.kubectl.ok(&["apply", "-k", RIGHTS]).await?;
        says(case, "c", "torpor.dev/claimable=true").await?;
        let release = [
            "secret/keys",
            "configmap/settings",
            "torpor.dev/claimable=true",
        ];
        let label = [&["label", "--overwrite"], &release[..]].concat();
        case.kubectl.ok(&label).await?;
        let sandbox = case.claimed("c").await?;
        assert_eq!(
            case.sh(&sandbox, "a", "cat /seen").await?,
            "a key\na setting"
        );
        Ok(())
    })
    .await
}

#[tokio::test]
async fn claims_fork_a_sandbox_and_each_branch_has_its_own_variables() -> anyhow::Result<()> {
    case("latebindfork", async |case| {
        let late = [(LATE_BIND, "env"), (ON_CLAIM_EXEC, COUNT)];
        pool(case, &late, "hot=rest").await?;
        let trunk = claim(case, "trunk").await?;
        case.sh(&trunk, "a", "echo thought >/state").await?;
        case.snapshot("branch", &trunk).await?;
        let release = [
            "label",
            "sandboxsnapshot/branch",
            "torpor.dev/claimable=true",
        ];
        case.kubectl.ok(&release).await?;
        let branches = ["one", "two", "three"];
        for name in branches {
            let spec = json!({
                "warmPoolRef": { "name": "w" },
                "lifecycle": { "shutdownPolicy": "Delete" },
                "env": [{ "name": "TASK", "value": name }],
            });
            let claim = extension("SandboxClaim", name, spec);
            case.create(annotated(claim, FORK_OF, "branch")).await?;
        }
        for name in branches {
            let sandbox = case.claimed(name).await?;
            let uid = uid(&case.api::<SandboxClaim>().get(name).await?);
            let sh = async |line: &str| case.sh(&sandbox, "a", line).await;
            assert_eq!(
                sh("cat /state; echo $TASK").await?,
                format!("thought\n{name}")
            );
            // Its command ran once, after that of the trunk.
            let ran = sh("cat /ran").await?;
            assert_eq!(ran.lines().count(), 2, "{ran}");
            assert!(ran.ends_with(&format!("{uid} {name}")), "{ran}");
            sh(&format!("echo {name} >>/state")).await?;
        }
        assert_eq!(case.sh(&trunk, "a", "cat /state").await?, "thought");
        Ok(())
    })
    .await
}
