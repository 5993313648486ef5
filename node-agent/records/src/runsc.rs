//! runsc's state files of a sandbox, kept while the sandbox has no process.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// runsc's state files of a sandbox from its last run. The next start needs them if Torpor starts
/// the sandbox without runsc's command.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct RunscRecord {
    /// State of the pause container.
    pub sandbox: Value,
    /// States of the other containers; the key is the container's id.
    pub containers: BTreeMap<String, Value>,
}

impl RunscRecord {
    /// Adds the states of `containers` that only `earlier` contains: runsc has no state of a
    /// container if its sandbox's restore was interrupted.
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
