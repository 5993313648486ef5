//! Command line: upstream's flags, parsed as Go programs parse them, and Torpor's own.
//!
//! The router does not have every flag of upstream. A missing flag that would change which clients
//! reach which sandboxes is an error; any other is ignored and named in the log.

use std::{ffi::OsString, path::PathBuf, time::Duration};

use clap::{
    Arg, ArgAction, CommandFactory, FromArgMatches, Parser, ValueEnum, parser::ValueSource,
};
use torpor_daemon::go_flags::{BindAddress, GoBoolean, duration, with_two_dashes};

use crate::{
    browser::{self, Browsers, SameSite},
    connection::Timeouts,
    gate,
    pathroute::is_prefix,
    proxy::Settings,
    tls::{Files, MutualTls},
    upstream::Dialling,
    wait_slots::Bounds,
    web::Origins,
};

/// Mode of authorization: upstream's, and Torpor's `subjectaccessreview`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum AuthzMode {
    /// Every client may reach every sandbox; upstream's default
    AllowAll,
    /// A client with a token of the cluster may reach every sandbox
    #[value(name = "tokenreview")]
    TokenReview,
    /// Torpor's: the user of the token needs the right to `connect` to `sandboxes/proxy` of the
    /// sandbox
    #[value(name = "subjectaccessreview")]
    SubjectAccessReview,
    /// Each token opens the sandbox that it names
    ScopedToken,
}

/// Time in seconds since 1970.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Instant(pub i64);

/// Flags of the router.
#[derive(Clone, Debug, Parser)]
#[command(
    name = "sandbox-router",
    version = concat!(env!("CARGO_PKG_VERSION"), " (commit ", env!("TORPOR_GIT_COMMIT"), ")"),
    about = "Carries HTTP requests into sandboxes, and resumes suspended sandboxes that allow it."
)]
pub struct Flags {
    /// Address that accepts requests without TLS; empty: none
    #[arg(long, default_value = ":8080")]
    pub http_bind_address: BindAddress,
    /// Address that accepts requests with TLS; empty: none
    #[arg(long, default_value = "")]
    pub https_bind_address: BindAddress,
    /// Address that serves metrics; empty: none
    #[arg(long, default_value = ":9090")]
    pub metrics_bind_address: BindAddress,
    /// Address that serves /healthz and /readyz; empty: none
    #[arg(long, default_value = ":8081")]
    pub health_probe_bind_address: BindAddress,
    /// Certificate chain of the server, PEM
    #[arg(long)]
    pub tls_cert_file: Option<PathBuf>,
    /// Private key of the server, PEM
    #[arg(long)]
    pub tls_key_file: Option<PathBuf>,
    /// CA certificates that sign clients' certificates, PEM
    #[arg(long)]
    pub tls_client_ca_file: Option<PathBuf>,
    /// Client certificates: off, optional or required
    #[arg(long, value_enum, default_value_t)]
    pub mtls_mode: MutualTls,
    /// Mode of authorization. Required: upstream's default, allow-all, admits every client
    #[arg(long, value_enum)]
    pub authz_mode: Option<AuthzMode>,
    /// Time for which the review of a token is cached; with subjectaccessreview, of a token and a
    /// sandbox
    #[arg(long, default_value = "30s", value_parser = positive)]
    pub authz_tokenreview_ttl: Duration,
    /// Largest number of cached reviews
    #[arg(long, default_value_t = 2048, value_parser = clap::value_parser!(u32).range(1..))]
    pub authz_tokenreview_cache_size: u32,
    /// Refuse requests without a token; subjectaccessreview always does
    #[arg(long, default_value = "false", go_boolean())]
    pub authz_tokenreview_require_token: bool,
    /// Audiences, of which a token must name at least one; empty: any
    #[arg(long, value_delimiter = ',')]
    pub authz_tokenreview_audiences: Vec<String>,
    /// Secret of scoped tokens of version 1, shared with their issuer
    #[arg(long)]
    pub authz_scoped_token_secret_file: Option<PathBuf>,
    /// Public keys of scoped tokens of version 2 (Ed25519), as JSON; read only at the start
    #[arg(long)]
    pub authz_scoped_token_verification_keys_file: Option<PathBuf>,
    /// Time (RFC 3339) from which on tokens of version 1 are invalid; required if both versions are
    /// accepted
    #[arg(long, value_parser = instant)]
    pub authz_scoped_token_v1_accept_until: Option<Instant>,
    /// Cookie in which browsers may send their token to a sandbox's host, or without --domain to
    /// its path; for hosts the name begins with __Host-
    #[arg(long, default_value = "")]
    pub authz_cookie_name: String,
    /// Query parameter whose token the router moves to the cookie
    #[arg(long, default_value = "")]
    pub authz_cookie_query_param: String,
    /// SameSite attribute of the cookie
    #[arg(long, value_enum, default_value_t)]
    pub authz_cookie_samesite: SameSite,
    /// Allow the cookie without TLS; for development
    #[arg(long, default_value = "false", go_boolean())]
    pub authz_cookie_insecure: bool,
    /// Origins, besides the sandbox's own, whose pages may use the cookie
    #[arg(long, value_delimiter = ',')]
    pub authz_cookie_allowed_origins: Vec<String>,
    /// Token that every request must carry, as with the Python router; set by the environment only
    #[arg(
        long = "router-auth-token",
        env = "ROUTER_AUTH_TOKEN",
        hide = true,
        hide_env_values = true,
        default_value = ""
    )]
    pub router_auth_token: String,
    /// Longest time of a request; the variable PROXY_TIMEOUT_SECONDS sets it too
    #[arg(long, default_value = "180s", value_parser = positive)]
    pub proxy_timeout: Duration,
    /// Longest time from the end of a request to the response headers
    #[arg(long, default_value = "180s", value_parser = positive)]
    pub response_header_timeout: Duration,
    /// Longest time of a gRPC call, besides the client's own deadline; 0: no limit
    #[arg(long, default_value = "0s", value_parser = duration)]
    pub grpc_proxy_timeout: Duration,
    /// Longest time that requests in flight may take to end after SIGTERM
    #[arg(long, default_value = "30s", value_parser = duration)]
    pub shutdown_timeout: Duration,
    /// Largest request body in bytes; 0: no limit
    #[arg(long, default_value_t = 0)]
    pub max_request_body_bytes: u64,
    /// Attempts to connect to a sandbox after the first
    #[arg(long, default_value_t = 3)]
    pub upstream_max_retries: u32,
    /// Delay before the second attempt; doubled before each further one
    #[arg(long, default_value = "200ms", value_parser = duration)]
    pub upstream_retry_initial_delay: Duration,
    /// Longest delay between attempts
    #[arg(long, default_value = "800ms", value_parser = duration)]
    pub upstream_retry_max_delay: Duration,
    /// Namespace whose sandboxes the router serves; empty: all
    #[arg(long, default_value = "")]
    pub cache_namespace: String,
    /// Kubeconfig file; empty: KUBECONFIG, or the ServiceAccount of the Pod
    #[arg(long, default_value = "")]
    pub kubeconfig: String,
    /// Export a span for each request by OTLP over gRPC; on by default if the variable
    /// OTEL_EXPORTER_OTLP_ENDPOINT or OTEL_EXPORTER_OTLP_TRACES_ENDPOINT is set
    #[arg(long, default_value = "false", go_boolean())]
    pub enable_tracing: bool,
    /// Log each request
    #[arg(long, default_value = "true", go_boolean())]
    pub access_log: bool,
    /// Prefix of paths <prefix>/<namespace>/<sandbox>/<port>/… that name sandboxes; empty: none
    #[arg(long, default_value = "")]
    pub path_routing_prefix: String,
    /// Move paths in Set-Cookie and Location below the path that named the sandbox
    #[arg(long, default_value = "true", go_boolean())]
    pub path_routing_rewrite_responses: bool,
    /// Torpor's: domain of hosts <port>-<sandbox>-<namespace>.<domain> that name sandboxes
    #[arg(long, default_value = "")]
    pub domain: String,
    /// Torpor's: origins (scheme://host[:port]; *: any) whose pages may make gRPC-Web calls to
    /// sandboxes; cookies do not authorize such calls
    #[arg(long, value_delimiter = ',')]
    pub grpc_web_allowed_origins: Vec<String>,
    /// Torpor's: longest time that a request waits for a sandbox that is being resumed
    #[arg(long, default_value = "60s", value_parser = positive)]
    pub resume_timeout: Duration,
    /// Torpor's: most requests that may wait for sandboxes at once
    #[arg(long, default_value_t = 4096)]
    pub max_held_requests: usize,
    /// Torpor's: most requests that may wait for one sandbox at once
    #[arg(long, default_value_t = 1024)]
    pub max_held_requests_per_sandbox: usize,
    /// Torpor's: most tunnels (WebSockets) and gRPC calls at once
    #[arg(long, default_value_t = 16_384)]
    pub max_open_ended: usize,
    /// Torpor's: most tunnels and gRPC calls of one sandbox at once
    #[arg(long, default_value_t = 1024)]
    pub max_open_ended_per_sandbox: usize,
    /// Torpor's: most other requests in flight to one sandbox at once; 0: no limit
    #[arg(long, default_value_t = 2048)]
    pub max_requests_per_sandbox: usize,
    /// Torpor's: most tokens in review at once; the same number again for tokens that were valid
    /// before
    #[arg(long, default_value_t = 32, value_parser = clap::value_parser!(u32).range(1..))]
    pub max_token_reviews: u32,
    /// Torpor's: most tokens that wait for a review; the same number again for tokens that were
    /// valid before
    #[arg(long, default_value_t = 512)]
    pub max_held_token_reviews: u32,
    /// Torpor's: most connections of clients at once
    #[arg(long, default_value_t = 20_000)]
    pub max_connections: usize,
    /// Torpor's: longest time for the head of a request
    #[arg(long, default_value = "10s", value_parser = positive)]
    pub read_header_timeout: Duration,
    /// Torpor's: longest time between two requests of a connection
    #[arg(long, default_value = "120s", value_parser = positive)]
    pub idle_timeout: Duration,
    /// Torpor's: longest time of one call to the apiserver
    #[arg(long, default_value = "10s", value_parser = positive)]
    pub api_timeout: Duration,
    /// Torpor's: format of the log
    #[arg(long, default_value = "text", value_parser = ["text", "json"])]
    pub log_format: String,
}

/// Flags of upstream that the router ignores: they do not change which clients reach which
/// sandboxes. `true`: the flag may have no value.
const WITHOUT_MEANING: [(&str, bool); 4] = [
    // The check of a page's origin does not depend on where TLS is terminated.
    ("authz-trust-forwarded-proto", true),
    ("cluster-domain", false),
    ("cache-enabled", true),
    ("enable-otel-metrics", true),
];

/// Variables that name the collector of spans.
const ENDPOINTS: [&str; 2] = [
    "OTEL_EXPORTER_OTLP_ENDPOINT",
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
];

/// Flags that do not fit together.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    #[error("at least one of --http-bind-address and --https-bind-address must be set")]
    NoListener,
    #[error("--https-bind-address needs --tls-cert-file and --tls-key-file")]
    NoCertificate,
    #[error("--mtls-mode needs --https-bind-address")]
    MutualWithoutTls,
    #[error("--mtls-mode needs --tls-client-ca-file")]
    NoClientCa,
    #[error(
        "--authz-mode is missing: set subjectaccessreview (the token's user may connect to sandboxes/proxy), tokenreview (any token of the cluster), \
         scoped-token (a token for each sandbox), or allow-all (every client; upstream's default)"
    )]
    NoMode,
    #[error(
        "--authz-mode=scoped-token needs --authz-scoped-token-secret-file or --authz-scoped-token-verification-keys-file"
    )]
    NoSecret,
    #[error("--authz-scoped-token-verification-keys-file needs --authz-mode=scoped-token")]
    KeysWithoutMode,
    #[error(
        "--authz-scoped-token-v1-accept-until is missing: --authz-scoped-token-secret-file and --authz-scoped-token-verification-keys-file need it together"
    )]
    NoEndOfVersion1,
    #[error(
        "--authz-scoped-token-v1-accept-until needs --authz-mode=scoped-token and --authz-scoped-token-secret-file"
    )]
    EndWithoutSecret,
    #[error("ROUTER_AUTH_TOKEN requires --authz-mode=allow-all")]
    TwoModes,
    #[error("--domain: {0:?} is not a DNS name")]
    Domain(String),
    #[error(
        "--authz-cookie-query-param and --authz-cookie-allowed-origins need --authz-cookie-name"
    )]
    NoCookie,
    #[error(
        "--path-routing-prefix: {0:?} must be a path that begins with / and does not end with /"
    )]
    PathPrefix(String),
    #[error("--grpc-web-allowed-origins: {0:?} is neither * nor scheme://host[:port]")]
    WebOrigin(String),
    #[error(
        "--authz-cookie-name needs --domain or --path-routing-prefix: the cookie belongs to a sandbox's host or path"
    )]
    CookieWithoutHosts,
    #[error(
        "--authz-cookie-name needs tokens: --authz-mode=subjectaccessreview, tokenreview or scoped-token, or ROUTER_AUTH_TOKEN"
    )]
    CookieWithoutTokens,
    #[error(transparent)]
    Cookie(browser::Error),
    #[error("PROXY_TIMEOUT_SECONDS: {0:?} is not a positive number")]
    ProxyTimeout(String),
}

/// Parses the command line.
///
/// Returns the flags, and the names of the given flags that the router ignores.
pub fn parse(
    arguments: impl IntoIterator<Item = OsString>,
) -> Result<(Flags, Vec<&'static str>), clap::Error> {
    let command = Flags::command().args(WITHOUT_MEANING.map(|(name, bare)| {
        let argument = Arg::new(name).long(name).hide(true).action(ArgAction::Set);
        if bare {
            argument.may_be_bare()
        } else {
            argument
        }
    }));
    let matches = command.try_get_matches_from(arguments.into_iter().map(with_two_dashes))?;
    let given = |name: &&'static str| matches.value_source(name) == Some(ValueSource::CommandLine);
    let ignored = WITHOUT_MEANING
        .iter()
        .map(|(name, _)| *name)
        .filter(given)
        .collect();
    let mut flags = Flags::from_arg_matches(&matches)?;
    none_if_empty(&mut flags.authz_tokenreview_audiences);
    none_if_empty(&mut flags.authz_cookie_allowed_origins);
    none_if_empty(&mut flags.grpc_web_allowed_origins);
    if !given(&"enable_tracing") {
        let set = |name| std::env::var_os(name).is_some_and(|value| !value.is_empty());
        flags.enable_tracing = ENDPOINTS.into_iter().any(set);
    }
    // The flag takes precedence over the Python router's variable.
    if !given(&"proxy_timeout")
        && let Ok(seconds) = std::env::var("PROXY_TIMEOUT_SECONDS")
    {
        flags.proxy_timeout = seconds_of(&seconds).map_err(|error| {
            Flags::command().error(clap::error::ErrorKind::ValueValidation, error)
        })?;
    }
    Ok((flags, ignored))
}

/// Turns a list of one empty value into an empty list, as Go parses it.
fn none_if_empty(list: &mut Vec<String>) {
    if *list == [""] {
        list.clear();
    }
}

fn seconds_of(text: &str) -> Result<Duration, Error> {
    let seconds = text.trim().parse().ok();
    let limit = seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    limit
        .filter(|limit| !limit.is_zero())
        .ok_or_else(|| Error::ProxyTimeout(text.to_owned()))
}

fn positive(text: &str) -> Result<Duration, String> {
    let value = duration(text)?;
    if value.is_zero() {
        return Err("must be positive".to_owned());
    }
    Ok(value)
}

/// Parses an RFC 3339 time and drops fractions of a second: tokens expire early, never late.
fn instant(text: &str) -> Result<Instant, jiff::Error> {
    let time: jiff::Timestamp = text.parse()?;
    Ok(Instant(time.as_second()))
}

impl Flags {
    /// Checks that the flags fit together.
    pub fn check(&self) -> Result<(), Error> {
        let tls = self.https_bind_address.0.is_some();
        if self.http_bind_address.0.is_none() && !tls {
            return Err(Error::NoListener);
        }
        if tls && (self.tls_cert_file.is_none() || self.tls_key_file.is_none()) {
            return Err(Error::NoCertificate);
        }
        if self.mtls_mode != MutualTls::Off {
            if !tls {
                return Err(Error::MutualWithoutTls);
            }
            if self.tls_client_ca_file.is_none() {
                return Err(Error::NoClientCa);
            }
        }
        let mode = self.mode()?;
        self.check_scoped_tokens(mode == AuthzMode::ScopedToken)?;
        if mode != AuthzMode::AllowAll && !self.router_auth_token.is_empty() {
            return Err(Error::TwoModes);
        }
        if !self.domain.is_empty()
            && !torpor_api::annotations::is_dns_subdomain(&self.domain.to_ascii_lowercase())
        {
            return Err(Error::Domain(self.domain.clone()));
        }
        if !self.path_routing_prefix.is_empty() && !is_prefix(&self.path_routing_prefix) {
            return Err(Error::PathPrefix(self.path_routing_prefix.clone()));
        }
        let mut origins = self.grpc_web_allowed_origins.iter();
        if let Some(wrong) = origins.find(|origin| *origin != "*" && !browser::is_origin(origin)) {
            return Err(Error::WebOrigin(wrong.clone()));
        }
        self.check_cookie()
    }

    /// Checks the flags of scoped tokens as upstream's config.go does.
    fn check_scoped_tokens(&self, taken: bool) -> Result<(), Error> {
        let secret = self.authz_scoped_token_secret_file.is_some();
        let keys = self.authz_scoped_token_verification_keys_file.is_some();
        match self.authz_scoped_token_v1_accept_until {
            _ if taken && !secret && !keys => Err(Error::NoSecret),
            _ if keys && !taken => Err(Error::KeysWithoutMode),
            None if keys && secret => Err(Error::NoEndOfVersion1),
            Some(_) if !taken || !secret => Err(Error::EndWithoutSecret),
            _ => Ok(()),
        }
    }

    fn check_cookie(&self) -> Result<(), Error> {
        let Some(browsers) = self.browsers() else {
            let none = self.authz_cookie_query_param.is_empty()
                && self.authz_cookie_allowed_origins.is_empty();
            return none.then_some(()).ok_or(Error::NoCookie);
        };
        if self.domain.is_empty() && self.path_routing_prefix.is_empty() {
            return Err(Error::CookieWithoutHosts);
        }
        if self.mode()? == AuthzMode::AllowAll && self.router_auth_token.is_empty() {
            return Err(Error::CookieWithoutTokens);
        }
        browsers.check().map_err(Error::Cookie)
    }

    /// Returns the mode of authorization.
    ///
    /// ROUTER_AUTH_TOKEN alone selects a mode too: the Python router has no flag for it.
    pub fn mode(&self) -> Result<AuthzMode, Error> {
        match self.authz_mode {
            Some(mode) => Ok(mode),
            None if !self.router_auth_token.is_empty() => Ok(AuthzMode::AllowAll),
            None => Err(Error::NoMode),
        }
    }

    /// Returns the settings of the cookie, if browsers may use one.
    fn browsers(&self) -> Option<Browsers> {
        let cookie = Some(self.authz_cookie_name.clone()).filter(|name| !name.is_empty())?;
        let parameter = self.authz_cookie_query_param.clone();
        Some(Browsers {
            cookie,
            parameter: Some(parameter).filter(|name| !name.is_empty()),
            same_site: self.authz_cookie_samesite,
            secure: !self.authz_cookie_insecure,
            origins: self.authz_cookie_allowed_origins.clone(),
            of_paths: self.domain.is_empty(),
        })
    }

    /// Returns the TLS files, if the router serves TLS.
    pub fn tls_files(&self) -> Option<Files> {
        self.https_bind_address.0?;
        Some(Files {
            certificate: self.tls_cert_file.clone()?,
            key: self.tls_key_file.clone()?,
            client_ca: self.tls_client_ca_file.clone(),
            mutual: self.mtls_mode,
        })
    }

    /// Returns the settings of connections to sandboxes.
    pub fn dialling(&self) -> Dialling {
        Dialling {
            retries: self.upstream_max_retries,
            first_delay: self.upstream_retry_initial_delay,
            longest_delay: self.upstream_retry_max_delay,
        }
    }

    /// Returns the limits of held requests.
    ///
    /// A request for an unknown sandbox is held for as long as upstream tries to connect.
    pub fn limits(&self) -> gate::Limits {
        gate::Limits {
            dial: self.dialling().delays().sum(),
            resume: self.resume_timeout,
            held: Bounds {
                all: self.max_held_requests,
                each: self.max_held_requests_per_sandbox,
            },
        }
    }

    /// Returns the limits of tunnels and gRPC calls.
    pub fn open_ended(&self) -> Bounds {
        Bounds {
            all: self.max_open_ended,
            each: self.max_open_ended_per_sandbox,
        }
    }

    /// Returns the timeouts of client connections.
    pub fn connection_timeouts(&self) -> Timeouts {
        Timeouts {
            head: self.read_header_timeout,
            idle: self.idle_timeout,
            // The proxy's own timeout expires first.
            busy: self.proxy_timeout + Duration::from_secs(1),
        }
    }

    /// Returns the settings of all requests.
    pub fn settings(&self) -> Settings {
        Settings {
            domain: Some(self.domain.to_ascii_lowercase()).filter(|domain| !domain.is_empty()),
            path_prefix: Some(self.path_routing_prefix.clone()).filter(|text| !text.is_empty()),
            rewrite_responses: self.path_routing_rewrite_responses,
            browsers: self.browsers(),
            web_origins: Origins::new(self.grpc_web_allowed_origins.clone()),
            proxy_timeout: self.proxy_timeout,
            grpc_proxy_timeout: self.grpc_proxy_timeout,
            response_header_timeout: self.response_header_timeout,
            max_request_body: self.max_request_body_bytes,
            access_log: self.access_log,
        }
    }
}

#[cfg(test)]
mod tests;
