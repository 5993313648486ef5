//! Random schedules of claims and pools: controllers whose passes are let on one call at a time, that see the world late, that are refused or not told what became of a write, and
//! that die between any two calls; users that create and delete; one controller or two. Whatever the order: a Sandbox never has two claims; a claim's status never names another
//! Sandbox while the named one is there; no controller deletes a Sandbox that a claim's status names; no claim is Ready before its Sandbox names the Pod, nor says what clients give up
//! on; a pool of one controller never has more members than it was asked for; and in the end everything is as asked.

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
    cluster::{Cluster, controller, is_going, name, nameless, settings},
    objects::NS,
    sync,
};

const CLAIMS: usize = 4;

#[derive(Clone, Debug)]
enum Event {
    /// A controller's watches deliver.
    Sync(usize),
    ClaimPass(usize, usize),
    PoolPass(usize),
    /// The next call of a controller goes through.
    Step(usize),
    /// So do the next few.
    Steps(usize),
    Crash(usize),
    CreateClaim(usize),
    DeleteClaim(usize),
    /// A user deletes the Sandbox that a claim holds.
    DeleteHeld(usize),
    Scale(usize),
    /// Something else on a Sandbox changes, so that its version is another.
    Touch(usize),
    /// A member of the pool loses the name of its Pod.
    Unname(usize),
    /// The Sandbox kind's passes, and the kubelets.
    Nodes,
    /// The next such write goes wrong.
    Fault(&'static str, &'static str, FaultAnswer),
}

fn event(controllers: usize) -> impl Strategy<Value = Event> {
    let who = move || 0..controllers;
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
        8 => who().prop_map(Event::Sync),
        12 => (who(), 0..CLAIMS).prop_map(|(who, claim)| Event::ClaimPass(who, claim)),
        4 => who().prop_map(Event::PoolPass),
        20 => who().prop_map(Event::Step),
        6 => who().prop_map(Event::Steps),
        2 => who().prop_map(Event::Crash),
        4 => (0..CLAIMS).prop_map(Event::CreateClaim),
        1 => (0..CLAIMS).prop_map(Event::DeleteClaim),
        2 => (0..CLAIMS).prop_map(Event::DeleteHeld),
        1 => (0..4_usize).prop_map(Event::Scale),
        1 => (0..8_usize).prop_map(Event::Touch),
        2 => (0..4_usize).prop_map(Event::Unname),
        3 => Just(Event::Nodes),
        1 => (write(), refused).prop_map(|((verb, kind), answer)| Event::Fault(verb, kind, answer)),
        // A call waits for as long as the schedule wants, so that none is given up: that a write took effect and nobody was told comes as an answer.
        2 => write().prop_map(|(verb, kind)| Event::Fault(verb, kind, FaultAnswer::TooLate)),
    ]
}

/// One process: what it knows, and the passes that are under way in it.
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

    /// Starts a pass, unless one over the same object is under way.
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

    /// Whether a pass is under way.
    pub(crate) fn is_busy(&self) -> bool {
        self.passes.values().any(|pass| !pass.is_finished())
    }

    pub(crate) async fn step(&self) {
        self.gate.add_permits(1);
        quiet().await;
        // Nobody waited for it.
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

/// Lets every task go on until it waits at a gate. On one thread, a task that is ready runs before this one does again.
pub(crate) async fn quiet() {
    for _ in 0..200 {
        tokio::task::yield_now().await;
    }
}

/// What held once must hold for ever.
#[derive(Default)]
struct Witness {
    /// UID of a Sandbox: UID of its claim.
    claimed: BTreeMap<String, String>,
    /// UID of a claim: name and UID of the Sandbox that its status names.
    committed: BTreeMap<String, (String, String)>,
    /// The most that the pool was ever asked for.
    most: usize,
}

struct Run {
    nodes: Cluster,
    processes: Vec<Process>,
    witness: Witness,
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
        let witness = Witness {
            most: 2,
            ..Witness::default()
        };
        Self {
            nodes,
            processes,
            witness,
        }
    }

    async fn play(&mut self, event: &Event) {
        let api = self.nodes.api.clone();
        match *event {
            Event::Sync(who) => sync::all(&api, &self.processes[who].context),
            Event::ClaimPass(who, claim) => {
                self.processes[who].claim_pass(&claim_name(claim));
                quiet().await;
            }
            Event::PoolPass(who) => {
                self.processes[who].pool_pass();
                quiet().await;
            }
            Event::Step(who) => self.checked_step(who).await,
            Event::Steps(who) => {
                for _ in 0..4 {
                    self.checked_step(who).await;
                }
            }
            Event::Crash(who) => {
                self.processes[who].crash(&api);
                sync::all(&api, &self.processes[who].context);
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
                self.witness.most = self.witness.most.max(replicas);
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

    /// One call of a controller, and whether what it deleted was nobody's.
    async fn checked_step(&mut self, who: usize) {
        let before = self.nodes.api.list("sandboxes");
        let claims = self.nodes.api.list("sandboxclaims");
        self.processes[who].step().await;
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
            let first = self.witness.claimed.entry(uid(sandbox).to_owned());
            let first = first.or_insert_with(|| owner.clone());
            assert_eq!(*first, owner, "a Sandbox changed from claim to claim");
        }
        self.nodes.check_claims();
        for claim in self.nodes.api.list("sandboxclaims") {
            self.check_committed(&claim, &sandboxes);
        }
        let pool = self.nodes.members().len();
        // Two controllers that see nothing of each other may each fill the gap; each alone never makes more than is missing.
        let most = self.witness.most * self.processes.len();
        assert!(pool <= most, "{pool} members, {most} at most");
    }

    fn check_committed(&mut self, claim: &Value, sandboxes: &[Value]) {
        let Some(named) = claim["status"]["sandbox"]["name"].as_str() else {
            return;
        };
        let found = sandboxes.iter().find(|sandbox| name(sandbox) == named);
        let known = self.witness.committed.get(uid(claim));
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
            self.witness.committed.insert(uid(claim).to_owned(), value);
        }
    }

    /// No more crashes and nobody late: everything comes to rest as it was asked for.
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
            let ready = self.nodes.claim_says(name(&claim), "Ready").unwrap();
            assert_eq!(ready.0, "True", "{claim:#}");
            owned += 1;
        }
        let all = api.list("sandboxes");
        let names: Vec<&str> = all.iter().map(name).collect();
        assert_eq!(all.len(), owned, "nothing is left over: {names:?}");
        assert!(!all.iter().any(is_going));
        self.check();
    }
}

/// How many schedules; `TORPOR_SCHEDULES` sets more.
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
    fn one_controller_that_dies_at_any_call_keeps_claims_and_pools_right(
        events in prop::collection::vec(event(1), 1..100)
    ) {
        play(1, &events);
    }

    #[test]
    fn two_controllers_at_once_keep_claims_right(
        events in prop::collection::vec(event(2), 1..120)
    ) {
        play(2, &events);
    }
}
