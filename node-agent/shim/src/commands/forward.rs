//! `forward`: carries one connection to the pod's loopback (a `kubectl port-forward`) to the same
//! port in the sandbox. A hibernated sandbox is woken first.
//!
//! The keeper starts one such command for each connection. It has set the connection so that it is
//! reset when it is closed: after any failure here, the client sees an error.
//!
//! A helper makes the connection in the sandbox's own network stack: gVisor runs it in the pause
//! container ([`torpor_inside`]). Its standard input is one end of a pair of sockets. gVisor has a
//! call for port-forwarding, too; docs/decisions/2026-11-21-port-forward-over-loopback.md has the
//! reasons against it.

use std::net::TcpStream;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;

use anyhow::{Context, bail, ensure};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::sockopt;
use rustix::process::{Pid, getppid, set_parent_process_death_signal};
use torpor_core::ids::{ContainerId, SandboxId};
use torpor_inside::carry::{Ended, carry};
use torpor_inside::forward::CONNECTED;
use torpor_records::WakeCause;
use torpor_runsc::exec::helper_args;
use torpor_runsc::forward::{self, Forward};

use torpor_sandbox::node::Node;
use torpor_sandbox::process::{Process, helper, nothing};
use torpor_sandbox::restore::transitions;

/// Carries the connection on standard input to the sandbox. Returns when the connection has ended.
pub(crate) fn forward(node: &Node, sandbox: &SandboxId) -> anyhow::Result<()> {
    let client: TcpStream = std::io::stdin().as_fd().try_clone_to_owned()?.into();
    let port = client
        .local_addr()
        .context("standard input is not a connection")?
        .port();
    // Until the sandbox is awake, nothing may end this process: a wake must not be cut off.
    let lock = transitions::lock_awake(node, sandbox, WakeCause::Forward)?;
    let pause = ContainerId::from(sandbox.clone());
    let record = node.container(&pause)?;
    // The wake has moved this process into the sandbox's cgroup, whose processes are killed when
    // the sandbox falls asleep. So the process moves to the pause container's.
    node.cgroups.place(&record.cgroup, std::process::id())?;
    end_with_parent(record.keeper_pid)?;
    let open = forward::begin(&node.records, sandbox)?;
    let helper = Helper::start(node, sandbox, &pause, port)?;
    node.records.note_call(sandbox)?;
    // From now on a pause requests the end of this process, and waits for it.
    drop(lock);
    let ended = serve(&client, &helper.stream, &open);
    helper.process.end(node, sandbox);
    drop(open);
    if let Ended::Far = ended? {
        // All bytes are delivered, so the connection ends without a reset.
        sockopt::set_socket_linger(&client, None)?;
    }
    Ok(())
}

/// Makes the kernel kill this process when the keeper ends, the thread that has started it.
fn end_with_parent(keeper: u32) -> anyhow::Result<()> {
    set_parent_process_death_signal(Some(rustix::process::Signal::KILL))?;
    let keeper = i32::try_from(keeper).ok().and_then(Pid::from_raw);
    ensure!(getppid() == keeper, "the shim has ended");
    Ok(())
}

/// Waits for the helper's connection and carries the bytes, until a pause requests the end.
fn serve(client: &TcpStream, stream: &UnixStream, open: &Forward) -> anyhow::Result<Ended> {
    let mut fds = [
        PollFd::new(open, PollFlags::IN),
        PollFd::new(stream, PollFlags::IN),
    ];
    while let Err(errno) = poll(&mut fds, None) {
        ensure!(errno == rustix::io::Errno::INTR, errno);
    }
    if !fds[0].revents().is_empty() {
        return Ok(Ended::Stopped);
    }
    let mut answer = [0];
    if rustix::io::read(stream, &mut answer)? == 0 || answer != CONNECTED {
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
        let (nothing, program) = (nothing()?, helper()?);
        let port = port.to_string();
        let args = helper_args(&["torpor-forward", "forward", &port], pause.as_str())?;
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
