//! Command line of the runtime.

use std::{
    ffi::OsString,
    path::{Path, PathBuf},
    time::Duration,
};

use clap::{Parser, Subcommand};
use torpor_daemon::go_flags::{BindAddress, duration};

/// Upstream's time limit of a command.
const EXEC_TIMEOUT: Duration = Duration::from_secs(300);

/// Root directory of upstream's sandboxd.
const WORKSPACE: &str = "/workspace";

/// Serves upstream's sandbox APIs for commands and files: the legacy API and sandboxd's
#[derive(Clone, Debug, Parser)]
#[command(
    name = "sandbox-runtime",
    version = concat!(env!("CARGO_PKG_VERSION"), " (commit ", env!("TORPOR_GIT_COMMIT"), ")")
)]
pub struct Flags {
    /// Address of the legacy API; 0 disables it
    #[arg(long, default_value = ":8888")]
    pub legacy_bind_address: BindAddress,
    /// Address of sandboxd's REST API; 0 disables it
    #[arg(long, default_value = ":8080")]
    pub rest_bind_address: BindAddress,
    /// Address of sandboxd's gRPC API; 0 disables it
    #[arg(long, default_value = ":9090")]
    pub grpc_bind_address: BindAddress,
    /// Directory that clients see and in which commands start; default: /app, or for `run` the
    /// working directory
    #[arg(long, env = "SANDBOX_BASE_DIR")]
    pub root: Option<PathBuf>,
    /// Root directory of sandboxd's APIs; default: /workspace if it is a directory, else --root
    #[arg(long)]
    pub root_dir: Option<PathBuf>,
    /// Mount point of the Pod's emptyDir `torpor`, in which a call marks the sandbox as busy
    #[arg(long, env = "SANDBOX_BUSY_DIR", default_value = "/run/torpor")]
    pub busy_dir: PathBuf,
    /// File with the bearer token that each call of the three APIs must have; read at each call.
    /// Without it SANDBOXD_AUTH_TOKEN has the token; without both every client may call
    #[arg(long, env = "SANDBOXD_AUTH_TOKEN_FILE")]
    pub auth_token_file: Option<PathBuf>,
    /// Prefix of the environment variables that clients of the REST API may read
    #[arg(long, default_value = "SANDBOX_")]
    pub metadata_env_prefix: String,
    /// Time limit of a command of the legacy API; default: SANDBOX_EXEC_TIMEOUT_SECONDS, or 300s
    #[arg(long, value_parser = positive)]
    pub exec_timeout: Option<Duration>,
    /// Maximum size of each output of a command in bytes: the legacy API drops the rest, gRPC's
    /// Execute fails, Start has no limit
    #[arg(long, default_value_t = 8 << 20)]
    pub max_output_bytes: usize,
    /// Maximum number of commands of the gRPC API that run at once
    #[arg(long, default_value_t = 128)]
    pub max_processes: usize,
    /// Maximum number of watches of directories at once
    #[arg(long, default_value_t = 64)]
    pub max_watches: usize,
    /// Maximum size of an output event of the gRPC API in bytes
    #[arg(long, default_value_t = 4096, value_parser = chunk_size)]
    pub stream_chunk_size: usize,
    /// Maximum size of the body of an upload in bytes
    #[arg(long, default_value_t = 1 << 30)]
    pub max_upload_bytes: u64,
    /// Maximum number of connections of each API at once
    #[arg(long, default_value_t = 256)]
    pub max_connections: usize,
    /// Time limit of the head of a request
    #[arg(long, default_value = "10s", value_parser = positive)]
    pub read_header_timeout: Duration,
    /// Time limit of the next piece of a request's body
    #[arg(long, default_value = "60s", value_parser = positive)]
    pub read_body_timeout: Duration,
    /// Time without traffic after which a gRPC client gets a ping, and time limit of its answer
    #[arg(long, default_value = "30s", value_parser = positive)]
    pub grpc_keepalive: Duration,
    /// Time without a call after which a gRPC connection is closed
    #[arg(long, default_value = "5m", value_parser = positive)]
    pub grpc_idle_timeout: Duration,
    /// Time limit of calls under way after SIGTERM
    #[arg(long, default_value = "10s", value_parser = duration)]
    pub shutdown_timeout: Duration,
    #[command(subcommand)]
    pub action: Option<Action>,
}

/// Subcommand.
#[derive(Clone, Debug, PartialEq, Eq, Subcommand)]
pub enum Action {
    /// Starts a program and serves beside it; forwards signals and ends with its exit code
    Run {
        /// Program and its arguments, after `--`; without it only the APIs are served
        #[arg(last = true)]
        command: Vec<OsString>,
    },
    /// Copies this program into a directory and ends
    Install {
        /// Directory for the copy
        directory: PathBuf,
    },
}

fn positive(text: &str) -> Result<Duration, String> {
    match duration(text)? {
        Duration::ZERO => Err("must be positive".to_owned()),
        value => Ok(value),
    }
}

/// Parses the size of an event, which has to fit into a message.
fn chunk_size(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(size @ 1..=1_048_576) => Ok(size),
        _ => Err("must be from 1 to 1048576".to_owned()),
    }
}

/// Invalid value of SANDBOX_EXEC_TIMEOUT_SECONDS.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("SANDBOX_EXEC_TIMEOUT_SECONDS: {0:?} is not a positive number")]
pub struct NotSeconds(String);

impl Flags {
    /// Returns the root directory of sandboxd's APIs.
    pub fn root_dir(&self) -> PathBuf {
        let workspace = || Path::new(WORKSPACE).is_dir().then(|| WORKSPACE.into());
        let given = self.root_dir.clone();
        given
            .or_else(workspace)
            .unwrap_or_else(|| self.root().to_path_buf())
    }

    /// Returns the root directory: the flag or upstream's variable, else the default.
    ///
    /// The default is upstream's, or with a user's program the directory in which it starts.
    pub fn root(&self) -> &Path {
        let own_image = matches!(self.action, Some(Action::Run { .. }));
        let default = Path::new(if own_image { "." } else { "/app" });
        self.root.as_deref().unwrap_or(default)
    }

    /// Returns the time limit of a command: the flag, else upstream's variable, else upstream's
    /// default.
    ///
    /// An invalid variable counts as none, as in upstream, and is returned too.
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
    fn the_time_limit_of_a_command_is_upstreams(
        #[case] arguments: &[&str],
        #[case] variable: Option<&str>,
        #[case] milliseconds: u128,
        #[case] reported: bool,
    ) {
        let flags = Flags::parse_from(["runtime"].iter().chain(arguments));
        let (limit, invalid) = flags.exec_timeout(variable);
        assert_eq!(
            (limit.as_millis(), invalid.is_some()),
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
    fn arguments_after_two_dashes_belong_to_the_users_program(
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
