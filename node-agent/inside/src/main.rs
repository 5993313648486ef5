//! See the library's documentation.

use std::process::ExitCode;

use anyhow::{Context, bail};
use torpor_inside::{forward, notes};

fn run() -> anyhow::Result<()> {
    let mut arguments = std::env::args().skip(1);
    let mut next = || arguments.next().context("an argument is missing");
    let (command, argument) = (next()?, next()?);
    match command.as_str() {
        "forward" => forward::inside(argument.parse().context("it is no port")?),
        "set-generation" => notes::GENERATION.set(&argument),
        "has-claim" => notes::CLAIM.has(&argument),
        "set-claim" => notes::CLAIM.set(&argument),
        _ => bail!("{command:?} is not a command"),
    }
}

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("torpor-inside: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Replaces glibc's function that returns the directory of the program.
///
/// glibc calls the function in a static program, too, and ends the program if `/proc/self/exe` is
/// not a path. For a program that gVisor runs from a descriptor it is `host:[…]`. Only programs
/// that load libraries need the directory; -1 is glibc's value for an unknown one.
#[cfg(all(target_env = "gnu", target_feature = "crt-static"))]
#[allow(unsafe_code)]
// SAFETY: no other object of the program defines the name: glibc's own object is in an archive, and
// the linker takes it only if the name is missing. glibc (elf/dl-origin.c) allows this result.
#[unsafe(no_mangle)]
extern "C" fn _dl_get_origin() -> *const std::ffi::c_char {
    std::ptr::without_provenance(usize::MAX)
}
