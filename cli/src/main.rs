//! `kubectl-torpor`: see the crate's own documentation.

use std::process::ExitCode;

use clap::Parser;
use torpor_cli::{args::Args, output::tell, run};

fn main() -> ExitCode {
    // First of all: with two TLS providers in the tree the first connection would panic.
    if rustls::crypto::aws_lc_rs::default_provider()
        .install_default()
        .is_err()
    {
        tell("kubectl-torpor: a TLS provider is installed already");
        return ExitCode::FAILURE;
    }
    run::to_the_end(Args::parse())
}
