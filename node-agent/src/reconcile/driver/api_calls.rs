//! Calls of the API that the turn of a Pod's task makes: finalizers, statuses, Events, questions.

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use torpor_api::snapshot::SandboxSnapshot;
use torpor_core::ids::{Namespace, PodUid};
use torpor_core::state::Answer;
use torpor_core::status::SnapshotState;

use super::departure::{GivenUp, Remains, remains, snapshots_about, to_adopt};
use super::look::{Look, Remembered};
use super::own_writes::OwnWrites;
use super::{Driver, LOOK, RETRY, Turn, log_unpublished};
use crate::report::publish;

impl Driver {
    /// Returns the snapshots about the Pod and, for a Pod that is gone, whether an image of it
    /// is on this node.
    pub(super) async fn snapshots_of(
        &self,
        uid: &PodUid,
        pod: Option<&Pod>,
    ) -> Result<(Vec<Arc<SandboxSnapshot>>, bool), tokio::task::JoinError> {
        let remains = match pod {
            Some(pod) => Remains {
                namespace: pod.namespace(),
                has_image: false,
            },
            None => {
                let (shared, uid) = (self.shared.clone(), uid.clone());
                tokio::task::spawn_blocking(move || remains(&shared.node, &uid)).await?
            }
        };
        let namespace = remains.namespace.as_deref();
        let about = snapshots_about(&self.shared, uid, namespace, pod);
        Ok((about, remains.has_image))
    }

    /// Puts Torpor's finalizer on the snapshots that this node takes on, before any byte is written
    /// for them. `Err`: how long to wait for the next turn, which then finds the finalizer in the
    /// cache.
    pub(super) async fn adopt(
        &self,
        snapshots: &[Arc<SandboxSnapshot>],
        pod: Option<&Pod>,
        has_image: bool,
    ) -> Result<(), Duration> {
        let publisher = &self.shared.publisher;
        let node = publisher.node_name();
        let mut result = Ok(());
        for snapshot in to_adopt(snapshots, node, pod.is_some(), has_image) {
            match publisher.adopt(snapshot).await {
                Ok(()) => result = Err(LOOK),
                Err(error) => {
                    let error = crate::reconcile::observe::words(&error);
                    tracing::warn!(
                        snapshot = snapshot.name_any(),
                        error,
                        "cannot write the finalizer"
                    );
                    result = Err(RETRY);
                }
            }
        }
        result
    }

    /// Writes the plan's statuses of the Pod and of its snapshots.
    pub(super) async fn publish_status(
        &self,
        pod: Option<&Pod>,
        snapshots: &[Arc<SandboxSnapshot>],
        look: &Look,
        own_writes: &mut OwnWrites,
    ) -> Result<(), publish::Error> {
        let publisher = &self.shared.publisher;
        let mut result = Ok(());
        if let Some(pod) = pod {
            result = combine(result, publisher.pod(pod, &look.plan.status).await)?;
        }
        for draft in &look.plan.status.snapshots {
            let of_draft =
                |s: &&Arc<SandboxSnapshot>| s.uid().as_deref() == Some(draft.uid.as_str());
            let Some(snapshot) = snapshots.iter().find(of_draft) else {
                continue;
            };
            let image = match &draft.state {
                SnapshotState::Committed { image, .. } => look
                    .saved
                    .iter()
                    .find(|saved| saved.manifest.image_id == *image),
                _ => None,
            };
            let written = publisher.snapshot(snapshot, draft, image).await;
            let written = written.map(|after| own_writes.note(snapshot, after));
            result = combine(result, written)?;
        }
        result
    }

    /// Publishes the last statuses of a Pod of which nothing is left, then ends its task.
    pub(super) async fn end(
        &self,
        pod: &PodUid,
        snapshots: &[Arc<SandboxSnapshot>],
        look: &Look,
        own_writes: &mut OwnWrites,
    ) -> Turn {
        let published = self.publish_status(None, snapshots, look, own_writes).await;
        if let Err(error) = published {
            log_unpublished(pod, &error);
            return Turn::Wait(RETRY);
        }
        self.shared.board.forget(pod);
        if let Some(kata) = &self.shared.kata {
            kata.forget(pod);
        }
        Turn::Nothing
    }

    /// Writes an Event on the Sandbox for each image that was removed as unclaimed. The controller
    /// answers later requests for this memory.
    pub(super) async fn publish_given_up(&self, given_up: Vec<GivenUp>, remembered: &Remembered) {
        for one in given_up {
            let images = self.shared.node.store.list_pod(one.image.pod());
            let is_there = images.is_ok_and(|all| all.iter().any(|image| image.id == one.image));
            if is_there {
                continue;
            }
            self.shared.metrics.count_given_up(one.disk_short);
            let uid = remembered.going.sandbox_uid();
            let publisher = &self.shared.publisher;
            let words = one.words(publisher.node_name(), self.shared.policy.unclaimed_grace);
            let (namespace, name) = (one.namespace, one.sandbox_name);
            publisher
                .memory_given_up(namespace, name, uid, &words)
                .await;
        }
    }

    /// Requests from the apiserver the answer that the plan needs. The next plan follows at once.
    pub(super) async fn ask(
        &self,
        pod: &PodUid,
        namespace: Option<&Namespace>,
        remembered: &mut Remembered,
    ) -> Turn {
        let Some(namespace) = namespace else {
            // An image lies in the directory of its namespace. Without a namespace there is
            // no image in question.
            remembered.going.answer = Some(Answer::default());
            return Turn::Again;
        };
        let shared = &self.shared;
        let publisher = &shared.publisher;
        let node = publisher.node_name();
        let asked = &shared.asked;
        let answer = asked.about(publisher.client(), node, namespace.as_str(), pod);
        let answer = tokio::select! {
            answer = answer => answer,
            () = self.stop.cancelled() => return Turn::Wait(RETRY),
        };
        match answer {
            Ok(answer) => {
                remembered.going.answer = Some(answer);
                Turn::Again
            }
            Err(error) => {
                let error = crate::reconcile::observe::words(&error);
                tracing::warn!(%pod, error, "cannot ask the apiserver for a Pod and its snapshots: its images are kept as they are");
                Turn::Wait(RETRY)
            }
        }
    }
}

/// Adds the result of one write to the result of the writes before it. `Err`: no further write is
/// tried.
///
/// A refusal that concerns one object holds up no other write: a user who suspends a sandbox reads
/// its snapshot, even if the apiserver refuses the Pod's conditions.
fn combine(
    before: Result<(), publish::Error>,
    written: Result<(), publish::Error>,
) -> Result<Result<(), publish::Error>, publish::Error> {
    match written {
        // The sandbox's lock is held: the task waits only once for an apiserver without an answer.
        Err(error) if !error.is_of_one_object() => Err(error),
        written => Ok(before.and(written)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(what: &str) -> publish::Error {
        let status = kube::core::Status::failure("words", "Invalid").with_code(422);
        publish::Error::Api {
            what: what.to_owned(),
            source: kube::Error::Api(status.boxed()),
        }
    }

    fn silent() -> publish::Error {
        publish::Error::Timeout {
            what: "anything".to_owned(),
        }
    }

    /// Returns the combined result as text. `Err`: no further write is tried.
    fn combined(
        before: Result<(), publish::Error>,
        written: Result<(), publish::Error>,
    ) -> Result<Option<String>, String> {
        match combine(before, written) {
            Ok(result) => Ok(result.err().map(|error| error.to_string())),
            Err(error) => Err(error.to_string()),
        }
    }

    #[test]
    fn a_refused_write_delays_no_other_write_and_is_reported_at_the_end() {
        let pod = Some(refused("the Pod").to_string());
        assert_eq!(combined(Ok(()), Ok(())), Ok(None));
        assert_eq!(combined(Ok(()), Err(refused("the Pod"))), Ok(pod.clone()));
        assert_eq!(combined(Err(refused("the Pod")), Ok(())), Ok(pod.clone()));
        let second = Err(refused("a snapshot"));
        assert_eq!(combined(Err(refused("the Pod")), second), Ok(pod));
    }

    #[test]
    fn a_silent_apiserver_is_not_called_again() {
        let words = silent().to_string();
        assert_eq!(combined(Ok(()), Err(silent())), Err(words.clone()));
        let after = combined(Err(refused("the Pod")), Err(silent()));
        assert_eq!(after, Err(words));
    }
}
