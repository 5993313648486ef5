//! Tests random schedules of claims and pools with one controller or two.
//!
//! The schedule releases one call of a pass at a time, delays the watches, refuses writes or loses
//! the responses to them, and kills controllers between any two calls. Users create and delete
//! objects. The invariants of every schedule are:
//! - A Sandbox never has two claims.
//! - A claim's status never names another Sandbox while the named one exists.
//! - No controller deletes a Sandbox that a claim's status names.
//! - No claim is Ready before its Sandbox names the Pod.
//! - No claim has a reason at which clients stop waiting.
//! - A pool of one controller never has more members than its replicas.
//! - In the end everything is as requested.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use proptest::prelude::*;
use serde_json::{Value, json};
use tokio::{sync::Semaphore, task::JoinHandle};
use torpor_controller::{calls, claim, context::Context, pool};

use crate::{
    apiserver::{Apiserver, Fault, FaultAnswer},
    cluster::{Cluster, controller, is_terminating, name, nameless, settings},
    objects::NS,
    sync,
};

const CLAIMS: usize = 4;

#[derive(Clone, Debug)]
enum Event {
    /// The caches of a controller are refreshed.
    Sync(usize),
    ClaimPass(usize, usize),
    PoolPass(usize),
    /// The next call of a controller is released.
    Step(usize),
    /// The next few calls of a controller are released.
    Steps(usize),
    Crash(usize),
    CreateClaim(usize),
    DeleteClaim(usize),
    /// A user deletes the Sandbox that a claim holds.
    DeleteHeld(usize),
    Scale(usize),
    /// An unrelated field of a Sandbox changes, and with it the resourceVersion.
    Touch(usize),
    /// A member of the pool loses the name of its Pod.
    Unname(usize),
    /// Passes over Sandboxes, and the kubelets' work.
    Nodes,
    /// The next write of this verb and kind fails.
    Fault(&'static str, &'static str, FaultAnswer),
}

fn event(controllers: usize) -> impl Strategy<Value = Event> {
    let index = move || 0..controllers;
    let write = || {
        prop::sample::select(vec![
            ("patch", "sandboxes"),
            ("create", "sandboxes"),
            ("delete", "sandboxes"),
            ("patch status", "sandboxclaims"),
            ("patch", "sandboxclaims"),
        ])
    };
    let refused = prop::sample::select(vec![500_u16, 409, 403]).prop_map(FaultAnswer::Refuse);
    prop_oneof![
        8 => index().prop_map(Event::Sync),
        12 => (index(), 0..CLAIMS).prop_map(|(index, claim)| Event::ClaimPass(index, claim)),
        4 => index().prop_map(Event::PoolPass),
        20 => index().prop_map(Event::Step),
        6 => index().prop_map(Event::Steps),
        2 => index().prop_map(Event::Crash),
        4 => (0..CLAIMS).prop_map(Event::CreateClaim),
        1 => (0..CLAIMS).prop_map(Event::DeleteClaim),
        2 => (0..CLAIMS).prop_map(Event::DeleteHeld),
        1 => (0..4_usize).prop_map(Event::Scale),
        1 => (0..8_usize).prop_map(Event::Touch),
        2 => (0..4_usize).prop_map(Event::Unname),
        3 => Just(Event::Nodes),
        1 => (write(), refused).prop_map(|((verb, kind), answer)| Event::Fault(verb, kind, answer)),
        // A call waits for as long as the schedule wants, so no call times out. A lost response is
        // simulated by an answer instead.
        2 => write().prop_map(|(verb, kind)| Event::Fault(verb, kind, FaultAnswer::TooLate)),
    ]
}

/// One controller process: its caches and its running passes.
pub(crate) struct Process {
    pub(crate) context: Arc<Context>,
    gate: Arc<Semaphore>,
    passes: BTreeMap<String, JoinHandle<()>>,
}

impl Process {
    pub(crate) fn start(api: &Apiserver) -> Self {
        let gate = Arc::new(Semaphore::new(0));
        let client = api.gated_client(&gate);
        // A call may wait at the gate for as long as the schedule wants.
        let calls = calls::Apiserver::new(client, Duration::from_secs(3600));
        let context = Context::new(calls, "cluster.local".to_owned(), settings());
        Self {
            context: Arc::new(context),
            gate,
            passes: BTreeMap::new(),
        }
    }

    /// Starts a pass unless a pass over the same object is running.
    pub(crate) fn pass(&mut self, key: String, pass: impl Future<Output = ()> + Send + 'static) {
        self.passes.retain(|_, pass| !pass.is_finished());
        self.passes.entry(key).or_insert_with(|| tokio::spawn(pass));
    }

    fn claim_pass(&mut self, claim: &str) {
        let Some(found) = self.context.caches.claims.get(NS, claim) else {
            return;
        };
        let context = Arc::clone(&self.context);
        self.pass(claim.to_owned(), async move {
            let _ = claim::reconcile(found, context).await;
        });
    }

    fn pool_pass(&mut self) {
        let Some(found) = self.context.caches.pools.get(NS, "p") else {
            return;
        };
        let context = Arc::clone(&self.context);
        self.pass("pool".to_owned(), async move {
            let _ = pool::reconcile(found, context).await;
        });
    }

    /// Reports whether a pass is running.
    pub(crate) fn is_busy(&self) -> bool {
        self.passes.values().any(|pass| !pass.is_finished())
    }

    pub(crate) async fn step(&self) {
        self.gate.add_permits(1);
        run_until_blocked().await;
        // No call took the permit.
        self.gate.forget_permits(self.gate.available_permits());
    }

    pub(crate) fn crash(&mut self, api: &Apiserver) {
        for pass in self.passes.values() {
            pass.abort();
        }
        self.gate.close();
        *self = Self::start(api);
    }
}

/// Lets every task run until it waits at a gate. On one thread, every ready task runs before this
/// one runs again.
pub(crate) async fn run_until_blocked() {
    for _ in 0..200 {
        tokio::task::yield_now().await;
    }
}

/// Facts that must stay true once they were true.
#[derive(Default)]
struct History {
    /// UIDs of claims by the UID of their Sandbox.
    claimed: BTreeMap<String, String>,
    /// Name and UID of the Sandbox in a claim's status, by the UID of the claim.
    committed: BTreeMap<String, (String, String)>,
    /// Highest number of replicas so far.
    most: usize,
}

struct Run {
    nodes: Cluster,
    processes: Vec<Process>,
    history: History,
}

impl Run {
    async fn new(controllers: usize) -> Self {
        let nodes = Cluster::new();
        nodes.template(json!({}));
        nodes.pool(2, json!({}));
        nodes.settle().await;
        let mut processes: Vec<Process> = (0..controllers)
            .map(|_| Process::start(&nodes.api))
            .collect();
        for process in &mut processes {
            sync::all(&nodes.api, &process.context);
        }
        let history = History {
            most: 2,
            ..History::default()
        };
        Self {
            nodes,
            processes,
            history,
        }
    }

    async fn play(&mut self, event: &Event) {
        let api = self.nodes.api.clone();
        match *event {
            Event::Sync(index) => sync::all(&api, &self.processes[index].context),
            Event::ClaimPass(index, claim) => {
                self.processes[index].claim_pass(&claim_name(claim));
                run_until_blocked().await;
            }
            Event::PoolPass(index) => {
                self.processes[index].pool_pass();
                run_until_blocked().await;
            }
            Event::Step(index) => self.checked_step(index).await,
            Event::Steps(index) => {
                for _ in 0..4 {
                    self.checked_step(index).await;
                }
            }
            Event::Crash(index) => {
                self.processes[index].crash(&api);
                sync::all(&api, &self.processes[index].context);
            }
            Event::CreateClaim(claim) => {
                let claim = claim_name(claim);
                if api.get("sandboxclaims", NS, &claim).is_none() {
                    self.nodes.claim(&claim, json!({}));
                }
            }
            Event::DeleteClaim(claim) => api.delete("sandboxclaims", NS, &claim_name(claim)),
            Event::DeleteHeld(claim) => {
                if api.get("sandboxclaims", NS, &claim_name(claim)).is_some()
                    && let Some(held) = self.nodes.held_by(&claim_name(claim))
                {
                    api.delete("sandboxes", NS, &held);
                }
            }
            Event::Scale(replicas) => {
                let scale = json!({"spec": {"replicas": replicas}});
                self.nodes.edit("sandboxwarmpools", "p", &scale);
                self.history.most = self.history.most.max(replicas);
            }
            Event::Touch(which) => {
                let all = api.list("sandboxes");
                if let Some(sandbox) = all.get(which % all.len().max(1)) {
                    let version = &sandbox["metadata"]["resourceVersion"];
                    let note = json!({"metadata": {"annotations": {"note": version}}});
                    api.edit("sandboxes", NS, name(sandbox), &note);
                }
            }
            Event::Unname(which) => {
                let members = self.nodes.members();
                if let Some(member) = members.get(which) {
                    api.edit("sandboxes", NS, member, &nameless());
                }
            }
            Event::Nodes => {
                api.collect_garbage();
                self.nodes.sandbox_passes().await;
                self.nodes.kubelets();
                self.nodes.sandbox_passes().await;
            }
            Event::Fault(verb, kind, answer) => api.fail(Fault { verb, kind, answer }),
        }
        self.check();
    }

    /// Releases one call of a controller and checks that it deleted only Sandboxes without a claim.
    async fn checked_step(&mut self, index: usize) {
        let before = self.nodes.api.list("sandboxes");
        let claims = self.nodes.api.list("sandboxclaims");
        self.processes[index].step().await;
        let after = self.nodes.api.list("sandboxes");
        let left: BTreeSet<&str> = after.iter().map(uid).collect();
        for gone in before.iter().filter(|sandbox| !left.contains(uid(sandbox))) {
            let named = claims.iter().find(|claim| {
                claim["status"]["sandbox"]["name"] == name(gone)
                    && controller(gone).is_some_and(|owner| owner["uid"] == uid(claim))
            });
            assert!(named.is_none(), "a claim's Sandbox was deleted: {gone:#}");
        }
        self.check();
    }

    fn check(&mut self) {
        let sandboxes = self.nodes.api.list("sandboxes");
        for sandbox in &sandboxes {
            let Some(owner) = controller(sandbox).filter(|o| o["kind"] == "SandboxClaim") else {
                continue;
            };
            let owner = owner["uid"].as_str().unwrap().to_owned();
            let first = self.history.claimed.entry(uid(sandbox).to_owned());
            let first = first.or_insert_with(|| owner.clone());
            assert_eq!(*first, owner, "a Sandbox changed from claim to claim");
        }
        self.nodes.check_claims();
        for claim in self.nodes.api.list("sandboxclaims") {
            self.check_committed(&claim, &sandboxes);
        }
        let pool = self.nodes.members().len();
        // Two controllers with stale caches may each fill the gap; each alone never makes more than
        // is missing.
        let most = self.history.most * self.processes.len();
        assert!(pool <= most, "{pool} members, {most} at most");
    }

    fn check_committed(&mut self, claim: &Value, sandboxes: &[Value]) {
        let Some(named) = claim["status"]["sandbox"]["name"].as_str() else {
            return;
        };
        let found = sandboxes.iter().find(|sandbox| name(sandbox) == named);
        let known = self.history.committed.get(uid(claim));
        if let Some((earlier, earlier_uid)) = known
            && earlier != named
        {
            let there = sandboxes.iter().any(|sandbox| uid(sandbox) == earlier_uid);
            assert!(!there, "{earlier} was abandoned for {named}: {claim:#}");
        }
        if let Some(sandbox) = found {
            let owner = controller(sandbox).map(|owner| owner["uid"].clone());
            assert_eq!(
                owner.as_ref(),
                Some(&claim["metadata"]["uid"]),
                "it names a Sandbox that is not its own"
            );
            let value = (named.to_owned(), uid(sandbox).to_owned());
            self.history.committed.insert(uid(claim).to_owned(), value);
        }
    }

    /// Runs until all is settled, without crashes and delays, and checks the final state.
    async fn wind_down(&mut self) {
        let api = self.nodes.api.clone();
        api.forget_faults();
        for process in &mut self.processes {
            process.crash(&api);
        }
        api.collect_garbage();
        self.nodes.settle().await;
        let pool = self.nodes.get_pool("p");
        let replicas = usize::try_from(pool["spec"]["replicas"].as_u64().unwrap()).unwrap();
        assert_eq!(self.nodes.controlled_by(&pool).len(), replicas);
        let mut owned = replicas;
        for claim in api.list("sandboxclaims") {
            let held = self.nodes.held_by(name(&claim)).unwrap();
            assert_eq!(self.nodes.controlled_by(&claim), [held]);
            let ready = self.nodes.claim_condition(name(&claim), "Ready").unwrap();
            assert_eq!(ready.0, "True", "{claim:#}");
            owned += 1;
        }
        let all = api.list("sandboxes");
        let names: Vec<&str> = all.iter().map(name).collect();
        assert_eq!(all.len(), owned, "nothing is left over: {names:?}");
        assert!(!all.iter().any(is_terminating));
        self.check();
    }
}

/// Returns the number of schedules; `TORPOR_SCHEDULES` overrides it.
pub(crate) fn cases() -> u32 {
    let wanted = std::env::var("TORPOR_SCHEDULES").ok();
    wanted.and_then(|n| n.parse().ok()).unwrap_or(50)
}

fn claim_name(number: usize) -> String {
    format!("c{number}")
}

pub(crate) fn uid(object: &Value) -> &str {
    object["metadata"]["uid"].as_str().unwrap()
}

fn play(controllers: usize, events: &[Event]) {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(async {
        let mut run = Run::new(controllers).await;
        for event in events {
            run.play(event).await;
        }
        run.wind_down().await;
    });
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(), ..ProptestConfig::default() })]

    #[test]
    fn one_controller_that_crashes_at_any_call_keeps_claims_and_pools_consistent(
        events in prop::collection::vec(event(1), 1..100)
    ) {
        play(1, &events);
    }

    #[test]
    fn two_controllers_at_once_keep_claims_consistent(
        events in prop::collection::vec(event(2), 1..120)
    ) {
        play(2, &events);
    }
}
