//! Reasons of conditions and Events: what scripts and people match on, so each lives here once.

/// Reasons that upstream's controller writes on a Sandbox.
pub mod sandbox {
    pub const DEPENDENCIES_READY: &str = "DependenciesReady";
    pub const DEPENDENCIES_NOT_READY: &str = "DependenciesNotReady";
    pub const SANDBOX_SUSPENDED: &str = "SandboxSuspended";
    pub const SANDBOX_EXPIRED: &str = "SandboxExpired";
    pub const POD_SUCCEEDED: &str = "PodSucceeded";
    pub const POD_FAILED: &str = "PodFailed";
    pub const MULTIPLE_PODS: &str = "MultiplePods";
    pub const RECONCILER_ERROR: &str = "ReconcilerError";
    /// The apiserver calls a part of the Sandbox invalid, so that a retry cannot help (#1630).
    pub const INVALID_CONFIGURATION: &str = "InvalidConfiguration";
    pub const POD_TERMINATED: &str = "PodTerminated";
    pub const NOT_SUSPENDED: &str = "NotSuspended";
    pub const POD_TERMINATING: &str = "PodTerminating";
    pub const POD_NOT_OWNED: &str = "PodNotOwned";
    pub const POD_STATE_UNKNOWN: &str = "PodStateUnknown";
    pub const POD_SCHEDULED: &str = "PodScheduled";
    pub const POD_SCHEDULING_UNKNOWN: &str = "PodSchedulingUnknown";

    /// Every reason of this module.
    pub const ALL: [&str; 16] = [
        DEPENDENCIES_READY,
        DEPENDENCIES_NOT_READY,
        SANDBOX_SUSPENDED,
        SANDBOX_EXPIRED,
        POD_SUCCEEDED,
        POD_FAILED,
        MULTIPLE_PODS,
        RECONCILER_ERROR,
        INVALID_CONFIGURATION,
        POD_TERMINATED,
        NOT_SUSPENDED,
        POD_TERMINATING,
        POD_NOT_OWNED,
        POD_STATE_UNKNOWN,
        POD_SCHEDULED,
        POD_SCHEDULING_UNKNOWN,
    ];
}

/// Reasons that upstream's controller writes on a SandboxClaim, beside those that it copies from the Sandbox.
pub mod claim {
    pub const WARM_POOL_NOT_FOUND: &str = "WarmPoolNotFound";
    pub const TEMPLATE_NOT_FOUND: &str = "TemplateNotFound";
    pub const INVALID_METADATA: &str = "InvalidMetadata";
    pub const ENV_VARS_INJECTION_REJECTED: &str = "EnvVarsInjectionRejected";
    pub const VOLUME_CLAIM_TEMPLATES_ERROR: &str = "VolumeClaimTemplatesError";
    pub const ADOPTION_CONFLICT: &str = "AdoptionConflict";
    pub const SANDBOX_CREATE_PENDING: &str = "SandboxCreatePending";
    pub const CLAIM_EXPIRED: &str = "ClaimExpired";
    pub const SANDBOX_EXPIRED: &str = "SandboxExpired";
    pub const SANDBOX_MISSING: &str = "SandboxMissing";
    pub const SANDBOX_NOT_READY: &str = "SandboxNotReady";
    pub const RECONCILER_ERROR: &str = "ReconcilerError";
    /// The template's NetworkPolicy is not there yet, or not with the template's rules. Torpor's.
    pub const NETWORK_POLICY_PENDING: &str = "NetworkPolicyPending";
    /// Somebody else's NetworkPolicy has the name of the template's own. Torpor's.
    pub const NETWORK_POLICY_NOT_OWNED: &str = "NetworkPolicyNotOwned";

    /// Every reason of this module that upstream has too.
    pub const ALL: [&str; 12] = [
        WARM_POOL_NOT_FOUND,
        TEMPLATE_NOT_FOUND,
        INVALID_METADATA,
        ENV_VARS_INJECTION_REJECTED,
        VOLUME_CLAIM_TEMPLATES_ERROR,
        ADOPTION_CONFLICT,
        SANDBOX_CREATE_PENDING,
        CLAIM_EXPIRED,
        SANDBOX_EXPIRED,
        SANDBOX_MISSING,
        SANDBOX_NOT_READY,
        RECONCILER_ERROR,
    ];
}

/// Reasons of the conditions of a SandboxWarmPool (upstream's #1326;
/// test/e2e/extensions/warmpool_status_condition_test.go).
pub mod pool {
    pub const MINIMUM_REPLICAS_AVAILABLE: &str = "MinimumReplicasAvailable";
    pub const MINIMUM_REPLICAS_UNAVAILABLE: &str = "MinimumReplicasUnavailable";
    pub const WARM_POOL_PROGRESSING: &str = "WarmPoolProgressing";
    pub const WARM_POOL_NOT_PROGRESSING: &str = "WarmPoolNotProgressing";
    pub const SANDBOX_TEMPLATE_ERROR: &str = "SandboxTemplateError";

    /// Every reason of this module.
    pub const ALL: [&str; 5] = [
        MINIMUM_REPLICAS_AVAILABLE,
        MINIMUM_REPLICAS_UNAVAILABLE,
        WARM_POOL_PROGRESSING,
        WARM_POOL_NOT_PROGRESSING,
        SANDBOX_TEMPLATE_ERROR,
    ];
}

/// Reasons that only Torpor writes on a Sandbox's `Suspended` condition (strategy Freeze).
pub mod freeze {
    pub const POD_FROZEN: &str = "PodFrozen";
    pub const POD_FREEZING: &str = "PodFreezing";

    /// Every reason of this module.
    pub const ALL: [&str; 2] = [POD_FROZEN, POD_FREEZING];
}

/// Reasons of the condition `Hibernated`.
pub mod hibernated {
    pub const HIBERNATED: &str = "Hibernated";
    pub const AWAKE: &str = "Awake";
    pub const WAKING: &str = "Waking";
    pub const SAVING: &str = "Saving";
    pub const SAVE_FAILED: &str = "SaveFailed";
    pub const FROZEN: &str = "Frozen";
    pub const DOZING: &str = "Dozing";
    pub const RUNTIME_NOT_CAPABLE: &str = "RuntimeNotCapable";
    /// A suspended sandbox' image cannot be found on its node at the moment.
    pub const IMAGE_MISSING: &str = "ImageMissing";
    pub const INVALID_ANNOTATION: &str = "InvalidAnnotation";
    pub const SNAPSHOT_CLASS_NOT_SUPPORTED: &str = "SnapshotClassNotSupported";

    /// Every reason of this module.
    pub const ALL: [&str; 11] = [
        HIBERNATED,
        AWAKE,
        WAKING,
        SAVING,
        SAVE_FAILED,
        FROZEN,
        DOZING,
        RUNTIME_NOT_CAPABLE,
        IMAGE_MISSING,
        INVALID_ANNOTATION,
        SNAPSHOT_CLASS_NOT_SUPPORTED,
    ];
}

/// Reasons of the condition `Restored`.
pub mod restored {
    pub const RESTORED: &str = "Restored";
    /// A sandbox that crashed while it was awake went back to its last image.
    pub const ROLLED_BACK: &str = "RolledBack";
    pub const COLD_STARTED: &str = "ColdStarted";
    pub const IMAGE_MISSING: &str = "ImageMissing";
    pub const IMAGE_CORRUPT: &str = "ImageCorrupt";
    pub const FINGERPRINT_MISMATCH: &str = "FingerprintMismatch";
    pub const SPEC_MISMATCH: &str = "SpecMismatch";
    pub const IMAGE_STALE: &str = "ImageStale";
    /// The build of runsc that it needs is revoked on the node.
    pub const RUNSC_REVOKED: &str = "RunscRevoked";
    pub const RESTORE_FAILED: &str = "RestoreFailed";
    pub const NODE_UNAVAILABLE: &str = "NodeUnavailable";
    /// Another node than that of the saved Pod claims the image.
    pub const NODE_MISMATCH: &str = "NodeMismatch";
    /// The Pod is gone, and its node has yet to say whether it holds the memory.
    pub const ASKING_NODE: &str = "AskingNode";
    pub const SNAPSHOT_NOT_FOUND: &str = "SnapshotNotFound";
    pub const SNAPSHOT_NOT_READY: &str = "SnapshotNotReady";

    /// Every reason of this module.
    pub const ALL: [&str; 15] = [
        RESTORED,
        ROLLED_BACK,
        COLD_STARTED,
        IMAGE_MISSING,
        IMAGE_CORRUPT,
        FINGERPRINT_MISMATCH,
        SPEC_MISMATCH,
        IMAGE_STALE,
        RUNSC_REVOKED,
        RESTORE_FAILED,
        NODE_UNAVAILABLE,
        NODE_MISMATCH,
        ASKING_NODE,
        SNAPSHOT_NOT_FOUND,
        SNAPSHOT_NOT_READY,
    ];
}

/// Reasons of the conditions `Committed` and `Consumed` of a SandboxSnapshot.
pub mod snapshot {
    pub const COMMITTED: &str = "Committed";
    pub const PENDING: &str = "Pending";
    pub const SAVING: &str = "Saving";
    pub const SAVE_FAILED: &str = "SaveFailed";
    pub const SANDBOX_NOT_FOUND: &str = "SandboxNotFound";
    pub const RUNTIME_NOT_CAPABLE: &str = "RuntimeNotCapable";
    /// It was whole once, and is not on its node now.
    pub const IMAGE_MISSING: &str = "ImageMissing";
    /// Consumed: some Pod was restored from the image.
    pub const RESUMED: &str = "Resumed";
    /// Consumed: the sandbox was started cold instead, so the image is older than the sandbox. Only a restore by name uses it from then on.
    pub const SUPERSEDED: &str = "Superseded";

    /// Every reason of this module.
    pub const ALL: [&str; 9] = [
        COMMITTED,
        PENDING,
        SAVING,
        SAVE_FAILED,
        SANDBOX_NOT_FOUND,
        RUNTIME_NOT_CAPABLE,
        IMAGE_MISSING,
        RESUMED,
        SUPERSEDED,
    ];
}

/// Reasons of the agent's planner, as a SandboxNode's `status.sandboxes[].reasons` shows them.
pub mod plan {
    pub const BUSY: &str = "Busy";
    pub const LIVE_UNKNOWN: &str = "LiveUnknown";
    pub const LEDGER_CORRUPT: &str = "LedgerCorrupt";
    pub const RESTORING: &str = "Restoring";
    pub const SLEEP_WANTED: &str = "SleepWanted";
    pub const IDLE: &str = "Idle";
    pub const PRESSURE: &str = "Pressure";
    pub const DOZING: &str = "Dozing";
    pub const AWAKE_WANTED: &str = "AwakeWanted";
    pub const FREEZE_WANTED: &str = "FreezeWanted";
    pub const SNAPSHOT_WANTED: &str = "SnapshotWanted";
    pub const DELETION_WANTED: &str = "DeletionWanted";
    pub const IMAGE_ADOPTED: &str = "ImageAdopted";
    pub const SLEEPING: &str = "Sleeping";
    pub const SETTLED: &str = "Settled";
    pub const AWAKE_UNRECORDED: &str = "AwakeUnrecorded";
    pub const RECORD_STALE: &str = "RecordStale";
    pub const SAVE_UNFINISHED: &str = "SaveUnfinished";
    pub const END_UNFINISHED: &str = "EndUnfinished";
    pub const NOT_CAPABLE: &str = "NotCapable";
    pub const IN_USE: &str = "InUse";
    pub const NOT_READY: &str = "NotReady";
    pub const DEBUGGED: &str = "Debugged";
    pub const AWAITING_TURN: &str = "AwaitingTurn";
    pub const AWAITING_BANDWIDTH: &str = "AwaitingBandwidth";
    pub const BACKOFF: &str = "Backoff";
    pub const AWAITING_CONTAINERS: &str = "AwaitingContainers";
    pub const NO_SANDBOX: &str = "NoSandbox";
    pub const IMAGE_MISSING: &str = "ImageMissing";
    pub const GARBAGE: &str = "Garbage";
    pub const UNCLAIMED: &str = "Unclaimed";
    pub const ASKING: &str = "Asking";
    pub const GIVEN_UP: &str = "GivenUp";
    pub const POD_TERMINATING: &str = "PodTerminating";
    pub const POD_GONE: &str = "PodGone";
    pub const NUMBERS_EXHAUSTED: &str = "NumbersExhausted";

    /// Every reason of this module.
    pub const ALL: [&str; 36] = [
        BUSY,
        LIVE_UNKNOWN,
        LEDGER_CORRUPT,
        RESTORING,
        SLEEP_WANTED,
        IDLE,
        PRESSURE,
        DOZING,
        AWAKE_WANTED,
        FREEZE_WANTED,
        SNAPSHOT_WANTED,
        DELETION_WANTED,
        IMAGE_ADOPTED,
        SLEEPING,
        SETTLED,
        AWAKE_UNRECORDED,
        RECORD_STALE,
        SAVE_UNFINISHED,
        END_UNFINISHED,
        NOT_CAPABLE,
        IN_USE,
        NOT_READY,
        DEBUGGED,
        AWAITING_TURN,
        AWAITING_BANDWIDTH,
        BACKOFF,
        AWAITING_CONTAINERS,
        NO_SANDBOX,
        IMAGE_MISSING,
        GARBAGE,
        UNCLAIMED,
        ASKING,
        GIVEN_UP,
        POD_TERMINATING,
        POD_GONE,
        NUMBERS_EXHAUSTED,
    ];
}

/// Reasons of Events. Those on a Pod are written by the agent, the others by the controller where nothing else is said.
pub mod event {
    /// The first seven tell the life of a Sandbox, as upstream's do since 1.0.4 (#1532).
    pub const SANDBOX_POD_CREATED: &str = "SandboxPodCreated";
    pub const SANDBOX_POD_CREATE_FAILED: &str = "SandboxPodCreateFailed";
    pub const SANDBOX_READY: &str = "SandboxReady";
    pub const SANDBOX_SUSPENDED: &str = "SandboxSuspended";
    pub const SANDBOX_EXPIRED: &str = "SandboxExpired";
    pub const POD_SUCCEEDED: &str = "PodSucceeded";
    pub const POD_FAILED: &str = "PodFailed";
    pub const MULTIPLE_PODS: &str = "MultiplePods";
    pub const INVALID_ANNOTATION: &str = "InvalidAnnotation";
    pub const SNAPSHOT_COMMITTED: &str = "SnapshotCommitted";
    pub const SNAPSHOT_FAILED: &str = "SnapshotFailed";
    pub const RESUMED: &str = "Resumed";
    pub const RESTORE_FAILED: &str = "RestoreFailed";
    pub const COLD_STARTED: &str = "ColdStarted";
    pub const MEMORY_NOT_KEPT: &str = "MemoryNotKept";
    pub const IMAGE_ABANDONED: &str = "ImageAbandoned";
    pub const SANDBOX_ADOPTED: &str = "SandboxAdopted";
    pub const SANDBOX_PROVISIONED: &str = "SandboxProvisioned";
    pub const CLAIM_EXPIRED: &str = "ClaimExpired";
    /// A claim names a pool that its namespace does not have.
    pub const WARM_POOL_NOT_FOUND: &str = "WarmPoolNotFound";
    pub const WARM_POOL_NOT_PROGRESSING: &str = "WarmPoolNotProgressing";
    pub const WARM_POOL_PROGRESSING: &str = "WarmPoolProgressing";
    /// A pool's template names no RuntimeClass where there is one that keeps memory.
    pub const RUNTIME_NOT_NAMED: &str = "RuntimeNotNamed";
    /// Somebody else's NetworkPolicy has the name of a template's own.
    pub const NETWORK_POLICY_NOT_OWNED: &str = "NetworkPolicyNotOwned";
    /// A sandbox sleeps before its time, because its node is short of memory or swap.
    pub const NODE_PRESSURE: &str = "NodePressure";
    /// A snapshot was deleted by a rule of its SnapshotClass.
    pub const SNAPSHOT_EXPIRED: &str = "SnapshotExpired";
    /// The memory of a Sandbox' Pod that is gone was removed from its node, because no SandboxSnapshot named that Pod. Written by the agent.
    pub const MEMORY_GIVEN_UP: &str = "MemoryGivenUp";

    /// Every reason of this module.
    pub const ALL: [&str; 27] = [
        SANDBOX_POD_CREATED,
        SANDBOX_POD_CREATE_FAILED,
        SANDBOX_READY,
        SANDBOX_SUSPENDED,
        SANDBOX_EXPIRED,
        POD_SUCCEEDED,
        POD_FAILED,
        SNAPSHOT_EXPIRED,
        MULTIPLE_PODS,
        INVALID_ANNOTATION,
        SNAPSHOT_COMMITTED,
        SNAPSHOT_FAILED,
        RESUMED,
        RESTORE_FAILED,
        COLD_STARTED,
        MEMORY_NOT_KEPT,
        IMAGE_ABANDONED,
        SANDBOX_ADOPTED,
        SANDBOX_PROVISIONED,
        CLAIM_EXPIRED,
        WARM_POOL_NOT_FOUND,
        WARM_POOL_NOT_PROGRESSING,
        WARM_POOL_PROGRESSING,
        RUNTIME_NOT_NAMED,
        NETWORK_POLICY_NOT_OWNED,
        NODE_PRESSURE,
        MEMORY_GIVEN_UP,
    ];
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_reason_is_camel_case_and_unique_in_its_family() {
        let families: [&[&str]; 9] = [
            &sandbox::ALL,
            &claim::ALL,
            &pool::ALL,
            &freeze::ALL,
            &hibernated::ALL,
            &restored::ALL,
            &snapshot::ALL,
            &plan::ALL,
            &event::ALL,
        ];
        for family in families {
            let mut seen = std::collections::BTreeSet::new();
            for reason in family {
                assert!(seen.insert(reason), "{reason} twice");
                assert!(
                    reason.starts_with(|c: char| c.is_ascii_uppercase()),
                    "{reason}"
                );
                assert!(
                    reason.chars().all(|c| c.is_ascii_alphanumeric()),
                    "{reason}"
                );
            }
        }
    }

    #[test]
    fn upstream_reasons_are_spelled_as_upstream_spells_them() {
        insta::assert_snapshot!(sandbox::ALL.join(" "), @"DependenciesReady DependenciesNotReady SandboxSuspended SandboxExpired PodSucceeded PodFailed MultiplePods ReconcilerError InvalidConfiguration PodTerminated NotSuspended PodTerminating PodNotOwned PodStateUnknown PodScheduled PodSchedulingUnknown");
        insta::assert_snapshot!(claim::ALL.join(" "), @"WarmPoolNotFound TemplateNotFound InvalidMetadata EnvVarsInjectionRejected VolumeClaimTemplatesError AdoptionConflict SandboxCreatePending ClaimExpired SandboxExpired SandboxMissing SandboxNotReady ReconcilerError");
    }
}
