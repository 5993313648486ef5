//! One request from its head to the end of its answer.

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
    ahead::Ahead,
    authz::{self, Asked, Authorizer, BoundTo},
    body::{Exchange, RequestBody, ResponseBody, Seen},
    browser::{Browsers, Shown},
    calls::{Calls, InUse},
    connection::{Bound, Pulse},
    failure::{Failure, chain, within},
    gate::{Destination, Gate},
    grpc,
    metrics::{self, CLIENT_GONE, DecisionLabels, Metrics, NO_NAMESPACE, ReasonLabels},
    pathroute::{self, Place, Route},
    places::Places,
    refusal::{Refusal, json_response},
    rewrite,
    shares::Shares,
    silence, spans,
    target::{self, Named, Target},
    tunnel::Tunnels,
    upstream::{self, Pool},
    web::{self, Origins, Web},
};

/// What is set once for all requests.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Hosts below it name sandboxes.
    pub domain: Option<String>,
    /// Paths below it name sandboxes.
    pub path_prefix: Option<String>,
    /// What an answer says of paths is put below the one that named the sandbox.
    pub rewrite_responses: bool,
    /// How browsers show their tokens to those hosts or paths, if they may.
    pub browsers: Option<Browsers>,
    /// Whose pages may make gRPC-Web calls from another origin.
    pub web_origins: Origins,
    /// For a whole request.
    pub proxy_timeout: Duration,
    /// For a whole gRPC call, beside the client's own; 0: any.
    pub grpc_proxy_timeout: Duration,
    /// From the end of a request to the head of its answer; also without more of the request.
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
    /// Connections to sandboxes of the lane that serves it.
    pub pool: Pool,
}

/// Carries requests to sandboxes.
#[derive(Debug)]
pub struct Proxy {
    pub gate: Gate,
    pub authorizer: Authorizer,
    pub calls: Calls,
    pub tunnels: Tunnels,
    /// For exchanges that have no end in sight: tunnels and gRPC calls.
    pub open_ended: Places,
    /// For all others.
    pub shares: Shares,
    pub metrics: Arc<Metrics>,
    pub settings: Settings,
}

/// An answer: the router's own, or a sandbox'.
pub type Answer = Response<Either<Full<Bytes>, ResponseBody>>;

impl Proxy {
    /// Carries out one request. Dropping the future, as happens when the client goes away, ends the
    /// waiting and the call to the sandbox.
    pub async fn handle(&self, peer: &Peer, request: Request<Incoming>) -> Answer {
        let exchange = self.begin(peer, &request);
        let page = exchange
            .web
            .and_then(|_| self.settings.web_origins.allowed(request.headers()));
        let mut answer = self.answer(peer, request, exchange).await;
        if let Some(origin) = page {
            web::readable_by(origin, answer.headers_mut());
        }
        answer
    }

    async fn answer(
        &self,
        peer: &Peer,
        request: Request<Incoming>,
        mut exchange: Exchange,
    ) -> Answer {
        let refusal = match self.carry(peer, request, &mut exchange).await {
            Ok(Carried::Own(response)) => {
                exchange.code = response.status().as_u16();
                return response.map(Either::Left);
            }
            Ok(Carried::Sandbox(response, connection)) => {
                let (mut parts, body) = response.into_parts();
                rewrite::response(&mut parts.headers, false);
                exchange.code = parts.status.as_u16();
                if exchange.grpc {
                    spans::ended(&exchange.span, &parts.headers);
                }
                let web = exchange.web.filter(|web| web.response(&mut parts.headers));
                let body = ResponseBody::new(body, exchange, web, connection);
                return Response::from_parts(parts, Either::Right(body));
            }
            Ok(Carried::Switched(mut response, client)) => {
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
            spans::ended(&exchange.span, response.headers());
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
        let web = Web::asked(method, headers);
        let grpc = web.is_some() || grpc::is_call(request.version(), method, headers);
        if grpc {
            self.metrics.calls.inc();
        }
        let path = || request.uri().path().to_owned();
        let http2 = request.version() == Version::HTTP_2;
        let bound = if grpc { Bound::Own } else { Bound::Busy };
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
            patience: None,
            deadline: (!grpc).then(|| begin + self.settings.proxy_timeout),
            received: None,
            sent: 0,
            reached: false,
            place: None,
            share: None,
            in_flight: peer.pulse.request(http2, bound),
        }
    }

    async fn carry(
        &self,
        peer: &Peer,
        mut request: Request<Incoming>,
        exchange: &mut Exchange,
    ) -> Result<Carried, Refusal> {
        if request.method() == Method::CONNECT {
            return Err(Refusal::Method);
        }
        let asked = self
            .settings
            .web_origins
            .preflight(request.method(), request.headers());
        if let Some(answer) = asked {
            return Ok(Carried::Own(answer));
        }
        if exchange.grpc {
            exchange.deadline = self.end_of_call(request.headers(), exchange.begin)?;
        }
        let named = self.named(&request, exchange);
        if named == Err(Refusal::NoSandbox) && request.uri().path() == "/healthz" {
            // As the Python router: load balancers ask here.
            let body = serde_json::json!({"status": "ok"});
            return Ok(Carried::Own(json_response(StatusCode::OK, &body, None)));
        }
        let meant = match self.let_in(named?, &mut request, exchange).await? {
            Entry::Meant(meant) => meant,
            Entry::Welcome(answer) => return Ok(Carried::Own(answer)),
        };
        let limit = self.settings.max_request_body;
        if limit > 0 && http_body::Body::size_hint(request.body()).lower() > limit {
            return Err(Refusal::BodyTooLarge);
        }
        let given_up = exchange
            .patience
            .and_then(|p| exchange.begin.checked_add(p));
        let limits = [exchange.deadline, given_up];
        let limit = limits.into_iter().flatten().min();
        let (destination, ahead) = self.admit(&mut request, &meant.target, limit).await?;
        let request = (request, ahead);
        self.forward(peer, request, meant, destination, exchange)
            .await
    }

    /// What a request names.
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

    /// The sandbox that a request is for, if its client may reach it.
    async fn let_in(
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
            exchange.patience = silence::allowed(request.headers());
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
        spans::is_for(&exchange.span, &target);
        let browsers = self.settings.browsers.as_ref();
        let browsers = browsers.filter(|browsers| by_address && browsers.of_paths == (base > 0));
        let shown = browsers.and_then(|browsers| browsers.take(request));
        let token = self.token(request, shown.as_ref());
        // First: an unauthorized client hears nothing of what exists.
        let bound = self
            .authorize(token, request, (&target, base), exchange)
            .await?;
        if let Some(uid) = bound {
            target.uid = Some(uid.as_ref().to_owned());
        }
        if let Some(refusal) = refusal {
            return Err(refusal);
        }
        if let (Some(browsers), Some(shown)) = (browsers, &shown)
            && let Some(answer) = browsers.welcome(shown, request, base)
        {
            return Ok(Entry::Welcome(answer));
        }
        Ok(Entry::Meant(Meant {
            target,
            by_address,
            base,
        }))
    }

    /// The target; or one that cannot exist, to be authorized like any other, and why there is none.
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

    /// The token of a request; refused where it is a cookie that the page of another origin has had sent.
    fn token<'a>(
        &self,
        request: &'a Request<Incoming>,
        shown: Option<&'a Shown>,
    ) -> Result<Option<&'a str>, Refusal> {
        let (headers, browsers) = (request.headers(), self.settings.browsers.as_ref());
        if let (Some(browsers), Some(Shown::InCookie(_))) = (browsers, shown) {
            let host = rewrite::host(request.uri(), headers);
            if !browsers.may_use_cookie(request.method(), headers, host.as_ref()) {
                return Err(Refusal::ForeignOrigin);
            }
        }
        Ok(shown.map(Shown::token).or_else(|| authz::bearer(headers)))
    }

    async fn authorize(
        &self,
        token: Result<Option<&str>, Refusal>,
        request: &Request<Incoming>,
        (target, base): (&Target, usize),
        exchange: &Exchange,
    ) -> Result<BoundTo, Refusal> {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        let now = now.map_or(0, |now| now.as_secs());
        // Beyond the year 292 billion every token is void, which is right.
        let now = i64::try_from(now).unwrap_or(i64::MAX);
        let asked = Asked {
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

    /// When a call is over that began then, if its client or the flags say so.
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
        // A time beyond the clock's end is none.
        Ok(limit.and_then(|limit| begin.checked_add(limit)))
    }

    /// Waits for the sandbox, and returns what has come of the request's body meanwhile.
    async fn admit(
        &self,
        request: &mut Request<Incoming>,
        target: &Target,
        deadline: Option<Instant>,
    ) -> Result<(Destination, Ahead), Refusal> {
        let mut ahead = Ahead::default();
        let admitted = self.gate.admit(target, deadline);
        let admitted = if request.version() == Version::HTTP_2 {
            admitted.await
        } else {
            let admitted = ahead.while_waiting(request.body_mut(), admitted).await;
            // Its client has gone, or sends what is no body.
            admitted.unwrap_or_else(|_| Err(Refusal::Unreachable(target.id.clone())))
        };
        if admitted.is_err() {
            tracing::debug!(
                namespace = target.namespace,
                sandbox = target.id,
                "not admitted"
            );
        }
        Ok((admitted?, ahead))
    }

    async fn forward(
        &self,
        peer: &Peer,
        (mut request, ahead): (Request<Incoming>, Ahead),
        meant: Meant,
        destination: Destination,
        exchange: &mut Exchange,
    ) -> Result<Carried, Refusal> {
        let may_change = request.version() == Version::HTTP_11 && !exchange.grpc;
        let protocol = rewrite::upgrade(request.headers()).filter(|_| may_change);
        if exchange.grpc || protocol.is_some() {
            let place = self.open_ended.take(&destination.sandbox_uid);
            exchange.place = Some(place.ok_or(Refusal::TooManyOpen)?);
        } else {
            let share = self.shares.take(&destination.sandbox_uid);
            let refusal = || Refusal::TooManyRequests(meant.target.id.clone());
            exchange.share = Some(share.ok_or_else(refusal)?);
        }
        let client = protocol.as_ref().map(|_| upgrade::on(&mut request));
        let arrival = rewrite::Arrival {
            client: peer.address,
            tls: peer.tls,
            host: rewrite::host(request.uri(), request.headers()),
            by_address: meant.by_address,
        };
        let (target, base) = (&meant.target, meant.base);
        let to = (destination.address, destination.port).into();
        let place = (base > 0).then(|| Self::place_of(request.uri(), base, &arrival, to));
        let (mut parts, body) = request.into_parts();
        let text = exchange.web.is_some_and(|web| web.text);
        let body = RequestBody::new(ahead, body, self.settings.max_request_body, text);
        let seen = body.seen();
        if !http_body::Body::is_end_stream(&body) {
            exchange.received = Some(Arc::clone(&seen));
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
            let limits = (deadline, exchange.patience);
            self.ask(&peer.pool, &destination, request, limits).await
        };
        let (mut response, connection) =
            answer.map_err(|failure| self.failed(target, &failure, &seen))?;
        exchange.reached = true;
        if let Some(place) = place {
            pathroute::keep_to_itself(response.headers_mut());
            if self.settings.rewrite_responses {
                place.rewrite(response.headers_mut());
            }
        }
        let switched = response.status() == StatusCode::SWITCHING_PROTOCOLS;
        match client {
            Some(client)
                if switched && rewrite::same_protocol(response.headers(), protocol.as_ref()) =>
            {
                Ok(Carried::Switched(response, client))
            }
            // Nobody asked for it.
            _ if switched => Err(Refusal::Unreachable(target.id.clone())),
            _ => Ok(Carried::Sandbox(response, connection)),
        }
    }

    /// Path and host of a sandbox that a path names, as its client sees them.
    fn place_of(uri: &Uri, base: usize, arrival: &rewrite::Arrival, to: SocketAddr) -> Place {
        let outside = arrival.host.as_ref().and_then(|host| host.to_str().ok());
        let hosts = [Some(to.to_string()), outside.map(str::to_owned)];
        Place::new(uri.path(), base, hosts.into_iter().flatten().collect())
    }

    /// Sends a request over HTTP/1 and returns the head of the answer.
    async fn ask(
        &self,
        pool: &Pool,
        to: &Destination,
        mut request: Request<RequestBody>,
        (deadline, patience): (Option<Instant>, Option<Duration>),
    ) -> Result<Head, Failure> {
        let seen = request.body().seen();
        *request.uri_mut() = upstream::pool_uri(to, path(request.uri()))?;
        *request.version_mut() = Version::HTTP_11;
        let longest = self.settings.response_header_timeout;
        let allowed = patience.map_or(longest, |patience| patience.min(longest));
        let answer = silence::answered(allowed, &seen, pool.request(request));
        let answer = within(deadline, answer).await?;
        let response = answer.map_err(|silence::Silent| Failure::Timeout)??;
        Ok((response, None))
    }

    /// Sends a gRPC call and returns the head of the answer. A command may run for as long as the client waits before there is one.
    async fn call(
        &self,
        to: &Destination,
        mut request: Request<RequestBody>,
        deadline: Option<Instant>,
    ) -> Result<Head, Failure> {
        *request.uri_mut() = upstream::uri(to, path(request.uri()))?;
        // Over HTTP/2 the URI says it.
        request.headers_mut().remove(header::HOST);
        if let Some(deadline) = deadline {
            let left = deadline.saturating_duration_since(Instant::now());
            grpc::set_timeout(request.headers_mut(), left);
        }
        let (response, connection) = within(deadline, self.calls.request(to, request)).await??;
        Ok((response, Some(connection)))
    }

    fn failed(&self, target: &Target, failure: &Failure, seen: &Seen) -> Refusal {
        if seen.too_large() {
            return Refusal::BodyTooLarge;
        }
        if seen.not_base64() {
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

/// Next step of a request whose client is let in.
enum Entry {
    /// It goes on to a sandbox.
    Meant(Meant),
    /// A browser has shown its token, and gets a cookie.
    Welcome(Response<Full<Bytes>>),
}

/// The sandbox that a request is for.
struct Meant {
    target: Target,
    /// Named by a host or a path.
    by_address: bool,
    /// Length of the path that names it, 0 where none does.
    base: usize,
}

enum Carried {
    /// The router's own answer.
    Own(Response<Full<Bytes>>),
    /// A sandbox' answer, and the connection that its body comes on if the answer must keep it.
    Sandbox(Response<Incoming>, Option<InUse>),
    /// Both ends go on in another protocol.
    Switched(Response<Incoming>, upgrade::OnUpgrade),
}

/// The head of an answer, and the connection to keep for its body.
type Head = (Response<Incoming>, Option<InUse>);

fn path(uri: &Uri) -> PathAndQuery {
    let path = uri.path_and_query().cloned();
    path.unwrap_or_else(|| PathAndQuery::from_static("/"))
}
