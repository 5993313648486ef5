//! Edits containerd's configuration files as texts.
//!
//! The `version` of the main file shows which containerd reads the file. The place of a handler
//! depends on this version:
//!
//! - 3 and later (containerd 2): Torpor's own file, which an import of the main file adds.
//!   containerd merges the plugin sections of imported files.
//! - 2 and earlier (format of containerd 1, which containerd 2 still reads): a marked block at the
//!   end of the main file. In containerd 1 an imported file *replaces* the whole section of a
//!   plugin, and the node's own CRI settings would be lost.

use std::path::{Path, PathBuf};

use toml_edit::{Array, DocumentMut, Item, Value};

use super::error::Error;
use crate::args::StatsPeriod;

const BEGIN: &str =
    "# begin torpor (written by torpor-agent install, removed by torpor-agent uninstall)\n";
const END: &str = "# end torpor\n";

/// A runtime handler for containerd.
#[derive(Debug, Clone)]
pub(super) struct Handler {
    pub(super) name: String,
    /// The host's path of the shim's program.
    pub(super) shim: PathBuf,
}

/// The place of the handler in containerd's configuration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Place {
    /// In a file of its own.
    DropIn,
    /// In the main file, in the section of this plugin.
    Main { plugin: &'static str },
}

/// Parses the main file at `path`.
pub(super) fn parse(path: &Path, text: &str) -> Result<DocumentMut, Error> {
    text.parse::<DocumentMut>().map_err(|source| Error::Syntax {
        path: path.into(),
        line: source
            .span()
            .map_or(1, |span| text[..span.start].matches('\n').count() + 1),
        message: first_line(source.message()),
    })
}

fn first_line(message: &str) -> String {
    message.lines().next().unwrap_or_default().to_owned()
}

/// Returns the place of the handler, by the `version` of the main file. A file without one has
/// version 1.
pub(super) fn place(path: &Path, main: &DocumentMut) -> Result<Place, Error> {
    let shape = || Error::Shape {
        path: path.into(),
        key: "version",
        expected: "a whole number",
    };
    let version = match main.get("version") {
        None => 1,
        Some(item) => item.as_integer().ok_or_else(shape)?,
    };
    let has = |name| {
        main.get("plugins")
            .and_then(|plugins| plugins.get(name))
            .is_some()
    };
    Ok(match version {
        3.. => Place::DropIn,
        2 => Place::Main {
            plugin: "io.containerd.grpc.v1.cri",
        },
        // Version 1 has short plugin names. containerd 2 also accepts long names; if a file has
        // both, containerd 2 drops one of the two sections.
        _ if has("io.containerd.grpc.v1.cri") && !has("cri") => Place::Main {
            plugin: "io.containerd.grpc.v1.cri",
        },
        _ => Place::Main { plugin: "cri" },
    })
}

fn sections(plugin: &str, handler: &Handler) -> String {
    let Handler { name, shim } = handler;
    let shim = Value::from(shim.to_string_lossy().into_owned());
    format!(
        "[plugins.\"{plugin}\".containerd.runtimes.{name}]\n\
         runtime_type = \"io.containerd.torpor.v1\"\n\
         runtime_path = {shim}\n\
         pod_annotations = [\"torpor.dev/*\"]\n\
         container_annotations = [\"torpor.dev/*\"]\n"
    )
}

/// The plugin of containerd 2 whose section holds the handlers.
const RUNTIME_PLUGIN: &str = "io.containerd.cri.v1.runtime";

/// Key of the period at which containerd 2.3 and later requests figures of use from each shim
/// (default: each second; containerd pull request 12629). Older releases log a warning about an
/// unknown key.
const STATS_PERIOD: &str = "stats_collect_period";

/// Returns the content of Torpor's own file. A period in the main file overrides `stats`.
pub(super) fn drop_in(main: &DocumentMut, handler: &Handler, stats: StatsPeriod) -> String {
    let stats = match stats {
        StatsPeriod::Seconds(seconds) if !has_stats_period(main) => {
            format!("[plugins.\"{RUNTIME_PLUGIN}\"]\n{STATS_PERIOD} = \"{seconds}s\"\n")
        }
        _ => String::new(),
    };
    let handler = sections(RUNTIME_PLUGIN, handler);
    format!("{BEGIN}version = 3\n{stats}{handler}{END}")
}

fn has_stats_period(main: &DocumentMut) -> bool {
    main.get("plugins")
        .and_then(|plugins| plugins.get(RUNTIME_PLUGIN)?.get(STATS_PERIOD))
        .is_some()
}

/// Returns the block for the main file.
pub(super) fn block(plugin: &str, handler: &Handler) -> String {
    format!("{BEGIN}{}{END}", sections(plugin, handler))
}

/// Adds the block at the end of the main file. Fails if the result is not valid TOML, for instance
/// because the file defines the handler already.
pub(super) fn with_block(
    path: &Path,
    main: &str,
    plugin: &str,
    handler: &Handler,
) -> Result<String, Error> {
    let newline = if main.is_empty() || main.ends_with('\n') {
        ""
    } else {
        "\n"
    };
    let next = format!("{main}{newline}{}", block(plugin, handler));
    match next.parse::<DocumentMut>() {
        Ok(_) => Ok(next),
        Err(source) => Err(Error::NoRoom {
            path: path.into(),
            handler: handler.name.clone(),
            message: first_line(source.message()),
        }),
    }
}

/// Removes Torpor's block, regardless of its content.
pub(super) fn without_block(main: &str) -> String {
    let found = main.find(BEGIN).and_then(|begin| {
        let end = main[begin..].find(END)?;
        Some((begin, begin + end + END.len()))
    });
    match found {
        Some((begin, end)) => format!("{}{}", &main[..begin], &main[end..]),
        None => main.to_owned(),
    }
}

/// Reports whether an import of the main file covers the file `drop_in`.
pub(super) fn imports(path: &Path, main: &DocumentMut, drop_in: &Path) -> Result<bool, Error> {
    let shape = || Error::Shape {
        path: path.into(),
        key: "imports",
        expected: "a list of strings",
    };
    let Some(item) = main.get("imports") else {
        return Ok(false);
    };
    let patterns = item.as_array().ok_or_else(shape)?;
    let dir = path.parent().unwrap_or_else(|| Path::new("/"));
    for pattern in patterns {
        let pattern = dir.join(pattern.as_str().ok_or_else(shape)?);
        if covers(&pattern, drop_in) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Returns Torpor's entry of the list of imports. The entry is a pattern: containerd does not start
/// if a file that is imported by name is missing.
fn own_import(drop_in: &Path) -> String {
    let stem = drop_in.with_extension("");
    format!("{}*.toml", stem.display())
}

/// Adds Torpor's import at the end of the list. Returns whether the list is new.
pub(super) fn add_import(main: &mut DocumentMut, drop_in: &Path) -> bool {
    let pattern = own_import(drop_in);
    if let Some(list) = main.get_mut("imports").and_then(Item::as_array_mut) {
        let mut value = Value::from(pattern);
        // If the entry before is on a line of its own, the new entry is, too, with equal indent.
        let before = list
            .iter()
            .last()
            .and_then(|last| last.decor().prefix()?.as_str());
        match before.and_then(|before| before.rsplit_once('\n')) {
            Some((_, indent)) => {
                value.decor_mut().set_prefix(format!("\n{indent}"));
                list.push_formatted(value);
            }
            None => list.push(value),
        }
        return false;
    }
    main.insert("imports", toml_edit::value(Array::from_iter([pattern])));
    true
}

/// Removes Torpor's import, and with `list` also an empty list. Returns whether there was such an
/// import.
pub(super) fn remove_import(main: &mut DocumentMut, drop_in: &Path, list: bool) -> bool {
    let pattern = own_import(drop_in);
    let Some(entries) = main.get_mut("imports").and_then(Item::as_array_mut) else {
        return false;
    };
    let before = entries.len();
    entries.retain(|entry| entry.as_str() != Some(&pattern));
    let found = entries.len() < before;
    if found && list && entries.is_empty() {
        main.remove("imports");
    }
    found
}

/// Reports whether an import covers a file, by containerd's rules: an import with a `*` is a
/// pattern, and a `*` matches within one component of the path. A pattern with classes or escapes
/// is assumed to match nothing: a superfluous import does no harm.
fn covers(pattern: &Path, file: &Path) -> bool {
    let text = pattern.to_string_lossy();
    if !text.contains('*') {
        return pattern.components().eq(file.components());
    }
    if text.contains(['[', '\\']) || pattern.components().count() != file.components().count() {
        return false;
    }
    pattern
        .components()
        .zip(file.components())
        .all(|(pattern, name)| {
            let pattern: Vec<char> = pattern.as_os_str().to_string_lossy().chars().collect();
            let name: Vec<char> = name.as_os_str().to_string_lossy().chars().collect();
            matches_name(&pattern, &name)
        })
}

fn matches_name(pattern: &[char], name: &[char]) -> bool {
    match (pattern.split_first(), name.split_first()) {
        (None, None) => true,
        (Some(('*', rest)), _) => {
            (0..=name.len()).any(|skipped| matches_name(rest, &name[skipped..]))
        }
        (Some(('?', rest)), Some((_, name))) => matches_name(rest, name),
        (Some((wanted, rest)), Some((found, name))) if wanted == found => matches_name(rest, name),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pattern_covers_what_containerd_would_import() {
        let file = Path::new("/etc/containerd/conf.d/torpor.toml");
        for yes in [
            "/etc/containerd/conf.d/*.toml",
            "/etc/containerd/conf.d/torpor.toml",
            "/etc/containerd/conf.d/torpor*.toml",
            "/etc/containerd/*/*",
            "/etc/*/conf.d/?orpor.*",
        ] {
            assert!(covers(Path::new(yes), file), "{yes}");
        }
        for no in [
            "/etc/containerd/*.toml",
            "/etc/containerd/conf.d/*.conf",
            "/etc/containerd/conf.d/torpo?.toml",
            "/etc/containerd/conf.d/[t]*.toml",
            "/etc/containerd/conf.d/*/torpor.toml",
        ] {
            assert!(!covers(Path::new(no), file), "{no}");
        }
    }
}
