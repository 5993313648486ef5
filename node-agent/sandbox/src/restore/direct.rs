//! Restores of containers, beside the pause container, without runsc's command. Torpor must have
//! started the sandbox.

use anyhow::Context;
use torpor_records::ContainerRecord;
use torpor_records::RunscRecord;
use torpor_runsc::command::Runsc;
use torpor_runsc_direct::{ContainerStart, Gofer};

use crate::node::{COMMAND_LIMIT, Node};
use crate::streams::stdio_of;

/// A container that Torpor restores.
#[derive(Debug)]
pub(super) struct Direct<'a> {
    record: &'a ContainerRecord,
    start: ContainerStart<'a>,
}

impl<'a> Direct<'a> {
    /// `kept`: runsc's record of the sandbox, which Torpor starts. None where runsc must restore
    /// the container.
    pub(super) fn new(
        node: &Node,
        runsc: &'a Runsc,
        record: &'a ContainerRecord,
        kept: &'a RunscRecord,
    ) -> Option<Self> {
        // runsc returns the error of a spec that cannot be read.
        let spec = node.records.spec(&record.id).ok()?;
        let (id, sandbox) = (record.id.as_str(), record.sandbox.as_str());
        let bundle = node.records.container_dir(&record.id);
        let start = ContainerStart::new(runsc, kept, id, sandbox, bundle, &spec)?;
        Some(Self { record, start })
    }

    pub(super) fn begin_gofer(&self) -> anyhow::Result<Gofer> {
        let begun = self.start.begin_gofer(COMMAND_LIMIT);
        begun.with_context(|| format!("cannot serve the files of container {}", self.record.name))
    }

    /// Restores the container in its sandbox, which has the image.
    pub(super) fn restore(&self, node: &Node, gofer: Gofer) -> anyhow::Result<()> {
        let stdio = stdio_of(&node.records.container_dir(&self.record.id))?;
        let restored = self.start.restore(gofer, stdio, COMMAND_LIMIT);
        restored.with_context(|| format!("cannot restore container {}", self.record.name))
    }
}
