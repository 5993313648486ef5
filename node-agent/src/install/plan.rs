//! Plans the changes of containerd's configuration. This module accesses no file.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::containerd::{self, Handler, Place};
use super::error::Error;
use crate::args::StatsPeriod;

/// Content of a main file that the installer makes. containerd 1.7 and containerd 2 both read this
/// version.
const NEW_MAIN: &str = "version = 2\n";

/// The handler and period that containerd's configuration must have, and the files that hold them,
/// as paths of the host.
#[derive(Debug, Clone)]
pub(super) struct Wanted {
    pub(super) main: PathBuf,
    pub(super) drop_in: PathBuf,
    pub(super) handler: Handler,
    pub(super) stats_period: StatsPeriod,
}

/// The current content of the files.
#[derive(Debug, Clone, Default)]
pub(super) struct Current {
    pub(super) main: Option<String>,
    pub(super) drop_in: Option<String>,
    /// Torpor's last change of the main file.
    pub(super) edit: Option<MainEdit>,
    /// An earlier change was written, but no restart of containerd was observed after the write.
    pub(super) restart_pending: bool,
}

/// A change of the main file, recorded so that the uninstallation can undo it to the byte.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct MainEdit {
    /// Content before the change; None if there was no file.
    pub(super) before: Option<String>,
    pub(super) after: String,
    /// The change added the list of imports.
    pub(super) new_imports: bool,
}

/// The change of one file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Change {
    Keep,
    Write(String),
    Remove,
}

/// The reason to restart containerd.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Restart {
    /// This plan changes the configuration.
    Changed,
    /// An earlier change still needs a restart.
    Pending,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Plan {
    /// The change to record before the first file is written.
    pub(super) edit: Option<MainEdit>,
    pub(super) main: Change,
    pub(super) drop_in: Change,
    pub(super) restart: Option<Restart>,
}

impl Plan {
    fn new(
        current: &Current,
        edit: Option<MainEdit>,
        main: Option<String>,
        drop_in: Option<String>,
    ) -> Self {
        let main = change(current.main.as_deref(), main);
        let drop_in = change(current.drop_in.as_deref(), drop_in);
        let changed = main != Change::Keep || drop_in != Change::Keep;
        let restart = match (changed, current.restart_pending) {
            (true, _) => Some(Restart::Changed),
            (false, true) => Some(Restart::Pending),
            (false, false) => None,
        };
        Self {
            edit,
            main,
            drop_in,
            restart,
        }
    }
}

fn change(current: Option<&str>, wanted: Option<String>) -> Change {
    match (current, wanted) {
        (Some(current), Some(wanted)) if current == wanted => Change::Keep,
        (None, None) => Change::Keep,
        (_, Some(wanted)) => Change::Write(wanted),
        (Some(_), None) => Change::Remove,
    }
}

/// Plans the installation. Equal files give equal plans. Files that a plan has produced give a plan
/// that changes nothing.
pub(super) fn install(wanted: &Wanted, current: &Current) -> Result<Plan, Error> {
    let text = current.main.as_deref().unwrap_or(NEW_MAIN);
    let main = containerd::parse(&wanted.main, text)?;
    let place = containerd::place(&wanted.main, &main)?;
    let drop_in = (place == Place::DropIn)
        .then(|| containerd::drop_in(&main, &wanted.handler, wanted.stats_period));
    if current.main.is_some() && settled(wanted, text, place)? {
        return Ok(Plan::new(
            current,
            current.edit.clone(),
            current.main.clone(),
            drop_in,
        ));
    }
    let before = undone(wanted, current)?;
    let base = before.as_deref().unwrap_or(NEW_MAIN);
    let (after, new_imports) = edited(wanted, base, place)?;
    let edit = MainEdit {
        before,
        after: after.clone(),
        new_imports,
    };
    Ok(Plan::new(current, Some(edit), Some(after), drop_in))
}

/// Plans the uninstallation.
pub(super) fn uninstall(wanted: &Wanted, current: &Current) -> Result<Plan, Error> {
    let main = undone(wanted, current)?;
    Ok(Plan::new(current, None, main, None))
}

/// Reports whether the main file has the wanted entries of Torpor and no others of Torpor.
fn settled(wanted: &Wanted, text: &str, place: Place) -> Result<bool, Error> {
    match place {
        Place::Main { plugin } => Ok(text.contains(&containerd::block(plugin, &wanted.handler))),
        Place::DropIn => {
            let main = containerd::parse(&wanted.main, text)?;
            let imported = containerd::imports(&wanted.main, &main, &wanted.drop_in)?;
            Ok(imported && containerd::without_block(text) == text)
        }
    }
}

/// Adds the wanted entries to the main file. Returns its new content, and whether the list of
/// imports is new.
fn edited(wanted: &Wanted, base: &str, place: Place) -> Result<(String, bool), Error> {
    let path: &Path = &wanted.main;
    match place {
        Place::Main { plugin } => Ok((
            containerd::with_block(path, base, plugin, &wanted.handler)?,
            false,
        )),
        Place::DropIn => {
            let mut main = containerd::parse(path, base)?;
            if containerd::imports(path, &main, &wanted.drop_in)? {
                return Ok((base.to_owned(), false));
            }
            let new = containerd::add_import(&mut main, &wanted.drop_in);
            Ok((main.to_string(), new))
        }
    }
}

/// Returns the main file without Torpor's entries. A file that is unchanged since the installation
/// becomes its recorded original; a changed file loses Torpor's entries only.
fn undone(wanted: &Wanted, current: &Current) -> Result<Option<String>, Error> {
    let Some(text) = &current.main else {
        return Ok(None);
    };
    if let Some(edit) = &current.edit
        && edit.after == *text
    {
        return Ok(edit.before.clone());
    }
    let text = containerd::without_block(text);
    let mut main = containerd::parse(&wanted.main, &text)?;
    let new_imports = current.edit.as_ref().is_some_and(|edit| edit.new_imports);
    // A text without Torpor's import stays as it is: a document that is parsed and printed again
    // may get a newline at its end.
    let found = containerd::remove_import(&mut main, &wanted.drop_in, new_imports);
    Ok(Some(if found { main.to_string() } else { text }))
}

#[cfg(test)]
mod tests;
