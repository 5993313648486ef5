//! The entries of SandboxNode about sandboxes: the planner's reasons, the memory that the last
//! sleep freed, and the last wake.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use torpor_api::node::{LastWake, MAX_REPORTED, PlanReason, SandboxReport};
use torpor_core::ids::{ImageId, PodUid, SandboxId};
use torpor_core::state::ImageState;
use torpor_records::{PodRecord, SandboxState, SleepNote, WakeNote};
use torpor_snapshots::Listed;

use crate::reconcile::node::Node;
use crate::report::metrics::Metrics;
use crate::report::spans::Spans;

mod board;
pub(crate) mod left;

pub(crate) use super::bytes::signed;
pub(crate) use board::{Board, Latest};
use left::LeftImages;

/// A note of the node's disk, and the time of its file when the agent read the note.
#[derive(Debug)]
struct Dated<T> {
    at: SystemTime,
    note: T,
}

/// The notes of one sandbox that the agent has read.
#[derive(Debug, Default)]
struct Notes {
    wake: Option<Dated<WakeNote>>,
    sleep: Option<Dated<SleepNote>>,
    /// Time of the note about the sandbox's restore.
    restored_at: Option<SystemTime>,
}

/// Reads the notes of all sandboxes, and counts and exports the new ones.
#[derive(Debug)]
pub(crate) struct Sandboxes {
    notes: HashMap<SandboxId, Notes>,
    /// False until the first report is made. Notes that the first report reads are not counted:
    /// their events were before the agent's start.
    counts: bool,
    metrics: Arc<Metrics>,
    board: Arc<Board>,
    spans: Arc<Spans>,
    left: LeftImages,
}

impl Sandboxes {
    pub(crate) fn new(metrics: Arc<Metrics>, board: Arc<Board>, spans: Arc<Spans>) -> Self {
        Self {
            notes: HashMap::new(),
            counts: false,
            metrics,
            board,
            spans,
            left: LeftImages::default(),
        }
    }

    /// Returns the board, on which a caller can wait for changes of left images.
    pub(crate) fn board(&self) -> Arc<Board> {
        self.board.clone()
    }

    /// Returns one entry for each Pod that is gone and has left its memory in an image, then one
    /// for each sandbox of the node, by Pod UID; at most [`MAX_REPORTED`] entries. `images` are all
    /// images of the store.
    pub(crate) fn report(&mut self, node: &Node, images: &[Listed]) -> Vec<SandboxReport> {
        let mut pods = node.records.pods().unwrap_or_default();
        pods.sort_by_cached_key(|pod| {
            let made_at = node.records.made_at(&pod.sandbox);
            (pod.pod_uid.clone(), Reverse(made_at))
        });
        // A Pod whose sandbox was made anew has two records for a moment. The newer is reported.
        pods.dedup_by(|a, b| a.pod_uid == b.pod_uid);
        self.notes
            .retain(|sandbox, _| pods.iter().any(|pod| pod.sandbox == *sandbox));
        let sizes: BTreeMap<_, _> = images.iter().map(|i| (&i.id, i.size)).collect();
        let mut held = 0_i64;
        let mut reports = Vec::new();
        for pod in &pods {
            let asleep_in = asleep_in(node, pod, images);
            self.read_notes(node, pod);
            let mut report = self.describe(pod);
            if let Some(image) = asleep_in {
                report.image_bytes = sizes.get(&image).map(|size| signed(*size));
                report.image_id = Some(image.to_string());
                let since = node.records.asleep_since(&pod.sandbox);
                report.asleep_since = since
                    .and_then(|since| Timestamp::try_from(since).ok())
                    .map(Time);
                held = held.saturating_add(report.memory_asleep_bytes.unwrap_or(0));
            }
            reports.push(report);
        }
        self.metrics.held_asleep.set(held);
        let mut reasons = BTreeMap::new();
        for reason in reports.iter().flat_map(|report| &report.reasons) {
            *reasons.entry(reason.reason.clone()).or_default() += 1;
        }
        self.metrics.planned_for(&reasons);
        let watched = i64::try_from(self.board.watched()).unwrap_or(i64::MAX);
        self.metrics.watched.set(watched);
        self.counts = true;
        let mut all = self.left.report(&self.board, node, images, &mut reports);
        all.append(&mut reports);
        all.truncate(MAX_REPORTED);
        all
    }

    /// Reports whether the report names the memory of all `images`: the Pod of each committed image
    /// has a sandbox on the node, or the board has the Pod as gone.
    pub(crate) fn is_complete(&self, node: &Node, images: &[Listed]) -> bool {
        let Ok(pods) = node.records.pods() else {
            return false;
        };
        let recorded: BTreeSet<&PodUid> = pods.iter().map(|pod| &pod.pod_uid).collect();
        let committed = images
            .iter()
            .filter(|image| image.state == ImageState::Committed);
        committed
            .map(|image| image.id.pod())
            .all(|pod| recorded.contains(pod) || self.board.is_gone(pod))
    }

    /// Returns the planner's reasons about a Pod.
    pub(crate) fn reasons(&self, pod: &PodUid) -> Vec<PlanReason> {
        self.board.reasons(pod)
    }

    /// Reads the notes of a sandbox that were written since the last report.
    fn read_notes(&mut self, node: &Node, pod: &PodRecord) {
        let notes = self.notes.entry(pod.sandbox.clone()).or_default();
        if let Some(at) = node.records.woke_at(&pod.sandbox)
            && notes.wake.as_ref().is_none_or(|dated| dated.at != at)
            && let Ok(note) = node.records.wake(&pod.sandbox)
        {
            if self.counts {
                let stages = stages(&note.stages_end_micros);
                self.metrics.woke(&note, duration(&note), &stages);
                self.spans.woke(pod, &note, at, &stages);
            }
            notes.wake = Some(Dated { at, note });
        }
        if let Some(at) = node.records.restored_at(&pod.sandbox)
            && notes.restored_at != Some(at)
            && let Ok(note) = node.records.restore(&pod.sandbox)
        {
            if self.counts {
                let stages = stages(&note.stages_end_micros);
                self.spans.restored(pod, &note, at, &stages);
            }
            notes.restored_at = Some(at);
        }
        if let Some(at) = node.records.slept_at(&pod.sandbox)
            && notes.sleep.as_ref().is_none_or(|dated| dated.at != at)
            && let Ok(note) = node.records.sleep(&pod.sandbox)
        {
            if self.counts {
                self.metrics.fell_asleep(note);
            }
            notes.sleep = Some(Dated { at, note });
        }
    }

    fn describe(&self, pod: &PodRecord) -> SandboxReport {
        let notes = self.notes.get(&pod.sandbox);
        let sleep = notes.and_then(|notes| notes.sleep.as_ref());
        let wake = notes.and_then(|notes| notes.wake.as_ref());
        SandboxReport {
            asleep_since: None,
            image_bytes: None,
            image_id: None,
            last_wake: wake.and_then(last_wake),
            memory_asleep_bytes: sleep.map(|dated| signed(dated.note.bytes_after)),
            memory_awake_bytes: sleep.map(|dated| signed(dated.note.bytes_before)),
            namespace: pod.namespace.to_string(),
            pod_gone_since: None,
            pod_name: pod.name.clone(),
            pod_uid: pod.pod_uid.to_string(),
            reasons: self.board.reasons(&pod.pod_uid),
            sandbox_name: self.board.sandbox_of(&pod.pod_uid).unwrap_or_default(),
        }
    }
}

/// Returns the image that holds the memory of a sleeping sandbox. A dozing sandbox counts as soon
/// as its memory has been pushed into swap.
fn asleep_in(node: &Node, pod: &PodRecord, images: &[Listed]) -> Option<ImageId> {
    let records = &node.records;
    match records.state(&pod.sandbox).ok()? {
        SandboxState::Hibernated { image, .. } => Some(image),
        SandboxState::Running if records.is_noted_paused(&pod.sandbox) => {
            let doze = records.doze(&pod.sandbox).ok().flatten();
            doze.filter(|doze| doze.reclaimed)?;
            let own = images.iter().filter(|image| image.id.pod() == &pod.pod_uid);
            let newest = own
                .filter(|image| image.state == ImageState::Committed)
                .max_by_key(|image| image.id.number());
            newest.map(|image| image.id.clone())
        }
        SandboxState::Running | SandboxState::Restoring { .. } => None,
    }
}

fn last_wake(wake: &Dated<WakeNote>) -> Option<LastWake> {
    let at = Timestamp::try_from(wake.at).ok()?;
    Some(LastWake {
        at: Time(at),
        cause: wake.note.cause.as_str().to_owned(),
        from: format!("{:?}", wake.note.from),
        duration_micros: i64::try_from(duration(&wake.note).as_micros()).unwrap_or(i64::MAX),
    })
}

fn duration(note: &WakeNote) -> Duration {
    let last = note.stages_end_micros.values().max();
    Duration::from_micros(last.copied().unwrap_or(0))
}

/// Returns the stages in their order, each with its duration. A stage begins at the end of the
/// stage before it.
fn stages(ends_micros: &BTreeMap<String, u64>) -> Vec<(String, Duration)> {
    let mut ends: Vec<(u64, &String)> = ends_micros
        .iter()
        .map(|(stage, end)| (*end, stage))
        .collect();
    ends.sort_unstable();
    let begins = std::iter::once(0).chain(ends.iter().map(|(end, _)| *end));
    begins
        .zip(&ends)
        .map(|(begin, (end, stage))| ((*stage).clone(), Duration::from_micros(end - begin)))
        .collect()
}

#[cfg(test)]
pub(crate) mod tests {
    use torpor_core::ids::{ContainerName, ImageId};
    use torpor_core::pressure::Resource;
    use torpor_core::queue::Urgency;
    use torpor_core::steps::Reason;
    use torpor_records::{Depth, WakeCause};

    use super::board::plan_reason;
    pub(crate) use super::left::tests::image_in;
    use super::*;

    /// Returns each reason once. The match fails to compile until a new reason is added here.
    fn all() -> Vec<Reason> {
        let image = || ImageId::parse("pod-a.1").expect("an image's name");
        let until = Timestamp::UNIX_EPOCH;
        let one_of_each = vec![
            Reason::Busy,
            Reason::LiveUnknown,
            Reason::LedgerCorrupt,
            Reason::Restoring,
            Reason::SleepWanted,
            Reason::Idle,
            Reason::Pressure {
                short_of: Resource::Memory,
            },
            Reason::Dozing,
            Reason::AwakeWanted,
            Reason::FreezeWanted,
            Reason::ClaimWaits,
            Reason::SnapshotWanted,
            Reason::DeletionWanted,
            Reason::ImageAdopted,
            Reason::Sleeping,
            Reason::Settled,
            Reason::AwakeUnrecorded,
            Reason::RecordStale,
            Reason::SaveUnfinished,
            Reason::EndUnfinished,
            Reason::NotCapable,
            Reason::InUse,
            Reason::NotReady,
            Reason::Debugged {
                container: ContainerName::new("debugger").expect("a name"),
            },
            Reason::AwaitingTurn {
                urgency: Urgency::Asked,
            },
            Reason::AwaitingBandwidth,
            Reason::Backoff { until },
            Reason::AwaitingContainers,
            Reason::NoSandbox,
            Reason::ImageMissing { image: image() },
            Reason::Garbage { image: image() },
            Reason::Unclaimed {
                image: image(),
                until,
            },
            Reason::Asking { image: image() },
            Reason::GivenUp {
                image: image(),
                disk_short: false,
            },
            Reason::PodTerminating,
            Reason::PodGone,
            Reason::NumbersExhausted,
        ];
        for reason in &one_of_each {
            match reason {
                Reason::Busy
                | Reason::LiveUnknown
                | Reason::LedgerCorrupt
                | Reason::Restoring
                | Reason::SleepWanted
                | Reason::Idle
                | Reason::Pressure { .. }
                | Reason::Dozing
                | Reason::AwakeWanted
                | Reason::FreezeWanted
                | Reason::ClaimWaits
                | Reason::SnapshotWanted
                | Reason::DeletionWanted
                | Reason::ImageAdopted
                | Reason::Sleeping
                | Reason::Settled
                | Reason::AwakeUnrecorded
                | Reason::RecordStale
                | Reason::SaveUnfinished
                | Reason::EndUnfinished
                | Reason::NotCapable
                | Reason::InUse
                | Reason::NotReady
                | Reason::Debugged { .. }
                | Reason::AwaitingTurn { .. }
                | Reason::AwaitingBandwidth
                | Reason::Backoff { .. }
                | Reason::AwaitingContainers
                | Reason::NoSandbox
                | Reason::ImageMissing { .. }
                | Reason::Garbage { .. }
                | Reason::Unclaimed { .. }
                | Reason::Asking { .. }
                | Reason::GivenUp { .. }
                | Reason::PodTerminating
                | Reason::PodGone
                | Reason::NumbersExhausted => {}
            }
        }
        one_of_each
    }

    #[test]
    fn the_api_lists_exactly_the_planners_reasons() {
        let names = all().into_iter().map(|reason| plan_reason(&reason).reason);
        assert_eq!(names.collect::<Vec<_>>(), torpor_api::reasons::plan::ALL);
    }

    #[test]
    fn the_api_lists_exactly_the_causes_of_wakes() {
        let causes = WakeCause::ALL.map(WakeCause::as_str);
        assert_eq!(causes, torpor_api::node::WAKE_CAUSES);
    }

    #[test]
    fn the_value_of_a_reason_is_reported_as_its_detail() {
        let reason = Reason::Backoff {
            until: Timestamp::UNIX_EPOCH,
        };
        assert_eq!(plan_reason(&reason).detail, "until=1970-01-01T00:00:00Z");
        assert_eq!(plan_reason(&Reason::Busy).detail, "");
    }

    #[test]
    fn a_stage_lasts_from_the_end_of_the_one_before() {
        let note = WakeNote {
            cause: WakeCause::Exec,
            from: Depth::Hibernated,
            stages_end_micros: [("verified", 30), ("attached", 90), ("prepared", 10)]
                .map(|(stage, end)| (stage.to_owned(), end))
                .into(),
        };
        let micros = |n| Duration::from_micros(n);
        let expected = [("prepared", 10), ("verified", 20), ("attached", 60)]
            .map(|(stage, took)| (stage.to_owned(), micros(took)));
        assert_eq!(stages(&note.stages_end_micros), expected);
        assert_eq!(duration(&note), micros(90));
    }
}
