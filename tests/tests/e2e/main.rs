//! End-to-end tests on a real cluster, with a real kubelet, containerd and gVisor.
//!
//! Run as root on the node of the cluster that KUBECONFIG names: `cargo test -p torpor-tests --test
//! e2e -- --test-threads=4`.
//!
//! The tests `nodes::` need a second node and an S3 server (`hack/cluster up --nodes 2`,
//! `hack/cluster store up`), and TORPOR_DEV.
//!
//! TORPOR_PLUGIN names the folder into which hack/plugin put the kubectl plugin; without it kubectl
//! finds the plugin in PATH. TORPOR_DEV=hack/cluster adds the logs of a development cluster's
//! programs to the explanation of a failure.

mod agent_user;
mod alone;
mod badinput;
mod begun;
mod claims;
mod clock;
mod connections;
mod copies;
mod debug;
mod examples;
mod forwards;
mod golden;
mod hibernate;
mod hooks;
mod inject;
mod kata;
mod late_bind;
mod leftovers;
mod limits;
mod losses;
mod lost_containers;
mod networks;
mod nodes;
mod oci;
mod oncrash;
mod packet_filter;
mod plugin;
mod probes;
mod resources;
mod rights;
mod router;
mod runsc_requests;
mod sandbox;
mod sdk;
mod sleep;
mod staging;
mod streams;
mod suspend;
mod volumes;
mod wake;
mod windows;
