//! What kubectl and shells ask while somebody types.
//!
//! kubectl runs `kubectl_complete-torpor WORD…`, the last word being the one that is typed, and reads candidates as cobra programs print them: a line each, with a
//! description behind a tab, and at the end a colon and a number that says how to go on.

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
use crate::world::list;

/// Cobra's `ShellCompDirectiveNoFileComp`: no candidate means that there is none, not that files are meant.
const NO_FILES: u8 = 4;
/// Who types does not wait.
const LIMIT: Duration = Duration::from_secs(2);
/// Commands whose arguments are names, the arguments, and whose names.
const WITH_NAMES: [(&str, &str, Named); 7] = [
    ("get", "names", Named::Sandbox),
    ("hibernate", "names", Named::Sandbox),
    ("wake", "names", Named::Sandbox),
    ("suspend", "names", Named::Sandbox),
    ("resume", "names", Named::Sandbox),
    ("why", "name", Named::Sandbox),
    ("drain", "node", Named::Node),
];

/// What has a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Named {
    Sandbox,
    Node,
}

/// What kubectl reads for these words.
pub async fn for_kubectl(words: &[String]) -> String {
    let names = match wants_names(words) {
        Some(named) => names(&connection(words), named).await,
        None => Vec::new(),
    };
    answer(words, &names)
}

/// The answer, when these are the names that may be meant. Pure.
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

/// Whose name may be what is typed: only then is the cluster asked.
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

/// The flags that say which cluster, as far as they are typed.
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

/// Names of the namespace's Sandboxes, or of the nodes; none if the cluster does not answer at once.
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

/// A shell's completion script for `kubectl-torpor` itself.
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
    fn commands_come_with_what_they_do_and_hidden_ones_do_not_come() {
        let text = answer(&words(""), &[]);
        assert!(text.contains("doctor\tWhat is wrong"), "{text}");
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
    fn flags_have_their_values() {
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
    fn the_cluster_is_the_one_that_is_typed() {
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
