//! Background tasks of passes, for which no client waits. Tasks start in the order in which they
//! were submitted. Their concurrency and the length of the queue are bounded.

use std::sync::Arc;

use futures::future::BoxFuture;
use tokio::{
    sync::{Semaphore, mpsc},
    task::JoinHandle,
};

/// Number of concurrent tasks: the load that [`crate::pace`] allows while no client waits.
const CONCURRENCY: u32 = 32;
/// Limit of waiting tasks of some kilobytes each. A permanent load submits more than can be done.
const QUEUE_LIMIT: usize = 10_000;

/// Background task.
pub type Task = BoxFuture<'static, ()>;

/// Handle to submit background tasks.
#[derive(Clone, Debug)]
pub struct Background(mpsc::Sender<Task>);

impl Background {
    /// Starts the worker.
    ///
    /// The worker ends once every [`Background`] is dropped and all tasks are done.
    pub fn start() -> (Self, JoinHandle<()>) {
        Self::with(CONCURRENCY, QUEUE_LIMIT)
    }

    fn with(at_once: u32, most: usize) -> (Self, JoinHandle<()>) {
        let (sender, tasks) = mpsc::channel(most);
        (Self(sender), tokio::spawn(run_tasks(tasks, at_once)))
    }

    /// Submits a task. Returns `false` if the queue is full; the task is then dropped.
    #[must_use]
    pub fn submit(&self, task: Task) -> bool {
        self.0.try_send(task).is_ok()
    }
}

async fn run_tasks(mut tasks: mpsc::Receiver<Task>, at_once: u32) {
    let room = Arc::new(Semaphore::new(at_once as usize));
    // The semaphore is never closed.
    while let Ok(place) = Arc::clone(&room).acquire_owned().await {
        let Some(task) = tasks.recv().await else {
            break;
        };
        // A separate tokio task, so that a panic ends only this one.
        tokio::spawn(async move {
            task.await;
            drop(place);
        });
    }
    let _ = room.acquire_many(at_once).await;
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[tokio::test]
    async fn concurrency_is_bounded_and_all_tasks_are_done_before_the_end() {
        let (background, worker) = Background::with(2, 100);
        let gate = Arc::new(Semaphore::new(0));
        let (begun, done) = (Arc::default(), Arc::default());
        for _ in 0..10 {
            let gate = Arc::clone(&gate);
            let (begun, done): (Arc<AtomicUsize>, Arc<AtomicUsize>) =
                (Arc::clone(&begun), Arc::clone(&done));
            assert!(background.submit(Box::pin(async move {
                begun.fetch_add(1, Ordering::Relaxed);
                gate.acquire().await.unwrap().forget();
                done.fetch_add(1, Ordering::Relaxed);
            })));
        }
        for _ in 0..100 {
            tokio::task::yield_now().await;
        }
        assert_eq!(begun.load(Ordering::Relaxed), 2);
        drop(background);
        assert!(!worker.is_finished());
        gate.add_permits(10);
        worker.await.unwrap();
        assert_eq!(done.load(Ordering::Relaxed), 10);
    }

    #[tokio::test]
    async fn a_full_queue_refuses_tasks_until_there_is_room() {
        let (background, worker) = Background::with(1, 3);
        let gate = Arc::new(Semaphore::new(0));
        let submit = || {
            let gate = Arc::clone(&gate);
            background.submit(Box::pin(async move {
                gate.acquire().await.unwrap().forget();
            }))
        };
        let taken = (0..10).filter(|_| submit()).count();
        assert_eq!(taken, 3, "nothing was begun yet");
        gate.add_permits(3);
        while background.0.capacity() < 3 {
            tokio::task::yield_now().await;
        }
        assert!(submit());
        gate.add_permits(1);
        drop(background);
        worker.await.unwrap();
    }

    #[tokio::test]
    async fn a_panic_ends_no_other_task() {
        let (background, worker) = Background::with(1, 3);
        assert!(background.submit(Box::pin(async { panic!("one of many") })));
        let done = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&done);
        assert!(background.submit(Box::pin(async move {
            counted.fetch_add(1, Ordering::Relaxed);
        })));
        drop(background);
        worker.await.unwrap();
        assert_eq!(done.load(Ordering::Relaxed), 1);
    }
}
