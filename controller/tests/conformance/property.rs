//! Tests random sequences of actions by users, kubelets and agents, of faults and of stale caches.
//!
//! The invariants of every sequence are:
//! - There is never a second Pod.
//! - A Pod whose memory must be kept is not deleted before the image of exactly this Pod is
//!   committed.
//! - An image that is the only copy of a memory is not deleted.
//! - No Pod is made to continue from an image that is used, unfinished or being deleted.
//! - The controller settles in the end.

use std::{collections::BTreeSet, time::Duration};

use proptest::prelude::*;
use serde_json::{Value, json};

use crate::{
    apiserver::{Fault, FaultAnswer},
    cluster::is_terminating,
    objects::{NS, committed, condition, mode, ready_pod, torpor_sandbox},
    world::World,
};

#[derive(Clone, Debug)]
enum Event {
    Mode(&'static str),
    /// A pass that sees the user's change, while all other caches are stale.
    ModeAndPass(&'static str),
    Annotate(&'static str, Option<&'static str>),
    /// All caches are refreshed.
    Sync,
    /// A pass with the caches as they are.
    Pass,
    /// Every component acts once, so that the sequence progresses.
    Progress,
    PodStarts,
    PodEnds,
    PodFails,
    PodVanishes,
    AgentCommits,
    AgentCommitsAndIsSeen,
    AgentFailsToSave,
    AgentReports,
    AgentDeletesBytes,
    NodeForgets,
    NodeReports,
    Fault(&'static str, &'static str, FaultAnswer),
}

fn event() -> impl Strategy<Value = Event> {
    let fault = (
        prop::sample::select(vec![
            ("create", "pods"),
            ("delete", "pods"),
            ("patch", "pods"),
            ("create", "sandboxsnapshots"),
            ("delete", "sandboxsnapshots"),
            ("patch status", "sandboxsnapshots"),
            ("patch", "sandboxes"),
            ("patch status", "sandboxes"),
        ]),
        prop::sample::select(vec![FaultAnswer::LoseAnswer, FaultAnswer::Refuse(500)]),
    );
    let mode = || prop::sample::select(vec!["Running", "Suspended"]);
    prop_oneof![
        4 => mode().prop_map(Event::Mode),
        12 => mode().prop_map(Event::ModeAndPass),
        2 => prop::sample::select(vec![None, Some("Hibernate"), Some("Freeze"), Some("Stop")])
            .prop_map(|value| Event::Annotate("torpor.dev/suspension-strategy", value)),
        1 => prop::sample::select(vec![None, Some("ColdStart")])
            .prop_map(|value| Event::Annotate("torpor.dev/on-restore-failure", value)),
        4 => Just(Event::Sync),
        10 => Just(Event::Pass),
        8 => Just(Event::Progress),
        2 => Just(Event::PodStarts),
        4 => Just(Event::PodEnds),
        1 => Just(Event::PodFails),
        1 => Just(Event::PodVanishes),
        3 => Just(Event::AgentCommits),
        6 => Just(Event::AgentCommitsAndIsSeen),
        2 => Just(Event::AgentFailsToSave),
        4 => Just(Event::AgentReports),
        4 => Just(Event::AgentDeletesBytes),
        1 => Just(Event::NodeForgets),
        1 => Just(Event::NodeReports),
        2 => fault.prop_map(|((verb, kind), answer)| Event::Fault(verb, kind, answer)),
    ]
}

/// World and the agent's knowledge beyond the API.
struct Run {
    world: World,
    /// Images that a Pod has continued from, as in the node's ledger.
    used: BTreeSet<String>,
    /// Pods whose program runs; a Pod that could not be restored is never among them.
    alive: BTreeSet<String>,
}

impl Run {
    fn new() -> Self {
        let world = World::with_timeout(Duration::from_millis(20));
        world.api.create("sandboxes", torpor_sandbox(json!({})));
        world.sync();
        Self {
            world,
            used: BTreeSet::new(),
            alive: BTreeSet::new(),
        }
    }

    async fn play(&mut self, event: &Event) {
        match event {
            Event::Mode(to) => self.world.edit_sandbox(&mode(to)),
            Event::ModeAndPass(to) => {
                self.world.edit_sandbox(&mode(to));
                self.checked_pass().await;
            }
            Event::Annotate(key, value) => {
                self.world
                    .edit_sandbox(&json!({"metadata": {"annotations": {*key: value}}}));
            }
            Event::Sync => self.world.sync(),
            Event::Pass => self.checked_pass().await,
            Event::Progress => {
                for _ in 0..2 {
                    self.world.sync();
                    self.checked_pass().await;
                    self.pod_starts();
                }
                self.world.sync();
            }
            Event::PodStarts => self.pod_starts(),
            Event::PodEnds => {
                if self.world.pod().is_some_and(|pod| is_terminating(&pod)) {
                    self.world.pod_ends();
                }
            }
            Event::PodFails => {
                if self.world.pod().is_some() {
                    self.world.edit_pod(&json!({"status": {"phase": "Failed"}}));
                }
            }
            Event::PodVanishes => self.world.api.remove("pods", NS, "s"),
            Event::AgentCommits => self.agent_saves(true),
            Event::AgentCommitsAndIsSeen => {
                self.agent_saves(true);
                self.world.sync();
            }
            Event::AgentFailsToSave => self.agent_saves(false),
            Event::AgentReports => self.agent_reports(),
            Event::AgentDeletesBytes => {
                for snapshot in self
                    .world
                    .snapshots()
                    .iter()
                    .filter(|object| is_terminating(object))
                {
                    self.world.image_is_gone(name(snapshot));
                }
            }
            Event::NodeForgets => self.world.api.remove("sandboxnodes", "", "n1"),
            Event::NodeReports => {
                if self.world.api.get("sandboxnodes", "", "n1").is_none() {
                    let node = crate::objects::sandbox_node("n1");
                    self.world.api.create("sandboxnodes", node);
                }
            }
            Event::Fault(verb, kind, answer) => {
                self.world.api.fail(Fault {
                    verb,
                    kind,
                    answer: *answer,
                });
            }
        }
    }

    /// Starts the Pod as the kubelet does; the shim restores it, starts it cold, or refuses.
    fn pod_starts(&mut self) {
        let Some(pod) = self.world.pod() else { return };
        if is_terminating(&pod) || pod["status"]["phase"] != "Pending" {
            return;
        }
        match image_of(&pod) {
            None => {}
            Some(image) if self.used.contains(&image) => {
                let stale = condition("torpor.dev/Restored", "False", "ImageStale", "used");
                return self.world.set_pod_condition(stale);
            }
            Some(image) => drop(self.used.insert(image)),
        }
        self.alive.insert(uid(&pod));
        self.world.edit_pod(&ready_pod("n1"));
    }

    /// Reports the result of the restore, some time after it.
    fn agent_reports(&self) {
        let Some(pod) = self
            .world
            .pod()
            .filter(|pod| self.alive.contains(&uid(pod)))
        else {
            return;
        };
        let Some(image) = image_of(&pod) else { return };
        self.world
            .set_pod_condition(condition("torpor.dev/Restored", "True", "Restored", ""));
        for snapshot in self.world.snapshots() {
            if snapshot["status"]["imageID"] == image.as_str() {
                let mut all = snapshot["status"]["conditions"]
                    .as_array()
                    .cloned()
                    .unwrap();
                all.retain(|condition| condition["type"] != "Consumed");
                all.push(condition("Consumed", "True", "Resumed", ""));
                let patch = json!({"status": {"conditions": all}});
                self.world.edit_snapshot(name(&snapshot), &patch);
            }
        }
    }

    fn agent_saves(&self, succeeds: bool) {
        let Some(pod) = self
            .world
            .pod()
            .filter(|pod| self.alive.contains(&uid(pod)))
        else {
            return;
        };
        for snapshot in self.world.snapshots() {
            let open = snapshot["spec"]["podUID"] == uid(&pod).as_str()
                && !is_terminating(&snapshot)
                && !is_condition_true(&snapshot, "Committed");
            if !open || is_terminating(&pod) || pod["status"]["phase"] != "Running" {
                continue;
            }
            let patch = if succeeds {
                committed(
                    &format!("{}.1", snapshot["metadata"]["uid"].as_str().unwrap()),
                    "n1",
                )
            } else {
                let failed = condition("Committed", "False", "SaveFailed", "no");
                json!({"status": {"conditions": [failed]}})
            };
            self.world.edit_snapshot(name(&snapshot), &patch);
        }
    }

    /// Runs a pass and checks its deletions and creations of Pods and images.
    ///
    /// Only the controller acts during the pass, so the state before the pass holds during it.
    async fn checked_pass(&self) {
        let (pod, snapshots) = (self.world.pod(), self.world.snapshots());
        let wish = self.world.sandbox();
        self.world.api.take_writes();
        let _ = self.world.stale_pass().await;
        for write in self
            .world
            .api
            .take_writes()
            .iter()
            .filter(|write| write.code < 300)
        {
            match (write.verb, write.kind.as_str()) {
                ("delete", "pods") => self.check_deleted_pod(&wish, pod.as_ref(), &snapshots),
                ("delete", "sandboxsnapshots") => {
                    self.check_deleted_image(&write.name, pod.as_ref(), &snapshots);
                }
                ("create", "pods") => self.check_created_pod(pod.as_ref(), &snapshots),
                _ => {}
            }
        }
    }

    fn check_deleted_pod(&self, wish: &Value, pod: Option<&Value>, snapshots: &[Value]) {
        let pod = pod.expect("a Pod was deleted, so it was there");
        let strategy = &wish["metadata"]["annotations"]["torpor.dev/suspension-strategy"];
        let keeps = strategy.is_null() || strategy == "Hibernate";
        let runs = self.alive.contains(&uid(pod)) && pod["status"]["phase"] == "Running";
        // The controller reads the node's capabilities from the cache, which may be stale. A stop
        // is correct where the agent reports that it cannot save.
        let can = self.world.context.caches.nodes.get("", "n1").is_some();
        if !keeps || !runs || !can || is_terminating(pod) {
            return;
        }
        let saved = snapshots.iter().any(|snapshot| {
            snapshot["spec"]["podUID"] == uid(pod).as_str()
                && is_condition_true(snapshot, "Committed")
                && !is_condition_true(snapshot, "Consumed")
                && !is_terminating(snapshot)
        });
        let seen_running = self
            .world
            .context
            .caches
            .pods
            .get(NS, "s")
            .and_then(|pod| pod.status.as_ref()?.phase.clone())
            .is_some_and(|phase| phase == "Running");
        assert!(
            saved || !seen_running,
            "a running Pod was deleted without its image"
        );
    }

    fn check_deleted_image(&self, deleted: &str, pod: Option<&Value>, snapshots: &[Value]) {
        let snapshot = snapshots
            .iter()
            .find(|s| name(s) == deleted)
            .expect("it was there");
        if !is_condition_true(snapshot, "Committed") || is_terminating(snapshot) {
            return;
        }
        let image = snapshot["status"]["imageID"].as_str().unwrap();
        let went_on = self.used.contains(image) || is_condition_true(snapshot, "Consumed");
        let lives = pod.is_some_and(|pod| {
            snapshot["spec"]["podUID"] == uid(pod).as_str() && !is_terminating(pod)
        });
        assert!(
            went_on || lives,
            "the only copy of a memory was deleted: {snapshot:#}"
        );
    }

    fn check_created_pod(&self, before: Option<&Value>, snapshots: &[Value]) {
        assert!(before.is_none(), "a Pod was made beside one");
        let Some(image) = self.world.pod().as_ref().and_then(image_of) else {
            return;
        };
        let source = snapshots
            .iter()
            .find(|s| s["status"]["imageID"] == image.as_str());
        let source = source.expect("a Pod continues from an image that is there");
        let good = is_condition_true(source, "Committed")
            && !is_condition_true(source, "Consumed")
            && !is_terminating(source);
        assert!(good, "a Pod was made from {source:#}");
    }

    /// Lets every component act until nothing is left to do.
    async fn wind_down(&mut self) {
        self.world.api.forget_faults();
        for _ in 0..12 {
            for event in [
                Event::NodeReports,
                Event::Sync,
                Event::Pass,
                Event::PodStarts,
                Event::AgentReports,
                Event::AgentCommits,
                Event::AgentDeletesBytes,
                Event::PodEnds,
            ] {
                self.play(&event).await;
            }
        }
        self.world.sync();
        assert!(
            self.world.writes_of_a_pass().await.is_empty(),
            "it does not settle"
        );
    }
}

fn uid(object: &Value) -> String {
    object["metadata"]["uid"].as_str().unwrap().to_owned()
}

fn name(object: &Value) -> &str {
    object["metadata"]["name"].as_str().unwrap()
}

fn image_of(pod: &Value) -> Option<String> {
    pod["metadata"]["annotations"]["torpor.dev/restore-image"]
        .as_str()
        .map(str::to_owned)
}

fn is_condition_true(snapshot: &Value, type_: &str) -> bool {
    let all = snapshot["status"]["conditions"].as_array();
    all.is_some_and(|all| {
        all.iter()
            .any(|c| c["type"] == type_ && c["status"] == "True")
    })
}

fn play(events: &[Event]) {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(async {
        let mut run = Run::new();
        run.play(&Event::Progress).await;
        for event in events {
            run.play(event).await;
            assert!(run.world.api.list("pods").len() <= 1, "two Pods");
        }
        run.wind_down().await;
    });
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    #[test]
    fn memory_is_neither_lost_nor_used_twice(events in prop::collection::vec(event(), 1..60)) {
        play(&events);
    }
}
