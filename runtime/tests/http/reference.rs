//! Page of docs/reference with the runtime's flags.

use clap::CommandFactory;
use torpor_runtime::flags::Flags;

#[test]
fn reference_of_flags_is_current() {
    let page = torpor_test_reference::flags(Flags::command());
    torpor_test_reference::assert_page("flags-runtime.md", &page);
}
