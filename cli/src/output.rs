//! What is printed: text, or the same as data.

use std::io::Write;

use serde::Serialize;

use crate::args::Format;
use crate::error::Error;

/// Something that can be printed in each form.
pub trait Shown: Serialize {
    /// For people. `wide` asks for more.
    fn text(&self, wide: bool) -> String;

    /// `kind.group/name`, one each.
    fn names(&self) -> Vec<String>;
}

/// The output in a form, with the end of its last line.
pub fn rendered(what: &impl Shown, format: Format) -> Result<String, Error> {
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

/// Prints to standard output. A reader that has gone away (`| head`) is no error.
pub fn print(text: &str) -> Result<(), Error> {
    match std::io::stdout().write_all(text.as_bytes()) {
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
        other => other.map_err(Error::Output),
    }
}
