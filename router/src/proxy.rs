//! Handles one request, from its head to the end of its response.

use std::{
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::{Duration, Instant, SystemTime},
};

use bytes::Bytes;
use http::{Method, Request, Response, StatusCode, Uri, Version, header, uri::PathAndQuery};
use http_body_util::{Either, Full};
use hyper::{body::Incoming, upgrade};

use crate::{
    authz::{self, Authorizer, AuthzRequest, BoundUid},
    body::{BodyProgress, Exchange, RequestBody, ResponseBody},
    body_prefetch::BodyPrefetch,
    browser::{BrowserToken, Browsers},
    calls::{Calls, InUse},
    connection::{Activity, Bound},
    failure::{Failure, chain, within},
    gate::{Destination, Gate},
    grpc, idle_timeout,
    metrics::{self, CLIENT_GONE, DecisionLabels, Metrics, NO_NAMESPACE, ReasonLabels},
    pathroute::{self, PublicPath, Route},
    refusal::{Refusal, json_response},
    rewrite,
    sandbox_limit::SandboxLimit,
    spans,
    target::{self, Named, Target},
    tunnel::Tunnels,
    upstream::{self, Pool},
    wait_slots::WaitSlots,
    web::{self, Origins, Web},
};

/// Settings that apply to all requests.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Domain of hosts that name sandboxes.
    pub domain: Option<String>,
    /// Prefix of paths that name sandboxes.
    pub path_prefix: Option<String>,
    /// Paths in `Location` and `Set-Cookie` are moved below the path that named the sandbox.
    pub rewrite_responses: bool,
    /// Cookie in which browsers send their tokens to those hosts or paths, if allowed.
    pub browsers: Option<Browsers>,
    /// Origins whose pages may make gRPC-Web calls.
    pub web_origins: Origins,
    /// Longest time of a request.
    pub proxy_timeout: Duration,
    /// Longest time of a gRPC call, besides the client's own deadline; 0: no limit.
    pub grpc_proxy_timeout: Duration,
    /// Longest time from the end of a request to the response headers; also between two parts of
    /// the request body.
    pub response_header_timeout: Duration,
    /// Largest request body in bytes; 0: no limit.
    pub max_request_body: u64,
    pub access_log: bool,
}

/// Client of a connection.
#[derive(Clone, Debug)]
pub struct Peer {
    pub address: IpAddr,
    pub tls: bool,
    pub activity: Activity,
    /// Connections to sandboxes of the lane that serves the client.
    pub pool: Pool,
}

/// Carries requests to sandboxes.
#[derive(Debug)]
pub struct Proxy {
    pub gate: Gate,
    pub authorizer: Authorizer,
    pub calls: Calls,
    pub tunnels: Tunnels,
    /// Slots of tunnels and gRPC calls.
    pub open_ended: WaitSlots,
    /// Limit of all other requests to each sandbox.
    pub sandbox_limit: SandboxLimit,
    pub metrics: Arc<Metrics>,
    pub settings: Settings,
}

/// Response: the router's own or a sandbox's.
pub type Answer = Response<Either<Full<Bytes>, ResponseBody>>;

impl Proxy {
    /// Handles one request.
    ///
    /// hyper drops the future when the client disconnects; that ends the wait and the request to
    /// the sandbox.
    pub async fn handle(&self, peer: &Peer, request: Request<Incoming>) -> Answer {
        let exchange = self.begin(peer, &request);
        let page = exchange
            .web
            .and_then(|_| self.settings.web_origins.allowed(request.headers()));
        let mut answer = self.answer(peer, request, exchange).await;
        if let Some(origin) = page {
            web::allow_reading(origin, answer.headers_mut());
        }
        answer
    }

    async fn answer(
        &self,
        peer: &Peer,
        request: Request<Incoming>,
        mut exchange: Exchange,
    ) -> Answer {
        let refusal = match self.process(peer, request, &mut exchange).await {
            Ok(Handled::Own(response)) => {
                exchange.code = response.status().as_u16();
                return response.map(Either::Left);
            }
            Ok(Handled::Sandbox(response, connection)) => {
                let (mut parts, body) = response.into_parts();
                rewrite::response(&mut parts.headers, false);
                exchange.code = parts.status.as_u16();
                if exchange.grpc {
                    spans::record_grpc_status(&exchange.span, &parts.headers);
                }
                let web = exchange.web.filter(|web| web.response(&mut parts.headers));
                let body = ResponseBody::new(body, exchange, web, connection);
                return Response::from_parts(parts, Either::Right(body));
            }
            Ok(Handled::Switched(mut response, client)) => {
                rewrite::response(response.headers_mut(), true);
                exchange.code = StatusCode::SWITCHING_PROTOCOLS.as_u16();
                let sandbox = upgrade::on(&mut response);
                self.tunnels.open(client, sandbox, exchange);
                return response.map(|_| Either::Left(Full::default()));
            }
            Err(_) if exchange.grpc && exchange.late() => Refusal::TooLate,
            Err(refusal) => refusal,
        };
        let labels = ReasonLabels {
            sandbox_namespace: Arc::clone(&exchange.namespace),
            reason: refusal.reason(),
        };
        self.metrics.refusals.get_or_create(&labels).inc();
        let mut response = if exchange.grpc {
            grpc::response(&refusal)
        } else {
            refusal.response()
        };
        if exchange.grpc {
            spans::record_grpc_status(&exchange.span, response.headers());
        }
        if let Some(web) = exchange.web {
            web.response(response.headers_mut());
        }
        exchange.code = response.status().as_u16();
        response.map(Either::Left)
    }

    fn begin(&self, peer: &Peer, request: &Request<Incoming>) -> Exchange {
        self.metrics.inflight.inc();
        let (method, headers) = (request.method(), request.headers());
        let web = Web::of_request(method, headers);
        let grpc = web.is_some() || grpc::is_call(request.version(), method, headers);
        if grpc {
            self.metrics.calls.inc();
        }
        let path = || request.uri().path().to_owned();
        let http2 = request.version() == Version::HTTP_2;
        let bound = if grpc { Bound::Client } else { Bound::Router };
        let begin = Instant::now();
        Exchange {
            metrics: Arc::clone(&self.metrics),
            method: metrics::method(method),
            namespace: NO_NAMESPACE.into(),
            sandbox: String::new(),
            path: self.settings.access_log.then(path),
            code: CLIENT_GONE,
            grpc,
            web,
            span: spans::request(method, request.uri().path(), headers),
            begin,
            client_timeout: None,
            deadline: (!grpc).then(|| begin + self.settings.proxy_timeout),
            received: None,
            sent: 0,
            reached: false,
            slot: None,
            sandbox_permit: None,
            in_flight: peer.activity.request(http2, bound),
        }
    }

    async fn process(
        &self,
        peer: &Peer,
        mut request: Request<Incoming>,
        exchange: &mut Exchange,
    ) -> Result<Handled, Refusal> {
        if request.method() == Method::CONNECT {
            return Err(Refusal::Method);
        }
        let asked = self
            .settings
            .web_origins
            .preflight(request.method(), request.headers());
        if let Some(answer) = asked {
            return Ok(Handled::Own(answer));
        }
        if exchange.grpc {
            exchange.deadline = self.end_of_call(request.headers(), exchange.begin)?;
        }
        let named = self.named(&request, exchange);
        if named == Err(Refusal::NoSandbox) && request.uri().path() == "/healthz" {
            // The Python router has this endpoint for load balancers.
            let body = serde_json::json!({"status": "ok"});
            return Ok(Handled::Own(json_response(StatusCode::OK, &body, None)));
        }
        let routed = match self
            .authorize_target(named?, &mut request, exchange)
            .await?
        {
            Entry::Forward(routed) => routed,
            Entry::SetCookie(answer) => return Ok(Handled::Own(answer)),
        };
        let limit = self.settings.max_request_body;
        if limit > 0 && http_body::Body::size_hint(request.body()).lower() > limit {
            return Err(Refusal::BodyTooLarge);
        }
        let given_up = exchange
            .client_timeout
            .and_then(|p| exchange.begin.checked_add(p));
        let limits = [exchange.deadline, given_up];
        let limit = limits.into_iter().flatten().min();
        let (destination, prefetch) = self.admit(&mut request, &routed.target, limit).await?;
        let request = (request, prefetch);
        self.forward(peer, request, routed, destination, exchange)
            .await
    }

    /// Reads which sandbox a request names.
    fn named(&self, request: &Request<Incoming>, exchange: &Exchange) -> Result<Named, Refusal> {
        let is_native_call = exchange.grpc && exchange.web.is_none();
        let prefix = self.settings.path_prefix.as_deref();
        target::read(
            request.uri(),
            request.headers(),
            self.settings.domain.as_deref(),
            target::prefix_for(prefix, request.headers(), is_native_call),
            self.gate.directory().policy(),
        )
    }

    /// Returns the sandbox that a request is for, if the client may reach it.
    async fn authorize_target(
        &self,
        named: Named,
        request: &mut Request<Incoming>,
        exchange: &mut Exchange,
    ) -> Result<Entry, Refusal> {
        let by_address = !matches!(named, Named::ByHeaders(_));
        if exchange.grpc && !by_address && !request.headers().contains_key(target::PORT) {
            return Err(Refusal::NoPort);
        }
        if !exchange.grpc && !by_address {
            exchange.client_timeout = idle_timeout::from_headers(request.headers());
        }
        let base = match &named {
            Named::ByPath(route) => route.base,
            Named::ByHeaders(_) | Named::ByHost(_) | Named::Joined { .. } => 0,
        };
        let (mut target, refusal) = self.choose(named);
        if self.gate.directory().has_namespace(&target.namespace) {
            exchange.namespace = target.namespace.as_str().into();
        }
        exchange.sandbox.clone_from(&target.id);
        spans::record_target(&exchange.span, &target);
        let browsers = self.settings.browsers.as_ref();
        let browsers = browsers.filter(|browsers| by_address && browsers.of_paths == (base > 0));
        let browser_token = browsers.and_then(|browsers| browsers.take(request));
        let token = self.token(request, browser_token.as_ref());
        // Authorization precedes all checks that would reveal which sandboxes exist.
        let bound = self
            .authorize(token, request, (&target, base), exchange)
            .await?;
        if let Some(uid) = bound {
            target.uid = Some(uid.as_ref().to_owned());
        }
        if let Some(refusal) = refusal {
            return Err(refusal);
        }
        if let (Some(browsers), Some(browser_token)) = (browsers, &browser_token)
            && let Some(answer) = browsers.cookie_redirect(browser_token, request, base)
        {
            return Ok(Entry::SetCookie(answer));
        }
        Ok(Entry::Forward(Routed {
            target,
            by_address,
            base,
        }))
    }

    /// Returns the target. Without one, returns a refusal and a target that cannot exist, to be
    /// authorized like any other.
    fn choose(&self, named: Named) -> (Target, Option<Refusal>) {
        let (port, text) = match named {
            Named::ByHeaders(target)
            | Named::ByHost(target)
            | Named::ByPath(Route { target, .. }) => return (target, None),
            Named::Joined { port, text } => (port, text),
        };
        let domain = self.settings.domain.as_deref().unwrap_or_default();
        let directory = self.gate.directory();
        let exists = |namespace: &str, name: &str| directory.exists(namespace, name);
        match target::choose(port, &text, domain, exists) {
            Ok(target) => (target, None),
            Err(refusal) => {
                let (namespace, uid) = (String::new(), None);
                let impossible = Target {
                    id: text,
                    namespace,
                    port,
                    uid,
                };
                (impossible, Some(refusal))
            }
        }
    }

    /// Returns the token of a request, if any; refuses a cookie if a page of another origin caused
    /// the request.
    fn token<'a>(
        &self,
        request: &'a Request<Incoming>,
        browser_token: Option<&'a BrowserToken>,
    ) -> Result<Option<&'a str>, Refusal> {
        let (headers, browsers) = (request.headers(), self.settings.browsers.as_ref());
        if let (Some(browsers), Some(BrowserToken::InCookie(_))) = (browsers, browser_token) {
            let host = rewrite::host(request.uri(), headers);
            if !browsers.may_use_cookie(request.method(), headers, host.as_ref()) {
                return Err(Refusal::ForeignOrigin);
            }
        }
        Ok(browser_token
            .map(BrowserToken::token)
            .or_else(|| authz::bearer(headers)))
    }

    async fn authorize(
        &self,
        token: Result<Option<&str>, Refusal>,
        request: &Request<Incoming>,
        (target, base): (&Target, usize),
        exchange: &Exchange,
    ) -> Result<BoundUid, Refusal> {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        let now = now.map_or(0, |now| now.as_secs());
        // A time beyond `i64` makes every token invalid.
        let now = i64::try_from(now).unwrap_or(i64::MAX);
        let asked = AuthzRequest {
            target,
            method: request.method(),
            headers: request.headers(),
            path: pathroute::rest(request.uri().path(), base),
            uid: &|| self.gate.uid(target),
        };
        let result = match token {
            Ok(token) => self.authorizer.authorize(token, asked, now).await,
            Err(refusal) => Err(refusal),
        };
        let labels = DecisionLabels {
            sandbox_namespace: Arc::clone(&exchange.namespace),
            decision: if result.is_ok() { "allow" } else { "deny" },
        };
        self.metrics.authz_decisions.get_or_create(&labels).inc();
        result
    }

    /// Returns the deadline of a call that began at `begin`, if its client or the flags set one.
    fn end_of_call(
        &self,
        headers: &http::HeaderMap,
        begin: Instant,
    ) -> Result<Option<Instant>, Refusal> {
        let own = self.settings.grpc_proxy_timeout;
        let limits = [
            grpc::timeout(headers)?,
            Some(own).filter(|own| !own.is_zero()),
        ];
        let limit = limits.into_iter().flatten().min();
        // A deadline that `Instant` cannot represent is no deadline.
        Ok(limit.and_then(|limit| begin.checked_add(limit)))
    }

    /// Waits for the sandbox; returns the destination and the part of the body read meanwhile.
    async fn admit(
        &self,
        request: &mut Request<Incoming>,
        target: &Target,
        deadline: Option<Instant>,
    ) -> Result<(Destination, BodyPrefetch), Refusal> {
        let mut prefetch = BodyPrefetch::default();
        let admitted = self.gate.admit(target, deadline);
        let admitted = if request.version() == Version::HTTP_2 {
            admitted.await
        } else {
            let admitted = prefetch.read_while(request.body_mut(), admitted).await;
            // The client has disconnected or sent an invalid body.
            admitted.unwrap_or_else(|_| Err(Refusal::Unreachable(target.id.clone())))
        };
        if admitted.is_err() {
            tracing::debug!(
                namespace = target.namespace,
                sandbox = target.id,
                "request not admitted"
            );
        }
        Ok((admitted?, prefetch))
    }

    async fn forward(
        &self,
        peer: &Peer,
        (mut request, prefetch): (Request<Incoming>, BodyPrefetch),
        routed: Routed,
        destination: Destination,
        exchange: &mut Exchange,
    ) -> Result<Handled, Refusal> {
        let may_change = request.version() == Version::HTTP_11 && !exchange.grpc;
        let protocol = rewrite::upgrade(request.headers()).filter(|_| may_change);
        if exchange.grpc || protocol.is_some() {
            let slot = self.open_ended.take(&destination.sandbox_uid);
            exchange.slot = Some(slot.ok_or(Refusal::TooManyOpen)?);
        } else {
            let permit = self.sandbox_limit.take(&destination.sandbox_uid);
            let refusal = || Refusal::TooManyRequests(routed.target.id.clone());
            exchange.sandbox_permit = Some(permit.ok_or_else(refusal)?);
        }
        let client = protocol.as_ref().map(|_| upgrade::on(&mut request));
        let arrival = rewrite::Arrival {
            client: peer.address,
            tls: peer.tls,
            host: rewrite::host(request.uri(), request.headers()),
            by_address: routed.by_address,
        };
        let (target, base) = (&routed.target, routed.base);
        let to = (destination.address, destination.port).into();
        let public_path = (base > 0).then(|| Self::public_path(request.uri(), base, &arrival, to));
        let (mut parts, body) = request.into_parts();
        let text = exchange.web.is_some_and(|web| web.text);
        let body = RequestBody::new(prefetch, body, self.settings.max_request_body, text);
        let progress = body.progress();
        if !http_body::Body::is_end_stream(&body) {
            exchange.received = Some(Arc::clone(&progress));
        }
        if base > 0 {
            parts.uri = pathroute::strip(&parts.uri, base);
        }
        rewrite::request(&mut parts.headers, &arrival, protocol.clone(), to);
        if let Some(web) = exchange.web {
            web.request(&mut parts.headers);
        }
        torpor_daemon::spans::hand_on(&exchange.span, &mut parts.headers);
        let request = Request::from_parts(parts, body);
        let deadline = exchange.deadline;
        let answer = if exchange.grpc {
            self.call(&destination, request, deadline).await
        } else {
            let limits = (deadline, exchange.client_timeout);
            self.ask(&peer.pool, &destination, request, limits).await
        };
        let (mut response, connection) =
            answer.map_err(|failure| self.failed(target, &failure, &progress))?;
        exchange.reached = true;
        if let Some(public_path) = public_path {
            pathroute::remove_host_wide_headers(response.headers_mut());
            if self.settings.rewrite_responses {
                public_path.rewrite(response.headers_mut());
            }
        }
        let switched = response.status() == StatusCode::SWITCHING_PROTOCOLS;
        match client {
            Some(client)
                if switched && rewrite::same_protocol(response.headers(), protocol.as_ref()) =>
            {
                Ok(Handled::Switched(response, client))
            }
            // The client did not ask for a change of protocol.
            _ if switched => Err(Refusal::Unreachable(target.id.clone())),
            _ => Ok(Handled::Sandbox(response, connection)),
        }
    }

    /// Returns path and hosts of a sandbox that a path names, as its client sees them.
    fn public_path(
        uri: &Uri,
        base: usize,
        arrival: &rewrite::Arrival,
        to: SocketAddr,
    ) -> PublicPath {
        let outside = arrival.host.as_ref().and_then(|host| host.to_str().ok());
        let hosts = [Some(to.to_string()), outside.map(str::to_owned)];
        PublicPath::new(uri.path(), base, hosts.into_iter().flatten().collect())
    }

    /// Sends a request over HTTP/1 and returns the response headers.
    async fn ask(
        &self,
        pool: &Pool,
        to: &Destination,
        mut request: Request<RequestBody>,
        (deadline, client_timeout): (Option<Instant>, Option<Duration>),
    ) -> Result<Head, Failure> {
        let progress = request.body().progress();
        *request.uri_mut() = upstream::pool_uri(to, path(request.uri()))?;
        *request.version_mut() = Version::HTTP_11;
        let longest = self.settings.response_header_timeout;
        let allowed = client_timeout.map_or(longest, |client_timeout| client_timeout.min(longest));
        let answer = idle_timeout::await_response(allowed, &progress, pool.request(request));
        let answer = within(deadline, answer).await?;
        let response = answer.map_err(|idle_timeout::TimedOut| Failure::Timeout)??;
        Ok((response, None))
    }

    /// Sends a gRPC call and returns the response headers.
    ///
    /// Only the call's deadline limits the time until the headers: a command may run before it
    /// sends them.
    async fn call(
        &self,
        to: &Destination,
        mut request: Request<RequestBody>,
        deadline: Option<Instant>,
    ) -> Result<Head, Failure> {
        *request.uri_mut() = upstream::uri(to, path(request.uri()))?;
        // HTTP/2 carries the host in the URI.
        request.headers_mut().remove(header::HOST);
        if let Some(deadline) = deadline {
            let left = deadline.saturating_duration_since(Instant::now());
            grpc::set_timeout(request.headers_mut(), left);
        }
        let (response, connection) = within(deadline, self.calls.request(to, request)).await??;
        Ok((response, Some(connection)))
    }

    fn failed(&self, target: &Target, failure: &Failure, progress: &BodyProgress) -> Refusal {
        if progress.too_large() {
            return Refusal::BodyTooLarge;
        }
        if progress.not_base64() {
            return Refusal::NotBase64;
        }
        let reason = failure.reason();
        self.count_error(target, reason);
        let error = chain(failure);
        tracing::info!(
            namespace = target.namespace,
            sandbox = target.id,
            reason,
            error,
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

/// Next step of an authorized request.
enum Entry {
    /// The router sends the request to a sandbox.
    Forward(Routed),
    /// The router answers a browser's token in the query with a cookie.
    SetCookie(Response<Full<Bytes>>),
}

/// Sandbox that a request is for.
struct Routed {
    target: Target,
    /// A host or a path named the sandbox.
    by_address: bool,
    /// Length of the path that names the sandbox, 0 where none does.
    base: usize,
}

/// Result of a request.
enum Handled {
    /// Response of the router itself.
    Own(Response<Full<Bytes>>),
    /// Response of a sandbox, with the connection that must stay open for its body, if any.
    Sandbox(Response<Incoming>, Option<InUse>),
    /// Client and sandbox have agreed on another protocol.
    Switched(Response<Incoming>, upgrade::OnUpgrade),
}

/// Response headers, with the connection that must stay open for the body, if any.
type Head = (Response<Incoming>, Option<InUse>);

fn path(uri: &Uri) -> PathAndQuery {
    let path = uri.path_and_query().cloned();
    path.unwrap_or_else(|| PathAndQuery::from_static("/"))
}
