//! Servers of the benchmark of the router: processes on this machine that end with it.

use std::{path::Path, process::Stdio, time::Duration};

use anyhow::{Context as _, ensure};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use tokio::{
    io::{AsyncBufReadExt, BufReader},
    net::TcpStream,
    process::{Child, Command},
};
use torpor_tests::{machine, wait};

use crate::node;

/// Time for a server to start.
const START: Duration = Duration::from_secs(30);

#[derive(Debug)]
pub(super) struct Server {
    pub pid: i32,
    pub port: u16,
    _process: Child,
}

impl Server {
    /// Starts a server of the benchmark's program, which prints its port.
    pub(super) async fn start(program: &Path, name: &str) -> anyhow::Result<Self> {
        let mut process = Command::new(program)
            .arg(name)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .with_context(|| program.display().to_string())?;
        let pid = i32::try_from(process.id().context("it has ended")?)?;
        let output = process.stdout.take().context("no pipe")?;
        let mut server = Self {
            pid,
            port: 0,
            _process: process,
        };
        let mut line = String::new();
        let mut output = BufReader::new(output);
        let read = tokio::time::timeout(START, output.read_line(&mut line)).await;
        read.with_context(|| format!("{name} does not start"))??;
        let port = line.trim().parse();
        server.port = port.with_context(|| format!("{name} printed no port: {line:?}"))?;
        Ok(server)
    }

    /// Starts nginx as a proxy.
    pub(super) async fn nginx(configuration: &Path, port: u16) -> anyhow::Result<Self> {
        let process = Command::new("nginx")
            .arg("-c")
            .arg(configuration)
            .stdin(Stdio::null())
            .spawn()
            .context("nginx is missing (Debian package nginx)")?;
        let server = Self {
            pid: i32::try_from(process.id().context("nginx has ended")?)?,
            port,
            _process: process,
        };
        wait::until("nginx accepts connections", START, async || {
            let connected = TcpStream::connect(("127.0.0.1", port)).await;
            Ok(connected.map(drop).map_err(|error| error.to_string()))
        })
        .await?;
        Ok(server)
    }

    /// Returns the processor time of the server and its children so far.
    pub(super) fn processor_time(&self) -> Duration {
        let mut own = machine::processes();
        own.retain(|process| process.pid == self.pid || process.parent == self.pid);
        node::processor_time(&own)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // SIGTERM, at which nginx ends its workers. The process may have ended before.
        let _ = kill(Pid::from_raw(self.pid), Signal::SIGTERM);
    }
}

/// Returns a port that is free.
pub(super) async fn free_port(program: &Path) -> anyhow::Result<u16> {
    let ran = Command::new(program).arg("free-port").output().await?;
    ensure!(ran.status.success(), "free-port: {}", ran.status);
    Ok(String::from_utf8(ran.stdout)?.trim().parse()?)
}

/// Returns the configuration of nginx as a proxy with as many processes as cores, and with
/// connections that are kept.
pub(super) fn nginx_configuration(work: &Path, port: u16, sandbox: u16) -> String {
    let work = work.display();
    let paths = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"]
        .map(|name| format!("{name}_temp_path {work}/{name};"))
        .join("\n    ");
    format!(
        r#"worker_processes auto;
daemon off;
pid {work}/nginx.pid;
error_log {work}/nginx.log;
events {{ worker_connections 1024; }}
http {{
    access_log off;
    {paths}
    keepalive_requests 100000000;
    upstream sandbox {{
        server 127.0.0.1:{sandbox};
        keepalive 64;
        keepalive_requests 100000000;
    }}
    server {{
        listen 127.0.0.1:{port} reuseport;
        location / {{
            proxy_pass http://sandbox;
            proxy_http_version 1.1;
            proxy_set_header Connection "";
            proxy_set_header X-Forwarded-For $remote_addr;
        }}
    }}
}}
"#
    )
}
