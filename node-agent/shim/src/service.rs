//! The shim's process: its start by containerd, its end, and the removal of what a dead one has
//! left.

use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, SystemTime};

use containerd_shim::api::DeleteResponse;
use containerd_shim::protos::protobuf::MessageField;
use containerd_shim::publisher::RemotePublisher;
use containerd_shim::synchronous::util::write_address;
use containerd_shim::{Config, Error, Flags, Result, Shim, StartOpts, socket_address, spawn};
use torpor_runsc::spec::Spec;
use torpor_sandbox::node::read_oci_json;

use crate::end_signal::EndSignal;
use crate::task::container::Pod;
use crate::task::events::Events;
use crate::task::{TaskService, timestamp, verbs};
use crate::{KILLED, log};

/// Environment variable with the address of containerd's ttrpc socket.
const TTRPC_ADDRESS: &str = "TTRPC_ADDRESS";
/// Time between two looks whether the shim has a container. containerd may die after it has started
/// a shim and before it makes the first container, or after it has deleted the last one and before
/// it ends the shim. Nothing ends such a shim but itself.
const LOOK: Duration = Duration::from_secs(30);
/// Time in which the calls under way end once the shim is to end.
const END_LIMIT: Duration = Duration::from_secs(3);

/// A process of the shim's program that containerd has started.
pub(crate) struct Service {
    /// The container for which containerd started it.
    id: String,
    namespace: String,
    /// Address of the socket that it serves.
    socket: String,
    bundle: PathBuf,
    end: Arc<EndSignal>,
    pod: OnceLock<Arc<Pod>>,
}

/// Returns the path of a socket, by its address.
fn path_of(address: &str) -> &str {
    address.strip_prefix("unix://").unwrap_or(address)
}

fn other(error: impl std::fmt::Display) -> Error {
    Error::Other(error.to_string())
}

impl Shim for Service {
    type T = TaskService;

    fn new(_runtime: &str, args: &Flags, _config: &mut Config) -> Self {
        Self {
            id: args.id.clone(),
            namespace: args.namespace.clone(),
            socket: args.socket.clone(),
            bundle: match args.bundle.as_str() {
                "" => PathBuf::from("."),
                bundle => bundle.into(),
            },
            end: Arc::default(),
            pod: OnceLock::new(),
        }
    }

    /// Starts the pod's shim, or finds the one that runs: the first container of a pod is the pause
    /// container.
    fn start_shim(&mut self, opts: StartOpts) -> Result<String> {
        let spec = read_oci_json(Path::new("config.json"), "spec").map_err(other)?;
        let sandbox = Spec(spec).sandbox_id().map(str::to_owned).map_err(other)?;
        let address = socket_address(&opts.address, &opts.namespace, &sandbox);
        if UnixStream::connect(path_of(&address)).is_err() {
            if opts.id != sandbox {
                return Err(other(
                    "the pod's shim has ended, and its containers with it",
                ));
            }
            let (pid, _) = spawn(opts, &sandbox, Vec::new())?;
            containerd_shim::cgroup::adjust_oom_score(pid)?;
        }
        write_address(&address)?;
        Ok(address)
    }

    /// Removes what a container has left whose shim is dead. containerd kills this process after
    /// five seconds, and the removal goes on, with the unmounting of the root file system: after
    /// such a kill containerd leaves the bundle as it is until it starts the next time.
    fn delete_shim(&mut self) -> Result<DeleteResponse> {
        let bundle = std::path::absolute(&self.bundle).map_err(other)?;
        let bundle = bundle
            .to_str()
            .ok_or_else(|| other("the bundle's path is not UTF-8"))?;
        let args = ["--force", "--bundle", bundle, &self.id];
        verbs::run_detached("delete", &args).map_err(other)?;
        Ok(DeleteResponse {
            exit_status: KILLED.into(),
            exited_at: MessageField::some(timestamp(SystemTime::now())),
            ..DeleteResponse::default()
        })
    }

    fn wait(&mut self) {
        let is_unused = || self.pod.get().is_none_or(|pod| pod.is_unused());
        self.end.wait_or_unused(LOOK, is_unused);
        if let Some(pod) = self.pod.get() {
            pod.events.finish();
        }
        // containerd removes the directory of this process meanwhile, with the file by which the
        // library finds the socket.
        let _ = std::fs::remove_file(path_of(&self.socket));
        // The library waits for calls that containerd has given up.
        std::thread::spawn(|| {
            std::thread::sleep(END_LIMIT);
            std::process::exit(0);
        });
    }

    fn create_task_service(&self, _publisher: RemotePublisher) -> Self::T {
        log::begin();
        // The shim outlives containerd, and gets no signals of its terminal.
        let _ = rustix::process::setsid();
        let address = std::env::var(TTRPC_ADDRESS).unwrap_or_default();
        let events = Events::begin(address, self.namespace.clone());
        let events = events.expect("the shim can start its first thread");
        let pod = Arc::new(Pod::new(events, Arc::clone(&self.end)));
        TaskService {
            pod: Arc::clone(self.pod.get_or_init(|| pod)),
        }
    }
}
