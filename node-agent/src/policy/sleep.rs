//! The settings of a sandbox's sleep: annotations on its Pod, and the administrator's on the Pod's
//! RuntimeClass. Pure: no I/O.
//!
//! The controller copies the settings of a Sandbox, its Pod template or its SandboxTemplate to the
//! Pod. The agent reads those of a RuntimeClass itself, so that they also apply to Pods without a
//! Sandbox, and so that a change applies to Pods that run.

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::node::v1::RuntimeClass;
use kube::ResourceExt;
use torpor_api::annotations::{self, InvalidAnnotation, SleepAfter};
use torpor_core::pressure::Pressure;
use torpor_core::state;

/// The setting of each depth. None: there is no setting.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct SleepSettings {
    doze: Option<SleepAfter>,
    hibernate: Option<SleepAfter>,
}

impl SleepSettings {
    /// Reads the settings of the Pod, else those of its RuntimeClass. A wrong value counts as none:
    /// the controller reports it on a Sandbox, and [`problems`] returns those of a RuntimeClass.
    pub(crate) fn of(pod: &Pod, class: Option<&RuntimeClass>) -> Self {
        let on_pod = |key: &str| pod.annotations().get(key);
        let on_class = |key: &str| class?.annotations().get(key);
        let valid = |value: Option<Result<SleepAfter, InvalidAnnotation>>| value?.ok();
        Self {
            doze: valid(annotations::doze_after(on_pod))
                .or_else(|| valid(annotations::doze_after(on_class))),
            hibernate: valid(annotations::hibernate_after(on_pod))
                .or_else(|| valid(annotations::hibernate_after(on_class))),
        }
    }

    /// Returns the idle times after which the sandbox sleeps by itself.
    pub(crate) fn after(self) -> state::SleepAfter {
        state::SleepAfter {
            doze: self.doze.and_then(SleepAfter::duration),
            hibernate: self.hibernate.and_then(SleepAfter::duration),
        }
    }

    /// Returns the depths in which the sandbox never sleeps to relieve the node.
    pub(crate) fn pressure(self) -> Pressure {
        Pressure {
            never_dozes: self.doze == Some(SleepAfter::Off),
            never_hibernates: self.hibernate == Some(SleepAfter::Off),
            ..Pressure::default()
        }
    }

    /// Returns whether the sandbox may be put to sleep to relieve the node. It may if it may fall
    /// asleep by itself. Without any setting it may if the agent allows that for all (`on_all`). A
    /// sandbox whose settings are all `off` may not.
    pub(crate) fn may_be_pressed(self, on_all: bool) -> bool {
        match [self.doze, self.hibernate] {
            [None, None] => on_all,
            settings => settings
                .into_iter()
                .flatten()
                .any(|after| after != SleepAfter::Off),
        }
    }
}

/// Returns the wrong values on a RuntimeClass.
pub(crate) fn problems(class: &RuntimeClass) -> Vec<InvalidAnnotation> {
    let value = |key: &str| class.annotations().get(key);
    let values = [
        annotations::doze_after(value),
        annotations::hibernate_after(value),
    ];
    let values = values.into_iter().flatten();
    values.filter_map(Result::err).collect()
}

/// Returns the name of the Pod's RuntimeClass.
pub(crate) fn class_name(pod: &Pod) -> Option<&str> {
    pod.spec.as_ref()?.runtime_class_name.as_deref()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn pod(annotations: Value) -> Pod {
        serde_json::from_value(json!({ "metadata": { "annotations": annotations } }))
            .expect("a Pod")
    }

    fn class(annotations: Value) -> RuntimeClass {
        let class = json!({ "metadata": { "annotations": annotations }, "handler": "torpor" });
        serde_json::from_value(class).expect("a RuntimeClass")
    }

    /// Returns the seconds until the sandbox dozes and until it hibernates.
    fn after(on_pod: Value, on_class: Value) -> (Option<u64>, Option<u64>) {
        let after = SleepSettings::of(&pod(on_pod), Some(&class(on_class))).after();
        let seconds = |after: Option<std::time::Duration>| after.map(|after| after.as_secs());
        (seconds(after.doze), seconds(after.hibernate))
    }

    #[test]
    fn a_pod_may_fall_asleep_by_any_of_the_names_and_not_by_a_wrong_value() {
        let after = |annotations| after(annotations, json!({})).1;
        assert_eq!(after(json!({})), None);
        assert_eq!(
            after(json!({ "torpor.dev/hibernate-after": "30m" })),
            Some(1800)
        );
        assert_eq!(
            after(json!({ "agents.x-k8s.io/max-idle-time": "90s" })),
            Some(90)
        );
        assert_eq!(after(json!({ "torpor.dev/hibernate-after": "soon" })), None);
        assert_eq!(after(json!({ "torpor.dev/hibernate-after": "off" })), None);
    }

    #[test]
    fn a_runtime_class_sets_the_idle_times_that_its_pods_do_not_set() {
        let class =
            || json!({ "torpor.dev/doze-after": "30s", "agents.x-k8s.io/max-idle-time": "1h" });
        for (on_pod, expected) in [
            (json!({}), (Some(30), Some(3600))),
            (
                json!({ "torpor.dev/doze-after": "5s" }),
                (Some(5), Some(3600)),
            ),
            // Any name on the Pod hides every name on the RuntimeClass.
            (
                json!({ "torpor.dev/idle-timeout": "2h" }),
                (Some(30), Some(7200)),
            ),
            (
                json!({ "torpor.dev/hibernate-after": "off" }),
                (Some(30), None),
            ),
            (
                json!({ "torpor.dev/doze-after": "soon" }),
                (Some(30), Some(3600)),
            ),
        ] {
            assert_eq!(after(on_pod.clone(), class()), expected, "{on_pod}");
        }
        let wrong = json!({ "torpor.dev/doze-after": "soon", "torpor.dev/idle-timeout": "off" });
        assert_eq!(after(json!({}), wrong), (None, None));
        let settings = SleepSettings::of(&pod(json!({})), None);
        assert_eq!(settings, SleepSettings::default());
    }

    #[test]
    fn a_wrong_value_on_a_runtime_class_is_reported_with_its_key() {
        let keys = |annotations| {
            let problems = problems(&class(annotations));
            problems
                .iter()
                .map(|problem| problem.key)
                .collect::<Vec<_>>()
        };
        let right = json!({ "torpor.dev/doze-after": "30s", "torpor.dev/hibernate-after": "off" });
        assert!(keys(right).is_empty());
        let wrong = json!({ "torpor.dev/doze-after": "0", "torpor.dev/idle-timeout": "soon" });
        assert_eq!(
            keys(wrong),
            [annotations::DOZE_AFTER, annotations::IDLE_TIMEOUT]
        );
    }

    #[test]
    fn sleep_annotations_decide_whether_pressure_may_put_a_sandbox_to_sleep() {
        for (annotations, by_default, on_all) in [
            (json!({}), false, true),
            (json!({ "torpor.dev/hibernate-after": "1h" }), true, true),
            (json!({ "torpor.dev/doze-after": "1h" }), true, true),
            (json!({ "torpor.dev/hibernate-after": "off" }), false, false),
            (
                json!({ "torpor.dev/hibernate-after": "off", "torpor.dev/doze-after": "30s" }),
                true,
                true,
            ),
            (json!({ "torpor.dev/hibernate-after": "soon" }), false, true),
        ] {
            let on_pod = SleepSettings::of(&pod(annotations.clone()), None);
            let on_class = SleepSettings::of(&pod(json!({})), Some(&class(annotations.clone())));
            for settings in [on_pod, on_class] {
                let may = [false, true].map(|on_all| settings.may_be_pressed(on_all));
                assert_eq!(may, [by_default, on_all], "{annotations}");
            }
        }
    }

    #[test]
    fn a_depth_that_is_switched_off_is_never_used_under_pressure() {
        for (annotations, never_dozes, never_hibernates) in [
            (json!({}), false, false),
            (
                json!({ "torpor.dev/hibernate-after": "off", "torpor.dev/doze-after": "30s" }),
                false,
                true,
            ),
            (
                json!({ "torpor.dev/idle-timeout": "1h", "torpor.dev/doze-after": "off" }),
                true,
                false,
            ),
            (
                json!({ "torpor.dev/hibernate-after": "never" }),
                false,
                false,
            ),
        ] {
            let pressure = SleepSettings::of(&pod(annotations.clone()), None).pressure();
            let never = (pressure.never_dozes, pressure.never_hibernates);
            assert_eq!(never, (never_dozes, never_hibernates), "{annotations}");
        }
    }
}
