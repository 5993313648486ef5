//! Index of warm pool members that claims may take, updated by the watch, so that taking one costs
//! neither a call nor a walk over the pool.
//!
//! Order: Ready members first, as upstream, those that run before those that sleep; among them by
//! their node ([`rank`]), then from the node with the most members left, so that the load is
//! spread; on a node the oldest first. Members without a node come last, and all members of a node
//! whose agent is silent after those of other nodes.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet, HashMap, VecDeque},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use jiff::Timestamp;
use kube::{Resource, ResourceExt};
use tokio::time::Instant;
use torpor_api::{Sandbox, SandboxWarmPool, conditions, extensions, labels};

use crate::{
    cache::Change,
    pace::Advance,
    pool::heat::{self, Demand, LATELY, SOON},
};

mod rank;

pub use rank::{Nodes, prefers_labels};

/// Window for the demand of a pool, about twice the time that a member takes from its creation
/// until it is Ready on a busy apiserver.
///
/// A pool is low when it has fewer members left than were taken in the window, and short when it
/// has fewer than were taken in half of it.
const SUPPLY: Duration = Duration::from_secs(4);

/// Progress of a member.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Stage {
    Ready,
    /// The member is Ready and sleeps.
    Asleep,
    /// The member has an address, but is not ready.
    Addressed,
    /// The member has no address yet and cannot be taken.
    Pending,
}

/// Sort key of a member.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Entry {
    stage: Stage,
    node: String,
    age: (Timestamp, String),
}

/// Result of a request for a member.
#[derive(Debug)]
pub enum Offer {
    Sandbox(Taken),
    /// The pool has only members without an address.
    Pending,
    Nothing,
}

/// Members of all pools. Clones share the content.
#[derive(Clone, Debug, Default)]
pub struct Candidates {
    pools: Arc<Mutex<HashMap<String, Pool>>>,
    /// Nodes on which a member could not continue from its image, and when that was seen last.
    failures: Arc<Mutex<HashMap<String, Instant>>>,
}

#[derive(Debug, Default)]
struct Pool {
    members: HashMap<String, Member>,
    free: BTreeMap<Stage, BTreeMap<String, BTreeSet<(Timestamp, String)>>>,
    /// Times at which members were taken, within [`LATELY`].
    taken_at: VecDeque<Instant>,
}

#[derive(Debug)]
struct Member {
    entry: Entry,
    taken: bool,
    sandbox: Arc<Sandbox>,
}

/// Member offered to one claim. On drop the member is free again if it is still in its pool.
#[derive(Debug)]
pub struct Taken {
    candidates: Candidates,
    pool: String,
    pub sandbox: Arc<Sandbox>,
}

impl Drop for Taken {
    fn drop(&mut self) {
        let mut pools = self.candidates.lock();
        if let Some(pool) = pools.get_mut(&self.pool) {
            pool.give_back(&self.sandbox.name_any());
        }
    }
}

impl Candidates {
    /// Applies a change of a Sandbox.
    pub fn update(&self, change: &Change<Sandbox>) {
        if let Some(node) = rank::failed_on(change.before.as_deref(), change.after.as_deref()) {
            self.failures().insert(node.to_owned(), Instant::now());
        }
        let pool_before = change.before.as_deref().and_then(pool_of);
        let after = change.after.as_ref().and_then(|sandbox| {
            let entry = entry_of(sandbox)?;
            Some((pool_of(sandbox)?.to_owned(), entry, Arc::clone(sandbox)))
        });
        if pool_before.is_none() && after.is_none() {
            return;
        }
        let mut pools = self.lock();
        if let (Some(uid), Some(before)) = (pool_before, &change.before)
            && after.as_ref().is_none_or(|(pool, ..)| pool != uid)
            && let Some(pool) = pools.get_mut(uid)
        {
            pool.remove(&before.name_any());
            if pool.members.is_empty() {
                pools.remove(uid);
            }
        }
        if let Some((uid, entry, sandbox)) = after {
            pools.entry(uid).or_default().put(entry, sandbox);
        }
    }

    /// Takes the first free member in order. `nodes`: the state of the nodes, for this claim.
    pub fn take(&self, pool_uid: &str, nodes: &Nodes) -> Offer {
        let nodes = &nodes.with_failures(&mut self.failures(), Instant::now());
        let mut pools = self.lock();
        let Some(pool) = pools.get_mut(pool_uid) else {
            return Offer::Nothing;
        };
        match pool.choose(nodes) {
            Some(name) => match pool.take(&name) {
                Some(sandbox) => Offer::Sandbox(self.taken(pool_uid, sandbox)),
                None => Offer::Nothing,
            },
            None if pool.free.contains_key(&Stage::Pending) => Offer::Pending,
            None => Offer::Nothing,
        }
    }

    /// Returns how urgently a pool needs new members.
    ///
    /// A pool is low when it has less than half of its replicas left and fewer than were taken in
    /// the last four seconds; it is short with half of that, or with none at all. So a large pool
    /// with enough members is not filled up at the cost of waiting claims.
    pub fn advance(&self, pool: &SandboxWarmPool) -> Advance {
        let wanted = usize::try_from(pool.spec.replicas.unwrap_or(1)).unwrap_or_default();
        let mut pools = self.lock();
        match pools.get_mut(&pool.uid().unwrap_or_default()) {
            Some(pool) => pool.advance(wanted, Instant::now()),
            None => Pool::default().advance(wanted, Instant::now()),
        }
    }

    /// Returns how many members of a pool claims took lately.
    pub fn demand(&self, pool_uid: &str) -> Demand {
        let (pools, now) = (self.lock(), Instant::now());
        pools
            .get(pool_uid)
            .map_or_else(Demand::default, |pool| Demand {
                soon: pool.taken_within(SOON, now),
                lately: pool.taken_within(LATELY, now),
            })
    }

    /// Takes the member with this name, if it is free.
    pub fn take_named(&self, pool_uid: &str, name: &str) -> Option<Taken> {
        let sandbox = self.lock().get_mut(pool_uid)?.take(name)?;
        Some(self.taken(pool_uid, sandbox))
    }

    fn taken(&self, pool_uid: &str, sandbox: Arc<Sandbox>) -> Taken {
        Taken {
            candidates: self.clone(),
            pool: pool_uid.to_owned(),
            sandbox,
        }
    }

    // A panic elsewhere leaves the sets unchanged.
    fn lock(&self) -> MutexGuard<'_, HashMap<String, Pool>> {
        self.pools.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn failures(&self) -> MutexGuard<'_, HashMap<String, Instant>> {
        self.failures.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Pool {
    fn put(&mut self, entry: Entry, sandbox: Arc<Sandbox>) {
        let name = entry.age.1.clone();
        // An update of the same object leaves it with the claim that it is offered to.
        let taken = self
            .members
            .get(&name)
            .is_some_and(|known| known.taken && known.sandbox.uid() == sandbox.uid());
        self.remove(&name);
        if !taken {
            self.free(&entry);
        }
        let member = Member {
            entry,
            taken,
            sandbox,
        };
        self.members.insert(name, member);
    }

    fn remove(&mut self, name: &str) {
        if let Some(member) = self.members.remove(name) {
            self.occupy(&member.entry);
        }
    }

    fn take(&mut self, name: &str) -> Option<Arc<Sandbox>> {
        let member = self.members.get_mut(name).filter(|member| !member.taken)?;
        member.taken = true;
        let (entry, sandbox) = (member.entry.clone(), Arc::clone(&member.sandbox));
        self.occupy(&entry);
        let now = Instant::now();
        self.forget(now);
        self.taken_at.push_back(now);
        Some(sandbox)
    }

    fn forget(&mut self, now: Instant) {
        while self.taken_at.front().is_some_and(|at| *at + LATELY < now) {
            self.taken_at.pop_front();
        }
    }

    /// Returns how many members were taken within a time.
    fn taken_within(&self, window: Duration, now: Instant) -> usize {
        let before = self.taken_at.partition_point(|at| *at + window < now);
        self.taken_at.len() - before
    }

    fn advance(&mut self, wanted: usize, now: Instant) -> Advance {
        self.forget(now);
        let free = self.ready();
        let low = self.taken_within(SUPPLY, now).min(wanted / 2);
        let short = self.taken_within(SUPPLY / 2, now).min(wanted / 4);
        if free < short || (free == 0 && wanted > 0) {
            Advance::Short
        } else if free < low {
            Advance::Low
        } else {
            Advance::Calm
        }
    }

    fn give_back(&mut self, name: &str) {
        let Some(member) = self.members.get_mut(name).filter(|member| member.taken) else {
            return;
        };
        member.taken = false;
        self.taken_at.pop_back();
        let entry = member.entry.clone();
        self.free(&entry);
    }

    fn ready(&self) -> usize {
        let stages = [Stage::Ready, Stage::Asleep];
        let nodes = stages.iter().filter_map(|stage| self.free.get(stage));
        nodes.flatten().map(|(_, members)| members.len()).sum()
    }

    fn choose(&self, ranks: &Nodes) -> Option<String> {
        let stages = [Stage::Ready, Stage::Asleep, Stage::Addressed];
        for is_silent in [false, true] {
            for stage in stages {
                let nodes = self.free.get(&stage).into_iter().flatten();
                let nodes = nodes.filter(|(node, _)| ranks.is_silent(node) == is_silent);
                // Among equally full nodes the one with the oldest member wins; unscheduled members
                // come last.
                let first = nodes.max_by_key(|(node, members)| {
                    let oldest = members.first().map(|(created, _)| *created);
                    let rank = Reverse(ranks.rank(node, stage));
                    (!node.is_empty(), rank, members.len(), Reverse(oldest))
                });
                if let Some((_, name)) = first.and_then(|(_, members)| members.first()) {
                    return Some(name.clone());
                }
            }
        }
        None
    }

    fn free(&mut self, entry: &Entry) {
        self.free
            .entry(entry.stage)
            .or_default()
            .entry(entry.node.clone())
            .or_default()
            .insert(entry.age.clone());
    }

    fn occupy(&mut self, entry: &Entry) {
        let Some(nodes) = self.free.get_mut(&entry.stage) else {
            return;
        };
        if let Some(members) = nodes.get_mut(&entry.node) {
            members.remove(&entry.age);
            if members.is_empty() {
                nodes.remove(&entry.node);
            }
        }
        if nodes.is_empty() {
            self.free.remove(&entry.stage);
        }
    }
}

/// Returns the UID of the pool that controls a Sandbox.
pub fn pool_of(sandbox: &Sandbox) -> Option<&str> {
    let owner = sandbox
        .owner_references()
        .iter()
        .find(|owner| owner.controller == Some(true))?;
    // Any version of the group: an older controller may have written it.
    let group = owner.api_version.split_once('/').map(|(group, _)| group);
    (owner.kind == SandboxWarmPool::kind(&()) && group == Some(extensions::GROUP))
        .then_some(owner.uid.as_str())
}

/// Reports whether a Sandbox is a member of a pool that a claim could take.
pub fn is_member(sandbox: &Sandbox) -> bool {
    let has = |label| sandbox.labels().contains_key(label);
    sandbox.metadata.deletion_timestamp.is_none()
        && has(labels::WARM_POOL_SANDBOX)
        && has(labels::SANDBOX_TEMPLATE_REF_HASH)
        && pool_of(sandbox).is_some()
}

fn entry_of(sandbox: &Sandbox) -> Option<Entry> {
    if !is_member(sandbox) {
        return None;
    }
    let status = sandbox.status.as_ref();
    let addressed = status.is_some_and(|status| !status.pod_ips.is_empty());
    let ready =
        status.is_some_and(|status| conditions::is_true(&status.conditions, conditions::READY));
    let created = sandbox.metadata.creation_timestamp.as_ref();
    Some(Entry {
        stage: match (addressed, ready) {
            (false, _) => Stage::Pending,
            (true, true) if !heat::is_awake(sandbox) => Stage::Asleep,
            (true, true) => Stage::Ready,
            (true, false) => Stage::Addressed,
        },
        node: status
            .map(|status| status.node_name.clone())
            .unwrap_or_default(),
        age: (
            created.map_or(Timestamp::UNIX_EPOCH, |created| created.0),
            sandbox.name_any(),
        ),
    })
}

#[cfg(test)]
mod tests;
