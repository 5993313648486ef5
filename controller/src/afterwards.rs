//! What passes leave to be done when nobody waits for it any longer. It is done in the order in which it was left, so much at once and no more; and what is left may not grow for ever.

use std::sync::Arc;

use futures::future::BoxFuture;
use tokio::{
    sync::{Semaphore, mpsc},
    task::JoinHandle,
};

/// How much is under way at once: what the apiserver is given in a calm moment ([`crate::pace`]).
const AT_ONCE: u32 = 32;
/// How much may wait. Under a load that never ends more is left than can be done; some kilobytes each.
const MOST: usize = 10_000;

/// Something that was left.
pub type Task = BoxFuture<'static, ()>;

/// Where passes leave what is to be done afterwards.
#[derive(Clone, Debug)]
pub struct Afterwards(mpsc::Sender<Task>);

impl Afterwards {
    /// Starts to do what is left. The task ends once every [`Afterwards`] is dropped and everything is done.
    pub fn start() -> (Self, JoinHandle<()>) {
        Self::with(AT_ONCE, MOST)
    }

    fn with(at_once: u32, most: usize) -> (Self, JoinHandle<()>) {
        let (sender, left) = mpsc::channel(most);
        (Self(sender), tokio::spawn(work(left, at_once)))
    }

    /// Leaves something to be done. `false`: too much is left already, and it is dropped undone.
    #[must_use]
    pub fn leave(&self, task: Task) -> bool {
        self.0.try_send(task).is_ok()
    }
}

async fn work(mut left: mpsc::Receiver<Task>, at_once: u32) {
    let room = Arc::new(Semaphore::new(at_once as usize));
    // The semaphore is never closed.
    while let Ok(place) = Arc::clone(&room).acquire_owned().await {
        let Some(task) = left.recv().await else {
            break;
        };
        // A task of its own: a panic ends this one only.
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
    async fn so_much_is_done_at_once_and_all_of_it_before_the_end() {
        let (afterwards, worker) = Afterwards::with(2, 100);
        let gate = Arc::new(Semaphore::new(0));
        let (begun, done) = (Arc::default(), Arc::default());
        for _ in 0..10 {
            let gate = Arc::clone(&gate);
            let (begun, done): (Arc<AtomicUsize>, Arc<AtomicUsize>) =
                (Arc::clone(&begun), Arc::clone(&done));
            assert!(afterwards.leave(Box::pin(async move {
                begun.fetch_add(1, Ordering::Relaxed);
                gate.acquire().await.unwrap().forget();
                done.fetch_add(1, Ordering::Relaxed);
            })));
        }
        for _ in 0..100 {
            tokio::task::yield_now().await;
        }
        assert_eq!(begun.load(Ordering::Relaxed), 2);
        drop(afterwards);
        assert!(!worker.is_finished());
        gate.add_permits(10);
        worker.await.unwrap();
        assert_eq!(done.load(Ordering::Relaxed), 10);
    }

    #[tokio::test]
    async fn what_is_too_much_is_refused_and_room_comes_back() {
        let (afterwards, worker) = Afterwards::with(1, 3);
        let gate = Arc::new(Semaphore::new(0));
        let leave = || {
            let gate = Arc::clone(&gate);
            afterwards.leave(Box::pin(async move {
                gate.acquire().await.unwrap().forget();
            }))
        };
        let taken = (0..10).filter(|_| leave()).count();
        assert_eq!(taken, 3, "nothing was begun yet");
        gate.add_permits(3);
        while afterwards.0.capacity() < 3 {
            tokio::task::yield_now().await;
        }
        assert!(leave());
        gate.add_permits(1);
        drop(afterwards);
        worker.await.unwrap();
    }

    #[tokio::test]
    async fn a_panic_ends_nothing_else() {
        let (afterwards, worker) = Afterwards::with(1, 3);
        assert!(afterwards.leave(Box::pin(async { panic!("one of many") })));
        let done = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&done);
        assert!(afterwards.leave(Box::pin(async move {
            counted.fetch_add(1, Ordering::Relaxed);
        })));
        drop(afterwards);
        worker.await.unwrap();
        assert_eq!(done.load(Ordering::Relaxed), 1);
    }
}
