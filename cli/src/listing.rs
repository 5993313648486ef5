//! Lists of objects, as tables or as data. Pure.

use jiff::Timestamp;
use serde::Serialize;

use crate::output::Render;
use crate::table::Table;

/// Object of a list.
pub trait Item: Serialize {
    /// Resource and group, as `kubectl get --output name` prints them.
    const RESOURCE: &'static str;
    const HEADINGS: &'static [&'static str];
    /// Headings of the columns that only the wide format has.
    const WIDE: &'static [&'static str];

    fn namespace(&self) -> &str;

    fn name(&self) -> &str;

    /// Returns a cell for each of [`Item::HEADINGS`].
    fn cells(&self, now: Timestamp) -> Vec<String>;

    /// Returns a cell for each of [`Item::WIDE`].
    fn wide_cells(&self, now: Timestamp) -> Vec<String>;
}

/// Output of a command that lists objects.
#[derive(Debug, Serialize)]
pub struct Listing<I> {
    pub items: Vec<I>,
    #[serde(skip)]
    pub with_namespaces: bool,
    #[serde(skip)]
    pub now: Timestamp,
}

impl<I: Item> Render for Listing<I> {
    fn text(&self, wide: bool) -> String {
        let more = wide.then_some(I::WIDE);
        let mut table = Table::of_objects(I::HEADINGS, self.with_namespaces, more);
        for item in &self.items {
            let mut row = Vec::new();
            if self.with_namespaces {
                row.push(item.namespace().to_owned());
            }
            row.extend(item.cells(self.now));
            if wide {
                row.extend(item.wide_cells(self.now));
            }
            table.push(row);
        }
        table.text()
    }

    fn names(&self) -> Vec<String> {
        let names = self.items.iter();
        names
            .map(|item| format!("{}/{}", I::RESOURCE, item.name()))
            .collect()
    }
}
