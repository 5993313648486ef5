//! `list-archives`: archived Sandboxes as a table, or as data. Pure.

use jiff::Timestamp;
use kube::ResourceExt;
use serde::Serialize;
use torpor_api::SandboxSnapshot;
use torpor_api::conditions::{self, UPLOADED};

use crate::archive::archived_at;
use crate::listing::{Item, Listing};
use crate::{snapshots, units};

/// One archive. Unknown fields are left out.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct View {
    pub namespace: String,
    pub name: String,
    pub sandbox: String,
    /// Reason of the condition Committed, `Damaged`, or `Deleting`.
    pub state: String,
    /// Size of the image, in bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bytes: Option<i64>,
    /// SnapshotClass of the repository.
    pub class: String,
    /// Time at which the archive was written, or read from another cluster's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub archived_at: Option<Timestamp>,
    /// Cluster that made the archive: the UID of its namespace kube-system.
    pub cluster: String,
    /// Name of the image.
    pub image: String,
    /// URL of the repository.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub url: Option<String>,
    /// Message of the condition that decides the state.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub message: String,
}

/// Lists the archives of these Sandboxes, the newest of each first; of all if there are no names.
pub fn listing(
    snapshots: &[SandboxSnapshot],
    sandboxes: &[String],
    with_namespaces: bool,
    now: Timestamp,
) -> Listing<View> {
    let is_asked = |archive: &View| sandboxes.is_empty() || sandboxes.contains(&archive.sandbox);
    let mut items: Vec<View> = snapshots.iter().filter_map(view).filter(is_asked).collect();
    items.sort_by(|a, b| {
        let place = |view: &View| (view.namespace.clone(), view.sandbox.clone());
        (place(a).cmp(&place(b)))
            .then(b.archived_at.cmp(&a.archived_at))
            .then_with(|| a.name.cmp(&b.name))
    });
    Listing {
        items,
        with_namespaces,
        now,
    }
}

fn view(snapshot: &SandboxSnapshot) -> Option<View> {
    let source = snapshot.spec.archive.as_ref()?;
    let status = snapshot.status.as_ref();
    let (mut state, mut message) = snapshots::state(snapshot);
    let uploaded = conditions::find(snapshot.conditions(), UPLOADED);
    if let Some(damaged) = uploaded.filter(|one| snapshot.is_committed() && one.status == "False") {
        state.clone_from(&damaged.reason);
        message.clone_from(&damaged.message);
    }
    let upload = status.and_then(|status| status.upload.as_ref());
    Some(View {
        namespace: snapshot.namespace().unwrap_or_default(),
        name: snapshot.name_any(),
        sandbox: snapshot.spec.sandbox_name.clone(),
        state,
        bytes: status.and_then(|status| status.size_bytes),
        class: snapshot
            .spec
            .snapshot_class_name
            .clone()
            .unwrap_or_default(),
        archived_at: archived_at(snapshot).filter(|_| snapshot.is_committed()),
        cluster: source.cluster.clone(),
        image: source.image_id.clone(),
        url: upload.map(|upload| upload.url.clone()),
        message,
    })
}

impl Item for View {
    const RESOURCE: &'static str = "sandboxsnapshot.torpor.dev";
    const HEADINGS: &'static [&'static str] = &["NAME", "SANDBOX", "STATE", "SIZE", "CLASS", "AGE"];
    const WIDE: &'static [&'static str] = &["CLUSTER", "IMAGE", "URL", "MESSAGE"];

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
            self.state.clone(),
            self.bytes.map_or_else(String::new, units::bytes),
            self.class.clone(),
            self.archived_at.map_or_else(String::new, age),
        ]
    }

    fn wide_cells(&self, _: Timestamp) -> Vec<String> {
        vec![
            self.cluster.clone(),
            self.image.clone(),
            self.url.clone().unwrap_or_default(),
            self.message.clone(),
        ]
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::args::Format;
    use crate::output::rendered;
    use crate::view::tests::{at, written};

    fn snapshot(name: &str, of: &str, conditions: &[&str], spec: &Value) -> SandboxSnapshot {
        let mut all = json!({"sandboxName": of, "snapshotClassName": "far"});
        all.as_object_mut()
            .unwrap()
            .extend(spec.as_object().unwrap().clone());
        serde_json::from_value(json!({
            "apiVersion": "torpor.dev/v1alpha1", "kind": "SandboxSnapshot",
            "metadata": {"name": name, "namespace": "x"},
            "spec": all,
            "status": {
                "conditions": written(conditions, |_, reason| reason), "sizeBytes": 42_000_000,
                "upload": {"url": "s3://bucket/torpor"},
            },
        }))
        .unwrap()
    }

    #[test]
    fn a_table_shows_archives_alone() {
        let archive = json!({"reason": "Archive", "archive": {"cluster": "c", "imageID": "u.1"}});
        let snapshots = [
            snapshot("by-hand", "demo", &["Committed=True:Committed"], &json!({})),
            snapshot("whole", "demo", &["Committed=True:Committed"], &archive),
            snapshot("no-key", "other", &["Committed=False:KeyMissing"], &archive),
        ];
        let now = at("2026-11-28T12:00:00Z");
        let all = listing(&snapshots, &[], false, now);
        insta::assert_snapshot!(rendered(&all, Format::Wide).unwrap());
        let names = rendered(
            &listing(&snapshots, &["other".to_owned()], false, now),
            Format::Name,
        );
        assert_eq!(names.unwrap(), "sandboxsnapshot.torpor.dev/no-key\n");
    }
}
