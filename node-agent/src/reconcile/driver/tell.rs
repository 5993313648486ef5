//! What a plan has to say, said to the API.

use std::sync::Arc;

use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use torpor_api::snapshot::SandboxSnapshot;
use torpor_core::status::SnapshotState;

use super::written::Written;
use super::{Driver, Look};
use crate::report::publish;

impl Driver {
    pub(super) async fn tell(
        &self,
        pod: Option<&Pod>,
        snapshots: &[Arc<SandboxSnapshot>],
        look: &Look,
        written: &mut Written,
    ) -> Result<(), publish::Error> {
        let publisher = &self.shared.publisher;
        let mut told = Ok(());
        if let Some(pod) = pod {
            told = also(told, publisher.pod(pod, &look.plan.status).await)?;
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
            let one = publisher.snapshot(snapshot, draft, image).await;
            told = also(told, one.map(|after| written.note(snapshot, after)))?;
        }
        told
    }
}

/// What is to be answered in the end of all that was `told`, and of `one` more. `Err`: at once.
///
/// What the apiserver does not take of one object holds up no other: who suspends a sandbox reads its snapshot, whatever
/// becomes of the Pod's conditions.
fn also(
    told: Result<(), publish::Error>,
    one: Result<(), publish::Error>,
) -> Result<Result<(), publish::Error>, publish::Error> {
    match one {
        // The sandbox' lock is held: who does not answer is not waited for once for each.
        Err(error) if !error.is_of_one_object() => Err(error),
        one => Ok(told.and(one)),
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

    /// What was answered of which object; `Err`: at once.
    fn answered(
        told: Result<(), publish::Error>,
        one: Result<(), publish::Error>,
    ) -> Result<Option<String>, String> {
        match also(told, one) {
            Ok(told) => Ok(told.err().map(|error| error.to_string())),
            Err(error) => Err(error.to_string()),
        }
    }

    #[test]
    fn what_is_not_taken_of_one_object_holds_up_no_other_and_is_told_in_the_end() {
        let pod = Some(refused("the Pod").to_string());
        assert_eq!(answered(Ok(()), Ok(())), Ok(None));
        assert_eq!(answered(Ok(()), Err(refused("the Pod"))), Ok(pod.clone()));
        assert_eq!(answered(Err(refused("the Pod")), Ok(())), Ok(pod.clone()));
        let second = Err(refused("a snapshot"));
        assert_eq!(answered(Err(refused("the Pod")), second), Ok(pod));
    }

    #[test]
    fn who_does_not_answer_is_not_asked_again() {
        let words = silent().to_string();
        assert_eq!(answered(Ok(()), Err(silent())), Err(words.clone()));
        let after = answered(Err(refused("the Pod")), Err(silent()));
        assert_eq!(after, Err(words));
    }
}
