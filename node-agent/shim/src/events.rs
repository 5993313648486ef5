//! Events about containers, published to containerd.

use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use containerd_shim::protos::protobuf::MessageDyn;
use containerd_shim::protos::ttrpc::context;
use containerd_shim::publisher::RemotePublisher;
use torpor_sandbox::log_line;

/// Time limit of one call to containerd.
const CALL_LIMIT: Duration = Duration::from_secs(5);
/// Attempts to publish an event. containerd asks for the state of all containers when it starts,
/// so an event that it misses while it is down is not missing later.
const ATTEMPTS: u32 = 5;
/// Time between attempts, multiplied by the number of the attempt.
const RETRY: Duration = Duration::from_millis(500);
/// Time after which an idle connection to containerd is closed: it costs two threads.
const IDLE: Duration = Duration::from_secs(1);

struct Event {
    topic: &'static str,
    message: Box<dyn MessageDyn>,
}

/// Publishes events in their order, in a thread of its own.
#[derive(Debug)]
pub(crate) struct Events {
    queue: Mutex<Option<Sender<Event>>>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Events {
    /// `address`: containerd's ttrpc socket. `namespace`: containerd's, of the pod.
    pub(crate) fn begin(address: String, namespace: String) -> std::io::Result<Self> {
        let (queue, events) = channel();
        let thread = std::thread::Builder::new()
            .name("events".to_owned())
            .spawn(move || publish(&address, &namespace, &events))?;
        Ok(Self {
            queue: Mutex::new(Some(queue)),
            thread: Mutex::new(Some(thread)),
        })
    }

    pub(crate) fn publish(&self, topic: &'static str, message: Box<dyn MessageDyn>) {
        let queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(queue) = &*queue {
            // The thread runs until the queue is closed.
            let _ = queue.send(Event { topic, message });
        }
    }

    /// Publishes what is left, and ends the thread.
    pub(crate) fn finish(&self) {
        drop(
            self.queue
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .take(),
        );
        let thread = self
            .thread
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        if let Some(thread) = thread {
            // A panic of the thread has been reported.
            let _ = thread.join();
        }
    }
}

fn publish(address: &str, namespace: &str, events: &Receiver<Event>) {
    let mut publisher = None;
    loop {
        let next = match publisher {
            Some(_) => events.recv_timeout(IDLE),
            None => events.recv().map_err(|_| RecvTimeoutError::Disconnected),
        };
        match next {
            Ok(event) => publish_one(address, namespace, event, &mut publisher),
            Err(RecvTimeoutError::Timeout) => publisher = None,
            Err(RecvTimeoutError::Disconnected) => return,
        }
    }
}

fn publish_one(
    address: &str,
    namespace: &str,
    event: Event,
    publisher: &mut Option<RemotePublisher>,
) {
    let limit = i64::try_from(CALL_LIMIT.as_nanos()).unwrap_or(i64::MAX);
    for attempt in 1..=ATTEMPTS {
        let sent = connected(address, publisher).and_then(|publisher| {
            let message = event.message.clone_box();
            publisher.publish(
                context::with_timeout(limit),
                event.topic,
                namespace,
                message,
            )
        });
        match sent {
            Ok(()) => return,
            Err(error) if attempt == ATTEMPTS => {
                log_line!("cannot publish {} to containerd: {error}", event.topic);
            }
            // containerd may be restarting.
            Err(_) => {
                *publisher = None;
                std::thread::sleep(RETRY * attempt);
            }
        }
    }
}

fn connected<'a>(
    address: &str,
    publisher: &'a mut Option<RemotePublisher>,
) -> containerd_shim::Result<&'a RemotePublisher> {
    match publisher {
        Some(publisher) => Ok(publisher),
        None => Ok(publisher.insert(RemotePublisher::new(address)?)),
    }
}
