//! One request from its head to the end of its answer.

use std::{
    net::IpAddr,
    sync::Arc,
    time::{Duration, Instant, SystemTime},
};

use bytes::Bytes;
use http::{HeaderValue, Method, Request, Response, StatusCode, Uri, Version, header};
use http_body_util::{Either, Full};
use hyper::{body::Incoming, upgrade};
use hyper_util::client::legacy;

use crate::{
    authz::Authorizer,
    body::{Exchange, RequestBody, ResponseBody, Seen},
    connection::Pulse,
    gate::{Destination, Gate},
    metrics::{self, DecisionLabels, Metrics, NO_NAMESPACE, ReasonLabels},
    refusal::{Refusal, json_response},
    rewrite,
    target::{self, Named, Target},
    tunnel::Tunnels,
    upstream::{self, Pool},
};

/// What is set once for all requests.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Hosts below it name sandboxes.
    pub domain: Option<String>,
    /// For a whole request.
    pub proxy_timeout: Duration,
    /// From sending a request to the head of its answer.
    pub response_header_timeout: Duration,
    /// Largest request body in bytes; 0: any.
    pub max_request_body: u64,
    pub access_log: bool,
}

/// The client's end of a connection.
#[derive(Clone, Debug)]
pub struct Peer {
    pub address: IpAddr,
    pub tls: bool,
    pub pulse: Pulse,
}

/// Carries requests to sandboxes.
#[derive(Debug)]
pub struct Proxy {
    pub gate: Gate,
    pub authorizer: Authorizer,
    pub pool: Pool,
    pub tunnels: Tunnels,
    pub metrics: Arc<Metrics>,
    pub settings: Settings,
}

/// An answer: the router's own, or a sandbox'.
pub type Answer = Response<Either<Full<Bytes>, ResponseBody>>;

/// Status code under which a request is counted whose client went away before the answer; nobody gets it.
const CLIENT_GONE: u16 = 499;

impl Proxy {
    /// Carries out one request. Dropping the future, as happens when the client goes away, ends the waiting and the call to the sandbox.
    pub async fn handle(&self, peer: &Peer, request: Request<Incoming>) -> Answer {
        let mut exchange = self.begin(peer, &request);
        let answer = match self.carry(peer, request, &mut exchange).await {
            Ok(Carried::Own(response)) => Ok(response),
            Ok(Carried::Sandbox(response, deadline)) => {
                let (mut parts, body) = response.into_parts();
                rewrite::response(&mut parts.headers, false);
                exchange.code = parts.status.as_u16();
                let body = ResponseBody::new(body, deadline, exchange);
                return Response::from_parts(parts, Either::Right(body));
            }
            Ok(Carried::Switched(mut response, client)) => {
                rewrite::response(response.headers_mut(), true);
                exchange.code = StatusCode::SWITCHING_PROTOCOLS.as_u16();
                let sandbox = upgrade::on(&mut response);
                self.tunnels.open(client, sandbox, exchange);
                return response.map(|_| Either::Left(Full::default()));
            }
            Err(refusal) => Err(refusal),
        };
        let response = answer.unwrap_or_else(|refusal| {
            let labels = ReasonLabels {
                sandbox_namespace: Arc::clone(&exchange.namespace),
                reason: refusal.reason(),
            };
            self.metrics.refusals.get_or_create(&labels).inc();
            refusal.response()
        });
        exchange.code = response.status().as_u16();
        response.map(Either::Left)
    }

    fn begin(&self, peer: &Peer, request: &Request<Incoming>) -> Exchange {
        self.metrics.inflight.inc();
        let path = || request.uri().path().to_owned();
        Exchange {
            metrics: Arc::clone(&self.metrics),
            method: metrics::method(request.method()),
            namespace: NO_NAMESPACE.into(),
            sandbox: String::new(),
            path: self.settings.access_log.then(path),
            code: CLIENT_GONE,
            begin: Instant::now(),
            received: None,
            sent: 0,
            reached: false,
            in_flight: peer.pulse.request(request.version() == Version::HTTP_2),
        }
    }

    async fn carry(
        &self,
        peer: &Peer,
        request: Request<Incoming>,
        exchange: &mut Exchange,
    ) -> Result<Carried, Refusal> {
        if request.method() == Method::CONNECT {
            return Err(Refusal::Method);
        }
        let named = target::read(
            request.uri(),
            request.headers(),
            self.settings.domain.as_deref(),
            self.gate.directory().policy(),
        );
        if named == Err(Refusal::NoSandbox) && request.uri().path() == "/healthz" {
            // As the Python router: load balancers ask here.
            let body = serde_json::json!({"status": "ok"});
            return Ok(Carried::Own(json_response(StatusCode::OK, &body, None)));
        }
        let by_host = !matches!(named, Ok(Named::ByHeaders(_)));
        let (target, refusal) = self.choose(named?);
        if self.gate.directory().has_namespace(&target.namespace) {
            exchange.namespace = target.namespace.as_str().into();
        }
        exchange.sandbox.clone_from(&target.id);
        // First: who may not know hears nothing of what exists.
        self.authorize(request.headers(), &target, exchange).await?;
        if let Some(refusal) = refusal {
            return Err(refusal);
        }
        let limit = self.settings.max_request_body;
        if limit > 0 && http_body::Body::size_hint(request.body()).lower() > limit {
            return Err(Refusal::BodyTooLarge);
        }
        let destination = self.admit(&target).await?;
        self.forward(peer, request, (&target, by_host), destination, exchange)
            .await
    }

    /// The target; or one that cannot exist, to be authorized like any other, and why there is none.
    fn choose(&self, named: Named) -> (Target, Option<Refusal>) {
        let (port, text) = match named {
            Named::ByHeaders(target) | Named::ByHost(target) => return (target, None),
            Named::Joined { port, text } => (port, text),
        };
        let domain = self.settings.domain.as_deref().unwrap_or_default();
        let directory = self.gate.directory();
        let exists = |namespace: &str, name: &str| directory.exists(namespace, name);
        match target::choose(port, &text, domain, exists) {
            Ok(target) => (target, None),
            Err(refusal) => {
                let (namespace, uid) = (String::new(), None);
                let nobody = Target {
                    id: text,
                    namespace,
                    port,
                    uid,
                };
                (nobody, Some(refusal))
            }
        }
    }

    async fn authorize(
        &self,
        headers: &http::HeaderMap,
        target: &Target,
        exchange: &Exchange,
    ) -> Result<(), Refusal> {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        let now = now.map_or(0, |now| now.as_secs());
        // Beyond the year 292 billion every token is void, which is right.
        let now = i64::try_from(now).unwrap_or(i64::MAX);
        let result = self.authorizer.authorize(headers, target, now).await;
        let labels = DecisionLabels {
            sandbox_namespace: Arc::clone(&exchange.namespace),
            decision: if result.is_ok() { "allow" } else { "deny" },
        };
        self.metrics.authz_decisions.get_or_create(&labels).inc();
        result
    }

    async fn admit(&self, target: &Target) -> Result<Destination, Refusal> {
        let admitted = self.gate.admit(target).await;
        if admitted.is_err() {
            tracing::debug!(
                namespace = target.namespace,
                sandbox = target.id,
                "not admitted"
            );
        }
        admitted
    }

    async fn forward(
        &self,
        peer: &Peer,
        mut request: Request<Incoming>,
        (target, by_host): (&Target, bool),
        destination: Destination,
        exchange: &mut Exchange,
    ) -> Result<Carried, Refusal> {
        let protocol =
            rewrite::upgrade(request.headers()).filter(|_| request.version() == Version::HTTP_11);
        let client = protocol.as_ref().map(|_| upgrade::on(&mut request));
        let arrival = rewrite::Arrival {
            client: peer.address,
            tls: peer.tls,
            host: host(request.uri(), request.headers()),
            by_host,
        };
        let (mut parts, body) = request.into_parts();
        let body = RequestBody::new(body, self.settings.max_request_body);
        let seen = body.seen();
        if !http_body::Body::is_end_stream(&body) {
            exchange.received = Some(Arc::clone(&seen));
        }
        let to = (destination.address, destination.port).into();
        rewrite::request(&mut parts.headers, &arrival, protocol, to);
        let root = http::uri::PathAndQuery::from_static("/");
        let path = parts.uri.path_and_query().unwrap_or(&root);
        let unreachable = || Refusal::Unreachable(target.id.clone());
        parts.uri = upstream::uri(&destination, path).map_err(|_| unreachable())?;
        parts.version = Version::HTTP_11;
        let deadline = exchange.begin + self.settings.proxy_timeout;
        let left = deadline.saturating_duration_since(Instant::now());
        let limit = left.min(self.settings.response_header_timeout);
        let call = self.pool.request(Request::from_parts(parts, body));
        let response = match tokio::time::timeout(limit, call).await {
            Ok(Ok(response)) => response,
            Ok(Err(error)) => return Err(self.failed(target, &error, &seen)),
            Err(_) => {
                self.count_error(target, "timeout");
                return Err(unreachable());
            }
        };
        exchange.reached = true;
        match client {
            Some(client) if response.status() == StatusCode::SWITCHING_PROTOCOLS => {
                Ok(Carried::Switched(response, client))
            }
            // Nobody asked for it.
            None if response.status() == StatusCode::SWITCHING_PROTOCOLS => Err(unreachable()),
            _ => Ok(Carried::Sandbox(response, deadline)),
        }
    }

    fn failed(&self, target: &Target, error: &legacy::Error, seen: &Seen) -> Refusal {
        if seen.too_large() {
            return Refusal::BodyTooLarge;
        }
        let reason = upstream::reason(error);
        self.count_error(target, reason);
        let chain = chain(error);
        tracing::info!(
            namespace = target.namespace,
            sandbox = target.id,
            reason,
            error = chain,
            "sandbox not reached"
        );
        Refusal::Unreachable(target.id.clone())
    }

    fn count_error(&self, target: &Target, reason: &'static str) {
        let labels = ReasonLabels {
            sandbox_namespace: target.namespace.as_str().into(),
            reason,
        };
        self.metrics.upstream_errors.get_or_create(&labels).inc();
    }
}

enum Carried {
    /// The router's own answer.
    Own(Response<Full<Bytes>>),
    /// A sandbox' answer, and when its body must have ended.
    Sandbox(Response<Incoming>, Instant),
    /// Both ends go on in another protocol.
    Switched(Response<Incoming>, upgrade::OnUpgrade),
}

/// The host that the client asked for.
fn host(uri: &Uri, headers: &http::HeaderMap) -> Option<HeaderValue> {
    match uri.authority() {
        Some(authority) => HeaderValue::from_str(authority.as_str()).ok(),
        None => headers.get(header::HOST).cloned(),
    }
}

fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(source) = next {
        text.push_str(": ");
        text.push_str(&source.to_string());
        next = source.source();
    }
    text
}
