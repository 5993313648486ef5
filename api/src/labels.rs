//! Labels that the controller writes and selects by. The keys are upstream's except where marked as
//! Torpor's.

/// Prefixes of keys that belong to the controllers; a user's pod template cannot set them.
pub const SYSTEM_PREFIXES: [&str; 2] = ["agents.x-k8s.io/", "extensions.agents.x-k8s.io/"];

/// FNV-1a hash of the Sandbox's name, on its Pod, Service and claims; the Service selects by it.
pub const SANDBOX_NAME_HASH: &str = "agents.x-k8s.io/sandbox-name-hash";
/// Hash of the pool's name, on a Sandbox and its Pod while they are unclaimed.
pub const WARM_POOL_SANDBOX: &str = "agents.x-k8s.io/warm-pool-sandbox";
/// Hash of the template's name; the template's NetworkPolicy selects by it.
pub const SANDBOX_TEMPLATE_REF_HASH: &str = "agents.x-k8s.io/sandbox-template-ref-hash";
/// Hash of the template's blueprint.
pub const SANDBOX_TEMPLATE_HASH: &str = "agents.x-k8s.io/sandbox-template-hash";
/// Deprecated alias of [`SANDBOX_TEMPLATE_HASH`].
pub const SANDBOX_POD_TEMPLATE_HASH: &str = "agents.x-k8s.io/sandbox-pod-template-hash";
/// `warm` or `cold`.
pub const LAUNCH_TYPE: &str = "agents.x-k8s.io/launch-type";
/// Client that created the object; see [`created_by`].
pub const CREATED_BY: &str = "agents.x-k8s.io/created-by";
/// UID of the claim that holds a Sandbox.
pub const CLAIM_UID: &str = "agents.x-k8s.io/claim-uid";
/// Legacy form of the annotation of this key: name of the Sandbox that a claim holds.
pub const SANDBOX_NAME: &str = "agents.x-k8s.io/sandbox-name";
/// `true` lets a Sandbox adopt an object without an owner.
pub const ADOPTABLE: &str = "agents.x-k8s.io/adoptable";
/// On a Pod whose Sandbox has no template: `default` if the namespace's default NetworkPolicy
/// selects the Pod, else `none`. Torpor's.
pub const NETWORK_POLICY: &str = "torpor.dev/network-policy";

/// Hash of the template's name, on a golden Sandbox and its SandboxSnapshots. Torpor's.
pub const GOLDEN: &str = "torpor.dev/golden";

/// Hash of the template's name, on a Pod that stages the template's images. Torpor's.
pub const STAGED_IMAGES: &str = "torpor.dev/staged-images";

/// `true` on a Secret, ConfigMap or ServiceAccount: claims of its namespace may bring it to a
/// sandbox (`torpor.dev/claim-files`). On a SandboxSnapshot: claims may fork it
/// (`torpor.dev/fork-of`). Its owner writes the label. Torpor's.
pub const CLAIMABLE: &str = "torpor.dev/claimable";

/// `true` on a SandboxSnapshot that keeps the image of a sandbox asleep in place off its node
/// (`torpor.dev/back-up-after`). Torpor's.
pub const BACKUP: &str = "torpor.dev/backup";

/// Every label of this module that a controller writes.
pub const ALL: [&str; 14] = [
    SANDBOX_NAME_HASH,
    WARM_POOL_SANDBOX,
    SANDBOX_TEMPLATE_REF_HASH,
    SANDBOX_TEMPLATE_HASH,
    SANDBOX_POD_TEMPLATE_HASH,
    LAUNCH_TYPE,
    CREATED_BY,
    CLAIM_UID,
    SANDBOX_NAME,
    ADOPTABLE,
    NETWORK_POLICY,
    GOLDEN,
    STAGED_IMAGES,
    BACKUP,
];

/// Reports whether a key is reserved for the controllers: it has one of upstream's prefixes, or it
/// is one of Torpor's labels.
pub fn is_system(key: &str) -> bool {
    [NETWORK_POLICY, GOLDEN, STAGED_IMAGES, BACKUP].contains(&key)
        || SYSTEM_PREFIXES.iter().any(|prefix| key.starts_with(prefix))
}

/// Maps a value of [`CREATED_BY`] to the closed set of values of a metric label.
pub fn created_by(value: &str) -> &'static str {
    match value {
        "go-client" => "go-client",
        "python-client" => "python-client",
        "controller" => "controller",
        _ => "unknown",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_label_is_a_system_label_and_listed_once() {
        let mut seen = std::collections::BTreeSet::new();
        for label in ALL {
            assert!(is_system(label), "{label} is not reserved");
            assert!(seen.insert(label), "{label} twice");
        }
    }

    #[test]
    fn foreign_prefixes_are_not_system_labels() {
        for key in [
            "app",
            "agents.x-k8s.io",
            "my.agents.x-k8s.io/x",
            "torpor.dev/x",
        ] {
            assert!(!is_system(key), "{key}");
        }
        assert!(is_system("extensions.agents.x-k8s.io/anything"));
    }

    #[test]
    fn created_by_is_normalised_to_a_closed_set() {
        assert_eq!(created_by("python-client"), "python-client");
        assert_eq!(created_by("curl"), "unknown");
    }
}
