//! A sequence of sandboxes with their client, cycle by cycle.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use kube::api::DeleteParams;
use serde_json::{Value, json};
use tokio::sync::Notify;
use torpor_api::annotations::{DOZE_AFTER, HIBERNATE, HIBERNATE_AFTER};
use torpor_api::conditions::POD_HIBERNATED;
use torpor_api::reasons::hibernated::SAVE_FAILED;
use torpor_records::SandboxState;

use super::client::{Client, Unanswered, pod_spec};
use super::counting::Progress;
use super::excuses::{Excuse, Excuses};
use super::schedule::{Cycle, Depth, Moment, Strike, Victim, Waker};
use super::strike::strike;
use super::trouble::{Done, Trouble};
use crate::case::{Case, condition};
use crate::node::is_in_image;
use crate::remains::Footprint;
use crate::sandboxes::{condition_of, sandbox};
use crate::sleep::{is_ready, restarts};
use crate::wait;
use crate::witness::address;

/// Time after which a cycle is stuck.
///
/// The kubelet restarts a container at once the first time, then after 10, 20 and 40 seconds, also
/// if containerd died during the start. A killed agent is back after a few seconds. A woken sandbox
/// stays awake for ten.
const LIMIT: Duration = Duration::from_secs(180);
/// Time for the removal of a sandbox.
///
/// The kubelet looks once a minute for sandboxes that it has made anew, and again a minute later if
/// containerd was away: other lanes kill containerd several times a minute.
const REMOVAL_LIMIT: Duration = Duration::from_secs(300);
/// Time between two looks at the node.
const LOOK: Duration = Duration::from_millis(10);
/// Time between two questions of a client that goes on asking, and after an unanswered one.
const PAUSE: Duration = Duration::from_millis(40);
/// Time for which the client of a busy sandbox goes on: the sandbox may be woken before it was seen
/// asleep.
const BUSY: Duration = Duration::from_secs(5);
/// Ledger entries of one sleep: Saving, Committed, Asleep.
const ENTRIES_OF_SLEEP: u64 = 3;
/// Idle times: if a sandbox is to doze and to hibernate, it dozes after the short one and
/// hibernates after the long one.
const IDLE: &str = "1s";
const IDLE_FOR_LONGER: &str = "4s";
/// Time to wait for a victim that runs only for moments.
const FLEETING: Duration = Duration::from_millis(300);

/// State that all lanes share.
#[derive(Debug, Default)]
pub struct Common {
    /// Signals that a lane killed the agent.
    pub agent_killed: Notify,
    excuses: Excuses,
}

/// State that a lane's kills and its client share.
struct Shared<'a> {
    case: &'a Case,
    name: String,
    common: &'a Common,
    /// The sandbox was asked for since the request to sleep.
    wanted: Cell<bool>,
    /// A process of this sandbox was killed, so that a save of it may have failed.
    struck: Cell<bool>,
    /// The sandbox does not fall asleep by itself because a save of it failed.
    stays_awake_after_failure: Cell<bool>,
    done: RefCell<Done>,
}

/// A sequence of sandboxes.
pub struct Lane<'a> {
    shared: Shared<'a>,
    number: usize,
    generation: u32,
    client: Client,
    footprints: Vec<Footprint>,
}

impl<'a> Lane<'a> {
    /// Begins a lane with its first sandbox.
    pub async fn begin(case: &'a Case, number: usize, common: &'a Common) -> anyhow::Result<Self> {
        let mut lane = Self {
            shared: Shared {
                case,
                name: String::new(),
                common,
                wanted: Cell::new(false),
                struck: Cell::new(false),
                stays_awake_after_failure: Cell::new(false),
                done: RefCell::default(),
            },
            number,
            generation: 0,
            client: Client::default(),
            footprints: Vec::new(),
        };
        lane.start_over().await?;
        Ok(lane)
    }

    pub fn name(&self) -> &str {
        &self.shared.name
    }

    /// Begins with another sandbox and client. The old sandbox is deleted and no longer watched.
    pub async fn start_over(&mut self) -> anyhow::Result<()> {
        let case = self.shared.case;
        let parameters = DeleteParams::background();
        // The sandbox may be gone or may never have existed.
        let _ = case
            .sandboxes()
            .delete(&self.shared.name, &parameters)
            .await;
        self.generation += 1;
        self.shared.name = format!("s{}-{}", self.number, self.generation);
        self.shared.struck.set(false);
        self.shared.stays_awake_after_failure.set(false);
        self.client = Client::default();
        self.footprints.clear();
        case.create(sandbox(&self.shared.name, pod_spec())).await
    }

    /// Runs one sleep and one wake, and the kills meanwhile.
    pub async fn cycle(&mut self, cycle: &Cycle) -> Result<Done, Trouble> {
        let shared = &self.shared;
        shared.done.take();
        shared.wanted.set(true);
        shared.common.excuses.fade(&shared.name);
        shared.ready().await?;
        answered(shared, &mut self.client, false).await?;
        note(shared, &mut self.footprints).await?;
        if !cycle.same_connection {
            self.client.hang_up();
        }
        self.fall_asleep(cycle).await?;
        note(&self.shared, &mut self.footprints).await?;
        let began = Instant::now();
        self.shared.strikes(cycle, Moment::Asleep, began).await?;
        self.wake(cycle).await?;
        // The sandbox answers again, whatever was killed last.
        answered(&self.shared, &mut self.client, cycle.is_unnoticeable()).await?;
        note(&self.shared, &mut self.footprints).await?;
        if cycle.last || self.is_delayed().await? {
            self.end().await?;
            self.start_over().await?;
        }
        Ok(self.shared.done.take())
    }

    async fn fall_asleep(&mut self, cycle: &Cycle) -> Result<(), Trouble> {
        let (shared, client) = (&self.shared, &mut self.client);
        let before = shared.ledger_seq().await.unwrap_or_default();
        shared.wanted.set(cycle.busy);
        shared.request_sleep(cycle.depth, true).await?;
        if cycle.depth.is_by_itself() {
            return by_itself(shared, client, cycle, before).await;
        }
        let asked = Instant::now();
        let slept = async {
            let struck = shared.strikes(cycle, Moment::FallingAsleep, asked);
            let sleeps = async {
                match cycle.depth {
                    Depth::Hibernate if cycle.busy => {
                        // The client wakes the sandbox as soon as it sleeps, so it may not be seen
                        // asleep at all.
                        let until = asked + BUSY;
                        while Instant::now() < until
                            && shared.ledger_seq().await? < before + ENTRIES_OF_SLEEP
                        {
                            tokio::time::sleep(LOOK).await;
                        }
                        Ok(())
                    }
                    depth => shared.asleep(depth, asked).await,
                }
            };
            futures::try_join!(struck, sleeps).map(drop)
        };
        if cycle.busy {
            load(shared, client, cycle, slept).await
        } else {
            slept.await
        }
    }

    async fn wake(&mut self, cycle: &Cycle) -> Result<(), Trouble> {
        let (shared, client) = (&self.shared, &mut self.client);
        shared.wanted.set(true);
        let began = Instant::now();
        let asks = async {
            match cycle.waker {
                Waker::Packet => {}
                Waker::Exec => shared.exec(began).await?,
                Waker::Api => shared.request_sleep(cycle.depth, false).await?,
            }
            answered(shared, client, cycle.is_unnoticeable()).await
        };
        let struck = shared.strikes(cycle, Moment::Waking, began);
        futures::try_join!(asks, struck)?;
        // From now on the sandbox is to stay awake.
        shared.request_sleep(cycle.depth, false).await
    }

    /// Reports whether the kubelet would delay the next start of the sandbox's container, or the
    /// agent its next sleep.
    async fn is_delayed(&self) -> Result<bool, Trouble> {
        let pod = self.shared.pod().await?;
        let waits_for_kubelet = pod.is_some_and(|pod| restarts(&pod) > 0);
        let shared = &self.shared;
        Ok(waits_for_kubelet
            || shared.stays_awake_after_failure.get()
            || shared.has_failed_save().await?)
    }

    /// Deletes the sandbox and waits until nothing of it is left.
    pub async fn end(&mut self) -> Result<(), Trouble> {
        let shared = &self.shared;
        // The newest Pod counts too, and sandboxes that the kubelet made anew.
        note(shared, &mut self.footprints).await?;
        let parameters = DeleteParams::background();
        let asked = Instant::now();
        match shared
            .case
            .sandboxes()
            .delete(&shared.name, &parameters)
            .await
        {
            Err(kube::Error::Api(status)) if status.is_not_found() => {}
            other => other.map(drop)?,
        }
        let footprints = &self.footprints;
        let gone = async |shared: &Shared<'_>| {
            if shared.pod().await?.is_some() {
                return Ok(Err("the Pod is still there".to_owned()));
            }
            let node = &shared.case.node;
            let left: Vec<String> = (footprints.iter())
                .flat_map(|footprint| {
                    [
                        footprint.of_sandbox_but_sockets(node),
                        footprint.of_memory(node),
                    ]
                })
                .flatten()
                .collect();
            Ok(match left.is_empty() {
                true => Ok(()),
                false => Err(left.join(", ")),
            })
        };
        loop {
            match gone(shared).await {
                Ok(Ok(())) => return Ok(()),
                Ok(Err(left)) if asked.elapsed() > REMOVAL_LIMIT => {
                    return Err(Trouble::LeftOver(format!("{}: {left}", shared.name)));
                }
                Ok(Err(_)) => tokio::time::sleep(PAUSE * 5).await,
                Err(trouble) => return Err(trouble),
            }
        }
    }
}

impl fmt::Debug for Lane<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lane")
            .field("sandbox", &self.shared.name)
            .finish_non_exhaustive()
    }
}

/// Waits until the sandbox falls asleep by itself.
///
/// Kills and the question count from the first sign of that. `before` is the last entry of the
/// sandbox's ledger.
async fn by_itself(
    shared: &Shared<'_>,
    client: &mut Client,
    cycle: &Cycle,
    before: u64,
) -> Result<(), Trouble> {
    let mut asked = Instant::now();
    let origin = shared.first_sign(cycle.depth, before).await?;
    if shared.stays_awake_after_failure.get() {
        return Ok(());
    }
    let struck = shared.strikes(cycle, Moment::FallingAsleep, origin);
    let sleeps = async {
        if let Some(after) = cycle.question {
            tokio::time::sleep_until((origin + after).into()).await;
            interrupt(shared, client, cycle).await?;
            // The sandbox falls asleep anew, with the full time limit.
            asked = Instant::now();
        }
        shared.until_asleep(cycle.depth, asked, true).await
    };
    futures::try_join!(struck, sleeps)?;
    // The question was answered before the sandbox was seen asleep.
    shared.wanted.set(false);
    Ok(())
}

/// Asks the one question of a cycle while the sandbox falls asleep.
async fn interrupt(shared: &Shared<'_>, client: &mut Client, cycle: &Cycle) -> Result<(), Trouble> {
    shared.wanted.set(true);
    answered(shared, client, cycle.is_unnoticeable()).await?;
    if !cycle.same_connection {
        client.hang_up();
    }
    Ok(())
}

/// Asks until there is an answer. `smoothly`: no connection may be ended meanwhile.
async fn answered(shared: &Shared<'_>, client: &mut Client, smoothly: bool) -> Result<(), Trouble> {
    let began = Instant::now();
    let mut last = String::new();
    while began.elapsed() < LIMIT {
        match ask(shared, client, smoothly).await? {
            Ok(()) => return Ok(()),
            Err(why) => last = why,
        }
        tokio::time::sleep(PAUSE).await;
    }
    let name = &shared.name;
    Err(Trouble::Stuck(format!(
        "{name} does not answer within {LIMIT:?}: {last}"
    )))
}

/// Asks once; the inner error says why there was no answer.
async fn ask(
    shared: &Shared<'_>,
    client: &mut Client,
    smoothly: bool,
) -> Result<Result<(), String>, Trouble> {
    let Some(address) = shared.pod().await?.and_then(|pod| address(&pod).ok()) else {
        client.hang_up();
        return Ok(Err("no address".to_owned()));
    };
    let excused = || shared.common.excuses.is_excused(&shared.name);
    match client.ask(&address, excused).await {
        Ok(Progress::Continued) => Ok(Ok(())),
        Ok(Progress::StartedAnew) => {
            // The first life is not a new start.
            if shared.common.excuses.take(&shared.name) {
                shared.done.borrow_mut().started_anew += 1;
            }
            Ok(Ok(()))
        }
        Err(Unanswered::Loss(loss)) => Err(Trouble::Lost(format!("{}: {loss}", shared.name))),
        Err(error @ Unanswered::Ended(_)) if smoothly && !excused() => {
            Err(Trouble::CutOff(format!("{}: {error}", shared.name)))
        }
        Err(error) => Ok(Err(error.to_string())),
    }
}

/// Asks repeatedly until the other future is ready.
async fn load(
    shared: &Shared<'_>,
    client: &mut Client,
    cycle: &Cycle,
    until: impl Future<Output = Result<(), Trouble>>,
) -> Result<(), Trouble> {
    let smoothly = cycle.is_unnoticeable();
    let asks = async {
        loop {
            if let Err(trouble) = ask(shared, client, smoothly).await {
                return trouble;
            }
            tokio::time::sleep(PAUSE).await;
        }
    };
    tokio::select! {
        done = until => done,
        trouble = asks => Err(trouble),
    }
}

/// Notes the ids of what the node has of the sandbox's Pod by now.
async fn note(shared: &Shared<'_>, footprints: &mut Vec<Footprint>) -> Result<(), Trouble> {
    let (case, pod) = (shared.case, shared.pod().await?);
    let Some(uid) = pod.and_then(|pod| pod.uid()) else {
        return Ok(());
    };
    match footprints.iter_mut().find(|known| known.uid() == uid) {
        Some(known) => known.add(&case.node)?,
        None => footprints.push(Footprint::take(&case.node, &case.namespace, &uid)?),
    }
    Ok(())
}

impl Shared<'_> {
    async fn pod(&self) -> Result<Option<Pod>, Trouble> {
        Ok(self.case.pods().get_opt(&self.name).await?)
    }

    async fn uid(&self) -> Result<Option<String>, Trouble> {
        Ok(self.pod().await?.and_then(|pod| pod.uid()))
    }

    /// Waits until the Pod is ready.
    ///
    /// Before that the API does not report that the Pod runs, and a suspend does not wait for its
    /// memory.
    async fn ready(&self) -> Result<(), Trouble> {
        let ready = async |shared: &Self| Ok(shared.pod().await?.is_some_and(|pod| is_ready(&pod)));
        self.until(Instant::now(), "is Ready", ready)
            .await
            .map(drop)
    }

    async fn ledger_seq(&self) -> Result<u64, Trouble> {
        match self.uid().await? {
            Some(uid) => Ok(self.case.node.ledger_seq(&uid)?),
            None => Ok(0),
        }
    }

    /// Requests a sleep, or withdraws the request.
    async fn request_sleep(&self, depth: Depth, sleep: bool) -> Result<(), Trouble> {
        let value = |value: &str| if sleep { json!(value) } else { Value::Null };
        let annotated = |annotations: Value| json!({ "metadata": { "annotations": annotations } });
        let change = match depth {
            Depth::Doze => annotated(json!({ DOZE_AFTER: value(IDLE) })),
            Depth::Hibernate => annotated(json!({ HIBERNATE: value("true") })),
            Depth::Idle => annotated(json!({ HIBERNATE_AFTER: value(IDLE) })),
            Depth::Deepen => annotated(json!({
                DOZE_AFTER: value(IDLE),
                HIBERNATE_AFTER: value(IDLE_FOR_LONGER),
            })),
            Depth::Suspend => {
                let mode = if sleep { "Suspended" } else { "Running" };
                json!({ "spec": { "operatingMode": mode } })
            }
        };
        Ok(self.case.patch(&self.name, change).await?)
    }

    async fn asleep(&self, depth: Depth, asked: Instant) -> Result<(), Trouble> {
        self.until_asleep(depth, asked, false).await
    }

    /// Waits until the sandbox sleeps.
    ///
    /// A struck sandbox that falls asleep `by_itself` may also stay awake: after a failed save the
    /// agent leaves it awake for some minutes, and the Pod's condition says so.
    async fn until_asleep(
        &self,
        depth: Depth,
        asked: Instant,
        by_itself: bool,
    ) -> Result<(), Trouble> {
        let words = format!("sleeps ({depth:?})");
        self.until(asked, &words, async |shared| {
            let sleeps = match depth {
                Depth::Doze => shared.has_dozed_off().await?,
                Depth::Hibernate | Depth::Idle | Depth::Deepen => shared.hibernates().await?,
                Depth::Suspend => shared.is_suspended().await?,
            };
            Ok(sleeps || by_itself && shared.stays_awake().await?)
        })
        .await
        .map(drop)
    }

    /// Reports whether the sandbox stays awake after a failed save, as it may after a kill.
    async fn stays_awake(&self) -> Result<bool, Trouble> {
        let stays = self.struck.get() && self.has_failed_save().await?;
        if stays {
            self.stays_awake_after_failure.set(true);
        }
        Ok(stays)
    }

    /// Reports whether a save failed and is not retried for now.
    async fn has_failed_save(&self) -> Result<bool, Trouble> {
        let pod = self.pod().await?;
        Ok(pod.is_some_and(|pod| condition(&pod, POD_HIBERNATED).1 == SAVE_FAILED))
    }

    /// Waits until the condition holds; returns when that was seen.
    async fn until(
        &self,
        asked: Instant,
        words: &str,
        condition: impl AsyncFn(&Self) -> Result<bool, Trouble>,
    ) -> Result<Instant, Trouble> {
        while asked.elapsed() < LIMIT {
            if condition(self).await? {
                return Ok(Instant::now());
            }
            tokio::time::sleep(LOOK).await;
        }
        let name = &self.name;
        Err(Trouble::Stuck(format!(
            "not seen within {LIMIT:?}: {name} {words}"
        )))
    }

    /// Reads the node's records of the sandbox; `None` while the kubelet makes another one.
    async fn look<T>(
        &self,
        read: impl FnOnce(&torpor_core::ids::SandboxId) -> Option<T>,
    ) -> Result<Option<T>, Trouble> {
        let Some(uid) = self.uid().await? else {
            return Ok(None);
        };
        let record = self.case.node.sandbox_of(&uid);
        Ok(record.ok().and_then(|record| read(&record.sandbox)))
    }

    /// Waits for the first sign that the sandbox falls asleep by itself, or that it stays awake.
    async fn first_sign(&self, depth: Depth, before: u64) -> Result<Instant, Trouble> {
        let began = Instant::now();
        if depth == Depth::Doze {
            let dozes =
                async |shared: &Self| Ok(shared.dozes().await? || shared.stays_awake().await?);
            return self.until(began, "falls asleep", dozes).await;
        }
        let mut last = before;
        if depth == Depth::Deepen {
            // On a busy machine the longer time may be over before the sandbox dozes.
            let dozes = async |shared: &Self| {
                let sleeps = shared.has_dozed_off().await? || shared.hibernates().await?;
                Ok(sleeps || shared.stays_awake().await?)
            };
            self.until(began, "dozes", dozes).await?;
            last = self.ledger_seq().await?;
        }
        let goes_on = async |shared: &Self| {
            let goes_on = shared.ledger_seq().await? > last || shared.hibernates().await?;
            Ok(goes_on || shared.stays_awake().await?)
        };
        self.until(began, "hibernates by itself", goes_on).await
    }

    async fn dozes(&self) -> Result<bool, Trouble> {
        let records = &self.case.node.records;
        let note = self.look(|sandbox| records.doze(sandbox).ok()?).await?;
        Ok(note.is_some())
    }

    /// Reports whether the doze is complete: the memory is in an image and is reclaimed.
    ///
    /// The note alone may be about to go: it is removed only after a woken sandbox has answered.
    async fn has_dozed_off(&self) -> Result<bool, Trouble> {
        let (node, uid) = (&self.case.node, self.uid().await?);
        let in_image = uid.is_some_and(|uid| {
            node.ledger(&uid)
                .is_ok_and(|ledger| is_in_image(&ledger.memory))
        });
        let note = self
            .look(|sandbox| node.records.doze(sandbox).ok()?)
            .await?;
        Ok(in_image && note.is_some_and(|note| note.reclaimed))
    }

    async fn hibernates(&self) -> Result<bool, Trouble> {
        let records = &self.case.node.records;
        let state = self.look(|sandbox| records.state(sandbox).ok()).await?;
        Ok(matches!(state, Some(SandboxState::Hibernated { .. })))
    }

    async fn is_suspended(&self) -> Result<bool, Trouble> {
        let found = self.case.sandboxes().get(&self.name).await?;
        let (status, reason, _) = condition_of(&found, "Suspended");
        Ok((status, reason) == ("True", "PodTerminated"))
    }

    /// Runs `kubectl exec` until it succeeds.
    async fn exec(&self, began: Instant) -> Result<(), Trouble> {
        let ran = wait::until(
            "an exec",
            LIMIT.saturating_sub(began.elapsed()),
            async || {
                let ran = self.case.kubectl.exec(&self.name, "counter", &["true"]);
                // An exec that took too long is tried again.
                Ok(match ran.await {
                    Ok(ran) if ran.code == 0 => Ok(()),
                    Ok(ran) => Err(ran.err),
                    Err(error) => Err(format!("{error:#}")),
                })
            },
        );
        ran.await
            .map_err(|error| Trouble::Stuck(format!("{}: {error:#}", self.name)))
    }

    /// Kills the victims of this moment's strikes, each at its time.
    async fn strikes(&self, cycle: &Cycle, moment: Moment, origin: Instant) -> Result<(), Trouble> {
        for strike in cycle.strikes_at(moment) {
            tokio::time::sleep_until((origin + strike.after).into()).await;
            let mut hit = self.strike(strike).await?;
            let began = Instant::now();
            while !hit && strike.victim.is_fleeting() && began.elapsed() < FLEETING {
                tokio::time::sleep(LOOK).await;
                hit = self.strike(strike).await?;
            }
            if hit {
                self.struck.set(true);
            }
            self.done.borrow_mut().kills.push((strike.victim, hit));
        }
        Ok(())
    }

    /// Kills a victim; reports whether it was found.
    async fn strike(&self, planned: Strike) -> Result<bool, Trouble> {
        let node = &self.case.node;
        // While a suspended sandbox has no Pod, only the node's processes can be killed.
        let uid = self.uid().await?;
        let struck = strike(node, uid.as_deref(), planned.victim, self.wanted.get())?;
        let Some(struck) = struck else {
            return Ok(false);
        };
        if planned.victim == Victim::Agent {
            self.common.agent_killed.notify_one();
        }
        if struck.costs_memory {
            self.common
                .excuses
                .excuse(self.name.clone(), Excuse::Struck);
        }
        for name in struck.others {
            self.common.excuses.excuse(name, Excuse::CutOff);
        }
        Ok(true)
    }
}
