//! `kubectl-torpor`: see the documentation of the library crate.

use std::process::ExitCode;

use clap::Parser;
use torpor_cli::{args::Args, output::print_error, run};

fn main() -> ExitCode {
    // Two TLS providers are linked in; without a default one the first connection would panic.
    if rustls::crypto::aws_lc_rs::default_provider()
        .install_default()
        .is_err()
    {
        print_error("kubectl-torpor: a TLS provider is installed already");
        return ExitCode::FAILURE;
    }
    run::run_to_completion(Args::parse())
}
