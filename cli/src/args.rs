//! The command line.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Parser, Subcommand, ValueEnum};
use torpor_api::annotations::is_dns_subdomain;

/// Default of `--timeout` for `hibernate`, `wake`, `suspend` and `resume`.
const TIMEOUT: &str = "2m";
/// Default of `--timeout` for `drain`, where sandboxes wait for each other to be saved.
const DRAIN_TIMEOUT: &str = "10m";
/// Maximum of `--timeout`, which the clock can still represent.
const LONGEST: Duration = Duration::from_secs(8760 * 3600);

/// Show and change the state of the sandboxes that Torpor manages.
///
/// Exit codes: 0 done; 1 failed, or refused by the cluster; 2 the command line is invalid; 3 doctor
/// found a problem; 4 unknown: the timeout passed before the cluster reported the result, or doctor
/// could not check everything.
#[derive(Debug, Parser)]
#[command(
    name = "kubectl-torpor",
    bin_name = "kubectl torpor",
    version = concat!(env!("CARGO_PKG_VERSION"), " (commit ", env!("TORPOR_GIT_COMMIT"), ")"),
    max_term_width = 120
)]
pub struct Args {
    #[command(flatten)]
    pub connection: Connection,
    #[command(subcommand)]
    pub command: Command,
}

/// Cluster and namespace, by kubectl's flags.
#[derive(Clone, Debug, Default, clap::Args)]
#[command(next_help_heading = "Cluster")]
pub struct Connection {
    /// Path of the kubeconfig; by default the files of KUBECONFIG, or ~/.kube/config
    #[arg(long, global = true, value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,
    /// Context of the kubeconfig; by default the current context
    #[arg(long, global = true, value_name = "NAME")]
    pub context: Option<String>,
    /// Namespace; by default that of the context
    #[arg(short, long, global = true, value_name = "NAME", value_parser = namespace)]
    pub namespace: Option<String>,
}

/// Subcommand.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// List sandboxes: state, time asleep, memory, image size, node, last wake
    Get(Get),
    /// Hibernate sandboxes in place: save their memory to the node's disk; the Pod stays
    Hibernate(Change),
    /// Wake sandboxes that hibernate in place or doze
    Wake(Change),
    /// Suspend sandboxes: save their memory to the node's disk, then delete the Pod
    Suspend(Change),
    /// Resume suspended sandboxes in a new Pod
    Resume(Change),
    /// List snapshots: Sandbox, state, image size, node
    Snapshots(Snapshots),
    /// List warm pools: members that run, sleep and start, golden images
    Pools(Pools),
    /// Save the memory of a sandbox in a snapshot; the sandbox runs on
    Snapshot(Snapshot),
    /// Start copies of a sandbox that continue from its memory
    ///
    /// Takes a snapshot of the sandbox, which runs on, and creates Sandboxes that continue from it.
    /// The copies have the Sandbox's spec, settings and labels. Their volumes from
    /// volumeClaimTemplates start empty. The snapshot stays: a later Pod of a copy without newer
    /// memory starts from it again. A Sandbox that a SandboxClaim or SandboxWarmPool holds cannot
    /// be copied.
    Fork(Fork),
    /// Have a sandbox continue from an earlier snapshot of its own
    ///
    /// Saves the present memory in another snapshot, then deletes the Pod. The new Pod continues
    /// from the named snapshot. A later Pod without newer memory starts from that snapshot again.
    /// Volumes keep their content. The sandbox is awake afterwards.
    Rollback(Rollback),
    /// Suspend a sandbox and keep it in the repository of its SnapshotClass alone
    ///
    /// Suspends the Sandbox, waits until its memory is in the repository, writes its manifest
    /// beside the memory, and deletes the Sandbox. The image on the node's disk goes too. A
    /// SandboxSnapshot of reason Archive remains: restore-archive continues from it, its deletion
    /// deletes the archive. Sandboxes with PersistentVolumeClaims of their own, and those of
    /// SandboxClaims and pools, are not archived.
    Archive(Archive),
    /// Have a sandbox continue from its archive
    ///
    /// Creates the Sandbox from the archived manifest. It continues from the archived memory as a
    /// copy, on any node that fits. The archive stays. With --image the archive is one that another
    /// cluster made in the same repository.
    RestoreArchive(RestoreArchive),
    /// List archived sandboxes: Sandbox, state, image size, class
    ListArchives(ListArchives),
    /// Prepare a node for kubectl drain: cordon it and save the memory of its sandboxes
    ///
    /// Cordons the node, suspends its sandboxes and resumes them at once. They continue from the
    /// saved memory on other nodes that fit, or on this one when it is uncordoned.
    Drain(Drain),
    /// Explain the state of a sandbox: requests, the node agent's reasons, conditions, remedies
    Why(Why),
    /// Show the CPU and memory use of sandboxes, and the memory that sleep saves
    Top(Top),
    /// Check the cluster for problems, and print a remedy for each
    Doctor(Doctor),
    /// Print the completion script of a shell
    Completion {
        /// Name of the shell
        shell: clap_complete::Shell,
    },
    /// Print completion candidates for kubectl (kubectl_complete-torpor)
    #[command(name = "__complete", hide = true, disable_help_flag = true)]
    Complete {
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        words: Vec<String>,
    },
}

/// Output format.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// Table
    #[default]
    #[value(hide = true)]
    Table,
    /// Table with more columns
    Wide,
    Json,
    Yaml,
    /// Names alone, in kubectl's form
    Name,
}

#[derive(Debug, clap::Args)]
pub struct Get {
    /// Names of Sandboxes; by default all of the namespace
    #[arg(value_parser = sandbox)]
    pub names: Vec<String>,
    /// List the Sandboxes of all namespaces
    #[arg(short = 'A', long, conflicts_with = "names")]
    pub all_namespaces: bool,
    /// Output format
    #[arg(short, long, value_enum, default_value_t)]
    pub output: Format,
}

#[derive(Clone, Debug, clap::Args)]
pub struct Change {
    /// Names of Sandboxes
    #[arg(required = true, value_parser = sandbox)]
    pub names: Vec<String>,
    /// Maximum time to wait for the change, such as 90s or 2m; 0 does not wait
    #[arg(long, default_value = TIMEOUT, value_parser = duration)]
    pub timeout: Duration,
}

#[derive(Debug, clap::Args)]
pub struct Snapshots {
    /// Names of Sandboxes; by default all of the namespace
    #[arg(value_parser = sandbox)]
    pub names: Vec<String>,
    /// List the snapshots of all namespaces
    #[arg(short = 'A', long, conflicts_with = "names")]
    pub all_namespaces: bool,
    /// Show which Sandboxes are copies of which snapshots, as a tree
    #[arg(long, conflicts_with_all = ["output", "all_namespaces"])]
    pub tree: bool,
    /// Output format
    #[arg(short, long, value_enum, default_value_t)]
    pub output: Format,
}

#[derive(Debug, clap::Args)]
pub struct Pools {
    /// Names of SandboxWarmPools; by default all of the namespace
    pub names: Vec<String>,
    /// List the pools of all namespaces
    #[arg(short = 'A', long, conflicts_with = "names")]
    pub all_namespaces: bool,
    /// Output format
    #[arg(short, long, value_enum, default_value_t)]
    pub output: Format,
}

#[derive(Debug, clap::Args)]
pub struct Snapshot {
    /// Name of the Sandbox
    #[arg(value_parser = sandbox)]
    pub name: String,
    /// Name of the snapshot; by default the Sandbox's with five random characters
    #[arg(long, value_name = "SNAPSHOT", value_parser = snapshot)]
    pub to: Option<String>,
    /// Maximum time to wait for the image, such as 90s or 2m; 0 does not wait
    #[arg(long, default_value = TIMEOUT, value_parser = duration)]
    pub timeout: Duration,
}

/// Most copies of one command. A larger number is probably a mistake.
const MAX_COPIES: i64 = 100;

#[derive(Debug, clap::Args)]
pub struct Fork {
    /// Name of the Sandbox
    #[arg(value_parser = sandbox)]
    pub name: String,
    /// Number of copies
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=MAX_COPIES))]
    pub count: u32,
    /// Snapshot of the Sandbox to start from; by default one that is taken now
    #[arg(long, value_name = "SNAPSHOT", value_parser = snapshot)]
    pub from: Option<String>,
    /// Maximum time to wait for the snapshot, and then for the copies
    #[arg(long, default_value = TIMEOUT, value_parser = step)]
    pub timeout: Duration,
}

#[derive(Debug, clap::Args)]
pub struct Rollback {
    /// Name of the Sandbox
    #[arg(value_parser = sandbox)]
    pub name: String,
    /// Name of the snapshot
    #[arg(value_parser = snapshot)]
    pub snapshot: String,
    /// Give the present memory up instead of saving it in a snapshot
    #[arg(long)]
    pub discard: bool,
    /// Maximum time to wait for each step
    #[arg(long, default_value = TIMEOUT, value_parser = step)]
    pub timeout: Duration,
}

#[derive(Debug, clap::Args)]
pub struct Archive {
    /// Name of the Sandbox
    #[arg(value_parser = sandbox)]
    pub name: String,
    /// SnapshotClass with the repository; by default that of the Sandbox
    #[arg(long, value_name = "NAME", value_parser = part)]
    pub class: Option<String>,
    /// Maximum time to wait for the archive, such as 90s or 10m; 0 does not wait
    #[arg(long, default_value = DRAIN_TIMEOUT, value_parser = duration)]
    pub timeout: Duration,
}

#[derive(Debug, clap::Args)]
pub struct RestoreArchive {
    /// Name of the archive, or of the archived Sandbox for its newest one
    #[arg(value_parser = part)]
    pub name: String,
    /// Name of the new Sandbox; by default that of the archived one
    #[arg(long = "as", value_name = "NAME", value_parser = sandbox)]
    pub name_as: Option<String>,
    /// Image of an archive that this cluster does not know
    #[arg(long, value_name = "ID", requires_all = ["from_cluster", "class"], value_parser = part)]
    pub image: Option<String>,
    /// Cluster that made the archive: the UID of its namespace kube-system
    #[arg(long, value_name = "UID", requires = "image", value_parser = part)]
    pub from_cluster: Option<String>,
    /// SnapshotClass with the repository of the archive
    #[arg(long, value_name = "NAME", requires = "image", value_parser = part)]
    pub class: Option<String>,
    /// Maximum time to wait for each step
    #[arg(long, default_value = TIMEOUT, value_parser = step)]
    pub timeout: Duration,
}

#[derive(Debug, clap::Args)]
pub struct ListArchives {
    /// Names of archived Sandboxes; by default all of the namespace
    #[arg(value_parser = sandbox)]
    pub names: Vec<String>,
    /// List the archives of all namespaces
    #[arg(short = 'A', long, conflicts_with = "names")]
    pub all_namespaces: bool,
    /// Output format
    #[arg(short, long, value_enum, default_value_t)]
    pub output: Format,
}

#[derive(Debug, clap::Args)]
pub struct Drain {
    /// Name of the node
    #[arg(value_parser = node)]
    pub node: String,
    /// Print what would be done with each sandbox, and change nothing
    #[arg(long)]
    pub dry_run: bool,
    /// Maximum time to wait for the suspension of each sandbox
    #[arg(long, default_value = DRAIN_TIMEOUT, value_parser = duration)]
    pub timeout: Duration,
}

#[derive(Debug, clap::Args)]
pub struct Why {
    /// Name of the Sandbox
    #[arg(value_parser = sandbox)]
    pub name: String,
    /// Output format
    #[arg(short, long, value_enum, default_value_t)]
    pub output: Format,
}

#[derive(Debug, clap::Args)]
pub struct Top {
    /// List the Sandboxes of all namespaces
    #[arg(short = 'A', long)]
    pub all_namespaces: bool,
    /// Sort order
    #[arg(long, value_enum, default_value_t)]
    pub sort_by: SortBy,
    /// Output format
    #[arg(short, long, value_enum, default_value_t)]
    pub output: Format,
}

/// Sort order of `top`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum SortBy {
    /// Memory in use, largest first
    #[default]
    Memory,
    /// CPU use, largest first
    Cpu,
    /// Memory saved by sleep, largest first
    Saved,
    /// Namespace and name
    Name,
}

#[derive(Debug, clap::Args)]
pub struct Doctor {
    /// Namespace in which Torpor is installed
    #[arg(long, default_value = "agent-sandbox-system", value_name = "NAME", value_parser = namespace)]
    pub torpor_namespace: String,
    /// Output format
    #[arg(short, long, value_enum, default_value_t)]
    pub output: Format,
}

/// Parses a duration such as `90s`, `2m`, `1h30m`, or `0`.
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

/// Parses the name of a Sandbox, with or without its kind as in `-o name` and in kubectl:
/// `sandbox.agents.x-k8s.io/demo`, `sandboxes/demo`.
pub fn sandbox(text: &str) -> Result<String, String> {
    let (kind, name) = text.split_once('/').unwrap_or(("sandbox", text));
    let kind = kind.strip_suffix(".agents.x-k8s.io").unwrap_or(kind);
    match ["sandbox", "sandboxes"].contains(&kind) && is_dns_subdomain(name) {
        true => Ok(name.to_owned()),
        false => Err(format!("{text:?} is not the name of a Sandbox")),
    }
}

/// Parses the time for a step that has to be waited for.
fn step(text: &str) -> Result<Duration, String> {
    let parsed = duration(text)?;
    match parsed.is_zero() {
        true => Err("0 is not allowed: each step needs the result of the previous step".to_owned()),
        false => Ok(parsed),
    }
}

/// Parses the name of a SandboxSnapshot, with or without its kind as in `-o name`.
pub fn snapshot(text: &str) -> Result<String, String> {
    let (kind, name) = text.split_once('/').unwrap_or(("sandboxsnapshot", text));
    let kind = kind.strip_suffix(".torpor.dev").unwrap_or(kind);
    match ["sandboxsnapshot", "sandboxsnapshots"].contains(&kind) && is_dns_subdomain(name) {
        true => Ok(name.to_owned()),
        false => Err(format!("{text:?} is not the name of a SandboxSnapshot")),
    }
}

/// Parses a name that is one part of an object's name.
fn part(text: &str) -> Result<String, String> {
    match is_dns_subdomain(text) {
        true => Ok(text.to_owned()),
        false => Err(format!("{text:?} is not a name")),
    }
}

/// Parses the name of a node, with or without its kind as in `kubectl get nodes -o name`.
pub fn node(text: &str) -> Result<String, String> {
    let name = text.strip_prefix("node/").unwrap_or(text);
    match is_dns_subdomain(name) {
        true => Ok(name.to_owned()),
        false => Err(format!("{text:?} is not the name of a node")),
    }
}

/// Parses the name of a namespace.
///
/// An empty name is refused: it comes from an unset variable of a script.
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
    fn kubectls_flags_are_accepted_before_and_after_the_command() {
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
    fn durations_have_kubectls_syntax(#[case] text: &str, #[case] seconds: u64) {
        assert_eq!(duration(text), Ok(Duration::from_secs(seconds)));
    }

    #[rstest]
    #[case("")]
    #[case("5")]
    #[case("-5s")]
    #[case("soon")]
    #[case("8761h")]
    #[case("2000000000000000h")]
    fn an_invalid_duration_is_named_in_the_error(#[case] text: &str) {
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
    fn an_invalid_namespace_is_refused(#[case] name: &str, #[case] good: bool) {
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
