//! The share of the images' disk that one namespace may take, and the saves that it refuses.

use std::collections::BTreeMap;
use std::num::NonZeroU64;

use crate::ids::Namespace;
use crate::state::Desired;

const MIB: u64 = 1 << 20;
/// Largest number of namespaces that are reported.
pub const MOST_REPORTED: usize = 32;

/// The limit on the images of a namespace (`--store-per-namespace`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PerNamespace {
    Unlimited,
    Bytes(NonZeroU64),
    /// Percent of the file system.
    Percent(u8),
}

impl PerNamespace {
    /// Returns the limit in bytes on a file system of `file_system` bytes. `None`: there is no
    /// limit, or the size of the file system is not known (0).
    pub fn bytes(self, file_system: u64) -> Option<u64> {
        match self {
            Self::Unlimited => None,
            Self::Bytes(bytes) => Some(bytes.get()),
            Self::Percent(percent) => {
                Some(file_system / 100 * u64::from(percent)).filter(|_| file_system > 0)
            }
        }
    }
}

/// The error of a save that the limit refuses.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "the images of namespace {namespace} take {} MiB on this node, the new image may take {} MiB, and the limit of a namespace is {} MiB (--store-per-namespace). The sandbox runs on. Delete SandboxSnapshots or sleeping Sandboxes of the namespace, or raise the limit",
    used / MIB, wanted.div_ceil(MIB), limit / MIB
)]
pub struct OverLimit {
    pub namespace: Namespace,
    /// Bytes.
    pub used: u64,
    pub wanted: u64,
    pub limit: u64,
}

impl OverLimit {
    /// The CamelCase reason for conditions and metrics.
    pub const REASON: &str = "NamespaceStoreFull";
}

/// Returns whether the limit applies to the wanted save of the Pod's sandbox. A Suspend and an
/// eviction end the Pod: without the image its memory would be lost, or the drain blocked. Only
/// the disk's reserve limits such a save.
pub fn applies_to(desired: &Desired) -> bool {
    !desired.suspending() && !desired.evicted
}

/// Checks an image of up to `wanted` bytes against the limit of a namespace whose images take
/// `used` bytes. Errors: the sum is above the limit.
pub fn check(
    namespace: &Namespace,
    used: u64,
    wanted: u64,
    limit: Option<u64>,
) -> Result<(), OverLimit> {
    match limit {
        Some(limit) if used.saturating_add(wanted) > limit => Err(OverLimit {
            namespace: namespace.clone(),
            used,
            wanted,
            limit,
        }),
        _ => Ok(()),
    }
}

/// The share of a namespace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Share {
    pub namespace: Namespace,
    pub bytes: u64,
    /// The images of the namespace take the whole limit.
    pub limited: bool,
}

/// Returns the namespaces whose images take most, largest first. `images`: each image's namespace
/// and size in bytes.
pub fn largest<'a>(
    images: impl Iterator<Item = (&'a Namespace, u64)>,
    limit: Option<u64>,
) -> Vec<Share> {
    let mut sums = BTreeMap::<&Namespace, u64>::new();
    for (namespace, bytes) in images {
        let sum = sums.entry(namespace).or_default();
        *sum = sum.saturating_add(bytes);
    }
    let share = |(namespace, bytes): (&Namespace, u64)| Share {
        namespace: namespace.clone(),
        bytes,
        limited: limit.is_some_and(|limit| bytes >= limit),
    };
    let mut shares: Vec<Share> = sums.into_iter().map(share).collect();
    // The sort is stable: namespaces of equal size stay in the order of their names.
    shares.sort_by_key(|share| std::cmp::Reverse(share.bytes));
    shares.truncate(MOST_REPORTED);
    shares
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::PodUid;
    use crate::state::{
        PodPresence, Power, SleepAfter, SnapshotIntent, SnapshotReason, SnapshotWish,
    };

    fn namespace(name: &str) -> Namespace {
        Namespace::new(name).expect("a name")
    }

    fn desired(power: Power) -> Desired {
        Desired {
            pod_uid: PodUid::new("pod-a").expect("a uid"),
            pod: PodPresence::Present,
            departure: None,
            answer: None,
            power,
            sleep: SleepAfter::default(),
            pressure: Default::default(),
            evicted: false,
            keep_last_image: false,
            wake_up: Default::default(),
            snapshots: Vec::new(),
            claim: None,
            has_sleep_condition: false,
            containers: Default::default(),
            ready: true,
        }
    }

    fn snapshot(reason: SnapshotReason) -> SnapshotIntent {
        SnapshotIntent {
            uid: crate::SnapshotUid::new("s").expect("a uid"),
            name: "ns/s".to_owned(),
            pod_uid: PodUid::new("pod-a").expect("a uid"),
            reason,
            image: None,
            wish: SnapshotWish::Keep,
        }
    }

    #[test]
    fn a_namespace_that_would_take_more_than_its_share_is_refused_with_the_remedy() {
        let ns = namespace("tenant");
        assert_eq!(check(&ns, 60 * MIB, 40 * MIB, Some(100 * MIB)), Ok(()));
        assert_eq!(check(&ns, u64::MAX, 1, None), Ok(()));
        let error = check(&ns, 60 * MIB, 40 * MIB + 1, Some(100 * MIB)).expect_err("refused");
        let words = error.to_string();
        for part in [
            "tenant",
            "60 MiB",
            "41 MiB",
            "100 MiB",
            "--store-per-namespace",
            "Delete",
        ] {
            assert!(words.contains(part), "{part}: {words}");
        }
        check(&ns, u64::MAX, u64::MAX, Some(u64::MAX - 1)).expect_err("no overflow");
    }

    #[test]
    fn the_limit_is_bytes_or_a_part_of_the_file_system() {
        assert_eq!(PerNamespace::Percent(50).bytes(1000), Some(500));
        assert_eq!(PerNamespace::Percent(50).bytes(0), None);
        let bytes = NonZeroU64::new(7).expect("not zero");
        assert_eq!(PerNamespace::Bytes(bytes).bytes(0), Some(7));
        assert_eq!(PerNamespace::Unlimited.bytes(1000), None);
    }

    #[test]
    fn a_save_for_a_suspend_or_an_eviction_is_never_refused() {
        for power in [Power::Awake, Power::Asleep, Power::Dozing] {
            assert!(applies_to(&desired(power)), "{power:?}");
        }
        let manual = Desired {
            snapshots: vec![snapshot(SnapshotReason::Manual)],
            ..desired(Power::Awake)
        };
        assert!(applies_to(&manual));
        let suspended = Desired {
            snapshots: vec![
                snapshot(SnapshotReason::Manual),
                snapshot(SnapshotReason::Suspend),
            ],
            ..desired(Power::Awake)
        };
        assert!(!applies_to(&suspended));
        let evicted = Desired {
            evicted: true,
            ..desired(Power::Awake)
        };
        assert!(!applies_to(&evicted));
    }

    #[test]
    fn the_largest_namespaces_are_reported_and_no_more_than_a_few() {
        let (a, b) = (namespace("a"), namespace("b"));
        let images = [(&a, 1), (&b, 5), (&a, 2)].into_iter();
        let share = |namespace: &Namespace, bytes, limited| Share {
            namespace: namespace.clone(),
            bytes,
            limited,
        };
        let expected = [share(&b, 5, true), share(&a, 3, false)];
        assert_eq!(largest(images, Some(5)), expected);
        let many: Vec<Namespace> = (0..100).map(|n| namespace(&format!("n{n}"))).collect();
        let reported = largest(many.iter().map(|one| (one, 1)), None);
        assert_eq!(reported.len(), MOST_REPORTED);
    }
}
