//! Settings of one Sandbox, read from its annotations and those of its pod template.

use std::collections::BTreeMap;
use std::time::Duration;

use jiff::Timestamp;

use super::{
    ARCHIVE_AFTER, ArchiveAfter, BACK_UP_AFTER, DOZE_AFTER, HIBERNATE, INJECT_RUNTIME,
    InvalidAnnotation, LATE_BIND, LateBind, NETWORK_POLICY, NEXT_WAKEUP, NetworkIsolation,
    ON_CLAIM_EXEC, ON_CRASH, ON_RESTORE_EXEC, ON_RESTORE_FAILURE, OnCrash, OnRestoreFailure,
    RESTORE_FROM, RESUME_ON_REQUEST, SNAPSHOT_CLASS, SUSPENSION_STRATEGY, SleepAfter,
    SuspensionStrategy, WAKE_AT, WAKE_ON, WakeOn, hibernate_after,
    values::{
        parse_command, parse_flag, parse_hibernate, parse_isolation, parse_name, parse_on_crash,
        parse_policy, parse_strategy, parse_time,
    },
};

/// Validated settings of one Sandbox.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Settings {
    /// `None` when unset; then [`SuspensionStrategy::default`] applies where the node supports it.
    pub suspension_strategy: Option<SuspensionStrategy>,
    pub hibernate: bool,
    /// `None` when unset; see [`Settings::restore_policy`].
    pub on_restore_failure: Option<OnRestoreFailure>,
    pub on_crash: Option<OnCrash>,
    /// Words of the command.
    pub on_restore_exec: Option<Vec<String>>,
    pub restore_from: Option<String>,
    pub snapshot_class: Option<String>,
    /// `None` when unset or `off`.
    pub archive_after: Option<Duration>,
    /// `None` when unset or `off`.
    pub back_up_after: Option<Duration>,
    pub resume_on_request: bool,
    pub hibernate_after: Option<SleepAfter>,
    pub doze_after: Option<SleepAfter>,
    pub next_wakeup: Option<Timestamp>,
    pub wake_at: Option<Timestamp>,
    /// `None` when unset: then every packet wakes.
    pub wake_on: Option<WakeOn>,
    pub inject_runtime: bool,
    /// `None` when unset.
    pub late_bind: Option<LateBind>,
    /// Words of the command.
    pub on_claim_exec: Option<Vec<String>>,
    /// `None` when unset.
    pub network_policy: Option<NetworkIsolation>,
    /// One entry for each invalid value.
    pub problems: Vec<InvalidAnnotation>,
}

impl Settings {
    /// Reads the settings of a Sandbox from its annotations (`own`) and those of its pod template.
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
        let on_restore_exec = checked(
            value(ON_RESTORE_EXEC),
            |value| parse_command(ON_RESTORE_EXEC, value),
            &mut problems,
        );
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
        let archive_after = checked(value(ARCHIVE_AFTER), ArchiveAfter::parse, &mut problems);
        let archive_after = archive_after.and_then(|after| match after {
            ArchiveAfter::Off => None,
            ArchiveAfter::Suspended(time) => Some(time),
        });
        let back_up_after = checked(
            value(BACK_UP_AFTER),
            |v| SleepAfter::parse(BACK_UP_AFTER, v),
            &mut problems,
        );
        let back_up_after = back_up_after.and_then(SleepAfter::duration);
        let resume_on_request = checked(
            value(RESUME_ON_REQUEST),
            |v| parse_flag(RESUME_ON_REQUEST, v),
            &mut problems,
        );
        // Any of the three keys on the Sandbox overrides all three of its template.
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
        // Read on the Sandbox only: from a template the time would have passed for all later
        // Sandboxes.
        let [next_wakeup, wake_at] = [NEXT_WAKEUP, WAKE_AT].map(|key| {
            let written = own.and_then(|all| all.get(key));
            checked(written, |v| parse_time(key, v), &mut problems)
        });
        let inject_runtime = checked(
            value(INJECT_RUNTIME),
            |v| parse_flag(INJECT_RUNTIME, v),
            &mut problems,
        );
        // Read on the Sandbox only: a claim looks there whether it has to wait.
        let own_value = |key: &str| own.and_then(|all| all.get(key));
        let late_bind = checked(own_value(LATE_BIND), LateBind::parse, &mut problems);
        let on_claim_exec = checked(
            own_value(ON_CLAIM_EXEC),
            |value| parse_command(ON_CLAIM_EXEC, value),
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
            archive_after,
            back_up_after,
            resume_on_request: resume_on_request.unwrap_or_default(),
            hibernate_after,
            doze_after,
            wake_on,
            next_wakeup,
            wake_at,
            inject_runtime: inject_runtime.unwrap_or_default(),
            late_bind,
            on_claim_exec,
            network_policy,
            problems,
        }
    }

    /// Returns the effective policy.
    pub fn restore_policy(&self) -> OnRestoreFailure {
        self.on_restore_failure.unwrap_or_default()
    }

    /// Returns the effective strategy.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::annotations::{HIBERNATE_AFTER, IDLE_TIMEOUT, MAX_IDLE_TIME};

    fn map(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
        pairs
            .iter()
            .map(|(k, v)| ((*k).to_owned(), (*v).to_owned()))
            .collect()
    }

    #[test]
    fn the_sandbox_overrides_its_pod_template() {
        let own = map(&[(SUSPENSION_STRATEGY, "Stop")]);
        let template = map(&[(SUSPENSION_STRATEGY, "Freeze"), (HIBERNATE, "true")]);
        let settings = Settings::read(Some(&own), Some(&template));
        assert_eq!(settings.strategy(), SuspensionStrategy::Stop);
        assert!(settings.hibernate);
        assert!(settings.problems.is_empty());
    }

    #[test]
    fn unset_settings_have_their_defaults() {
        let settings = Settings::read(None, None);
        assert_eq!(settings, Settings::default());
        assert_eq!(settings.suspension_strategy, None);
        assert_eq!(settings.strategy(), SuspensionStrategy::Hibernate);
        assert_eq!(settings.restore_policy(), OnRestoreFailure::Fail);
    }

    #[test]
    fn an_invalid_value_is_reported_with_key_value_and_allowed_values_and_the_default_applies() {
        let own = map(&[
            (SUSPENSION_STRATEGY, "hibernate"),
            (HIBERNATE, "yes"),
            (ON_RESTORE_FAILURE, "Retry"),
            (ON_CRASH, "LastSnapshot"),
            (ON_RESTORE_EXEC, "/bin/true"),
            (RESTORE_FROM, "Not A Name"),
            (SNAPSHOT_CLASS, ""),
            (BACK_UP_AFTER, "never"),
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
        let messages: Vec<String> = settings.problems.iter().map(ToString::to_string).collect();
        assert_eq!(
            messages,
            [
                r#"annotation torpor.dev/suspension-strategy: value "hibernate" is not allowed; allowed: Hibernate, Freeze, Stop"#,
                r#"annotation torpor.dev/hibernate: value "yes" is not allowed; allowed: true, false"#,
                r#"annotation torpor.dev/on-restore-failure: value "Retry" is not allowed; allowed: Fail, ColdStart"#,
                r#"annotation torpor.dev/on-crash: value "LastSnapshot" is not allowed; allowed: ColdStart, LastImage"#,
                r#"annotation torpor.dev/on-restore-exec: value "/bin/true" is not allowed; allowed: a command as a JSON array of words of up to 4096 bytes, such as ["/bin/sh","-c","kill -USR1 1"]"#,
                r#"annotation torpor.dev/restore-from: value "Not A Name" is not allowed; allowed: the name of an object (a DNS-1123 subdomain)"#,
                r#"annotation torpor.dev/snapshot-class: value "" is not allowed; allowed: the name of an object (a DNS-1123 subdomain)"#,
                r#"annotation torpor.dev/back-up-after: value "never" is not allowed; allowed: off, or a duration from 1s to 8760h, such as 30m or 1h30m"#,
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
    fn an_invalid_value_on_the_sandbox_overrides_a_valid_one_of_the_template() {
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
    fn each_alias_of_the_idle_time_is_read_and_the_sandbox_overrides_its_template() {
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
}
