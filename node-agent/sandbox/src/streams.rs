//! A container's standard streams, which its keeper holds.

use std::path::Path;

use torpor_messages::keeper::{self, Request};
use torpor_runsc::command::Stdio3;

use crate::node::CALL_LIMIT;

/// Returns copies of the standard streams that the keeper holds. `dir`: the container's directory.
pub fn stdio_of(dir: &Path) -> anyhow::Result<Stdio3> {
    let (_, files) = keeper::ask(dir, &Request::Stdio, &[], CALL_LIMIT)?;
    let [stdin, stdout, stderr] = <[_; 3]>::try_from(files)
        .map_err(|files| anyhow::anyhow!("the keeper sent {} streams, not 3", files.len()))?;
    Ok(Stdio3 {
        stdin,
        stdout,
        stderr,
    })
}
