//! A pod's containers beside the pause container, as their sandbox is restored: by torpor-oci where it has begun the sandbox and knows how, and by runsc
//! everywhere else.

use std::path::Path;

use anyhow::Context;
use torpor_records::RunscRecord;
use torpor_records::{ContainerRecord, PodRecord};
use torpor_runsc::command::Runsc;
use torpor_runsc_direct::{ContainerStart, Gofer};

use super::sandbox::{came_too_early, remove_filestores, restore_container};
use crate::console::Terminal;
use crate::node::{COMMAND_LIMIT, Node};
use crate::start::stdio_of;

/// One that torpor-oci restores.
#[derive(Debug)]
pub(super) struct Direct<'a> {
    record: &'a ContainerRecord,
    start: ContainerStart<'a>,
}

impl<'a> Direct<'a> {
    /// None where runsc restores it. `kept`: of a sandbox that torpor-oci begins.
    pub(super) fn new(
        node: &Node,
        runsc: &'a Runsc,
        record: &'a ContainerRecord,
        kept: &'a RunscRecord,
    ) -> Option<Self> {
        // runsc says of a spec that cannot be read what is wrong with it.
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

    /// In its sandbox, which has the image.
    pub(super) fn restore(&self, node: &Node, gofer: Gofer) -> anyhow::Result<()> {
        let stdio = stdio_of(&node.records.container_dir(&self.record.id))?;
        let restored = self.start.restore(gofer, stdio, COMMAND_LIMIT);
        restored.with_context(|| format!("cannot restore container {}", self.record.name))
    }
}

/// One that runsc restores.
pub(super) struct ViaRunsc<'a> {
    pub(super) record: &'a ContainerRecord,
    pub(super) terminal: Option<&'a Terminal>,
}

impl ViaRunsc<'_> {
    pub(super) fn restore(&self, node: &Node, runsc: &Runsc, image: &Path) -> anyhow::Result<()> {
        restore_container(node, runsc, self.record, self.terminal, image)
    }

    /// Once more in a sandbox that has the image now, if it had not when it was first tried.
    pub(super) fn or_again(
        &self,
        tried: anyhow::Result<()>,
        node: &Node,
        pod: &PodRecord,
        runsc: &Runsc,
        image: &Path,
    ) -> anyhow::Result<()> {
        match tried {
            Err(error) if came_too_early(&error) => {
                runsc.delete(self.record.id.as_str(), COMMAND_LIMIT)?;
                remove_filestores(node, pod, std::slice::from_ref(self.record))?;
                self.restore(node, runsc, image)
            }
            tried => tried,
        }
    }
}
