//! The decisions about one sandbox.
//!
//! The steps follow from the state of the sandbox, the place of its memory by the ledger, and the
//! request:
//!
//! - Running, memory in the sandbox
//!   - sleep: pause, checkpoint, commit, end
//!   - idle for the time to hibernate: as for sleep; the sandbox sleeps until a caller needs it
//!   - idle for the time to doze: doze (a pause); then checkpoint and commit; then reclaim. Each of
//!     the three has a plan of its own, so that a caller can resume the sandbox in between
//!   - snapshot: pause, checkpoint, commit, resume
//!   - freeze: freeze
//!   - a claim that has not arrived in the sandbox: bind
//!   - sleep or idle, and the runtime makes no images: doze; then reclaim, in a plan of its own
//! - Running, memory elsewhere: record that the sandbox is awake; from now on its image is stale
//! - Paused, memory in the sandbox
//!   - sleep or snapshot: as for a running sandbox, without the pause; while the next attempt
//!     after a failure waits: resume
//!   - run: resume
//!   - freeze of a dozing sandbox, whether an image holds its memory or not: pause. The pause
//!     removes the note by which a caller may resume the sandbox
//!   - run, or the Pod is being deleted, and the runtime makes no images: resume
//! - Paused, memory in the sandbox and in an image
//!   - sleep: end (a snapshot adopts the image)
//!   - run: record, resume
//! - No sandbox, memory in an image, keepers wait
//!   - run, or the image is to be deleted, or a time of `wake_up` has come: wake
//! - No sandbox, memory in an image, no keepers
//!   - nothing: the kubelet starts the containers again, and the shim restores the image
//!
//! The same plan removes rubbish: partial images at once (a failed save may have filled the disk),
//! and stale images that nothing refers to. The memory of a Pod that is gone has rules of its own
//! (gone.rs).
//!
//! Some states permit only another observation: another process acts, the state is unknown, or a
//! new Pod is being restored. While the ledger cannot be trusted, nothing is saved or woken.

use jiff::Timestamp;

use crate::ids::ImageId;
use crate::ledger::{Entry, Memory};
use crate::state::{Desired, Doze, Failure, Live, Observed, PodPresence, Policy, Power, Restore};
use crate::steps::{Action, Fence, Plan, Reason, Step};
use crate::time::later;

mod gone;
mod rubbish;
mod save;
mod status;
mod view;

use view::View;

/// Returns the next steps for one sandbox. The function is synchronous, total and deterministic:
/// the same arguments give the same plan.
pub fn plan(desired: &Desired, observed: &Observed, policy: &Policy, now: Timestamp) -> Plan {
    let view = View::new(desired, observed, policy, now);
    let mut planning = Planning::new(&view, policy, now);
    planning.decide();
    let Planning {
        steps,
        why,
        wake_at,
        asks,
        ..
    } = planning;
    let status = status::describe(&view, policy, &steps, &why);
    Plan {
        steps,
        status,
        wake_at,
        why,
        asks,
    }
}

impl Plan {
    /// Returns the index of the step for which a running sandbox is about to stop, if that is for
    /// an image: the checkpoint, or the doze whose image a plan of its own makes. If there is no
    /// room for the image, this step fails before any step begins.
    pub fn stops_for(&self, observed: &Observed) -> Option<usize> {
        let runs = observed.live == Live::Running && observed.capable.is_ok();
        let needs_room =
            |step: &Step| matches!(step.action, Action::Checkpoint { .. } | Action::Doze);
        self.steps.iter().position(needs_room).filter(|_| runs)
    }
}

/// A plan that is being made.
struct Planning<'a> {
    view: &'a View<'a>,
    policy: &'a Policy,
    now: Timestamp,
    /// Ledger sequence after the steps so far.
    seq: u64,
    steps: Vec<Step>,
    why: Vec<Reason>,
    wake_at: Option<Timestamp>,
    asks: bool,
}

impl<'a> Planning<'a> {
    fn new(view: &'a View<'a>, policy: &'a Policy, now: Timestamp) -> Self {
        let seq = view.ledger.seq;
        Self {
            view,
            policy,
            now,
            seq,
            steps: Vec::new(),
            why: Vec::new(),
            wake_at: None,
            asks: false,
        }
    }

    fn decide(&mut self) {
        if self.must_only_look() {
            return;
        }
        let mut times = self.view.desired.wake_up.iter().copied();
        if let Some(at) = times.find(|at| *at > self.now) {
            self.look_at(at);
        }
        match self.view.desired.pod {
            PodPresence::Gone => self.plan_gone(),
            PodPresence::Present | PodPresence::Terminating => {
                match self.view.observed.live {
                    Live::Running => self.plan_running(),
                    Live::Paused => self.plan_paused(),
                    Live::None => self.plan_without_sandbox(),
                    Live::Unknown => {}
                }
                self.plan_rubbish();
            }
        }
    }

    /// Returns whether the only plan is another observation later: another process acts, or the
    /// state is unknown.
    fn must_only_look(&mut self) -> bool {
        let observed = self.view.observed;
        if observed.busy {
            self.why.push(Reason::Busy);
        } else if observed.live == Live::Unknown {
            self.why.push(Reason::LiveUnknown);
        } else if observed.restore == Restore::InProgress {
            self.why.push(Reason::Restoring);
        } else {
            return false;
        }
        self.look_at(later(self.now, self.policy.look_again));
        true
    }

    fn plan_running(&mut self) {
        let view = self.view;
        if view.corrupt.is_some() {
            self.why.push(Reason::LedgerCorrupt);
            return;
        }
        // The process that let the sandbox run did not record that. Until the ledger has it, a
        // reboot would bring the image back.
        if view.ledger.memory != Memory::Live {
            self.why.push(Reason::AwakeUnrecorded);
            self.upkeep(Action::Record, Some(Entry::Awake), None);
            return;
        }
        if view.observed.record.is_some() {
            self.why.push(Reason::RecordStale);
            self.upkeep(Action::ForgetSleep, None, None);
            return;
        }
        if let Some(claim) = view.claim_to_bind() {
            self.why.push(Reason::ClaimWaits);
            let (min, max) = (self.policy.wake_backoff_min, self.policy.wake_backoff_max);
            if self.has_waited(view.observed.failures.bind.as_ref(), min, max) {
                let claim = claim.clone();
                self.step(Action::Bind { claim }, None, None);
                return;
            }
        }
        self.look_when_idle();
        if view.dozes_unsaved() {
            if self.may_doze_unsaved() {
                self.step(Action::Doze, None, None);
            }
        } else if view.shallow {
            self.why.push(Reason::NotCapable);
        } else if self.may_save() {
            if view.target == Power::Dozing && view.needing_image().next().is_none() {
                self.push_sleep_wanted();
                self.step(Action::Doze, None, None);
                return;
            }
            self.step(Action::Pause, None, None);
            self.push_save();
        } else if view.target == Power::Frozen && view.is_present() {
            self.why.push(Reason::FreezeWanted);
            if self.may_try_save_steps() {
                self.step(Action::Freeze, None, None);
            }
        } else if self.why.is_empty() {
            self.push_settled();
        }
    }

    /// Adds the reason of a sandbox that runs as requested. If the sandbox may fall asleep by
    /// itself, the reason is the cause that prevents that.
    fn push_settled(&mut self) {
        let view = self.view;
        let reason = match view.unwatched_until {
            _ if !view.may_fall_asleep() => Reason::Settled,
            _ if !view.desired.ready => Reason::NotReady,
            Some(until) => {
                self.look_at(until);
                Reason::Backoff { until }
            }
            None => Reason::Settled,
        };
        self.why.push(reason);
    }

    /// Sets the time of the next plan to the time at which the sandbox falls asleep by itself.
    fn look_when_idle(&mut self) {
        let at = view::idle_until(self.view.desired, self.view.observed, self.now);
        let stays = matches!(self.view.target, Power::Awake | Power::Dozing);
        if let Some(at) = at.filter(|_| stays) {
            self.look_at(at);
        }
    }

    fn plan_paused(&mut self) {
        let view = self.view;
        let frozen = view.target == Power::Frozen && view.is_present();
        if view.corrupt.is_some() {
            self.why.push(Reason::LedgerCorrupt);
            if !frozen {
                self.upkeep(Action::Resume, None, None);
            }
            return;
        }
        if let Some(image) = self.end_begun() {
            // Some processes of the sandbox may be gone; its memory is in the image.
            self.why.push(Reason::EndUnfinished);
            self.push_end(&image);
            return;
        }
        if let Memory::Waking { .. } | Memory::WakeFailed { .. } = view.ledger.memory {
            // A restored sandbox that is paused counts as awake: its image is stale.
            self.why.push(Reason::AwakeUnrecorded);
            self.upkeep(Action::Record, Some(Entry::Awake), None);
            return;
        }
        if view.observed.doze.is_some() && frozen {
            // From now on only the end of the freeze resumes the sandbox.
            self.why.push(Reason::FreezeWanted);
            self.upkeep(Action::Pause, None, None);
        }
        match view.fresh.clone() {
            Some(image) => self.plan_paused_and_saved(&image),
            None => self.plan_paused_unsaved(frozen),
        }
    }

    /// Returns the image that the sandbox hibernates in, if its end has begun: the note in /run is
    /// written before the first of its processes is killed.
    fn end_begun(&self) -> Option<ImageId> {
        let image = &self.view.observed.record.as_ref()?.image;
        let is_memory = self.view.ledger.memory.image() == Some(image);
        (is_memory && self.view.held(image)).then(|| image.clone())
    }

    /// Plans for a paused sandbox whose memory is also in `image`.
    fn plan_paused_and_saved(&mut self, image: &ImageId) {
        let view = self.view;
        // An unfinished save needs only its commit. While saves wait after a failure, the sandbox
        // is resumed without it.
        if matches!(view.ledger.memory, Memory::Saving { .. }) {
            self.why.push(Reason::SaveUnfinished);
            if !self.may_try_save_steps() {
                return self.resume_unless_frozen(image);
            }
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
        }
        self.adopt(image);
        match view.target {
            Power::Asleep => {
                self.push_sleep_wanted();
                if self.may_try_save_steps() {
                    self.push_end(image);
                }
            }
            Power::Dozing => self.plan_dozing(image),
            Power::Frozen if view.is_present() => self.why.push(Reason::Settled),
            Power::Frozen | Power::Awake => {
                self.why.push(Reason::AwakeWanted);
                self.upkeep(Action::Resume, Some(Entry::Awake), None);
            }
        }
    }

    /// Plans for a paused sandbox that is to doze, and whose memory is in `image`.
    fn plan_dozing(&mut self, image: &ImageId) {
        self.why.push(Reason::Dozing);
        self.look_when_idle();
        let next = match self.view.observed.doze {
            None => Action::Doze,
            Some(Doze { reclaimed: false }) => Action::Reclaim {
                image: Some(image.clone()),
            },
            Some(Doze { reclaimed: true }) => return,
        };
        let turn = !matches!(next, Action::Reclaim { .. }) || self.has_turn();
        if turn && self.may_try_save_steps() {
            self.step(next, None, None);
        }
    }

    fn push_sleep_wanted(&mut self) {
        let pressed = self.view.desired.pressure.short_of;
        self.why.push(match (self.view.by_itself, pressed) {
            (true, Some(short_of)) => Reason::Pressure { short_of },
            (true, None) => Reason::Idle,
            (false, _) => Reason::SleepWanted,
        });
    }

    fn resume_unless_frozen(&mut self, image: &ImageId) {
        if self.view.target != Power::Frozen {
            // The image is whole. The ledger must record it as stale before the sandbox runs on.
            let awake = self.view.held(image).then_some(Entry::Awake);
            self.upkeep(Action::Resume, awake, None);
        }
    }

    fn plan_paused_unsaved(&mut self, frozen: bool) {
        if self.view.dozes_unsaved() {
            return self.plan_dozing_unsaved();
        }
        if matches!(self.view.ledger.memory, Memory::Saving { .. }) {
            self.why.push(Reason::SaveUnfinished);
        }
        if self.may_save() {
            self.discard_partials();
            self.push_save();
        } else if frozen {
            self.why.push(Reason::Settled);
        } else if self.view.observed.doze.is_some() && self.awaits_turn() {
            // The sandbox dozes until it has its turn to be saved, or a caller needs it.
            self.why.push(Reason::Dozing);
        } else {
            // No image can be mistaken for the memory, so there is nothing to record: this step
            // works on a full disk.
            self.upkeep(Action::Resume, None, None);
        }
    }

    /// Plans for a paused sandbox whose memory is in no image. An incomplete doze is continued or
    /// ended.
    fn plan_dozing_unsaved(&mut self) {
        let settled = match self.view.observed.doze {
            _ if !self.view.is_present() => {
                self.why.push(Reason::PodTerminating);
                false
            }
            Some(doze) => {
                self.why.push(Reason::Dozing);
                if self.view.wants_image() {
                    self.why.push(Reason::NotCapable);
                }
                self.look_when_idle();
                if !doze.reclaimed && self.has_turn() && self.may_try_save_steps() {
                    self.step(Action::Reclaim { image: None }, None, None);
                }
                true
            }
            None => {
                let again = self.may_doze_unsaved();
                if again {
                    self.step(Action::Doze, None, None);
                }
                again
            }
        };
        if !settled {
            self.upkeep(Action::Resume, None, None);
        }
    }

    fn plan_without_sandbox(&mut self) {
        let view = self.view;
        if view.corrupt.is_some() {
            self.why.push(Reason::LedgerCorrupt);
            return;
        }
        let asleep_in = view.ledger.memory.image();
        match &view.observed.record {
            Some(record) if asleep_in != Some(&record.image) => {
                self.why.push(Reason::RecordStale);
                self.upkeep(Action::ForgetSleep, None, None);
            }
            Some(record) => self.plan_hibernated(&record.image),
            None => match view.fresh.clone() {
                Some(image) => {
                    self.why.push(Reason::AwaitingContainers);
                    self.adopt_at_rest(&image);
                }
                None => self.why.push(Reason::NoSandbox),
            },
        }
    }

    /// Plans for a sandbox that hibernates in `image`: its keepers hold the containers open.
    fn plan_hibernated(&mut self, image: &ImageId) {
        let view = self.view;
        if !view.held(image) {
            self.why.push(Reason::ImageMissing {
                image: image.clone(),
            });
            return;
        }
        self.adopt(image);
        let is_to_run = view.target == Power::Awake;
        let is_to_delete = view.wants_deletion_of(image);
        if !view.is_present() || !(is_to_run || is_to_delete) {
            self.why.push(Reason::Sleeping);
            self.push_requested_sleep(image);
            return;
        }
        if (is_to_delete || view.had_snapshot(image)) && !self.is_certain_to_be_here(image) {
            return;
        }
        self.why.push(if is_to_delete {
            Reason::DeletionWanted
        } else {
            Reason::AwakeWanted
        });
        let (min, max) = (self.policy.wake_backoff_min, self.policy.wake_backoff_max);
        if self.has_waited(view.observed.failures.wake.as_ref(), min, max) {
            let waking = Entry::Waking {
                image: image.clone(),
            };
            self.step(
                Action::Wake {
                    image: image.clone(),
                },
                Some(waking),
                Some(Entry::Awake),
            );
        }
    }

    /// Returns whether the apiserver itself has the Pod, whose image serves or served a snapshot.
    /// If not, `why`, `asks` and `wake_at` describe what the plan waits for.
    ///
    /// A node that was cut off may learn that a snapshot is deleted before it learns that the Pod
    /// is. The sandbox may have continued from the image elsewhere and must not run here again.
    fn is_certain_to_be_here(&mut self, image: &ImageId) -> bool {
        let answer = self.view.desired.answer.as_ref();
        if answer.is_some_and(|answer| answer.has_pod) {
            return true;
        }
        let image = image.clone();
        self.why.push(Reason::Asking { image });
        match answer {
            None => self.asks = true,
            Some(_) => self.look_at(later(self.now, self.policy.ask_again)),
        }
        false
    }

    /// Records that a sandbox that fell asleep by itself is now requested to sleep. Once the
    /// request ends, the sandbox is to be woken.
    fn push_requested_sleep(&mut self, image: &ImageId) {
        let was_idle = matches!(
            self.view.ledger.memory,
            Memory::Asleep {
                by_itself: true,
                ..
            }
        );
        if was_idle && self.view.desired.target() == Power::Asleep && self.view.is_present() {
            let asleep = Entry::Asleep {
                image: image.clone(),
                by_itself: false,
            };
            self.upkeep(Action::Record, Some(asleep), None);
        }
    }

    fn may_try_save_steps(&mut self) -> bool {
        let (min, max) = self.view.save_backoff(self.policy);
        self.has_waited(self.view.observed.failures.save.as_ref(), min, max)
    }

    fn may_try_upkeep(&mut self) -> bool {
        let (min, max) = (self.policy.upkeep_backoff_min, self.policy.save_backoff_max);
        self.has_waited(self.view.observed.failures.upkeep.as_ref(), min, max)
    }

    fn may_try_removal(&mut self) -> bool {
        let (min, max) = (self.policy.upkeep_backoff_min, self.policy.save_backoff_max);
        self.has_waited(self.view.observed.failures.removal.as_ref(), min, max)
    }

    /// Returns whether the wait after a failure is over; else adds the wait to the plan.
    fn has_waited(
        &mut self,
        failure: Option<&Failure>,
        min: std::time::Duration,
        max: std::time::Duration,
    ) -> bool {
        let Some(until) = failure
            .map(|f| f.retry_at(min, max))
            .filter(|t| *t > self.now)
        else {
            return true;
        };
        self.look_at(until);
        let backoff = Reason::Backoff { until };
        if !self.why.contains(&backoff) {
            self.why.push(backoff);
        }
        false
    }

    fn look_at(&mut self, at: Timestamp) {
        self.wake_at = Some(self.wake_at.map_or(at, |sooner| sooner.min(at)));
    }

    /// Adds a step that removes something, unless such a step failed a moment ago.
    fn removal(&mut self, action: Action, before: Option<Entry>, after: Option<Entry>) {
        if self.may_try_removal() {
            self.step(action, before, after);
        }
    }

    /// Adds a step that is neither a save nor a wake nor a removal, unless such a step failed a
    /// moment ago.
    fn upkeep(&mut self, action: Action, before: Option<Entry>, after: Option<Entry>) {
        if self.may_try_upkeep() {
            self.step(action, before, after);
        }
    }

    fn step(&mut self, action: Action, before: Option<Entry>, after: Option<Entry>) {
        let fence = Fence {
            pod_uid: self.view.desired.pod_uid.clone(),
            sandbox_id: self.view.observed.sandbox.clone(),
            ledger_seq: self.seq,
        };
        self.seq += u64::from(before.is_some()) + u64::from(after.is_some());
        self.steps.push(Step {
            fence,
            before,
            action,
            after,
        });
    }
}

#[cfg(test)]
mod tests;
