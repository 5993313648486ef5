//! Annotations: upstream's keys, Torpor's own, and validation of the values that users write.
//!
//! A Torpor setting is an annotation of the Sandbox or of its pod template; the Sandbox takes
//! precedence. An invalid value never stops a sandbox: the default applies, and
//! [`Settings::problems`] names the value. A SandboxTemplate may also carry the settings of sleep:
//! the controller copies them to the Sandbox where the pod template does not set them. A
//! RuntimeClass may also carry the idle times: the agent reads them where the Pod does not set
//! them.

use std::collections::BTreeMap;

use crate::documented::documented;

pub use archive_after::ArchiveAfter;
pub use heat::Heat;
pub use late_bind::{BINDING, ClaimFile, LateBind, binds, parse_claim_files};
pub use settings::Settings;
pub use sleep_after::{SleepAfter, doze_after, hibernate_after};
pub use values::{
    InvalidAnnotation, NetworkIsolation, OnCrash, OnRestoreFailure, SuspensionStrategy,
    is_dns_subdomain, parse_command, parse_hibernate, parse_isolation, parse_on_crash,
    parse_policy, parse_strategy, parse_time,
};
pub use wake_on::{Ports, WakeOn, wake_on};

mod archive_after;
mod heat;
mod late_bind;
mod settings;
mod sleep_after;
mod values;
mod wake_on;

/// Value of [`CLAIM_FIRST_READY_AT`] when no controller observed the moment.
pub const UNKNOWN_TIME: &str = "unknown";
/// Prefix of Torpor's keys. Only the controller puts such annotations on a Pod.
pub const TORPOR_PREFIX: &str = "torpor.dev/";
/// Finalizer of a SandboxSnapshot whose image may have bytes on a node.
pub const IMAGE_FINALIZER: &str = "torpor.dev/image";

documented! {
    /// Upstream's annotations that Torpor reads or writes, with their documentation.
    pub const OF_UPSTREAM;
    /// Name of the Sandbox's Pod.
    POD_NAME = "agents.x-k8s.io/pod-name";
    /// Name of the SandboxTemplate that a Sandbox was made from.
    SANDBOX_TEMPLATE_REF = "agents.x-k8s.io/sandbox-template-ref";
    /// Name of the Sandbox that a claim holds.
    SANDBOX_NAME = "agents.x-k8s.io/sandbox-name";
    /// Comma-separated keys of the template's labels that were copied to this Pod.
    PROPAGATED_LABELS = "agents.x-k8s.io/propagated-labels";
    /// Comma-separated keys of the template's annotations that were copied to this Pod.
    PROPAGATED_ANNOTATIONS = "agents.x-k8s.io/propagated-annotations";
    /// Time at which a controller first observed the claim.
    CONTROLLER_FIRST_OBSERVED_AT = "agents.x-k8s.io/controller-first-observed-at";
    /// Time at which the client requested the claim.
    CLIENT_FIRST_REQUESTED_AT = "agents.x-k8s.io/client-first-requested-at";
    /// RFC 3339 time at which an admission webhook observed the claim, in installations with such a
    /// webhook.
    WEBHOOK_FIRST_OBSERVED_AT = "agents.x-k8s.io/webhook-first-observed-at";
    /// Time at which a claim was first Ready, or `unknown`.
    CLAIM_FIRST_READY_AT = "agents.x-k8s.io/claim-first-ready-at";
    /// `"true"` or `"false"`: permission for the cluster autoscaler to evict the Pod.
    SAFE_TO_EVICT = "cluster-autoscaler.kubernetes.io/safe-to-evict";
    /// W3C trace context as JSON; never copied to a Pod.
    TRACE_CONTEXT = "opentelemetry.io/trace-context";
}

documented! {
    /// Annotations that users write on a Sandbox or in its pod template, with their documentation.
    pub const OF_USERS;
    /// Effect of `operatingMode: Suspended`. `Hibernate` (default) saves the memory to an image,
    /// then deletes the Pod; `Freeze` pauses the sandbox and keeps the Pod; `Stop` deletes the Pod
    /// without saving, as upstream does.
    SUSPENSION_STRATEGY = "torpor.dev/suspension-strategy";
    /// `"true"` hibernates the sandbox in place: the Pod stays, its memory is in an image. Copied
    /// to the Pod.
    HIBERNATE = "torpor.dev/hibernate";
    /// Action when memory cannot be restored. `Fail` (default) does not start, keeps the image and
    /// reports the reason; `ColdStart` starts without the memory. Copied to the Pod.
    ON_RESTORE_FAILURE = "torpor.dev/on-restore-failure";
    /// Start of a sandbox that crashed while awake. `ColdStart` (default) starts the program anew;
    /// `LastImage` restores the newest image of the Pod, which is kept for this purpose. Copied to
    /// the Pod.
    ON_CRASH = "torpor.dev/on-crash";
    /// Command that runs in a restored sandbox before the sandbox can be reached: a JSON array of
    /// words, up to 4096 bytes. It runs whenever a new sandbox continues from memory (a resume, a
    /// copy, a reboot), but not for a wake in place. Copied to the Pod.
    ON_RESTORE_EXEC = "torpor.dev/on-restore-exec";
    /// Name of a SandboxSnapshot of the same namespace; the sandbox starts as a copy of it.
    RESTORE_FROM = "torpor.dev/restore-from";
    /// Name of a SnapshotClass.
    SNAPSHOT_CLASS = "torpor.dev/snapshot-class";
    /// Time after which a suspended Sandbox is archived: a duration from 1s to 8760h such as `12h`
    /// or `7d`, `now`, or `off`. Its image stays in the repository of its SnapshotClass, a
    /// SandboxSnapshot of reason Archive keeps its manifest, and the Sandbox is deleted.
    ARCHIVE_AFTER = "torpor.dev/archive-after";
    /// Time asleep in place after which the image of a hibernated sandbox is also kept in the
    /// repository of its SnapshotClass: a duration from 1s to 8760h such as `10m`, or `off`. If its
    /// node is lost, the Sandbox continues from that image on another one.
    BACK_UP_AFTER = "torpor.dev/back-up-after";
    /// `"true"` lets a request to the router resume a suspended sandbox.
    RESUME_ON_REQUEST = "torpor.dev/resume-on-request";
    /// Idle time after which a sandbox hibernates in place: a duration from 1s to 8760h such as
    /// `30m`, or `off`. Copied to the Pod.
    HIBERNATE_AFTER = "torpor.dev/hibernate-after";
    /// Idle time after which a sandbox dozes (paused, its memory in swap): a duration from 1s to
    /// 8760h such as `30s`, or `off`. Copied to the Pod.
    DOZE_AFTER = "torpor.dev/doze-after";
    /// Alias of `torpor.dev/hibernate-after`, which applies where both are set.
    IDLE_TIMEOUT = "torpor.dev/idle-timeout";
    /// Alias of `torpor.dev/hibernate-after` that upstream's KEP-968 proposes.
    MAX_IDLE_TIME = "agents.x-k8s.io/max-idle-time";
    /// Packets that wake a sleeping sandbox: `any` (default), `none`, or some of `tcp`, `udp`,
    /// `icmp` and `ports=PORTS`, such as `tcp,ports=80,8000-8099`. Copied to the Pod.
    WAKE_ON = "torpor.dev/wake-on";
    /// RFC 3339 time at which the sandbox must be awake, as upstream's KEP-968 proposes. At that
    /// time a suspended Sandbox is resumed, and a sandbox that sleeps in place is woken. Read on
    /// the Sandbox only; copied to the Pod; removed once the time has passed.
    NEXT_WAKEUP = "agents.x-k8s.io/next-wakeup";
    /// RFC 3339 time at which a sandbox wakes if it has slept in place since before that time. It
    /// never resumes a suspended Sandbox, so a past time may stay. A program that wakes a sandbox
    /// at once writes this annotation and leaves the user's next-wakeup unchanged. Read on the
    /// Sandbox only; copied to the Pod.
    WAKE_AT = "torpor.dev/wake-at";
    /// `"true"` adds the sandbox runtime to the first container of a Pod that starts cold. A
    /// SandboxTemplate may carry it too; its Sandboxes inherit it.
    INJECT_RUNTIME = "torpor.dev/inject-runtime";
    /// NetworkPolicy of a Sandbox without a SandboxTemplate: `default`, the namespace's strict
    /// policy where the controller has `--default-network-policy`; or `none`. The label of the same
    /// key on the Pod says which one it has.
    NETWORK_POLICY = crate::labels::NETWORK_POLICY;
}

documented! {
    /// Annotations that users write on a SandboxTemplate, a SandboxWarmPool or a SandboxClaim, with
    /// their documentation.
    pub const OF_POOLS;
    /// On a SandboxTemplate: `"true"` makes a golden image on each node that has members of its
    /// pools. The controller starts one more sandbox there, saves it once it is Ready, and deletes
    /// it. Later members start from that image, and not from the program's beginning. With
    /// `"shared"` the golden sandbox of a further node continues from the first one's image, which
    /// its node fetches from the first node. With `torpor.dev/snapshot-class` on the template, a
    /// class with a repository, it continues from the image in the repository.
    GOLDEN = "torpor.dev/golden";
    /// On a SandboxTemplate with `torpor.dev/golden`: command that must succeed in the golden
    /// sandbox before the sandbox is saved, a JSON array of words, up to 4096 bytes. It runs every
    /// second in the first container, in place of that container's startup probe.
    GOLDEN_READY_EXEC = "torpor.dev/golden-ready-exec";
    /// On a SandboxTemplate: `"true"` brings the images of its containers to each node where a
    /// member of its pools may run, before one does. A Pod on each such node pulls them and ends;
    /// it is kept, so that the kubelet keeps the images.
    STAGE_IMAGES = "torpor.dev/stage-images";
    /// On a SandboxWarmPool: how many members run. `hot=N,asleep=rest` keeps N running and lets the
    /// others sleep in an image; `hot=rest` keeps all running, which is the default. With
    /// `torpor.dev/golden` the default is `hot=1,asleep=rest`.
    HEAT = "torpor.dev/heat";
    /// On a SandboxTemplate: what a claim may bring to a sandbox that runs already; some of `env`,
    /// `files` and `identity`, separated by commas. `env` delivers the claim's environment
    /// variables in the file `/run/claim/env` of the first container, to every process that is
    /// started there later, and to commands of the sandbox runtime. Without it, a claim with
    /// variables starts cold. `files` and `identity` admit sources of `torpor.dev/claim-files`.
    LATE_BIND = "torpor.dev/late-bind";
    /// On a SandboxClaim: sources of files in `/run/claim`, up to 16, separated by commas:
    /// `secret/NAME` and `configmap/NAME` of the claim's namespace (`late-bind` with `files`), and
    /// `token/NAME`, a token of that ServiceAccount (`late-bind` with `identity`). Each must have
    /// the label `torpor.dev/claimable: "true"`. Copied to the Sandbox.
    CLAIM_FILES = "torpor.dev/claim-files";
    /// On a SandboxClaim: nodes from which it takes a member of its pool first, in this order,
    /// separated by commas. Each is the name of a node, or `<label>=<value>` for all nodes with
    /// that label, such as `topology.kubernetes.io/zone=a`. It is a preference among members that
    /// are equally ready.
    NODE_PREFERENCE = "torpor.dev/node-preference";
    /// On a SandboxClaim: name of a SandboxSnapshot of the claim's namespace with the label
    /// `torpor.dev/claimable: "true"`. The claim takes no member of its pool: its sandbox, of the
    /// pool's template, continues from that memory as a copy.
    FORK_OF = "torpor.dev/fork-of";
    /// On a SandboxTemplate: command that runs in the first container of a claim's sandbox before
    /// the claim is Ready, a JSON array of words, up to 4096 bytes. It has the claim's variables,
    /// and the claim's UID in `TORPOR_CLAIM`. Copied to the Pod.
    ON_CLAIM_EXEC = "torpor.dev/on-claim-exec";
}

documented! {
    /// Annotations that the controller alone writes on a Pod, with their documentation.
    pub const OF_PODS;
    /// `"true"` pauses the sandbox and keeps it.
    FREEZE = "torpor.dev/freeze";
    /// Image to restore instead of a cold start; set only when the Pod is created.
    RESTORE_IMAGE = "torpor.dev/restore-image";
    /// `"true"` when the user named the image of `torpor.dev/restore-image`; a consumed image is
    /// then accepted.
    RESTORE_COPY = "torpor.dev/restore-copy";
    /// Digest of the manifest of `torpor.dev/restore-image`, if other nodes can fetch the image. A
    /// node that does not hold the image fetches it, and accepts no other.
    RESTORE_DIGEST = "torpor.dev/restore-digest";
    /// SnapshotClass whose repository has the image of `torpor.dev/restore-image`.
    RESTORE_CLASS = "torpor.dev/restore-class";
    /// Node that holds `torpor.dev/restore-image` and gives it to other nodes.
    RESTORE_NODE = "torpor.dev/restore-node";
    /// Cluster that archived `torpor.dev/restore-image`: the UID of its namespace `kube-system`.
    RESTORE_CLUSTER = "torpor.dev/restore-cluster";
    /// Words for the condition Restored of a Pod that starts from a backup
    /// (`torpor.dev/back-up-after`): why, and the backup's SandboxSnapshot and time.
    RESTORE_BACKUP = "torpor.dev/restore-backup";
    /// Comma-separated golden images, one for each node that has one. The Pod starts from the one
    /// of its node: asleep, if it also has `torpor.dev/hibernate`. It starts cold on a node without
    /// one, and where the image cannot be restored.
    GOLDEN_IMAGES = "torpor.dev/golden-images";
    /// Container in which the command of `torpor.dev/on-restore-exec` runs: the one that `kubectl
    /// exec` selects.
    ON_RESTORE_EXEC_CONTAINER = "torpor.dev/on-restore-exec-container";
    /// UID of the claim that the Pod serves, if its template has `torpor.dev/late-bind` or
    /// `torpor.dev/on-claim-exec`; empty until a claim has taken the Pod. The file `/run/claim/uid`
    /// shows it.
    CLAIM = "torpor.dev/claim";
    /// Comma-separated names of the containers whose `securityContext` adds the capability NET_RAW
    /// or is privileged. gVisor withholds NET_RAW from all others.
    NET_RAW = "torpor.dev/net-raw";
    /// Newest PodSnapshot of the Sandbox, set beside `torpor.dev/restore-image`. Upstream's SDK
    /// reads from the Pod's condition `PodRestored` whether the Pod was restored from that
    /// PodSnapshot. The Pod has the readiness gate `torpor.dev/RestoreSettled`.
    POD_SNAPSHOT = "torpor.dev/pod-snapshot";
    /// Copy of the Sandbox's `opentelemetry.io/trace-context`, to which the agent's spans belong.
    /// Upstream does not copy its own key to Pods.
    POD_TRACE_CONTEXT = "torpor.dev/trace-context";
}

documented! {
    /// Annotations that the controller writes on a Sandbox, with their documentation.
    pub const OF_SANDBOXES;
    /// On a claim's Sandbox: comma-separated keys of the pod template's labels that came from the
    /// claim.
    CLAIM_LABELS = "torpor.dev/claim-labels";
    /// On a claim's Sandbox: comma-separated keys of the pod template's annotations that came from
    /// the claim.
    CLAIM_ANNOTATIONS = "torpor.dev/claim-annotations";
    /// On a claim's Sandbox, and on its Pod: the claim's environment variables as lines of a shell,
    /// the content of the file `/run/claim/env`.
    CLAIM_ENV = "torpor.dev/claim-env";
    /// On a claim's Sandbox with `torpor.dev/claim-files`, and on its Pod: `written` once the
    /// Secret `torpor-claim-<UID>` has the files; `pending` before, on the Sandbox.
    CLAIM_SECRET = "torpor.dev/claim-secret";
    /// On a claim's Sandbox: time at which the token in its files is renewed.
    CLAIM_TOKEN_UNTIL = "torpor.dev/claim-token-until";
    /// On an unclaimed member of a pool: name of the golden Sandbox whose images its Pod may start
    /// from.
    GOLDEN_SANDBOX = "torpor.dev/golden-sandbox";
    /// On a Sandbox that replaces a deleted one: name of the deleted Sandbox.
    REPLACES = "torpor.dev/replaces";
    /// Pod that last ran for the Sandbox, as JSON. The controller writes it once that Pod runs, and
    /// looks for the Pod's memory with it once the Pod is gone. Agents cannot write it.
    LAST_POD = "torpor.dev/last-pod";
}

documented! {
    /// Annotations that the controller writes on a SandboxSnapshot, with their documentation.
    pub const OF_SNAPSHOTS;
    /// Pod whose memory the image holds, as JSON. A restore takes the node and the container images
    /// from this record. Agents cannot write it.
    SAVED_POD = "torpor.dev/saved-pod";
    /// `"true"` once the Pod is deleted in favour of the image. From then on the sandbox continues
    /// from the image, even if its user changes `operatingMode` meanwhile: one controller cannot
    /// take back an image that another controller relies on.
    REPLACES_POD = "torpor.dev/replaces-pod";
    /// Pod that was made to continue from the image, where other nodes than the image's own can
    /// fetch it: `pending` before the Pod is created, then UID and node of the Pod as JSON. Only a
    /// node that is named here, or may be, can claim the image. Agents cannot write it.
    TAKEN_BY = "torpor.dev/taken-by";
    /// Manifest of the archived Sandbox, as JSON. Agents cannot write it.
    ARCHIVED_SANDBOX = "torpor.dev/archived-sandbox";
}

/// Returns the keys of [`OF_USERS`] that are Torpor's own.
pub fn user_settings() -> impl Iterator<Item = &'static str> {
    let keys = OF_USERS.iter().map(|entry| entry.value);
    keys.filter(|key| key.starts_with(TORPOR_PREFIX))
}

/// Keys of [`user_settings`] that a SandboxClaim may carry: those about the life of its own
/// sandbox.
///
/// The others select the memory that a sandbox starts from, the place of its images and the
/// programs in it. They are reserved for authors of Sandboxes and SandboxTemplates.
pub const CLAIM_SETTINGS: [&str; 4] = [
    SUSPENSION_STRATEGY,
    HIBERNATE,
    ON_RESTORE_FAILURE,
    RESUME_ON_REQUEST,
];

/// All annotations of Torpor on a Pod. The controller alone writes them.
pub const ON_POD: [&str; 26] = [
    HIBERNATE,
    DOZE_AFTER,
    HIBERNATE_AFTER,
    WAKE_ON,
    NEXT_WAKEUP,
    WAKE_AT,
    FREEZE,
    RESTORE_IMAGE,
    RESTORE_COPY,
    RESTORE_DIGEST,
    RESTORE_CLASS,
    RESTORE_NODE,
    RESTORE_CLUSTER,
    RESTORE_BACKUP,
    GOLDEN_IMAGES,
    POD_SNAPSHOT,
    ON_RESTORE_FAILURE,
    ON_CRASH,
    ON_RESTORE_EXEC,
    ON_RESTORE_EXEC_CONTAINER,
    ON_CLAIM_EXEC,
    CLAIM,
    CLAIM_ENV,
    CLAIM_SECRET,
    NET_RAW,
    POD_TRACE_CONTEXT,
];

/// Value of [`GOLDEN`] that lets the golden sandboxes of further nodes continue from the first
/// node's image.
pub const GOLDEN_SHARED: &str = "shared";

/// Reports whether a template with these annotations has golden images.
pub fn is_golden(template: &BTreeMap<String, String>) -> bool {
    let value = template.get(GOLDEN);
    value.is_some_and(|value| value == "true" || value == GOLDEN_SHARED)
}

/// Reports whether a key is reserved, so that a pod template's annotation of it is not copied to
/// the Pod.
pub fn is_system(key: &str) -> bool {
    crate::labels::is_system(key) || key == TRACE_CONTEXT || key.starts_with(TORPOR_PREFIX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_template_cannot_pass_on_system_or_torpor_annotations() {
        for key in user_settings().chain(ON_POD) {
            assert!(is_system(key), "{key}");
        }
        for key in [POD_NAME, PROPAGATED_LABELS, TRACE_CONTEXT] {
            assert!(is_system(key), "{key}");
        }
        assert!(!is_system("example.com/note"));
    }
}
