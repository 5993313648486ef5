//! Tests random schedules of suspend and resume with one controller or two.
//!
//! The schedule releases one call of a pass at a time, delays the watches, refuses writes or loses
//! the responses to them, and kills controllers between any two calls. A user suspends and resumes,
//! drains evict the Pod, and the node's agent sleeps, saves, wakes and reports at times of the
//! schedule. A call takes less time than a Pod takes to start or to end. The invariants of every
//! schedule are:
//! - No memory in an image is lost.
//! - No memory is used twice or out of order.
//! - There are never two Pods.
//! - In the end the Sandbox is as requested.

use std::{collections::BTreeMap, sync::Arc};

use jiff::{SignedDuration, Timestamp};
use proptest::prelude::*;
use serde_json::{Value, json};
use torpor_controller::sandbox;

use crate::{
    apiserver::{Apiserver, Fault, FaultAnswer},
    cluster::{condition_of, is_terminating, name},
    objects::{
        NS, committed, condition, mode, ready_pod, runtime_class, sandbox_node, torpor_sandbox,
    },
    schedules::{Process, cases, run_until_blocked, uid},
    sync,
};

#[derive(Clone, Debug)]
enum Event {
    /// The caches of a controller are refreshed.
    Sync(usize),
    Pass(usize),
    /// The next call of a controller is released.
    Step(usize),
    /// The next few calls of a controller are released.
    Steps(usize),
    Crash(usize),
    Mode(&'static str),
    /// The kubelet starts a Pod.
    Starts,
    /// The kubelet removes a Pod that is being deleted.
    Ends,
    /// The agent carries out a request.
    Agent,
    /// The idle sandbox falls asleep.
    Sleeps,
    /// A client wakes the sandbox.
    Wakes,
    /// A drain evicts the Pod.
    Evicted,
    /// The agent reports.
    Reports,
    /// Every component acts once, so that the schedule progresses.
    Progress(usize),
    Fault(&'static str, &'static str, FaultAnswer),
}

fn event(controllers: usize) -> impl Strategy<Value = Event> {
    let index = move || 0..controllers;
    let write = prop::sample::select(vec![
        ("create", "pods"),
        ("delete", "pods"),
        ("create", "sandboxsnapshots"),
        ("delete", "sandboxsnapshots"),
        ("patch", "sandboxsnapshots"),
        ("patch", "sandboxes"),
        ("patch status", "sandboxes"),
    ]);
    let answer = prop::sample::select(vec![
        FaultAnswer::Refuse(500),
        FaultAnswer::Refuse(409),
        FaultAnswer::TooLate,
    ]);
    let modes = prop::sample::select(vec!["Running", "Suspended"]);
    prop_oneof![
        8 => index().prop_map(Event::Sync),
        12 => index().prop_map(Event::Pass),
        20 => index().prop_map(Event::Step),
        8 => index().prop_map(Event::Steps),
        2 => index().prop_map(Event::Crash),
        6 => modes.prop_map(Event::Mode),
        4 => Just(Event::Starts),
        4 => Just(Event::Ends),
        8 => Just(Event::Agent),
        3 => Just(Event::Sleeps),
        2 => Just(Event::Wakes),
        2 => Just(Event::Evicted),
        3 => Just(Event::Reports),
        4 => index().prop_map(Event::Progress),
        2 => (write, answer)
            .prop_map(|((verb, kind), answer)| Event::Fault(verb, kind, answer)),
    ]
}

/// Sandbox on the node.
struct Live {
    state: u64,
    /// Set if the sandbox continued from an image.
    resumed: bool,
    asleep: bool,
}

/// Image on the node's disk.
struct Image {
    state: u64,
    /// Set if a Pod continued from the image.
    used: bool,
}

/// Node with its kubelet, its agent and the true state of its sandboxes.
struct Node {
    api: Apiserver,
    live: BTreeMap<String, Live>,
    images: BTreeMap<String, Image>,
    /// State of the sandbox while only an image holds it.
    owed: Option<u64>,
    states: u64,
}

impl Node {
    fn new_state(&mut self) -> u64 {
        self.states += 1;
        self.states
    }

    fn pod(&self) -> Option<Value> {
        let all = self.api.list("pods");
        assert!(all.len() <= 1, "two Pods: {all:#?}");
        all.into_iter().next()
    }

    fn set_pod_condition(&self, condition: Value) {
        let pod = self.pod().expect("the Pod exists");
        let mut all = pod["status"]["conditions"]
            .as_array()
            .cloned()
            .unwrap_or_default();
        all.retain(|other| other["type"] != condition["type"]);
        all.push(condition);
        self.api.edit(
            "pods",
            NS,
            name(&pod),
            &json!({"status": {"conditions": all}}),
        );
    }

    fn starts(&mut self) {
        let Some(pod) = self.pod().filter(|pod| !is_terminating(pod)) else {
            return;
        };
        if pod["status"]["phase"] != "Pending"
            || condition_of(&pod, "torpor.dev/Restored").is_some()
        {
            return;
        }
        assert!(self.live.is_empty(), "two live sandboxes");
        let from = pod["metadata"]["annotations"]["torpor.dev/restore-image"].as_str();
        let state = match from {
            None => {
                assert_eq!(self.owed, None, "memory is lost: started cold: {pod:#}");
                self.new_state()
            }
            Some(image) => {
                let image = self.images.get_mut(image.trim_end_matches(".1"));
                let Some(image) = image.filter(|image| !image.used) else {
                    let stale = condition("torpor.dev/Restored", "False", "ImageStale", "used");
                    return self.set_pod_condition(stale);
                };
                assert_eq!(self.owed, Some(image.state), "an older state");
                image.used = true;
                self.owed = None;
                image.state
            }
        };
        let live = Live {
            state,
            resumed: from.is_some(),
            asleep: false,
        };
        self.live.insert(uid(&pod).to_owned(), live);
        self.api.edit("pods", NS, name(&pod), &ready_pod("n1"));
    }

    fn ends(&mut self) {
        let Some(pod) = self.pod().filter(is_terminating) else {
            return;
        };
        let of = uid(&pod).to_owned();
        // A Pod takes longer to end than its agent takes to observe a deleted snapshot.
        for snapshot in self.api.list("sandboxsnapshots") {
            if is_terminating(&snapshot) && snapshot["spec"]["podUID"] == of.as_str() {
                self.is_deleted(&snapshot, &of);
            }
        }
        let is_evicted = condition_of(&pod, "DisruptionTarget").is_some();
        self.api.remove("pods", NS, name(&pod));
        self.live.remove(&of);
        let snapshots = self.api.list("sandboxsnapshots");
        let is_kept = snapshots
            .iter()
            .any(|one| one["spec"]["podUID"] == of.as_str());
        if !is_evicted && !is_kept {
            self.discard(&of);
        }
    }

    /// Removes an image and checks that its memory is not needed any more.
    fn discard(&mut self, of: &str) {
        if let Some(image) = self.images.remove(of) {
            let is_owed = !image.used && self.owed == Some(image.state);
            assert!(!is_owed, "the only copy of a memory was removed");
        }
    }

    /// Returns the Pod, and its UID, whose sandbox is on the node and which does not terminate.
    fn staying(&self) -> Option<(Value, String)> {
        let pod = self.pod().filter(|pod| !is_terminating(pod))?;
        let of = uid(&pod).to_owned();
        self.live.contains_key(&of).then_some((pod, of))
    }

    fn is_recorded(&self, of: &str) -> bool {
        let sandbox = self.api.get("sandboxes", NS, "s").unwrap();
        let record = sandbox["metadata"]["annotations"]["torpor.dev/last-pod"].as_str();
        record.is_some_and(|record| record.contains(of))
    }

    fn falls_asleep(&mut self, of: &str) {
        let live = self.live.get_mut(of).unwrap();
        if live.asleep {
            return;
        }
        live.asleep = true;
        self.owed = Some(live.state);
        let image = Image {
            state: live.state,
            used: false,
        };
        self.images.insert(of.to_owned(), image);
        self.set_pod_condition(condition("torpor.dev/Hibernated", "True", "Hibernated", ""));
        self.reports();
    }

    fn wakes(&mut self, of: &str) {
        let state = self.new_state();
        let live = self.live.get_mut(of).unwrap();
        if !live.asleep {
            return;
        }
        live.asleep = false;
        live.state = state;
        self.owed = None;
        self.images.remove(of);
        self.set_pod_condition(condition("torpor.dev/Hibernated", "False", "Awake", ""));
        self.reports();
    }

    fn wakes_by_itself(&mut self) {
        let Some((_, of)) = self.staying() else {
            return;
        };
        let snapshots = self.api.list("sandboxsnapshots");
        let is_wanted_asleep = snapshots
            .iter()
            .any(|one| one["spec"]["podUID"] == of.as_str());
        if !is_wanted_asleep {
            self.wakes(&of);
        }
    }

    fn is_evicted(&self) {
        if let Some(pod) = self.pod().filter(|pod| !is_terminating(pod)) {
            self.set_pod_condition(condition(
                "DisruptionTarget",
                "True",
                "EvictionByEvictionAPI",
                "",
            ));
            self.api.delete("pods", NS, name(&pod));
        }
    }

    /// Reports the node's images. The report is newer than a question that the Sandbox's status
    /// already contains.
    fn reports(&self) {
        let sandbox = self.api.get("sandboxes", NS, "s").unwrap();
        let asked = condition_of(&sandbox, "Restored").is_some_and(|found| found.1 == "AskingNode");
        let at = Timestamp::now() + SignedDuration::from_secs(if asked { 11 } else { 0 });
        let unused = self.images.iter().filter(|(_, image)| !image.used);
        let list: Vec<Value> = unused
            .map(|(of, _)| json!({"podUID": of, "imageID": format!("{of}.1")}))
            .collect();
        let report = json!({"status": {"heartbeatTime": at.to_string(), "sandboxes": list}});
        self.api.edit("sandboxnodes", "", "n1", &report);
    }

    fn agent(&mut self) {
        for snapshot in self.api.list("sandboxsnapshots") {
            let of = snapshot["spec"]["podUID"].as_str().unwrap().to_owned();
            let is_committed =
                condition_of(&snapshot, "Committed").is_some_and(|found| found.0 == "True");
            if is_terminating(&snapshot) {
                self.is_deleted(&snapshot, &of);
            } else if is_committed {
                self.is_kept(&snapshot, &of);
            } else {
                self.is_asked(&snapshot, &of);
            }
        }
        if let Some((pod, _)) = self.staying()
            && pod["metadata"]["annotations"]
                .get("torpor.dev/restore-image")
                .is_some()
        {
            self.set_pod_condition(condition("torpor.dev/Restored", "True", "Restored", ""));
        }
    }

    fn is_deleted(&mut self, snapshot: &Value, of: &str) {
        match self.pod().filter(|pod| uid(pod) == of) {
            Some(pod) if !is_terminating(&pod) && self.live.contains_key(of) => self.wakes(of),
            // The image stays as long as its Pod exists.
            Some(_) => {}
            None => self.discard(of),
        }
        let gone = json!({"metadata": {"finalizers": []}});
        self.api.edit("sandboxsnapshots", NS, name(snapshot), &gone);
    }

    fn is_kept(&self, snapshot: &Value, of: &str) {
        if condition_of(snapshot, "Consumed").is_some()
            || !self.images.get(of).is_some_and(|image| image.used)
        {
            return;
        }
        let mut all = snapshot["status"]["conditions"]
            .as_array()
            .cloned()
            .unwrap();
        all.push(condition("Consumed", "True", "Resumed", ""));
        let by = self.pod().map(|pod| uid(&pod).to_owned());
        let used = json!({"status": {"conditions": all, "consumedByPodUID": by}});
        self.api.edit("sandboxsnapshots", NS, name(snapshot), &used);
    }

    fn is_asked(&mut self, snapshot: &Value, of: &str) {
        let pod = self.pod().filter(|pod| uid(pod) == of);
        match &pod {
            Some(pod) if !is_terminating(pod) && self.live.contains_key(of) => {
                self.falls_asleep(of)
            }
            // The sandbox is not on the node yet, or ends while awake.
            Some(_) if !self.images.contains_key(of) => return,
            _ => {}
        }
        let answer = match self.images.get(of) {
            Some(image) if !image.used => committed(&format!("{of}.1"), "n1"),
            _ => json!({
                "metadata": {"finalizers": ["torpor.dev/image"]},
                "status": {"nodeName": "n1", "conditions": [
                    condition("Committed", "False", "SandboxNotFound", "no image"),
                ]},
            }),
        };
        self.api
            .edit("sandboxsnapshots", NS, name(snapshot), &answer);
    }
}

struct Run {
    node: Node,
    processes: Vec<Process>,
}

impl Run {
    fn new(controllers: usize) -> Self {
        let api = Apiserver::with_clock();
        api.create("runtimeclasses", runtime_class());
        api.create("sandboxnodes", sandbox_node("n1"));
        api.create("nodes", json!({"metadata": {"name": "n1"}}));
        api.create("sandboxes", torpor_sandbox(json!({})));
        let processes: Vec<Process> = (0..controllers).map(|_| Process::start(&api)).collect();
        for process in &processes {
            sync::all(&api, &process.context);
        }
        let node = Node {
            api,
            live: BTreeMap::new(),
            images: BTreeMap::new(),
            owed: None,
            states: 0,
        };
        Self { node, processes }
    }

    async fn play(&mut self, event: &Event) {
        let api = self.node.api.clone();
        match *event {
            Event::Sync(index) => sync::all(&api, &self.processes[index].context),
            Event::Pass(index) => self.pass(index).await,
            Event::Step(index) => self.step(index).await,
            Event::Steps(index) => {
                for _ in 0..4 {
                    self.step(index).await;
                }
            }
            Event::Crash(index) => {
                self.processes[index].crash(&api);
                sync::all(&api, &self.processes[index].context);
            }
            Event::Mode(to) => {
                let generation = &api.get("sandboxes", NS, "s").unwrap()["metadata"]["generation"];
                let next = json!({"metadata": {"generation": generation.as_u64().unwrap() + 1}});
                api.edit("sandboxes", NS, "s", &mode(to));
                api.edit("sandboxes", NS, "s", &next);
            }
            Event::Starts => {
                self.finish().await;
                self.node.starts();
            }
            Event::Ends => {
                self.finish().await;
                self.node.ends();
            }
            Event::Agent => self.node.agent(),
            Event::Sleeps => {
                // The memory of a Pod that no controller saw running is not looked for.
                if let Some((_, of)) = self.node.staying()
                    && self.node.is_recorded(&of)
                {
                    self.node.falls_asleep(&of);
                }
            }
            Event::Wakes => self.node.wakes_by_itself(),
            Event::Evicted => self.node.is_evicted(),
            Event::Reports => self.node.reports(),
            Event::Progress(index) => self.progress(index).await,
            Event::Fault(verb, kind, answer) => api.fail(Fault { verb, kind, answer }),
        }
    }

    async fn pass(&mut self, index: usize) {
        let process = &mut self.processes[index];
        let Some(found) = process.context.caches.sandboxes.get(NS, "s") else {
            return;
        };
        let context = Arc::clone(&process.context);
        process.pass("s".to_owned(), async move {
            let _ = sandbox::reconcile(found, context).await;
        });
        run_until_blocked().await;
    }

    /// Releases one call of a controller. It must not delete a Pod whose sandbox is awake and known
    /// to run, or one that continued from an image.
    async fn step(&mut self, index: usize) {
        let before = self.node.pod().filter(|pod| !is_terminating(pod));
        self.processes[index].step().await;
        let Some(before) = before else { return };
        let goes = self.node.pod().is_none_or(|pod| is_terminating(&pod));
        let Some(live) = self.node.live.get(uid(&before)).filter(|_| goes) else {
            return;
        };
        let seen = self.processes[index]
            .context
            .caches
            .pods
            .get(NS, name(&before));
        let seen_running = seen
            .and_then(|pod| pod.status.as_ref()?.phase.clone())
            .is_some_and(|phase| phase == "Running");
        let has_memory = live.resumed || seen_running;
        assert!(
            live.asleep || !has_memory,
            "a Pod was deleted awake: {before:#}"
        );
    }

    /// Completes all running passes.
    async fn finish(&mut self) {
        for index in 0..self.processes.len() {
            while self.processes[index].is_busy() {
                self.step(index).await;
            }
        }
    }

    async fn progress(&mut self, index: usize) {
        for _ in 0..2 {
            self.finish().await;
            sync::all(&self.node.api, &self.processes[index].context);
            self.pass(index).await;
            self.finish().await;
            self.node.starts();
            self.node.agent();
            self.node.ends();
        }
    }

    /// Runs until all is settled, without crashes and delays, and checks the final state.
    async fn wind_down(&mut self) {
        let api = self.node.api.clone();
        api.forget_faults();
        for process in &mut self.processes {
            process.crash(&api);
        }
        for _ in 0..12 {
            self.progress(0).await;
            self.node.reports();
        }
        let sandbox = api.get("sandboxes", NS, "s").unwrap();
        let runs = self
            .node
            .pod()
            .is_some_and(|pod| self.node.live.contains_key(uid(&pod)));
        let wanted = sandbox["spec"]["operatingMode"] == "Running";
        assert_eq!(runs, wanted, "{sandbox:#}");
        assert_eq!(self.node.pod().is_some(), wanted, "{sandbox:#}");
    }
}

fn play(controllers: usize, events: &[Event]) {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(async {
        let mut run = Run::new(controllers);
        run.play(&Event::Progress(0)).await;
        // Every controller has seen the Sandbox run: a leader's first list is no older than its
        // lease.
        for index in 0..controllers {
            run.play(&Event::Sync(index)).await;
        }
        for event in events {
            run.play(event).await;
        }
        run.wind_down().await;
    });
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(), ..ProptestConfig::default() })]

    #[test]
    fn one_controller_that_crashes_at_any_call_loses_no_memory_and_uses_none_twice(
        events in prop::collection::vec(event(1), 1..100)
    ) {
        play(1, &events);
    }

    #[test]
    fn two_controllers_at_once_lose_no_memory_and_use_none_twice(
        events in prop::collection::vec(event(2), 1..120)
    ) {
        play(2, &events);
    }
}
