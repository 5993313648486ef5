//! Command line of the runtime.

use std::{
    ffi::OsString,
    path::{Path, PathBuf},
    time::Duration,
};

use clap::{Parser, Subcommand};
use torpor_daemon::go_flags::{BindAddress, duration};

/// Upstream's limit of a command.
const EXEC_TIMEOUT: Duration = Duration::from_secs(300);

/// Where upstream's sandboxd has its files.
const WORKSPACE: &str = "/workspace";

/// Serves upstream's sandbox APIs, the legacy one and sandboxd's: commands and files of a directory.
#[derive(Clone, Debug, Parser)]
#[command(name = "sandbox-runtime", version)]
pub struct Flags {
    /// Where the legacy API is served; 0: nowhere
    #[arg(long, default_value = ":8888")]
    pub legacy_bind_address: BindAddress,
    /// Where sandboxd's REST API is served; 0: nowhere
    #[arg(long, default_value = ":8080")]
    pub rest_bind_address: BindAddress,
    /// Where sandboxd's gRPC API is served; 0: nowhere
    #[arg(long, default_value = ":9090")]
    pub grpc_bind_address: BindAddress,
    /// The directory that clients see, and in which commands start; without it /app, or for `run` the working directory
    #[arg(long, env = "SANDBOX_BASE_DIR")]
    pub root: Option<PathBuf>,
    /// The same for sandboxd's APIs; without it /workspace if that is a directory, else --root
    #[arg(long)]
    pub root_dir: Option<PathBuf>,
    /// Where the Pod's emptyDir `torpor` is mounted, in which a call marks the sandbox as busy
    #[arg(long, env = "SANDBOX_BUSY_DIR", default_value = "/run/torpor")]
    pub busy_dir: PathBuf,
    /// A file with the bearer token that every call must show, of all three APIs; read at each
    /// call. Without it SANDBOXD_AUTH_TOKEN has the token; without both everybody may call
    #[arg(long, env = "SANDBOXD_AUTH_TOKEN_FILE")]
    pub auth_token_file: Option<PathBuf>,
    /// Variables whose names begin so are told to clients of the REST API
    #[arg(long, default_value = "SANDBOX_")]
    pub metadata_env_prefix: String,
    /// Longest time of a command of the legacy API; without it SANDBOX_EXEC_TIMEOUT_SECONDS, or 300s
    #[arg(long, value_parser = positive)]
    pub exec_timeout: Option<Duration>,
    /// Bytes that are kept of each output of a command; with gRPC, more are an error, and Start has no limit
    #[arg(long, default_value_t = 8 << 20)]
    pub max_output_bytes: usize,
    /// How many commands of the gRPC API may run at once
    #[arg(long, default_value_t = 128)]
    pub max_processes: usize,
    /// How many directories may be watched at once
    #[arg(long, default_value_t = 64)]
    pub max_watches: usize,
    /// Bytes of a piece of output of the gRPC API
    #[arg(long, default_value_t = 4096, value_parser = chunk_size)]
    pub stream_chunk_size: usize,
    /// Largest body of an upload
    #[arg(long, default_value_t = 1 << 30)]
    pub max_upload_bytes: u64,
    /// How many connections there may be at once, of each API
    #[arg(long, default_value_t = 256)]
    pub max_connections: usize,
    /// Longest time for the head of a request
    #[arg(long, default_value = "10s", value_parser = positive)]
    pub read_header_timeout: Duration,
    /// Longest time for the next piece of a request's body
    #[arg(long, default_value = "60s", value_parser = positive)]
    pub read_body_timeout: Duration,
    /// A gRPC client that is silent for so long is asked for a sign of life, and has as long to give it
    #[arg(long, default_value = "30s", value_parser = positive)]
    pub grpc_keepalive: Duration,
    /// A gRPC connection without a call for so long is closed
    #[arg(long, default_value = "5m", value_parser = positive)]
    pub grpc_idle_timeout: Duration,
    /// How long calls under way may take after SIGTERM
    #[arg(long, default_value = "10s", value_parser = duration)]
    pub shutdown_timeout: Duration,
    #[command(subcommand)]
    pub action: Option<Action>,
}

/// What else this program does.
#[derive(Clone, Debug, PartialEq, Eq, Subcommand)]
pub enum Action {
    /// Serves beside a program, whose exit code, signals and standard streams are the container's
    Run {
        /// The program and its arguments, after `--`; none: it only serves
        #[arg(last = true)]
        command: Vec<OsString>,
    },
    /// Copies this program into a directory and ends
    Install { directory: PathBuf },
}

fn positive(text: &str) -> Result<Duration, String> {
    match duration(text)? {
        Duration::ZERO => Err("must be positive".to_owned()),
        value => Ok(value),
    }
}

/// Small enough for a message.
fn chunk_size(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(size @ 1..=1_048_576) => Ok(size),
        _ => Err("must be from 1 to 1048576".to_owned()),
    }
}

/// The variable's value is no positive number of seconds.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("SANDBOX_EXEC_TIMEOUT_SECONDS: {0:?} is not a positive number")]
pub struct NotSeconds(String);

impl Flags {
    /// The directory of sandboxd's APIs.
    pub fn root_dir(&self) -> PathBuf {
        let workspace = || Path::new(WORKSPACE).is_dir().then(|| WORKSPACE.into());
        let given = self.root_dir.clone();
        given
            .or_else(workspace)
            .unwrap_or_else(|| self.root().to_path_buf())
    }

    /// The directory that clients see: the flag or upstream's variable; else upstream's default, or in an image of the user's own the directory that its program starts in.
    pub fn root(&self) -> &Path {
        let own_image = matches!(self.action, Some(Action::Run { .. }));
        let default = Path::new(if own_image { "." } else { "/app" });
        self.root.as_deref().unwrap_or(default)
    }

    /// The limit of a command: the flag, else upstream's variable, else upstream's default. A wrong variable counts as none, as with upstream, and is reported.
    pub fn exec_timeout(&self, variable: Option<&str>) -> (Duration, Option<NotSeconds>) {
        match (self.exec_timeout, variable) {
            (Some(limit), _) => (limit, None),
            (None, None) => (EXEC_TIMEOUT, None),
            (None, Some(text)) => match seconds(text) {
                Some(limit) => (limit, None),
                None => (EXEC_TIMEOUT, Some(NotSeconds(text.to_owned()))),
            },
        }
    }
}

fn seconds(text: &str) -> Option<Duration> {
    let limit = Duration::try_from_secs_f64(text.trim().parse().ok()?).ok()?;
    (!limit.is_zero()).then_some(limit)
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case(&[], None, 300_000, false)]
    #[case(&[], Some("2.5"), 2500, false)]
    #[case(&["--exec-timeout=1s"], Some("2.5"), 1000, false)]
    #[case(&[], Some("0"), 300_000, true)]
    #[case(&[], Some("-1"), 300_000, true)]
    #[case(&[], Some("nan"), 300_000, true)]
    #[case(&[], Some("inf"), 300_000, true)]
    #[case(&[], Some("soon"), 300_000, true)]
    fn the_limit_of_a_command_is_upstreams(
        #[case] arguments: &[&str],
        #[case] variable: Option<&str>,
        #[case] milliseconds: u128,
        #[case] reported: bool,
    ) {
        let flags = Flags::parse_from(["runtime"].iter().chain(arguments));
        let (limit, wrong) = flags.exec_timeout(variable);
        assert_eq!(
            (limit.as_millis(), wrong.is_some()),
            (milliseconds, reported)
        );
    }

    #[test]
    fn defaults_are_upstreams() {
        let flags = Flags::parse_from(["runtime"]);
        assert_eq!(flags.legacy_bind_address, ":8888".parse().unwrap());
        assert_eq!(flags.root(), "/app");
        assert_eq!(flags.rest_bind_address, ":8080".parse().unwrap());
        assert_eq!(flags.grpc_bind_address, ":9090".parse().unwrap());
        assert_eq!(flags.metadata_env_prefix, "SANDBOX_");
        assert_eq!(flags.stream_chunk_size, 4096);
        assert_eq!(flags.shutdown_timeout, Duration::from_secs(10));
    }

    #[rstest]
    #[case(&["run"], ".", &[])]
    #[case(&["run", "--", "a", "--root=/b", "--", "-c"], ".", &["a", "--root=/b", "--", "-c"])]
    #[case(&["--root=/r", "run", "--", "install"], "/r", &["install"])]
    fn what_follows_two_dashes_is_the_users(
        #[case] arguments: &[&str],
        #[case] root: &str,
        #[case] program: &[&str],
    ) {
        let flags = Flags::parse_from(["runtime"].iter().chain(arguments));
        let command = program.iter().map(OsString::from).collect();
        assert_eq!(flags.root(), root);
        assert_eq!(flags.action, Some(Action::Run { command }));
    }
}
