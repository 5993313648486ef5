//! Page of docs/reference with the router's flags.

use clap::CommandFactory;
use torpor_router::flags::Flags;

#[test]
fn reference_of_flags_is_current() {
    let page = torpor_test_reference::flags(Flags::command());
    torpor_test_reference::assert_page("flags-router.md", &page);
}
