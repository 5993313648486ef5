//! Turns to save: the queue of this node, shared by the tasks of its Pods. Who comes next is decided in `torpor_core::queue`.

use std::collections::HashMap;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use jiff::Timestamp;
use tokio::runtime::Handle;
use tokio::sync::Notify;
use torpor_core::ids::Namespace;
use torpor_core::queue::{Capacity, Queue, Ticket, Urgency};
use torpor_core::steps::Plan;
use torpor_gvisor::turns::Turns;

use crate::metrics::Metrics;

/// Whoever has waited for so long comes before everybody.
const PATIENCE: Duration = Duration::from_secs(30);
/// A save that lasts longer is counted no more.
const LONGEST: Duration = Duration::from_secs(60);
/// While somebody waits: how often it is looked whether courtesy still holds a turn back. A wake takes some tenths of a second.
const LOOK_AGAIN: Duration = Duration::from_millis(100);

/// The turns of this node.
#[derive(Debug)]
pub(crate) struct Saves {
    queue: Mutex<Waiting>,
    /// Where it is seen whether somebody waits for a sandbox to wake.
    wakes: Turns,
    metrics: Arc<Metrics>,
}

#[derive(Debug)]
struct Waiting {
    queue: Queue,
    tasks: HashMap<Ticket, Arc<Notify>>,
    /// A task does so while somebody waits.
    looks_again: bool,
}

/// A turn, or the wait for it. Dropped, it is given back.
#[derive(Debug)]
pub(crate) struct SaveTurn {
    saves: Arc<Saves>,
    ticket: Ticket,
    urgency: Urgency,
}

impl SaveTurn {
    /// Whether it is its turn.
    pub(crate) fn has_come(&self) -> bool {
        self.saves.lock().queue.is_admitted(self.ticket)
    }
}

impl Drop for SaveTurn {
    fn drop(&mut self) {
        let mut waiting = self.saves.lock();
        waiting.queue.leave(self.ticket);
        waiting.tasks.remove(&self.ticket);
        self.saves.advance(&mut waiting);
    }
}

impl Saves {
    /// `at_once`: at least 1.
    pub(crate) fn new(at_once: usize, state_dir: &Path, metrics: Arc<Metrics>) -> Arc<Self> {
        let queue = Queue::new(Capacity {
            at_once,
            patience: PATIENCE,
            longest: LONGEST,
        });
        Arc::new(Self {
            queue: Mutex::new(Waiting {
                queue,
                tasks: HashMap::new(),
                looks_again: false,
            }),
            // The limit is the restoring processes' own affair.
            wakes: Turns::new(state_dir, 0),
            metrics,
        })
    }

    /// What becomes of a task's turn after it has planned: asked for, waited for, used, or given back. `task` is told when it comes.
    pub(crate) fn follow(
        self: &Arc<Self>,
        held: Option<Arc<SaveTurn>>,
        plan: &Plan,
        namespace: Option<&Namespace>,
        task: &Arc<Notify>,
    ) -> Option<Arc<SaveTurn>> {
        match (held, plan.awaits_turn()) {
            (Some(turn), Some(urgency)) if turn.urgency == urgency => Some(turn),
            (_, Some(urgency)) => Some(self.join(urgency, namespace?, task)),
            (held, None) if !plan.steps.is_empty() => held,
            (_, None) => None,
        }
    }

    fn join(
        self: &Arc<Self>,
        urgency: Urgency,
        namespace: &Namespace,
        task: &Arc<Notify>,
    ) -> Arc<SaveTurn> {
        let mut waiting = self.lock();
        let ticket = (waiting.queue).join(urgency, namespace.clone(), Timestamp::now());
        waiting.tasks.insert(ticket, task.clone());
        self.advance(&mut waiting);
        drop(waiting);
        Arc::new(SaveTurn {
            saves: self.clone(),
            ticket,
            urgency,
        })
    }

    /// Gives the turns that there are to give.
    fn advance(self: &Arc<Self>, waiting: &mut Waiting) {
        let called = self.wakes.is_somebody_waiting();
        while let Some(ticket) = waiting.queue.admit(called, Timestamp::now()) {
            if let Some(task) = waiting.tasks.get(&ticket) {
                task.notify_one();
            }
        }
        self.metrics.saves(&waiting.queue);
        // Without a runtime the agent is ending.
        if waiting.queue.is_waited_for()
            && !waiting.looks_again
            && let Ok(runtime) = Handle::try_current()
        {
            waiting.looks_again = true;
            runtime.spawn(self.clone().look_again());
        }
    }

    /// Nobody tells when a wake has ended, or a save lasts too long.
    async fn look_again(self: Arc<Self>) {
        loop {
            tokio::time::sleep(LOOK_AGAIN).await;
            let mut waiting = self.lock();
            self.advance(&mut waiting);
            if !waiting.queue.is_waited_for() {
                waiting.looks_again = false;
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
                snapshots: Vec::new(),
            },
            wake_at: None,
            why: awaits
                .map(|urgency| Reason::AwaitingTurn { urgency })
                .into_iter()
                .collect(),
        }
    }

    #[tokio::test]
    async fn a_turn_that_is_given_back_wakes_the_task_that_waits_for_it() {
        let dir = tempfile::tempdir().expect("a directory");
        let saves = Saves::new(1, dir.path(), Arc::new(Metrics::new()));
        let namespace = Namespace::new("n").expect("a name");
        let tasks = [(); 2].map(|()| Arc::new(Notify::new()));
        let waits = plan(Some(Urgency::ByItself));
        let first = saves.follow(None, &waits, Some(&namespace), &tasks[0]);
        let first = first.expect("a turn");
        assert!(first.has_come());
        let second = saves.follow(None, &waits, Some(&namespace), &tasks[1]);
        let second = second.expect("a place in the queue");
        assert!(!second.has_come());
        // Nothing is left to be done, and nobody waits: the turn is given back.
        assert!(
            saves
                .follow(Some(first), &plan(None), None, &tasks[0])
                .is_none()
        );
        tasks[1].notified().await;
        assert!(second.has_come());
    }

    #[tokio::test]
    async fn what_a_timer_wants_is_saved_once_nobody_waits_for_a_wake_any_more() {
        let dir = tempfile::tempdir().expect("a directory");
        let saves = Saves::new(1, dir.path(), Arc::new(Metrics::new()));
        let namespace = Namespace::new("n").expect("a name");
        let wake = Turns::new(dir.path(), 0).take(torpor_gvisor::record::WakeCause::Called);
        let task = Arc::new(Notify::new());
        let turn = saves.follow(
            None,
            &plan(Some(Urgency::ByItself)),
            Some(&namespace),
            &task,
        );
        let turn = turn.expect("a place in the queue");
        assert!(!turn.has_come());
        drop(wake);
        task.notified().await;
        assert!(turn.has_come());
    }
}
