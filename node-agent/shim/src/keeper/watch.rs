//! Watches a pod's links while its sandbox is saved, sleeps and wakes: see `torpor-link`.
//!
//! The pause container's keeper does this. It holds the packets to the pod, wakes the sandbox for
//! them, and answers probes, keepalives and, for stopped processes, address resolution.

use std::collections::VecDeque;
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use torpor_link::doubt::Decision;
use torpor_link::keepalive::{self, Keepalives};
use torpor_link::neighbour;
use torpor_link::net::{self, Pair};
use torpor_link::owner::{Kubelet, Owner};
use torpor_link::packet::{Cause, Meaning, Segment, meaning, segment};
use torpor_link::packet_drop::{PacketDrop, Sender};
use torpor_link::probes;
use torpor_link::sensor::{Next, Sensor};
use torpor_link::tap::ethernet;
use torpor_link::traffic;
use torpor_records::{Addresses, PodRecord, Rules, TrafficMap, UnacknowledgedMap};
use torpor_sandbox::address;

use super::egress_hold::HeldEgress;
use super::sender::with_sender;

mod links;
mod release;

use links::{Link, PodEnd, links};

/// Time in which a sandbox reads a frame that was passed on to it. It takes milliseconds, unless
/// the sandbox gets no processor time.
const READ_TIME: Duration = Duration::from_secs(1);
/// The largest number of frames that are recorded as passed on.
const MAX_PASSED_ON: usize = 256;

/// The largest number of frames that are read of one link before the keeper handles requests: a
/// flood of packets must not delay its answers.
const MAX_FRAMES: usize = 256;

/// Time after which the client of a probe without an answer has closed its connection: a probe's
/// timeout is seldom longer.
const PROBE_CLOSE_TIME: Duration = Duration::from_secs(10);

/// Time in which a packet from before the watch still needs an answer: the time for which a sandbox
/// runs at least after a wake.
const ANSWER_LIMIT: Duration = Duration::from_secs(10);

/// The watch of one pod's links.
pub(super) struct Watch {
    began: Instant,
    /// Drops what the pod receives. The taps receive it all the same.
    packet_drop: PacketDrop,
    sensor: Sensor,
    keepalives: Keepalives,
    links: Vec<Link>,
    pod_ips: Vec<IpAddr>,
    rules: Rules,
    kubelet: Kubelet,
    /// The sandbox's processes have ended, and the pod's address was put back.
    is_hibernated: bool,
    /// The sandbox is paused and its network stack runs: acknowledgements are passed on to it.
    is_paused: bool,
    /// All frames but those of probes are passed on to the paused sandbox, because no image has to
    /// contain their effect.
    passes_all: bool,
    /// Since when the sandbox's processes are stopped, or about to be. The keeper answers for them,
    /// and for the pod's address, too.
    answers_since: Option<Instant>,
    /// The frames that were passed on a moment ago, each with its time and the number of its link.
    /// The sandbox may not have read them when its processes are stopped.
    passed_on: VecDeque<(Instant, usize, Vec<u8>)>,
    /// The sender whose frames pass: those to the pod, and the keeper's own while the pod's packets
    /// are held.
    sender: Sender,
    /// The packets that the sandbox sends during a restore.
    held_egress: Option<HeldEgress>,
    namespace: PathBuf,
    addresses: Addresses,
    /// The map of the connections with unacknowledged data of the sandbox.
    unacknowledged: Option<UnacknowledgedMap>,
}

impl Watch {
    /// Begins to hold the packets to the pod and to answer the kubelet's probes.
    ///
    /// `traffic_map`: the times of the pod's packets. `unacknowledged`: the connections with
    /// unacknowledged data of the sandbox.
    pub(super) fn begin(
        pod: &PodRecord,
        rules: &Rules,
        kubelet_port: u16,
        traffic_map: Option<TrafficMap>,
        unacknowledged: Option<UnacknowledgedMap>,
    ) -> anyhow::Result<Self> {
        let namespace = pod.network_namespace.as_deref();
        let namespace = namespace.context("the pod has no network namespace of its own")?;
        let pod_ips = net::ips(&pod.addresses)?;
        let rules = prepared(rules);
        // The drop begins before the taps: a frame that comes in between is lost, as on any link.
        // In the reverse order the sandbox would receive it twice.
        let sender = Sender::random();
        let packet_drop = PacketDrop::begin(namespace, Some(sender))?;
        let mut sensor = Sensor::default();
        if owes_answer(traffic_map, &rules) {
            sensor.record_earlier_packet();
        }
        Ok(Self {
            began: Instant::now(),
            packet_drop,
            sensor,
            keepalives: Keepalives::begin(Instant::now()),
            links: links(namespace, &pod_ips, &rules)?,
            pod_ips,
            rules,
            kubelet: Kubelet::at(kubelet_port),
            is_hibernated: false,
            is_paused: false,
            passes_all: false,
            answers_since: None,
            passed_on: VecDeque::new(),
            sender,
            held_egress: None,
            namespace: namespace.to_owned(),
            addresses: pod.addresses.clone(),
            unacknowledged,
        })
    }

    /// Replaces the rules. Frames that are held stay held.
    pub(super) fn set_rules(&mut self, rules: &Rules) -> Next {
        self.rules = prepared(rules);
        for link in &mut self.links {
            link.pod_end.probes.answer_hooks(rules.suspends);
        }
        self.handle_frames()
    }

    /// Returns the descriptors that are readable when a frame has come.
    pub(super) fn fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.links.iter().map(|link| link.tap.as_fd())
    }

    /// Returns the time until the next call of [`Watch::handle_frames`] if no frame comes; none if
    /// no timer runs.
    pub(super) fn due_in(&mut self) -> Option<Duration> {
        let now = Instant::now();
        let again = self.sensor.next_deadline(now);
        let ends = self.links.iter_mut().map(|link| &mut link.pod_end);
        ends.flat_map(|end| [end.probes.next_deadline(now), end.doubts.settled_in(now)])
            .chain([again])
            .flatten()
            .min()
    }

    /// Reads and handles the frames that have come, and the timers that are due.
    pub(super) fn handle_frames(&mut self) -> Next {
        let now = Instant::now();
        let mut next = self.sensor.turn(now);
        let mut links = std::mem::take(&mut self.links);
        for (number, Link { tap, pod_end, .. }) in links.iter_mut().enumerate() {
            for settled in pod_end.doubts.settle(&self.rules.probes, now) {
                next = next.or(self.handle_settled(pod_end, settled, now));
            }
            for _ in 0..MAX_FRAMES {
                // A link that cannot be read causes no wake: the pod is being removed.
                let Ok(Some(frame)) = tap.receive() else {
                    break;
                };
                let handled = self.handle_frame(pod_end, frame, now);
                next = next.or(handled.next);
                if let Some(frame) = handled.pass_on {
                    // The sender repeats a frame that is lost.
                    let _ = with_sender(&frame, self.sender).map(|frame| tap.send(&frame));
                    self.record_passed_on(now, number, frame);
                }
            }
            pod_end.answer_probes(now);
        }
        self.links = links;
        next
    }

    fn handle_frame(&mut self, pod_end: &mut PodEnd, frame: &[u8], now: Instant) -> Handled {
        if self.answers_since.is_some()
            && let Some(answer) = neighbour::answer(ethernet(frame), &self.pod_ips, pod_end.address)
        {
            pod_end.send(answer);
            return Next::Nothing.into();
        }
        let received = segment(ethernet(frame), &self.pod_ips);
        if let Some(segment) = &received
            && self.handle_probe(pod_end, segment, frame, now)
        {
            return Next::Nothing.into();
        }
        if self.passes_all {
            return match meaning(ethernet(frame), &self.pod_ips) {
                Meaning::NotForPod => Next::Nothing.into(),
                _ => Handled::passed_on(frame),
            };
        }
        if let Some(segment) = received.filter(|segment| self.is_of_earlier_probe(segment, now)) {
            return self
                .record(Meaning::Quiet, frame, Some(segment), now)
                .into();
        }
        // No peer at a probed port gets a keepalive of ours. For a probe that is over, the
        // kubelet's kernel would repeat its last segment, like a peer that has read on.
        let is_probed = |segment: &Segment| self.rules.probes.contains(&segment.ends.local_port);
        let stack_answers = self.stack_answers();
        let kind = received.map(|segment| {
            let may_ask = !stack_answers && !is_probed(&segment);
            self.keepalives.hear(&segment, may_ask, now)
        });
        let waits_for_more = match kind {
            Some(keepalive::SegmentKind::WindowOpens) => true,
            // Data that a hibernated sandbox sent before its sleep may be acknowledged late.
            Some(keepalive::SegmentKind::AcknowledgesMore) => self.is_paused,
            _ => false,
        };
        if let Some(segment) = received.filter(|_| waits_for_more) {
            let cause = Cause::Tcp {
                port: segment.ends.local_port,
            };
            return self
                .record(Meaning::Wakes(cause), frame, received, now)
                .into();
        }
        // The network stack of a paused sandbox runs: it sends keepalives, and answers those of
        // peers. An acknowledgement changes nothing there that the image would have to contain.
        let is_acknowledgement = received.as_ref().is_some_and(Segment::has_no_data);
        if stack_answers && is_acknowledgement {
            return Handled::passed_on(frame);
        }
        if let Some(keepalive::SegmentKind::Unclear(keepalive)) = kind
            && let Some(keepalive) = keepalive.frame(ethernet(frame))
        {
            pod_end.send(keepalive);
        }
        if let Some(keepalive::SegmentKind::Keepalive(answer)) = kind
            && let Some(answer) = answer.frame(ethernet(frame))
        {
            pod_end.send(answer);
            return Next::Nothing.into();
        }
        self.record_by_meaning(frame, received, now).into()
    }

    /// Reports whether the sandbox's network stack answers keepalives and sends its own.
    fn stack_answers(&self) -> bool {
        self.is_paused && self.answers_since.is_none()
    }

    /// Hands a segment over to its probe, or begins a probe with it.
    ///
    /// Returns false if the segment belongs to no probe and is not the first one of a probe, or if
    /// there is no room for another probe.
    fn handle_probe(
        &mut self,
        pod_end: &mut PodEnd,
        segment: &Segment,
        frame: &[u8],
        now: Instant,
    ) -> bool {
        let ends = &segment.ends;
        if pod_end.probes.has(ends) {
            pod_end.probes.hear(ethernet(frame), now);
            return true;
        }
        if !is_probe(&mut self.kubelet, &self.rules.probes, segment) {
            return false;
        }
        match self.rules.hooks.contains(&ends.local_port) {
            true => pod_end.doubts.add(ends, frame, now),
            false => pod_end.begin_probe(ends, frame, now),
        }
    }

    /// Reports whether the segment has data on a connection that a probe made before the sandbox
    /// was paused.
    ///
    /// Such data gets no answer, as if it had come a moment before the pause: the agent waits for
    /// probes that are under way. Mostly the data only announces the end of the connection.
    fn is_of_earlier_probe(&mut self, segment: &Segment, now: Instant) -> bool {
        let ends = &segment.ends;
        let (probes, hooks) = (&self.rules.probes, &self.rules.hooks);
        let is_probed = |port| probes.contains(port) && !hooks.contains(port);
        if segment.begins() || segment.length == 0 || !is_probed(&ends.local_port) {
            return false;
        }
        match self.kubelet.owner_of(ends) {
            Ok(Owner::Kubelet) => true,
            // No process of this machine waits for an answer any more.
            Ok(Owner::Kernel) => now.saturating_duration_since(self.began) < PROBE_CLOSE_TIME,
            Ok(Owner::Process | Owner::Nobody) | Err(_) => false,
        }
    }

    fn handle_settled(&mut self, pod_end: &mut PodEnd, settled: Decision, now: Instant) -> Next {
        match settled {
            Decision::Probe { ends, frame } => {
                // If there is no room for the probe, the kubelet's kernel sends the frame again.
                pod_end.begin_probe(&ends, &frame, now);
                Next::Nothing
            }
            Decision::Other { frame } => {
                let received = segment(ethernet(&frame), &self.pod_ips);
                self.record_by_meaning(&frame, received, now)
            }
        }
    }

    /// Records a frame in the sensor by the meaning that it has for the pod.
    fn record_by_meaning(&mut self, frame: &[u8], segment: Option<Segment>, now: Instant) -> Next {
        let meaning = meaning(ethernet(frame), &self.pod_ips);
        self.record(meaning, frame, segment, now)
    }

    /// Records a frame in the sensor.
    fn record(
        &mut self,
        meaning: Meaning,
        frame: &[u8],
        segment: Option<Segment>,
        now: Instant,
    ) -> Next {
        let content = segment.map(|segment| segment.says());
        let meaning = meaning.for_pod_that_wakes_on(&self.rules.wake_on);
        self.sensor.arrived(frame, content, meaning, now)
    }

    /// Records that the sandbox is paused and still has its memory and its address.
    pub(super) fn paused(&mut self) -> Next {
        self.is_paused = true;
        self.sensor.asleep(Instant::now())
    }

    /// Begins to answer for the paused sandbox, whose processes are about to be stopped. From now
    /// on no frame is passed on to the sandbox.
    pub(super) fn begin_answers(&mut self) -> anyhow::Result<Next> {
        ensure!(
            self.is_paused && !self.passes_all,
            "the sandbox does not doze"
        );
        self.answers_since = Some(Instant::now());
        self.keepalives.end_late_acknowledgements();
        let next = self.handle_frames();
        self.probe_passed_on();
        Ok(next)
    }

    /// Reports whether the sandbox's processes must be stopped by now.
    pub(super) fn must_be_stopped(&self) -> bool {
        self.answers_since
            .is_some_and(|at| at.elapsed() > READ_TIME)
    }

    /// Ends the answers: the sandbox's network stack, if there is one, answers.
    pub(super) fn end_answers(&mut self) {
        self.answers_since = None;
    }

    fn record_passed_on(&mut self, now: Instant, link: usize, frame: Vec<u8>) {
        if self.passes_all {
            // The processes of a frozen sandbox are not stopped.
            return;
        }
        let is_old =
            |(at, _, _): &(Instant, usize, Vec<u8>)| now.saturating_duration_since(*at) > READ_TIME;
        while self.passed_on.front().is_some_and(is_old) || self.passed_on.len() >= MAX_PASSED_ON {
            self.passed_on.pop_front();
        }
        self.passed_on.push_back((now, link, frame));
    }

    /// Sends keepalives to the peers whose frames were passed on a moment ago.
    ///
    /// Such a frame may report that the peer has read on, and the sandbox may not have read the
    /// frame. A sandbox that has read it sends more data at once, and the peer acknowledges that.
    fn probe_passed_on(&mut self) {
        let now = Instant::now();
        for (_, link, frame) in std::mem::take(&mut self.passed_on) {
            let received = segment(ethernet(&frame), &self.pod_ips);
            let keepalive = received.and_then(|segment| self.keepalives.probe_again(&segment, now));
            if let (Some(keepalive), Some(link)) = (keepalive, self.links.get(link))
                && let Some(keepalive) = keepalive.frame(ethernet(&frame))
            {
                link.pod_end.send(keepalive);
            }
        }
    }

    /// Records that the sandbox's user has frozen it: it is paused, and no packet wakes it.
    pub(super) fn frozen(&mut self) -> Next {
        self.end_answers();
        self.passes_all = true;
        self.paused()
    }

    /// Passes on no more frames with data: the memory is about to be written, and no image would
    /// contain the effect of later frames.
    pub(super) fn hold(&mut self) {
        self.passes_all = false;
    }

    /// Records that the sandbox's processes have ended. Puts the pod's address back, so that peers
    /// still find the link on which the pod is.
    pub(super) fn hibernated(&mut self) -> Next {
        self.is_hibernated = true;
        self.is_paused = false;
        self.passes_all = false;
        self.answers_since = None;
        address::put_back(&self.namespace, &self.addresses);
        self.sensor.asleep(Instant::now())
    }

    /// Reports whether [`Watch::hibernated`] was called.
    pub(super) fn is_hibernated(&self) -> bool {
        self.is_hibernated
    }

    /// Reports whether the sandbox sleeps or wakes, by the recorded events.
    pub(super) fn is_asleep(&self) -> bool {
        self.sensor.is_asleep()
    }

    /// Records that a wake has failed: the sandbox does not run. The wake may have taken the pod's
    /// address, without which no peer finds the pod and no packet wakes it.
    pub(super) fn wake_failed(&mut self) {
        if self.is_hibernated {
            address::put_back(&self.namespace, &self.addresses);
        }
        self.sensor.wake_failed(Instant::now());
    }

    /// Holds the packets that the sandbox sends. Discards those of an earlier restore that failed.
    pub(super) fn hold_egress(&mut self) -> anyhow::Result<()> {
        match &mut self.held_egress {
            Some(held) => held.discard(),
            None => {
                let pairs: Vec<Pair> = self.links.iter().map(|link| link.pair).collect();
                let held = HeldEgress::begin(&self.namespace, &pairs, self.sender)?;
                self.held_egress = Some(held);
            }
        }
        self.send_as(Some(self.sender));
        Ok(())
    }

    /// Returns the descriptors that keep up the drop of packets to the pod and, during a restore,
    /// of packets from the pod. A process with copies of them keeps up the drop after this process
    /// has ended.
    pub(super) fn drop_links(&self) -> Vec<BorrowedFd<'_>> {
        let egress = self.held_egress.iter().flat_map(HeldEgress::links);
        egress.chain(self.packet_drop.links()).collect()
    }

    /// Sets the sender of the keeper's frames from the pod's ends; none: the pod.
    fn send_as(&mut self, sender: Option<Sender>) {
        for link in &mut self.links {
            link.pod_end.sender = sender;
        }
    }
}

/// Makes the preparations for `rules` that take long. They are best made while the sandbox runs.
pub(super) fn prepare(rules: &Rules) {
    if !rules.tls_probes.is_empty() {
        probes::expect_tls();
    }
}

/// Prepares for the rules, and returns them as this keeper applies them: it answers probes over
/// TLS, too.
fn prepared(rules: &Rules) -> Rules {
    prepare(rules);
    rules.clone().with_tls()
}

/// The result for a frame.
struct Handled {
    next: Next,
    /// The frame, if the sandbox gets it at once.
    pass_on: Option<Vec<u8>>,
}

impl Handled {
    fn passed_on(frame: &[u8]) -> Self {
        Self {
            next: Next::Nothing,
            pass_on: Some(frame.to_vec()),
        }
    }
}

impl From<Next> for Handled {
    fn from(next: Next) -> Self {
        Self {
            next,
            pass_on: None,
        }
    }
}

/// Reports whether the sandbox has not answered a packet that came a moment ago.
///
/// The program may not even have read the packet. Then only the peer has the request, and waits.
/// The answer to an older packet may take its time.
fn owes_answer(traffic_map: Option<TrafficMap>, rules: &Rules) -> bool {
    let unanswered = traffic_map.and_then(|map| traffic::unanswered(map, &rules.probes).ok()?);
    unanswered.is_some_and(|ago| ago < ANSWER_LIMIT) && Cause::Earlier.is_wanted(&rules.wake_on)
}

/// Reports whether the segment begins a probe of the kubelet. If the kernel does not report the
/// owner of the connection, the segment counts as one of another client.
fn is_probe(kubelet: &mut Kubelet, ports: &[u16], segment: &Segment) -> bool {
    segment.begins()
        && ports.contains(&segment.ends.local_port)
        && kubelet.owns(&segment.ends).unwrap_or(false)
}

#[cfg(test)]
mod tests;
