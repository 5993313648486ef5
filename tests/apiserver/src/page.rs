//! Pages of a list, for clients that set a limit.

use std::collections::BTreeMap;

use serde_json::Value;

use super::Key;

/// Page that a client requests: its limit, and the end of the page before.
#[derive(Debug)]
pub(super) struct Page {
    limit: usize,
    /// Version of the whole list; a watch from there on misses no change between two pages.
    pub(super) version: u64,
    after: Option<(String, String)>,
}

impl Page {
    /// Parses the query. `now` is the version of a list that begins.
    pub(super) fn of(query: &BTreeMap<String, String>, now: u64) -> Self {
        let limit = query.get("limit").and_then(|limit| limit.parse().ok());
        let before = query.get("continue").map(|token| {
            let mut parts = token.splitn(3, '/').map(ToOwned::to_owned);
            let mut next = || parts.next().unwrap();
            (next().parse::<u64>().unwrap(), (next(), next()))
        });
        let (version, after) = before.unzip();
        Self {
            limit: limit.unwrap_or(usize::MAX),
            version: version.unwrap_or(now),
            after,
        }
    }

    /// Returns the page of these objects, which come in order, and the token of the next page; the
    /// token is empty at the end.
    pub(super) fn cut<'a>(
        &self,
        objects: impl Iterator<Item = (&'a Key, &'a Value)>,
    ) -> (Vec<&'a Value>, String) {
        let place = |key: &Key| (key.1.clone(), key.2.clone());
        let mut rest = objects
            .filter(|(key, _)| self.after.as_ref().is_none_or(|after| place(key) > *after))
            .peekable();
        let page: Vec<_> = rest.by_ref().take(self.limit).collect();
        let last = page.last().filter(|_| rest.peek().is_some());
        let token = last.map(|(key, _)| format!("{}/{}/{}", self.version, key.1, key.2));
        let objects = page.iter().map(|(_, object)| *object).collect();
        (objects, token.unwrap_or_default())
    }
}
