//! Steps in a sandbox that continues from memory in a new place, because another sandbox may
//! continue from the same memory. They run before a peer receives anything from the sandbox.

use anyhow::Context;
use torpor_records::Role;
use torpor_records::{ContainerRecord, PodRecord};
use torpor_runsc::spec::Spec;
use torpor_snapshots::Image;

use super::annotations::{ON_RESTORE_EXEC, ON_RESTORE_EXEC_CONTAINER, is_copy};
use super::refusal::Refusal;
use crate::generation;
use crate::hook;
use crate::node::Node;

/// Reason of a restore that failed because the user's command failed.
const HOOK_FAILED: &str = "OnRestoreExecFailed";

/// Gives each container another generation, and runs the user's command. The sandbox runs, and no
/// peer receives anything from it. The pause container comes first in `parts`. `give_back` releases
/// the turn and the settings that other wakes wait for, because the command may take long.
pub(super) fn renew(
    node: &Node,
    pod: &PodRecord,
    image: &Image,
    parts: &[ContainerRecord],
    give_back: &dyn Fn(),
) -> anyhow::Result<()> {
    let generation = generation::new()?;
    for part in parts.iter().filter(|part| part.role == Role::Container) {
        // The write fails in a read-only root file system, which has the generation that create
        // has placed there.
        if let Err(error) = set_generation(node, part, &generation) {
            crate::log_line!(
                "cannot set the generation of container {}: {error:#}",
                part.name
            );
        }
    }
    let pause = parts.iter().find(|part| part.role == Role::Sandbox);
    let spec = Spec(
        node.records
            .spec(&pause.context("the pod has no pause container")?.id)?,
    );
    let Some(command) = spec.annotation(ON_RESTORE_EXEC) else {
        return Ok(());
    };
    give_back();
    // The Pod has not run in a copy of a golden image, in whichever Pod it is restored.
    let copy = image.manifest().parent.is_some() || is_copy(&spec, image.id());
    let name = spec
        .annotation(ON_RESTORE_EXEC_CONTAINER)
        .unwrap_or_default();
    let variable = match copy {
        true => "copy",
        false => "resume",
    };
    let variables = [("TORPOR_RESTORE".to_owned(), variable.to_owned())];
    let part = parts
        .iter()
        .find(|part| part.role == Role::Container && part.name == name)
        .with_context(|| format!("no container {name:?} runs in Pod {}", pod.name));
    let ended = part.and_then(|part| hook::run(node, part, command, &variables));
    ended.map_err(|error| {
        let message = format!("the command of {ON_RESTORE_EXEC} failed: {error:#}");
        Refusal {
            reason: HOOK_FAILED,
            message,
        }
        .into()
    })
}

/// Sets the generation of a container. A helper (this program) writes the file in the container, so
/// that a program that watches the file gets an event.
fn set_generation(node: &Node, part: &ContainerRecord, generation: &str) -> anyhow::Result<()> {
    hook::run_helper(node, part, &["set-generation", generation])
}
