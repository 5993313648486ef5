//! Tests of server and client together, over TCP and TLS, with an apiserver in memory and real
//! images.

use std::fs::File;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::io::AsyncReadExt;
use tokio::sync::Semaphore;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use torpor_api::annotations;
use torpor_core::ids::{ImageId, Namespace, PodUid};
use torpor_repository::Progress;
use torpor_snapshots::Manifest;
use torpor_test_apiserver::Apiserver;

use super::client::{Error, Peers};
use super::server::{Server, serve_on};
use super::{Identity, described};
use crate::reconcile::node::Node;
use crate::reconcile::steps_for_tests::node_in;
use crate::report::metrics::Metrics;
use crate::report::sandboxes::left::tests::image_with;

/// Bytes of the image: more than the buffers between both ends take.
const SIZE: usize = 16 << 20;

/// Two nodes: `holder` serves the image `p.1`, and Pod `q` of node `asking` continues from it.
struct World {
    api: Apiserver,
    node: Arc<Node>,
    image: ImageId,
    pod: PodUid,
    peers: Peers,
    /// Images that the holder may still send at once.
    sends: Arc<Semaphore>,
    /// Identity of the holder's agent.
    holder: Arc<Identity>,
    address: SocketAddr,
    stop: CancellationToken,
    serving: JoinHandle<()>,
}

fn namespace() -> Namespace {
    Namespace::new("n").expect("a name")
}

fn identity() -> Arc<Identity> {
    Arc::new(Identity::new().expect("a certificate"))
}

impl World {
    async fn new(dir: &Path) -> Self {
        let (api, node) = (Apiserver::new(), Arc::new(node_in(dir)));
        let image = image_with(&node, "p.1", &vec![7; SIZE]);
        let (holder, asking) = (identity(), identity());
        let listener = tokio::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await;
        let listener = listener.expect("bound");
        let address = listener.local_addr().expect("an address");
        let metrics = Arc::new(Metrics::new());
        let client = api.client();
        let server = Server::new(
            holder.clone(),
            node.clone(),
            client,
            "holder".to_owned(),
            metrics,
        );
        let (sends, stop) = (server.sends.clone(), CancellationToken::new());
        let serving = serve_on(server, listener, stop.clone()).expect("TLS works");
        let serving = tokio::spawn(serving);
        let peers = Peers {
            identity: asking,
            client: api.client(),
            node: "asking".to_owned(),
        };
        let digest = node.store.image(&namespace(), &image);
        let digest = digest.expect("an image").digest().to_string();
        let pod = api.create(
            "pods",
            json!({
                "metadata": {
                    "name": "q", "namespace": "n",
                    "ownerReferences": [{
                        "apiVersion": "agents.x-k8s.io/v1beta1", "kind": "Sandbox", "name": "s",
                        "uid": "s", "controller": true,
                    }],
                    "annotations": {
                        annotations::RESTORE_IMAGE: "p.1", annotations::RESTORE_NODE: "holder",
                        annotations::RESTORE_DIGEST: digest,
                    },
                },
                "spec": { "nodeName": "asking", "containers": [] },
            }),
        );
        let pod = pod["metadata"]["uid"].as_str().unwrap_or_default();
        let world = Self {
            pod: PodUid::new(pod).expect("a UID"),
            api,
            node,
            image,
            peers,
            sends,
            holder,
            address,
            stop,
            serving,
        };
        world.report("holder", &world.holder, address);
        world.report("asking", &world.peers.identity, address);
        world
    }

    /// Writes a node's SandboxNode.
    fn report(&self, node: &str, identity: &Identity, address: SocketAddr) {
        let server = described(identity, address.ip(), address.port());
        let status = json!({ "imageServer": server });
        match self.api.get("sandboxnodes", "", node) {
            Some(_) => {
                let change = json!({ "status": status });
                self.api.edit("sandboxnodes", "", node, &change);
            }
            None => {
                let object = json!({ "metadata": { "name": node }, "spec": {}, "status": status });
                self.api.create("sandboxnodes", object);
            }
        }
    }

    fn digest(&self) -> String {
        let image = self.node.store.image(&namespace(), &self.image);
        image.expect("an image").digest().to_string()
    }

    async fn ask(&self) -> Result<super::client::Offer, Error> {
        let place = (namespace(), self.image.clone());
        self.peers.ask("holder", &place, &self.pod).await
    }

    /// Returns the reason of the refusal that the asking node gets.
    async fn refusal(&self) -> &'static str {
        match self.ask().await {
            Ok(_) => "none",
            Err(error @ Error::Refused { .. }) => error.reason(),
            Err(error) => panic!("{error}"),
        }
    }

    async fn end(self) {
        self.stop.cancel();
        self.serving.await.expect("the server ended");
    }
}

/// Downloads an image into a directory, and checks it.
async fn is_downloaded(mut offer: super::client::Offer, dir: &Path, expected: &str) {
    let (manifest, digest) = Manifest::decode(offer.manifest()).expect("a manifest");
    assert_eq!(digest.to_string(), expected);
    let paths: Vec<_> = (0..manifest.files.len())
        .map(|at| dir.join(at.to_string()))
        .collect();
    let files = paths.iter().map(|path| File::create(path).expect("a file"));
    let (files, progress) = (files.collect(), Progress::default());
    let done = offer.download(&manifest, files, &progress).await;
    done.expect("downloaded");
    assert_eq!(progress.done(), manifest.size());
    for (path, entry) in paths.iter().zip(&manifest.files) {
        let content = std::fs::read(path).expect("content");
        assert_eq!(
            torpor_snapshots::Digest::of(&content),
            entry.blake3,
            "{}",
            entry.name
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_gets_an_image_that_its_pod_continues_from() {
    let dir = tempfile::tempdir().expect("a directory");
    let world = World::new(dir.path()).await;
    let offer = world.ask().await.expect("an offer");
    is_downloaded(offer, dir.path(), &world.digest()).await;
    world.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_gets_nothing_with_another_certificate_than_its_own() {
    let dir = tempfile::tempdir().expect("a directory");
    let world = World::new(dir.path()).await;
    // A process that has reached the server, and names a node with a Pod that may.
    world.report("asking", &identity(), world.address);
    assert_eq!(world.refusal().await, "SourceNodeUnavailable");
    world.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_takes_nothing_from_a_server_with_another_certificate() {
    let dir = tempfile::tempdir().expect("a directory");
    let world = World::new(dir.path()).await;
    world.report("holder", &identity(), world.address);
    let refused = world.ask().await.err().expect("no offer");
    assert!(matches!(refused, Error::Connect { .. }), "{refused}");
    world.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_gets_no_image_for_which_it_has_no_pod() {
    let dir = tempfile::tempdir().expect("a directory");
    let world = World::new(dir.path()).await;
    let annotated = |value: Value| json!({ "metadata": { "annotations": value } });
    let other = annotated(json!({ annotations::RESTORE_IMAGE: "p.2" }));
    world.api.edit("pods", "n", "q", &other);
    assert_eq!(world.refusal().await, "SourceNodeUnavailable");
    let again = annotated(json!({ annotations::RESTORE_IMAGE: "p.1" }));
    world.api.edit("pods", "n", "q", &again);
    assert_eq!(world.refusal().await, "none");
    world.api.remove("pods", "n", "q");
    assert_eq!(world.refusal().await, "SourceNodeUnavailable");
    world.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_image_that_is_gone_or_consumed_is_refused_for_good() {
    let dir = tempfile::tempdir().expect("a directory");
    let world = World::new(dir.path()).await;
    let image = world.node.store.image(&namespace(), &world.image);
    let other = PodUid::new("r").expect("a UID");
    let marked = image.expect("an image").mark_consumed(&other);
    marked.expect("marked");
    assert_eq!(world.refusal().await, "ImageStale");
    let removed = world.node.store.remove_image(&namespace(), &world.image);
    removed.expect("removed");
    let refused = world.ask().await.err().expect("no offer");
    assert_eq!(
        (refused.reason(), refused.is_final()),
        ("ImageMissing", true)
    );
    world.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_without_a_server_and_a_server_that_is_gone_are_named() {
    let dir = tempfile::tempdir().expect("a directory");
    let world = World::new(dir.path()).await;
    let none = json!({ "status": { "imageServer": null } });
    world.api.edit("sandboxnodes", "", "holder", &none);
    let refused = world.ask().await.err().expect("no offer");
    assert_eq!(
        refused.to_string(),
        "node \"holder\" gives no images to other nodes"
    );
    let nowhere = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 1);
    world.report("holder", &world.holder, nowhere);
    let refused = world.ask().await.err().expect("no offer");
    assert!(refused.to_string().contains("127.0.0.1:1"), "{refused}");
    assert!(!refused.is_final());
    world.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_waits_until_fewer_images_are_sent() {
    let dir = tempfile::tempdir().expect("a directory");
    let world = World::new(dir.path()).await;
    let all = u32::try_from(world.sends.available_permits()).expect("a number");
    let sent = world.sends.clone().acquire_many_owned(all).await;
    let mut asking = Box::pin(world.ask());
    let early = tokio::time::timeout(Duration::from_millis(300), &mut asking).await;
    assert!(early.is_err(), "it got an answer before its turn");
    drop(sent);
    let answer = asking.await;
    answer.expect("an offer");
    world.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn idle_connections_do_not_take_the_place_of_an_image_that_is_sent() {
    let dir = tempfile::tempdir().expect("a directory");
    let world = World::new(dir.path()).await;
    let offer = world.ask().await.expect("an offer");
    // Many more than one address may have.
    let mut idle = Vec::new();
    for _ in 0..40 {
        idle.push(tokio::net::TcpStream::connect(world.address).await);
    }
    // The server has ended the oldest of them by then.
    let mut first = idle.remove(0).expect("connected");
    let ended = first.read(&mut [0]).await;
    assert!(matches!(ended, Ok(0) | Err(_)), "{ended:?}");
    is_downloaded(offer, dir.path(), &world.digest()).await;
    world.end().await;
}
