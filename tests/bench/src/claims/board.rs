//! State of the load's claims: when each was sent, and when the watch showed it Ready.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use futures::{StreamExt, pin_mut};
use jiff::Timestamp;
use kube::{
    Api, Client, ResourceExt,
    runtime::watcher::{self, Event, watcher},
};
use tokio::{
    sync::{mpsc, oneshot},
    task::JoinHandle,
};
use torpor_api::{SandboxClaim, conditions};

/// State of one claim.
#[derive(Clone, Debug)]
pub(crate) struct Record {
    pub namespace: String,
    pub sent: Instant,
    /// The same moment on the wall clock, which the API server shares.
    pub sent_at: Timestamp,
    /// Time from `sent` until the watch showed the claim Ready.
    pub ready: Option<Duration>,
    /// Name of the claim's Sandbox.
    pub sandbox: Option<String>,
}

impl Record {
    /// Reports whether the Sandbox is a pool's: a Sandbox that is made for a claim has the claim's
    /// name.
    pub(crate) fn is_warm(&self, claim: &str) -> bool {
        self.sandbox.as_deref().is_some_and(|name| name != claim)
    }
}

/// All claims by name, which is unique over all namespaces.
#[derive(Clone, Debug, Default)]
pub(crate) struct Board(Arc<Mutex<HashMap<String, Record>>>);

impl Board {
    /// Records a claim that is about to be sent.
    pub(crate) fn send(&self, name: &str, namespace: &str) {
        let record = Record {
            namespace: namespace.to_owned(),
            sent: Instant::now(),
            sent_at: Timestamp::now(),
            ready: None,
            sandbox: None,
        };
        self.lock().insert(name.to_owned(), record);
    }

    /// Records a claim from the watch; reports whether it has become Ready.
    fn see(&self, claim: &SandboxClaim, now: Instant) -> bool {
        let status = claim.status.as_ref();
        let ready =
            status.is_some_and(|status| conditions::is_true(&status.conditions, conditions::READY));
        let mut all = self.lock();
        let Some(record) = all.get_mut(&claim.name_any()).filter(|_| ready) else {
            return false;
        };
        if record.ready.is_some() {
            return false;
        }
        record.ready = Some(now.duration_since(record.sent));
        record.sandbox = status
            .and_then(|status| status.sandbox.as_ref())
            .map(|sandbox| sandbox.name.clone());
        true
    }

    /// Returns the number of claims that are not Ready yet.
    pub(crate) fn waiting(&self) -> usize {
        let all = self.lock();
        all.values().filter(|record| record.ready.is_none()).count()
    }

    pub(crate) fn records(&self) -> HashMap<String, Record> {
        self.lock().clone()
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, Record>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Watches all claims; returns once the watch has begun.
    ///
    /// Namespace and name of a claim that becomes Ready go into the channel.
    pub(crate) async fn watch(
        &self,
        client: Client,
        became_ready: mpsc::UnboundedSender<(String, String)>,
    ) -> anyhow::Result<JoinHandle<anyhow::Result<()>>> {
        let (begun, has_begun) = oneshot::channel();
        let board = self.clone();
        let watching = tokio::spawn(async move {
            let claims: Api<SandboxClaim> = Api::all(client);
            let events = watcher(claims, watcher::Config::default());
            pin_mut!(events);
            let mut begun = Some(begun);
            while let Some(event) = events.next().await {
                match event? {
                    Event::Apply(claim) | Event::InitApply(claim) => {
                        if board.see(&claim, Instant::now()) {
                            let namespace = claim.namespace().unwrap_or_default();
                            // At the end the receiver is gone.
                            let _ = became_ready.send((namespace, claim.name_any()));
                        }
                    }
                    Event::InitDone => {
                        if let Some(begun) = begun.take() {
                            let _ = begun.send(());
                        }
                    }
                    Event::Init | Event::Delete(_) => {}
                }
            }
            Ok(())
        });
        if has_begun.await.is_err() {
            watching.await??;
            anyhow::bail!("the watch of claims ended before it began");
        }
        Ok(watching)
    }
}
