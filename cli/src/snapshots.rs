//! `snapshots`: SandboxSnapshots as a table, or as data. Pure.

use jiff::Timestamp;
use kube::ResourceExt;
use serde::Serialize;
use torpor_api::conditions::{self, COMMITTED, CONSUMED};
use torpor_api::reasons::snapshot as reasons;
use torpor_api::{SandboxSnapshot, SnapshotReason};

use crate::listing::{Item, Listing};
use crate::units;

/// One snapshot. Unknown fields are left out.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct View {
    pub namespace: String,
    pub name: String,
    pub sandbox: String,
    /// Request for which the image was saved.
    pub reason: SnapshotReason,
    /// Reason of the condition that decides: Consumed once the sandbox has run on without the image
    /// or from it, else Committed. `Deleting` while the snapshot is being deleted.
    pub state: String,
    /// Size of the image on disk, in bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bytes: Option<i64>,
    /// Node that holds the image.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node: Option<String>,
    /// Progress of the upload to the repository of the snapshot's class: `Uploaded`, a percentage,
    /// or the reason for which it waits. None without such a class.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub upload: Option<String>,
    /// Pod that was saved.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pod: Option<String>,
    /// Time at which the image was complete.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub committed_at: Option<Timestamp>,
    /// Message of the condition that decides the state.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub message: String,
}

/// Lists the snapshots of these Sandboxes, the newest of each first; of all if there are no names.
pub fn listing(
    snapshots: &[SandboxSnapshot],
    sandboxes: &[String],
    with_namespaces: bool,
    now: Timestamp,
) -> Listing<View> {
    let is_asked = |snapshot: &&SandboxSnapshot| {
        sandboxes.is_empty() || sandboxes.contains(&snapshot.spec.sandbox_name)
    };
    let mut items: Vec<View> = snapshots.iter().filter(is_asked).map(view).collect();
    items.sort_by(|a, b| {
        let place = |view: &View| (view.namespace.clone(), view.sandbox.clone());
        let newest_first = b.committed_at.cmp(&a.committed_at);
        (place(a).cmp(&place(b)))
            .then(newest_first)
            .then_with(|| a.name.cmp(&b.name))
    });
    Listing {
        items,
        with_namespaces,
        now,
    }
}

/// Returns what is shown of a snapshot.
pub(crate) fn view(snapshot: &SandboxSnapshot) -> View {
    let (state, message) = state(snapshot);
    let status = snapshot.status.as_ref();
    View {
        namespace: snapshot.namespace().unwrap_or_default(),
        name: snapshot.name_any(),
        sandbox: snapshot.spec.sandbox_name.clone(),
        reason: snapshot.spec.reason,
        state,
        bytes: status.and_then(|status| status.size_bytes),
        node: status.and_then(|status| status.node_name.clone()),
        upload: upload(snapshot),
        pod: status.and_then(|status| status.pod_name.clone()),
        committed_at: status.and_then(|status| Some(status.committed_at.as_ref()?.0)),
        message,
    }
}

fn upload(snapshot: &SandboxSnapshot) -> Option<String> {
    let reason = snapshot.upload_reason()?;
    let figures = snapshot.status.as_ref()?.upload.as_ref();
    let known = figures.filter(|figures| reason == reasons::UPLOADING && figures.total_bytes > 0);
    Some(known.map_or_else(
        || reason.to_owned(),
        |figures| {
            format!(
                "{}%",
                figures.done_bytes.saturating_mul(100) / figures.total_bytes
            )
        },
    ))
}

/// Returns the state, and the message of the condition that decides it.
pub(crate) fn state(snapshot: &SandboxSnapshot) -> (String, String) {
    let find = |type_| conditions::find(snapshot.conditions(), type_);
    let consumed = find(CONSUMED).filter(|condition| condition.status == "True");
    let committed = find(COMMITTED);
    let decides = match snapshot.is_committed() {
        true => consumed.or(committed),
        false => committed,
    };
    let state = match (snapshot.metadata.deletion_timestamp.as_ref(), decides) {
        (Some(_), _) => DELETING.to_owned(),
        (None, Some(condition)) => condition.reason.clone(),
        (None, None) => reasons::PENDING.to_owned(),
    };
    let message = decides.map(|condition| condition.message.clone());
    (state, message.unwrap_or_default())
}

/// State of a snapshot that is being deleted.
const DELETING: &str = "Deleting";

impl Item for View {
    const RESOURCE: &'static str = "sandboxsnapshot.torpor.dev";
    const HEADINGS: &'static [&'static str] = &[
        "NAME", "SANDBOX", "REASON", "STATE", "SIZE", "NODE", "UPLOAD", "AGE",
    ];
    const WIDE: &'static [&'static str] = &["POD", "MESSAGE"];

    fn namespace(&self) -> &str {
        &self.namespace
    }

    fn name(&self) -> &str {
        &self.name
    }

    fn cells(&self, now: Timestamp) -> Vec<String> {
        let age = |at| units::age(at, now);
        vec![
            self.name.clone(),
            self.sandbox.clone(),
            format!("{:?}", self.reason),
            self.state.clone(),
            self.bytes.map_or_else(String::new, units::bytes),
            self.node.clone().unwrap_or_default(),
            self.upload.clone().unwrap_or_default(),
            self.committed_at.map_or_else(String::new, age),
        ]
    }

    fn wide_cells(&self, _: Timestamp) -> Vec<String> {
        vec![self.pod.clone().unwrap_or_default(), self.message.clone()]
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::args::Format;
    use crate::output::rendered;
    use crate::view::tests::{at, written};

    /// Returns a snapshot with conditions in the form of [`written`].
    fn snapshot(name: &str, of: &str, conditions: &[&str], status: &Value) -> SandboxSnapshot {
        let mut status = status.clone();
        status["conditions"] = written(conditions, |_, reason| reason).into();
        serde_json::from_value(json!({
            "apiVersion": "torpor.dev/v1alpha1", "kind": "SandboxSnapshot",
            "metadata": {"name": name, "namespace": "x"},
            "spec": {"sandboxName": of}, "status": status,
        }))
        .unwrap()
    }

    fn listing(sandboxes: &[&str], with_namespaces: bool) -> Listing<View> {
        let image = |at: &str| json!({"committedAt": at, "sizeBytes": 42_000_000, "nodeName": "node-0", "podName": "demo"});
        let committed = "Committed=True:Committed";
        let mut suspend = snapshot("s", "other", &[committed], &image("2026-11-21T08:00:00Z"));
        suspend.spec.reason = SnapshotReason::Suspend;
        let mut going = snapshot("g", "demo", &[committed], &image("2026-11-20T08:00:00Z"));
        going.metadata.deletion_timestamp =
            serde_json::from_value(json!("2026-11-21T00:00:00Z")).unwrap();
        let past = [
            committed,
            "Consumed=True:Superseded",
            "Uploaded=True:Uploaded",
        ];
        let mut half = snapshot(
            "half",
            "demo",
            &[committed, "Uploaded=False:Uploading"],
            &image("2026-11-21T11:00:00Z"),
        );
        let status = half.status.get_or_insert_default();
        status.upload = serde_json::from_value(json!({"doneBytes": 5, "totalBytes": 10})).unwrap();
        let snapshots = [
            suspend,
            snapshot("new", "demo", &[], &json!({})),
            snapshot(
                "failed",
                "demo",
                &["Committed=False:SaveFailed"],
                &json!({}),
            ),
            snapshot(
                "lost",
                "demo",
                &["Committed=False:ImageMissing"],
                &image("2026-11-21T09:00:00Z"),
            ),
            snapshot("past", "demo", &past, &image("2026-11-21T10:00:00Z")),
            going,
            half,
        ];
        let sandboxes: Vec<String> = sandboxes.iter().map(|name| (*name).to_owned()).collect();
        super::listing(
            &snapshots,
            &sandboxes,
            with_namespaces,
            at("2026-11-21T12:00:00Z"),
        )
    }

    #[test]
    fn a_table_shows_the_newest_snapshot_of_each_sandbox_first() {
        insta::assert_snapshot!(rendered(&listing(&[], false), Format::Table).unwrap());
    }

    #[test]
    fn a_wide_table_has_the_pod_and_the_message() {
        insta::assert_snapshot!(rendered(&listing(&[], true), Format::Wide).unwrap());
    }

    #[test]
    fn the_snapshots_of_one_sandbox_can_be_listed_by_name() {
        let names = rendered(&listing(&["other"], false), Format::Name).unwrap();
        assert_eq!(names, "sandboxsnapshot.torpor.dev/s\n");
    }
}
