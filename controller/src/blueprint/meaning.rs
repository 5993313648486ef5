//! No client required. Compares specs by meaning.
//!
//! Upstream compares them by Go's types of a Pod's and of a volume claim's spec
//! (`equality.Semantic.DeepEqual`, after no defaulting but that of the secure defaults); here they
//! are JSON. A member that upstream's controller made has gone through those types: fields that
//! were zero in the template are missing in the member, and fields that Go cannot omit are written
//! out (`resources: {}`, `divisor: "0"`).

use serde_json::{Value, json};

/// Key of a Pod's spec for [`normalized`].
pub(super) const POD: &str = "";
/// Key of a volume claim's spec for [`normalized`].
pub(super) const VOLUME_CLAIM: &str = "spec";

/// Maps with keys chosen by the user. An empty map means the same as none; an empty value in a map
/// is a value.
const MAPS: [&str; 10] = [
    "annotations",
    "labels",
    "limits",
    "matchLabels",
    "nodeSelector",
    "options",
    "overhead",
    "requests",
    "userAnnotations",
    "volumeAttributes",
];
/// Maps with quantities as values.
const QUANTITY_MAPS: [&str; 3] = ["limits", "requests", "overhead"];
/// Fields that hold one quantity.
const QUANTITIES: [&str; 2] = ["sizeLimit", "divisor"];

/// Fields that Go's types hold by value and leave out of JSON when they are zero: false, 0, "" and
/// `{}` mean the same as an absent field.
///
/// A zero in a field that Go's types hold by pointer (`runAsNonRoot`,
/// `automountServiceAccountToken`, `terminationGracePeriodSeconds`, `storageClassName`, `emptyDir`,
/// …) is a choice. Therefore the list has only fields known to be held by value.
const BY_VALUE: [&str; 77] = [
    // Objects and quantities.
    "divisor",
    "metadata",
    "resources",
    // Booleans.
    "chapAuthDiscovery",
    "chapAuthSession",
    "hostIPC",
    "hostNetwork",
    "hostPID",
    "readOnly",
    "sslEnabled",
    "stdin",
    "stdinOnce",
    "tty",
    // Numbers.
    "failureThreshold",
    "hostPort",
    "initialDelaySeconds",
    "partition",
    "periodSeconds",
    "successThreshold",
    "timeoutSeconds",
    // Texts.
    "apiVersion",
    "audience",
    "certificateChainPath",
    "containerName",
    "credentialBundlePath",
    "datasetName",
    "datasetUUID",
    "directory",
    "dnsPolicy",
    "effect",
    "fsType",
    "group",
    "host",
    "hostIP",
    "hostname",
    "imagePullPolicy",
    "iscsiInterface",
    "key",
    "keyPath",
    "keyring",
    "level",
    "medium",
    "name",
    "nodeName",
    "operator",
    "path",
    "pool",
    "prefix",
    "priorityClassName",
    "protectionDomain",
    "pullPolicy",
    "reference",
    "request",
    "restartPolicy",
    "revision",
    "role",
    "schedulerName",
    "scheme",
    "secretFile",
    "secretName",
    "serviceAccount",
    "serviceAccountName",
    "storageMode",
    "storagePolicyID",
    "storagePolicyName",
    "storagePool",
    "subPath",
    "subPathExpr",
    "subdomain",
    "targetContainerName",
    "tenant",
    "terminationMessagePath",
    "terminationMessagePolicy",
    "value",
    "volumeName",
    "volumeNamespace",
    "workingDir",
];

/// Exceptions to [`BY_VALUE`]: parent key and field that is a pointer under it.
const BY_POINTER: [(&str, &str); 8] = [
    (POD, "resources"),
    ("azureDisk", "fsType"),
    ("azureDisk", "readOnly"),
    ("clusterTrustBundle", "name"),
    ("containers", "restartPolicy"),
    ("csi", "fsType"),
    ("csi", "readOnly"),
    ("initContainers", "restartPolicy"),
];

/// Reports whether two specs differ only in unset or zero fields and in the spelling of quantities.
pub fn mean_the_same(one: &Value, other: &Value) -> bool {
    normal_form(one) == normal_form(other)
}

/// Returns the normal form of a spec, which is the same for all specs with the same meaning.
pub fn normal_form(spec: &Value) -> Value {
    normalized(POD, spec)
}

/// Returns the value without differences that have no meaning to Kubernetes: unset or zero fields,
/// and the spelling of quantities.
///
/// `key` is the name of the field that holds the value; items of a list have the list's key.
pub(super) fn normalized(key: &str, value: &Value) -> Value {
    match value {
        Value::Object(map) if MAPS.contains(&key) => {
            let is_quantity = QUANTITY_MAPS.contains(&key);
            let entries = map.iter().map(|(name, value)| {
                let inner = if is_quantity {
                    quantity(value)
                } else {
                    value.clone()
                };
                (name.clone(), inner)
            });
            Value::Object(entries.collect())
        }
        Value::Object(map) => {
            let entries = map.iter().filter_map(|(name, value)| {
                let inner = normalized(name, value);
                (!is_default(key, name, &inner)).then(|| (name.clone(), inner))
            });
            Value::Object(entries.collect())
        }
        Value::Array(items) => items.iter().map(|item| normalized(key, item)).collect(),
        other if QUANTITIES.contains(&key) => quantity(other),
        other => other.clone(),
    }
}

/// Reports whether a normalized field means the same as its absence. `parent` is the key of the
/// object that holds the field.
fn is_default(parent: &str, key: &str, value: &Value) -> bool {
    let is_zero = match value {
        Value::Null => return true,
        Value::Array(items) => return items.is_empty(),
        Value::Object(map) if MAPS.contains(&key) => return map.is_empty(),
        Value::Object(map) => map.is_empty(),
        Value::Bool(is_set) => !is_set,
        Value::Number(number) => number.as_i64() == Some(0),
        Value::String(text) => text.is_empty() || (key == "divisor" && text == "0m"),
    };
    is_zero && BY_VALUE.contains(&key) && !BY_POINTER.contains(&(parent, key))
}

/// Returns a quantity in thousandths, or unchanged if it cannot be parsed.
fn quantity(value: &Value) -> Value {
    let text = match value {
        Value::String(text) => text.clone(),
        Value::Number(number) => number.to_string(),
        other => return other.clone(),
    };
    match thousandths(&text) {
        Some(amount) => json!(format!("{amount}m")),
        None => value.clone(),
    }
}

/// Parses a quantity into thousandths, exactly, so that two spellings are equal only if the amounts
/// are.
///
/// Returns `None` for text that is no quantity, or that needs more precision than thousandths.
fn thousandths(text: &str) -> Option<i128> {
    const SUFFIXES: [(&str, i128, i128); 14] = [
        ("Ki", 1 << 10, 1),
        ("Mi", 1 << 20, 1),
        ("Gi", 1 << 30, 1),
        ("Ti", 1 << 40, 1),
        ("Pi", 1 << 50, 1),
        ("Ei", 1 << 60, 1),
        ("m", 1, 1000),
        ("k", 1_000, 1),
        ("M", 1_000_000, 1),
        ("G", 1_000_000_000, 1),
        ("T", 1_000_000_000_000, 1),
        ("P", 1_000_000_000_000_000, 1),
        ("E", 1_000_000_000_000_000_000, 1),
        ("", 1, 1),
    ];
    let (number, times, divided_by) = SUFFIXES
        .iter()
        .find_map(|(suffix, times, by)| Some((text.strip_suffix(suffix)?, *times, *by)))?;
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    let digits = format!("{whole}{fraction}");
    let scale = 10_i128.checked_pow(u32::try_from(fraction.len()).ok()?)?;
    let amount = digits
        .parse::<i128>()
        .ok()?
        .checked_mul(times)?
        .checked_mul(1000)?;
    let below = scale.checked_mul(divided_by)?;
    (amount % below == 0).then_some(amount / below)
}

#[cfg(test)]
mod tests;
