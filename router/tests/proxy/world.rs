//! Test environment: a running router, and an apiserver in memory with its sandboxes.

use std::{future::Future, net::SocketAddr, sync::Arc, time::Duration};

use serde_json::{Value, json};
use tokio::{net::TcpListener, task::JoinHandle};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use torpor_api::name_hash;
use torpor_router::{
    address::AddressPolicy,
    authz::Authorizer,
    calls::Calls,
    connection::Timeouts,
    directory::Directory,
    gate::{Gate, Limits},
    lanes::Lane,
    metrics::Metrics,
    proxy::{Proxy, Settings},
    resume::Resumer,
    sandbox_limit::SandboxLimit,
    server::Server,
    tls::Acceptor,
    tunnel::Tunnels,
    upstream::{self, Dialling},
    wait_slots::{Bounds, WaitSlots},
    watch,
    web::Origins,
};
use torpor_test_apiserver::{Apiserver, merge_patch};

pub(crate) const NS: &str = "ns";
/// Longest wait of a test.
pub(crate) const LIMIT: Duration = Duration::from_secs(30);

/// Settings of a test.
pub(crate) struct Setup {
    pub(crate) policy: AddressPolicy,
    pub(crate) settings: Settings,
    pub(crate) limits: Limits,
    pub(crate) open_ended: Bounds,
    /// Most requests in flight to one sandbox, besides tunnels and gRPC calls; 0: no limit.
    pub(crate) requests: usize,
    pub(crate) timeouts: Timeouts,
    pub(crate) connections: usize,
    pub(crate) dialling: Dialling,
    pub(crate) api_timeout: Duration,
    pub(crate) authorizer: Box<dyn FnOnce(&Apiserver) -> Authorizer>,
    pub(crate) tls: Option<Acceptor>,
}

impl Default for Setup {
    fn default() -> Self {
        Self {
            policy: AddressPolicy::with_loopback(),
            settings: Settings {
                domain: Some("sandboxes.example.com".into()),
                path_prefix: Some("/router".into()),
                rewrite_responses: true,
                browsers: None,
                web_origins: Origins::default(),
                proxy_timeout: LIMIT,
                grpc_proxy_timeout: Duration::ZERO,
                response_header_timeout: LIMIT,
                max_request_body: 0,
                access_log: false,
            },
            limits: Limits {
                dial: Duration::from_millis(7),
                resume: LIMIT,
                held: Bounds {
                    all: 4096,
                    each: 1024,
                },
            },
            open_ended: Bounds { all: 64, each: 32 },
            requests: 0,
            timeouts: Timeouts {
                head: LIMIT,
                idle: LIMIT,
                busy: LIMIT,
            },
            connections: 20_000,
            dialling: Dialling {
                retries: 3,
                first_delay: Duration::from_millis(1),
                longest_delay: Duration::from_millis(4),
            },
            api_timeout: LIMIT,
            authorizer: Box::new(|_| Authorizer::AllowAll),
            tls: None,
        }
    }
}

/// Running router with its apiserver.
pub(crate) struct World {
    pub(crate) api: Apiserver,
    pub(crate) directory: Directory,
    pub(crate) proxy: Arc<Proxy>,
    pub(crate) server: Arc<Server>,
    pub(crate) address: SocketAddr,
    watching: JoinHandle<()>,
}

impl Drop for World {
    fn drop(&mut self) {
        self.watching.abort();
    }
}

impl World {
    pub(crate) async fn new() -> Self {
        Self::with(Setup::default()).await
    }

    pub(crate) async fn with(setup: Setup) -> Self {
        let api = Apiserver::new();
        let directory = Directory::new(setup.policy);
        let watching = tokio::spawn(watch::follow(api.client(), None, &directory));
        let metrics = Arc::new(Metrics::default());
        let (tasks, cut) = (TaskTracker::new(), CancellationToken::new());
        let dialer = upstream::Dialer::new(directory.clone(), setup.dialling, Arc::clone(&metrics));
        let resumer = Resumer::new(api.client(), setup.api_timeout);
        let proxy = Arc::new(Proxy {
            gate: Gate::new(directory.clone(), resumer, setup.limits),
            authorizer: (setup.authorizer)(&api),
            calls: Calls::new(dialer.clone(), setup.open_ended),
            tunnels: Tunnels::new(tasks.clone(), cut.clone(), Arc::clone(&metrics)),
            open_ended: WaitSlots::new(setup.open_ended),
            sandbox_limit: SandboxLimit::new(setup.requests),
            metrics,
            settings: setup.settings,
        });
        let lanes = vec![Lane::here(dialer)];
        let server = Server::new(
            Arc::clone(&proxy),
            lanes,
            setup.timeouts,
            setup.connections,
            tasks,
            cut,
        );
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        server.accept(listener, setup.tls);
        soon("the caches fill", directory.wait_ready()).await;
        Self {
            api,
            directory,
            proxy,
            server,
            address,
            watching,
        }
    }

    /// Creates a Sandbox without a Pod and waits until the router has it. Returns its UID.
    pub(crate) async fn sandbox(&self, name: &str, change: Value) -> String {
        let mut sandbox = json!({
            "metadata": {"name": name, "namespace": NS},
            "spec": {"operatingMode": "Running", "podTemplate": {"spec": {"containers": []}}},
        });
        merge_patch::apply(&mut sandbox, &change);
        let namespace = sandbox["metadata"]["namespace"]
            .as_str()
            .unwrap()
            .to_owned();
        let made = self.api.create("sandboxes", sandbox);
        until("the Sandbox is known", || {
            self.directory.look_up(&namespace, name).is_some()
        })
        .await;
        made["metadata"]["uid"].as_str().unwrap().to_owned()
    }

    /// Creates a ready Pod of a Sandbox at an address.
    pub(crate) async fn pod(&self, name: &str, uid: &str, address: &str) {
        self.api.create("pods", json!({
            "metadata": {"name": name, "namespace": NS, "labels": {"agents.x-k8s.io/sandbox-name-hash": name_hash(name)},
                "ownerReferences": [{"apiVersion": "agents.x-k8s.io/v1beta1", "kind": "Sandbox", "name": name, "uid": uid, "controller": true}]},
            "spec": {},
        }));
        let ready = json!({"status": {"podIPs": [{"ip": address}], "conditions": [{"type": "Ready", "status": "True"}]}});
        self.api.edit("pods", NS, name, &ready);
    }

    /// Creates a Sandbox with a ready Pod and waits until the router has both. Returns its UID.
    pub(crate) async fn running(&self, name: &str, address: &str) -> String {
        let uid = self.sandbox(name, json!({})).await;
        self.pod(name, &uid, address).await;
        let there = || {
            self.directory
                .look_up(NS, name)
                .is_some_and(|view| view.pod.is_some())
        };
        until("the Pod is known", there).await;
        uid
    }

    /// Returns the value of a metric's line, 0 without the line.
    pub(crate) fn metric(&self, line: &str) -> u64 {
        let text = self.proxy.metrics.text().unwrap();
        let found = text
            .lines()
            .find_map(|other| other.strip_prefix(line)?.strip_prefix(' '));
        found.map_or(0, |value| value.parse().unwrap())
    }

    /// Returns the status codes of the patches of Sandboxes since the last call.
    pub(crate) fn patches(&self) -> Vec<u16> {
        let writes = self.api.take_writes();
        let patches = writes
            .iter()
            .filter(|write| write.verb == "patch" && write.kind == "sandboxes");
        patches.map(|write| write.code).collect()
    }
}

/// Waits for a future that must end.
#[track_caller]
pub(crate) fn soon<T>(what: &str, future: impl Future<Output = T>) -> impl Future<Output = T> {
    let what = format!("timeout: {what} ({})", std::panic::Location::caller());
    async move {
        match tokio::time::timeout(LIMIT, future).await {
            Ok(value) => value,
            Err(_) => panic!("{what}"),
        }
    }
}

/// Polls until a condition is true.
#[track_caller]
pub(crate) fn until(what: &str, condition: impl Fn() -> bool) -> impl Future<Output = ()> {
    soon(what, async move {
        while !condition() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    })
}
