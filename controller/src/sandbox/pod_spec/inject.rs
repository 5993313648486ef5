//! No client required. Puts the sandbox runtime into the first container of a Pod, whatever its image: an init container copies the binary into an emptyDir, the container has that read-only, and the runtime goes around its command.
//!
//! What the container itself gets (command, mount) is part of every image that is saved of it: a resumed Pod must have it exactly so. To change it is to make those images useless; see docs/decisions/2026-11-21-runtime-around-the-command.md.

use serde_json::{Map, Value, json};
use torpor_api::annotations::INJECT_RUNTIME;

/// Name of the init container and of the volume.
pub const NAME: &str = "torpor-runtime";
/// Where the runtime lies in the container.
const DIRECTORY: &str = "/.torpor";
const BINARY: &str = "/.torpor/sandbox-runtime";
/// The runtime in its own image.
const IN_ITS_IMAGE: &str = "/sandbox-runtime";
/// One of the runtime's APIs.
struct ServedApi {
    /// Where SDKs look for it.
    port: u16,
    /// Keeps it from being served: the user's program may want the same port.
    off: &'static str,
    /// What answers when it is served. gRPC has nothing that the kubelet could ask.
    health: Option<&'static str>,
}

/// The one that most SDKs use comes first.
const APIS: [ServedApi; 3] = [
    ServedApi {
        port: 8888,
        off: "--legacy-bind-address=0",
        health: Some("/"),
    },
    ServedApi {
        port: 8080,
        off: "--rest-bind-address=0",
        health: Some("/v1/health"),
    },
    ServedApi {
        port: 9090,
        off: "--grpc-bind-address=0",
        health: None,
    },
];
/// The init container writes one file into an emptyDir, which anybody may. No user is it for whom that must be allowed.
const USER: u32 = 65532;
/// What decides about the Pod's quality of service, and what quotas may ask of every container.
const RESOURCES: [&str; 3] = ["cpu", "memory", "ephemeral-storage"];

/// The runtime cannot be put into this Pod.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    #[error(
        "annotation {INJECT_RUNTIME}: this controller knows no image of the runtime; start it with --runtime-image"
    )]
    NoImage,
    #[error(
        "annotation {INJECT_RUNTIME}: podTemplate.spec has no container to put the runtime into"
    )]
    NoContainer,
    #[error(
        "annotation {INJECT_RUNTIME}: container {0:?} has args for its image's entrypoint, which the runtime would take the place of; set command to the entrypoint"
    )]
    ArgsAlone(String),
    #[error(
        "annotation {INJECT_RUNTIME}: {what} {name:?} of podTemplate.spec is in the way; rename it"
    )]
    Taken { what: &'static str, name: String },
    #[error(
        "annotation {INJECT_RUNTIME}: containers of podTemplate.spec declare the ports 8888, 8080 and 9090, so that none is left for the runtime; take one of them out of ports"
    )]
    NoPort,
}

/// Puts the runtime of `image` into `spec`. `starts_cold`: its container begins anew, and is started when the runtime answers; one that is restored answers from its first moment.
pub(super) fn inject(
    spec: &mut Map<String, Value>,
    image: &str,
    starts_cold: bool,
) -> Result<(), Error> {
    check(spec)?;
    let declared = declared_ports(spec);
    let (taken, served): (Vec<_>, Vec<_>) = APIS
        .iter()
        .partition(|api| declared.contains(&u64::from(api.port)));
    let asked = served.first().ok_or(Error::NoPort)?;
    let container = first_container(spec).ok_or(Error::NoContainer)?;
    let resources = resources(container);
    go_around(container, &taken)?;
    if starts_cold {
        wait_for_it(container, asked);
    }
    push(
        container,
        "volumeMounts",
        json!({"name": NAME, "mountPath": DIRECTORY, "readOnly": true}),
    );
    push(spec, "volumes", json!({"name": NAME, "emptyDir": {}}));
    // Before all others, so that it is there when any of them wants it, and beside no sidecar that counts against the Pod's requests.
    list(spec, "initContainers").insert(0, installer(image, resources));
    Ok(())
}

fn first_container(spec: &mut Map<String, Value>) -> Option<&mut Map<String, Value>> {
    spec.get_mut("containers")?.get_mut(0)?.as_object_mut()
}

/// Nothing may have the names that are needed, nor be mounted over the runtime.
fn check(spec: &Map<String, Value>) -> Result<(), Error> {
    let named = |what| items(spec, what).any(|item| item["name"] == NAME);
    for (key, what) in [
        ("containers", "container"),
        ("initContainers", "init container"),
        ("volumes", "volume"),
    ] {
        if named(key) {
            let name = NAME.to_owned();
            return Err(Error::Taken { what, name });
        }
    }
    let first = items(spec, "containers").next().and_then(Value::as_object);
    let paths = first
        .into_iter()
        .flat_map(|container| items(container, "volumeMounts"))
        .filter_map(|mount| mount["mountPath"].as_str());
    for path in paths {
        let place = path.trim_end_matches('/');
        if place == DIRECTORY || place.starts_with("/.torpor/") {
            let (what, name) = ("mountPath", path.to_owned());
            return Err(Error::Taken { what, name });
        }
    }
    Ok(())
}

fn items<'a>(map: &'a Map<String, Value>, key: &str) -> impl Iterator<Item = &'a Value> {
    map.get(key).and_then(Value::as_array).into_iter().flatten()
}

/// The ports that programs of the Pod say are theirs. Where the first container has no command, the runtime is its program.
fn declared_ports(spec: &Map<String, Value>) -> Vec<u64> {
    let first = items(spec, "containers").next().and_then(Value::as_object);
    let has_program = first.is_some_and(|first| items(first, "command").next().is_some());
    items(spec, "containers")
        .skip(usize::from(!has_program))
        .chain(items(spec, "initContainers"))
        .filter_map(Value::as_object)
        .flat_map(|container| items(container, "ports"))
        .filter_map(|port| port["containerPort"].as_u64())
        .collect()
}

/// The runtime as the container's program, and the user's command behind it; the kubelet appends the args. Without a command the runtime is alone: nobody here knows what the image would run. APIs whose ports are taken are not served.
fn go_around(container: &mut Map<String, Value>, taken: &[&ServedApi]) -> Result<(), Error> {
    let words: Vec<Value> = items(container, "command").cloned().collect();
    if words.is_empty() && items(container, "args").next().is_some() {
        let name = container.get("name").and_then(Value::as_str);
        return Err(Error::ArgsAlone(name.unwrap_or_default().to_owned()));
    }
    let mut command = vec![json!(BINARY)];
    command.extend(taken.iter().map(|api| json!(api.off)));
    command.push(json!("run"));
    if !words.is_empty() {
        command.push(json!("--"));
        command.extend(words);
    }
    container.insert("command".to_owned(), command.into());
    Ok(())
}

/// Ready is to mean that the runtime answers. Only where the user has no probe of their own that says what Ready means; and no readiness probe, which would fail while the sandbox sleeps.
fn wait_for_it(container: &mut Map<String, Value>, asked: &ServedApi) {
    let probed = |key| container.get(key).is_some_and(|probe| !probe.is_null());
    if probed("startupProbe") || probed("readinessProbe") {
        return;
    }
    let mut probe = json!({"periodSeconds": 1, "failureThreshold": 60});
    match asked.health {
        Some(path) => probe["httpGet"] = json!({"path": path, "port": asked.port}),
        None => probe["tcpSocket"] = json!({"port": asked.port}),
    }
    container.insert("startupProbe".to_owned(), probe);
}

/// The same for the init container as for the container: it raises no request of the Pod, and leaves its quality of service.
fn resources(container: &Map<String, Value>) -> Value {
    let side = |name: &str| -> Option<(String, Value)> {
        let all = container.get("resources")?.get(name)?.as_object()?;
        let kept = all
            .iter()
            .filter(|(name, _)| RESOURCES.contains(&name.as_str()));
        let kept: Map<String, Value> = kept
            .map(|(name, amount)| (name.clone(), amount.clone()))
            .collect();
        (!kept.is_empty()).then(|| (name.to_owned(), kept.into()))
    };
    Value::Object(
        ["requests", "limits"]
            .into_iter()
            .filter_map(side)
            .collect(),
    )
}

fn installer(image: &str, resources: Value) -> Value {
    json!({
        "name": NAME,
        "image": image,
        "command": [IN_ITS_IMAGE, "install", DIRECTORY],
        "resources": resources,
        "volumeMounts": [{"name": NAME, "mountPath": DIRECTORY}],
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": {
            "allowPrivilegeEscalation": false,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": true,
            "runAsNonRoot": true,
            "runAsUser": USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    })
}

fn push(map: &mut Map<String, Value>, key: &str, item: Value) {
    list(map, key).push(item);
}

fn list<'a>(map: &'a mut Map<String, Value>, key: &str) -> &'a mut Vec<Value> {
    let entry = map.entry(key).or_insert_with(|| json!([]));
    if !entry.is_array() {
        *entry = json!([]);
    }
    match entry {
        Value::Array(items) => items,
        _ => unreachable!("it was made a list on the line above"),
    }
}

#[cfg(test)]
mod tests;
