//! Pods for tests, as manifests.

use serde_json::{Value, json};

pub const BUSYBOX: &str = "torpor.dev/busybox:dev";
pub const PYTHON: &str = "torpor.dev/demo-python:dev";
/// Python with psutil, Node.js and a JVM.
pub const RUNTIMES: &str = "torpor.dev/runtimes:dev";

/// Returns a container that runs a shell line.
pub fn shell(name: &str, line: &str) -> Value {
    container(name, BUSYBOX, json!(["sh", "-c", line]))
}

/// Returns a container that runs a Python program with the standard library only.
///
/// Python starts a sixth faster without the search for other modules.
pub fn python(name: &str, program: &str) -> Value {
    let command = json!(["python3", "-u", "-I", "-S", "-c", program]);
    container(name, PYTHON, command)
}

fn container(name: &str, image: &str, command: Value) -> Value {
    json!({ "name": name, "image": image, "imagePullPolicy": "Never", "command": command })
}

/// Merges `over` into `base`: objects key by key, everything else is replaced.
pub fn with(mut base: Value, over: Value) -> Value {
    merge(&mut base, over);
    base
}

/// Returns the object with one more annotation.
pub fn annotated(object: Value, key: &str, value: &str) -> Value {
    with(
        object,
        json!({ "metadata": { "annotations": { key: value } } }),
    )
}

fn merge(base: &mut Value, over: Value) {
    match (base, over) {
        (Value::Object(base), Value::Object(over)) => {
            for (key, value) in over {
                merge(base.entry(key).or_insert(Value::Null), value);
            }
        }
        (base, over) => *base = over,
    }
}

/// Returns `spec` with what a Pod of the RuntimeClass torpor and a Sandbox's pod template share.
pub fn pod_spec(spec: Value) -> Value {
    let base = json!({
        "runtimeClassName": "torpor",
        "terminationGracePeriodSeconds": 1,
        "automountServiceAccountToken": false,
    });
    with(base, spec)
}

/// Returns a Pod of the RuntimeClass torpor.
pub fn pod(name: &str, spec: Value) -> Value {
    json!({ "apiVersion": "v1", "kind": "Pod", "metadata": { "name": name }, "spec": pod_spec(spec) })
}

/// Returns a Pod with one container `a` that runs a shell line.
pub fn shell_pod(name: &str, line: &str) -> Value {
    pod(name, json!({ "containers": [shell("a", line)] }))
}

/// Shell line that counts four times a second in a variable, prints the number to its log and
/// writes it to /n.
///
/// The line overwrites /n, whose old content is never longer: another program for each write would
/// cost as much as all the rest.
pub const COUNT: &str =
    "n=0; while true; do n=$((n+1)); echo $n 1<>/n; echo count $n; sleep 0.25; done";

/// Shell line that is never idle, also on a fast machine.
pub const WORK: &str = "while true; do ls / >/list; cp /list /copy; sleep 0.25; done";

/// Returns mounts of volumes from pairs of name and path.
pub fn mounts(pairs: &[(&str, &str)]) -> Value {
    pairs
        .iter()
        .map(|(name, path)| json!({ "name": name, "mountPath": path }))
        .collect()
}
