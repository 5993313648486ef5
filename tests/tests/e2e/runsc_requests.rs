//! Compares Torpor's requests to gVisor with those of runsc, which a sandbox of the test's own
//! receives.

use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::mpsc::{Sender, channel};
use std::time::Duration;

use anyhow::{Context, ensure};
use serde_json::{Value, json};
use torpor_records::RunscRecord;
use torpor_records::config::Config;
use torpor_runsc::command::NodeRunsc;
use torpor_runsc_direct::ContainerStart;
use torpor_tests::case::{case, uid};
use torpor_tests::pods::{COUNT, shell_pod};

const LIMIT: Duration = Duration::from_secs(30);

/// Answers each request with success and passes it on. The files that come with it are closed.
fn answer_all(mut from: UnixStream, received: &Sender<Value>) -> anyhow::Result<()> {
    let mut bytes = Vec::new();
    let mut part = [0; 64 << 10];
    loop {
        match from.read(&mut part)? {
            0 => return Ok(()),
            read => bytes.extend_from_slice(&part[..read]),
        }
        if let Ok(request) = serde_json::from_slice(&bytes) {
            bytes.clear();
            received.send(request)?;
            from.write_all(br#"{"success":true,"err":"","result":{}}"#)?;
        }
    }
}

/// Writes the record of a sandbox that is this process; returns the listener for its requests.
fn stand_in(kept: &Value, root: &Path, sandbox: &str) -> anyhow::Result<UnixListener> {
    let socket = root.join("s.sock");
    let listener = UnixListener::bind(&socket)?;
    let mut record = kept["sandbox"].clone();
    record["status"] = json!("running");
    record["saver"]["rootDir"] = json!(root);
    record["sandbox"]["pid"] = json!(std::process::id());
    record["sandbox"]["controlSocketPath"] = json!(socket);
    let path = root.join(format!("{sandbox}_sandbox:{sandbox}.state"));
    std::fs::write(path, record.to_string())?;
    Ok(listener)
}

#[tokio::test]
async fn torpors_requests_to_gvisor_for_a_container_are_those_of_runsc() -> anyhow::Result<()> {
    case("runscrequests", async |case| {
        let uid = uid(&case.start(shell_pod("p", COUNT)).await?);
        case.hibernate("p").await?;
        let node = &case.node;
        let sandbox = node.sandbox_of(&uid)?.sandbox;
        let id = node.container(&uid, "a")?.id;
        let kept = std::fs::read(node.records.pod_dir(&sandbox).join("runsc.json"))?;
        let kept: Value = serde_json::from_slice(&kept)?;

        // The path of a socket has at most 107 bytes.
        let dir = tempfile::tempdir_in("/tmp")?;
        let config = Config {
            state_dir: dir.path().to_owned(),
            ..node.config.clone()
        };
        let runsc = NodeRunsc::new(&config).of(&sandbox);
        std::fs::create_dir_all(runsc.root())?;
        let listener = stand_in(&kept, runsc.root(), sandbox.as_str())?;
        let (sender, received) = channel();
        std::thread::spawn(move || {
            for connection in listener.incoming().flatten() {
                let sender = sender.clone();
                std::thread::spawn(move || answer_all(connection, &sender));
            }
        });
        let bundle = node.records.container_dir(&id);
        runsc.restore(id.as_str(), &bundle, dir.path(), None, LIMIT)?;

        let requests: Vec<Value> = received.try_iter().collect();
        let of = |method: &str| {
            let mut all = requests.iter();
            let found =
                all.find(|request| request["method"] == format!("containerManager.{method}"));
            found.with_context(|| format!("runsc sent no {method}"))
        };
        ensure!(of("CreateSubcontainer")?["arg"] == json!({ "CID": id.as_str() }));
        let restore = &of("RestoreSubcontainer")?["arg"];
        let spec = node.records.spec(&id)?;
        let kept: RunscRecord = serde_json::from_value(kept)?;
        let start =
            ContainerStart::new(&runsc, &kept, id.as_str(), sandbox.as_str(), bundle, &spec);
        let mut own = start.context("it is left to runsc")?.told()?;
        // Each command has a log of its own.
        own["Conf"]["LogFilename"] = restore["Conf"]["LogFilename"].clone();
        for (name, value) in own.as_object().into_iter().flatten() {
            ensure!(
                restore[name] == *value,
                "{name}: {value}, by runsc {}",
                restore[name]
            );
        }
        ensure!(*restore == own, "runsc sends more: {restore}");
        // The files that this restore left in the container's root do not prevent a wake.
        case.wake("p").await?;
        case.counted("p").await?;
        Ok(())
    })
    .await
}
