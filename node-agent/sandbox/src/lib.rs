//! The transitions of a sandbox on this node: restores, wakes, dozes and ends.
//!
//! [`torpor_core::transition`] decides; [`restore::transitions`] provides the facts and acts of the
//! node. Callers hold the sandbox' lock unless a function takes it.
//!
//! | module | subject |
//! |---|---|
//! | [`node`] | configuration, records, runsc and cgroups of the node |
//! | [`restore`] | restores in place and in new Pods, and all that they need |
//! | [`doze`] | memory of a dozing sandbox pushed into swap |
//! | [`plan`] | the steps of the agent's plan |
//! | [`observe`], [`idle`], [`figures`], `manifest` | facts for decisions and for images |
//! | [`gofers`], `exec_leftovers` | containers without a gofer; processes that exec left behind |
//! | [`claim`] | a claim in a sandbox that runs already |
//! | [`process`], `hook` | processes that Torpor runs in a sandbox |
//! | [`console`], [`streams`] | terminals and standard streams of containers |
//! | [`generation`] | the file by which programs notice that they were copied |
//! | [`limits`] | limits of a sandbox that starts or runs |
//! | [`address`] | addresses of a pod whose sandbox has no process |
//! | [`packet_sockets`] | packet filters of a sandbox that starts |
//! | [`log`] | messages for the node's operator |
//! | [`stages`] | where the time of a wake went |

pub mod address;
pub mod claim;
pub mod console;
pub mod doze;
pub mod exec_leftovers;
pub mod figures;
pub mod generation;
pub mod gofers;
mod hook;
pub mod idle;
pub mod limits;
pub mod log;
mod manifest;
pub mod node;
pub mod observe;
pub mod packet_sockets;
pub mod plan;
pub mod process;
pub mod restore;
pub mod stages;
pub mod streams;
