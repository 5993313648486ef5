//! Labels of the metrics.

use prometheus_client::encoding::EncodeLabelSet;

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(super) struct CreationLabels {
    pub(super) namespace: String,
    pub(super) launch_type: &'static str,
    pub(super) sandbox_template: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(super) struct StartupLabels {
    pub(super) launch_type: &'static str,
    pub(super) sandbox_template: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(super) struct ClaimLabels {
    pub(super) namespace: String,
    pub(super) sandbox_template: String,
    pub(super) launch_type: &'static str,
    pub(super) warmpool_name: String,
    pub(super) pod_condition: &'static str,
    pub(super) created_by: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(super) struct LifecycleLabels {
    pub(super) namespace: String,
    pub(super) sandbox_template: String,
    pub(super) owned_by: &'static str,
}

/// As [`LifecycleLabels`], with the result.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(super) struct OutcomeLabels {
    pub(super) namespace: String,
    pub(super) sandbox_template: String,
    pub(super) owned_by: &'static str,
    pub(super) result: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(super) struct FinishedLabels {
    pub(super) namespace: String,
    pub(super) sandbox_template: String,
    pub(super) owned_by: &'static str,
    pub(super) reason: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(super) struct ExpiredLabels {
    pub(super) namespace: String,
    pub(super) sandbox_template: String,
    pub(super) owned_by: &'static str,
    pub(super) shutdown_policy: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(super) struct QueueLabels {
    pub(super) name: &'static str,
    pub(super) controller: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(super) struct KeyLabels {
    /// SnapshotClass.
    pub(super) class: String,
    /// Id of the key.
    pub(super) key: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(super) struct NamespaceLabels {
    pub(super) namespace: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(super) struct PassLabels {
    pub(super) controller: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(super) struct ResultLabels {
    pub(super) controller: &'static str,
    pub(super) result: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(super) struct FailureLabels {
    pub(super) controller: &'static str,
    pub(super) reason: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(super) struct BuildLabels {
    pub(super) git_version: &'static str,
    pub(super) git_commit: &'static str,
    pub(super) build_date: &'static str,
    pub(super) go_version: &'static str,
    pub(super) compiler: &'static str,
    pub(super) platform: &'static str,
}
