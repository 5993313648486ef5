//! `kubectl torpor`: the kubectl plugin of Torpor. It uses the Kubernetes API only.
//!
//! - [`args`]: the command line
//! - [`connect`], [`objects`]: the client, and the lists of API objects
//! - [`view`]: the API objects of a sandbox, joined. Pure
//! - [`get`], [`top`], [`why`]: views as text and as data. Pure
//! - [`change`], [`goal`]: `hibernate`, `wake`, `suspend`, `resume`: one patch, then a wait for
//!   conditions. `goal` decides, and is pure
//! - [`snapshots`], [`tree`], [`pools`]: the lists of snapshots and of warm pools. Pure
//! - [`listing`]: a list as a table and as data. Pure
//! - [`snapshot`], [`fork`], [`rollback`]: a snapshot, copies that continue from one, a Sandbox
//!   that continues from an earlier one
//! - [`archive`], [`archives`]: a Sandbox moves into a repository and back; the list of archives
//! - [`watching`]: the wait for an object
//! - [`drain`]: suspension of all sandboxes of a node before `kubectl drain`
//! - [`doctor`]: facts of a cluster, and checks of the facts. The checks are pure
//! - [`complete`]: completion for kubectl and shells
//! - [`run`]: from arguments to an exit code

pub mod archive;
pub mod archives;
pub mod args;
pub mod change;
pub mod complete;
pub mod connect;
pub mod doctor;
pub mod drain;
pub mod error;
pub mod fork;
pub mod get;
pub mod goal;
pub mod listing;
pub mod objects;
pub mod output;
pub mod pools;
pub mod rollback;
pub mod run;
pub mod snapshot;
pub mod snapshots;
pub mod table;
pub mod texts;
pub mod top;
pub mod tree;
pub mod units;
pub mod view;
pub mod watching;
pub mod why;
