//! Reasons of conditions and Events. Scripts and users match on them.

use crate::documented::documented;

documented! {
    /// Reasons of a Sandbox's conditions `Ready`, `Suspended`, `PodScheduled` and `Finished`.
    /// Upstream's controller writes the same ones.
    pub mod sandbox {
        /// Ready: the Pod is Ready, and the Service exists where the Sandbox asks for one.
        DEPENDENCIES_READY = "DependenciesReady";
        /// Not Ready: the Pod or the Service is missing or not ready. The message says which.
        DEPENDENCIES_NOT_READY = "DependenciesNotReady";
        /// Not Ready: the Sandbox is suspended.
        SANDBOX_SUSPENDED = "SandboxSuspended";
        /// Not Ready: the Sandbox's shutdown time has passed.
        SANDBOX_EXPIRED = "SandboxExpired";
        /// Finished: every container of the Pod exited with code 0.
        POD_SUCCEEDED = "PodSucceeded";
        /// Finished: the Pod failed.
        POD_FAILED = "PodFailed";
        /// Not Ready: several Pods belong to the Sandbox.
        MULTIPLE_PODS = "MultiplePods";
        /// Not Ready: an API call failed. Its error follows `Error seen:`. The controller retries.
        RECONCILER_ERROR = "ReconcilerError";
        /// Not Ready: the apiserver rejects a field of the Pod, of a volume claim or of the Service
        /// as invalid (#1630). The controller retries when the Sandbox changes, and every ten
        /// minutes.
        INVALID_CONFIGURATION = "InvalidConfiguration";
        /// Suspended: the Pod is gone.
        POD_TERMINATED = "PodTerminated";
        /// Not Suspended: `operatingMode` is `Running`.
        NOT_SUSPENDED = "NotSuspended";
        /// Not Suspended yet: the Pod is terminating.
        POD_TERMINATING = "PodTerminating";
        /// Not Suspended: a Pod with the Sandbox's name exists that the Sandbox does not own.
        POD_NOT_OWNED = "PodNotOwned";
        /// Suspended is unknown: the Pod could not be read.
        POD_STATE_UNKNOWN = "PodStateUnknown";
        /// PodScheduled: the scheduler has chosen a node.
        POD_SCHEDULED = "PodScheduled";
        /// PodScheduled is unknown: the Pod does not report it yet.
        POD_SCHEDULING_UNKNOWN = "PodSchedulingUnknown";
        /// The Sandbox serves a claim that has not arrived in its sandbox (`torpor.dev/late-bind`,
        /// `torpor.dev/on-claim-exec`). Torpor's.
        BINDING = "Binding";
    }
}

documented! {
    /// Reasons of a SandboxClaim's condition `Ready`, besides those that it copies from the
    /// Sandbox. All are upstream's, except where stated.
    pub mod claim {
        /// The claim's namespace has no SandboxWarmPool of that name.
        WARM_POOL_NOT_FOUND = "WarmPoolNotFound";
        /// The claim's namespace has no SandboxTemplate of that name.
        TEMPLATE_NOT_FOUND = "TemplateNotFound";
        /// `additionalPodMetadata` is malformed, not allowed, or contradicts the template.
        INVALID_METADATA = "InvalidMetadata";
        /// The template does not admit the claim's environment variables, or has no such container.
        ENV_VARS_INJECTION_REJECTED = "EnvVarsInjectionRejected";
        /// The template does not admit the claim's volume claim templates.
        VOLUME_CLAIM_TEMPLATES_ERROR = "VolumeClaimTemplatesError";
        /// Other claims took three members of the pool first. The controller retries.
        ADOPTION_CONFLICT = "AdoptionConflict";
        /// The claim's Sandbox is being created.
        SANDBOX_CREATE_PENDING = "SandboxCreatePending";
        /// The claim's time has passed.
        CLAIM_EXPIRED = "ClaimExpired";
        /// The shutdown time of the claim's Sandbox has passed.
        SANDBOX_EXPIRED = "SandboxExpired";
        /// The claim's Sandbox does not exist.
        SANDBOX_MISSING = "SandboxMissing";
        /// The claim's Sandbox reports no condition Ready yet.
        SANDBOX_NOT_READY = "SandboxNotReady";
        /// An API call failed. Its error follows `Error seen:`. The controller retries.
        RECONCILER_ERROR = "ReconcilerError";
        /// The template's NetworkPolicy does not exist yet, or does not have the template's rules.
        /// Torpor's.
        NETWORK_POLICY_PENDING = "NetworkPolicyPending";
        /// A NetworkPolicy of another owner has the name of the template's own. Torpor's.
        NETWORK_POLICY_NOT_OWNED = "NetworkPolicyNotOwned";
        /// The claim may not bring a file of `torpor.dev/claim-files`, or it cannot be read. The
        /// message names it. Torpor's.
        CLAIM_FILES_REJECTED = "ClaimFilesRejected";
        /// The claim may not fork the SandboxSnapshot of `torpor.dev/fork-of`, or it does not
        /// exist. Torpor's.
        FORK_REJECTED = "ForkRejected";
    }
}

documented! {
    /// Reasons of the conditions of a SandboxWarmPool (upstream's #1326;
    /// test/e2e/extensions/warmpool_status_condition_test.go).
    pub mod pool {
        /// Available: at least `spec.replicas` members are Ready.
        MINIMUM_REPLICAS_AVAILABLE = "MinimumReplicasAvailable";
        /// Not Available: fewer members than `spec.replicas` are Ready.
        MINIMUM_REPLICAS_UNAVAILABLE = "MinimumReplicasUnavailable";
        /// Progressing: the pool can create its members.
        WARM_POOL_PROGRESSING = "WarmPoolProgressing";
        /// Not Progressing: members wait for a Pod or for a node. The message has cause and remedy.
        WARM_POOL_NOT_PROGRESSING = "WarmPoolNotProgressing";
        /// Not Progressing: the pool's SandboxTemplate does not exist. Its members stay.
        SANDBOX_TEMPLATE_ERROR = "SandboxTemplateError";
    }
}

documented! {
    /// Reasons of a Sandbox's condition `Suspended` with the suspension strategy Freeze. Torpor's.
    pub mod freeze {
        /// Suspended: the sandbox is paused; its Pod stays.
        POD_FROZEN = "PodFrozen";
        /// Not Suspended yet: the sandbox is being paused.
        POD_FREEZING = "PodFreezing";
    }
}

documented! {
    /// Reasons of the condition `Hibernated` of a Sandbox, and of `torpor.dev/Hibernated` of its
    /// Pod.
    pub mod hibernated {
        /// The memory is in an image; no process runs.
        HIBERNATED = "Hibernated";
        /// The sandbox runs.
        AWAKE = "Awake";
        /// The sandbox is being restored.
        WAKING = "Waking";
        /// The sandbox is being saved, or waits for an earlier snapshot to be deleted.
        SAVING = "Saving";
        /// A save failed, or the Pod ended before it was saved. The sandbox runs on; the message
        /// has the failure's reason and the time of the next attempt.
        SAVE_FAILED = "SaveFailed";
        /// The sandbox is paused by the user; its memory stays where it is.
        FROZEN = "Frozen";
        /// The sandbox was idle. It is paused, with its memory in an image and in swap; a Kata
        /// sandbox has no image.
        DOZING = "Dozing";
        /// The Pod's runtime on its node cannot save a sandbox.
        RUNTIME_NOT_CAPABLE = "RuntimeNotCapable";
        /// A suspended sandbox's image cannot be found on its node at present.
        IMAGE_MISSING = "ImageMissing";
        /// An annotation has a wrong value; the default applies.
        INVALID_ANNOTATION = "InvalidAnnotation";
        /// The SnapshotClass does not exist, or has an unknown provisioner or a wrong parameter.
        SNAPSHOT_CLASS_NOT_SUPPORTED = "SnapshotClassNotSupported";
    }
}

documented! {
    /// Reasons of the condition `Restored` of a Sandbox, and of `torpor.dev/Restored` of its Pod. A
    /// failure of the agent appears here with its own reason (docs/how-to/conditions.md).
    pub mod restored {
        /// The sandbox continues from the image that the message names.
        RESTORED = "Restored";
        /// A sandbox that crashed while awake was restored from its last image.
        ROLLED_BACK = "RolledBack";
        /// The sandbox started without its memory. The message says why.
        COLD_STARTED = "ColdStarted";
        /// The node's store does not have the image.
        IMAGE_MISSING = "ImageMissing";
        /// A file of the image is missing, truncated, changed, unexpected or a link.
        IMAGE_CORRUPT = "ImageCorrupt";
        /// The image needs another runsc build, other flags, another platform or more CPU features.
        FINGERPRINT_MISMATCH = "FingerprintMismatch";
        /// The Pod's containers differ from the saved ones. The message names the first difference.
        SPEC_MISMATCH = "SpecMismatch";
        /// Another Pod continued from the image, or the saved Pod ran on.
        IMAGE_STALE = "ImageStale";
        /// The build of runsc that the image needs is revoked on the node.
        RUNSC_REVOKED = "RunscRevoked";
        /// gVisor could not restore the sandbox. The message has its error.
        RESTORE_FAILED = "RestoreFailed";
        /// The image's node does not exist, has no agent that reports, or cannot restore.
        NODE_UNAVAILABLE = "NodeUnavailable";
        /// A node other than that of the saved Pod claims the image.
        NODE_MISMATCH = "NodeMismatch";
        /// The Pod is gone, and its node has not reported yet whether it holds the memory.
        ASKING_NODE = "AskingNode";
        /// `torpor.dev/restore-from` names a SandboxSnapshot that does not exist.
        SNAPSHOT_NOT_FOUND = "SnapshotNotFound";
        /// `torpor.dev/restore-from` names a SandboxSnapshot without a committed image.
        SNAPSHOT_NOT_READY = "SnapshotNotReady";
        /// The image is being fetched from its node or repository. The message has the progress.
        FETCHING = "Fetching";
        /// The repository does not answer, or answers with errors. The fetch is retried.
        REPOSITORY_UNAVAILABLE = "RepositoryUnavailable";
        /// The node that holds the image does not answer the Pod's node, or refuses the image. The
        /// fetch is retried.
        SOURCE_NODE_UNAVAILABLE = "SourceNodeUnavailable";
        /// The repository refuses the node's credentials. The fetch is retried.
        REPOSITORY_DENIED = "RepositoryDenied";
        /// The image is encrypted with a key that the node does not have.
        KEY_MISSING = "KeyMissing";
        /// The KMS does not open the key that the image is encrypted with. The fetch is retried.
        KEY_SERVICE_UNAVAILABLE = "KeyServiceUnavailable";
        /// The disk of the node has no room for the image.
        NO_ROOM = "NoRoom";
        /// Another Pod has fetched the image, and its node has not reported yet whether that Pod
        /// ran.
        IMAGE_CLAIMED = "ImageClaimed";
        /// The node that holds the image takes no Pods, and the image is not in its repository yet.
        UPLOADING = "Uploading";
    }
}

documented! {
    /// Reasons of the condition `Bound` of a Sandbox, and of `torpor.dev/Bound` of its Pod.
    pub mod bound {
        /// The claim has arrived in the sandbox.
        BOUND = "Bound";
        /// The claim is on its way.
        BINDING = "Binding";
        /// The kubelet has not written the claim's files into the Pod's volume yet. The agent
        /// retries.
        CLAIM_NOT_DELIVERED = "ClaimNotDelivered";
        /// The command of `torpor.dev/on-claim-exec` failed. The message has its exit code. The
        /// agent retries.
        ON_CLAIM_EXEC_FAILED = "OnClaimExecFailed";
        /// The claim could not be delivered. The agent retries.
        BIND_FAILED = "BindFailed";
    }
}

documented! {
    /// Reasons of the condition `Archived` of a Sandbox.
    pub mod archived {
        /// The time of `torpor.dev/archive-after` has not passed.
        WAITING = "Waiting";
        /// The memory is being saved, or is not in the repository yet.
        UPLOADING = "Uploading";
        /// The archive is being written. The Sandbox is deleted afterwards.
        ARCHIVING = "Archiving";
        /// The archive could not be written. The message has the cause. The controller retries.
        ARCHIVE_FAILED = "ArchiveFailed";
        /// There is no memory to archive: the message says why.
        NO_IMAGE = "NoImage";
        /// The Sandbox was suspended without a SnapshotClass of provisioner
        /// `repository.torpor.dev`.
        NO_REPOSITORY = "NoRepository";
        /// The Sandbox has PersistentVolumeClaims of its own, which an archive does not keep.
        HAS_VOLUMES = "HasVolumes";
        /// A SandboxClaim or a SandboxWarmPool holds the Sandbox.
        HELD = "Held";
        /// The manifest of the Sandbox is too large for an archive.
        TOO_LARGE = "TooLarge";
    }
}

documented! {
    /// Reasons of the conditions `Committed`, `Uploaded` and `Consumed` of a SandboxSnapshot.
    pub mod snapshot {
        /// Committed: the image is complete and durable on the node of `status.nodeName`.
        COMMITTED = "Committed";
        /// Not Committed: the save waits. The message says for what.
        PENDING = "Pending";
        /// Not Committed: the save runs.
        SAVING = "Saving";
        /// Not Committed: the save failed and is retried. The message has the failure's reason.
        SAVE_FAILED = "SaveFailed";
        /// Not Committed: the Sandbox does not exist, or its Pod is gone or terminating.
        SANDBOX_NOT_FOUND = "SandboxNotFound";
        /// Not Committed: the Pod's runtime cannot save a sandbox.
        RUNTIME_NOT_CAPABLE = "RuntimeNotCapable";
        /// Not Committed any more: the node's store does not have the image now.
        IMAGE_MISSING = "ImageMissing";
        /// Uploaded: the image is whole in the repository.
        UPLOADED = "Uploaded";
        /// Not Uploaded: the upload waits for its turn.
        QUEUED = "Queued";
        /// Not Uploaded: the upload runs. The message has the progress.
        UPLOADING = "Uploading";
        /// Not Uploaded: the SnapshotClass does not exist or has a wrong parameter.
        INVALID_CLASS = "InvalidClass";
        /// Not Uploaded: the repository does not answer, or answers with errors. The upload is
        /// retried.
        REPOSITORY_UNAVAILABLE = "RepositoryUnavailable";
        /// Not Uploaded: the repository refuses the node's credentials. The upload is retried.
        REPOSITORY_DENIED = "RepositoryDenied";
        /// Not Uploaded: the image cannot be read. The upload is retried.
        IMAGE_UNREADABLE = "ImageUnreadable";
        /// Consumed: a Pod was restored from the image.
        RESUMED = "Resumed";
        /// Consumed: the sandbox ran on or started cold, so the image is older than the sandbox.
        /// From then on only `torpor.dev/restore-from` uses the image.
        SUPERSEDED = "Superseded";
        /// Not Uploaded: the images of the namespace would have more bytes in the repository than
        /// the SnapshotClass allows. The upload is retried.
        QUOTA_EXCEEDED = "QuotaExceeded";
        /// Not Uploaded any more: an object of the image is missing in the repository, or cannot be
        /// read. The node that holds the image uploads it again.
        DAMAGED = "Damaged";
        /// Not Committed: the archive is encrypted with a key that the controller does not have.
        KEY_MISSING = "KeyMissing";
        /// Not Uploaded, or not Committed (archives): the KMS does not open the encryption key. It
        /// is retried.
        KEY_SERVICE_UNAVAILABLE = "KeyServiceUnavailable";
        /// Not Committed: the repository has no such archive.
        ARCHIVE_MISSING = "ArchiveMissing";
        /// Not Committed: the archive was changed, or is not one.
        ARCHIVE_CORRUPT = "ArchiveCorrupt";
        /// Not Committed: the SnapshotClass does not name the archive's cluster in `archivesOf`.
        CLUSTER_NOT_ALLOWED = "ClusterNotAllowed";
    }
}

documented! {
    /// Reasons of the agent's planner, in a SandboxNode's `status.sandboxes[].reasons`. `kubectl
    /// torpor why` explains them.
    pub mod plan {
        /// Another process holds the sandbox's lock.
        BUSY = "Busy";
        /// The state of the sandbox could not be read.
        LIVE_UNKNOWN = "LiveUnknown";
        /// The ledger is damaged. Nothing of the Pod is saved or woken.
        LEDGER_CORRUPT = "LedgerCorrupt";
        /// Torpor is restoring the Pod from an image.
        RESTORING = "Restoring";
        /// Sleep was requested.
        SLEEP_WANTED = "SleepWanted";
        /// The sandbox has been idle for its idle time.
        IDLE = "Idle";
        /// The sandbox is idle, and its node is short of memory or swap.
        PRESSURE = "Pressure";
        /// The sandbox dozes.
        DOZING = "Dozing";
        /// The sandbox is to run.
        AWAKE_WANTED = "AwakeWanted";
        /// The sandbox is to be frozen.
        FREEZE_WANTED = "FreezeWanted";
        /// The sandbox serves a claim that has not arrived in it.
        CLAIM_WAITS = "ClaimWaits";
        /// A SandboxSnapshot needs an image.
        SNAPSHOT_WANTED = "SnapshotWanted";
        /// The image in which the sandbox sleeps is to be deleted.
        DELETION_WANTED = "DeletionWanted";
        /// An image that holds the sandbox's memory serves a SandboxSnapshot, too.
        IMAGE_ADOPTED = "ImageAdopted";
        /// The sandbox sleeps as requested.
        SLEEPING = "Sleeping";
        /// The sandbox runs or is frozen as requested.
        SETTLED = "Settled";
        /// The sandbox runs although its ledger says otherwise.
        AWAKE_UNRECORDED = "AwakeUnrecorded";
        /// The note under /run says that the sandbox sleeps; the ledger does not.
        RECORD_STALE = "RecordStale";
        /// A save was interrupted.
        SAVE_UNFINISHED = "SaveUnfinished";
        /// The end of a hibernating sandbox was interrupted. Some of its processes may be gone.
        END_UNFINISHED = "EndUnfinished";
        /// The runtime cannot save a sandbox.
        NOT_CAPABLE = "NotCapable";
        /// A session is open, or was a moment ago.
        IN_USE = "InUse";
        /// The sandbox's idle time has no effect while its probes fail.
        NOT_READY = "NotReady";
        /// A container of `kubectl debug` runs in the Pod.
        DEBUGGED = "Debugged";
        /// Other sandboxes of the node are being saved first.
        AWAITING_TURN = "AwaitingTurn";
        /// The save waits until the disk's bandwidth limit admits it.
        AWAITING_BANDWIDTH = "AwaitingBandwidth";
        /// The agent waits after a failure.
        BACKOFF = "Backoff";
        /// The memory is in an image, and the kubelet is to start the containers again.
        AWAITING_CONTAINERS = "AwaitingContainers";
        /// The Pod has no sandbox.
        NO_SANDBOX = "NoSandbox";
        /// The store does not have the image that holds the sandbox's memory.
        IMAGE_MISSING = "ImageMissing";
        /// No object refers to an image any more.
        GARBAGE = "Garbage";
        /// The Pod is gone, and its image waits for a SandboxSnapshot that claims it.
        UNCLAIMED = "Unclaimed";
        /// The agent asks the apiserver for the Pod and for SandboxSnapshots that name it, before
        /// it removes an image or wakes a sandbox whose snapshot was deleted.
        ASKING = "Asking";
        /// No SandboxSnapshot claimed the image of a deleted Pod; the agent removes the image.
        GIVEN_UP = "GivenUp";
        /// The Pod is terminating.
        POD_TERMINATING = "PodTerminating";
        /// The Pod is gone.
        POD_GONE = "PodGone";
        /// The Pod has used all of its image numbers.
        NUMBERS_EXHAUSTED = "NumbersExhausted";
    }
}

documented! {
    /// Reasons of Events. The agent writes those on a Pod; the controller writes the others, except
    /// where stated. An Event on a Pod also has each reason of `Hibernated` and `Restored` that
    /// became true. The first seven are upstream's since 1.0.4 (#1532).
    pub mod event {
        /// Sandbox: its Pod was created.
        SANDBOX_POD_CREATED = "SandboxPodCreated";
        /// Sandbox: the apiserver refused its Pod. The message has the apiserver's words.
        SANDBOX_POD_CREATE_FAILED = "SandboxPodCreateFailed";
        /// Sandbox: Ready became True.
        SANDBOX_READY = "SandboxReady";
        /// Sandbox: Ready became False with the reason SandboxSuspended.
        SANDBOX_SUSPENDED = "SandboxSuspended";
        /// Sandbox: its shutdown time has passed, and its policy retains it.
        SANDBOX_EXPIRED = "SandboxExpired";
        /// Sandbox: every container of its Pod exited with code 0.
        POD_SUCCEEDED = "PodSucceeded";
        /// Sandbox: its Pod failed.
        POD_FAILED = "PodFailed";
        /// Sandbox: several Pods belong to it.
        MULTIPLE_PODS = "MultiplePods";
        /// Sandbox: an annotation has a wrong value, or its SnapshotClass is not supported.
        INVALID_ANNOTATION = "InvalidAnnotation";
        /// Sandbox: the memory of a suspension is kept.
        SNAPSHOT_COMMITTED = "SnapshotCommitted";
        /// Sandbox: the memory of a suspension could not be saved yet.
        SNAPSHOT_FAILED = "SnapshotFailed";
        /// Sandbox: it continues from an image. A Warning if it was rolled back.
        RESUMED = "Resumed";
        /// Sandbox: its memory could not be restored.
        RESTORE_FAILED = "RestoreFailed";
        /// Sandbox: it started without its memory.
        COLD_STARTED = "ColdStarted";
        /// Sandbox: the memory of a suspension is lost.
        MEMORY_NOT_KEPT = "MemoryNotKept";
        /// SandboxSnapshot: its node does not exist any more; the finalizer was removed.
        IMAGE_ABANDONED = "ImageAbandoned";
        /// SandboxClaim: it took a member of a pool.
        SANDBOX_ADOPTED = "SandboxAdopted";
        /// SandboxClaim: a Sandbox was created for it.
        SANDBOX_PROVISIONED = "SandboxProvisioned";
        /// SandboxClaim: its time has passed, and it is deleted.
        CLAIM_EXPIRED = "ClaimExpired";
        /// SandboxClaim: it names a pool that does not exist in its namespace.
        WARM_POOL_NOT_FOUND = "WarmPoolNotFound";
        /// SandboxWarmPool: its template is missing, or its members wait for a Pod or for a node.
        /// The message has cause and remedy.
        WARM_POOL_NOT_PROGRESSING = "WarmPoolNotProgressing";
        /// SandboxWarmPool: no member waits for a Pod or for a node any more.
        WARM_POOL_PROGRESSING = "WarmPoolProgressing";
        /// SandboxWarmPool: its template names no RuntimeClass although one that keeps memory
        /// exists.
        RUNTIME_NOT_NAMED = "RuntimeNotNamed";
        /// SandboxTemplate: it asks for golden images (`torpor.dev/golden`), and none can be made
        /// of it, or none was made in time. The message has the cause.
        GOLDEN_IMAGE_NOT_MADE = "GoldenImageNotMade";
        /// SandboxTemplate: its images (`torpor.dev/stage-images`) are not on a node yet. The
        /// message has the node and the registry's message.
        IMAGES_NOT_STAGED = "ImagesNotStaged";
        /// SandboxTemplate or SandboxClaim: a NetworkPolicy of another owner has the name of the
        /// template's own.
        NETWORK_POLICY_NOT_OWNED = "NetworkPolicyNotOwned";
        /// Pod: it sleeps before its idle time is over, because its node is short of memory or
        /// swap.
        NODE_PRESSURE = "NodePressure";
        /// Sandbox: a rule of its SnapshotClass deleted a snapshot.
        SNAPSHOT_EXPIRED = "SnapshotExpired";
        /// SandboxSnapshot: memory and manifest of a Sandbox are in the repository.
        SANDBOX_ARCHIVED = "SandboxArchived";
        /// Sandbox: it cannot be archived. The message has the cause.
        NOT_ARCHIVED = "NotArchived";
        /// Sandbox, by the agent: the memory of its deleted Pod was removed from its node, because
        /// no SandboxSnapshot named that Pod.
        MEMORY_GIVEN_UP = "MemoryGivenUp";
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_reason_is_camel_case_and_unique_in_its_family() {
        let families = [
            sandbox::ALL,
            claim::ALL,
            pool::ALL,
            freeze::ALL,
            hibernated::ALL,
            restored::ALL,
            bound::ALL,
            archived::ALL,
            snapshot::ALL,
            plan::ALL,
            event::ALL,
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
        insta::assert_snapshot!(sandbox::ALL[..16].join(" "), @"DependenciesReady DependenciesNotReady SandboxSuspended SandboxExpired PodSucceeded PodFailed MultiplePods ReconcilerError InvalidConfiguration PodTerminated NotSuspended PodTerminating PodNotOwned PodStateUnknown PodScheduled PodSchedulingUnknown");
        // The others are Torpor's.
        insta::assert_snapshot!(claim::ALL[..12].join(" "), @"WarmPoolNotFound TemplateNotFound InvalidMetadata EnvVarsInjectionRejected VolumeClaimTemplatesError AdoptionConflict SandboxCreatePending ClaimExpired SandboxExpired SandboxMissing SandboxNotReady ReconcilerError");
    }
}
