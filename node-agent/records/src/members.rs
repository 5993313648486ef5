//! Which containers a pod has. Whoever wakes it asks, and the agent asks for each pod again and again: neither reads the records of the whole node.

use std::fs::OpenOptions;
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;

use torpor_core::ids::{ContainerId, SandboxId};

use super::files::{list, make_dir, remove_dir, remove_file, write_error, write_json};
use super::{ContainerRecord, Error, Records};
use crate::Role;

impl Records {
    /// Makes a pod's directory.
    pub fn create_pod_dir(&self, sandbox: &SandboxId) -> Result<(), Error> {
        make_dir(&self.members_dir(sandbox))
    }

    /// Names of the pod's containers, an empty file each. A name may have no record: it was not written yet, or not taken away any more.
    fn members_dir(&self, sandbox: &SandboxId) -> PathBuf {
        self.pod_dir(sandbox).join("containers")
    }

    pub fn write_container(&self, container: &ContainerRecord) -> Result<(), Error> {
        let members = self.members_dir(&container.sandbox);
        // The name is there before the record: who finds no name knows that there is no record.
        if members.is_dir() {
            let path = members.join(container.id.as_str());
            let mut options = OpenOptions::new();
            let made = options
                .create(true)
                .truncate(false)
                .write(true)
                .mode(0o600)
                .open(&path);
            made.map_err(|source| write_error(&path, source))?;
        }
        let path = self.container_dir(&container.id).join("container.json");
        write_json(&path, container)
    }

    /// The containers of a pod, the pause container first, then by name.
    pub fn containers_of(&self, sandbox: &SandboxId) -> Result<Vec<ContainerRecord>, Error> {
        let members = self.members_dir(sandbox);
        // A Torpor before this one kept no names: each record of the node says whose it is.
        let names = match members.is_dir() {
            true => list(&members)?,
            false => list(&self.containers)?,
        };
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

    /// Forgets a container.
    pub fn remove_container(&self, container: &ContainerId) -> Result<(), Error> {
        // One whose record cannot be read leaves its name, which goes with its pod.
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
            completed: None,
        }
    }

    fn written(records: &Records, container: &ContainerRecord) {
        records.create_container_dir(&container.id).expect("made");
        records.write_container(container).expect("written");
    }

    fn names(records: &Records, sandbox: &SandboxId) -> Vec<String> {
        let containers = records.containers_of(sandbox).expect("known");
        containers.into_iter().map(|one| one.name).collect()
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

    #[test]
    fn a_pod_of_an_older_torpor_has_its_containers_still() {
        let (_dir, records, sandbox) = one_pod();
        std::fs::remove_dir(records.members_dir(&sandbox)).expect("removed");
        let old = container(&sandbox, '1', "old");
        written(&records, &old);
        assert_eq!(names(&records, &sandbox), ["old"]);
        records.remove_container(&old.id).expect("removed");
        assert!(names(&records, &sandbox).is_empty());
    }
}
