//! Output of the commands, as text or as data.

use std::io::Write;

use serde::Serialize;

use crate::args::Format;
use crate::error::Error;
use crate::table::printable;

/// Result of a command that can be printed in each format.
pub trait Render: Serialize {
    /// Returns the result as text; with more columns if `wide`.
    fn text(&self, wide: bool) -> String;

    /// Returns the names of the objects, as `kind.group/name`.
    fn names(&self) -> Vec<String>;
}

/// Returns a result in a format, with a line feed at the end.
pub fn rendered(what: &impl Render, format: Format) -> Result<String, Error> {
    let fails = |format, message| Error::Format { format, message };
    Ok(match format {
        Format::Table => what.text(false),
        Format::Wide => what.text(true),
        Format::Name => what
            .names()
            .iter()
            .map(|name| format!("{name}\n"))
            .collect(),
        Format::Json => {
            let text = serde_json::to_string_pretty(what);
            let text = text.map_err(|error| fails("json", error.to_string()))?;
            format!("{text}\n")
        }
        Format::Yaml => {
            let text = serde_saphyr::to_string(what);
            text.map_err(|error| fails("yaml", error.to_string()))?
        }
    })
}

/// Prints to standard output. A closed pipe (`| head`) is no error.
pub fn print(text: &str) -> Result<(), Error> {
    let mut out = std::io::stdout().lock();
    let written = out.write_all(text.as_bytes()).and_then(|()| out.flush());
    match written {
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
        other => other.map_err(Error::Output),
    }
}

/// Prints a line to standard error.
///
/// A closed pipe (`2>&1 | head`) is ignored; `eprintln!` would panic.
pub fn print_error(line: &str) {
    let mut err = std::io::stderr().lock();
    drop(writeln!(err, "{}", printable(line)));
}
