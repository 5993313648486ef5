//! Room for a wake in the Pod's limit of memory ([`torpor_cgroup::room`]): made and given back under the pod's lock, and noted before, so that whoever is killed meanwhile leaves
//! it to somebody else to give it back.

use torpor_cgroup::room::Room;
use torpor_core::ids::SandboxId;
use torpor_records::PodRecord;

use crate::node::Node;

/// Makes room. That it fails is no reason not to try to wake: most sandboxes need none.
pub(super) fn make(node: &Node, pod: &PodRecord) {
    if let Err(error) = try_make(node, pod) {
        eprintln!("torpor-oci: cannot raise the pod's limit of memory for a wake: {error:#}");
    }
}

fn try_make(node: &Node, pod: &PodRecord) -> anyhow::Result<()> {
    let Some(cgroup) = pod.cgroup.parent() else {
        return Ok(());
    };
    // Room that is still made is enough, and only its note knows what the limit was.
    let mut rooms = Vec::new();
    for noted in node.records.room(&pod.sandbox)? {
        if noted.is_made()? {
            rooms.push(noted);
        }
    }
    for found in node.cgroups.rooms(cgroup) {
        if !rooms.iter().any(|made: &Room| made.is_of_same(&found)) {
            rooms.push(found);
        }
    }
    if rooms.is_empty() {
        return Ok(());
    }
    node.records.note_room(&pod.sandbox, &rooms)?;
    for room in &rooms {
        room.make()?;
    }
    Ok(())
}

/// Gives back the room that is not used any more, and says whether none is left. Where none was made nothing changes.
pub(crate) fn give_back(node: &Node, sandbox: &SandboxId) -> bool {
    end_rooms(node, sandbox, Room::give_back)
}

/// The same; room that is used is narrowed to what is.
pub(crate) fn narrow(node: &Node, sandbox: &SandboxId) -> bool {
    end_rooms(node, sandbox, Room::narrow)
}

/// Gives all of it back, whatever the sandbox uses. Where the kernel only refuses (cgroup v1) a sandbox that exceeds its limit is ended, as the kernel
/// ends a process that does.
pub(crate) fn enforce(node: &Node, sandbox: &SandboxId) -> bool {
    if end_rooms(node, sandbox, Room::enforce) {
        return true;
    }
    match end_if_exceeded(node, sandbox) {
        Ok(true) => eprintln!(
            "torpor-oci: ended the sandbox: a minute after its wake it used more memory than its Pod's limit"
        ),
        Ok(false) => {}
        Err(error) => {
            eprintln!("torpor-oci: the sandbox may exceed its Pod's limit of memory: {error:#}");
        }
    }
    end_rooms(node, sandbox, Room::narrow)
}

fn end_if_exceeded(node: &Node, sandbox: &SandboxId) -> anyhow::Result<bool> {
    let rooms = node.records.room(sandbox)?;
    let exceeded = rooms
        .iter()
        .map(Room::is_exceeded)
        .collect::<Result<Vec<_>, _>>()?;
    if !exceeded.contains(&true) {
        return Ok(false);
    }
    let pod = node.records.pod(sandbox)?;
    super::kill_processes(node, &pod.cgroup)?;
    Ok(true)
}

type End = fn(&Room) -> Result<bool, torpor_cgroup::Error>;

fn end_rooms(node: &Node, sandbox: &SandboxId, end: End) -> bool {
    try_end_rooms(node, sandbox, end).unwrap_or_else(|error| {
        eprintln!("torpor-oci: cannot restore the pod's limit of memory: {error:#}");
        false
    })
}

fn try_end_rooms(node: &Node, sandbox: &SandboxId, end: End) -> anyhow::Result<bool> {
    let noted = node.records.room(sandbox)?;
    if noted.is_empty() {
        return Ok(true);
    }
    let mut left = Vec::new();
    for room in noted {
        if !end(&room)? {
            left.push(room);
        }
    }
    node.records.note_room(sandbox, &left)?;
    Ok(left.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::node::tests::Limited;
    use crate::restore::catch_up;

    const LIMIT: &str = "268435456";

    fn limited() -> Limited {
        Limited::by(&[("memory.max", LIMIT), ("memory.current", "250000000")])
    }

    impl Limited {
        fn uses(&self, bytes: u64) {
            self.set("memory.current", &bytes.to_string());
        }

        fn memory(&self) -> String {
            self.get("memory.max")
        }

        fn noted(&self) -> usize {
            let noted = self.node.records.room(&self.pod.sandbox);
            noted.expect("read").len()
        }
    }

    #[test]
    fn room_that_is_still_used_stays_noted_and_the_next_wake_takes_no_more() {
        let limited = limited();
        let (node, pod) = (&limited.node, &limited.pod);
        make(node, pod);
        let wider = limited.memory();
        assert_ne!(wider, LIMIT);
        limited.uses(270_000_000);
        assert!(!give_back(node, &pod.sandbox));
        assert_eq!(limited.memory(), wider, "its garbage is not collected yet");
        assert!(!narrow(node, &pod.sandbox));
        let narrowed = limited.memory();
        assert!(narrowed < wider, "it follows what is used");
        make(node, pod);
        assert_eq!((limited.memory(), limited.noted()), (wider, 1));
        limited.uses(260_000_000);
        assert!(give_back(node, &pod.sandbox));
        assert_eq!((limited.memory().as_str(), limited.noted()), (LIMIT, 0));
    }

    #[test]
    fn room_that_is_still_used_ends_all_the_same() {
        let limited = limited();
        let (node, pod) = (&limited.node, &limited.pod);
        make(node, pod);
        limited.uses(290_000_000);
        assert!(!give_back(node, &pod.sandbox));
        assert!(enforce(node, &pod.sandbox));
        assert_eq!((limited.memory().as_str(), limited.noted()), (LIMIT, 0));
    }

    #[test]
    fn whoever_catches_up_with_a_wake_that_was_cut_off_gives_its_room_back() {
        // Where it was killed.
        type Killed = fn(&Limited);
        let moments: [(&str, Killed); 3] = [
            ("before it began", |_| {}),
            ("noted", |limited| {
                make(&limited.node, &limited.pod);
                limited.set("memory.max", LIMIT);
            }),
            ("made", |limited| make(&limited.node, &limited.pod)),
        ];
        for (moment, killed) in moments {
            let limited = limited();
            killed(&limited);
            for _ in 0..2 {
                catch_up(&limited.node, &limited.pod.sandbox).expect("caught up");
                let now = (limited.memory(), limited.noted());
                assert_eq!(now, (LIMIT.to_owned(), 0), "{moment}");
            }
        }
    }
}
