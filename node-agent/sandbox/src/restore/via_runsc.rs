//! Restores of containers by runsc's command.

use std::path::Path;

use anyhow::Context;
use torpor_records::Role;
use torpor_records::{ContainerRecord, PodRecord};
use torpor_runsc::command::{Runsc, Stdio3};

use super::remains::remove_filestores;
use crate::console::Terminal;
use crate::node::{COMMAND_LIMIT, Node};
use crate::streams::stdio_of;

/// A container, beside the pause container, that runsc restores.
pub(super) struct ViaRunsc<'a> {
    pub(super) record: &'a ContainerRecord,
    pub(super) terminal: Option<&'a Terminal>,
}

impl ViaRunsc<'_> {
    pub(super) fn restore(&self, node: &Node, runsc: &Runsc, image: &Path) -> anyhow::Result<()> {
        restore_container(node, runsc, self.record, self.terminal, image)
    }

    /// Returns the result `tried` of a first restore, or restores the container once more if it
    /// came too early. The sandbox has the image now.
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

/// Reports whether the container's restore failed because the sandbox had not been handed the image
/// yet (runsc/boot/controller.go, RestoreSubcontainer). gVisor changes nothing then. But runsc
/// writes a message to the container's standard error, so such a restore should stay an exception.
fn came_too_early(error: &anyhow::Error) -> bool {
    format!("{error:#}").contains("sandbox is not being restored")
}

/// Restores a container with runsc. `terminal`: terminal of the host in place of the container's
/// own.
pub(super) fn restore_container(
    node: &Node,
    runsc: &Runsc,
    record: &ContainerRecord,
    terminal: Option<&Terminal>,
    image: &Path,
) -> anyhow::Result<()> {
    let dir = node.records.container_dir(&record.id);
    let stdio = match (record.role, terminal) {
        // The pause container's program writes nothing.
        (Role::Sandbox, _) => None,
        (Role::Container, Some(terminal)) => Some(Stdio3 {
            stdin: terminal.slave.try_clone()?,
            stdout: terminal.slave.try_clone()?,
            stderr: terminal.slave.try_clone()?,
        }),
        (Role::Container, None) => Some(stdio_of(&dir)?),
    };
    let restored = runsc.restore(record.id.as_str(), &dir, image, stdio, COMMAND_LIMIT);
    restored.with_context(|| match record.role {
        Role::Sandbox => "cannot restore the sandbox".to_owned(),
        Role::Container => format!("cannot restore container {}", record.name),
    })
}
