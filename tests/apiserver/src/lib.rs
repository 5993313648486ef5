//! An API server in memory, for tests.
//!
//! It serves create, get, list, watch, merge patch, the status subresource, replace and delete,
//! with uids, resourceVersions, generations, preconditions, finalizers, graceful deletion of Pods
//! and garbage collection by owner. It is a tower service, so that the real client is used
//! unchanged.

use std::{
    collections::BTreeMap,
    convert::Infallible,
    sync::{Arc, Mutex},
};

use axum::body::{Body, Bytes};
use futures::{StreamExt, stream};
use http::{Method, Request, Response, StatusCode, header::CONTENT_TYPE};
use http_body_util::BodyExt;
use kube::Client;
use serde_json::{Value, json};
use tokio::sync::{Semaphore, watch};

pub mod merge_patch;

mod confined;
mod page;
mod state;

use self::{page::Page, state::State};

/// Plural, namespace (empty for cluster-scoped kinds), name.
pub type Key = (String, String, String);

/// Write that was tried.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Write {
    /// create, patch, patch status, replace, delete
    pub verb: &'static str,
    pub kind: String,
    pub name: String,
    pub code: u16,
}

/// Fault that a test sets for the next matching write.
#[derive(Clone, Debug)]
pub struct Fault {
    pub verb: &'static str,
    pub kind: &'static str,
    pub answer: FaultAnswer,
}

/// Result of a faulty write.
#[derive(Clone, Copy, Debug)]
pub enum FaultAnswer {
    /// Refused with this code, without effect.
    Refuse(u16),
    /// Refused because this field is invalid (422), without effect.
    Invalid(&'static str),
    /// Refused because the server is busy (429), with the seconds after which to try again.
    Busy(u32),
    /// Refused because the name is taken, whether such an object exists or not.
    Taken,
    /// The write takes effect, but the answer never comes.
    LoseAnswer,
    /// The write takes effect, but the answer is a timeout (504): the client knows as little as
    /// without an answer, but at once.
    TooLate,
}

/// API server in memory; clones share its objects.
#[derive(Clone, Debug)]
pub struct Apiserver {
    state: Arc<Mutex<State>>,
    changed: Arc<watch::Sender<u64>>,
}

/// Parsed request.
struct Call {
    kind: String,
    namespace: String,
    name: Option<String>,
    status: bool,
    /// The patch is a strategic merge patch.
    strategic: bool,
    query: BTreeMap<String, String>,
}

type Answer = Result<Value, (StatusCode, &'static str, String)>;

const KINDS: [(&str, &str, &str); 26] = [
    ("namespaces", "Namespace", "v1"),
    ("secrets", "Secret", "v1"),
    ("configmaps", "ConfigMap", "v1"),
    ("serviceaccounts", "ServiceAccount", "v1"),
    ("pods", "Pod", "v1"),
    ("services", "Service", "v1"),
    ("persistentvolumeclaims", "PersistentVolumeClaim", "v1"),
    ("nodes", "Node", "v1"),
    ("sandboxes", "Sandbox", "agents.x-k8s.io/v1beta1"),
    ("sandboxsnapshots", "SandboxSnapshot", "torpor.dev/v1alpha1"),
    ("sandboxnodes", "SandboxNode", "torpor.dev/v1alpha1"),
    ("snapshotclasses", "SnapshotClass", "torpor.dev/v1alpha1"),
    ("runtimeclasses", "RuntimeClass", "node.k8s.io/v1"),
    ("podsnapshots", "PodSnapshot", "podsnapshot.gke.io/v1"),
    (
        "podsnapshotmanualtriggers",
        "PodSnapshotManualTrigger",
        "podsnapshot.gke.io/v1",
    ),
    ("deployments", "Deployment", "apps/v1"),
    ("daemonsets", "DaemonSet", "apps/v1"),
    (
        "customresourcedefinitions",
        "CustomResourceDefinition",
        "apiextensions.k8s.io/v1",
    ),
    ("events", "Event", "events.k8s.io/v1"),
    ("leases", "Lease", "coordination.k8s.io/v1"),
    ("tokenreviews", "TokenReview", "authentication.k8s.io/v1"),
    (
        "subjectaccessreviews",
        "SubjectAccessReview",
        "authorization.k8s.io/v1",
    ),
    (
        "sandboxclaims",
        "SandboxClaim",
        "extensions.agents.x-k8s.io/v1beta1",
    ),
    ("networkpolicies", "NetworkPolicy", "networking.k8s.io/v1"),
    (
        "sandboxtemplates",
        "SandboxTemplate",
        "extensions.agents.x-k8s.io/v1beta1",
    ),
    (
        "sandboxwarmpools",
        "SandboxWarmPool",
        "extensions.agents.x-k8s.io/v1beta1",
    ),
];

impl Default for Apiserver {
    fn default() -> Self {
        Self::new()
    }
}

impl Apiserver {
    /// Returns a server without any object.
    pub fn new() -> Self {
        Self {
            state: Arc::default(),
            changed: Arc::new(watch::channel(0).0),
        }
    }

    /// Returns a server whose objects have their real creation time instead of the beginning of
    /// 2026.
    pub fn with_clock() -> Self {
        let server = Self::new();
        server.state.lock().unwrap().has_clock = true;
        server
    }

    /// Returns the real client, connected to this server.
    pub fn client(&self) -> Client {
        let server = self.clone();
        Client::new(
            tower::service_fn(move |request| {
                let server = server.clone();
                async move { Ok::<_, Infallible>(server.answer(request).await) }
            }),
            "default",
        )
    }

    /// Returns a client whose every call waits until the gate lets it through.
    pub fn gated_client(&self, gate: &Arc<Semaphore>) -> Client {
        let (server, gate) = (self.clone(), Arc::clone(gate));
        Client::new(
            tower::service_fn(move |request| {
                let (server, gate) = (server.clone(), Arc::clone(&gate));
                async move {
                    // A closed gate belongs to a process that is dead.
                    if let Ok(permit) = gate.acquire().await {
                        permit.forget();
                        return Ok::<_, Infallible>(server.answer(request).await);
                    }
                    std::future::pending().await
                }
            }),
            "default",
        )
    }

    // --- access for tests ---

    /// Returns the object, if it exists.
    pub fn get(&self, kind: &str, namespace: &str, name: &str) -> Option<Value> {
        self.state
            .lock()
            .unwrap()
            .objects
            .get(&key(kind, namespace, name))
            .cloned()
    }

    /// Returns all objects of a kind.
    pub fn list(&self, kind: &str) -> Vec<Value> {
        let state = self.state.lock().unwrap();
        state
            .objects
            .iter()
            .filter(|(key, _)| key.0 == kind)
            .map(|(_, v)| v.clone())
            .collect()
    }

    /// Creates an object as a user would.
    pub fn create(&self, kind: &str, object: Value) -> Value {
        let namespace = object["metadata"]["namespace"]
            .as_str()
            .unwrap_or_default()
            .to_owned();
        let mut state = self.state.lock().unwrap();
        let created = state.create(kind, &namespace, object).unwrap();
        self.notify(state.version);
        created
    }

    /// Applies a merge patch to everything, status included, as no client could.
    pub fn edit(&self, kind: &str, namespace: &str, name: &str, patch: &Value) -> Value {
        let mut state = self.state.lock().unwrap();
        let mut object = state.objects[&key(kind, namespace, name)].clone();
        merge_patch::apply(&mut object, patch);
        let stored = state.store(key(kind, namespace, name), object);
        self.notify(state.version);
        stored
    }

    /// Deletes an object as a user would: gracefully where the kind has that.
    pub fn delete(&self, kind: &str, namespace: &str, name: &str) {
        let mut state = self.state.lock().unwrap();
        state.delete(&key(kind, namespace, name));
        self.notify(state.version);
    }

    /// Removes an object at once, as a kubelet does at the end of a Pod.
    pub fn remove(&self, kind: &str, namespace: &str, name: &str) {
        let mut state = self.state.lock().unwrap();
        state.remove(&key(kind, namespace, name));
        self.notify(state.version);
    }

    /// Authenticates clients with this token as the user of the token's name.
    pub fn accept_token(&self, token: &str) {
        self.state.lock().unwrap().tokens.push(token.to_owned());
    }

    /// Gives a user a right: SubjectAccessReviews with this user and these attributes are allowed.
    pub fn grant(&self, user: &str, attributes: Value) {
        let right = (user.to_owned(), attributes);
        self.state.lock().unwrap().rights.push(right);
    }

    /// Deletes objects whose owners are gone. (Objects that exist when their owner goes are deleted
    /// with it.)
    pub fn collect_garbage(&self) {
        let mut state = self.state.lock().unwrap();
        state.collect_garbage();
        self.notify(state.version);
    }

    /// Sets a fault for the next matching write.
    pub fn fail(&self, fault: Fault) {
        self.state.lock().unwrap().faults.push(fault);
    }

    /// Removes all faults.
    pub fn forget_faults(&self) {
        self.state.lock().unwrap().faults.clear();
    }

    /// Returns the reads of single objects since the last call.
    pub fn take_reads(&self) -> Vec<String> {
        std::mem::take(&mut self.state.lock().unwrap().reads)
    }

    /// Returns the kinds that were listed since the last call, each with the number of objects in
    /// the answer.
    pub fn take_lists(&self) -> Vec<(String, usize)> {
        std::mem::take(&mut self.state.lock().unwrap().lists)
    }

    /// Returns the writes since the last call.
    pub fn take_all_writes(&self) -> Vec<Write> {
        std::mem::take(&mut self.state.lock().unwrap().writes)
    }

    /// Returns the writes since the last call, without those of Events.
    pub fn take_writes(&self) -> Vec<Write> {
        self.take_all_writes()
            .into_iter()
            .filter(|write| write.kind != "events")
            .collect()
    }

    /// Waits until the condition holds, which is checked at each change.
    ///
    /// # Panics
    /// After 20 s, with all objects.
    pub async fn until(&self, what: &str, wish: impl Fn(&Self) -> bool) {
        let mut changed = self.changed.subscribe();
        let wait = async {
            while !wish(self) {
                changed.changed().await.unwrap();
            }
        };
        let limit = std::time::Duration::from_secs(20);
        if tokio::time::timeout(limit, wait).await.is_err() {
            panic!(
                "not seen within {limit:?}: {what}\n{:#?}",
                self.state.lock().unwrap().objects
            );
        }
    }

    fn notify(&self, version: u64) {
        self.changed.send_replace(version);
    }

    // --- HTTP ---

    async fn answer(&self, request: Request<kube::client::Body>) -> Response<Body> {
        let method = request.method().clone();
        let mut call = Call::of(request.uri());
        let format = request.headers().get(CONTENT_TYPE);
        call.strategic =
            format.is_some_and(|value| value == "application/strategic-merge-patch+json");
        if self.forbids(&call) {
            let message = format!("{} is forbidden: made to fail", call.kind);
            return respond(Err((StatusCode::FORBIDDEN, "Forbidden", message)));
        }
        let bytes = request.into_body().collect().await.unwrap().to_bytes();
        let body: Value = serde_json::from_slice(&bytes).unwrap_or(Value::Null);
        if method == Method::GET {
            return match (&call.name, call.query.contains_key("watch")) {
                (None, true) => self.watch(&call),
                (None, false) => respond(Ok(self.list_answer(&call))),
                (Some(name), _) => {
                    let read = format!("{} {name}", call.kind);
                    self.state.lock().unwrap().reads.push(read);
                    let found = self.get(&call.kind, &call.namespace, name);
                    respond(found.ok_or_else(|| not_found(&call.kind, name)))
                }
            };
        }
        let (verb, name) = match (&method, &call) {
            (&Method::POST, _) => (
                "create",
                body["metadata"]["name"].as_str().unwrap_or_default(),
            ),
            (&Method::PATCH, Call { status: true, .. }) => ("patch status", ""),
            (&Method::PATCH, _) => ("patch", ""),
            (&Method::PUT, _) => ("replace", ""),
            (&Method::DELETE, _) => ("delete", ""),
            other => panic!("{} is not served", other.0),
        };
        let name = call.name.clone().unwrap_or_else(|| name.to_owned());
        let fault = self.next_fault(verb, &call.kind);
        let answer = match fault {
            Some(FaultAnswer::Refuse(code)) => {
                let status = StatusCode::from_u16(code).unwrap();
                let reason = match code {
                    403 => "Forbidden",
                    409 => "Conflict",
                    _ => "Refused",
                };
                Err((
                    status,
                    reason,
                    format!("{verb} {} {name}: made to fail", call.kind),
                ))
            }
            Some(FaultAnswer::Invalid(field)) => {
                let message = format!("{} \"{name}\" is invalid: {field}: made to fail", call.kind);
                Err((StatusCode::UNPROCESSABLE_ENTITY, "Invalid", message))
            }
            Some(FaultAnswer::Busy(_)) => Err((
                StatusCode::TOO_MANY_REQUESTS,
                "TooManyRequests",
                "the server is busy: made to fail".to_owned(),
            )),
            Some(FaultAnswer::Taken) => {
                let message = format!("{} \"{name}\" already exists", call.kind);
                Err((StatusCode::CONFLICT, "AlreadyExists", message))
            }
            _ => self.write(verb, &call, &name, body),
        };
        let code = answer
            .as_ref()
            .map_or_else(|(code, ..)| code.as_u16(), |_| 200);
        let write = Write {
            verb,
            kind: call.kind,
            name,
            code,
        };
        self.state.lock().unwrap().writes.push(write);
        match fault {
            Some(FaultAnswer::LoseAnswer) => std::future::pending().await,
            Some(FaultAnswer::TooLate) => respond(Err((
                StatusCode::GATEWAY_TIMEOUT,
                "Timeout",
                "no answer in time: made to fail".to_owned(),
            ))),
            Some(FaultAnswer::Busy(seconds)) => busy(answer, seconds),
            Some(FaultAnswer::Invalid(field)) => invalid(answer, field),
            _ => respond(answer),
        }
    }

    fn next_fault(&self, verb: &str, kind: &str) -> Option<FaultAnswer> {
        let mut state = self.state.lock().unwrap();
        let at = state
            .faults
            .iter()
            .position(|f| f.verb == verb && f.kind == kind)?;
        Some(state.faults.remove(at).answer)
    }

    fn write(&self, verb: &str, call: &Call, name: &str, body: Value) -> Answer {
        let mut state = self.state.lock().unwrap();
        let key = key(&call.kind, &call.namespace, name);
        let answer = match verb {
            // Reviews are not stored.
            "create" if call.kind == "tokenreviews" => {
                let known = state
                    .tokens
                    .iter()
                    .any(|token| body["spec"]["token"] == **token);
                let user = if known {
                    json!({"username": body["spec"]["token"], "groups": ["testers"]})
                } else {
                    json!({})
                };
                let status = json!({"authenticated": known, "user": user});
                Ok(json!({"spec": {}, "status": status}))
            }
            "create" if call.kind == "subjectaccessreviews" => {
                let (user, asked) = (&body["spec"]["user"], &body["spec"]["resourceAttributes"]);
                let allowed = state
                    .rights
                    .iter()
                    .any(|(whose, right)| *user == **whose && asked == right);
                Ok(json!({"spec": {}, "status": {"allowed": allowed}}))
            }
            // The subresource `token`, the only one that is created. As the apiserver's, the token
            // is bound to an object that exists
            // (pkg/registry/core/serviceaccount/storage/token.go).
            "create" if call.kind == "serviceaccounts" && call.name.is_some() => {
                let bound = &body["spec"]["boundObjectRef"];
                let named = bound["name"].as_str().unwrap_or_default().to_owned();
                let secret = ("secrets".to_owned(), call.namespace.clone(), named);
                let account = state.objects.contains_key(&key);
                match state.objects.get(&secret) {
                    Some(held) if account && held["metadata"]["uid"] == bound["uid"] => {
                        let token = format!("token of {name} for {}", bound["uid"]);
                        let expires = jiff::Timestamp::now() + jiff::SignedDuration::from_hours(1);
                        let status = json!({"token": token, "expirationTimestamp": expires});
                        Ok(json!({"spec": body["spec"], "status": status}))
                    }
                    _ => Err(not_found(&call.kind, name)),
                }
            }
            "create" => state.create(&call.kind, &call.namespace, body),
            "patch" | "patch status" if call.strategic => {
                let body = state.strategic(&key, body);
                state.patch(&key, &body, call.status)
            }
            "patch" | "patch status" => state.patch(&key, &body, call.status),
            "replace" => state.replace(&key, body),
            _ => state.checked_delete(&key, &body),
        };
        self.notify(state.version);
        answer
    }

    fn list_answer(&self, call: &Call) -> Value {
        let mut state = self.state.lock().unwrap();
        let page = Page::of(&call.query, state.version);
        let all = state.objects.iter();
        let (items, token) = page.cut(all.filter(|(key, object)| call.wants(key, object)));
        let (_, kind, api_version) = *KINDS.iter().find(|(p, ..)| *p == call.kind).unwrap();
        let size = items.len();
        let answer = json!({
            "kind": format!("{kind}List"),
            "apiVersion": api_version,
            "metadata": {"resourceVersion": page.version.to_string(), "continue": token},
            "items": items,
        });
        state.lists.push((call.kind.clone(), size));
        answer
    }

    fn watch(&self, call: &Call) -> Response<Body> {
        let from = call
            .query
            .get("resourceVersion")
            .and_then(|v| v.parse().ok())
            .unwrap_or(0);
        let call = Arc::new(Call {
            query: call.query.clone(),
            ..call.copy()
        });
        let (server, changed) = (self.clone(), self.changed.subscribe());
        let lines = stream::unfold((from, changed), move |(from, mut changed)| {
            let (server, call) = (server.clone(), Arc::clone(&call));
            async move {
                loop {
                    let (lines, version) = server.events_after(from, &call);
                    if !lines.is_empty() {
                        return Some((lines, (version, changed)));
                    }
                    if changed.changed().await.is_err() {
                        return None;
                    }
                }
            }
        });
        let body = Body::from_stream(lines.map(|lines| Ok::<_, Infallible>(Bytes::from(lines))));
        Response::new(body)
    }

    fn events_after(&self, from: u64, call: &Call) -> (String, u64) {
        let state = self.state.lock().unwrap();
        let lines = state
            .history
            .iter()
            .filter(|(version, _, key, object)| *version > from && call.wants(key, object))
            .map(|(_, type_, _, object)| format!("{}\n", json!({"type": type_, "object": object})))
            .collect();
        (lines, state.version)
    }
}

impl Call {
    fn of(uri: &http::Uri) -> Self {
        let path: Vec<&str> = uri
            .path()
            .split('/')
            .filter(|part| !part.is_empty())
            .collect();
        let mut rest = if path[0] == "api" {
            &path[2..]
        } else {
            &path[3..]
        };
        let mut namespace = "";
        if rest[0] == "namespaces" && rest.len() > 2 {
            namespace = rest[1];
            rest = &rest[2..];
        }
        let query = uri
            .query()
            .unwrap_or_default()
            .split('&')
            .filter_map(|pair| {
                let (key, value) = pair.split_once('=')?;
                Some((
                    key.to_owned(),
                    value.replace("%2F", "/").replace("%3D", "="),
                ))
            });
        Self {
            kind: rest[0].to_owned(),
            namespace: namespace.to_owned(),
            name: rest.get(1).map(|name| (*name).to_owned()),
            status: rest.get(2) == Some(&"status"),
            strategic: false,
            query: query.collect(),
        }
    }

    fn copy(&self) -> Self {
        Self {
            kind: self.kind.clone(),
            namespace: self.namespace.clone(),
            name: self.name.clone(),
            status: self.status,
            strategic: self.strategic,
            query: self.query.clone(),
        }
    }

    fn wants(&self, key: &Key, object: &Value) -> bool {
        let label = |selector: &String| match selector.split_once('=') {
            Some((name, value)) => object["metadata"]["labels"][name] == value,
            None => object["metadata"]["labels"].get(selector).is_some(),
        };
        key.0 == self.kind
            && (self.namespace.is_empty() || key.1 == self.namespace)
            && self.query.get("labelSelector").is_none_or(label)
            && self.query.get("fieldSelector").is_none_or(|selector| {
                match selector.split_once('=') {
                    Some(("metadata.name", name)) => name == key.2,
                    Some(("spec.nodeName", node)) => object["spec"]["nodeName"] == node,
                    _ => false,
                }
            })
    }
}

fn key(kind: &str, namespace: &str, name: &str) -> Key {
    (kind.to_owned(), namespace.to_owned(), name.to_owned())
}

fn not_found(kind: &str, name: &str) -> (StatusCode, &'static str, String) {
    (
        StatusCode::NOT_FOUND,
        "NotFound",
        format!("{kind} \"{name}\" not found"),
    )
}

fn respond(answer: Answer) -> Response<Body> {
    let (code, value) = status_of(answer);
    response(code, &value)
}

/// Returns a refusal that says when to try again: in a header, and in the Status.
fn busy(answer: Answer, seconds: u32) -> Response<Body> {
    let (code, mut value) = status_of(answer);
    value["details"] = json!({"retryAfterSeconds": seconds});
    let mut response = response(code, &value);
    let headers = response.headers_mut();
    headers.insert(http::header::RETRY_AFTER, seconds.into());
    response
}

/// Returns a refusal that names the invalid field in the causes of the Status.
fn invalid(answer: Answer, field: &str) -> Response<Body> {
    let (code, mut value) = status_of(answer);
    value["details"] = json!({"causes": [{"field": field, "message": "made to fail"}]});
    response(code, &value)
}

fn status_of(answer: Answer) -> (StatusCode, Value) {
    match answer {
        Ok(value) => (StatusCode::OK, value),
        Err((code, reason, message)) => {
            let status = json!({
                "kind": "Status", "apiVersion": "v1", "status": "Failure",
                "message": message, "reason": reason, "code": code.as_u16(),
            });
            (code, status)
        }
    }
}

fn response(code: StatusCode, value: &Value) -> Response<Body> {
    let mut response = Response::new(Body::from(value.to_string()));
    *response.status_mut() = code;
    response
}
