//! What is said about the sleep of a sandbox: on its Pod, and by whoever runs the cluster on the Pod's RuntimeClass. Pure.
//!
//! What a Sandbox, its pod template or its SandboxTemplate says stands on the Pod; the controller writes it there. Of a RuntimeClass the agent reads it
//! itself, so that it holds for Pods without a Sandbox too, and a change of it for those that run.

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::node::v1::RuntimeClass;
use kube::ResourceExt;
use torpor_api::annotations::{self, InvalidAnnotation, SleepAfter};
use torpor_core::pressure::Pressure;
use torpor_core::state;

/// Of each depth the first that is said.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Said {
    doze: Option<SleepAfter>,
    hibernate: Option<SleepAfter>,
}

impl Said {
    /// On the Pod, else on its RuntimeClass. A wrong value is as if nobody had written one: the controller tells of one on a Sandbox, [`problems`] of one on
    /// a RuntimeClass.
    pub(crate) fn of(pod: &Pod, class: Option<&RuntimeClass>) -> Self {
        let on_pod = |key: &str| pod.annotations().get(key);
        let on_class = |key: &str| class?.annotations().get(key);
        let right = |said: Option<Result<SleepAfter, InvalidAnnotation>>| said?.ok();
        Self {
            doze: right(annotations::doze_after(on_pod))
                .or_else(|| right(annotations::doze_after(on_class))),
            hibernate: right(annotations::hibernate_after(on_pod))
                .or_else(|| right(annotations::hibernate_after(on_class))),
        }
    }

    pub(crate) fn after(self) -> state::SleepAfter {
        state::SleepAfter {
            doze: self.doze.and_then(SleepAfter::duration),
            hibernate: self.hibernate.and_then(SleepAfter::duration),
        }
    }

    /// How deep it sleeps for the node's sake, as far as that is said.
    pub(crate) fn pressure(self) -> Pressure {
        Pressure {
            never_dozes: self.doze == Some(SleepAfter::Off),
            never_hibernates: self.hibernate == Some(SleepAfter::Off),
            ..Pressure::default()
        }
    }

    /// Whether the sandbox may be put to sleep for the node's sake: one that may fall asleep by itself; on a node where all may
    /// (`on_all`), also one of which nothing is said. One of which it is said that it does not sleep does not.
    pub(crate) fn may_be_pressed(self, on_all: bool) -> bool {
        match [self.doze, self.hibernate] {
            [None, None] => on_all,
            said => said
                .into_iter()
                .flatten()
                .any(|after| after != SleepAfter::Off),
        }
    }
}

/// Wrong values on a RuntimeClass.
pub(crate) fn problems(class: &RuntimeClass) -> Vec<InvalidAnnotation> {
    let value = |key: &str| class.annotations().get(key);
    let said = [
        annotations::doze_after(value),
        annotations::hibernate_after(value),
    ];
    let said = said.into_iter().flatten();
    said.filter_map(Result::err).collect()
}

/// The name of the Pod's RuntimeClass.
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

    /// Seconds until it dozes and until it hibernates.
    fn after(on_pod: Value, on_class: Value) -> (Option<u64>, Option<u64>) {
        let after = Said::of(&pod(on_pod), Some(&class(on_class))).after();
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
    fn a_runtime_class_says_what_its_pods_do_not() {
        let class =
            || json!({ "torpor.dev/doze-after": "30s", "agents.x-k8s.io/max-idle-time": "1h" });
        for (on_pod, expected) in [
            (json!({}), (Some(30), Some(3600))),
            (
                json!({ "torpor.dev/doze-after": "5s" }),
                (Some(5), Some(3600)),
            ),
            // Whatever name the Pod uses hides every name of the RuntimeClass.
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
        let said = Said::of(&pod(json!({})), None);
        assert_eq!(said, Said::default());
    }

    #[test]
    fn a_wrong_value_on_a_runtime_class_is_told_by_its_key() {
        let keys = |annotations| {
            let problems = problems(&class(annotations));
            problems.iter().map(|told| told.key).collect::<Vec<_>>()
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
    fn who_may_sleep_for_the_nodes_sake_follows_from_what_is_said_about_its_sleep() {
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
            let on_pod = Said::of(&pod(annotations.clone()), None);
            let on_class = Said::of(&pod(json!({})), Some(&class(annotations.clone())));
            for said in [on_pod, on_class] {
                let may = [false, true].map(|on_all| said.may_be_pressed(on_all));
                assert_eq!(may, [by_default, on_all], "{annotations}");
            }
        }
    }

    #[test]
    fn how_deep_one_never_sleeps_is_what_is_switched_off() {
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
            let pressure = Said::of(&pod(annotations.clone()), None).pressure();
            let never = (pressure.never_dozes, pressure.never_hibernates);
            assert_eq!(never, (never_dozes, never_hibernates), "{annotations}");
        }
    }
}
