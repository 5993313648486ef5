//! Installs Torpor on a node, and uninstalls it.
//!
//! | module | subject |
//! |---|---|
//! | [`plan`] | changes to make in containerd's configuration; pure |
//! | [`containerd`] | the text of that configuration |
//! | [`apply`] | the order of changes on the node, and the files that a crash leaves |
//! | [`runsc`] | the runsc build to install, and the checks of a build of the host |
//! | [`eviction`] | the kubelet's eviction limits for disks |
//! | [`restart`] | the restart of containerd |
//! | [`zram`] | swap in compressed memory, if an option requests it |
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

pub(crate) use apply::Outcome;
pub(crate) use error::Error;

use crate::args::{InstallArgs, UninstallArgs};

/// Places the binaries on the node and adds the runtime handler to containerd's configuration.
/// Restarts containerd only if its configuration changed. A second call changes nothing. Blocks for
/// at most the time limit of a restart and the time of some copies.
pub(crate) fn install(args: &InstallArgs) -> Result<Outcome, Error> {
    apply::install(args)
}

/// Undoes [`install`]: restores each file to the byte, unless something has changed the file since.
/// Refuses while pods of the runtime run.
pub(crate) fn uninstall(args: &UninstallArgs) -> Result<Outcome, Error> {
    apply::uninstall(args)
}
