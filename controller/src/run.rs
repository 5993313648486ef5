//! Starts watches and workers, and moves objects from the queues to the reconcilers.

use std::{future::Future, sync::Arc, time::Duration};

use futures::future::BoxFuture;
use kube::Resource;
use tokio::{task::JoinSet, time::Instant};
use tokio_util::sync::CancellationToken;
use torpor_api::SandboxClaim;
use tracing::Instrument;

use crate::{
    background::Background,
    cache::{Cache, Key},
    claim,
    context::Context,
    pod_snapshot, pool,
    queue::Queue,
    retention, sandbox,
    settings::Settings,
    snapshot, sweep, template, trace, watches,
};

/// Time that running passes have to end after the program is told to stop.
const DRAIN: Duration = Duration::from_secs(20);
/// Number of snapshots that are reconciled at once.
const SNAPSHOT_WORKERS: u16 = 8;
/// Number of Sandboxes whose snapshots are deleted by retention rules at once.
const RETENTION_WORKERS: u16 = 2;
/// Delay until the next pass over an object whose remaining work was rejected because of too much
/// pending work.
const BACKLOG_RETRY: Duration = Duration::from_secs(10);

/// Delay until the next pass over an object in a namespace that has not been listed completely.
const UNLISTED_RETRY: Duration = Duration::from_secs(5);
/// Interval between warnings about namespaces that cannot be listed.
const UNLISTED_WARNING: Duration = Duration::from_secs(60);

/// Error of a reconciler, with the name that metrics and logs need.
trait Failure: std::error::Error {
    fn reason(&self) -> &'static str;
}

impl Failure for sandbox::Error {
    fn reason(&self) -> &'static str {
        sandbox::Error::reason(self)
    }
}

impl Failure for claim::Error {
    fn reason(&self) -> &'static str {
        claim::Error::reason(self)
    }
}

impl Failure for pool::Error {
    fn reason(&self) -> &'static str {
        pool::Error::reason(self)
    }
}

impl Failure for template::Error {
    fn reason(&self) -> &'static str {
        template::Error::reason(self)
    }
}

impl Failure for pod_snapshot::Error {
    fn reason(&self) -> &'static str {
        pod_snapshot::Error::reason(self)
    }
}

impl Failure for retention::Error {
    fn reason(&self) -> &'static str {
        retention::Error::reason(self)
    }
}

impl Failure for snapshot::Error {
    fn reason(&self) -> &'static str {
        snapshot::Error::reason(self)
    }
}

/// Result of a pass.
struct Ended {
    /// Delay until the next pass when nothing changes.
    requeue: Option<Duration>,
    /// Remaining work that occupies neither the worker nor the object; returns the delay until the
    /// next pass.
    afterwards: Option<BoxFuture<'static, Option<Duration>>>,
}

impl From<Option<Duration>> for Ended {
    fn from(requeue: Option<Duration>) -> Self {
        Self {
            requeue,
            afterwards: None,
        }
    }
}

/// Reconciles a claim. The worker is free for the next claim as soon as no request waits for the
/// rest of this pass.
async fn serve_claim(
    claim: Arc<SandboxClaim>,
    context: Arc<Context>,
) -> Result<Ended, claim::Error> {
    let claim::Served { requeue, reports } = claim::serve(claim, &context).await?;
    let write = |reports: claim::Reports| -> BoxFuture<'static, Option<Duration>> {
        Box::pin(async move { reports.write(&context).await })
    };
    Ok(Ended {
        requeue,
        afterwards: reports.map(write),
    })
}

/// Reconciles until `shutdown`, then lets running passes end.
pub async fn run(context: Arc<Context>, shutdown: CancellationToken) {
    let mut watching = JoinSet::new();
    watches::start(&context, &mut watching);
    watching.spawn(warn_unlisted(Arc::clone(&context)));
    let mut working = JoinSet::new();
    let (afterwards, left) = Background::start();
    let mut start = Workers {
        tasks: &mut working,
        afterwards: &afterwards,
        context: &context,
        shutdown: &shutdown,
    };
    let Settings {
        sandbox_workers,
        claim_workers,
        pool_workers,
        template_workers,
        extensions,
        ..
    } = context.settings;
    start.kind(Kind {
        name: "sandbox",
        span: "ReconcileSandbox",
        trace: |object, _| trace::carried(object),
        workers: sandbox_workers,
        cache: |context| &context.caches.sandboxes,
        queue: |context| &context.queues.sandboxes,
        reconcile: sandbox::reconcile,
    });
    start.kind(Kind {
        name: "sandboxsnapshot",
        span: "ReconcileSandboxSnapshot",
        trace: |object, _| trace::carried(object),
        workers: SNAPSHOT_WORKERS,
        cache: |context| &context.caches.snapshots,
        queue: |context| &context.queues.snapshots,
        reconcile: snapshot::reconcile,
    });
    start.kind(Kind {
        name: "snapshotretention",
        span: "ReconcileSnapshotRetention",
        trace: |object, _| trace::carried(object),
        workers: RETENTION_WORKERS,
        cache: |context| &context.caches.sandboxes,
        queue: |context| &context.queues.retention,
        reconcile: retention::reconcile,
    });
    start.kind(Kind {
        name: "podsnapshotmanualtrigger",
        span: "ReconcilePodSnapshotManualTrigger",
        trace: |object, _| trace::carried(object),
        workers: SNAPSHOT_WORKERS,
        cache: |context| &context.caches.triggers,
        queue: |context| &context.queues.triggers,
        reconcile: pod_snapshot::trigger,
    });
    start.kind(Kind {
        name: "podsnapshot",
        span: "ReconcilePodSnapshot",
        trace: |object, _| trace::carried(object),
        workers: SNAPSHOT_WORKERS,
        cache: |context| &context.caches.pod_snapshots,
        queue: |context| &context.queues.pod_snapshots,
        reconcile: pod_snapshot::snapshot,
    });
    if extensions {
        start.kind(Kind {
            name: "sandboxclaim",
            span: "ReconcileSandboxClaim",
            trace: claim::trace,
            workers: claim_workers,
            cache: |context| &context.caches.claims,
            queue: |context| &context.queues.claims,
            reconcile: serve_claim,
        });
        start.kind(Kind {
            name: "sandboxwarmpool",
            span: "ReconcileSandboxWarmPool",
            trace: |object, _| trace::carried(object),
            workers: pool_workers,
            cache: |context| &context.caches.pools,
            queue: |context| &context.queues.pools,
            reconcile: pool::reconcile,
        });
        start.kind(Kind {
            name: "sandboxtemplate",
            span: "ReconcileSandboxTemplate",
            trace: |object, _| trace::carried(object),
            workers: template_workers,
            cache: |context| &context.caches.templates,
            queue: |context| &context.queues.templates,
            reconcile: template::reconcile,
        });
    }
    watching.spawn(sweep::run(Arc::clone(&context), shutdown.clone()));
    shutdown.cancelled().await;
    let drained = async {
        while working.join_next().await.is_some() {}
        drop(afterwards);
        let _ = left.await;
    };
    if tokio::time::timeout(DRAIN, drained).await.is_err() {
        tracing::warn!("some passes did not end within the drain time");
    }
}

/// Warns of namespaces that cannot be listed, until all are listed.
async fn warn_unlisted(context: Arc<Context>) {
    let Context {
        caches, settings, ..
    } = &*context;
    let mut wait = UNLISTED_RETRY;
    let is_unlisted = |namespace: &&str| !caches.knows(namespace, settings);
    loop {
        tokio::time::sleep(wait).await;
        wait = UNLISTED_WARNING;
        let unlisted: Vec<&str> = settings.namespaces.names().filter(is_unlisted).collect();
        if unlisted.is_empty() {
            return;
        }
        for namespace in unlisted {
            tracing::warn!(
                namespace,
                kinds = caches.unlisted(namespace, settings).join(","),
                "no object of this namespace is reconciled until these kinds can be listed there: check the Role in the namespace"
            );
        }
    }
}

/// Reconciler of one kind with its cache and queue.
struct Kind<K, Pass> {
    name: &'static str,
    /// Name of the spans of the kind's passes.
    span: &'static str,
    /// Carrier of the trace that a pass continues.
    trace: fn(&K, &Context) -> Option<String>,
    workers: u16,
    cache: fn(&Context) -> &Cache<K>,
    queue: fn(&Context) -> &Queue,
    reconcile: fn(Arc<K>, Arc<Context>) -> Pass,
}

// Not derived: a derive would require the same of the parameters.
impl<K, Pass> Clone for Kind<K, Pass> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<K, Pass> Copy for Kind<K, Pass> {}

struct Workers<'a> {
    tasks: &'a mut JoinSet<()>,
    afterwards: &'a Background,
    context: &'a Arc<Context>,
    shutdown: &'a CancellationToken,
}

impl Workers<'_> {
    fn kind<K, Pass, Left, Fail>(&mut self, kind: Kind<K, Pass>)
    where
        K: Resource + Send + Sync + 'static,
        Pass: Future<Output = Result<Left, Fail>> + Send + 'static,
        Left: Into<Ended> + Send + 'static,
        Fail: Failure + Send + 'static,
    {
        for _ in 0..kind.workers {
            let (context, shutdown) = (Arc::clone(self.context), self.shutdown.clone());
            let afterwards = self.afterwards.clone();
            self.tasks.spawn(async move {
                // Before the first complete list, absence from the cache proves nothing. A
                // controller confined to namespaces checks this for each of them.
                let ready = context.caches.wait_ready(&context.settings);
                if shutdown.run_until_cancelled(ready).await.is_none() {
                    return;
                }
                let queue = (kind.queue)(&context);
                while let Some(key) = shutdown.run_until_cancelled(queue.next()).await {
                    if !context.caches.knows(&key.0, &context.settings) {
                        queue.add_after(key.clone(), UNLISTED_RETRY);
                        queue.done(&key);
                        continue;
                    }
                    let ended = run_pass(&kind, &key, &context).await;
                    if let Some(delay) = ended.requeue {
                        queue.add_after(key.clone(), delay);
                    }
                    queue.done(&key);
                    if let Some(rest) = ended.afterwards {
                        defer(rest, key, kind.queue, &context, &afterwards);
                    }
                }
            });
        }
    }
}

/// Queues the remaining work of a pass. If too much work is pending already, the object is
/// reconciled again later, and that pass reports its state then.
fn defer(
    rest: BoxFuture<'static, Option<Duration>>,
    key: Key,
    queue: fn(&Context) -> &Queue,
    context: &Arc<Context>,
    afterwards: &Background,
) {
    let (known, again) = (Arc::clone(context), key.clone());
    let task = Box::pin(async move {
        if let Some(delay) = rest.await {
            queue(&known).add_after(again, delay);
        }
    });
    if !afterwards.submit(task) {
        let (namespace, object) = &key;
        tracing::warn!(
            namespace,
            object,
            "too many Events are pending: those of this pass are dropped"
        );
        queue(context).add_after(key, BACKLOG_RETRY);
    }
}

/// Runs one pass, if the object exists. After a failure the object is tried again with a growing
/// delay.
async fn run_pass<K, Pass, Left, Fail>(
    kind: &Kind<K, Pass>,
    key: &Key,
    context: &Arc<Context>,
) -> Ended
where
    K: Resource,
    Pass: Future<Output = Result<Left, Fail>>,
    Left: Into<Ended>,
    Fail: Failure,
{
    let Kind {
        name, reconcile, ..
    } = kind;
    let (namespace, object) = key;
    let failing = format!("{name}/{namespace}/{object}");
    let Some(found) = (kind.cache)(context).get(namespace, object) else {
        // The object is gone, and its count of failures with it.
        context.failures.forget(&failing);
        return Ended::from(None);
    };
    let begin = Instant::now();
    let span = trace::pass(kind.span, &*found, || (kind.trace)(&found, context));
    let pass = reconcile(found, Arc::clone(context)).instrument(span.clone());
    let result: Result<Ended, Fail> = pass.await.map(Into::into);
    let failure = result.as_ref().err().map(Failure::reason);
    let requeues = matches!(
        &result,
        Ok(Ended {
            requeue: Some(_),
            ..
        })
    );
    context
        .metrics
        .observe_pass(name, begin.elapsed(), failure, requeues);
    match result {
        Ok(ended) => {
            context.failures.forget(&failing);
            ended
        }
        Err(error) => {
            let delay = context.failures.count(&failing);
            (kind.queue)(context).hold_back(key, delay);
            trace::failed(&span, &Chain(&error));
            tracing::warn!(
                controller = name,
                namespace,
                object,
                reason = error.reason(),
                error = %Chain(&error),
                retry_in = ?delay,
                "a pass failed"
            );
            Ended::from(Some(delay))
        }
    }
}

/// Displays an error with its causes.
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
