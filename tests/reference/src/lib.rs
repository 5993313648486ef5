//! For tests: pages of docs/reference, generated from the programs' own definitions.
//!
//! A page that differs fails its test. `UPDATE_EXPECT=1 cargo test reference` writes all pages.

use std::fmt::Write as _;
use std::path::Path;

use clap::{Arg, Command};
use expect_test::expect_file;

const HEAD: &str = "<!-- Generated: UPDATE_EXPECT=1 cargo test reference -->\n";

/// Compares a page of docs/reference, or writes it when `UPDATE_EXPECT` is set.
///
/// # Panics
/// The page differs.
pub fn assert_page(name: &str, text: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/reference");
    let page = format!("{HEAD}\n{}", text.trim_end_matches('\n'));
    expect_file![path.join(name)].assert_eq(&format!("{page}\n"));
}

/// Returns a text as a table cell.
///
/// Line breaks and bars are replaced, and outside of code spans `<`, which would begin HTML.
pub fn cell(text: &str) -> String {
    let text = text.replace('\n', " ").replace('|', "\\|");
    let parts: Vec<String> = text
        .split('`')
        .enumerate()
        .map(|(index, part)| match index % 2 {
            0 => part.replace('<', "\\<"),
            _ => part.to_owned(),
        })
        .collect();
    parts.join("`")
}

/// Returns the page of a program's flags: one table for the program and for each subcommand.
pub fn flags(mut command: Command) -> String {
    command.build();
    let mut page = String::new();
    section(&mut page, &command, 1);
    page
}

fn section(page: &mut String, command: &Command, depth: usize) {
    if command.is_hide_set() || command.get_name() == "help" {
        return;
    }
    let name = command.get_bin_name().unwrap_or_else(|| command.get_name());
    line(page, &format!("{} {name}\n", "#".repeat(depth.min(3))));
    let about = command.get_long_about().or_else(|| command.get_about());
    if let Some(about) = about {
        line(page, &format!("{about}\n"));
    }
    let shown =
        |arg: &&Arg| !arg.is_hide_set() && !matches!(arg.get_id().as_str(), "help" | "version");
    let arguments: Vec<&Arg> = command.get_arguments().filter(shown).collect();
    if !arguments.is_empty() {
        line(
            page,
            "| flag | default | variable | meaning |\n|---|---|---|---|",
        );
        for argument in arguments {
            line(page, &row(argument));
        }
        line(page, "");
    }
    for below in command.get_subcommands() {
        section(page, below, depth + 1);
    }
}

/// Appends a line.
fn line(page: &mut String, text: &str) {
    // Writing to a String cannot fail.
    let _ = writeln!(page, "{text}");
}

fn row(argument: &Arg) -> String {
    let values: Vec<String> = argument
        .get_value_names()
        .unwrap_or_default()
        .iter()
        .map(|name| format!("<{name}>"))
        .collect();
    let takes_value = argument.get_action().takes_values();
    let value = if takes_value {
        values.join(" ")
    } else {
        String::new()
    };
    let name = match argument.get_long() {
        Some(long) => format!("--{long} {value}").trim().to_owned(),
        None => value,
    };
    let defaults: Vec<String> = argument
        .get_default_values()
        .iter()
        .map(|value| format!("`{}`", value.to_string_lossy()))
        .collect();
    let variable = argument
        .get_env()
        .map(|name| format!("`{}`", name.to_string_lossy()));
    let help = argument.get_long_help().or_else(|| argument.get_help());
    let help = help.map(ToString::to_string).unwrap_or_default();
    // Help texts of one sentence have no full stop.
    let stop = if help.ends_with('.') { "" } else { "." };
    let allowed: Vec<String> = argument
        .get_possible_values()
        .iter()
        .filter(|value| takes_value && !value.is_hide_set())
        .map(|value| format!("`{}`", value.get_name()))
        .collect();
    let allowed = if allowed.is_empty() {
        String::new()
    } else {
        format!("{stop} One of {}.", allowed.join(", "))
    };
    format!(
        "| `{name}` | {} | {} | {}{allowed} |",
        defaults.join(", "),
        variable.unwrap_or_default(),
        cell(&help)
    )
}

/// Compares a page of a program's metrics.
///
/// `exposition` is the text of `/metrics`, in which every metric must have a sample, since one
/// without is not shown. `source` is the code that registers the metrics; it tells whether one is
/// missing.
///
/// # Panics
/// The page differs, or the exposition lacks a metric.
pub fn assert_metrics_page(page: &str, title: &str, exposition: &str, source: &str) {
    let shown = metrics(exposition);
    let missing: Vec<&str> = registered(source)
        .into_iter()
        .filter(|name| !shown.iter().any(|metric| metric.name.ends_with(name)))
        .collect();
    assert!(
        missing.is_empty(),
        "no sample in the exposition: {missing:?}"
    );
    let mut text = format!("# {title}\n\n| metric | type | meaning |\n|---|---|---|\n");
    for Metric { name, kind, help } in shown {
        let suffix = if kind == "counter" { "_total" } else { "" };
        line(
            &mut text,
            &format!("| `{name}{suffix}` | {kind} | {} |", cell(help)),
        );
    }
    assert_page(page, &text);
}

/// A metric of an exposition in OpenMetrics' text format.
#[derive(Debug, PartialEq, Eq)]
struct Metric<'a> {
    name: &'a str,
    kind: &'a str,
    help: &'a str,
}

fn metrics(exposition: &str) -> Vec<Metric<'_>> {
    let marked = |mark| {
        let lines = exposition.lines();
        lines.filter_map(move |line| line.strip_prefix(mark)?.split_once(' '))
    };
    let kind = |metric| {
        let found = marked("# TYPE ").find(|(name, _)| *name == metric);
        found.map_or("", |(_, kind)| kind)
    };
    marked("# HELP ")
        .map(|(name, help)| Metric {
            name,
            kind: kind(name),
            help,
        })
        .collect()
}

/// Names in the code before its tests that are followed by a help text: `"name", "Help"`.
fn registered(source: &str) -> Vec<&str> {
    let code = source.split("#[cfg(test)]").next().unwrap_or_default();
    let parts: Vec<&str> = code.split('"').collect();
    // Texts of literals have odd indices, the code between them even ones.
    parts
        .windows(3)
        .enumerate()
        .filter(|(index, window)| {
            let is_name = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
            let [name, between, help] = window else {
                return false;
            };
            index % 2 == 1
                && between.trim() == ","
                && name.chars().all(is_name)
                && help.starts_with(|c: char| c.is_ascii_uppercase() || c.is_ascii_digit())
                && help.contains(' ')
        })
        .map(|(_, window)| window[0])
        .collect()
}

#[cfg(test)]
mod tests {
    use clap::{Arg, ArgAction, Command};

    use super::*;

    #[test]
    fn flags_have_value_default_variable_and_help() {
        let port = Arg::new("port")
            .long("port")
            .value_name("PORT")
            .default_value("80")
            .help("Port | number");
        let quiet = Arg::new("quiet")
            .long("quiet")
            .action(ArgAction::SetTrue)
            .help("No log");
        let page = flags(Command::new("p").about("A program.").arg(port).arg(quiet));
        let expected = "# p\n\nA program.\n\n| flag | default | variable | meaning |\n|---|---|---|---|\n\
                        | `--port <PORT>` | `80` |  | Port \\| number |\n\
                        | `--quiet` | `false` |  | No log |\n\n";
        assert_eq!(page, expected);
    }

    #[test]
    fn a_cell_has_no_bar_and_begins_no_html() {
        assert_eq!(cell("a|b <x>\n`<y>`"), "a\\|b \\<x> `<y>`");
    }

    #[test]
    fn an_exposition_has_name_type_and_help_of_each_metric() {
        let text = "# HELP plans Plans made.\n# TYPE plans counter\nplans_total 1\n# EOF\n";
        let expected = Metric {
            name: "plans",
            kind: "counter",
            help: "Plans made.",
        };
        assert_eq!(metrics(text), [expected]);
    }

    #[test]
    fn registered_metrics_are_literals_with_a_help_text() {
        let code = r#"
            registry.register("plans", "Plans made", a);
            for (name, help) in [("wakes", "Wakes of a sandbox", b)] {}
            registry.register(
                "steps_seconds",
                "Time of steps", c);
            let label = ("method", "GET");
            #[cfg(test)]
            registry.register("tests", "Only a test", d);
        "#;
        assert_eq!(registered(code), ["plans", "wakes", "steps_seconds"]);
    }
}
