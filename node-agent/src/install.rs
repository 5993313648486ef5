//! Puts Torpor on a node, and takes it away again.
//!
//! | module | subject |
//! |---|---|
//! | [`plan`] | what is to change in containerd's configuration; pure |
//! | [`containerd`] | the text of that configuration |
//! | [`apply`] | the order of changes on the node, and what a crash leaves |
//! | [`runsc`] | the build of gVisor that is installed, and what is asked of a foreign one |
//! | [`restart`] | containerd ends and comes back |
//! | [`zram`] | swap in compressed memory, where it is asked for |
//! | [`host`] | files below the host's root |

mod apply;
mod containerd;
mod error;
mod eviction;
mod host;
mod plan;
mod restart;
mod runsc;
mod zram;

pub(crate) use apply::{OCI, Outcome};
pub(crate) use error::Error;

use crate::args::{InstallArgs, UninstallArgs};

/// Places the binaries on the node and makes its containerd know the runtime handler; restarts containerd only when its
/// configuration changed. A second call changes nothing. Blocks, for at most the limit of a restart and some copying.
pub(crate) fn install(args: &InstallArgs) -> Result<Outcome, Error> {
    apply::install(args)
}

/// Takes back what [`install`] did, byte for byte where nobody changed it since; refuses while pods of the runtime run.
pub(crate) fn uninstall(args: &UninstallArgs) -> Result<Outcome, Error> {
    apply::uninstall(args)
}
