//! Pages of docs/reference about the API. `UPDATE_EXPECT=1 cargo test reference` writes them.

use std::fmt::Write as _;

use serde_json::Value;
use torpor_api::documented::Documented;
use torpor_api::{annotations, conditions, crds, reasons};
use torpor_test_reference::assert_page;

/// Fields that are types of Kubernetes.
const KUBERNETES: [&str; 5] = [
    "podTemplate.spec",
    "volumeClaimTemplates[].spec",
    "networkPolicy.egress",
    "networkPolicy.ingress",
    "status.conditions",
];

/// Appends a table of two columns.
fn table(page: &mut String, first: &str, list: &[Documented]) -> std::fmt::Result {
    writeln!(page, "| {first} | meaning |\n|---|---|")?;
    for entry in list {
        writeln!(page, "| `{}` | {} |", entry.value, cell(entry.text))?;
    }
    writeln!(page)
}

/// Appends a section with a table for each title.
fn tables(page: &mut String, first: &str, sections: &[(&str, &[Documented])]) -> std::fmt::Result {
    for (title, list) in sections {
        writeln!(page, "## {title}\n")?;
        table(page, first, list)?;
    }
    Ok(())
}

/// Returns the text of a doc comment as a table cell: links to items become their names.
fn cell(text: &str) -> String {
    torpor_test_reference::cell(&text.replace("[`", "`").replace("`]", "`"))
}

#[test]
fn reference_of_annotations_is_current() -> std::fmt::Result {
    let mut page = "# Annotations\n\n".to_owned();
    let sections = [
        ("Written by users", annotations::OF_USERS),
        (
            "On a SandboxTemplate or SandboxWarmPool, written by users",
            annotations::OF_POOLS,
        ),
        ("On a Pod, written by the controller", annotations::OF_PODS),
        (
            "On a Sandbox, written by the controller",
            annotations::OF_SANDBOXES,
        ),
        (
            "On a SandboxSnapshot, written by the controller",
            annotations::OF_SNAPSHOTS,
        ),
        ("Upstream's", annotations::OF_UPSTREAM),
    ];
    tables(&mut page, "annotation", &sections)?;
    assert_page("annotations.md", &page);
    Ok(())
}

#[test]
fn reference_of_conditions_is_current() -> std::fmt::Result {
    let mut page = "# Conditions\n\n".to_owned();
    table(&mut page, "condition", conditions::DOCUMENTED)?;
    let sections = [
        (
            "Sandbox: Ready, Suspended, PodScheduled, Finished",
            reasons::sandbox::DOCUMENTED,
        ),
        (
            "Sandbox: Suspended with the strategy Freeze",
            reasons::freeze::DOCUMENTED,
        ),
        ("Sandbox: Hibernated", reasons::hibernated::DOCUMENTED),
        ("Sandbox: Restored", reasons::restored::DOCUMENTED),
        ("Sandbox: Bound", reasons::bound::DOCUMENTED),
        ("Sandbox: Archived", reasons::archived::DOCUMENTED),
        ("SandboxClaim: Ready", reasons::claim::DOCUMENTED),
        (
            "SandboxWarmPool: Available, Progressing",
            reasons::pool::DOCUMENTED,
        ),
        (
            "SandboxSnapshot: Committed, Consumed",
            reasons::snapshot::DOCUMENTED,
        ),
        (
            "SandboxNode: reasons of a sandbox's latest plan (`status.sandboxes[].reasons`)",
            reasons::plan::DOCUMENTED,
        ),
    ];
    tables(&mut page, "reason", &sections)?;
    assert_page("conditions.md", &page);
    Ok(())
}

#[test]
fn reference_of_events_is_current() -> std::fmt::Result {
    let mut page = "# Events\n\n".to_owned();
    page.push_str(
        "The agent writes the Events of a Pod, the controller all others except where stated. A Pod\n\
         also has an Event for each reason of its conditions `torpor.dev/Hibernated`,\n\
         `torpor.dev/Restored` and `torpor.dev/Bound` ([conditions](conditions.md)) that reports a change.\n\n",
    );
    table(&mut page, "reason", reasons::event::DOCUMENTED)?;
    assert_page("events.md", &page);
    Ok(())
}

/// Appends a row for each field of an object, and below it those of the field itself.
fn rows(page: &mut String, path: &str, object: &Value) -> std::fmt::Result {
    for (name, field) in object["properties"].as_object().into_iter().flatten() {
        let required = object["required"]
            .as_array()
            .is_some_and(|names| names.iter().any(|required| required == name));
        let path = format!("{path}.{name}");
        row(page, &path, field, required)?;
        if KUBERNETES.iter().any(|known| path.ends_with(known)) {
            continue;
        }
        rows(page, &path, field)?;
        rows(page, &format!("{path}[]"), &field["items"])?;
    }
    Ok(())
}

fn row(page: &mut String, path: &str, field: &Value, required: bool) -> std::fmt::Result {
    let mark = if required { ", required" } else { "" };
    let text = cell(field["description"].as_str().unwrap_or_default());
    writeln!(page, "| `{path}` | {}{mark} | {text} |", kind(field))
}

/// Returns the type of a field, or its allowed values.
fn kind(field: &Value) -> String {
    if field["x-kubernetes-int-or-string"] == true {
        return "integer or string".to_owned();
    }
    if let Some(values) = field["enum"].as_array() {
        let values = values.iter().filter_map(Value::as_str);
        let values: Vec<String> = values.map(|value| format!("`{value}`")).collect();
        return values.join(", ");
    }
    let kind = field["type"].as_str().unwrap_or("any");
    let of_values = &field["additionalProperties"]["type"];
    match (kind, field["format"].as_str(), of_values.as_str()) {
        ("array", _, _) => format!("array of {}", self::kind(&field["items"])),
        ("object", _, Some(values)) => format!("map of {values}"),
        (_, Some(format), _) => format!("{kind} ({format})"),
        _ => kind.to_owned(),
    }
}

#[test]
fn reference_of_kinds_is_current() -> std::fmt::Result {
    let mut page = "# Kinds\n\n".to_owned();
    page.push_str(
        "Fields that are types of Kubernetes, such as `podTemplate.spec`, are listed without fields of\n\
         their own. The kinds of `agents.x-k8s.io` and `extensions.agents.x-k8s.io` are upstream's, those\n\
         of `podsnapshot.gke.io` GKE's.\n\n",
    );
    let definitions = crds::definitions().into_iter();
    for definition in definitions.chain(crds::pod_snapshot_definitions()) {
        let (names, group) = (&definition["spec"]["names"], &definition["spec"]["group"]);
        let kind = names["kind"].as_str().unwrap_or_default();
        let group = group.as_str().unwrap_or_default();
        let versions = definition["spec"]["versions"].as_array();
        for version in versions.into_iter().flatten() {
            let name = version["name"].as_str().unwrap_or_default();
            writeln!(page, "## {kind}\n\n`{group}/{name}`\n")?;
            writeln!(page, "| field | type | meaning |\n|---|---|---|")?;
            let schema = &version["schema"]["openAPIV3Schema"];
            for (name, field) in schema["properties"].as_object().into_iter().flatten() {
                if !matches!(name.as_str(), "apiVersion" | "kind" | "metadata") {
                    row(&mut page, name, field, false)?;
                    rows(&mut page, name, field)?;
                }
            }
            writeln!(page)?;
        }
    }
    assert_page("crds.md", &page);
    Ok(())
}
