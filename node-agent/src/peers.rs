//! Images from node to node: each agent serves the images of its node to the agents of nodes whose
//! Pods continue from them.
//!
//! Both ends use TLS 1.3 with certificates that they made themselves. The digest of a node's
//! certificate is in the status of its SandboxNode, which only that node's agent may write
//! (`deploy/base/admission.yaml`). So the apiserver says which node is at the other end, and no
//! secret passes the network.
//!
//! | module | content |
//! |---|---|
//! | `identity` | key and certificate of this agent, and the check of the other end's |
//! | `protocol` | request and answer |
//! | `server` | connections, requests and content |
//! | `admit` | decides whether a node gets an image |
//! | `client` | asks a node for an image and downloads it |

mod admit;
pub(crate) mod client;
mod identity;
mod protocol;
mod server;

pub(crate) use identity::Identity;
#[cfg(test)]
pub(crate) use protocol::Reason;
pub(crate) use server::{Server, described, serve};

#[cfg(test)]
mod tests;
