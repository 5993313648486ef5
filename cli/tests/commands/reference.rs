//! Page of docs/reference with the flags of `kubectl torpor`.

use clap::CommandFactory;
use torpor_cli::args::Args;

#[test]
fn reference_of_flags_is_current() {
    let page = torpor_test_reference::flags(Args::command());
    torpor_test_reference::assert_page("flags-kubectl-torpor.md", &page);
}
