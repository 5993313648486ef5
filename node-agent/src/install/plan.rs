//! Decides what is to change in containerd's configuration. Nothing here touches a file.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::containerd::{self, Handler, Place};
use super::error::Error;
use crate::args::StatsPeriod;

/// Written where there is no main file: containerd 1.7 and 2 both read this version.
const NEW_MAIN: &str = "version = 2\n";

/// What containerd is to know, and in which files, in the host's paths.
#[derive(Debug, Clone)]
pub(super) struct Wanted {
    pub(super) main: PathBuf,
    pub(super) drop_in: PathBuf,
    pub(super) handler: Handler,
    pub(super) stats_period: StatsPeriod,
}

/// What the files hold now.
#[derive(Debug, Clone, Default)]
pub(super) struct Current {
    pub(super) main: Option<String>,
    pub(super) drop_in: Option<String>,
    /// Our last change of the main file.
    pub(super) edit: Option<MainEdit>,
    /// A change was written, but no restart was observed after it.
    pub(super) restart_pending: bool,
}

/// A change of the main file, kept so that it can be undone to the byte.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct MainEdit {
    /// Nothing: the file was not there.
    pub(super) before: Option<String>,
    pub(super) after: String,
    /// There was no list of imports.
    pub(super) new_imports: bool,
}

/// What happens to one file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Change {
    Keep,
    Write(String),
    Remove,
}

/// Why containerd is restarted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Restart {
    Changed,
    Pending,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Plan {
    /// To be recorded before anything is written.
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

/// Plans the installation. The same files give the same plan, and a plan's result gives an empty one.
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

/// Plans the removal.
pub(super) fn uninstall(wanted: &Wanted, current: &Current) -> Result<Plan, Error> {
    let main = undone(wanted, current)?;
    Ok(Plan::new(current, None, main, None))
}

/// Does the main file already say what it should, and nothing of ours that it should not?
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

/// The main file with what it needs, and whether its list of imports is new.
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

/// The main file without what we added: the recorded bytes if nobody changed it since, else what is left of it.
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
    // An untouched text stays as it is: writing a document anew may add a newline at its end.
    let found = containerd::remove_import(&mut main, &wanted.drop_in, new_imports);
    Ok(Some(if found { main.to_string() } else { text }))
}

#[cfg(test)]
mod tests;
