//! `kubectl torpor`: what a person asks of Torpor, and how they ask for it. All of it over the Kubernetes API.
//!
//! - [`args`]: the command line
//! - [`connect`], [`world`]: the client, and one look at what the API has
//! - [`view`]: what the API's objects say of a sandbox, joined. Pure
//! - [`get`], [`top`], [`why`]: views as text and as data. Pure
//! - [`change`], [`goal`]: `hibernate`, `wake`, `suspend`, `resume`: one patch, then waiting for conditions; `goal` decides, and is pure
//! - [`drain`]: the same of all sandboxes of a node that is to be taken away
//! - [`doctor`]: facts of a cluster, and what is wrong with them. The checks are pure
//! - [`complete`]: what kubectl and shells ask while somebody types
//! - [`run`]: from arguments to an exit code

pub mod args;
pub mod change;
pub mod complete;
pub mod connect;
pub mod doctor;
pub mod drain;
pub mod error;
pub mod get;
pub mod goal;
pub mod output;
pub mod run;
pub mod table;
pub mod top;
pub mod units;
pub mod view;
pub mod why;
pub mod words;
pub mod world;
