//! `forward`: carry one connection to the pod's loopback (a `kubectl port-forward`) to the same port in the sandbox. A
//! hibernated sandbox is woken first.
//!
//! The keeper starts one such program for each connection, and has set the connection so that it is reset when it is
//! closed: whatever fails here, who dialled sees an error. Within the sandbox' own network stack the connection is made by
//! a helper: this same program, run in the pause container by gVisor from our file (`forward-inside`), with one end of a
//! pair of sockets as its standard input. gVisor has a call for port-forwarding too; why it is not used says
//! docs/decisions/2026-11-21-port-forward-over-loopback.md.

use std::net::TcpStream;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;

use anyhow::{Context, bail, ensure};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::sockopt;
use rustix::process::{Pid, getppid, set_parent_process_death_signal};
use torpor_core::ids::{ContainerId, SandboxId};
use torpor_records::WakeCause;
use torpor_runsc::exec::helper_args;
use torpor_runsc::forward::{self, Forward};

use crate::exec::awake;
use crate::node::Node;
use crate::process::{Process, nothing, own_program};

mod carry;
mod inside;

use carry::{Ended, carry};
pub(crate) use inside::inside;

pub(crate) fn forward(node: &Node, sandbox: &SandboxId) -> anyhow::Result<()> {
    let client: TcpStream = std::io::stdin().as_fd().try_clone_to_owned()?.into();
    let port = client
        .local_addr()
        .context("standard input is not a connection")?
        .port();
    // Before it is awake nothing may end this program: a wake should not be cut off.
    let lock = awake(node, sandbox, WakeCause::Forward)?;
    let pause = ContainerId::from(sandbox.clone());
    let record = node.container(&pause)?;
    // A wake is done in the sandbox' cgroup, whose processes are killed when the sandbox is put to sleep.
    node.cgroups.place(&record.cgroup, std::process::id())?;
    end_with_parent(record.keeper_pid)?;
    let open = forward::begin(&node.records, sandbox)?;
    let helper = Helper::start(node, sandbox, &pause, port)?;
    node.records.note_call(sandbox)?;
    // From now on a pause asks this program to end, and waits until it has.
    drop(lock);
    let ended = serve(&client, &helper.stream, &open);
    helper.process.end(node, sandbox);
    drop(open);
    if let Ended::ByFar = ended? {
        // All is delivered, so that it is an ordinary end.
        sockopt::set_socket_linger(&client, None)?;
    }
    Ok(())
}

fn end_with_parent(keeper: u32) -> anyhow::Result<()> {
    set_parent_process_death_signal(Some(rustix::process::Signal::KILL))?;
    let keeper = i32::try_from(keeper).ok().and_then(Pid::from_raw);
    ensure!(getppid() == keeper, "the keeper has ended");
    Ok(())
}

fn serve(client: &TcpStream, stream: &UnixStream, open: &Forward) -> anyhow::Result<Ended> {
    let mut asked = [
        PollFd::new(open, PollFlags::IN),
        PollFd::new(stream, PollFlags::IN),
    ];
    while let Err(errno) = poll(&mut asked, None) {
        ensure!(errno == rustix::io::Errno::INTR, errno);
    }
    if !asked[0].revents().is_empty() {
        return Ok(Ended::Asked);
    }
    let mut answer = [0];
    if rustix::io::read(stream, &mut answer)? == 0 || answer != inside::CONNECTED {
        bail!("no process in the sandbox accepts connections to this port");
    }
    carry(client.as_fd(), stream.as_fd(), Some(open.as_fd()), None)
}

/// The helper in the sandbox.
struct Helper {
    stream: UnixStream,
    process: Process,
}

impl Helper {
    fn start(
        node: &Node,
        sandbox: &SandboxId,
        pause: &ContainerId,
        port: u16,
    ) -> anyhow::Result<Self> {
        let (stream, theirs) = UnixStream::pair()?;
        let (nothing, program) = (nothing()?, own_program()?);
        let port = port.to_string();
        let args = helper_args(&["torpor-forward", "forward-inside", &port], pause.as_str())?;
        let files = [
            theirs.as_fd(),
            nothing.as_fd(),
            nothing.as_fd(),
            program.as_fd(),
        ];
        let process = Process::begin(node, sandbox, pause, &args, &files)
            .context("cannot run the helper in the sandbox")?;
        Ok(Self { stream, process })
    }
}
