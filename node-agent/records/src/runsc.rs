//! runsc's own records of a sandbox, kept while it has no process.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// runsc's state files of a sandbox from the time when it last ran: what the next start needs when
/// Torpor makes it without runsc's command.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct RunscRecord {
    /// State of the first container.
    pub sandbox: Value,
    /// States of the other containers, by their ids.
    pub containers: BTreeMap<String, Value>,
}

impl RunscRecord {
    /// Adds the states of these containers that only an earlier record has: runsc has none of a
    /// container whose sandbox was not restored to its end.
    #[must_use]
    pub fn or_from<'a>(
        mut self,
        earlier: Option<Self>,
        containers: impl IntoIterator<Item = &'a str>,
    ) -> Self {
        let mut earlier = earlier.unwrap_or_default().containers;
        for id in containers {
            if let Some(record) = earlier.remove(id) {
                self.containers.entry(id.to_owned()).or_insert(record);
            }
        }
        self
    }
}
