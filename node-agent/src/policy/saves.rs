//! Turns to save: the queue of this node, shared by the tasks of its Pods.
//!
//! `torpor_core::queue` decides which task comes next.

use std::collections::HashMap;
use std::num::NonZeroU64;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use jiff::Timestamp;
use tokio::runtime::Handle;
use tokio::sync::Notify;
use torpor_core::ids::Namespace;
use torpor_core::queue::{Capacity, Queue, Ticket, Urgency, Wish};
use torpor_core::steps::Plan;
use torpor_runsc::wake_slots::WakeSlots;

use crate::report::metrics::Metrics;

/// A task that has waited for so long comes before all others.
const LONGEST_WAIT: Duration = Duration::from_secs(30);
/// A save that lasts longer does not count as under way any more.
const LONGEST_SAVE: Duration = Duration::from_secs(60);
/// Longest interval between two checks of a queue in which a task waits. The wakes that hold back a
/// turn take some tenths of a second.
const RECHECK: Duration = Duration::from_millis(100);

/// The turns of this node.
#[derive(Debug)]
pub(crate) struct Saves {
    queue: Mutex<Waiting>,
    /// Bandwidth is limited. Only then the sizes of images count.
    weighs: bool,
    /// The node's restores. They show whether a caller waits for a sandbox to wake.
    wakes: WakeSlots,
    metrics: Arc<Metrics>,
}

#[derive(Debug)]
struct Waiting {
    queue: Queue,
    tasks: HashMap<Ticket, Arc<Notify>>,
    /// [`Saves::recheck`] runs.
    rechecks: bool,
}

/// A turn to save, or a place in the queue. The drop gives it back.
#[derive(Debug)]
pub(crate) struct SaveTurn {
    saves: Arc<Saves>,
    ticket: Ticket,
    urgency: Urgency,
    /// Bytes written in this turn so far.
    written: AtomicU64,
}

impl SaveTurn {
    /// Returns whether the turn has come.
    pub(crate) fn has_come(&self) -> bool {
        self.saves.lock().queue.is_admitted(self.ticket)
    }

    /// Returns whether the task waits for bandwidth.
    pub(crate) fn is_held_back(&self) -> bool {
        self.saves.lock().queue.is_held_back(self.ticket)
    }

    /// Records that so many more bytes were written in this turn.
    pub(crate) fn wrote(&self, bytes: u64) {
        self.saves.metrics.wrote(bytes);
        self.written.fetch_add(bytes, Ordering::Relaxed);
    }
}

impl Drop for SaveTurn {
    fn drop(&mut self) {
        let mut waiting = self.saves.lock();
        let written = self.written.load(Ordering::Relaxed);
        waiting.queue.leave(self.ticket, written);
        waiting.tasks.remove(&self.ticket);
        self.saves.advance(&mut waiting);
    }
}

impl Saves {
    /// Makes an empty queue. `at_once`: saves at once, at least 1. `bandwidth`: bytes per second;
    /// none: no limit.
    pub(crate) fn new(
        at_once: usize,
        bandwidth: Option<NonZeroU64>,
        state_dir: &Path,
        metrics: Arc<Metrics>,
    ) -> Arc<Self> {
        let queue = Queue::new(Capacity {
            at_once,
            patience: LONGEST_WAIT,
            longest: LONGEST_SAVE,
            bandwidth,
        });
        Arc::new(Self {
            weighs: bandwidth.is_some(),
            queue: Mutex::new(Waiting {
                queue,
                tasks: HashMap::new(),
                rechecks: false,
            }),
            // 0: no limit. The restoring processes themselves keep to the limit.
            wakes: WakeSlots::new(state_dir, 0),
            metrics,
        })
    }

    /// Returns the save for which a plan waits, if it waits for a turn. `size`: bytes of the
    /// image, if known.
    pub(crate) fn wish(
        &self,
        plan: &Plan,
        namespace: Option<&Namespace>,
        size: impl FnOnce() -> Option<u64>,
    ) -> Option<Wish> {
        Some(Wish {
            urgency: plan.awaits_turn()?,
            namespace: namespace?.clone(),
            size: self.weighs.then(size).flatten(),
        })
    }

    /// Returns the task's turn after it has planned: requested, awaited, used, or none if
    /// given back. `wish`: the save for which the plan waits. `task` is notified when the turn
    /// comes.
    pub(crate) fn follow(
        self: &Arc<Self>,
        held: Option<Arc<SaveTurn>>,
        plan: &Plan,
        wish: Option<Wish>,
        task: &Arc<Notify>,
    ) -> Option<Arc<SaveTurn>> {
        match (held, plan.awaits_turn()) {
            (Some(turn), Some(urgency)) if turn.urgency == urgency => Some(turn),
            (_, Some(_)) => Some(self.join(wish?, task)),
            (held, None) if !plan.steps.is_empty() => held,
            (_, None) => None,
        }
    }

    fn join(self: &Arc<Self>, wish: Wish, task: &Arc<Notify>) -> Arc<SaveTurn> {
        let mut waiting = self.lock();
        let urgency = wish.urgency;
        let ticket = waiting.queue.join(wish, Timestamp::now());
        waiting.tasks.insert(ticket, task.clone());
        self.advance(&mut waiting);
        drop(waiting);
        Arc::new(SaveTurn {
            saves: self.clone(),
            ticket,
            urgency,
            written: AtomicU64::new(0),
        })
    }

    /// Returns whether a caller waits for the answer of a sandbox that is being restored, or
    /// that waits for its turn to be restored.
    pub(crate) fn is_wake_awaited(&self) -> bool {
        self.wakes.is_client_waiting()
    }

    /// Gives the turns that are free to the tasks that come next, and notifies them.
    fn advance(self: &Arc<Self>, waiting: &mut Waiting) {
        let called = self.is_wake_awaited();
        while let Some(ticket) = waiting.queue.admit(called, Timestamp::now()) {
            let waited = waiting.queue.was_held_back(ticket);
            self.metrics.waited_for_bandwidth(waited);
            if let Some(task) = waiting.tasks.get(&ticket) {
                task.notify_one();
            }
        }
        self.metrics.saves(&waiting.queue);
        // Without a tokio runtime the agent is ending.
        if waiting.queue.is_waited_for()
            && !waiting.rechecks
            && let Ok(runtime) = Handle::try_current()
        {
            waiting.rechecks = true;
            runtime.spawn(self.clone().recheck());
        }
    }

    /// Checks the queue at intervals while a task waits. No event shows that a wake has
    /// ended, that a save has lasted too long, or that bandwidth is free again.
    async fn recheck(self: Arc<Self>) {
        loop {
            let free_at = self.lock().queue.free_at();
            let now = Timestamp::now();
            let wait = free_at.map(|at| at.duration_since(now).try_into());
            // If bandwidth is free already, the tasks wait for something else.
            let wait = wait
                .and_then(Result::ok)
                .filter(|wait| *wait != Duration::ZERO);
            tokio::time::sleep(wait.unwrap_or(RECHECK).min(RECHECK)).await;
            let mut waiting = self.lock();
            self.advance(&mut waiting);
            if !waiting.queue.is_waited_for() {
                waiting.rechecks = false;
                return;
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, Waiting> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use torpor_core::status::{Phase, StatusDraft};
    use torpor_core::steps::Reason;

    use super::*;

    fn plan(awaits: Option<Urgency>) -> Plan {
        Plan {
            steps: Vec::new(),
            status: StatusDraft {
                phase: Phase::Running,
                hibernated: None,
                restored: None,
                bound: None,
                snapshots: Vec::new(),
                left: None,
            },
            asks: false,
            wake_at: None,
            why: awaits
                .map(|urgency| Reason::AwaitingTurn { urgency })
                .into_iter()
                .collect(),
        }
    }

    fn wish(urgency: Urgency, size: Option<u64>) -> Option<Wish> {
        Some(Wish {
            urgency,
            namespace: Namespace::new("n").expect("a name"),
            size,
        })
    }

    #[tokio::test]
    async fn a_turn_that_is_given_back_wakes_the_task_that_waits_for_it() {
        let dir = tempfile::tempdir().expect("a directory");
        let saves = Saves::new(1, None, dir.path(), Arc::new(Metrics::new()));
        let tasks = [(); 2].map(|()| Arc::new(Notify::new()));
        let waits = plan(Some(Urgency::ByItself));
        let first = saves.follow(None, &waits, wish(Urgency::ByItself, None), &tasks[0]);
        let first = first.expect("a turn");
        assert!(first.has_come());
        let second = saves.follow(None, &waits, wish(Urgency::ByItself, None), &tasks[1]);
        let second = second.expect("a place in the queue");
        assert!(!second.has_come());
        // The plan has no steps and does not wait, so the turn is given back.
        assert!(
            saves
                .follow(Some(first), &plan(None), None, &tasks[0])
                .is_none()
        );
        tasks[1].notified().await;
        assert!(second.has_come());
    }

    #[tokio::test]
    async fn a_timers_save_begins_once_no_wake_is_pending() {
        let dir = tempfile::tempdir().expect("a directory");
        let saves = Saves::new(1, None, dir.path(), Arc::new(Metrics::new()));
        let namespace = Namespace::new("n").expect("a name");
        let called = torpor_records::WakeCause::Exec;
        let wake = WakeSlots::new(dir.path(), 0).take(called, &namespace);
        let task = Arc::new(Notify::new());
        let turn = saves.follow(
            None,
            &plan(Some(Urgency::ByItself)),
            wish(Urgency::ByItself, None),
            &task,
        );
        let turn = turn.expect("a place in the queue");
        assert!(!turn.has_come());
        drop(wake);
        task.notified().await;
        assert!(turn.has_come());
    }

    #[tokio::test]
    async fn a_timers_save_waits_for_bandwidth_and_a_requested_save_does_not() {
        let dir = tempfile::tempdir().expect("a directory");
        let metrics = Arc::new(Metrics::new());
        let saves = Saves::new(2, NonZeroU64::new(10_000), dir.path(), metrics);
        let task = Arc::new(Notify::new());
        let join = |urgency| {
            let turn = saves.follow(
                None,
                &plan(Some(urgency)),
                wish(urgency, Some(1_000_000)),
                &task,
            );
            turn.expect("a place in the queue")
        };
        let first = join(Urgency::ByItself);
        let second = join(Urgency::ByItself);
        assert!(first.has_come() && !second.has_come() && second.is_held_back());
        task.notified().await;
        let asked = join(Urgency::Asked);
        assert!(asked.has_come());
        drop(asked);
        task.notified().await;
        // The image was this small, so the disk is free again after a tenth of a second.
        first.wrote(1000);
        drop(first);
        task.notified().await;
        assert!(second.has_come() && !second.is_held_back());
    }
}
