//! From arguments to an exit code.

use std::process::ExitCode;

use futures::StreamExt;
use futures::stream::FuturesUnordered;
use jiff::Timestamp;

use crate::args::{Args, Change, Command, Connection, Drain, Format, Top, Why};
use crate::change::{Changed, change};
use crate::connect::{Cluster, call, connect};
use crate::doctor::{self, facts::Facts};
use crate::drain::{self, Kept, NotKept, Part, Plan};
use crate::error::{Error, words};
use crate::get::{self, Listing};
use crate::goal::Goal;
use crate::output::{print, rendered, tell};
use crate::view::{pod_of, pods_by_owner, views};
use crate::why::{self, Evidence};
use crate::world::{Scope, World};
use crate::{complete, top, units};

/// How a command ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    Done,
    Failed,
    /// doctor found a problem.
    Broken,
    /// Nobody knows what became of it.
    Unknown,
}

impl From<Ended> for ExitCode {
    fn from(ended: Ended) -> Self {
        // 2 is the command line's.
        Self::from(match ended {
            Ended::Done => 0,
            Ended::Failed => 1,
            Ended::Broken => 3,
            Ended::Unknown => 4,
        })
    }
}

impl From<&Error> for Ended {
    fn from(error: &Error) -> Self {
        match error.is_unknown() {
            true => Self::Unknown,
            false => Self::Failed,
        }
    }
}

/// Does what the arguments say. Results go to standard output, all else to standard error.
pub fn to_the_end(args: Args) -> ExitCode {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build();
    let runtime = match runtime {
        Ok(runtime) => runtime,
        Err(error) => {
            tell(&format!("error: cannot start: {error}"));
            return ExitCode::FAILURE;
        }
    };
    let ended = runtime.block_on(run(args));
    ended.unwrap_or_else(|error| told(&error)).into()
}

/// Tells of a failure, once.
fn told(error: &Error) -> Ended {
    tell(&format!("error: {}", words(error)));
    if let Some(remedy) = error.remedy() {
        tell(&format!("  → {remedy}"));
    }
    Ended::from(error)
}

async fn run(args: Args) -> Result<Ended, Error> {
    let connection = &args.connection;
    match &args.command {
        Command::Complete { words } => {
            print(&complete::for_kubectl(words).await)?;
            Ok(Ended::Done)
        }
        Command::Completion { shell } => {
            print(&String::from_utf8_lossy(&complete::script(*shell)))?;
            Ok(Ended::Done)
        }
        Command::Get(get) => {
            let cluster = connect(connection).await?;
            let found = listing(&cluster, &get.names, get.all_namespaces).await?;
            if found.items.is_empty() && matches!(get.output, Format::Table | Format::Wide) {
                let namespace = (!get.all_namespaces).then_some(cluster.namespace.as_str());
                tell(&get::nothing(namespace));
            } else {
                print(&rendered(&found, get.output)?)?;
            }
            Ok(Ended::Done)
        }
        Command::Why(asked) => {
            let cluster = connect(connection).await?;
            print(&why_text(&cluster, asked).await?)?;
            Ok(Ended::Done)
        }
        Command::Top(asked) => {
            let cluster = connect(connection).await?;
            print(&Box::pin(top_text(&cluster, asked)).await?)?;
            Ok(Ended::Done)
        }
        Command::Doctor(asked) => {
            let cluster = connect(connection).await?;
            // A cluster that does not answer has one ailment, not ten.
            let version = cluster.client.apiserver_version();
            call("ask the apiserver for its version", version).await?;
            let gathered = Facts::gather(&cluster, &asked.torpor_namespace, Timestamp::now());
            let facts = Box::pin(gathered).await;
            let diagnosis = doctor::diagnose(&facts);
            for unread in &facts.unread {
                tell(&format!("warning: {unread}"));
            }
            print(&rendered(&diagnosis, asked.output)?)?;
            let unseen = diagnosis.unseen + facts.unread.len();
            Ok(match (diagnosis.problems, unseen) {
                (0, 0) => Ended::Done,
                (0, _) => Ended::Unknown,
                _ => Ended::Broken,
            })
        }
        Command::Hibernate(asked) => changed(connection, Goal::Hibernate, asked).await,
        Command::Wake(asked) => changed(connection, Goal::Wake, asked).await,
        Command::Suspend(asked) => changed(connection, Goal::Suspend, asked).await,
        Command::Resume(asked) => changed(connection, Goal::Resume, asked).await,
        Command::Drain(asked) => {
            let cluster = connect(connection).await?;
            Box::pin(drained(&cluster, asked)).await
        }
    }
}

fn scope(cluster: &Cluster, everywhere: bool) -> Scope<'_> {
    match everywhere {
        true => Scope::Everywhere,
        false => Scope::Namespace(&cluster.namespace),
    }
}

/// Looks, and says on standard error what could not be seen.
async fn look(cluster: &Cluster, everywhere: bool) -> Result<World, Error> {
    let world = World::look(cluster, scope(cluster, everywhere)).await?;
    for unseen in &world.unseen {
        tell(&format!("warning: {unseen}"));
    }
    Ok(world)
}

/// What `get` shows.
pub async fn listing(
    cluster: &Cluster,
    names: &[String],
    everywhere: bool,
) -> Result<Listing, Error> {
    let world = look(cluster, everywhere).await?;
    let world = world.only(&cluster.namespace, names)?;
    Ok(Listing {
        items: views(&world),
        with_namespaces: everywhere,
        now: Timestamp::now(),
    })
}

async fn why_text(cluster: &Cluster, asked: &Why) -> Result<String, Error> {
    let world = look(cluster, false).await?;
    let names = std::slice::from_ref(&asked.name);
    let world = world.only(&cluster.namespace, names)?;
    let pods = pods_by_owner(&world.pods);
    let mut text = String::new();
    for sandbox in &world.sandboxes {
        let evidence = Evidence {
            sandbox,
            pod: pod_of(&pods, sandbox),
            snapshots: &world.snapshots,
            nodes: &world.nodes,
        };
        let explained = why::explain(evidence, Timestamp::now());
        text.push_str(&rendered(&explained, asked.output)?);
    }
    Ok(text)
}

async fn top_text(cluster: &Cluster, asked: &Top) -> Result<String, Error> {
    let (world, usages) = tokio::join!(
        look(cluster, asked.all_namespaces),
        top::usages(cluster, scope(cluster, asked.all_namespaces)),
    );
    let world = world?;
    if let Err(error) = &usages {
        tell(&format!(
            "warning: {} (the metrics API, by metrics-server): what awake sandboxes use is not known",
            words(error)
        ));
    }
    let ranking = top::rank(
        &views(&world),
        &usages.unwrap_or_default(),
        asked.sort_by,
        asked.all_namespaces,
    );
    rendered(&ranking, asked.output)
}

/// Prints a line for each Sandbox as soon as it is done, and ends as badly as the worst of them.
async fn changed(connection: &Connection, goal: Goal, asked: &Change) -> Result<Ended, Error> {
    let cluster = connect(connection).await?;
    let names = asked.names.iter();
    let mut each: FuturesUnordered<_> = names
        .map(|name| change(&cluster, goal, name, asked.timeout, &tell))
        .collect();
    let (mut ended, mut printed) = (Ended::Done, Ok(()));
    while let Some(result) = each.next().await {
        match result {
            Ok(done) => {
                let line = print_done(goal, &done);
                printed = printed.and(line);
            }
            Err(error) => ended = worse(ended, told(&error)),
        }
    }
    printed.map(|()| ended)
}

/// The same of a node's sandboxes, each of which is asked to run again.
pub async fn drained(cluster: &Cluster, asked: &Drain) -> Result<Ended, Error> {
    let node = &asked.node;
    drain::cordon(cluster, node, asked.dry_run).await?;
    if !asked.dry_run {
        tell(&format!("node/{node} is cordoned"));
    }
    let (parts, unseen) = Box::pin(drain::look(cluster, node)).await?;
    for unseen in &unseen {
        tell(&format!("warning: {unseen}"));
    }
    let mut ended = match unseen.is_empty() {
        true => Ended::Done,
        false => Ended::Unknown,
    };
    for part in &parts {
        match &part.plan {
            Plan::Leave(why) => {
                ended = Ended::Failed;
                let words = part.words();
                tell(&format!("warning: {words} is left as it is: {why}"));
            }
            Plan::Keep | Plan::Await if asked.dry_run => {
                print(&format!("{} would be suspended\n", part.words()))?;
            }
            Plan::Keep | Plan::Await => {}
        }
    }
    if asked.dry_run {
        return Ok(ended);
    }
    let mut printed = Ok(());
    let told_of = |part: &Part, result| match of_drained(part, result) {
        Ok(one) => ended = worse(ended, one),
        Err(error) => printed = Err(error),
    };
    drain::keep(cluster, &parts, asked.timeout, &tell, told_of).await;
    if ended == Ended::Done {
        tell(&format!(
            "node/{node} has no sandbox whose memory a drain would lose. Next: kubectl drain {node} --ignore-daemonsets; after the work: kubectl uncordon {node}"
        ));
    }
    printed.map(|()| ended)
}

/// Says what became of one.
fn of_drained(part: &Part, result: Result<Kept, NotKept>) -> Result<Ended, Error> {
    let words = part.words();
    match result {
        Ok(Kept::Yes(took)) => {
            let took = units::span(took);
            print(&format!("{words} is suspended ({took})\n"))?;
            Ok(Ended::Done)
        }
        Ok(Kept::Gone) => Ok(Ended::Done),
        Ok(Kept::No(lost)) => {
            tell(&format!("warning: {words}: {lost}"));
            Ok(Ended::Failed)
        }
        Err(NotKept::Runs(error)) => {
            tell(&format!("warning: {words} is not suspended:"));
            Ok(told(&error))
        }
        Err(stays @ NotKept::StaysSuspended { .. }) => {
            let Part {
                namespace, name, ..
            } = part;
            tell(&format!(
                "error: {words}: {stays}. Remedy: kubectl torpor resume {name} -n {namespace}"
            ));
            Ok(Ended::Failed)
        }
    }
}

/// A failure is certain; that something is not known is less than that.
fn worse(ended: Ended, next: Ended) -> Ended {
    match (ended, next) {
        (ended, Ended::Done) => ended,
        (Ended::Done, next) => next,
        (ended, Ended::Unknown) => ended,
        (_, failed) => failed,
    }
}

fn print_done(goal: Goal, done: &Changed) -> Result<(), Error> {
    let name = &done.name;
    if let Some(note) = &done.note {
        tell(&format!("warning: {name}: {note}"));
    }
    print(&match done.took {
        None => format!("sandbox.agents.x-k8s.io/{name} asked\n"),
        Some(took) => {
            let (is, took) = (goal.participle(), units::span(took));
            format!("sandbox.agents.x-k8s.io/{name} {is} ({took})\n")
        }
    })
}
