//! The end of a plan that has paused a sandbox, and could not go on.

use crate::ids::ImageId;
use crate::ledger::LedgerState;
use crate::state::Live;
use crate::steps::Outcome;

/// Reports whether a sandbox runs on at once after the last step of a plan: the plan has found it
/// running, the step has failed for certain, and no image is its memory. So its users wait no
/// longer for it, and its image cannot be taken for newer than it is.
pub fn runs_on_after(
    found: Live,
    last: &Outcome,
    ledger: &LedgerState,
    held: impl Fn(&ImageId) -> bool,
) -> bool {
    found == Live::Running
        && matches!(last, Outcome::Failed { .. })
        && ledger.restorable(held).is_none()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::ledger::Entry;

    #[test]
    fn a_sandbox_runs_on_after_a_failed_save_unless_an_image_may_be_its_memory() {
        let image = ImageId::parse("uid.1").expect("an id");
        let saving = LedgerState::fold(&[Entry::Saving {
            image,
            snapshots: BTreeSet::new(),
        }]);
        let failed = Outcome::Failed {
            reason: "DiskFull".to_owned(),
            message: String::new(),
        };
        let unknown = Outcome::Unknown {
            message: String::new(),
        };
        let runs_on = |found, last: &Outcome, ledger: &LedgerState, whole: bool| {
            runs_on_after(found, last, ledger, |_| whole)
        };
        let live = LedgerState::default();
        assert!(runs_on(Live::Running, &failed, &live, false));
        assert!(runs_on(Live::Running, &failed, &saving, false));
        // The commit failed after the image was whole: the ledger has to say first that it is
        // stale.
        assert!(!runs_on(Live::Running, &failed, &saving, true));
        assert!(!runs_on(Live::Paused, &failed, &saving, false));
        for other in [unknown, Outcome::Done, Outcome::Stale] {
            assert!(!runs_on(Live::Running, &other, &saving, false), "{other:?}");
        }
    }
}
