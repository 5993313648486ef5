//! Room for a wake in the Pod's limit of memory ([`torpor_cgroup::room`]). Room is made and given
//! back under the pod's lock. It is recorded before it is made, so that another process gives it
//! back when this one is killed.

use torpor_cgroup::room::Room;
use torpor_core::ids::SandboxId;
use torpor_records::PodRecord;

use super::processes::kill_processes;
use crate::node::Node;

/// Makes room. A failure is only logged, and the wake goes on: most sandboxes need no room.
pub(super) fn make(node: &Node, pod: &PodRecord) {
    if let Err(error) = try_make(node, pod) {
        crate::log_line!("cannot raise the pod's limit of memory for a wake: {error:#}");
    }
}

fn try_make(node: &Node, pod: &PodRecord) -> anyhow::Result<()> {
    let Some(cgroup) = pod.cgroup.parent() else {
        return Ok(());
    };
    // Room that an earlier wake has left is enough. Only its record has the Pod's own limit, so the
    // record is kept.
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

/// Gives back the room if the memory in use fits into the Pod's own limit; returns whether no room
/// is left. Without room nothing changes.
pub fn give_back(node: &Node, sandbox: &SandboxId) -> bool {
    lower_all(node, sandbox, Room::give_back)
}

/// Gives back the room as [`give_back`] does, or reduces it to the memory in use; returns whether
/// no room is left.
pub fn narrow(node: &Node, sandbox: &SandboxId) -> bool {
    lower_all(node, sandbox, Room::narrow)
}

/// Gives all room back, however much of it the sandbox uses; returns whether no room is left. With
/// cgroup v1 the kernel refuses a limit below the memory in use. Then a sandbox that exceeds its
/// Pod's limit is ended, as the kernel ends a process that does.
pub fn enforce(node: &Node, sandbox: &SandboxId) -> bool {
    if lower_all(node, sandbox, Room::enforce) {
        return true;
    }
    match end_if_exceeded(node, sandbox) {
        Ok(true) => crate::log_line!(
            "ended the sandbox: a minute after its wake it used more memory than its Pod's limit"
        ),
        Ok(false) => {}
        Err(error) => {
            crate::log_line!("the sandbox may exceed its Pod's limit of memory: {error:#}");
        }
    }
    lower_all(node, sandbox, Room::narrow)
}

/// Ends the sandbox if it uses more than its Pod's limit; returns whether it did.
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
    kill_processes(node, &pod.cgroup)?;
    Ok(true)
}

/// Lowers one limit; returns whether no room is left above it.
type Lower = fn(&Room) -> Result<bool, torpor_cgroup::Error>;

fn lower_all(node: &Node, sandbox: &SandboxId, lower: Lower) -> bool {
    try_lower_all(node, sandbox, lower).unwrap_or_else(|error| {
        crate::log_line!("cannot restore the pod's limit of memory: {error:#}");
        false
    })
}

fn try_lower_all(node: &Node, sandbox: &SandboxId, lower: Lower) -> anyhow::Result<bool> {
    let noted = node.records.room(sandbox)?;
    if noted.is_empty() {
        return Ok(true);
    }
    let mut left = Vec::new();
    for room in noted {
        if !lower(&room)? {
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
    use crate::restore::transitions::catch_up;

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
    fn enforcing_the_limit_ends_room_that_is_still_used() {
        let limited = limited();
        let (node, pod) = (&limited.node, &limited.pod);
        make(node, pod);
        limited.uses(290_000_000);
        assert!(!give_back(node, &pod.sandbox));
        assert!(enforce(node, &pod.sandbox));
        assert_eq!((limited.memory().as_str(), limited.noted()), (LIMIT, 0));
    }

    #[test]
    fn a_catch_up_gives_back_the_room_of_a_wake_that_was_cut_off() {
        // The interrupted wake, up to the moment of its end.
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
