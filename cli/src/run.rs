//! Runs a command and returns its exit code.

use std::process::ExitCode;

use futures::StreamExt;
use futures::stream::FuturesUnordered;
use jiff::Timestamp;
use kube::ResourceExt;
use kube::api::ListParams;
use torpor_api::{SandboxSnapshot, labels};

use crate::args::{
    Archive, Args, Change, Command, Connection, Drain, Fork, Format, ListArchives, Pools, Rollback,
    Snapshot, Snapshots, Top, Why,
};
use crate::change::{Changed, change};
use crate::connect::{Cluster, call, connect};
use crate::doctor::{self, facts::Facts};
use crate::drain::{self, Outcome, Plan, SuspendError, Target};
use crate::error::{Error, full_message};
use crate::goal::Goal;
use crate::listing::Listing;
use crate::objects::{Listed, Objects, Scope, list, list_by, readable};
use crate::output::{Render, print, print_error, rendered};
use crate::view::{View, pod_of, pods_by_owner, views};
use crate::why::{self, Evidence};
use crate::{
    archive, archives, complete, fork, get, pools, rollback, snapshot, snapshots, top, tree, units,
};

/// Result of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    Done,
    Failed,
    /// doctor found a problem.
    Broken,
    /// The result is not known.
    Unknown,
}

impl From<Ended> for ExitCode {
    fn from(ended: Ended) -> Self {
        // clap exits with 2 for an invalid command line.
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

/// Runs the command of the arguments to its end.
///
/// Results go to standard output, all other messages to standard error.
pub fn run_to_completion(args: Args) -> ExitCode {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build();
    let runtime = match runtime {
        Ok(runtime) => runtime,
        Err(error) => {
            print_error(&format!("error: cannot start the async runtime: {error}"));
            return ExitCode::FAILURE;
        }
    };
    let ended = runtime.block_on(run(args));
    ended.unwrap_or_else(|error| report(&error)).into()
}

/// Prints a failure and its remedy.
fn report(error: &Error) -> Ended {
    print_error(&format!("error: {}", full_message(error)));
    if let Some(remedy) = error.remedy() {
        print_error(&format!("  → {remedy}"));
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
            let nothing = found.items.is_empty().then_some("Sandboxes");
            print_list(&cluster, get.all_namespaces, &found, nothing, get.output)
        }
        Command::Why(args) => {
            let cluster = connect(connection).await?;
            print(&why_text(&cluster, args).await?)?;
            Ok(Ended::Done)
        }
        Command::Top(args) => {
            let cluster = connect(connection).await?;
            print(&Box::pin(top_text(&cluster, args)).await?)?;
            Ok(Ended::Done)
        }
        Command::Doctor(args) => {
            let cluster = connect(connection).await?;
            // For a cluster that does not answer, one error is printed instead of one a check.
            let version = cluster.client.apiserver_version();
            call("ask the apiserver for its version", version).await?;
            let gathered = Facts::gather(&cluster, &args.torpor_namespace, Timestamp::now());
            let facts = Box::pin(gathered).await;
            let diagnosis = doctor::diagnose(&facts);
            for unread in &facts.unread {
                print_error(&format!("warning: {unread}"));
            }
            print(&rendered(&diagnosis, args.output)?)?;
            let unseen = diagnosis.unseen + facts.unread.len();
            Ok(match (diagnosis.problems, unseen) {
                (0, 0) => Ended::Done,
                (0, _) => Ended::Unknown,
                _ => Ended::Broken,
            })
        }
        Command::Hibernate(args) => changed(connection, Goal::Hibernate, args).await,
        Command::Wake(args) => changed(connection, Goal::Wake, args).await,
        Command::Suspend(args) => changed(connection, Goal::Suspend, args).await,
        Command::Resume(args) => changed(connection, Goal::Resume, args).await,
        Command::Snapshots(args) if args.tree => {
            let cluster = connect(connection).await?;
            print(&Box::pin(snapshot_tree(&cluster, args)).await?)?;
            Ok(Ended::Done)
        }
        Command::Snapshots(args) => {
            let cluster = connect(connection).await?;
            let found = Box::pin(snapshot_listing(&cluster, args)).await?;
            let nothing = found.items.is_empty().then_some("SandboxSnapshots");
            print_list(&cluster, args.all_namespaces, &found, nothing, args.output)
        }
        Command::Pools(args) => {
            let cluster = connect(connection).await?;
            let found = Box::pin(pool_listing(&cluster, args)).await?;
            let nothing = found.items.is_empty().then_some("SandboxWarmPools");
            print_list(&cluster, args.all_namespaces, &found, nothing, args.output)
        }
        Command::Snapshot(args) => {
            let cluster = connect(connection).await?;
            Box::pin(snapshot_taken(&cluster, args)).await
        }
        Command::Fork(args) => {
            let cluster = connect(connection).await?;
            Box::pin(forked(&cluster, args)).await
        }
        Command::Rollback(args) => {
            let cluster = connect(connection).await?;
            Box::pin(rolled_back(&cluster, args)).await
        }
        Command::Archive(args) => {
            let cluster = connect(connection).await?;
            Box::pin(archived(&cluster, args)).await
        }
        Command::RestoreArchive(args) => {
            let cluster = connect(connection).await?;
            let done = Box::pin(archive::restore(&cluster, args, &print_error)).await?;
            let took = done.took.map(units::span).unwrap_or_default();
            let name = done.name;
            print(&format!(
                "sandbox.agents.x-k8s.io/{name} continues from its archive ({took})\n"
            ))?;
            Ok(Ended::Done)
        }
        Command::ListArchives(args) => {
            let cluster = connect(connection).await?;
            let found = Box::pin(archive_listing(&cluster, args)).await?;
            let nothing = found.items.is_empty().then_some("archives");
            print_list(&cluster, args.all_namespaces, &found, nothing, args.output)
        }
        Command::Drain(args) => {
            let cluster = connect(connection).await?;
            Box::pin(drained(&cluster, args)).await
        }
    }
}

fn scope(cluster: &Cluster, everywhere: bool) -> Scope<'_> {
    match everywhere {
        true => Scope::Everywhere,
        false => Scope::Namespace(&cluster.namespace),
    }
}

/// Reads the objects of the scope, and prints a warning for each failure.
async fn look(cluster: &Cluster, everywhere: bool) -> Result<Objects, Error> {
    let objects = Objects::list(cluster, scope(cluster, everywhere)).await?;
    for unseen in &objects.unseen {
        print_error(&format!("warning: {unseen}"));
    }
    Ok(objects)
}

/// Returns the output of `get`.
pub async fn listing(
    cluster: &Cluster,
    names: &[String],
    everywhere: bool,
) -> Result<Listing<View>, Error> {
    let objects = look(cluster, everywhere).await?;
    let objects = objects.only(&cluster.namespace, names)?;
    Ok(Listing {
        items: views(&objects),
        with_namespaces: everywhere,
        now: Timestamp::now(),
    })
}

async fn why_text(cluster: &Cluster, args: &Why) -> Result<String, Error> {
    let objects = look(cluster, false).await?;
    let names = std::slice::from_ref(&args.name);
    let objects = objects.only(&cluster.namespace, names)?;
    let pods = pods_by_owner(&objects.pods);
    let mut text = String::new();
    for sandbox in &objects.sandboxes {
        let evidence = Evidence {
            sandbox,
            pod: pod_of(&pods, sandbox),
            snapshots: &objects.snapshots,
            nodes: &objects.nodes,
        };
        let explained = why::explain(evidence, Timestamp::now());
        text.push_str(&rendered(&explained, args.output)?);
    }
    Ok(text)
}

async fn top_text(cluster: &Cluster, args: &Top) -> Result<String, Error> {
    let (objects, usages) = tokio::join!(
        look(cluster, args.all_namespaces),
        top::usages(cluster, scope(cluster, args.all_namespaces)),
    );
    let objects = objects?;
    if let Err(error) = &usages {
        print_error(&format!(
            "warning: {} (the metrics API of metrics-server): the use of awake sandboxes is unknown",
            full_message(error)
        ));
    }
    let ranking = top::rank(
        &views(&objects),
        &usages.unwrap_or_default(),
        args.sort_by,
        args.all_namespaces,
    );
    rendered(&ranking, args.output)
}

/// Changes the Sandboxes at once, and prints a line for each as soon as it is done.
///
/// The result is the worst of the Sandboxes' results.
async fn changed(connection: &Connection, goal: Goal, args: &Change) -> Result<Ended, Error> {
    let cluster = connect(connection).await?;
    let names = args.names.iter();
    let mut each: FuturesUnordered<_> = names
        .map(|name| change(&cluster, goal, name, args.timeout, &print_error))
        .collect();
    let (mut ended, mut printed) = (Ended::Done, Ok(()));
    while let Some(result) = each.next().await {
        match result {
            Ok(done) => {
                let line = print_done(goal, &done);
                printed = printed.and(line);
            }
            Err(error) => ended = worse(ended, report(&error)),
        }
    }
    printed.map(|()| ended)
}

/// Prints a list. `nothing`: the kind of the objects, where an empty table would be printed.
fn print_list(
    cluster: &Cluster,
    everywhere: bool,
    list: &impl Render,
    nothing: Option<&str>,
    format: Format,
) -> Result<Ended, Error> {
    match nothing.filter(|_| matches!(format, Format::Table | Format::Wide)) {
        Some(kind) => {
            let namespace = (!everywhere).then_some(cluster.namespace.as_str());
            print_error(&get::nothing_found(kind, namespace));
        }
        None => print(&rendered(list, format)?)?,
    }
    Ok(Ended::Done)
}

/// Returns the output of `snapshots`.
async fn snapshot_listing(
    cluster: &Cluster,
    args: &Snapshots,
) -> Result<Listing<snapshots::View>, Error> {
    let found = all_snapshots(cluster, args.all_namespaces).await?;
    Ok(snapshots::listing(
        &found,
        &args.names,
        args.all_namespaces,
        Timestamp::now(),
    ))
}

/// Returns the output of `list-archives`.
async fn archive_listing(
    cluster: &Cluster,
    args: &ListArchives,
) -> Result<Listing<archives::View>, Error> {
    let found = all_snapshots(cluster, args.all_namespaces).await?;
    Ok(archives::listing(
        &found,
        &args.names,
        args.all_namespaces,
        Timestamp::now(),
    ))
}

async fn all_snapshots(cluster: &Cluster, everywhere: bool) -> Result<Vec<SandboxSnapshot>, Error> {
    let api = scope(cluster, everywhere).api(&cluster.client);
    let found: Listed<SandboxSnapshot> = list("SandboxSnapshots", &api).await?;
    for unread in &found.unread {
        print_error(&format!("warning: {unread}"));
    }
    Ok(found.items)
}

/// Returns the output of `snapshots --tree`.
async fn snapshot_tree(cluster: &Cluster, args: &Snapshots) -> Result<String, Error> {
    let (snapshots, sandboxes) = (cluster.api(), cluster.api());
    let (snapshots, sandboxes) = tokio::join!(
        list("SandboxSnapshots", &snapshots),
        list("Sandboxes", &sandboxes),
    );
    let mut unseen = Vec::new();
    let snapshots: Vec<SandboxSnapshot> = readable(Ok(snapshots?), &mut unseen);
    let sandboxes: Vec<torpor_api::Sandbox> = readable(Ok(sandboxes?), &mut unseen);
    for unseen in unseen {
        print_error(&format!("warning: {unseen}"));
    }
    if snapshots.is_empty() {
        let nothing = get::nothing_found("SandboxSnapshots", Some(&cluster.namespace));
        print_error(&nothing);
        return Ok(String::new());
    }
    let now = Timestamp::now();
    Ok(tree::text(&snapshots, &sandboxes, &args.names, now))
}

/// Returns the output of `pools`. A user without the right to list templates, snapshots or Pods
/// gets the table without the golden or the staged images.
async fn pool_listing(cluster: &Cluster, args: &Pools) -> Result<Listing<pools::View>, Error> {
    let (scope, client) = (scope(cluster, args.all_namespaces), &cluster.client);
    let (pools, templates) = (scope.api(client), scope.api(client));
    let (sandboxes, snapshots, pods) = (scope.api(client), scope.api(client), scope.api(client));
    let staging = ListParams::default().labels(labels::STAGED_IMAGES);
    let (pools, sandboxes, templates, snapshots, pods) = tokio::join!(
        list("SandboxWarmPools", &pools),
        list("Sandboxes", &sandboxes),
        list("SandboxTemplates", &templates),
        list("SandboxSnapshots", &snapshots),
        list_by("Pods", &pods, staging),
    );
    let mut unseen = Vec::new();
    let found = pools::Found {
        pools: readable(Ok(pools?), &mut unseen),
        sandboxes: readable(Ok(sandboxes?), &mut unseen),
        templates: readable(templates, &mut unseen),
        snapshots: readable(snapshots, &mut unseen),
        staging: readable(pods, &mut unseen),
    };
    for unseen in unseen {
        print_error(&format!("warning: {unseen}"));
    }
    let now = Timestamp::now();
    Ok(pools::listing(
        &found,
        &args.names,
        args.all_namespaces,
        now,
    ))
}

async fn snapshot_taken(cluster: &Cluster, args: &Snapshot) -> Result<Ended, Error> {
    let (to, limit) = (args.to.as_deref(), args.timeout);
    let taken = snapshot::snapshot(cluster, &args.name, to, limit, &print_error).await?;
    let name = format!("sandboxsnapshot.torpor.dev/{}", taken.snapshot.name_any());
    let size = taken.snapshot.status.and_then(|status| status.size_bytes);
    let size = size.map_or_else(|| "unknown size".to_owned(), units::bytes);
    print(&match taken.took {
        Some(took) => format!("{name} saved ({}, {size})\n", units::span(took)),
        None => format!("{name} created\n"),
    })?;
    Ok(Ended::Done)
}

/// Starts copies, and prints a line for each.
async fn forked(cluster: &Cluster, args: &Fork) -> Result<Ended, Error> {
    let started = fork::fork(cluster, args, &print_error).await?;
    let (mut ended, mut printed) = (Ended::Done, Ok(()));
    for copy in started.copies {
        match copy {
            Ok(done) => {
                let took = done.took.map(units::span).unwrap_or_default();
                let name = format!("sandbox.agents.x-k8s.io/{}", done.name);
                let line = format!("{name} started as a copy ({took})\n");
                printed = printed.and_then(|()| print(&line));
            }
            Err(error) => ended = worse(ended, report(&error)),
        }
    }
    let snapshot = started.snapshot.name_any();
    print_error(&format!(
        "Later Pods of the copies need SandboxSnapshot {snapshot}. After the deletion of the copies: kubectl delete sandboxsnapshot {snapshot}"
    ));
    printed.map(|()| ended)
}

async fn rolled_back(cluster: &Cluster, args: &Rollback) -> Result<Ended, Error> {
    let done = Box::pin(rollback::rollback(cluster, args, &print_error)).await?;
    let took = units::span(done.took);
    let (name, snapshot) = (&args.name, &args.snapshot);
    print(&format!(
        "sandbox.agents.x-k8s.io/{name} continues from {snapshot} ({took})\n"
    ))?;
    if let Some(kept_in) = done.kept_in {
        print_error(&format!(
            "To undo: kubectl torpor rollback {name} {kept_in}"
        ));
    }
    Ok(Ended::Done)
}

async fn archived(cluster: &Cluster, args: &Archive) -> Result<Ended, Error> {
    let done = archive::archive(cluster, args, &print_error).await?;
    let name = &args.name;
    let Some(archive) = done.archive else {
        print(&format!("sandbox.agents.x-k8s.io/{name} patched\n"))?;
        return Ok(Ended::Done);
    };
    let (snapshot, took) = (archive.name_any(), units::span(done.took));
    print(&format!(
        "sandbox.agents.x-k8s.io/{name} archived in {snapshot} ({took})\n"
    ))?;
    if let Some(source) = archive.spec.archive {
        let class = archive.spec.snapshot_class_name.unwrap_or_default();
        let (cluster, image) = (source.cluster, source.image_id);
        print_error(&format!(
            "To restore: kubectl torpor restore-archive {name}. In another cluster with this repository: kubectl torpor restore-archive {name} --image {image} --from-cluster {cluster} --class {class}"
        ));
    }
    Ok(Ended::Done)
}

/// Cordons a node, then suspends and resumes its sandboxes.
pub async fn drained(cluster: &Cluster, args: &Drain) -> Result<Ended, Error> {
    let node = &args.node;
    drain::cordon(cluster, node, args.dry_run).await?;
    if !args.dry_run {
        print_error(&format!("node/{node} cordoned"));
    }
    let (targets, unseen) = Box::pin(drain::look(cluster, node)).await?;
    for unseen in &unseen {
        print_error(&format!("warning: {unseen}"));
    }
    let mut ended = match unseen.is_empty() {
        true => Ended::Done,
        false => Ended::Unknown,
    };
    for target in &targets {
        match &target.plan {
            Plan::Skip(why) => {
                ended = Ended::Failed;
                let name = target.kubectl_name();
                print_error(&format!("warning: {name} skipped: {why}"));
            }
            Plan::Suspend | Plan::Await if args.dry_run => {
                print(&format!("{} would be suspended\n", target.kubectl_name()))?;
            }
            Plan::Suspend | Plan::Await => {}
        }
    }
    if args.dry_run {
        return Ok(ended);
    }
    let mut printed = Ok(());
    let on_end = |target: &Target, result| match print_drained(target, result) {
        Ok(one) => ended = worse(ended, one),
        Err(error) => printed = Err(error),
    };
    drain::suspend_all(cluster, &targets, args.timeout, &print_error, on_end).await;
    if ended == Ended::Done {
        print_error(&format!(
            "node/{node} has no sandbox whose memory a drain would lose. Next: kubectl drain {node} --ignore-daemonsets; after the maintenance: kubectl uncordon {node}"
        ));
    }
    printed.map(|()| ended)
}

/// Prints the result of one sandbox.
fn print_drained(target: &Target, result: Result<Outcome, SuspendError>) -> Result<Ended, Error> {
    let full_name = target.kubectl_name();
    match result {
        Ok(Outcome::MemoryKept(took)) => {
            let took = units::span(took);
            print(&format!("{full_name} suspended ({took})\n"))?;
            Ok(Ended::Done)
        }
        Ok(Outcome::Gone) => Ok(Ended::Done),
        Ok(Outcome::MemoryLost(lost)) => {
            print_error(&format!("warning: {full_name}: {lost}"));
            Ok(Ended::Failed)
        }
        Err(SuspendError::StillRuns(error)) => {
            print_error(&format!("warning: {full_name} not suspended:"));
            Ok(report(&error))
        }
        Err(stays @ SuspendError::StaysSuspended { .. }) => {
            let Target {
                namespace, name, ..
            } = target;
            print_error(&format!(
                "error: {full_name}: {stays}. Remedy: kubectl torpor resume {name} -n {namespace}"
            ));
            Ok(Ended::Failed)
        }
    }
}

/// Returns the worse of two results. A failure is worse than an unknown result.
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
        print_error(&format!("warning: {name}: {note}"));
    }
    print(&match done.took {
        None => format!("sandbox.agents.x-k8s.io/{name} patched\n"),
        Some(took) => {
            let (is, took) = (goal.participle(), units::span(took));
            format!("sandbox.agents.x-k8s.io/{name} {is} ({took})\n")
        }
    })
}
