//! No client required. Builds a member of a pool as JSON, so that fields of a newer Kubernetes are
//! kept.

use kube::{Resource, ResourceExt};
use serde_json::{Value, json};
use torpor_api::{SandboxTemplate, SandboxWarmPool, annotations, labels, name_hash};

use crate::{blueprint, owners::owner_reference};

/// Characters of generated names, as in Kubernetes: no vowels, no characters that look alike.
const ALPHABET: &[u8] = b"bcdfghjklmnpqrstvwxz2456789";
const SUFFIX: usize = 5;
/// Longest name that Kubernetes generates.
const LONGEST: usize = 63;

/// Returns the beginning of a name that leaves room for a suffix, which begins with a dash. The
/// name is also the Pod's hostname.
pub fn shortened(name: &str, suffix: usize) -> &str {
    let stem = name.get(..LONGEST.saturating_sub(suffix)).unwrap_or(name);
    // A cut after a dot would leave a label that begins with the dash.
    stem.trim_end_matches(['-', '.'])
}

/// Returns the name of a new member: of the form that the apiserver generates, but known before the
/// call.
pub fn name(pool: &str, salt: u64, number: usize) -> String {
    let mut state = salt ^ (number as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mut name = format!("{}-", shortened(pool, SUFFIX + 1));
    for _ in 0..SUFFIX {
        // splitmix64: neighbouring numbers give unrelated letters.
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^= mixed >> 31;
        let at = usize::try_from(mixed % ALPHABET.len() as u64).unwrap_or_default();
        name.push(char::from(ALPHABET[at]));
    }
    name
}

/// How a member starts.
#[derive(Clone, Copy, Debug, Default)]
pub struct Start<'a> {
    /// It sleeps until a claim takes it.
    pub asleep: bool,
    /// Golden Sandbox whose images it may start from.
    pub golden: Option<&'a str>,
    /// The autoscaler may evict it.
    pub eviction: bool,
}

/// Returns the Sandbox to create.
///
/// The name of its Pod is known and set here, so that it needs no write of its own. Permission for
/// the autoscaler to evict the Pod is set on the Sandbox and not in its pod template: its removal
/// by a claim is then no change of the spec.
pub fn sandbox(
    pool: &SandboxWarmPool,
    template: &SandboxTemplate,
    name: &str,
    start: Start<'_>,
) -> Value {
    let spec = &template.spec;
    let mut on_sandbox = blueprint::sandbox_annotations(template);
    on_sandbox[annotations::POD_NAME] = json!(name);
    let decided = spec
        .pod_template
        .annotations()
        .is_some_and(|all| all.contains_key(annotations::SAFE_TO_EVICT));
    if start.eviction && !decided {
        on_sandbox[annotations::SAFE_TO_EVICT] = "true".into();
    }
    if start.asleep {
        on_sandbox[annotations::HIBERNATE] = "true".into();
    }
    if let Some(golden) = start.golden {
        on_sandbox[annotations::GOLDEN_SANDBOX] = golden.into();
    }
    json!({
        "apiVersion": torpor_api::Sandbox::api_version(&()),
        "kind": torpor_api::Sandbox::kind(&()),
        "metadata": {
            "name": name,
            "namespace": pool.namespace(),
            "labels": {
                labels::WARM_POOL_SANDBOX: name_hash(&pool.name_any()),
                labels::SANDBOX_TEMPLATE_REF_HASH: name_hash(&template.name_any()),
                labels::SANDBOX_TEMPLATE_HASH: blueprint::blueprint_hash(template),
                labels::SANDBOX_POD_TEMPLATE_HASH: blueprint::pod_template_hash(template),
                labels::LAUNCH_TYPE: "warm",
                labels::CREATED_BY: "controller",
            },
            "annotations": on_sandbox,
            "ownerReferences": [owner_reference(pool)],
        },
        "spec": blueprint::sandbox_spec(
            template,
            spec.pod_template.metadata.as_ref(),
            blueprint::secured_pod_spec(template),
            &spec.volume_claim_templates,
        ),
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn names_are_like_generated_ones_and_differ() {
        let names: BTreeSet<String> = (0..500).map(|number| name("py", 7, number)).collect();
        assert!(names.len() > 498, "{}", names.len());
        for name in &names {
            let suffix = name.strip_prefix("py-").unwrap();
            assert_eq!(suffix.len(), SUFFIX);
            assert!(suffix.bytes().all(|c| ALPHABET.contains(&c)), "{name}");
        }
        assert_eq!(name("py", 7, 1), name("py", 7, 1));
        assert_ne!(name("py", 7, 1), name("py", 8, 1));
        assert_eq!(name(&"p".repeat(253), 7, 1).len(), LONGEST);
    }

    #[test]
    fn the_name_of_a_long_pool_is_cut_to_a_name() {
        for length in 50..60 {
            let pool = format!("{}.{}", "p".repeat(length), "q".repeat(20));
            let name = name(&pool, 7, 1);
            assert!(annotations::is_dns_subdomain(&name), "{name}");
        }
    }
}
