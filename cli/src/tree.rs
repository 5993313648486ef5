//! `snapshots --tree`: which sandbox continues from which snapshot, as a tree. Pure.
//!
//! A Sandbox stands below the snapshot that it is a copy of, a snapshot below the Sandbox that it
//! was taken of. A Sandbox that was rolled back continues from a snapshot of its own and is no
//! copy.

use std::collections::{BTreeMap, BTreeSet};

use jiff::Timestamp;
use kube::ResourceExt;
use torpor_api::annotations::RESTORE_FROM;
use torpor_api::{Sandbox, SandboxSnapshot};

use crate::snapshots::{self, View};
use crate::units;

/// Objects of one namespace, by what they come from.
struct Forest<'a> {
    /// Snapshots of each Sandbox, the oldest first.
    snapshots: BTreeMap<&'a str, Vec<View>>,
    /// Copies of each snapshot.
    copies: BTreeMap<&'a str, Vec<&'a Sandbox>>,
    now: Timestamp,
}

/// Returns the trees of a namespace. `names`: the Sandboxes at the roots; empty: all that are no
/// copies. A Sandbox that is gone is a root if there are snapshots of it.
pub fn text(
    snapshots: &[SandboxSnapshot],
    sandboxes: &[Sandbox],
    names: &[String],
    now: Timestamp,
) -> String {
    let taken_of: BTreeMap<String, &str> = snapshots
        .iter()
        .map(|one| (one.name_any(), one.spec.sandbox_name.as_str()))
        .collect();
    let mut forest = Forest {
        snapshots: BTreeMap::new(),
        copies: BTreeMap::new(),
        now,
    };
    let mut views: Vec<_> = snapshots.iter().map(snapshots::view).collect();
    views.sort_by(|a, b| (a.committed_at, &a.name).cmp(&(b.committed_at, &b.name)));
    for view in views {
        let Some(of) = taken_of.get(&view.name).copied() else {
            continue;
        };
        forest.snapshots.entry(of).or_default().push(view);
    }
    let mut roots: BTreeSet<&str> = forest.snapshots.keys().copied().collect();
    let mut live = BTreeMap::new();
    for sandbox in sandboxes {
        let name = sandbox.metadata.name.as_deref().unwrap_or_default();
        live.insert(name, sandbox);
        let source = sandbox.annotations().get(RESTORE_FROM);
        let taken_of = source.and_then(|source| taken_of.get(source));
        match (source, taken_of) {
            (Some(source), Some(of)) if *of != name => {
                forest.copies.entry(source).or_default().push(sandbox);
                roots.remove(name);
            }
            _ => {}
        }
    }
    if !names.is_empty() {
        roots = names.iter().map(String::as_str).collect();
    }
    let (mut lines, mut shown) = (Vec::new(), BTreeSet::new());
    // Sandboxes that were rolled back to snapshots of their own copies are in no tree.
    let left: Vec<&str> = match names.is_empty() {
        true => forest.snapshots.keys().copied().collect(),
        false => Vec::new(),
    };
    for root in roots.into_iter().chain(left) {
        if shown.contains(root) {
            continue;
        }
        let gone = if live.contains_key(root) {
            ""
        } else {
            "  (gone)"
        };
        lines.push(format!("{root}{gone}"));
        forest.below_sandbox(root, "", &mut shown, &mut lines);
    }
    lines.iter().map(|line| format!("{line}\n")).collect()
}

impl<'a> Forest<'a> {
    /// Adds a line for each snapshot of a Sandbox, and for all that comes from it.
    fn below_sandbox(
        &self,
        sandbox: &'a str,
        indent: &str,
        shown: &mut BTreeSet<&'a str>,
        lines: &mut Vec<String>,
    ) {
        if !shown.insert(sandbox) {
            return;
        }
        let snapshots = self.snapshots.get(sandbox).map_or(&[][..], Vec::as_slice);
        for (at, view) in snapshots.iter().enumerate() {
            let (branch, further) = branch(indent, at + 1 == snapshots.len());
            let size = view.bytes.map_or_else(String::new, units::bytes);
            let age = view.committed_at.map(|at| units::age(at, self.now));
            let age = age.unwrap_or_default();
            let line = format!("{branch}{}  {}  {size}  {age}", view.name, view.state);
            lines.push(line.trim_end().to_owned());
            let copies = self.copies.get(view.name.as_str());
            let copies = copies.map_or(&[][..], Vec::as_slice);
            for (at, copy) in copies.iter().enumerate() {
                let name = copy.metadata.name.as_deref().unwrap_or_default();
                let (branch, further) = self::branch(&further, at + 1 == copies.len());
                lines.push(format!("{branch}{name}"));
                self.below_sandbox(name, &further, shown, lines);
            }
        }
    }
}

/// Returns the begin of a line, and of the lines below it.
fn branch(indent: &str, is_last: bool) -> (String, String) {
    match is_last {
        true => (format!("{indent}└─ "), format!("{indent}   ")),
        false => (format!("{indent}├─ "), format!("{indent}│  ")),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::view::tests::at;

    fn snapshot(name: &str, of: &str, hour: u32) -> SandboxSnapshot {
        serde_json::from_value(json!({
            "metadata": {"name": name, "namespace": "x"},
            "spec": {"sandboxName": of},
            "status": {
                "committedAt": format!("2026-11-21T{hour:02}:00:00Z"), "sizeBytes": 42_000_000,
                "conditions": [{
                    "type": "Committed", "status": "True", "reason": "Committed", "message": "",
                    "lastTransitionTime": "2026-11-21T00:00:00Z",
                }],
            },
        }))
        .unwrap()
    }

    fn sandbox(name: &str, of: Option<&str>) -> Sandbox {
        let annotations = of.map(|of| json!({RESTORE_FROM: of}));
        serde_json::from_value(json!({
            "metadata": {"name": name, "namespace": "x", "annotations": annotations},
            "spec": {"podTemplate": {"spec": {"containers": []}}},
        }))
        .unwrap()
    }

    fn shown(snapshots: &[SandboxSnapshot], sandboxes: &[Sandbox], names: &[&str]) -> String {
        let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
        text(snapshots, sandboxes, &names, at("2026-11-21T12:00:00Z"))
    }

    #[test]
    fn copies_stand_below_their_snapshot_and_snapshots_below_their_sandbox() {
        let snapshots = [
            snapshot("plan", "demo", 8),
            snapshot("later", "demo", 9),
            snapshot("one-a", "one", 10),
            snapshot("old", "gone", 7),
        ];
        let sandboxes = [
            sandbox("demo", None),
            sandbox("two", Some("plan")),
            sandbox("one", Some("plan")),
            sandbox("leaf", Some("one-a")),
            sandbox("without", None),
        ];
        insta::assert_snapshot!(shown(&snapshots, &sandboxes, &[]), @r"
        demo
        ├─ plan  Committed  40Mi  4h
        │  ├─ two
        │  └─ one
        │     └─ one-a  Committed  40Mi  2h
        │        └─ leaf
        └─ later  Committed  40Mi  3h
        gone  (gone)
        └─ old  Committed  40Mi  5h
        ");
        insta::assert_snapshot!(shown(&snapshots, &sandboxes, &["one"]), @r"
        one
        └─ one-a  Committed  40Mi  2h
           └─ leaf
        ");
        assert_eq!(shown(&[], &[], &[]), "");
    }

    #[test]
    fn a_sandbox_that_was_rolled_back_is_no_copy_and_a_circle_ends() {
        let snapshots = [snapshot("a1", "a", 8), snapshot("b1", "b", 9)];
        let rolled_back = [sandbox("a", Some("a1")), sandbox("b", Some("a1"))];
        insta::assert_snapshot!(shown(&snapshots, &rolled_back, &[]), @r"
        a
        └─ a1  Committed  40Mi  4h
           └─ b
              └─ b1  Committed  40Mi  3h
        ");
        let circle = [sandbox("a", Some("b1")), sandbox("b", Some("a1"))];
        insta::assert_snapshot!(shown(&snapshots, &circle, &[]), @r"
        a
        └─ a1  Committed  40Mi  4h
           └─ b
              └─ b1  Committed  40Mi  3h
                 └─ a
        ");
    }
}
