//! `get`: sandboxes as a table, or as data.

use jiff::Timestamp;

use crate::listing::Item;
use crate::units;
use crate::view::View;

impl Item for View {
    const RESOURCE: &'static str = "sandbox.agents.x-k8s.io";
    const HEADINGS: &'static [&'static str] = &[
        "NAME",
        "STATE",
        "ASLEEP FOR",
        "MEMORY AWAKE",
        "MEMORY ASLEEP",
        "IMAGE",
        "NODE",
        "LAST WAKE",
    ];
    const WIDE: &'static [&'static str] = &["IN STATE FOR", "POD", "REASON", "MESSAGE"];

    fn namespace(&self) -> &str {
        &self.namespace
    }

    fn name(&self) -> &str {
        &self.name
    }

    fn cells(&self, now: Timestamp) -> Vec<String> {
        let bytes = |count: Option<i64>| count.map_or_else(String::new, units::bytes);
        let image = match self.image_missing {
            true => "missing".to_owned(),
            false => bytes(self.image_bytes),
        };
        vec![
            self.name.clone(),
            self.state.to_string(),
            age(self.asleep_since, now),
            bytes(self.memory_awake_bytes),
            bytes(self.memory_asleep_bytes),
            image,
            self.node.clone().unwrap_or_default(),
            last_wake(self, now),
        ]
    }

    fn wide_cells(&self, now: Timestamp) -> Vec<String> {
        vec![
            age(self.since, now),
            self.pod.clone().unwrap_or_default(),
            self.reason.clone(),
            self.message.clone(),
        ]
    }
}

fn age(since: Option<Timestamp>, now: Timestamp) -> String {
    since.map_or_else(String::new, |since| units::age(since, now))
}

/// Returns the last wake as `420ms, 5m ago (Packet)`.
fn last_wake(view: &View, now: Timestamp) -> String {
    let Some(wake) = &view.last_wake else {
        return String::new();
    };
    let took = units::micros(wake.duration_micros);
    let ago = units::age(wake.at.0, now);
    format!("{took}, {ago} ago ({})", wake.cause)
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
    use crate::listing::Listing;
    use crate::output::rendered;
    use crate::view::tests::{at, some_views};

    use super::*;

    fn listing(with_namespaces: bool) -> Listing<View> {
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
