//! Places where a test can kill the process.
//!
//! `TORPOR_FAILPOINT=<name>` makes [`hit`] with that name abort, as a crash would: no destructor runs, nothing is flushed.
//! Unset, a hit costs one atomic load. The names are in [`ALL`], and a test dies at each of them.

use std::sync::OnceLock;

/// Environment variable that names the point.
pub const VARIABLE: &str = "TORPOR_FAILPOINT";

/// Every point, in the order in which a save, a consumption and a removal pass them.
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

static CHOSEN: OnceLock<Option<String>> = OnceLock::new();

/// Aborts the process if `name` is the chosen point.
pub fn hit(name: &str) {
    let chosen = CHOSEN.get_or_init(|| std::env::var(VARIABLE).ok());
    if chosen.as_deref() == Some(name) {
        std::process::abort();
    }
}
