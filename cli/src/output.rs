//! What is printed: text, or the same as data.

use std::io::Write;

use serde::Serialize;

use crate::args::Format;
use crate::error::Error;
use crate::table::printable;

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
    let mut out = std::io::stdout().lock();
    let written = out.write_all(text.as_bytes()).and_then(|()| out.flush());
    match written {
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
        other => other.map_err(Error::Output),
    }
}

/// Says a line beside the output, on standard error. That nobody reads it any more (`2>&1 | head`) is no reason to end: `eprintln!` would
/// panic.
pub fn tell(line: &str) {
    let mut err = std::io::stderr().lock();
    drop(writeln!(err, "{}", printable(line)));
}
