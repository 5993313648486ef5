//! Events about containers, published to containerd.

use std::sync::Mutex;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use containerd_shim::Error;
use containerd_shim::protos::events::task;
use containerd_shim::protos::protobuf::well_known_types::any::Any;
use containerd_shim::protos::protobuf::{Message, MessageField};
use containerd_shim::protos::shim::event::Envelope;
use containerd_shim::protos::shim::events::ForwardRequest;
use containerd_shim::protos::ttrpc::context;
use containerd_shim::protos::{Client, EventsClient, topics};
use containerd_shim::util::{connect, timestamp};
use torpor_sandbox::log_line;

use super::container::lock;

/// Time limit of one call to containerd.
const CALL_LIMIT: Duration = Duration::from_secs(5);
/// Attempts to publish an event. containerd asks for the state of all containers when it starts,
/// so an event that it misses while it is down is not missing later.
const ATTEMPTS: u32 = 5;
/// Time between attempts, multiplied by the number of the attempt.
const RETRY: Duration = Duration::from_millis(500);
/// Time after which an idle connection to containerd is closed: it costs two threads.
const IDLE: Duration = Duration::from_secs(1);

/// An event of containerd.
pub(crate) trait Event: Message {
    const TOPIC: &'static str;
}

macro_rules! events {
    ($($event:ident => $topic:ident,)*) => {
        $(impl Event for task::$event {
            const TOPIC: &'static str = topics::$topic;
        })*
    };
}

events! {
    TaskCreate => TASK_CREATE_EVENT_TOPIC,
    TaskStart => TASK_START_EVENT_TOPIC,
    TaskOOM => TASK_OOM_EVENT_TOPIC,
    TaskExit => TASK_EXIT_EVENT_TOPIC,
    TaskDelete => TASK_DELETE_EVENT_TOPIC,
    TaskExecAdded => TASK_EXEC_ADDED_EVENT_TOPIC,
    TaskExecStarted => TASK_EXEC_STARTED_EVENT_TOPIC,
    TaskPaused => TASK_PAUSED_EVENT_TOPIC,
    TaskResumed => TASK_RESUMED_EVENT_TOPIC,
}

/// Returns a message with its name, as containerd reads it. `package`: of the message. The library
/// would derive both from descriptions of all messages, which take half a megabyte.
pub(crate) fn to_any<M: Message>(package: &str, message: &M) -> Result<Any, Error> {
    Ok(Any {
        type_url: format!("{package}.{}", M::NAME),
        value: message.write_to_bytes()?,
        ..Any::default()
    })
}

/// Publishes events in their order, in a thread of its own.
#[derive(Debug)]
pub(crate) struct Events {
    /// containerd's, of the pod.
    namespace: String,
    queue: Mutex<Option<Sender<Envelope>>>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Events {
    /// `address`: containerd's ttrpc socket. `namespace`: containerd's, of the pod.
    pub(crate) fn begin(address: String, namespace: String) -> std::io::Result<Self> {
        let (queue, events) = channel();
        let thread = std::thread::Builder::new()
            .name("events".to_owned())
            .spawn(move || publish_all(&address, &events))?;
        Ok(Self {
            namespace,
            queue: Mutex::new(Some(queue)),
            thread: Mutex::new(Some(thread)),
        })
    }

    pub(crate) fn publish<E: Event>(&self, event: &E) {
        let envelope = match envelope(event, &self.namespace) {
            Ok(envelope) => envelope,
            Err(error) => return log_line!("cannot encode {}: {error}", E::TOPIC),
        };
        if let Some(queue) = &*lock(&self.queue) {
            // The thread runs until the queue is closed.
            let _ = queue.send(envelope);
        }
    }

    /// Publishes what is left, and ends the thread.
    pub(crate) fn finish(&self) {
        drop(lock(&self.queue).take());
        let thread = lock(&self.thread).take();
        if let Some(thread) = thread {
            // A panic of the thread has been reported.
            let _ = thread.join();
        }
    }
}

fn envelope<E: Event>(event: &E, namespace: &str) -> Result<Envelope, Error> {
    Ok(Envelope {
        timestamp: MessageField::some(timestamp()?),
        namespace: namespace.to_owned(),
        topic: E::TOPIC.to_owned(),
        event: MessageField::some(to_any("containerd.events", event)?),
        ..Envelope::default()
    })
}

fn publish_all(address: &str, events: &Receiver<Envelope>) {
    let mut client = None;
    loop {
        let next = match client {
            Some(_) => events.recv_timeout(IDLE),
            None => events.recv().map_err(|_| RecvTimeoutError::Disconnected),
        };
        match next {
            Ok(event) => publish_one(address, event, &mut client),
            Err(RecvTimeoutError::Timeout) => client = None,
            Err(RecvTimeoutError::Disconnected) => return,
        }
    }
}

fn publish_one(address: &str, event: Envelope, client: &mut Option<EventsClient>) {
    let limit = i64::try_from(CALL_LIMIT.as_nanos()).unwrap_or(i64::MAX);
    let topic = event.topic.clone();
    let request = ForwardRequest {
        envelope: MessageField::some(event),
        ..ForwardRequest::default()
    };
    for attempt in 1..=ATTEMPTS {
        let sent = connected(address, client).and_then(|client| {
            let sent = client.forward(context::with_timeout(limit), &request);
            sent.map(drop).map_err(Error::from)
        });
        match sent {
            Ok(()) => return,
            Err(error) if attempt == ATTEMPTS => {
                log_line!("cannot publish {topic} to containerd: {error}");
            }
            // containerd may be restarting.
            Err(_) => {
                *client = None;
                std::thread::sleep(RETRY * attempt);
            }
        }
    }
}

fn connected<'a>(
    address: &str,
    client: &'a mut Option<EventsClient>,
) -> Result<&'a EventsClient, Error> {
    match client {
        Some(client) => Ok(client),
        None => {
            // The client takes the descriptor over.
            let made = Client::new(connect(address)?).map_err(Error::from)?;
            Ok(client.insert(EventsClient::new(made)))
        }
    }
}
