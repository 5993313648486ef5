//! The pause container's keeper watches the pod's link while its sandbox is saved, sleeps and wakes: see `torpor-link`.

use std::collections::VecDeque;
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use torpor_link::doubt::{Doubts, Settled};
use torpor_link::keepalive::{self, Keepalives};
use torpor_link::neighbour;
use torpor_link::net::{self, Pair};
use torpor_link::owner::{Kubelet, Owner};
use torpor_link::packet::{Cause, Ends, Meaning, Segment, is_tcp, meaning, segment};
use torpor_link::packet_drop::{PacketDrop, Sender};
use torpor_link::probes::{self, Responder};
use torpor_link::sensor::{Next, Sensor};
use torpor_link::tap::{HEADER, Mouth, Tap, ethernet};
use torpor_link::traffic;
use torpor_link::unacknowledged::NOT_OF_SANDBOX;
use torpor_records::Addresses;
use torpor_records::PodRecord;
use torpor_records::{TrafficMap, UnacknowledgedMap};
use torpor_runsc::keeper::Rules;

use super::egress_hold::Muted;
use super::questions;

/// A sandbox gets to what is passed on to it within milliseconds, unless it gets no processor.
const IN_HAND: Duration = Duration::from_secs(1);
const MOST_IN_HAND: usize = 256;

/// Between two looks at the requests; a flood does not keep the keeper from answering.
const FRAMES_A_TURN: usize = 256;

/// So often what came while frames were handed over is handed over too.
const HANDOVERS: usize = 8;

/// Where an Ethernet frame says who sent it.
pub(super) const SENDER: std::ops::Range<usize> = 6..12;

/// Who made a probe that nobody answers closes its connection when its time is over, which is seldom more than this.
const LEAVE: Duration = Duration::from_secs(10);

/// As long as a sandbox that was woken runs at least.
const ANSWER_LIMIT: Duration = Duration::from_secs(10);

pub(super) struct Watch {
    began: Instant,
    /// What arrives waits, and the pod hears nothing.
    hush: PacketDrop,
    sensor: Sensor,
    keepalives: Keepalives,
    links: Vec<Link>,
    own: Vec<IpAddr>,
    rules: Rules,
    kubelet: Kubelet,
    /// The sandbox' processes have ended and its address was put back.
    is_home: bool,
    /// The sandbox is there and stands still: acknowledgements are passed on to it.
    stands: bool,
    /// And no image has to know of what it hears: all but probes is.
    passes_on: bool,
    /// Since when its processes are stopped, or about to be: what it is to say is said for it, also where its address is.
    halted: Option<Instant>,
    /// What was passed on to it a moment ago, with the number of the link: it may not have got to it before it is stopped.
    passed_on: VecDeque<(Instant, usize, Vec<u8>)>,
    /// Frames of this sender are heard in the pod, and those of the pod's keeper outside while it is muted.
    sender: Sender,
    /// While it is restored.
    muted: Option<Muted>,
    namespace: PathBuf,
    addresses: Addresses,
    /// Where the connections are on which something of the sandbox is on its way.
    noted: Option<UnacknowledgedMap>,
}

/// One of the pod's links.
struct Link {
    pair: Pair,
    tap: Tap,
    voice: Voice,
}

/// Speaks for the pod on one of its links.
struct Voice {
    mouth: Mouth,
    /// Of the pod on this link.
    address: [u8; 6],
    /// As whom it is heard while the pod is muted.
    muted: Option<Sender>,
    probes: Responder,
    doubts: Doubts,
}

impl Watch {
    /// From now on the pod hears nothing, what arrives for it waits, and the kubelet's probes are answered.
    /// `seen`: where the times of the pod's packets are; `noted`: and what nobody has acknowledged.
    pub(super) fn begin(
        pod: &PodRecord,
        rules: &Rules,
        kubelet_port: u16,
        seen: Option<TrafficMap>,
        noted: Option<UnacknowledgedMap>,
    ) -> anyhow::Result<Self> {
        let namespace = pod.network_namespace.as_deref();
        let namespace = namespace.context("the pod has no network namespace of its own")?;
        let own = net::ips(&pod.addresses)?;
        let rules = known(rules);
        // In this order: what comes in between is lost as on any link. The other way round it would be heard twice.
        let sender = Sender::random();
        let hush = PacketDrop::begin(namespace, Some(sender))?;
        let mut sensor = Sensor::default();
        if owes_answer(seen, &rules) {
            sensor.came_before();
        }
        Ok(Self {
            began: Instant::now(),
            hush,
            sensor,
            keepalives: Keepalives::begin(Instant::now()),
            links: links(namespace, &own, &rules)?,
            own,
            rules,
            kubelet: Kubelet::at(kubelet_port),
            is_home: false,
            stands: false,
            passes_on: false,
            halted: None,
            passed_on: VecDeque::new(),
            sender,
            muted: None,
            namespace: namespace.to_owned(),
            addresses: pod.addresses.clone(),
            noted,
        })
    }

    /// From now on other rules apply. What waits for the sandbox goes on waiting.
    pub(super) fn set_rules(&mut self, rules: &Rules) -> Next {
        self.rules = known(rules);
        for link in &mut self.links {
            link.voice.probes.answer_hooks(rules.suspends);
        }
        self.turn()
    }

    pub(super) fn fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.links.iter().map(|link| link.tap.as_fd())
    }

    /// When there is something to do although nothing has come.
    pub(super) fn turn_again(&mut self) -> Option<Duration> {
        let now = Instant::now();
        let again = self.sensor.turn_again(now);
        let voices = self.links.iter_mut().map(|link| &mut link.voice);
        voices
            .flat_map(|voice| [voice.probes.turn_again(now), voice.doubts.settled_in(now)])
            .chain([again])
            .flatten()
            .min()
    }

    /// Reads what has come.
    pub(super) fn turn(&mut self) -> Next {
        let now = Instant::now();
        let mut next = self.sensor.turn(now);
        let mut links = std::mem::take(&mut self.links);
        for (number, Link { tap, voice, .. }) in links.iter_mut().enumerate() {
            for settled in voice.doubts.settle(&self.rules.probes, now) {
                next = next.or(self.settled(voice, settled, now));
            }
            for _ in 0..FRAMES_A_TURN {
                // A link that cannot be read any more wakes nobody; the pod is being taken away.
                let Ok(Some(frame)) = tap.receive() else {
                    break;
                };
                let heard = self.hear(voice, frame, now);
                next = next.or(heard.next);
                if let Some(frame) = heard.pass_on {
                    // What gets lost is said again.
                    let _ = sent_by(&frame, self.sender).map(|frame| tap.send(&frame));
                    self.remember(now, number, frame);
                }
            }
            voice.speak(now);
        }
        self.links = links;
        next
    }

    fn hear(&mut self, voice: &mut Voice, frame: &[u8], now: Instant) -> Heard {
        if self.halted.is_some()
            && let Some(answer) = neighbour::answer(ethernet(frame), &self.own, voice.address)
        {
            voice.say(answer);
            return Next::Nothing.into();
        }
        let seen = segment(ethernet(frame), &self.own);
        if let Some(segment) = &seen
            && self.is_of_probe(voice, segment, frame, now)
        {
            return Next::Nothing.into();
        }
        if self.passes_on {
            return match meaning(ethernet(frame), &self.own) {
                Meaning::NotForPod => Next::Nothing.into(),
                _ => Heard::passed_on(frame),
            };
        }
        if let Some(segment) = seen.filter(|segment| self.is_left_of_probe(segment, now)) {
            return self.means(Meaning::Quiet, frame, Some(segment), now).into();
        }
        // Of a probe that is over the kubelet's kernel says again what it said last, when it is asked.
        let is_probed = |segment: &Segment| self.rules.probes.contains(&segment.ends.local_port);
        let speaks = self.speaks();
        let heard = seen.map(|segment| {
            let may_ask = !speaks && !is_probed(&segment);
            self.keepalives.hear(&segment, may_ask, now)
        });
        let waits_for_more = match heard {
            Some(keepalive::Heard::WindowOpens) => true,
            // What one that hibernates has said at last may be acknowledged late.
            Some(keepalive::Heard::AcknowledgesMore) => self.stands,
            _ => false,
        };
        if let Some(segment) = seen.filter(|_| waits_for_more) {
            let cause = Cause::Tcp {
                port: segment.ends.local_port,
            };
            return self.means(Meaning::Wakes(cause), frame, seen, now).into();
        }
        // Its network stack runs while its programs stand still, sends keepalives of its own, and answers those of peers.
        // An acknowledgement changes nothing there that the image would have to know of.
        let says_nothing = seen.as_ref().is_some_and(Segment::says_nothing);
        if speaks && says_nothing {
            return Heard::passed_on(frame);
        }
        if let Some(keepalive::Heard::Unclear(question)) = heard
            && let Some(question) = question.frame(ethernet(frame))
        {
            voice.say(question);
        }
        if let Some(keepalive::Heard::Keepalive(answer)) = heard
            && let Some(answer) = answer.frame(ethernet(frame))
        {
            voice.say(answer);
            return Next::Nothing.into();
        }
        self.arrived(frame, seen, now).into()
    }

    /// Whether the sandbox answers keepalives and sends its own.
    fn speaks(&self) -> bool {
        self.stands && self.halted.is_none()
    }

    /// Whether the segment belongs to a probe, which has been told of it, or may be a probe's first.
    fn is_of_probe(
        &mut self,
        voice: &mut Voice,
        segment: &Segment,
        frame: &[u8],
        now: Instant,
    ) -> bool {
        let ends = &segment.ends;
        if voice.probes.has(ends) {
            voice.probes.hear(ethernet(frame), now);
            return true;
        }
        if !is_probe(&mut self.kubelet, &self.rules.probes, segment) {
            return false;
        }
        match self.rules.hooks.contains(&ends.local_port) {
            true => voice.doubts.add(ends, frame, now),
            false => voice.probe(ends, frame, now),
        }
    }

    /// Whether somebody says something on a connection that a probe had made before the sandbox stood still. What it asks nobody answers, as when it
    /// had been heard a moment before: the agent waits for probes that are under way. Mostly it takes its leave.
    fn is_left_of_probe(&mut self, segment: &Segment, now: Instant) -> bool {
        let ends = &segment.ends;
        let (probes, hooks) = (&self.rules.probes, &self.rules.hooks);
        let is_at_probed = |port| probes.contains(port) && !hooks.contains(port);
        if segment.begins() || segment.length == 0 || !is_at_probed(&ends.local_port) {
            return false;
        }
        match self.kubelet.owner_of(ends) {
            Ok(Owner::Kubelet) => true,
            // Nobody of this machine waits for an answer any more.
            Ok(Owner::Kernel) => now.saturating_duration_since(self.began) < LEAVE,
            Ok(Owner::Process | Owner::Nobody) | Err(_) => false,
        }
    }

    fn settled(&mut self, voice: &mut Voice, settled: Settled, now: Instant) -> Next {
        match settled {
            Settled::Probe { ends, frame } => {
                // Where there is no room for it, the kubelet says it again.
                voice.probe(&ends, &frame, now);
                Next::Nothing
            }
            Settled::Other { frame } => {
                let seen = segment(ethernet(&frame), &self.own);
                self.arrived(&frame, seen, now)
            }
        }
    }

    fn arrived(&mut self, frame: &[u8], seen: Option<Segment>, now: Instant) -> Next {
        self.means(meaning(ethernet(frame), &self.own), frame, seen, now)
    }

    fn means(
        &mut self,
        meaning: Meaning,
        frame: &[u8],
        seen: Option<Segment>,
        now: Instant,
    ) -> Next {
        let says = seen.map(|segment| segment.says());
        let meaning = meaning.for_pod_that_wakes_on(&self.rules.wake_on);
        self.sensor.arrived(frame, says, meaning, now)
    }

    /// The sandbox stands still: its memory is in it, and so is its address.
    pub(super) fn standing(&mut self) -> Next {
        self.stands = true;
        self.sensor.asleep(Instant::now())
    }

    /// The processes of the sandbox, which stands still, are about to be stopped. Nothing is passed on to it from now on.
    pub(super) fn halt(&mut self) -> anyhow::Result<Next> {
        ensure!(self.stands && !self.passes_on, "the sandbox does not doze");
        self.halted = Some(Instant::now());
        self.keepalives.nothing_is_late();
        let next = self.turn();
        self.ask_again();
        Ok(next)
    }

    /// Whether what has the pod's address ought to be stopped by now.
    pub(super) fn is_halted(&self) -> bool {
        self.halted.is_some_and(|at| at.elapsed() > IN_HAND)
    }

    /// The sandbox' network stack, if there is one, speaks for itself.
    pub(super) fn go_on(&mut self) {
        self.halted = None;
    }

    fn remember(&mut self, now: Instant, link: usize, frame: Vec<u8>) {
        if self.passes_on {
            // One that is frozen is not stopped.
            return;
        }
        let is_old =
            |(at, _, _): &(Instant, usize, Vec<u8>)| now.saturating_duration_since(*at) > IN_HAND;
        while self.passed_on.front().is_some_and(is_old) || self.passed_on.len() >= MOST_IN_HAND {
            self.passed_on.pop_front();
        }
        self.passed_on.push_back((now, link, frame));
    }

    /// Somebody may have said that he has read on, and the sandbox not have heard it any more: it would have said more at once, and been answered.
    fn ask_again(&mut self) {
        let now = Instant::now();
        for (_, link, frame) in std::mem::take(&mut self.passed_on) {
            let said = segment(ethernet(&frame), &self.own);
            let question = said.and_then(|said| self.keepalives.ask_again(&said, now));
            if let (Some(question), Some(link)) = (question, self.links.get(link))
                && let Some(question) = question.frame(ethernet(&frame))
            {
                link.voice.say(question);
            }
        }
    }

    /// The sandbox stands still and nobody wakes it: its user has frozen it.
    pub(super) fn frozen(&mut self) -> Next {
        self.go_on();
        self.passes_on = true;
        self.standing()
    }

    /// Its memory is about to be written: what reached it from now on would be in no image.
    pub(super) fn hold(&mut self) {
        self.passes_on = false;
    }

    /// The sandbox' processes have ended. Its address is put back, so that others still find the link that it is on.
    pub(super) fn asleep(&mut self) -> Next {
        self.is_home = true;
        self.stands = false;
        self.passes_on = false;
        self.halted = None;
        if let Err(error) = net::put_back(&self.namespace, &self.addresses) {
            // The wake puts it back too; until then nobody finds the pod.
            eprintln!("torpor-oci: {:#}", anyhow::Error::new(error));
        }
        self.sensor.asleep(Instant::now())
    }

    /// Whether [`Watch::asleep`] was told.
    pub(super) fn is_home(&self) -> bool {
        self.is_home
    }

    pub(super) fn is_asleep(&self) -> bool {
        self.sensor.is_asleep()
    }

    pub(super) fn wake_failed(&mut self) {
        self.sensor.wake_failed(Instant::now());
    }

    /// From now on what the sandbox says is not heard outside. What one has said that was to be restored before, and was not, nobody hears.
    pub(super) fn mute(&mut self) -> anyhow::Result<()> {
        match &mut self.muted {
            Some(muted) => muted.forget(),
            None => {
                let pairs: Vec<Pair> = self.links.iter().map(|link| link.pair).collect();
                self.muted = Some(Muted::begin(&self.namespace, &pairs, self.sender)?);
            }
        }
        self.speak_as(Some(self.sender));
        Ok(())
    }

    /// What keeps the pod from hearing and, while it is muted, from being heard. Whoever has copies of these goes on with that when this process
    /// has ended.
    pub(super) fn barriers(&self) -> Vec<BorrowedFd<'_>> {
        let muted = self.muted.iter().flat_map(Muted::links);
        muted.chain(self.hush.links()).collect()
    }

    fn speak_as(&mut self, sender: Option<Sender>) {
        for link in &mut self.links {
            link.voice.muted = sender;
        }
    }

    /// The sandbox runs: it is heard, first what it has said meanwhile, and hears again, first what has waited for it. To take the programs off
    /// its links takes longer than that, and nobody who speaks with it waits for it.
    pub(super) fn release(mut self) {
        self.go_on();
        // It answers for itself, also what was not settled.
        self.rules.probes.clear();
        // One that was woken at once may not have been seen asleep.
        let restored = self.is_home || self.muted.is_some();
        let mut muted = self.muted.take();
        if let Some(muted) = &mut muted {
            muted.end();
            self.speak_as(None);
        }
        // What comes meanwhile is not to overtake what has waited, so that is sent under the hush. A flood does not hold the sandbox back.
        for _ in 0..HANDOVERS {
            if !self.hand_over(|_| true) {
                break;
            }
        }
        if restored {
            self.remind();
            self.hand_over(|_| true);
        }
        self.hush.open();
        self.passes_on = false;
        // What came in the instant before. It may have been heard: TCP takes a segment twice.
        self.hand_over(is_tcp);
        if restored {
            self.ask();
        }
        // Its programs are taken off last, too.
        drop(muted);
    }

    /// Answers whether anything had come.
    fn hand_over(&mut self, which: impl Fn(&[u8]) -> bool) -> bool {
        let _ = self.turn();
        let frames = self.sensor.release();
        // All on the first link, which for a pod with several may be another than they came on: its address is the same.
        let Some(link) = self.links.first() else {
            return false;
        };
        let wanted = frames.iter().filter(|frame| which(ethernet(frame)));
        for frame in wanted.filter_map(|frame| sent_by(frame, self.sender)) {
            // What does not get through is sent again by who wants to be heard.
            let _ = link.tap.send(&frame);
        }
        !frames.is_empty()
    }

    /// gVisor has forgotten what it was to say again: see [`torpor_link::reminder`]. After what has waited, whose numbers come before.
    fn remind(&self) {
        let Some(link) = self.links.first() else {
            return;
        };
        let (from, to) = (self.sender.address(), link.pair.pod_address);
        let reminders = self.keepalives.reminders();
        for frame in reminders.filter_map(|reminder| reminder.frame(from, to)) {
            let frame = [&[0_u8; HEADER][..], frame.as_slice()].concat();
            // One that is lost leaves it as it was.
            let _ = link.tap.send(&frame);
        }
    }

    /// Those who may not have all that the sandbox has said, and wait: see [`torpor_link::question`].
    fn ask(self) {
        let Some((link, noted)) = self.links.first().zip(self.noted) else {
            return;
        };
        for frame in questions::frames(noted, &self.own, link.pair.pod_address) {
            link.voice.say(frame);
        }
    }
}

/// Does ahead, while the sandbox runs, what would take long once it stands still.
pub(super) fn prepare(rules: &Rules) {
    if !rules.tls_probes.is_empty() {
        probes::expect_tls();
    }
}

/// What is gone by here, where probes over TLS are answered, too.
fn known(rules: &Rules) -> Rules {
    prepare(rules);
    rules.clone().with_tls()
}

/// What follows from a frame.
struct Heard {
    next: Next,
    /// To be heard by the sandbox at once.
    pass_on: Option<Vec<u8>>,
}

impl Heard {
    fn passed_on(frame: &[u8]) -> Self {
        Self {
            next: Next::Nothing,
            pass_on: Some(frame.to_vec()),
        }
    }
}

impl From<Next> for Heard {
    fn from(next: Next) -> Self {
        Self {
            next,
            pass_on: None,
        }
    }
}

/// The frame, as the tap gave it, from another sender.
pub(super) fn sent_by(frame: &[u8], sender: Sender) -> Option<Vec<u8>> {
    let mut frame = frame.to_vec();
    set_sender(frame.get_mut(HEADER..)?, sender);
    Some(frame)
}

fn set_sender(ethernet: &mut [u8], sender: Sender) {
    if let Some(field) = ethernet.get_mut(SENDER) {
        field.copy_from_slice(&sender.address());
    }
}

impl Voice {
    /// Answers a probe from its first frame on, if there is room for another.
    fn probe(&mut self, ends: &Ends, frame: &[u8], now: Instant) -> bool {
        let begun = self.probes.begin(ends, ethernet(frame), now);
        if begun {
            self.probes.hear(ethernet(frame), now);
        }
        begun
    }

    fn speak(&mut self, now: Instant) {
        self.probes.turn(now);
        while let Some(frame) = self.probes.says() {
            self.say(frame);
        }
    }

    /// What is lost is said again when it is asked for again.
    fn say(&self, mut frame: Vec<u8>) {
        if let Some(sender) = self.muted {
            set_sender(&mut frame, sender);
        }
        let _ = self.mouth.send(&frame);
    }
}

/// Whether the sandbox was asked something a moment ago and has not answered. The program may not even have read it: then nobody but the
/// one who asked knows, and that one waits. Of what came longer ago the answer may take its time.
fn owes_answer(seen: Option<TrafficMap>, rules: &Rules) -> bool {
    let asked = seen.and_then(|watch| traffic::unanswered(watch, &rules.probes).ok()?);
    asked.is_some_and(|ago| ago < ANSWER_LIMIT) && Cause::Earlier.is_wanted(&rules.wake_on)
}

/// When the kernel does not say whose it is, it is somebody who wants the sandbox.
fn is_probe(kubelet: &mut Kubelet, ports: &[u16], segment: &Segment) -> bool {
    segment.begins()
        && ports.contains(&segment.ends.local_port)
        && kubelet.owns(&segment.ends).unwrap_or(false)
}

fn links(namespace: &Path, own: &[IpAddr], rules: &Rules) -> anyhow::Result<Vec<Link>> {
    let pairs = net::pairs(namespace)?;
    ensure!(
        !pairs.is_empty(),
        "the pod's link has no end on the host (only veth pairs have one)"
    );
    ensure!(
        !pairs.iter().any(|pair| pair.is_bypassed),
        "packets reach the pod without passing the host's end of its link, where Torpor watches them: let the CNI plugin pass them through it \
         (Cilium: bpf.hostLegacyRouting=true; Calico: bpfRedirectToPeer: Disabled), and recreate the pod"
    );
    let links = pairs.into_iter().map(|pair| {
        let mut probes = Responder::new(own, Instant::now());
        probes.answer_hooks(rules.suspends);
        Ok(Link {
            pair,
            tap: Tap::open(pair.host)?,
            voice: Voice {
                muted: None,
                address: pair.pod_address,
                mouth: net::inside(namespace, || Mouth::open(pair.pod, NOT_OF_SANDBOX))??,
                probes,
                doubts: Doubts::default(),
            },
        })
    });
    links.collect()
}

#[cfg(test)]
mod tests;
