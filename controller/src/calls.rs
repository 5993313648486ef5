//! Calls to the apiserver, each with a timeout.
//!
//! A timeout does not tell whether the call took effect; the caller has to observe again.
//!
//! An overloaded apiserver (429) has not executed the request: the call waits as long as the answer
//! says and is sent again. Meanwhile [`Apiserver::is_pressed`] tells callers that can wait to do
//! so.

use std::{
    fmt::Debug,
    future::Future,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use jiff::Timestamp;
use k8s_openapi::api::{
    authentication::v1::{BoundObjectReference, TokenRequest, TokenRequestSpec},
    core::v1::ServiceAccount,
    events::v1::Event,
};
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

/// Field manager of creates in `managedFields`, as upstream's.
pub const FIELD_MANAGER: &str = "sandbox-controller";

/// Failure of a call.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The call timed out; it may have taken effect.
    #[error("no answer from the apiserver in {0:?}")]
    Timeout(Duration),
    /// The apiserver refused, or could not be reached. Displays the apiserver's message.
    #[error("{}", message_of(.0))]
    Kube(Box<kube::Error>),
    /// An object cannot be turned into JSON or back.
    #[error("cannot convert an object")]
    Convert(#[source] serde_json::Error),
}

/// Meaning of an error for the caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    NotFound,
    AlreadyExists,
    /// uid or resourceVersion differ from those in the request.
    Conflict,
    /// The call may have taken effect: observe again.
    Unknown,
    /// The call has had no effect.
    Refused,
}

impl Error {
    /// Reports whether the apiserver calls fields of the object invalid.
    ///
    /// The same call then fails again, unless something in the cluster had changed the object on
    /// its way.
    pub fn is_invalid(&self) -> bool {
        let Self::Kube(error) = self else {
            return false;
        };
        let refused = self.answer() == Answer::Refused;
        matches!(error.as_ref(), kube::Error::Api(status) if refused && names_invalid_fields(status))
    }

    /// Returns the apiserver's message if the controller lacks the permission for the call.
    pub fn forbidden(&self) -> Option<String> {
        match self {
            Self::Kube(error) if is_forbidden(error) => Some(message_of(error)),
            _ => None,
        }
    }

    /// Returns the meaning of the error for the caller.
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

/// Reports whether the controller lacks the permission for the call.
pub(crate) fn is_forbidden(error: &kube::Error) -> bool {
    matches!(error, kube::Error::Api(status) if status.is_forbidden())
}

/// Reports whether fields of the object are invalid. Only then does each cause name a field: the
/// refusal of an admission policy has the same code and reason.
fn names_invalid_fields(status: &Status) -> bool {
    let details = status.details.as_ref();
    let causes = details.map_or(&[][..], |details| &details.causes);
    status.reason == "Invalid"
        && !causes.is_empty()
        && causes.iter().all(|cause| !cause.field.is_empty())
}

/// Reports whether an admission webhook could not be called, which the apiserver reports as an
/// internal error.
///
/// Admission comes before the write, so that the call certainly had no effect. The fault may last
/// until an administrator repairs the webhook.
fn is_kept_out(status: &Status) -> bool {
    status.code == 500 && status.message.contains("failed calling webhook")
}

/// Returns the apiserver's message where it answered, as Go clients do.
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

/// Client with a time limit for each call.
#[derive(Clone)]
pub struct Apiserver {
    client: Client,
    timeout: Duration,
    /// Time until which the apiserver asked for fewer requests.
    pressed: Arc<Mutex<Option<Instant>>>,
    pace: Arc<Pace>,
    /// Set for calls that no request waits for.
    in_advance: Option<Advance>,
}

/// Number of objects in a page of a list.
const PAGE: u32 = 100;
/// Wait after a 429 without `retryAfterSeconds`.
const DEFAULT_RETRY_AFTER: Duration = Duration::from_secs(1);

impl Debug for Apiserver {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Apiserver(timeout {:?})", self.timeout)
    }
}

/// Namespaced kinds with a type known at compile time.
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
    /// Returns an apiserver that is called through `client`, each call at most `timeout` long.
    pub fn new(client: Client, timeout: Duration) -> Self {
        Self {
            client,
            timeout,
            pressed: Arc::default(),
            pace: Arc::default(),
            in_advance: None,
        }
    }

    /// Returns the same apiserver for calls that no request waits for: they yield to the others.
    pub fn in_advance(&self, advance: Advance) -> Self {
        Self {
            in_advance: Some(advance),
            ..self.clone()
        }
    }

    /// Marks the following writes as awaited until the returned guard is dropped.
    pub fn awaited(&self) -> Awaited {
        self.pace.awaited()
    }

    /// Returns the client, for watches.
    pub fn client(&self) -> Client {
        self.client.clone()
    }

    /// Reports whether a delay that the apiserver asked for (429) has not passed yet.
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
                        let wait =
                            wait.map_or(DEFAULT_RETRY_AFTER, |s| Duration::from_secs(s.into()));
                        self.pressed_for(wait);
                        tokio::time::sleep(wait).await;
                    }
                    other => return other,
                }
            }
        };
        // The wait for a turn does not count against the timeout.
        let _turn = match self.in_advance {
            Some(advance) => Some(self.pace.permit(advance).await),
            None => None,
        };
        match tokio::time::timeout(self.timeout, tries).await {
            Ok(result) => Ok(result?),
            Err(_) => Err(Error::Timeout(self.timeout)),
        }
    }

    /// Reads an object from the apiserver itself; `None` when it does not exist.
    pub async fn get<K: Namespaced>(
        &self,
        namespace: &str,
        name: &str,
    ) -> Result<Option<K>, Error> {
        let api: Api<K> = Api::namespaced(self.client(), namespace);
        self.limited(|| api.get_opt(name)).await
    }

    /// Reads an object without a namespace from the apiserver itself. `None` if it does not exist,
    /// or if this controller may not read it.
    pub async fn get_cluster<K>(&self, name: &str) -> Result<Option<K>, Error>
    where
        K: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned,
    {
        let api: Api<K> = Api::all(self.client());
        match self.limited(|| api.get_opt(name)).await {
            Err(Error::Kube(error)) if is_forbidden(&error) => Ok(None),
            found => found,
        }
    }

    /// Lists a namespace from the apiserver itself, without objects that cannot be deserialized.
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

    /// Lists a kind without namespaces from the apiserver itself, page by page, and keeps a part of
    /// each object. `None` if this controller may not list it.
    pub async fn list_cluster<K, T>(&self, keep: fn(K) -> T) -> Result<Option<Vec<T>>, Error>
    where
        K: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned,
    {
        let api: Api<K> = Api::all(self.client());
        let (mut kept, mut params) = (Vec::new(), ListParams::default().limit(PAGE));
        loop {
            let page = match self.limited(|| api.list(&params)).await {
                Err(Error::Kube(error)) if is_forbidden(&error) => return Ok(None),
                page => page?,
            };
            kept.extend(page.items.into_iter().map(keep));
            match page.metadata.continue_.filter(|token| !token.is_empty()) {
                Some(token) => params = params.continue_token(&token),
                None => return Ok(Some(kept)),
            }
        }
    }

    /// Lists a namespace from the apiserver itself. An object that cannot be deserialized is an
    /// error.
    pub async fn list_whole<K: Namespaced>(&self, namespace: &str) -> Result<Vec<K>, Error> {
        let api: Api<K> = Api::namespaced(self.client(), namespace);
        let params = ListParams::default();
        Ok(self.limited(|| api.list(&params)).await?.items)
    }

    /// Reports whether a cluster-scoped object exists.
    ///
    /// Returns true without the permission to read it, so that a missing permission causes no
    /// deletion of an image.
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

    /// Creates an object from JSON, so that fields unknown to this crate's types are sent too.
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

    /// Requests a token of a ServiceAccount for the apiserver. `secret`: name and UID of the Secret
    /// without which the token is not valid. Returns the token and the time at which it expires.
    pub async fn token(
        &self,
        namespace: &str,
        account: &str,
        secret: &(String, String),
    ) -> Result<(String, Timestamp), Error> {
        let api: Api<ServiceAccount> = Api::namespaced(self.client(), namespace);
        let request = TokenRequest {
            spec: Some(TokenRequestSpec {
                bound_object_ref: Some(BoundObjectReference {
                    api_version: Some("v1".to_owned()),
                    kind: Some("Secret".to_owned()),
                    name: Some(secret.0.clone()),
                    uid: Some(secret.1.clone()),
                }),
                ..TokenRequestSpec::default()
            }),
            ..TokenRequest::default()
        };
        let params = PostParams::default();
        let made = self.limited(|| api.create_token_request(account, &params, &request));
        let status = made.await?.status;
        let token = status.and_then(|made| Some((made.token?, made.expiration_timestamp?.0)));
        let incomplete = || serde::de::Error::custom("the answer has no token");
        token.ok_or_else(|| Error::Convert(incomplete()))
    }

    /// Applies a merge patch to an object.
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

    /// Applies a merge patch to the status of an object.
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

    /// Deletes the object with exactly this uid, and this resourceVersion when one is given.
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

    /// Deletes the object with exactly this uid in the foreground: it stays visible until its
    /// dependents are gone.
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
    fn only_invalid_fields_make_a_call_invalid(
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
    #[case::a_webhook_that_denies(
        400,
        "admission webhook \"w\" denied the request",
        Answer::Refused
    )]
    #[case::an_unreachable_webhook(
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
    #[case::an_unreachable_store(500, "etcdserver: request timed out", Answer::Unknown)]
    #[case::a_call_that_took_too_long(504, "Timeout: request did not complete", Answer::Unknown)]
    fn an_error_is_refused_where_it_certainly_had_no_effect(
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
