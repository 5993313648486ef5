//! Completion for kubectl and shells.
//!
//! kubectl runs `kubectl_complete-torpor WORD…`, where the last word is the incomplete one. kubectl
//! reads candidates in cobra's format: a line for each, with a description after a tab, and a last
//! line with a colon and the number of a directive.

use std::ffi::OsString;
use std::fmt::Debug;
use std::time::Duration;

use clap::{CommandFactory, FromArgMatches};
use clap_complete::engine::{ArgValueCandidates, CompletionCandidate, complete};
use k8s_openapi::api::core::v1::Node;
use kube::api::Api;
use kube::core::DeserializeGuard;
use kube::{Resource, ResourceExt};
use serde::de::DeserializeOwned;
use torpor_api::Sandbox;

use crate::args::{Args, Connection};
use crate::connect::connect;
use crate::objects::list;

/// Cobra's `ShellCompDirectiveNoFileComp`: the shell does not fall back to file names.
const NO_FILES: u8 = 4;
/// Time limit of the lookup of names in the cluster.
const LIMIT: Duration = Duration::from_secs(2);
/// Commands that take names, the argument, and the kind that is named.
const WITH_NAMES: [(&str, &str, Named); 12] = [
    ("get", "names", Named::Sandbox),
    ("hibernate", "names", Named::Sandbox),
    ("wake", "names", Named::Sandbox),
    ("suspend", "names", Named::Sandbox),
    ("resume", "names", Named::Sandbox),
    ("why", "name", Named::Sandbox),
    ("snapshots", "names", Named::Sandbox),
    ("snapshot", "name", Named::Sandbox),
    ("fork", "name", Named::Sandbox),
    ("rollback", "name", Named::Sandbox),
    ("archive", "name", Named::Sandbox),
    ("drain", "node", Named::Node),
];

/// Kind of a named argument.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Named {
    Sandbox,
    Node,
}

/// Returns the output that kubectl reads for the words of a command line.
pub async fn for_kubectl(words: &[String]) -> String {
    let names = match wants_names(words) {
        Some(named) => names(&connection(words), named).await,
        None => Vec::new(),
    };
    answer(words, &names)
}

/// Returns the candidates in cobra's format, given the possible names. Pure.
pub fn answer(words: &[String], names: &[String]) -> String {
    let mut command = Args::command();
    for (name, id, _) in WITH_NAMES {
        let names = names.to_vec();
        command = command.mut_subcommand(name, |command| {
            command.mut_arg(id, |argument| {
                argument.add(ArgValueCandidates::new(move || {
                    names.iter().map(CompletionCandidate::new).collect()
                }))
            })
        });
    }
    let line: Vec<OsString> = std::iter::once("kubectl-torpor")
        .chain(words.iter().map(String::as_str))
        .map(OsString::from)
        .collect();
    let last = line.len() - 1;
    let found = complete(&mut command, line, last, None).unwrap_or_default();
    let mut text = String::new();
    for candidate in found.iter().filter(|candidate| !candidate.is_hide_set()) {
        text.push_str(&candidate.get_value().to_string_lossy());
        if let Some(help) = candidate.get_help() {
            let help = help.to_string();
            let first = help.lines().next().unwrap_or_default();
            text.push_str(&format!("\t{first}"));
        }
        text.push('\n');
    }
    text.push_str(&format!(":{NO_FILES}\n"));
    text
}

/// Returns the kind whose name the last word may be; `None` if it is no name.
fn wants_names(words: &[String]) -> Option<Named> {
    let (typed, before) = words
        .split_last()
        .map_or(("", words), |(last, before)| (last.as_str(), before));
    let of_command = |word: &String| {
        let found = WITH_NAMES.iter().find(|(command, ..)| word == command);
        found.map(|(.., named)| *named)
    };
    let named = before.iter().find_map(of_command);
    named.filter(|_| !typed.starts_with('-'))
}

/// Returns the flags of cluster and namespace in an incomplete command line.
fn connection(words: &[String]) -> Connection {
    let line = std::iter::once("kubectl-torpor").chain(words.iter().map(String::as_str));
    let matches = Args::command()
        .ignore_errors(true)
        .try_get_matches_from(line);
    let matches = matches.ok();
    matches
        .and_then(|matches| Connection::from_arg_matches(&matches).ok())
        .unwrap_or_default()
}

/// Returns the names of the namespace's Sandboxes or of the nodes; none if the cluster does not
/// answer within [`LIMIT`].
async fn names(connection: &Connection, named: Named) -> Vec<String> {
    let look = async {
        let cluster = connect(connection).await.ok()?;
        let client = cluster.client.clone();
        match named {
            Named::Sandbox => {
                names_of::<Sandbox>(Api::namespaced(client, &cluster.namespace)).await
            }
            Named::Node => names_of::<Node>(Api::all(client)).await,
        }
    };
    let found = tokio::time::timeout(LIMIT, look).await;
    found.ok().flatten().unwrap_or_default()
}

async fn names_of<K>(api: Api<DeserializeGuard<K>>) -> Option<Vec<String>>
where
    K: Resource + Clone + DeserializeOwned + Debug,
{
    let found = list("names", &api).await.ok()?.items;
    Some(found.iter().map(ResourceExt::name_any).collect())
}

/// Returns a shell's completion script for `kubectl-torpor` itself.
pub fn script(shell: clap_complete::Shell) -> Vec<u8> {
    let mut text = Vec::new();
    clap_complete::generate(shell, &mut Args::command(), "kubectl-torpor", &mut text);
    text
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    fn words(line: &str) -> Vec<String> {
        line.split(' ').map(str::to_owned).collect()
    }

    fn candidates(line: &str) -> Vec<String> {
        let names = ["demo".to_owned(), "dev".to_owned(), "other".to_owned()];
        let text = answer(&words(line), &names);
        let lines = text.lines().map(|line| line.split('\t').next().unwrap());
        lines.map(str::to_owned).collect()
    }

    #[test]
    fn commands_have_descriptions_and_hidden_commands_are_left_out() {
        let text = answer(&words(""), &[]);
        assert!(text.contains("doctor\tCheck the cluster"), "{text}");
        assert!(!text.contains("__complete"), "{text}");
        assert!(text.ends_with("\n:4\n"), "{text}");
    }

    #[test]
    fn names_of_sandboxes_are_candidates_also_behind_flags() {
        assert_eq!(candidates("wake de"), ["demo", "dev", ":4"]);
        assert_eq!(candidates("-n x why o"), ["other", ":4"]);
        assert_eq!(candidates("get -n x de"), ["demo", "dev", ":4"]);
        assert_eq!(candidates("suspend demo ot"), ["other", ":4"]);
        assert_eq!(candidates("drain de"), ["demo", "dev", ":4"]);
    }

    #[test]
    fn values_of_flags_are_candidates() {
        assert_eq!(candidates("get -o y"), ["yaml", ":4"]);
        assert_eq!(candidates("top --sort-by sa"), ["saved", ":4"]);
    }

    #[rstest]
    #[case("wake ", Some(Named::Sandbox))]
    #[case("-n x get de", Some(Named::Sandbox))]
    #[case("drain ", Some(Named::Node))]
    #[case("wake --ti", None)]
    #[case("do", None)]
    #[case("", None)]
    fn the_cluster_is_asked_only_where_a_name_fits(
        #[case] line: &str,
        #[case] expected: Option<Named>,
    ) {
        assert_eq!(wants_names(&words(line)), expected);
    }

    #[test]
    fn flags_of_the_cluster_are_read_from_the_command_line() {
        let typed = connection(&words("wake -n x --context c de"));
        assert_eq!(typed.namespace.as_deref(), Some("x"));
        assert_eq!(typed.context.as_deref(), Some("c"));
        assert_eq!(connection(&words("wake --namespace")).namespace, None);
    }

    #[test]
    fn shells_get_a_script() {
        let script = String::from_utf8(script(clap_complete::Shell::Bash)).unwrap();
        assert!(script.contains("hibernate"));
    }
}
