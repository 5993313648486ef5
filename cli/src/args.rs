//! The command line.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Parser, Subcommand, ValueEnum};
use torpor_api::annotations::is_dns_subdomain;

/// How long `hibernate`, `wake`, `suspend` and `resume` wait unless told otherwise.
const TIMEOUT: &str = "2m";
/// The same of `drain`, where many wait for their turns.
const DRAIN_TIMEOUT: &str = "10m";
/// Longer nobody waits, and clocks can count so far.
const LONGEST: Duration = Duration::from_secs(8760 * 3600);

/// See and change what Torpor does with sandboxes.
///
/// Exit codes: 0 done; 1 failed, or refused by the cluster; 2 not understood; 3 doctor found something broken; 4 not known: time was over before the cluster said how it went, or doctor could not see everything.
#[derive(Debug, Parser)]
#[command(
    name = "kubectl-torpor",
    bin_name = "kubectl torpor",
    version,
    max_term_width = 120
)]
pub struct Args {
    #[command(flatten)]
    pub connection: Connection,
    #[command(subcommand)]
    pub command: Command,
}

/// Which cluster and namespace; kubectl's flags.
#[derive(Clone, Debug, Default, clap::Args)]
#[command(next_help_heading = "Cluster")]
pub struct Connection {
    /// File of clusters and users; by default the files of KUBECONFIG, or ~/.kube/config
    #[arg(long, global = true, value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,
    /// Context of the kubeconfig; by default its current one
    #[arg(long, global = true, value_name = "NAME")]
    pub context: Option<String>,
    /// Namespace; by default the context's
    #[arg(short, long, global = true, value_name = "NAME", value_parser = namespace)]
    pub namespace: Option<String>,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Sandboxes: what each does, since when it sleeps, what its memory costs, how it last woke
    Get(Get),
    /// Put sandboxes to sleep where they are: memory goes to the node's disk, the Pod stays
    Hibernate(Change),
    /// Wake sandboxes that sleep in place
    Wake(Change),
    /// Suspend sandboxes: memory goes to the node's disk, then the Pod is deleted
    Suspend(Change),
    /// Resume suspended sandboxes in a new Pod
    Resume(Change),
    /// Keep the memory of a node's sandboxes before the node is drained: cordon it, suspend them; they continue when it is uncordoned
    Drain(Drain),
    /// Why a sandbox is as it is, in words
    Why(Why),
    /// What sandboxes use now, and what their sleep saves
    Top(Top),
    /// What is wrong with this cluster, and the remedy
    Doctor(Doctor),
    /// Print a shell's completion script
    Completion {
        /// The shell
        shell: clap_complete::Shell,
    },
    /// What kubectl's completion asks (kubectl_complete-torpor)
    #[command(name = "__complete", hide = true, disable_help_flag = true)]
    Complete {
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        words: Vec<String>,
    },
}

/// Form of what is printed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// A table for people
    #[default]
    #[value(hide = true)]
    Table,
    /// The table with more columns
    Wide,
    Json,
    Yaml,
    /// Names alone, as kubectl takes them
    Name,
}

#[derive(Debug, clap::Args)]
pub struct Get {
    /// Names of Sandboxes; by default all of the namespace
    #[arg(value_parser = sandbox)]
    pub names: Vec<String>,
    /// Sandboxes of all namespaces
    #[arg(short = 'A', long, conflicts_with = "names")]
    pub all_namespaces: bool,
    /// Form of the output
    #[arg(short, long, value_enum, default_value_t)]
    pub output: Format,
}

#[derive(Clone, Debug, clap::Args)]
pub struct Change {
    /// Names of Sandboxes
    #[arg(required = true, value_parser = sandbox)]
    pub names: Vec<String>,
    /// How long to wait for the cluster to have done it; 0 does not wait
    #[arg(long, default_value = TIMEOUT, value_parser = duration)]
    pub timeout: Duration,
}

#[derive(Debug, clap::Args)]
pub struct Drain {
    /// Name of the node
    #[arg(value_parser = node)]
    pub node: String,
    /// Say what would be done with each, and do nothing
    #[arg(long)]
    pub dry_run: bool,
    /// How long to wait for each sandbox to be suspended
    #[arg(long, default_value = DRAIN_TIMEOUT, value_parser = duration)]
    pub timeout: Duration,
}

#[derive(Debug, clap::Args)]
pub struct Why {
    /// Name of the Sandbox
    #[arg(value_parser = sandbox)]
    pub name: String,
    /// Form of the output
    #[arg(short, long, value_enum, default_value_t)]
    pub output: Format,
}

#[derive(Debug, clap::Args)]
pub struct Top {
    /// Sandboxes of all namespaces
    #[arg(short = 'A', long)]
    pub all_namespaces: bool,
    /// What comes first
    #[arg(long, value_enum, default_value_t)]
    pub sort_by: SortBy,
    /// Form of the output
    #[arg(short, long, value_enum, default_value_t)]
    pub output: Format,
}

/// Order of `top`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum SortBy {
    /// Most memory in use
    #[default]
    Memory,
    /// Most processor time
    Cpu,
    /// Most memory given back
    Saved,
    Name,
}

#[derive(Debug, clap::Args)]
pub struct Doctor {
    /// Namespace that Torpor is installed in
    #[arg(long, default_value = "agent-sandbox-system", value_name = "NAME", value_parser = namespace)]
    pub torpor_namespace: String,
    /// Form of the output
    #[arg(short, long, value_enum, default_value_t)]
    pub output: Format,
}

/// A span of time such as `90s`, `2m`, `1h30m`, or `0`.
pub fn duration(text: &str) -> Result<Duration, String> {
    if text == "0" {
        return Ok(Duration::ZERO);
    }
    let parsed = text.parse::<jiff::SignedDuration>();
    parsed
        .ok()
        .and_then(|parsed| Duration::try_from(parsed).ok())
        .filter(|parsed| *parsed <= LONGEST)
        .ok_or_else(|| format!("{text:?} is not a duration up to 8760h, such as 30s, 2m or 1h30m"))
}

/// The name of a Sandbox, also as `-o name` prints it and as kubectl takes it: `sandbox.agents.x-k8s.io/demo`, `sandboxes/demo`.
pub fn sandbox(text: &str) -> Result<String, String> {
    let (kind, name) = text.split_once('/').unwrap_or(("sandbox", text));
    let kind = kind.strip_suffix(".agents.x-k8s.io").unwrap_or(kind);
    match ["sandbox", "sandboxes"].contains(&kind) && is_dns_subdomain(name) {
        true => Ok(name.to_owned()),
        false => Err(format!("{text:?} is not the name of a Sandbox")),
    }
}

/// The name of a node, also as `kubectl get nodes -o name` prints it.
pub fn node(text: &str) -> Result<String, String> {
    let name = text.strip_prefix("node/").unwrap_or(text);
    match is_dns_subdomain(name) {
        true => Ok(name.to_owned()),
        false => Err(format!("{text:?} is not the name of a node")),
    }
}

/// The name of a namespace. An empty one is a script's variable that nobody has set.
pub fn namespace(text: &str) -> Result<String, String> {
    let is_label = is_dns_subdomain(text) && !text.contains('.') && text.len() <= 63;
    match is_label {
        true => Ok(text.to_owned()),
        false => Err(format!("{text:?} is not the name of a namespace")),
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;
    use rstest::rstest;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Args::command().debug_assert();
    }

    #[test]
    fn kubectls_flags_are_taken_before_and_after_the_command() {
        for line in [
            "kubectl-torpor -n x --context c get -A",
            "kubectl-torpor get --all-namespaces --namespace x --context c",
        ] {
            let args = Args::try_parse_from(line.split(' ')).unwrap();
            assert_eq!(args.connection.namespace.as_deref(), Some("x"));
            assert_eq!(args.connection.context.as_deref(), Some("c"));
            assert!(matches!(args.command, Command::Get(get) if get.all_namespaces));
        }
    }

    #[rstest]
    #[case("0", 0)]
    #[case("90s", 90)]
    #[case("2m", 120)]
    #[case("1h30m", 5400)]
    fn durations_are_written_as_kubectl_takes_them(#[case] text: &str, #[case] seconds: u64) {
        assert_eq!(duration(text), Ok(Duration::from_secs(seconds)));
    }

    #[rstest]
    #[case("")]
    #[case("5")]
    #[case("-5s")]
    #[case("soon")]
    #[case("8761h")]
    #[case("2000000000000000h")]
    fn what_is_no_duration_is_named(#[case] text: &str) {
        assert!(duration(text).unwrap_err().contains(text));
    }

    #[rstest]
    #[case("demo", Some("demo"))]
    #[case("sandbox/demo", Some("demo"))]
    #[case("sandboxes/demo", Some("demo"))]
    #[case("sandbox.agents.x-k8s.io/demo", Some("demo"))]
    #[case("sandboxes.agents.x-k8s.io/a.b", Some("a.b"))]
    #[case("pod/demo", None)]
    #[case("sandboxclaims.extensions.agents.x-k8s.io/demo", None)]
    #[case("demo/status", None)]
    #[case("sandbox/../../pods/demo", None)]
    #[case("Demo", None)]
    #[case("", None)]
    fn a_sandbox_is_named_as_kubectl_names_it(#[case] text: &str, #[case] name: Option<&str>) {
        let line = ["kubectl-torpor", "get", text];
        let names = Args::try_parse_from(line).map(|args| match args.command {
            Command::Get(get) => get.names,
            other => panic!("{other:?}"),
        });
        assert_eq!(names.ok(), name.map(|name| vec![name.to_owned()]));
    }

    #[rstest]
    #[case("x", true)]
    #[case("", false)]
    #[case("a.b", false)]
    #[case("../x", false)]
    fn a_namespace_has_a_name(#[case] name: &str, #[case] good: bool) {
        for flag in ["-n", "--namespace", "--torpor-namespace"] {
            let parsed = Args::try_parse_from(["kubectl-torpor", "doctor", flag, name]);
            assert_eq!(parsed.is_ok(), good, "{flag} {name:?}");
        }
    }

    #[rstest]
    #[case("node-0", Some("node-0"))]
    #[case("node/ip-10-0-0-1.internal", Some("ip-10-0-0-1.internal"))]
    #[case("node/../pods", None)]
    #[case("pod/x", None)]
    #[case("", None)]
    fn a_node_is_named_as_kubectl_names_it(#[case] text: &str, #[case] name: Option<&str>) {
        let parsed = Args::try_parse_from(["kubectl-torpor", "drain", text]);
        let node = parsed.map(|args| match args.command {
            Command::Drain(drain) => drain.node,
            other => panic!("{other:?}"),
        });
        assert_eq!(node.ok().as_deref(), name);
    }

    #[test]
    fn a_change_needs_a_name() {
        Args::try_parse_from(["kubectl-torpor", "wake"]).unwrap_err();
    }
}
