//! The list of a pod's containers. Each wake reads it, and the agent reads it for each pod again
//! and again. Thanks to the list neither reads the records of the whole node.

use std::fs::OpenOptions;
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;

use torpor_core::ids::{ContainerId, SandboxId};

use crate::error::Error;
use crate::files::{
    list, make_dir, make_dir_of_agent, remove_dir, remove_file, write_error, write_json,
};
use crate::pod::{ContainerRecord, Role};
use crate::records::{CONTAINER, Records};

impl Records {
    /// Makes a pod's directory, and the one in which the agent writes about Pods.
    pub fn create_pod_dir(&self, sandbox: &SandboxId) -> Result<(), Error> {
        make_dir_of_agent(&self.reports)?;
        make_dir(&self.members_dir(sandbox))
    }

    /// Returns the directory with an empty file per container, named by the container's id. A
    /// container of the list may have no record: the record is not written yet, or a removal was
    /// interrupted.
    fn members_dir(&self, sandbox: &SandboxId) -> PathBuf {
        self.pod_dir(sandbox).join("containers")
    }

    pub fn write_container(&self, container: &ContainerRecord) -> Result<(), Error> {
        let members = self.members_dir(&container.sandbox);
        // The file is made before the record: a container that is not in the list has no record.
        let path = members.join(container.id.as_str());
        let mut options = OpenOptions::new();
        let made = options
            .create(true)
            .truncate(false)
            .write(true)
            .mode(0o600)
            .open(&path);
        made.map_err(|source| write_error(&path, source))?;
        let path = self.container_dir(&container.id).join(CONTAINER);
        write_json(&path, container)
    }

    /// Returns the containers of a pod, the pause container first, the others sorted by name.
    pub fn containers_of(&self, sandbox: &SandboxId) -> Result<Vec<ContainerRecord>, Error> {
        let names = list(&self.members_dir(sandbox))?;
        let mut found: Vec<ContainerRecord> = names
            .into_iter()
            .filter_map(|name| ContainerId::try_from(name).ok())
            .filter_map(|id| self.container(&id).ok())
            .filter(|record| record.sandbox == *sandbox)
            .collect();
        found.sort_by(|a, b| {
            let key = |c: &ContainerRecord| (c.role == Role::Container, c.name.clone());
            key(a).cmp(&key(b))
        });
        Ok(found)
    }

    /// Removes the records of a container.
    pub fn remove_container(&self, container: &ContainerId) -> Result<(), Error> {
        // Without a readable record the container stays in the list until its pod is removed.
        let record = self.container(container);
        remove_dir(&self.container_dir(container))?;
        match record {
            Ok(record) => remove_file(&self.members_dir(&record.sandbox).join(container.as_str())),
            Err(_) => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use torpor_snapshots::Digest;

    use super::*;
    use crate::tests::one_pod;

    fn container(sandbox: &SandboxId, id: char, name: &str) -> ContainerRecord {
        ContainerRecord {
            id: ContainerId::try_from(id.to_string().repeat(64)).expect("an id"),
            sandbox: sandbox.clone(),
            role: Role::Container,
            name: name.to_owned(),
            terminal: false,
            cgroup: PathBuf::new(),
            spec_digest: Digest::of(b""),
            keeper_pid: 0,
            in_shim: false,
            completed: None,
        }
    }

    fn written(records: &Records, container: &ContainerRecord) {
        records.create_container_dir(&container.id).expect("made");
        records.write_container(container).expect("written");
    }

    fn names(records: &Records, sandbox: &SandboxId) -> Vec<String> {
        let containers = records.containers_of(sandbox).expect("known");
        containers.into_iter().map(|c| c.name).collect()
    }

    #[test]
    fn a_pod_has_its_own_containers_and_no_others() {
        let (_dir, records, sandbox) = one_pod();
        let other = SandboxId::try_from("b".repeat(64)).expect("an id");
        records.create_pod_dir(&other).expect("made");
        let (second, first) = (
            container(&sandbox, '2', "second"),
            container(&sandbox, '1', "first"),
        );
        written(&records, &second);
        written(&records, &first);
        written(&records, &container(&other, '3', "stranger"));
        assert_eq!(names(&records, &sandbox), ["first", "second"]);
        assert_eq!(names(&records, &other), ["stranger"]);
        for _ in 0..2 {
            records.remove_container(&second.id).expect("removed");
            assert_eq!(names(&records, &sandbox), ["first"]);
        }
    }

    #[test]
    fn a_name_without_a_record_is_no_container() {
        let (_dir, records, sandbox) = one_pod();
        let half = container(&sandbox, '1', "half");
        written(&records, &half);
        std::fs::remove_dir_all(records.container_dir(&half.id)).expect("removed");
        assert!(names(&records, &sandbox).is_empty());
        records.remove_pod(&sandbox).expect("removed");
    }
}
