//! Wiring: watches into queues, queues into the two reconcilers.

use std::{future::Future, sync::Arc, time::Duration};

use futures::future::BoxFuture;
use kube::Resource;
use tokio::{task::JoinSet, time::Instant};
use tokio_util::sync::CancellationToken;
use torpor_api::SandboxClaim;
use tracing::Instrument;

use crate::{
    afterwards::Afterwards,
    cache::{Cache, Key},
    claim,
    context::Context,
    pod_snapshot, pool,
    queue::Queue,
    retention, sandbox,
    settings::Settings,
    snapshot, template, trace, watches,
};

/// How long passes that are under way may take to end once the program is being stopped.
const DRAIN: Duration = Duration::from_secs(20);
/// How many snapshots are looked at at once.
const SNAPSHOT_WORKERS: u16 = 8;
/// The snapshots of how many Sandboxes are deleted by rules at once.
const RETENTION_WORKERS: u16 = 2;
/// When an object is looked at again whose pass left what was too much.
const TOO_MUCH_RETRY: Duration = Duration::from_secs(10);

/// When an object is looked at again in whose namespace not everything has been listed yet.
const UNLISTED_RETRY: Duration = Duration::from_secs(5);
/// How often namespaces are told of that cannot be listed.
const UNLISTED_TOLD: Duration = Duration::from_secs(60);

/// A reconciler's error, as far as this file needs to know it.
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

/// What a pass leaves.
struct Ended {
    /// When to look again though nothing has changed.
    requeue: Option<Duration>,
    /// What is left to be done and keeps neither the worker nor the object; says when to look again.
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

/// A pass over a claim; the worker is free for the next one as soon as nobody waits for this one.
async fn serve_claim(
    claim: Arc<SandboxClaim>,
    context: Arc<Context>,
) -> Result<Ended, claim::Error> {
    let claim::Served { requeue, news } = claim::serve(claim, &context).await?;
    let tell = |news: claim::News| -> BoxFuture<'static, Option<Duration>> {
        Box::pin(async move { news.tell(&context).await })
    };
    Ok(Ended {
        requeue,
        afterwards: news.map(tell),
    })
}

/// Reconciles until `shutdown`, then lets passes that are under way end.
pub async fn run(context: Arc<Context>, shutdown: CancellationToken) {
    let mut watching = JoinSet::new();
    watches::start(&context, &mut watching);
    watching.spawn(tell_unlisted(Arc::clone(&context)));
    let mut working = JoinSet::new();
    let (afterwards, left) = Afterwards::start();
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
    shutdown.cancelled().await;
    let drained = async {
        while working.join_next().await.is_some() {}
        drop(afterwards);
        let _ = left.await;
    };
    if tokio::time::timeout(DRAIN, drained).await.is_err() {
        tracing::warn!("some passes did not end in time");
    }
}

/// Warns of namespaces that cannot be listed, until there is none.
async fn tell_unlisted(context: Arc<Context>) {
    let Context {
        caches, settings, ..
    } = &*context;
    let mut wait = UNLISTED_RETRY;
    let is_unlisted = |namespace: &&str| !caches.knows(namespace, settings);
    loop {
        tokio::time::sleep(wait).await;
        wait = UNLISTED_TOLD;
        let unlisted: Vec<&str> = settings.namespaces.names().filter(is_unlisted).collect();
        if unlisted.is_empty() {
            return;
        }
        for namespace in unlisted {
            tracing::warn!(
                namespace,
                kinds = caches.unlisted(namespace, settings).join(","),
                "nothing is done in a namespace before these kinds have been listed there: is its Role there?"
            );
        }
    }
}

/// One kind's reconciler and what it works from.
struct Kind<K, Pass> {
    name: &'static str,
    /// Name of the spans of its passes.
    span: &'static str,
    /// The trace that a pass continues, as a carrier.
    trace: fn(&K, &Context) -> Option<String>,
    workers: u16,
    cache: fn(&Context) -> &Cache<K>,
    queue: fn(&Context) -> &Queue,
    reconcile: fn(Arc<K>, Arc<Context>) -> Pass,
}

// By hand, because deriving would ask the same of the parameters.
impl<K, Pass> Clone for Kind<K, Pass> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<K, Pass> Copy for Kind<K, Pass> {}

struct Workers<'a> {
    tasks: &'a mut JoinSet<()>,
    afterwards: &'a Afterwards,
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
                // Until everything has been listed once, an absence means nothing. Of a controller
                // of some namespaces that holds for each of them.
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
                    let ended = one(&kind, &key, &context).await;
                    if let Some(delay) = ended.requeue {
                        queue.add_after(key.clone(), delay);
                    }
                    queue.done(&key);
                    if let Some(rest) = ended.afterwards {
                        leave(rest, key, kind.queue, &context, &afterwards);
                    }
                }
            });
        }
    }
}

/// Leaves the rest of a pass to be done when it is its turn. If too much is left already, the object is looked at again later instead: what can be told then is told then.
fn leave(
    rest: BoxFuture<'static, Option<Duration>>,
    key: Key,
    queue: fn(&Context) -> &Queue,
    context: &Arc<Context>,
    afterwards: &Afterwards,
) {
    let (known, again) = (Arc::clone(context), key.clone());
    let task = Box::pin(async move {
        if let Some(delay) = rest.await {
            queue(&known).add_after(again, delay);
        }
    });
    if !afterwards.leave(task) {
        let (namespace, object) = &key;
        tracing::warn!(
            namespace,
            object,
            "too much is left to be told; the Events of a pass are not"
        );
        queue(context).add_after(key, TOO_MUCH_RETRY);
    }
}

/// One pass, if the object is there. After a failure it is looked at again, with a growing delay.
async fn one<K, Pass, Left, Fail>(kind: &Kind<K, Pass>, key: &Key, context: &Arc<Context>) -> Ended
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
        // It is gone, and nobody asks again how often it failed.
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
            (kind.queue)(context).leave_in_peace(key, delay);
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
