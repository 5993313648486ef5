//! End-to-end tests: on a real cluster, with a real kubelet, containerd and gVisor.
//!
//! `cargo test -p torpor-tests --test e2e -- --test-threads=4`, as root on the node of the cluster that KUBECONFIG names.
//! TORPOR_PLUGIN names the folder that hack/plugin put the kubectl plugin into; without it kubectl finds it in PATH.
//! TORPOR_DEV=hack/cluster adds the logs of a development cluster's programs to the explanation of a failure.

mod alone;
mod badinput;
mod begun;
mod claims;
mod clock;
mod connections;
mod copies;
mod debug;
mod forwards;
mod hearing;
mod hibernate;
mod hooks;
mod inject;
mod kata;
mod leftovers;
mod limits;
mod losses;
mod lost;
mod networks;
mod oci;
mod oncrash;
mod plugin;
mod resources;
mod rights;
mod router;
mod sandbox;
mod sdk;
mod sleep;
mod streams;
mod suspend;
mod told;
mod volumes;
mod wake;
mod windows;
