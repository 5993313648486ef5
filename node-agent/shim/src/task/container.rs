//! The containers of the shim's pod.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, TryLockError};

use anyhow::Context;
use torpor_core::ids::ContainerId;
use torpor_sandbox::node::Node;

use super::events::Events;
use super::exec::Exec;
use super::process::Life;
use super::streams::{Held, Paths};
use crate::end_signal::EndSignal;

/// Locks data that stays whole when a thread panics.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// All that the shim knows of its pod.
pub(crate) struct Pod {
    node: OnceLock<Arc<Node>>,
    pub(crate) events: Events,
    containers: Mutex<HashMap<ContainerId, Arc<Container>>>,
    /// Held while a container is created: containerd may give up the call, and delete the container
    /// before it is there.
    pub(crate) creating: Mutex<()>,
    /// Ends the shim.
    pub(crate) end: Arc<EndSignal>,
}

/// A container, from its creation to its deletion.
#[derive(Debug)]
pub(crate) struct Container {
    pub(crate) id: ContainerId,
    pub(crate) bundle: PathBuf,
    pub(crate) paths: Paths,
    pub(crate) life: Life,
    pub(crate) held: Mutex<Held>,
    pub(crate) execs: Mutex<HashMap<String, Arc<Exec>>>,
    /// Held while the container starts, so that its end is published after its start. The value:
    /// processes that the kernel had killed for want of memory before.
    pub(crate) starting: Mutex<Option<u64>>,
}

impl Pod {
    pub(crate) fn new(events: Events, end: Arc<EndSignal>) -> Self {
        Self {
            node: OnceLock::new(),
            events,
            containers: Mutex::default(),
            creating: Mutex::default(),
            end,
        }
    }

    /// Returns the node's configuration, which is read once.
    pub(crate) fn node(&self) -> anyhow::Result<&Arc<Node>> {
        if let Some(node) = self.node.get() {
            return Ok(node);
        }
        let node = Node::load().context("cannot load Torpor's configuration")?;
        Ok(self.node.get_or_init(|| Arc::new(node)))
    }

    pub(crate) fn add(&self, container: Arc<Container>) {
        lock(&self.containers).insert(container.id.clone(), container);
    }

    pub(crate) fn get(&self, id: &str) -> Option<Arc<Container>> {
        let id = ContainerId::try_from(id.to_owned()).ok()?;
        lock(&self.containers).get(&id).cloned()
    }

    pub(crate) fn remove(&self, id: &ContainerId) {
        lock(&self.containers).remove(id);
    }

    /// Reports whether the pod has no container. A container that has ended and is not recorded any
    /// more is none: containerd has lost it.
    pub(crate) fn is_empty(&self) -> bool {
        let _creating = lock(&self.creating);
        self.has_no_container()
    }

    /// Reports whether the pod has no container and none is being created.
    pub(crate) fn is_unused(&self) -> bool {
        match self.creating.try_lock() {
            Err(TryLockError::WouldBlock) => false,
            Ok(_) | Err(TryLockError::Poisoned(_)) => self.has_no_container(),
        }
    }

    fn has_no_container(&self) -> bool {
        let is_recorded = |id| {
            self.node()
                .is_ok_and(|node| node.records.container(id).is_ok())
        };
        lock(&self.containers)
            .values()
            .all(|container| container.life.exit().is_some() && !is_recorded(&container.id))
    }
}

impl Container {
    pub(crate) fn exec(&self, id: &str) -> Option<Arc<Exec>> {
        lock(&self.execs).get(id).cloned()
    }
}
