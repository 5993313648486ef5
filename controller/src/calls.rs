//! Calls to the apiserver, each with a timeout. A timeout says nothing about whether the call took effect, so that its only answer is to observe again.
//!
//! An apiserver that has too much to do (429) has not done what was asked: the call waits as long as it says and is sent again, and meanwhile [`Apiserver::is_pressed`] tells
//! those who can wait to do so.

use std::{
    fmt::Debug,
    future::Future,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use k8s_openapi::api::events::v1::Event;
use kube::{
    Api, Client, Resource, ResourceExt,
    api::{
        DeleteParams, DynamicObject, ListParams, Patch, PatchParams, PostParams, Preconditions,
        PropagationPolicy,
    },
    core::{ApiResource, DeserializeGuard, NamespaceResourceScope, Status},
};
use serde::de::DeserializeOwned;
use serde_json::Value;
use torpor_api::answers::is_of_another;

use crate::pace::{Advance, Awaited, Pace};

/// Name that creates are recorded under in `managedFields`, as upstream's.
pub const FIELD_MANAGER: &str = "sandbox-controller";

/// A call did not do what was asked.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// No answer in time; the call may have taken effect.
    #[error("no answer from the apiserver in {0:?}")]
    Timeout(Duration),
    /// The apiserver refused, or could not be reached. Shown as the apiserver says it.
    #[error("{}", message_of(.0))]
    Kube(Box<kube::Error>),
    /// An object cannot be turned into JSON or back.
    #[error("cannot convert an object")]
    Convert(#[source] serde_json::Error),
}

/// What an error means for the caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    NotFound,
    AlreadyExists,
    /// The object is not the one that was meant: uid or resourceVersion differ.
    Conflict,
    /// It may or may not have taken effect: observe again.
    Unknown,
    /// The apiserver said no.
    Refused,
}

impl Error {
    /// Whether the apiserver calls fields of the object invalid: the same call fails again, unless
    /// something in the cluster had changed the object on its way.
    pub fn is_invalid(&self) -> bool {
        let Self::Kube(error) = self else {
            return false;
        };
        let refused = self.answer() == Answer::Refused;
        matches!(error.as_ref(), kube::Error::Api(status) if refused && names_invalid_fields(status))
    }

    /// What the error means for the caller.
    pub fn answer(&self) -> Answer {
        match self {
            Self::Timeout(_) => Answer::Unknown,
            Self::Convert(_) => Answer::Refused,
            Self::Kube(error) => match error.as_ref() {
                kube::Error::Api(status) if status.is_not_found() => Answer::NotFound,
                kube::Error::Api(status) if status.is_already_exists() => Answer::AlreadyExists,
                kube::Error::Api(status) if status.is_conflict() => Answer::Conflict,
                kube::Error::Api(status) if is_of_another(status) => Answer::Conflict,
                kube::Error::Api(status) if status.code < 500 => Answer::Refused,
                kube::Error::Api(status) if is_kept_out(status) => Answer::Refused,
                _ => Answer::Unknown,
            },
        }
    }
}

/// Whether the controller has no right to ask.
pub(crate) fn is_forbidden(error: &kube::Error) -> bool {
    matches!(error, kube::Error::Api(status) if status.is_forbidden())
}

/// Whether fields of the object are invalid. Only then is each cause a field: an admission policy
/// that refuses has the same code and reason.
fn names_invalid_fields(status: &Status) -> bool {
    let details = status.details.as_ref();
    let causes = details.map_or(&[][..], |details| &details.causes);
    status.reason == "Invalid"
        && !causes.is_empty()
        && causes.iter().all(|cause| !cause.field.is_empty())
}

/// Whether an admission webhook could not be asked, which is an internal error to the apiserver. Admission comes before the write, so that it is certain that nothing took effect; and it may
/// last until somebody sees it and mends it.
fn is_kept_out(status: &Status) -> bool {
    status.code == 500 && status.message.contains("failed calling webhook")
}

/// The apiserver's own words where it answered, which is what Go clients show.
fn message_of(error: &kube::Error) -> String {
    match error {
        kube::Error::Api(status) if !status.message.is_empty() => status.message.clone(),
        other => other.to_string(),
    }
}

impl From<kube::Error> for Error {
    fn from(error: kube::Error) -> Self {
        Self::Kube(Box::new(error))
    }
}

/// A client with a limit on how long each call may take.
#[derive(Clone)]
pub struct Apiserver {
    client: Client,
    timeout: Duration,
    /// Until when the apiserver asked to be left alone.
    pressed: Arc<Mutex<Option<Instant>>>,
    pace: Arc<Pace>,
    /// Nobody waits for these calls.
    in_advance: Option<Advance>,
}

/// How long to wait when the apiserver does not say.
const BUSY: Duration = Duration::from_secs(1);

impl Debug for Apiserver {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Apiserver(timeout {:?})", self.timeout)
    }
}

/// Kinds that live in namespaces and whose type is known when compiling.
pub trait Namespaced:
    Resource<DynamicType = (), Scope = NamespaceResourceScope> + Clone + Debug + DeserializeOwned
{
}
impl<K> Namespaced for K where
    K: Resource<DynamicType = (), Scope = NamespaceResourceScope>
        + Clone
        + Debug
        + DeserializeOwned
{
}

impl Apiserver {
    /// Calls through `client`, each at most `timeout` long.
    pub fn new(client: Client, timeout: Duration) -> Self {
        Self {
            client,
            timeout,
            pressed: Arc::default(),
            pace: Arc::default(),
            in_advance: None,
        }
    }

    /// The same apiserver, for calls that nobody waits for: they give way to the others.
    pub fn in_advance(&self, advance: Advance) -> Self {
        Self {
            in_advance: Some(advance),
            ..self.clone()
        }
    }

    /// Says that somebody waits for what is written until this is dropped.
    pub fn awaited(&self) -> Awaited {
        self.pace.awaited()
    }

    /// The client, for watches.
    pub fn client(&self) -> Client {
        self.client.clone()
    }

    /// Whether the apiserver has asked for less within the last moments.
    pub fn is_pressed(&self) -> bool {
        let pressed = self.pressed.lock().unwrap_or_else(PoisonError::into_inner);
        pressed.is_some_and(|until| until > Instant::now())
    }

    fn pressed_for(&self, wait: Duration) {
        let mut pressed = self.pressed.lock().unwrap_or_else(PoisonError::into_inner);
        let until = Instant::now() + wait;
        *pressed = Some(pressed.map_or(until, |known| known.max(until)));
    }

    async fn limited<T, F>(&self, call: impl Fn() -> F) -> Result<T, Error>
    where
        F: Future<Output = Result<T, kube::Error>>,
    {
        let tries = async {
            loop {
                match call().await {
                    Err(kube::Error::Api(status)) if status.code == 429 => {
                        let asked = status.details.as_ref().map(|d| d.retry_after_seconds);
                        let wait = asked.filter(|seconds| *seconds > 0);
                        let wait = wait.map_or(BUSY, |s| Duration::from_secs(s.into()));
                        self.pressed_for(wait);
                        tokio::time::sleep(wait).await;
                    }
                    other => return other,
                }
            }
        };
        // Waiting for one's turn is no part of the call.
        let _turn = match self.in_advance {
            Some(advance) => Some(self.pace.turn(advance).await),
            None => None,
        };
        match tokio::time::timeout(self.timeout, tries).await {
            Ok(result) => Ok(result?),
            Err(_) => Err(Error::Timeout(self.timeout)),
        }
    }

    /// Reads from the apiserver itself; `None` when there is no such object.
    pub async fn get<K: Namespaced>(
        &self,
        namespace: &str,
        name: &str,
    ) -> Result<Option<K>, Error> {
        let api: Api<K> = Api::namespaced(self.client(), namespace);
        self.limited(|| api.get_opt(name)).await
    }

    /// Reads all of a namespace from the apiserver itself, but for what cannot be read.
    pub async fn list<K: Namespaced>(&self, namespace: &str) -> Result<Vec<K>, Error> {
        let api: Api<DeserializeGuard<K>> = Api::namespaced(self.client(), namespace);
        let params = ListParams::default();
        let listed = self.limited(|| api.list(&params)).await?;
        Ok(listed
            .items
            .into_iter()
            .filter_map(|object| object.0.ok())
            .collect())
    }

    /// Whether a cluster-scoped object exists. Without the right to read it the answer is yes, so
    /// that a missing right costs no image.
    pub async fn exists<K>(&self, name: &str) -> Result<bool, Error>
    where
        K: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned,
    {
        let api: Api<K> = Api::all(self.client());
        match self.limited(|| api.get_metadata_opt(name)).await {
            Ok(found) => Ok(found.is_some()),
            Err(Error::Kube(error)) if is_forbidden(&error) => Ok(true),
            Err(error) => Err(error),
        }
    }

    /// Creates an object from JSON, so that fields that our types do not know are sent too.
    pub async fn create<K: Namespaced>(&self, namespace: &str, object: Value) -> Result<K, Error> {
        let resource = ApiResource::erase::<K>(&());
        let api: Api<DynamicObject> = Api::namespaced_with(self.client(), namespace, &resource);
        let object: DynamicObject = serde_json::from_value(object).map_err(Error::Convert)?;
        let params = PostParams {
            field_manager: Some(FIELD_MANAGER.to_owned()),
            ..PostParams::default()
        };
        let created = self.limited(|| api.create(&params, &object)).await?;
        let created = serde_json::to_value(created).map_err(Error::Convert)?;
        serde_json::from_value(created).map_err(Error::Convert)
    }

    /// Merge patch of an object.
    pub async fn patch<K: Namespaced>(
        &self,
        namespace: &str,
        name: &str,
        patch: &Value,
    ) -> Result<K, Error> {
        let api: Api<K> = Api::namespaced(self.client(), namespace);
        let (params, patch) = (PatchParams::default(), Patch::Merge(patch));
        self.limited(|| api.patch(name, &params, &patch)).await
    }

    /// Merge patch of the status of an object.
    pub async fn patch_status<K: Namespaced>(
        &self,
        namespace: &str,
        name: &str,
        patch: &Value,
    ) -> Result<K, Error> {
        let api: Api<K> = Api::namespaced(self.client(), namespace);
        let (params, patch) = (PatchParams::default(), Patch::Merge(patch));
        self.limited(|| api.patch_status(name, &params, &patch))
            .await
    }

    /// Deletes exactly the object with this uid, and this resourceVersion when one is given.
    pub async fn delete<K: Namespaced>(
        &self,
        namespace: &str,
        name: &str,
        uid: &str,
        resource_version: Option<&str>,
    ) -> Result<(), Error> {
        let preconditions = Preconditions {
            uid: Some(uid.to_owned()),
            resource_version: resource_version.map(str::to_owned),
        };
        self.delete_fenced::<K>(namespace, name, preconditions, None)
            .await
    }

    /// Deletes exactly the object with this uid, which stays visible until what it owns is gone.
    pub async fn delete_foreground<K: Namespaced>(
        &self,
        namespace: &str,
        name: &str,
        uid: &str,
    ) -> Result<(), Error> {
        let preconditions = Preconditions {
            uid: Some(uid.to_owned()),
            resource_version: None,
        };
        let foreground = Some(PropagationPolicy::Foreground);
        self.delete_fenced::<K>(namespace, name, preconditions, foreground)
            .await
    }

    async fn delete_fenced<K: Namespaced>(
        &self,
        namespace: &str,
        name: &str,
        preconditions: Preconditions,
        propagation_policy: Option<PropagationPolicy>,
    ) -> Result<(), Error> {
        let api: Api<K> = Api::namespaced(self.client(), namespace);
        let params = DeleteParams {
            preconditions: Some(preconditions),
            propagation_policy,
            ..DeleteParams::default()
        };
        self.limited(|| api.delete(name, &params)).await.map(drop)
    }

    /// Publishes an Event.
    pub async fn publish(&self, event: &Event) -> Result<(), Error> {
        let namespace = event.namespace().unwrap_or_else(|| "default".to_owned());
        let api: Api<Event> = Api::namespaced(self.client(), &namespace);
        let params = PostParams::default();
        self.limited(|| api.create(&params, event)).await.map(drop)
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;
    use serde_json::json;

    use super::*;

    #[rstest]
    #[case::a_field("Invalid", 422, json!([{"field": "spec.x", "message": "unknown"}]), true)]
    #[case::an_admission_policy("Invalid", 422, json!([{"message": "pods \"a\" is forbidden"}]), false)]
    #[case::no_causes("Invalid", 422, json!([]), false)]
    #[case::a_limit_range("Forbidden", 403, json!([{"field": "spec.x"}]), false)]
    #[case::another_of_that_name("Invalid", 422, json!([{"field": "metadata.uid"}]), false)]
    fn only_invalid_fields_are_beyond_help(
        #[case] reason: &str,
        #[case] code: u16,
        #[case] causes: Value,
        #[case] expected: bool,
    ) {
        let field = causes[0]["field"].as_str().unwrap_or_default();
        let status = json!({
            "status": "Failure", "reason": reason, "code": code, "details": {"causes": causes},
            "message": format!("Pod \"s\" is invalid: {field}: Invalid value"),
        });
        let status: Status = serde_json::from_value(status).unwrap();
        let error = Error::from(kube::Error::Api(status.boxed()));
        assert_eq!(error.is_invalid(), expected);
    }

    #[rstest]
    #[case::a_quota(403, "pods \"a\" is forbidden: exceeded quota: q", Answer::Refused)]
    #[case::a_webhook_that_says_no(
        400,
        "admission webhook \"w\" denied the request",
        Answer::Refused
    )]
    #[case::a_webhook_that_is_away(
        500,
        "Internal error occurred: failed calling webhook \"w\": failed to call webhook: Post \"https://w.ns.svc:443/\": connection refused",
        Answer::Refused
    )]
    #[case::another_of_that_name(
        422,
        "Pod \"s\" is invalid: metadata.uid: Invalid value: \"u-1\": field is immutable",
        Answer::Conflict
    )]
    #[case::another_field(
        422,
        "Pod \"s\" is invalid: metadata.ownerReferences.uid: Invalid value: \"\": must not be empty",
        Answer::Refused
    )]
    #[case::a_store_that_is_away(500, "etcdserver: request timed out", Answer::Unknown)]
    #[case::a_call_that_took_too_long(504, "Timeout: request did not complete", Answer::Unknown)]
    fn it_is_known_whether_a_call_took_effect_where_that_is_certain(
        #[case] code: u16,
        #[case] message: &str,
        #[case] answer: Answer,
    ) {
        let status = Status::failure(message, "X").with_code(code);
        let error = Error::from(kube::Error::Api(status.boxed()));
        assert_eq!(error.answer(), answer);
        assert_eq!(error.to_string(), message);
    }
}
