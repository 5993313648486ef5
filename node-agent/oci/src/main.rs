//! The OCI runtime torpor-oci: see the library of the same name.

use std::process::ExitCode;

fn main() -> ExitCode {
    torpor_oci::main()
}
