//! The begin of a save, and its steps.

use super::Planning;
use crate::ids::ImageId;
use crate::ledger::{Entry, Memory};
use crate::queue::Urgency;
use crate::state::{Live, Power};
use crate::steps::{Action, Reason};
use crate::time::later;

impl Planning<'_> {
    /// Returns whether a save begins now. If not, `why` and `wake_at` describe what it waits for.
    pub(super) fn may_save(&mut self) -> bool {
        let view = self.view;
        let for_snapshot = view.needing_image().next().is_some();
        let for_sleep = view.sleeps();
        if !for_snapshot && !for_sleep {
            return false;
        }
        if !view.is_present() {
            self.why.push(Reason::PodTerminating);
            return false;
        }
        if view.observed.capable.is_err() {
            self.why.push(Reason::NotCapable);
            return false;
        }
        if view.next_image.is_none() {
            self.why.push(Reason::NumbersExhausted);
            return false;
        }
        if for_snapshot {
            self.why.push(Reason::SnapshotWanted);
        }
        if self.is_debugged() {
            return false;
        }
        if view.awaited_container().is_some() {
            self.why.push(Reason::AwaitingContainers);
            self.look_at(later(self.now, self.policy.look_again));
            return false;
        }
        let in_use = for_sleep && self.in_use();
        (for_snapshot || !in_use) && self.may_try_save_steps() && self.has_turn()
    }

    /// Returns whether a doze without an image begins now, and adds the reasons for it.
    pub(super) fn may_doze_unsaved(&mut self) -> bool {
        if !self.view.is_present() {
            self.why.push(Reason::PodTerminating);
            return false;
        }
        if self.view.wants_image() {
            self.why.push(Reason::NotCapable);
        }
        if self.in_use() || !self.may_try_save_steps() || !self.has_turn() {
            return false;
        }
        self.push_sleep_wanted();
        true
    }

    /// Returns whether a debug container runs in the sandbox. Nothing is saved meanwhile.
    fn is_debugged(&mut self) -> bool {
        let Some(container) = self.view.observed.added.clone() else {
            return false;
        };
        self.why.push(Reason::Debugged { container });
        self.look_at(later(self.now, self.policy.look_again));
        true
    }

    /// Returns whether the sandbox has its turn for work that costs processors and disk.
    pub(super) fn has_turn(&mut self) -> bool {
        let view = self.view;
        if view.observed.save_turn {
            return true;
        }
        let is_requested = !view.by_itself || view.needing_image().next().is_some();
        let urgency = match view.desired.pressure.short_of {
            _ if is_requested => Urgency::Asked,
            Some(_) => Urgency::Pressed,
            None => Urgency::ByItself,
        };
        let for_bandwidth = urgency == Urgency::ByItself && view.observed.held_back;
        self.why.push(match for_bandwidth {
            true => Reason::AwaitingBandwidth,
            false => Reason::AwaitingTurn { urgency },
        });
        false
    }

    pub(super) fn awaits_turn(&self) -> bool {
        self.why
            .iter()
            .any(|reason| reason.awaited_turn().is_some())
    }

    /// Returns whether the sandbox is in use, or was a moment ago. Suspend does not wait for the
    /// end of the use: the Pod is going to be deleted.
    fn in_use(&mut self) -> bool {
        let observed = self.view.observed;
        if self.view.desired.suspending() {
            return false;
        }
        // A sandbox that was woken at a time of `wake_up` was woken for a use.
        let due = self.view.desired.due_wake_up(self.now);
        let by_clock = observed
            .woke_at
            .filter(|at| due.is_some_and(|due| due <= *at));
        let lingers_until =
            (observed.awake_since.max(by_clock)).map(|since| later(since, self.policy.linger));
        let lingers = lingers_until.filter(|until| *until > self.now);
        if let Some(until) = lingers {
            self.look_at(until);
        }
        let in_use = observed.sessions > 0 || lingers.is_some();
        if in_use {
            self.why.push(Reason::InUse);
        }
        in_use
    }

    /// Adds the checkpoint and the steps that follow it. The sandbox is paused when the first of
    /// them begins.
    pub(super) fn push_save(&mut self) {
        let view = self.view;
        let Some(image) = view.next_image.clone() else {
            return;
        };
        let snapshots = view.needing_image().map(|s| s.uid.clone()).collect();
        let saving = Entry::Saving {
            image: image.clone(),
            snapshots,
        };
        self.step(
            Action::Checkpoint {
                image: image.clone(),
            },
            Some(saving),
            None,
        );
        let committed = Entry::Committed {
            image: image.clone(),
        };
        self.step(
            Action::Commit {
                image: image.clone(),
            },
            None,
            Some(committed),
        );
        match view.target {
            Power::Asleep if !self.why.contains(&Reason::InUse) => {
                self.push_sleep_wanted();
                self.push_end(&image);
            }
            // The next step is in a plan of its own.
            Power::Dozing if view.observed.live == Live::Paused => self.why.push(Reason::Dozing),
            Power::Frozen => {}
            Power::Asleep | Power::Dozing | Power::Awake => {
                self.step(Action::Resume, Some(Entry::Awake), None)
            }
        }
    }

    pub(super) fn push_end(&mut self, image: &ImageId) {
        let is_recorded = matches!(self.view.ledger.memory, Memory::Asleep { .. });
        let asleep = (!is_recorded).then(|| Entry::Asleep {
            image: image.clone(),
            by_itself: self.view.by_itself,
        });
        self.step(
            Action::End {
                image: image.clone(),
            },
            asleep,
            None,
        );
    }

    /// Lets snapshots adopt the image where no sandbox runs. A save may have been cut off after its
    /// image was whole and before the ledger recorded that. A snapshot adopts only images that are
    /// whole by the ledger, so the record is completed first.
    pub(super) fn adopt_at_rest(&mut self, image: &ImageId) {
        if self.view.needing_image().next().is_none() {
            return;
        }
        if matches!(self.view.ledger.memory, Memory::Saving { .. }) {
            self.why.push(Reason::SaveUnfinished);
            // A commit that fails counts as a save that fails.
            if !self.may_try_save_steps() {
                return;
            }
            let image = image.clone();
            let committed = Entry::Committed {
                image: image.clone(),
            };
            self.step(Action::Commit { image }, None, Some(committed));
        }
        self.adopt(image);
    }

    /// Lets the snapshots that need an image adopt the image that holds the sandbox's memory.
    pub(super) fn adopt(&mut self, image: &ImageId) {
        let snapshots: std::collections::BTreeSet<_> =
            self.view.needing_image().map(|s| s.uid.clone()).collect();
        if snapshots.is_empty() || !self.may_try_upkeep() {
            return;
        }
        self.why.push(Reason::ImageAdopted);
        let adopted = Entry::Adopted {
            image: image.clone(),
            snapshots,
        };
        self.step(Action::Record, Some(adopted), None);
    }
}
