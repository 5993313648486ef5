//! Messages for the node's operator on standard error.

use std::fmt::Arguments;
use std::io::Write;

/// Writes a line to standard error. A line that cannot be written is dropped: the reader of a
/// shim's log is containerd, which may be restarting.
pub fn write_line(message: Arguments<'_>) {
    let line = format!("torpor: {message}\n");
    let _ = std::io::stderr().write_all(line.as_bytes());
}

/// Logs a message, formatted as by [`format!`].
#[macro_export]
macro_rules! log_line {
    ($($message:tt)*) => {
        $crate::log::write_line(format_args!($($message)*))
    };
}
