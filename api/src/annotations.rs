//! Annotations: upstream's names, Torpor's own, and the checking of values that users write.
//!
//! A Torpor setting may stand on the Sandbox itself or in its pod template; the Sandbox wins. A wrong value never stops a sandbox: the default
//! applies and [`Settings::problems`] says what was wrong. How its Sandboxes sleep may also be said on a SandboxTemplate (the controller copies it to the
//! Sandbox, where the pod template does not say it), and the idle times on a RuntimeClass (the agent reads it, where the Pod does not say it).

use std::collections::BTreeMap;
use std::time::Duration;

use jiff::Timestamp;
pub use wake_on::{Ports, WakeOn};

mod wake_on;

// --- upstream -------------------------------------------------------------------------------------------------------------------------
/// Name of the Pod that belongs to the Sandbox.
pub const POD_NAME: &str = "agents.x-k8s.io/pod-name";
/// Name of the SandboxTemplate that a Sandbox was made from.
pub const SANDBOX_TEMPLATE_REF: &str = "agents.x-k8s.io/sandbox-template-ref";
/// Name of the Sandbox that a claim holds.
pub const SANDBOX_NAME: &str = "agents.x-k8s.io/sandbox-name";
/// On a Pod: comma list of the template's labels that were copied to it.
pub const PROPAGATED_LABELS: &str = "agents.x-k8s.io/propagated-labels";
/// On a Pod: comma list of the template's annotations that were copied to it.
pub const PROPAGATED_ANNOTATIONS: &str = "agents.x-k8s.io/propagated-annotations";
/// When a controller first saw the claim.
pub const CONTROLLER_FIRST_OBSERVED_AT: &str = "agents.x-k8s.io/controller-first-observed-at";
/// When the client asked.
pub const CLIENT_FIRST_REQUESTED_AT: &str = "agents.x-k8s.io/client-first-requested-at";
/// RFC 3339 time at which an admission webhook saw the claim; written by installations that have one.
pub const WEBHOOK_FIRST_OBSERVED_AT: &str = "agents.x-k8s.io/webhook-first-observed-at";
/// When a claim was Ready for the first time, or [`UNKNOWN_TIME`].
pub const CLAIM_FIRST_READY_AT: &str = "agents.x-k8s.io/claim-first-ready-at";
/// Value of [`CLAIM_FIRST_READY_AT`] when nobody saw the moment.
pub const UNKNOWN_TIME: &str = "unknown";
/// Whether the cluster autoscaler may take the Pod away.
pub const SAFE_TO_EVICT: &str = "cluster-autoscaler.kubernetes.io/safe-to-evict";
/// W3C trace carrier as JSON; never copied to a Pod.
pub const TRACE_CONTEXT: &str = "opentelemetry.io/trace-context";

// --- what a user writes (Sandbox or pod template) ---------------------------------------------------------------------------------------
/// Most bytes of [`ON_RESTORE_EXEC`].
const MAX_COMMAND: usize = 4096;
/// Everything under this prefix is Torpor's; only the controller puts it on a Pod.
pub const TORPOR_PREFIX: &str = "torpor.dev/";
/// What `operatingMode: Suspended` does: see [`SuspensionStrategy`].
pub const SUSPENSION_STRATEGY: &str = "torpor.dev/suspension-strategy";
/// `"true"` hibernates in place. The controller copies it to the Pod.
pub const HIBERNATE: &str = "torpor.dev/hibernate";
/// What to do when memory cannot be restored: see [`OnRestoreFailure`]. Copied to the Pod.
pub const ON_RESTORE_FAILURE: &str = "torpor.dev/on-restore-failure";
/// What a sandbox that crashed while it was awake starts from: see [`OnCrash`]. Copied to the Pod.
pub const ON_CRASH: &str = "torpor.dev/on-crash";
/// A command, as a JSON array of words, that runs in the sandbox before it is heard whenever a new
/// sandbox goes on from memory (a resume, a copy, a reboot), and not for a wake in place. Copied to
/// the Pod.
pub const ON_RESTORE_EXEC: &str = "torpor.dev/on-restore-exec";
/// Name of a SandboxSnapshot of the same namespace; the sandbox starts as a copy of it.
pub const RESTORE_FROM: &str = "torpor.dev/restore-from";
/// Name of a SnapshotClass.
pub const SNAPSHOT_CLASS: &str = "torpor.dev/snapshot-class";
/// `"true"` lets a request that reaches the router resume a suspended sandbox.
pub const RESUME_ON_REQUEST: &str = "torpor.dev/resume-on-request";
/// How long a sandbox must have been idle before it hibernates in place by itself: see [`SleepAfter`]. Copied to the Pod.
pub const HIBERNATE_AFTER: &str = "torpor.dev/hibernate-after";
/// How long a sandbox must have been idle before it dozes (paused, its memory in swap): see [`SleepAfter`]. Copied to the Pod.
pub const DOZE_AFTER: &str = "torpor.dev/doze-after";
/// Another name of [`HIBERNATE_AFTER`], which wins where both are written.
pub const IDLE_TIMEOUT: &str = "torpor.dev/idle-timeout";
/// The name that KEP-968 of upstream proposes for the same.
pub const MAX_IDLE_TIME: &str = "agents.x-k8s.io/max-idle-time";
/// Which packets wake a sandbox that sleeps: see [`WakeOn`]. Copied to the Pod.
pub const WAKE_ON: &str = "torpor.dev/wake-on";
/// A time (RFC 3339) at which the sandbox is awake, as KEP-968 of upstream proposes it: a Sandbox that is suspended is resumed
/// then, one that sleeps in place is woken. Read on the Sandbox only; copied to the Pod; taken off when it is over.
pub const NEXT_WAKEUP: &str = "agents.x-k8s.io/next-wakeup";
/// A time (RFC 3339), beside [`NEXT_WAKEUP`]: who sleeps in place since before then is woken. It resumes nobody who is suspended, so that it may stay when it is
/// over. What wakes a sandbox now writes it, so that a time that somebody has set is left alone. Read on the Sandbox only; copied to the Pod.
pub const WAKE_AT: &str = "torpor.dev/wake-at";
/// `"true"` puts the sandbox runtime into the Pod's first container when a Pod is made that starts cold. Also read on a SandboxTemplate, whose Sandboxes get it.
pub const INJECT_RUNTIME: &str = "torpor.dev/inject-runtime";
/// Which NetworkPolicy a Sandbox without a SandboxTemplate gets: see [`NetworkIsolation`]. The label of the same name on its Pod says which it has.
pub const NETWORK_POLICY: &str = crate::labels::NETWORK_POLICY;

// --- what the controller writes on a Pod ------------------------------------------------------------------------------------------------
/// `"true"` pauses the sandbox and keeps it.
pub const FREEZE: &str = "torpor.dev/freeze";
/// Image to restore instead of starting cold; set only when the Pod is created.
pub const RESTORE_IMAGE: &str = "torpor.dev/restore-image";
/// `"true"` beside [`RESTORE_IMAGE`]: the user named the image, so that a used one is accepted.
pub const RESTORE_COPY: &str = "torpor.dev/restore-copy";
/// Beside [`ON_RESTORE_EXEC`]: the container that the command runs in, which is the one that
/// `kubectl exec` takes.
pub const ON_RESTORE_EXEC_CONTAINER: &str = "torpor.dev/on-restore-exec-container";
/// Names of the containers whose `securityContext` adds the capability NET_RAW (or is privileged),
/// separated by commas. gVisor withholds NET_RAW from all others.
pub const NET_RAW: &str = "torpor.dev/net-raw";
/// Beside [`RESTORE_IMAGE`]: the newest PodSnapshot of the Sandbox, for which upstream's SDK will ask the Pod ([`crate::pod_snapshot::POD_RESTORED`]). The Pod then has
/// [`crate::conditions::POD_RESTORE_SETTLED`] as a readiness gate.
pub const POD_SNAPSHOT: &str = "torpor.dev/pod-snapshot";
/// The Sandbox' [`TRACE_CONTEXT`], which upstream keeps off Pods: the agent's spans belong to that trace.
pub const POD_TRACE_CONTEXT: &str = "torpor.dev/trace-context";

// --- what the controller writes on a Sandbox --------------------------------------------------------------------------------------------
/// On the Sandbox of a claim: comma lists of the labels and annotations of its pod template that came from the claim.
pub const CLAIM_LABELS: &str = "torpor.dev/claim-labels";
/// See [`CLAIM_LABELS`].
pub const CLAIM_ANNOTATIONS: &str = "torpor.dev/claim-annotations";
/// On a Sandbox that takes the place of one that is gone: the name of that one.
pub const REPLACES: &str = "torpor.dev/replaces";
/// On a Sandbox: the Pod that last ran for it, as JSON of [`crate::PodRecord`]. Written once that Pod runs, so that its memory can be asked for
/// when the Pod is gone. Agents cannot write it.
pub const LAST_POD: &str = "torpor.dev/last-pod";

// --- what the controller writes on a SandboxSnapshot -------------------------------------------------------------------------------------
/// On a SandboxSnapshot: the Pod whose memory it holds, as JSON of [`crate::PodRecord`]. A restore takes the node and the container images
/// from here. Agents cannot write it.
pub const SAVED_POD: &str = "torpor.dev/saved-pod";

/// On a SandboxSnapshot: its Pod is being deleted for its sake. From then on the sandbox goes on
/// from the image, whatever its user wants meanwhile: of two controllers one cannot take back what
/// the other relies on.
pub const REPLACES_POD: &str = "torpor.dev/replaces-pod";

/// Finalizer of a SandboxSnapshot: bytes of it may lie on a node.
pub const IMAGE_FINALIZER: &str = "torpor.dev/image";

/// Torpor's annotations that users write.
pub const USER_SETTINGS: [&str; 15] = [
    SUSPENSION_STRATEGY,
    HIBERNATE,
    ON_RESTORE_FAILURE,
    ON_CRASH,
    ON_RESTORE_EXEC,
    RESTORE_FROM,
    SNAPSHOT_CLASS,
    RESUME_ON_REQUEST,
    HIBERNATE_AFTER,
    IDLE_TIMEOUT,
    DOZE_AFTER,
    WAKE_ON,
    WAKE_AT,
    INJECT_RUNTIME,
    NETWORK_POLICY,
];

/// Those of them that a SandboxClaim may bring: they are about the life of its own sandbox. The others say whose memory it starts from, where memory is kept and what runs in
/// it; they are for who writes Sandboxes and SandboxTemplates.
pub const CLAIM_SETTINGS: [&str; 4] = [
    SUSPENSION_STRATEGY,
    HIBERNATE,
    ON_RESTORE_FAILURE,
    RESUME_ON_REQUEST,
];

/// Torpor's annotations on a Pod: the only ones, all written by the controller.
pub const ON_POD: [&str; 16] = [
    HIBERNATE,
    DOZE_AFTER,
    HIBERNATE_AFTER,
    WAKE_ON,
    NEXT_WAKEUP,
    WAKE_AT,
    FREEZE,
    RESTORE_IMAGE,
    RESTORE_COPY,
    POD_SNAPSHOT,
    ON_RESTORE_FAILURE,
    ON_CRASH,
    ON_RESTORE_EXEC,
    ON_RESTORE_EXEC_CONTAINER,
    NET_RAW,
    POD_TRACE_CONTEXT,
];

/// What `operatingMode: Suspended` does to the Pod.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SuspensionStrategy {
    /// Keep memory in an image, then delete the Pod. Where the runtime cannot, as `Stop`.
    #[default]
    Hibernate,
    /// Pause the sandbox and keep the Pod.
    Freeze,
    /// Delete the Pod; memory is lost. What upstream does.
    Stop,
}

/// What happens when a sandbox's memory cannot be brought back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnRestoreFailure {
    /// Stay down, keep the image, say why.
    #[default]
    Fail,
    /// Start without the memory.
    ColdStart,
}

impl OnRestoreFailure {
    /// The annotation's value.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Fail => "Fail",
            Self::ColdStart => "ColdStart",
        }
    }
}

/// What a sandbox that crashed while it was awake starts from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnCrash {
    /// From its program, as Kubernetes starts it.
    #[default]
    ColdStart,
    /// From the image that its Pod last made, which is kept for that; what it did since is lost.
    LastImage,
}

impl OnCrash {
    /// The annotation's value.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::ColdStart => "ColdStart",
            Self::LastImage => "LastImage",
        }
    }
}

/// Which NetworkPolicy a Sandbox without a SandboxTemplate gets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum NetworkIsolation {
    /// The controller's: the strict one with `--default-network-policy`, else none.
    #[default]
    Default,
    /// None.
    None,
}

/// How long a sandbox must have been idle before something is done with it. Written as Go and jiff write durations (`30m`, `1h30m`,
/// `90s`), or `off`, which hides what the pod template says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SleepAfter {
    Off,
    Idle(Duration),
}

impl SleepAfter {
    const ALLOWED: &str = "off, or a duration from 1s to 8760h, such as 30m or 1h30m";
    const MIN: Duration = Duration::from_secs(1);
    const MAX: Duration = Duration::from_secs(8760 * 3600);

    /// Parses the value of `key`.
    pub fn parse(key: &'static str, value: &str) -> Result<Self, InvalidAnnotation> {
        if value == "off" {
            return Ok(Self::Off);
        }
        let parsed = value.parse::<jiff::SignedDuration>().ok();
        parsed
            .and_then(|duration| Duration::try_from(duration).ok())
            .filter(|duration| (Self::MIN..=Self::MAX).contains(duration))
            .map(Self::Idle)
            .ok_or_else(|| invalid(key, value, Self::ALLOWED))
    }

    /// The time, unless it is switched off.
    pub fn duration(self) -> Option<Duration> {
        match self {
            Self::Off => None,
            Self::Idle(duration) => Some(duration),
        }
    }

    /// The annotation's value in one spelling: seconds.
    pub fn canonical(self) -> String {
        match self {
            Self::Off => "off".to_owned(),
            // Less than a second is no part of a time that people wait.
            Self::Idle(duration) => format!("{}s", duration.as_secs()),
        }
    }
}

/// The idle time after which a sandbox dozes, checked.
pub fn doze_after<'a>(
    value: impl Fn(&str) -> Option<&'a String>,
) -> Option<Result<SleepAfter, InvalidAnnotation>> {
    value(DOZE_AFTER).map(|value| SleepAfter::parse(DOZE_AFTER, value))
}

/// The idle time after which a sandbox hibernates: the first of the names that is written, checked.
pub fn hibernate_after<'a>(
    value: impl Fn(&str) -> Option<&'a String>,
) -> Option<Result<SleepAfter, InvalidAnnotation>> {
    let names = [HIBERNATE_AFTER, IDLE_TIMEOUT, MAX_IDLE_TIME];
    let written = names.into_iter().find_map(|key| Some((key, value(key)?)));
    written.map(|(key, value)| SleepAfter::parse(key, value))
}

/// What the annotation [`WAKE_ON`] says, checked.
pub fn wake_on<'a>(
    value: impl Fn(&str) -> Option<&'a String>,
) -> Option<Result<WakeOn, InvalidAnnotation>> {
    value(WAKE_ON).map(|value| WakeOn::parse(value))
}

/// A value that the key does not allow.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("annotation {key}: value {value:?} is not allowed; allowed: {allowed}")]
pub struct InvalidAnnotation {
    pub key: &'static str,
    pub value: String,
    pub allowed: &'static str,
}

/// Torpor's settings of one Sandbox, checked.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Settings {
    /// `None` when nobody asked; then [`SuspensionStrategy::default`] applies where the node can.
    pub suspension_strategy: Option<SuspensionStrategy>,
    pub hibernate: bool,
    /// `None` when nobody asked; see [`Settings::restore_policy`].
    pub on_restore_failure: Option<OnRestoreFailure>,
    pub on_crash: Option<OnCrash>,
    /// The words of a command.
    pub on_restore_exec: Option<Vec<String>>,
    pub restore_from: Option<String>,
    pub snapshot_class: Option<String>,
    pub resume_on_request: bool,
    pub hibernate_after: Option<SleepAfter>,
    pub doze_after: Option<SleepAfter>,
    pub next_wakeup: Option<Timestamp>,
    pub wake_at: Option<Timestamp>,
    /// `None` when nobody asked: then every packet wakes.
    pub wake_on: Option<WakeOn>,
    pub inject_runtime: bool,
    /// `None` when nobody asked.
    pub network_policy: Option<NetworkIsolation>,
    /// One entry per wrong value.
    pub problems: Vec<InvalidAnnotation>,
}

impl Settings {
    /// Reads the settings of a Sandbox: `own` are its annotations, `template` those of its pod template.
    pub fn read(
        own: Option<&BTreeMap<String, String>>,
        template: Option<&BTreeMap<String, String>>,
    ) -> Self {
        let value = |key: &str| {
            own.and_then(|all| all.get(key))
                .or_else(|| template.and_then(|all| all.get(key)))
        };
        let mut problems = Vec::new();
        let suspension_strategy =
            checked(value(SUSPENSION_STRATEGY), parse_strategy, &mut problems);
        let hibernate = checked(value(HIBERNATE), parse_hibernate, &mut problems);
        let on_restore_failure = checked(value(ON_RESTORE_FAILURE), parse_policy, &mut problems);
        let on_crash = checked(value(ON_CRASH), parse_on_crash, &mut problems);
        let on_restore_exec = checked(value(ON_RESTORE_EXEC), parse_command, &mut problems);
        let restore_from = checked(
            value(RESTORE_FROM),
            |v| parse_name(RESTORE_FROM, v),
            &mut problems,
        );
        let snapshot_class = checked(
            value(SNAPSHOT_CLASS),
            |v| parse_name(SNAPSHOT_CLASS, v),
            &mut problems,
        );
        let resume_on_request = checked(
            value(RESUME_ON_REQUEST),
            |v| parse_flag(RESUME_ON_REQUEST, v),
            &mut problems,
        );
        // Whatever name the Sandbox uses hides every name in its template.
        let of = |all: Option<&BTreeMap<String, String>>| {
            hibernate_after(|key| all.and_then(|all| all.get(key)))
        };
        let hibernate_after = of(own)
            .or_else(|| of(template))
            .and_then(|parsed| parsed.map_err(|problem| problems.push(problem)).ok());
        let doze_after = checked(
            value(DOZE_AFTER),
            |v| SleepAfter::parse(DOZE_AFTER, v),
            &mut problems,
        );
        let wake_on = checked(value(WAKE_ON), WakeOn::parse, &mut problems);
        // A time that many Sandboxes have from their template would be over for all but the first.
        let [next_wakeup, wake_at] = [NEXT_WAKEUP, WAKE_AT].map(|key| {
            let written = own.and_then(|all| all.get(key));
            checked(written, |v| parse_time(key, v), &mut problems)
        });
        let inject_runtime = checked(
            value(INJECT_RUNTIME),
            |v| parse_flag(INJECT_RUNTIME, v),
            &mut problems,
        );
        let network_policy = checked(value(NETWORK_POLICY), parse_isolation, &mut problems);
        Self {
            suspension_strategy,
            hibernate: hibernate.unwrap_or_default(),
            on_restore_failure,
            on_crash,
            on_restore_exec,
            restore_from,
            snapshot_class,
            resume_on_request: resume_on_request.unwrap_or_default(),
            hibernate_after,
            doze_after,
            wake_on,
            next_wakeup,
            wake_at,
            inject_runtime: inject_runtime.unwrap_or_default(),
            network_policy,
            problems,
        }
    }

    /// The policy that applies.
    pub fn restore_policy(&self) -> OnRestoreFailure {
        self.on_restore_failure.unwrap_or_default()
    }

    /// The strategy that applies.
    pub fn strategy(&self) -> SuspensionStrategy {
        self.suspension_strategy.unwrap_or_default()
    }
}

fn checked<T>(
    value: Option<&String>,
    parse: impl Fn(&str) -> Result<T, InvalidAnnotation>,
    problems: &mut Vec<InvalidAnnotation>,
) -> Option<T> {
    match parse(value?) {
        Ok(parsed) => Some(parsed),
        Err(problem) => {
            problems.push(problem);
            None
        }
    }
}

/// Parses the value of [`SUSPENSION_STRATEGY`].
pub fn parse_strategy(value: &str) -> Result<SuspensionStrategy, InvalidAnnotation> {
    match value {
        "Hibernate" => Ok(SuspensionStrategy::Hibernate),
        "Freeze" => Ok(SuspensionStrategy::Freeze),
        "Stop" => Ok(SuspensionStrategy::Stop),
        _ => Err(invalid(
            SUSPENSION_STRATEGY,
            value,
            "Hibernate, Freeze, Stop",
        )),
    }
}

/// Parses the value of [`HIBERNATE`].
pub fn parse_hibernate(value: &str) -> Result<bool, InvalidAnnotation> {
    parse_flag(HIBERNATE, value)
}

fn parse_flag(key: &'static str, value: &str) -> Result<bool, InvalidAnnotation> {
    match value {
        "true" => Ok(true),
        "false" => Ok(false),
        _ => Err(invalid(key, value, "true, false")),
    }
}

/// Parses the value of [`ON_RESTORE_FAILURE`].
pub fn parse_policy(value: &str) -> Result<OnRestoreFailure, InvalidAnnotation> {
    match value {
        "Fail" => Ok(OnRestoreFailure::Fail),
        "ColdStart" => Ok(OnRestoreFailure::ColdStart),
        _ => Err(invalid(ON_RESTORE_FAILURE, value, "Fail, ColdStart")),
    }
}

/// Parses the value of [`ON_CRASH`].
pub fn parse_on_crash(value: &str) -> Result<OnCrash, InvalidAnnotation> {
    match value {
        "ColdStart" => Ok(OnCrash::ColdStart),
        "LastImage" => Ok(OnCrash::LastImage),
        _ => Err(invalid(ON_CRASH, value, "ColdStart, LastImage")),
    }
}

/// Parses the value of [`ON_RESTORE_EXEC`].
pub fn parse_command(value: &str) -> Result<Vec<String>, InvalidAnnotation> {
    let words = serde_json::from_str::<Vec<String>>(value).ok();
    let words = words.filter(|words| words.first().is_some_and(|program| !program.is_empty()));
    words.filter(|_| value.len() <= MAX_COMMAND).ok_or_else(|| {
        let allowed = "a command as a JSON array of words of up to 4096 bytes, such as [\"/bin/sh\",\"-c\",\"kill -USR1 1\"]";
        invalid(ON_RESTORE_EXEC, value, allowed)
    })
}

/// Parses the value of [`NETWORK_POLICY`].
pub fn parse_isolation(value: &str) -> Result<NetworkIsolation, InvalidAnnotation> {
    match value {
        "default" => Ok(NetworkIsolation::Default),
        "none" => Ok(NetworkIsolation::None),
        _ => Err(invalid(NETWORK_POLICY, value, "default, none")),
    }
}

/// Parses a time.
pub fn parse_time(key: &'static str, value: &str) -> Result<Timestamp, InvalidAnnotation> {
    let allowed = "a time as RFC 3339 has it, such as 2026-06-06T11:58:00Z";
    value.parse().map_err(|_| invalid(key, value, allowed))
}

fn parse_name(key: &'static str, value: &str) -> Result<String, InvalidAnnotation> {
    if is_dns_subdomain(value) {
        Ok(value.to_owned())
    } else {
        Err(invalid(
            key,
            value,
            "the name of an object (a DNS-1123 subdomain)",
        ))
    }
}

fn invalid(key: &'static str, value: &str, allowed: &'static str) -> InvalidAnnotation {
    InvalidAnnotation {
        key,
        value: value.to_owned(),
        allowed,
    }
}

/// RFC 1123 subdomain, at most 253 characters: what Kubernetes asks of an object's name.
pub fn is_dns_subdomain(text: &str) -> bool {
    let label = |part: &str| {
        let edge =
            |c: Option<char>| c.is_some_and(|c| c.is_ascii_lowercase() || c.is_ascii_digit());
        edge(part.chars().next())
            && edge(part.chars().next_back())
            && part
                .chars()
                .all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-')
    };
    text.len() <= 253 && text.split('.').all(label)
}

/// Whether a pod template may not pass this annotation on to the Pod.
pub fn is_system(key: &str) -> bool {
    crate::labels::is_system(key) || key == TRACE_CONTEXT || key.starts_with(TORPOR_PREFIX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
        pairs
            .iter()
            .map(|(k, v)| ((*k).to_owned(), (*v).to_owned()))
            .collect()
    }

    #[test]
    fn the_sandbox_wins_over_its_pod_template() {
        let own = map(&[(SUSPENSION_STRATEGY, "Stop")]);
        let template = map(&[(SUSPENSION_STRATEGY, "Freeze"), (HIBERNATE, "true")]);
        let settings = Settings::read(Some(&own), Some(&template));
        assert_eq!(settings.strategy(), SuspensionStrategy::Stop);
        assert!(settings.hibernate);
        assert!(settings.problems.is_empty());
    }

    #[test]
    fn nothing_written_means_the_defaults() {
        let settings = Settings::read(None, None);
        assert_eq!(settings, Settings::default());
        assert_eq!(settings.suspension_strategy, None);
        assert_eq!(settings.strategy(), SuspensionStrategy::Hibernate);
        assert_eq!(settings.restore_policy(), OnRestoreFailure::Fail);
    }

    #[test]
    fn a_wrong_value_names_key_value_and_what_is_allowed_and_the_default_applies() {
        let own = map(&[
            (SUSPENSION_STRATEGY, "hibernate"),
            (HIBERNATE, "yes"),
            (ON_RESTORE_FAILURE, "Retry"),
            (ON_CRASH, "LastSnapshot"),
            (ON_RESTORE_EXEC, "/bin/true"),
            (RESTORE_FROM, "Not A Name"),
            (SNAPSHOT_CLASS, ""),
            (RESUME_ON_REQUEST, "1"),
            (HIBERNATE_AFTER, "soon"),
            (DOZE_AFTER, "0"),
            (WAKE_ON, "http"),
            (NEXT_WAKEUP, "tomorrow"),
            (WAKE_AT, "now"),
            (INJECT_RUNTIME, "True"),
            (NETWORK_POLICY, "off"),
        ]);
        let settings = Settings::read(Some(&own), None);
        let said: Vec<String> = settings.problems.iter().map(ToString::to_string).collect();
        assert_eq!(
            said,
            [
                r#"annotation torpor.dev/suspension-strategy: value "hibernate" is not allowed; allowed: Hibernate, Freeze, Stop"#,
                r#"annotation torpor.dev/hibernate: value "yes" is not allowed; allowed: true, false"#,
                r#"annotation torpor.dev/on-restore-failure: value "Retry" is not allowed; allowed: Fail, ColdStart"#,
                r#"annotation torpor.dev/on-crash: value "LastSnapshot" is not allowed; allowed: ColdStart, LastImage"#,
                r#"annotation torpor.dev/on-restore-exec: value "/bin/true" is not allowed; allowed: a command as a JSON array of words of up to 4096 bytes, such as ["/bin/sh","-c","kill -USR1 1"]"#,
                r#"annotation torpor.dev/restore-from: value "Not A Name" is not allowed; allowed: the name of an object (a DNS-1123 subdomain)"#,
                r#"annotation torpor.dev/snapshot-class: value "" is not allowed; allowed: the name of an object (a DNS-1123 subdomain)"#,
                r#"annotation torpor.dev/resume-on-request: value "1" is not allowed; allowed: true, false"#,
                r#"annotation torpor.dev/hibernate-after: value "soon" is not allowed; allowed: off, or a duration from 1s to 8760h, such as 30m or 1h30m"#,
                r#"annotation torpor.dev/doze-after: value "0" is not allowed; allowed: off, or a duration from 1s to 8760h, such as 30m or 1h30m"#,
                r#"annotation torpor.dev/wake-on: value "http" is not allowed; allowed: any, none, or some of tcp, udp, icmp, ports=PORTS, such as tcp,ports=80,8000-8099"#,
                r#"annotation agents.x-k8s.io/next-wakeup: value "tomorrow" is not allowed; allowed: a time as RFC 3339 has it, such as 2026-06-06T11:58:00Z"#,
                r#"annotation torpor.dev/wake-at: value "now" is not allowed; allowed: a time as RFC 3339 has it, such as 2026-06-06T11:58:00Z"#,
                r#"annotation torpor.dev/inject-runtime: value "True" is not allowed; allowed: true, false"#,
                r#"annotation torpor.dev/network-policy: value "off" is not allowed; allowed: default, none"#,
            ]
        );
        assert_eq!(
            Settings {
                problems: Vec::new(),
                ..settings
            },
            Settings::default()
        );
    }

    #[test]
    fn a_wrong_value_on_the_sandbox_hides_a_right_one_in_the_template() {
        let own = map(&[(SUSPENSION_STRATEGY, "Sleep")]);
        let template = map(&[(SUSPENSION_STRATEGY, "Freeze")]);
        let settings = Settings::read(Some(&own), Some(&template));
        assert_eq!(settings.suspension_strategy, None);
        assert_eq!(settings.problems.len(), 1);
    }

    #[test]
    fn a_time_at_which_a_sandbox_is_awake_is_not_taken_from_its_template() {
        let time = "2026-06-06T11:58:00Z";
        let all = map(&[(NEXT_WAKEUP, time), (WAKE_AT, time)]);
        let settings = Settings::read(None, Some(&all));
        assert_eq!((settings.next_wakeup, settings.wake_at), (None, None));
        let settings = Settings::read(Some(&all), None);
        let time = time.parse::<Timestamp>().ok();
        assert_eq!((settings.next_wakeup, settings.wake_at), (time, time));
    }

    #[test]
    fn idle_times_are_durations_as_go_writes_them() {
        let parsed = |value| SleepAfter::parse(HIBERNATE_AFTER, value).ok();
        let seconds = |n| Some(SleepAfter::Idle(Duration::from_secs(n)));
        for (value, expected) in [
            ("30m", seconds(1800)),
            ("1h30m", seconds(5400)),
            ("90s", seconds(90)),
            ("8760h", seconds(31_536_000)),
            ("off", Some(SleepAfter::Off)),
            ("", None),
            ("0s", None),
            ("500ms", None),
            ("-5m", None),
            ("30", None),
            ("8761h", None),
            ("99999999999999999999h", None),
        ] {
            assert_eq!(parsed(value), expected, "{value:?}");
        }
        assert_eq!(seconds(5400).expect("one").canonical(), "5400s");
    }

    #[test]
    fn each_name_of_the_idle_time_is_understood_and_the_sandbox_hides_its_template() {
        let template = map(&[(HIBERNATE_AFTER, "1h")]);
        for (own, expected) in [
            (map(&[]), SleepAfter::Idle(Duration::from_secs(3600))),
            (
                map(&[(IDLE_TIMEOUT, "5m")]),
                SleepAfter::Idle(Duration::from_secs(300)),
            ),
            (
                map(&[(MAX_IDLE_TIME, "7m"), (IDLE_TIMEOUT, "5m")]),
                SleepAfter::Idle(Duration::from_secs(300)),
            ),
            (map(&[(MAX_IDLE_TIME, "off")]), SleepAfter::Off),
        ] {
            let settings = Settings::read(Some(&own), Some(&template));
            assert_eq!(settings.hibernate_after, Some(expected), "{own:?}");
        }
        let wrong = Settings::read(Some(&map(&[(MAX_IDLE_TIME, "x")])), Some(&template));
        assert_eq!(wrong.hibernate_after, None);
        assert_eq!(wrong.problems[0].key, MAX_IDLE_TIME);
    }

    #[test]
    fn names_are_dns_subdomains() {
        for good in ["a", "a-b", "a.b-c.d", "0", "sandbox-1a2b3c4d"] {
            assert!(is_dns_subdomain(good), "{good}");
        }
        let long = "a".repeat(254);
        for bad in [
            "",
            "-a",
            "a-",
            "A",
            "a..b",
            "a_b",
            ".",
            "a.",
            "ä",
            long.as_str(),
        ] {
            assert!(!is_dns_subdomain(bad), "{bad}");
        }
    }

    #[test]
    fn a_command_has_a_program() {
        let words = parse_command(r#"["/bin/sh","-c","kill -USR1 1"]"#);
        assert_eq!(
            words,
            Ok(["/bin/sh", "-c", "kill -USR1 1"]
                .map(str::to_owned)
                .to_vec())
        );
        let long = format!("[\"{}\"]", "x".repeat(MAX_COMMAND));
        for bad in ["", "[]", "[\"\"]", "[1]", "{}", long.as_str()] {
            assert!(
                parse_command(bad).is_err_and(|why| why.key == ON_RESTORE_EXEC),
                "{bad}"
            );
        }
    }

    #[test]
    fn a_template_cannot_pass_on_system_or_torpor_annotations() {
        for key in USER_SETTINGS.iter().chain(&ON_POD) {
            assert!(is_system(key), "{key}");
        }
        for key in [POD_NAME, PROPAGATED_LABELS, TRACE_CONTEXT] {
            assert!(is_system(key), "{key}");
        }
        assert!(!is_system("example.com/note"));
    }
}
