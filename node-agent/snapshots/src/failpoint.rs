//! Failpoints: places where a test can kill the process.
//!
//! `TORPOR_FAILPOINT=<name>#<n>` makes the `n`th [`hit`] with that name abort the process like a
//! crash: no destructor runs and no buffer is flushed. A name without number means the first hit.
//! Without the variable a hit costs one atomic load. [`ALL`] lists the names. A test kills a
//! process at each hit of each failpoint.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

/// Environment variable with the chosen failpoint.
pub const VARIABLE: &str = "TORPOR_FAILPOINT";

/// All failpoints, in the order in which a save, a consumption and a removal pass them.
pub const ALL: &[&str] = &[
    "begin:created",
    "commit:synced",
    "commit:manifest-written",
    "commit:directory-synced",
    "commit:renamed",
    "commit:parent-synced",
    "ledger:created",
    "ledger:appended",
    "ledger:synced",
    "ledger:folded",
    "consume:written",
    "consume:linked",
    "remove:renamed",
    "remove:emptied",
];

static CHOSEN: OnceLock<Option<Chosen>> = OnceLock::new();

#[derive(Debug)]
struct Chosen {
    name: String,
    number: u64,
    hits: AtomicU64,
}

impl Chosen {
    fn parse(text: &str) -> Self {
        let numbered = text.rsplit_once('#');
        let numbered = numbered.and_then(|(name, number)| Some((name, number.parse().ok()?)));
        let (name, number) = numbered.unwrap_or((text, 1));
        Self {
            name: name.to_owned(),
            number,
            hits: AtomicU64::new(0),
        }
    }

    /// Counts a hit and reports whether it is the chosen one.
    fn is_hit(&self, name: &str) -> bool {
        self.name == name && self.hits.fetch_add(1, Ordering::Relaxed) + 1 == self.number
    }
}

/// Aborts the process if `name` is the chosen failpoint and this is the chosen hit.
pub fn hit(name: &str) {
    let chosen = CHOSEN.get_or_init(|| std::env::var(VARIABLE).ok().map(|v| Chosen::parse(&v)));
    if chosen.as_ref().is_some_and(|chosen| chosen.is_hit(name)) {
        std::process::abort();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_point_is_chosen_by_its_name_and_how_often_it_is_passed() {
        for (text, wanted) in [
            ("a:b", [true, false, false]),
            ("a:b#1", [true, false, false]),
            ("a:b#3", [false, false, true]),
            ("a:b#4", [false; 3]),
            ("a:c", [false; 3]),
        ] {
            let chosen = Chosen::parse(text);
            let hits = [0; 3].map(|_| {
                assert!(!chosen.is_hit("a"), "another one is not counted");
                chosen.is_hit("a:b")
            });
            assert_eq!(hits, wanted, "{text}");
        }
    }
}
