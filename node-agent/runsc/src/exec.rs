//! An OCI process as an argument of gVisor's control socket (control.ExecArgs). Pure.

use serde_json::{Value, json};

use crate::spec::{CAP_NET_RAW, adds_net_raw};

/// Why a process cannot be run.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum Error {
    #[error("the OCI process has no args")]
    NoArgs,
    #[error("the OCI process names {0:?}, which is not a capability")]
    UnknownCapability(String),
}

/// Capabilities by number, from 0 (linux/capability.h).
const CAPABILITIES: [&str; 41] = [
    "CAP_CHOWN",
    "CAP_DAC_OVERRIDE",
    "CAP_DAC_READ_SEARCH",
    "CAP_FOWNER",
    "CAP_FSETID",
    "CAP_KILL",
    "CAP_SETGID",
    "CAP_SETUID",
    "CAP_SETPCAP",
    "CAP_LINUX_IMMUTABLE",
    "CAP_NET_BIND_SERVICE",
    "CAP_NET_BROADCAST",
    "CAP_NET_ADMIN",
    "CAP_NET_RAW",
    "CAP_IPC_LOCK",
    "CAP_IPC_OWNER",
    "CAP_SYS_MODULE",
    "CAP_SYS_RAWIO",
    "CAP_SYS_CHROOT",
    "CAP_SYS_PTRACE",
    "CAP_SYS_PACCT",
    "CAP_SYS_ADMIN",
    "CAP_SYS_BOOT",
    "CAP_SYS_NICE",
    "CAP_SYS_RESOURCE",
    "CAP_SYS_TIME",
    "CAP_SYS_TTY_CONFIG",
    "CAP_MKNOD",
    "CAP_LEASE",
    "CAP_AUDIT_WRITE",
    "CAP_AUDIT_CONTROL",
    "CAP_SETFCAP",
    "CAP_MAC_OVERRIDE",
    "CAP_MAC_ADMIN",
    "CAP_SYSLOG",
    "CAP_WAKE_ALARM",
    "CAP_BLOCK_SUSPEND",
    "CAP_AUDIT_READ",
    "CAP_PERFMON",
    "CAP_BPF",
    "CAP_CHECKPOINT_RESTORE",
];

/// Returns the argument of [`crate::control::Control::execute`] for `process`, an OCI process
/// object, in the container whose OCI spec is `spec`. A process without capabilities of its own has
/// the container's. The process has NET_RAW only where the Pod adds NET_RAW to the container,
/// because containerd's list of capabilities has NET_RAW by default.
pub fn exec_args(process: &Value, spec: &Value, container: &str) -> Result<Value, Error> {
    let args = process
        .get("args")
        .filter(|args| args.as_array().is_some_and(|a| !a.is_empty()));
    let id = |field: &str| {
        process
            .pointer(&format!("/user/{field}"))
            .cloned()
            .unwrap_or_else(|| json!(0))
    };
    let capabilities = process
        .get("capabilities")
        .or_else(|| spec.pointer("/process/capabilities"))
        .unwrap_or(&Value::Null);
    let net_raw = adds_net_raw(spec);
    let mask = |set: &str| mask(capabilities.get(set), net_raw);
    let flag = |name: &str| process.get(name).and_then(Value::as_bool).unwrap_or(false);
    Ok(json!({
        "argv": args.ok_or(Error::NoArgs)?,
        "envv": process.get("env").cloned().unwrap_or_else(|| json!([])),
        "wd": process.get("cwd").cloned().unwrap_or_else(|| json!("/")),
        "KUID": id("uid"),
        "KGID": id("gid"),
        "ExtraKGIDs": process.pointer("/user/additionalGids").cloned().unwrap_or_else(|| json!([])),
        "NoNewPrivileges": flag("noNewPrivileges"),
        "Capabilities": {
            "PermittedCaps": mask("permitted")?,
            "InheritableCaps": mask("inheritable")?,
            "EffectiveCaps": mask("effective")?,
            "BoundingCaps": mask("bounding")?,
            "AmbientCaps": mask("ambient")?,
        },
        "StdioIsPty": flag("terminal"),
        "SupportTTYs": true,
        "GuestFDs": [0, 1, 2],
        "ContainerID": container,
    }))
}

/// Returns the argument of [`crate::control::Control::execute`] for a helper: a program of Torpor's
/// that is not in the container. Its file is sent after the three standard streams. It runs as an
/// unprivileged user, without capabilities.
pub fn helper_args(argv: &[&str], container: &str) -> Result<Value, Error> {
    const NOBODY: u32 = 65534;
    let process = json!({
        "args": argv, "user": { "uid": NOBODY, "gid": NOBODY }, "noNewPrivileges": true,
    });
    exec_args(&process, &Value::Null, container)
}

fn mask(names: Option<&Value>, net_raw: bool) -> Result<u64, Error> {
    let names = names.and_then(Value::as_array).into_iter().flatten();
    let names = names.filter_map(Value::as_str);
    let mut names = names.filter(|name| net_raw || *name != CAP_NET_RAW);
    names.try_fold(0, |mask, name| {
        match CAPABILITIES.iter().position(|known| *known == name) {
            Some(number) => Ok(mask | (1 << number)),
            None => Err(Error::UnknownCapability(name.to_owned())),
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_without_own_capabilities_has_its_containers_capabilities() {
        let spec =
            json!({ "process": { "capabilities": { "effective": ["CAP_CHOWN", "CAP_KILL"] } } });
        let process = json!({ "args": ["sh"], "user": { "uid": 7, "gid": 8 } });
        let args = exec_args(&process, &spec, "c").expect("args");
        assert_eq!(args["Capabilities"]["EffectiveCaps"], json!(0b10_0001));
        assert_eq!(args["KUID"], json!(7));
        assert_eq!(args["wd"], json!("/"));
        let own = json!({ "args": ["sh"], "capabilities": { "effective": [] } });
        let args = exec_args(&own, &spec, "c").expect("args");
        assert_eq!(args["Capabilities"]["EffectiveCaps"], json!(0));
    }

    #[test]
    fn a_process_gets_raw_sockets_only_from_its_container_and_no_unknown_capability() {
        let with = |name: &str| {
            exec_args(
                &json!({ "args": ["sh"], "capabilities": { "bounding": [name] } }),
                &json!({}),
                "c",
            )
        };
        assert_eq!(
            with("CAP_NET_RAW").expect("args")["Capabilities"]["BoundingCaps"],
            json!(0)
        );
        let process = json!({ "args": ["sh"], "capabilities": { "bounding": ["CAP_NET_RAW"] } });
        let spec = json!({ "annotations": {
            "io.kubernetes.cri.container-name": "c", "torpor.dev/net-raw": "b,c",
        } });
        let args = exec_args(&process, &spec, "id").expect("args");
        assert_eq!(args["Capabilities"]["BoundingCaps"], json!(1 << 13));
        let highest = with("CAP_CHECKPOINT_RESTORE").expect("args");
        assert_eq!(highest["Capabilities"]["BoundingCaps"], json!(1_u64 << 40));
        assert_eq!(
            with("CAP_FLY"),
            Err(Error::UnknownCapability("CAP_FLY".to_owned()))
        );
        assert_eq!(
            exec_args(&json!({ "args": [] }), &json!({}), "c"),
            Err(Error::NoArgs)
        );
    }
}
