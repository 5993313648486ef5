//! Reading and updating of runsc's records of containers, as far as the releases of gVisor agree
//! with this crate.

use serde_json::{Value, json};
use torpor_records::RunscRecord;

/// Releases of gVisor whose files agree with this crate, by a comparison: in the start of a
/// restored sandbox (runsc/sandbox/sandbox.go, runsc/sandbox/network.go,
/// runsc/cmd/sentry/sentrycmd), and of its other containers (runsc/container/container.go,
/// runsc/cmd/gofer.go, runsc/cmd/sandboxsetup, runsc/config). A sandbox of another release is begun
/// by its own runsc. The names are those of `runsc --version`, for Google's build and for the
/// development cluster's.
const KNOWN_RELEASES: [&str; 2] = ["release-20260905.0", "release-20260905.0-torpor"];

/// Reports whether sandboxes of this release of gVisor may be begun without its runsc.
pub fn is_known_release(release: &str) -> bool {
    KNOWN_RELEASES.contains(&release)
}

/// Settings in the record of a sandbox for which runsc takes no further steps
/// (`runsc/config.Config.MetricMetadata`).
const USUAL: [(&str, &str); 5] = [
    ("platform", "systrap"),
    ("network", "sandbox"),
    ("fsmode", "directfs"),
    ("coretags", "false"),
    ("experiment", ""),
];

/// Field of runsc's record with the use of each file system that a gofer may serve, the root first
/// (gVisor, `runsc/specutils.GoferMountConf`).
pub(super) const GOFERS: &str = "goferMountConfs";

/// Returns the lowest `oom_score_adj` of all containers but the first. The sandbox' process has it
/// (`runsc/container.adjustSandboxOOMScoreAdj`).
pub(super) fn lowest_oom_score(record: &RunscRecord) -> Option<i64> {
    let scores = record.containers.values().filter_map(oom_score);
    scores.min()
}

/// Returns the record of a container for runsc, in the sandbox whose sentry is now the process
/// `pid`.
pub(super) fn running(record: &Value, pid: i32) -> Value {
    let mut record = record.clone();
    let mut set = |pointer: &str, value: Value| {
        if let Some(place) = record.pointer_mut(pointer) {
            *place = value;
        }
    };
    set("/status", json!("running"));
    set("/sandbox/pid", json!(pid));
    set("/sandbox/checkpointed", json!(false));
    set("/sandbox/restored", json!(true));
    record
}

/// Returns the text at a JSON pointer.
pub(super) fn text<'a>(record: &'a Value, pointer: &str) -> Option<&'a str> {
    record.pointer(pointer)?.as_str()
}

/// Reports whether the container's sandbox has a known release of gVisor and the usual settings.
pub(super) fn is_usual(record: &Value) -> bool {
    let setting = |key: &str| text(record, &format!("/sandbox/metricMetadata/{key}"));
    setting("version").is_some_and(is_known_release)
        && USUAL.iter().all(|(key, value)| setting(key) == Some(value))
}

/// Reports whether the value is one that Go writes for an unset field.
pub(super) fn is_nothing(value: &Value) -> bool {
    [json!(null), json!(false), json!(""), json!({}), json!([])].contains(value)
}

/// Returns the container's `oom_score_adj`.
pub(super) fn oom_score(record: &Value) -> Option<i64> {
    record.pointer("/spec/process/oomScoreAdj")?.as_i64()
}

/// Returns the path of the container's namespace of this kind. Some(None): the namespace is a new
/// one. None: the record does not have exactly one of the kind.
pub(super) fn namespace<'a>(record: &'a Value, kind: &str) -> Option<Option<&'a str>> {
    let all = record.pointer("/spec/linux/namespaces")?.as_array()?;
    let mut of_kind = all.iter().filter(|namespace| namespace["type"] == kind);
    let (namespace, others) = (of_kind.next()?, of_kind.next());
    let path = namespace.get("path").and_then(Value::as_str);
    others
        .is_none()
        .then_some(path.filter(|path| !path.is_empty()))
}

/// Returns the mappings `name` as lines of `/proc/<pid>/uid_map`.
pub(super) fn id_map(record: &Value, name: &str) -> Option<String> {
    let mappings = record.pointer("/spec/linux")?.get(name)?.as_array()?;
    let line = |mapping: &Value| {
        let number = |key: &str| mapping.get(key)?.as_u64();
        let (inside, outside) = (number("containerID")?, number("hostID")?);
        Some(format!("{inside} {outside} {}\n", number("size")?))
    };
    let map = mappings.iter().map(line).collect::<Option<String>>()?;
    (!map.is_empty()).then_some(map)
}
