//! `get`: sandboxes as a table, or as data.

use jiff::Timestamp;
use serde::Serialize;

use crate::output::Render;
use crate::table::Table;
use crate::units;
use crate::view::View;

/// Output of `get`.
#[derive(Debug, Serialize)]
pub struct Listing {
    pub items: Vec<View>,
    #[serde(skip)]
    pub with_namespaces: bool,
    #[serde(skip)]
    pub now: Timestamp,
}

const HEADINGS: [&str; 8] = [
    "NAME",
    "STATE",
    "ASLEEP FOR",
    "MEMORY AWAKE",
    "MEMORY ASLEEP",
    "IMAGE",
    "NODE",
    "LAST WAKE",
];
const WIDE: [&str; 4] = ["IN STATE FOR", "POD", "REASON", "MESSAGE"];

impl Render for Listing {
    fn text(&self, wide: bool) -> String {
        let more = wide.then_some(&WIDE[..]);
        let mut table = Table::of_objects(&HEADINGS, self.with_namespaces, more);
        for view in &self.items {
            table.push(self.row(view, wide));
        }
        table.text()
    }

    fn names(&self) -> Vec<String> {
        let names = self.items.iter();
        names
            .map(|view| format!("sandbox.agents.x-k8s.io/{}", view.name))
            .collect()
    }
}

impl Listing {
    fn row(&self, view: &View, wide: bool) -> Vec<String> {
        let age = |since: Option<Timestamp>| {
            since.map_or_else(String::new, |since| units::age(since, self.now))
        };
        let bytes = |count: Option<i64>| count.map_or_else(String::new, units::bytes);
        let image = match view.image_missing {
            true => "missing".to_owned(),
            false => bytes(view.image_bytes),
        };
        let mut row = Vec::new();
        if self.with_namespaces {
            row.push(view.namespace.clone());
        }
        row.extend([
            view.name.clone(),
            view.state.to_string(),
            age(view.asleep_since),
            bytes(view.memory_awake_bytes),
            bytes(view.memory_asleep_bytes),
            image,
            view.node.clone().unwrap_or_default(),
            self.last_wake(view),
        ]);
        if wide {
            row.extend([
                age(view.since),
                view.pod.clone().unwrap_or_default(),
                view.reason.clone(),
                view.message.clone(),
            ]);
        }
        row
    }

    /// Returns the last wake as `420ms, 5m ago (Packet)`.
    fn last_wake(&self, view: &View) -> String {
        let Some(wake) = &view.last_wake else {
            return String::new();
        };
        let took = units::micros(wake.duration_micros);
        let ago = units::age(wake.at.0, self.now);
        format!("{took}, {ago} ago ({})", wake.cause)
    }
}

/// Returns the message for an empty list.
pub fn nothing_found(kind: &str, namespace: Option<&str>) -> String {
    match namespace {
        Some(namespace) => format!("No {kind} found in namespace {namespace}."),
        None => format!("No {kind} found."),
    }
}

#[cfg(test)]
mod tests {
    use crate::args::Format;
    use crate::output::rendered;
    use crate::view::tests::{at, some_views};

    use super::*;

    fn listing(with_namespaces: bool) -> Listing {
        Listing {
            items: some_views(),
            with_namespaces,
            now: at("2026-11-21T12:00:00Z"),
        }
    }

    #[test]
    fn a_table_shows_state_and_memory_of_each_sandbox() {
        insta::assert_snapshot!(rendered(&listing(false), Format::Table).unwrap());
    }

    #[test]
    fn a_wide_table_of_all_namespaces_has_reason_and_message() {
        insta::assert_snapshot!(rendered(&listing(true), Format::Wide).unwrap());
    }

    #[test]
    fn an_image_that_cannot_be_found_is_shown_as_missing() {
        let mut listing = listing(false);
        listing.items[3].image_missing = true;
        let table = rendered(&listing, Format::Table).unwrap();
        let row = table.lines().find(|line| line.starts_with("away"));
        let cells: Vec<&str> = row.unwrap().split_whitespace().collect();
        assert_eq!(cells[5], "missing", "{table}");
    }

    #[test]
    fn names_have_kubectls_form() {
        insta::assert_snapshot!(rendered(&listing(false), Format::Name).unwrap());
    }

    #[test]
    fn data_has_every_figure_and_leaves_out_unknown_ones() {
        insta::assert_snapshot!(rendered(&listing(false), Format::Yaml).unwrap());
        let json = rendered(&listing(false), Format::Json).unwrap();
        let json: serde_json::Value = serde_json::from_str(&json).unwrap();
        assert_eq!(json["items"][0]["lastWake"]["durationMicros"], 412_300);
        assert!(json["items"][1].get("node").is_none());
    }
}
