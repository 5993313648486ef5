//! No client required. Injects the sandbox runtime into the first container of a Pod, whatever its
//! image. An init container copies the binary into an emptyDir, the container mounts that
//! read-only, and the runtime wraps its command.
//!
//! Every saved image contains the container's command and mount, and a resumed Pod must have
//! exactly the same. A change of them makes existing images useless; see
//! docs/decisions/2026-11-21-injected-runtime-wraps-the-command.md.

use serde_json::{Map, Value, json};
use torpor_api::annotations::INJECT_RUNTIME;

/// Name of the init container and of the volume.
pub const NAME: &str = "torpor-runtime";
/// Directory of the runtime in the container.
pub const DIRECTORY: &str = "/.torpor";
/// Path of the runtime in the container.
pub const BINARY: &str = "/.torpor/sandbox-runtime";
/// Path of the runtime in its own image.
const IMAGE_BINARY: &str = "/sandbox-runtime";
/// API that the runtime serves.
struct ServedApi {
    /// Port that SDKs expect.
    port: u16,
    /// Flag that disables the API, for a user's program that needs the same port.
    off: &'static str,
    /// HTTP path of its health check; `None` for gRPC, which has none for the kubelet.
    health: Option<&'static str>,
}

/// APIs of the runtime. The one that most SDKs use comes first.
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
/// User of the init container, which writes one file into an emptyDir. Any user may do so.
const USER: u32 = 65532;
/// Resources that decide about the Pod's quality of service, and that quotas may require of every
/// container.
const RESOURCES: [&str; 3] = ["cpu", "memory", "ephemeral-storage"];

/// Reason why the runtime cannot be injected into a Pod.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    #[error(
        "annotation {INJECT_RUNTIME}: the controller has no image of the runtime; start it with --runtime-image"
    )]
    NoImage,
    #[error("annotation {INJECT_RUNTIME}: podTemplate.spec has no container for the runtime")]
    NoContainer,
    #[error(
        "annotation {INJECT_RUNTIME}: container {0:?} has args for its image's entrypoint, which the runtime would replace; set command to the entrypoint"
    )]
    ArgsAlone(String),
    #[error(
        "annotation {INJECT_RUNTIME}: {what} {name:?} of podTemplate.spec is reserved for the runtime; rename it"
    )]
    Taken { what: &'static str, name: String },
    #[error(
        "annotation {INJECT_RUNTIME}: containers of podTemplate.spec declare the ports 8888, 8080 and 9090, so that none is left for the runtime; remove one of them from ports"
    )]
    NoPort,
}

/// Injects the runtime of `image` into `spec`.
///
/// With `starts_cold` a startup probe waits until the runtime answers. A restored runtime answers
/// from its first moment.
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
    wrap_command(container, &taken)?;
    if starts_cold {
        add_startup_probe(container, asked);
    }
    push(
        container,
        "volumeMounts",
        json!({"name": NAME, "mountPath": DIRECTORY, "readOnly": true}),
    );
    push(spec, "volumes", json!({"name": NAME, "emptyDir": {}}));
    // It comes first, so that every other container finds the runtime, and so that no sidecar runs
    // beside it and counts against the Pod's requests.
    list(spec, "initContainers").insert(0, installer(image, resources));
    Ok(())
}

pub(super) fn first_container(spec: &mut Map<String, Value>) -> Option<&mut Map<String, Value>> {
    spec.get_mut("containers")?.get_mut(0)?.as_object_mut()
}

/// Checks that the runtime's names and its mount path are free.
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

/// Returns the ports that the Pod's programs declare.
///
/// The runtime is the program of a first container without a command, so the ports of such a
/// container are the runtime's.
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

/// Makes the runtime the container's program, with the user's command as its arguments.
///
/// The kubelet appends the args. Without a command the runtime runs alone, because the controller
/// does not know the image's entrypoint. APIs with taken ports are disabled.
fn wrap_command(container: &mut Map<String, Value>, taken: &[&ServedApi]) -> Result<(), Error> {
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

/// Adds a startup probe, so that Ready means that the runtime answers.
///
/// It adds none if the user has a startup or readiness probe. It adds no readiness probe, which
/// would fail while the sandbox sleeps.
fn add_startup_probe(container: &mut Map<String, Value>, asked: &ServedApi) {
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

/// Returns the init container's resources, which are the container's.
///
/// They raise no request of the Pod, and keep its quality of service.
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

/// Returns the init container that copies the runtime into the volume.
pub fn installer(image: &str, resources: Value) -> Value {
    json!({
        "name": NAME,
        "image": image,
        "command": [IMAGE_BINARY, "install", DIRECTORY],
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

pub(super) fn push(map: &mut Map<String, Value>, key: &str, item: Value) {
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
