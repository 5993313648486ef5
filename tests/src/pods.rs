//! Pods for tests, as manifests.

use serde_json::{Value, json};

pub const BUSYBOX: &str = "torpor.dev/busybox:dev";
pub const PYTHON: &str = "torpor.dev/demo-python:dev";
/// Python with psutil, Node.js and a JVM.
pub const RUNTIMES: &str = "torpor.dev/runtimes:dev";

/// A container that runs a shell line.
pub fn shell(name: &str, line: &str) -> Value {
    container(name, BUSYBOX, json!(["sh", "-c", line]))
}

/// A container that runs a Python program, which has the standard library alone: without a look for others' modules it starts a sixth faster.
pub fn python(name: &str, program: &str) -> Value {
    let command = json!(["python3", "-u", "-I", "-S", "-c", program]);
    container(name, PYTHON, command)
}

fn container(name: &str, image: &str, command: Value) -> Value {
    json!({ "name": name, "image": image, "imagePullPolicy": "Never", "command": command })
}

/// `over`, laid over `base`: objects key by key, everything else replaced.
pub fn with(mut base: Value, over: Value) -> Value {
    merge(&mut base, over);
    base
}

/// The object with one annotation more.
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

/// What a Pod of the RuntimeClass torpor and a Sandbox' pod template have in common.
pub fn pod_spec(spec: Value) -> Value {
    let base = json!({
        "runtimeClassName": "torpor",
        "terminationGracePeriodSeconds": 1,
        "automountServiceAccountToken": false,
    });
    with(base, spec)
}

/// A Pod of the RuntimeClass torpor.
pub fn pod(name: &str, spec: Value) -> Value {
    json!({ "apiVersion": "v1", "kind": "Pod", "metadata": { "name": name }, "spec": pod_spec(spec) })
}

/// A Pod with one container `a` that runs a shell line.
pub fn shell_pod(name: &str, line: &str) -> Value {
    pod(name, json!({ "containers": [shell("a", line)] }))
}

/// A shell line that counts four times a second in a variable, prints it to its log and writes it to /n: over what stood there, which never was
/// longer, because to start another program each time would cost as much as all the rest of it.
pub const COUNT: &str =
    "n=0; while true; do n=$((n+1)); echo $n 1<>/n; echo count $n; sleep 0.25; done";

/// A shell line that is never idle, also on a fast machine.
pub const WORK: &str = "while true; do ls / >/list; cp /list /copy; sleep 0.25; done";

/// Mounts of volumes: pairs of name and path.
pub fn mounts(pairs: &[(&str, &str)]) -> Value {
    pairs
        .iter()
        .map(|(name, path)| json!({ "name": name, "mountPath": path }))
        .collect()
}
