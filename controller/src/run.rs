//! Wiring: watches into queues, queues into the two reconcilers.

use std::{convert::Infallible, future::Future, sync::Arc, time::Duration};

use futures::{Stream, StreamExt, stream};
use kube::{
    Resource, ResourceExt,
    runtime::{
        controller::{self, Action, applier},
        reflector::{ObjectRef, Store},
    },
};
use tokio::{sync::mpsc, task::JoinSet, time::Instant};
use tokio_util::sync::CancellationToken;

use crate::{
    context::Context,
    sandbox, snapshot,
    watches::{self, Queues},
};

/// How long passes that are under way may take to end once the program is being stopped.
const DRAIN: Duration = Duration::from_secs(20);
/// How many snapshots are looked at at once.
const SNAPSHOT_WORKERS: u16 = 8;

/// A reconciler's error, as far as this file needs to know it.
trait Failure: std::error::Error {
    fn reason(&self) -> &'static str;
}

impl Failure for sandbox::Error {
    fn reason(&self) -> &'static str {
        sandbox::Error::reason(self)
    }
}

impl Failure for snapshot::Error {
    fn reason(&self) -> &'static str {
        snapshot::Error::reason(self)
    }
}

/// Reconciles until `shutdown`, then lets passes that are under way end.
pub async fn run(context: Arc<Context>, sandbox_workers: u16, shutdown: CancellationToken) {
    let mut watching = JoinSet::new();
    let (sandboxes, sandbox_queue) = mpsc::unbounded_channel();
    let (snapshots, snapshot_queue) = mpsc::unbounded_channel();
    let queues = Queues {
        sandboxes,
        snapshots,
    };
    let stores = watches::start(
        &context.api.client(),
        &context.caches,
        &queues,
        &mut watching,
    );
    context.metrics.count_sandboxes_of(stores.sandboxes.clone());
    let for_sandboxes = drive(
        ("sandbox", sandbox_workers),
        stores.sandboxes,
        queue(sandbox_queue, &shutdown),
        (Arc::clone(&context), shutdown.clone()),
        sandbox::reconcile,
    );
    let for_snapshots = drive(
        ("sandboxsnapshot", SNAPSHOT_WORKERS),
        stores.snapshots,
        queue(snapshot_queue, &shutdown),
        (Arc::clone(&context), shutdown.clone()),
        snapshot::reconcile,
    );
    let both = async { tokio::join!(for_sandboxes, for_snapshots) };
    let ended = async {
        shutdown.cancelled().await;
        tokio::time::sleep(DRAIN).await;
    };
    tokio::select! {
        _ = both => {}
        () = ended => tracing::warn!("some passes did not end in time"),
    }
}

/// The names in a queue, until `shutdown`.
fn queue<K: Resource<DynamicType = ()> + 'static>(
    mut names: mpsc::UnboundedReceiver<ObjectRef<K>>,
    shutdown: &CancellationToken,
) -> impl Stream<Item = Result<ObjectRef<K>, Infallible>> + Send + 'static {
    stream::poll_fn(move |task| names.poll_recv(task))
        .map(Ok)
        .take_until(shutdown.clone().cancelled_owned())
}

/// Runs a reconciler over the names of a queue: one pass per object at a time, a growing delay after each failure.
async fn drive<K, Pass, Fail>(
    (name, workers): (&'static str, u16),
    store: Store<K>,
    queue: impl Stream<Item = Result<ObjectRef<K>, Infallible>> + Send + 'static,
    (context, shutdown): (Arc<Context>, CancellationToken),
    reconcile: fn(Arc<K>, Arc<Context>) -> Pass,
) where
    K: Resource<DynamicType = ()> + Clone + Send + Sync + 'static,
    Pass: Future<Output = Result<Action, Fail>> + Send + 'static,
    Fail: Failure + Send + Sync + 'static,
{
    let pass = move |object: Arc<K>, context: Arc<Context>| {
        let shutdown = shutdown.clone();
        Box::pin(async move {
            // Until everything has been listed once, an absence means nothing.
            tokio::select! {
                () = context.caches.wait_ready() => {}
                () = shutdown.cancelled() => return Ok(Action::await_change()),
            }
            observed_pass(name, reconcile, object, context).await
        })
    };
    let after_failure = move |object: Arc<K>, error: &Fail, context: Arc<Context>| {
        let delay = context.failures.count(&key(name, &*object));
        tracing::warn!(
            controller = name,
            namespace = object.namespace(),
            object = object.name_any(),
            reason = error.reason(),
            error = %Chain(error),
            retry_in = ?delay,
            "a pass failed"
        );
        Action::requeue(delay)
    };
    let config = controller::Config::default().concurrency(workers);
    let known = Arc::clone(&context);
    applier(pass, after_failure, context, store, queue, config)
        .for_each(|result| {
            // Failures are dealt with above. An object that is gone needs nothing, and nobody asks again how often it failed.
            if let Err(controller::Error::ObjectNotFound(gone)) = result {
                let namespace = gone.namespace.unwrap_or_default();
                known
                    .failures
                    .forget(&format!("{name}/{namespace}/{}", gone.name));
            }
            std::future::ready(())
        })
        .await;
}

async fn observed_pass<K, Pass, Fail>(
    name: &'static str,
    reconcile: fn(Arc<K>, Arc<Context>) -> Pass,
    object: Arc<K>,
    context: Arc<Context>,
) -> Result<Action, Fail>
where
    K: Resource<DynamicType = ()>,
    Pass: Future<Output = Result<Action, Fail>>,
    Fail: Failure,
{
    let begin = Instant::now();
    let key = key(name, &*object);
    let result = reconcile(object, Arc::clone(&context)).await;
    let failure = result.as_ref().err().map(Failure::reason);
    let requeues = result
        .as_ref()
        .is_ok_and(|action| *action != Action::await_change());
    context
        .metrics
        .observe_pass(name, begin.elapsed(), failure, requeues);
    if failure.is_none() {
        context.failures.forget(&key);
    }
    result
}

fn key<K: Resource>(controller: &str, object: &K) -> String {
    format!(
        "{controller}/{}/{}",
        object.namespace().unwrap_or_default(),
        object.name_any()
    )
}

/// Shows an error with its causes.
struct Chain<'a>(&'a dyn std::error::Error);

impl std::fmt::Display for Chain<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.0)?;
        let mut cause = self.0.source();
        while let Some(error) = cause {
            write!(f, ": {error}")?;
            cause = error.source();
        }
        Ok(())
    }
}
