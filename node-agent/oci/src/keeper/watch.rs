//! The pause container's keeper watches the pod's link while its sandbox is saved, sleeps and wakes: see `torpor-wake`.

use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Instant;

use anyhow::{Context, ensure};
use torpor_gvisor::hush::Hush;
use torpor_gvisor::net;
use torpor_gvisor::record::PodRecord;
use torpor_wake::packet::meaning;
use torpor_wake::sensor::{Next, Sensor};
use torpor_wake::tap::{Tap, ethernet};

/// Between two looks at the requests; a flood does not keep the keeper from answering.
const FRAMES_A_TURN: usize = 256;

pub(super) struct Watch {
    sensor: Sensor,
    taps: Vec<Tap>,
    own: Vec<IpAddr>,
    /// A sandbox that stands still hears for itself, and there is nothing to give it later.
    hush: Option<Hush>,
}

impl Watch {
    /// From now on the pod hears nothing, and what arrives for it waits.
    pub(super) fn holding(pod: &PodRecord) -> anyhow::Result<Self> {
        let namespace = pod.network_namespace.as_deref();
        let namespace = namespace.context("the pod has no network namespace of its own")?;
        // In this order: what comes in between is lost as on any link. The other way round it would be heard twice.
        let hush = Hush::begin(namespace)?;
        Ok(Self {
            sensor: Sensor::default(),
            taps: taps(pod)?,
            own: pod.addresses.ips()?,
            hush: Some(hush),
        })
    }

    /// The sandbox stands still: its network stack takes what arrives, and the first packet that wants an answer is told.
    pub(super) fn listening(pod: &PodRecord) -> anyhow::Result<Self> {
        Ok(Self {
            sensor: Sensor::listening(),
            taps: taps(pod)?,
            own: pod.addresses.ips()?,
            hush: None,
        })
    }

    pub(super) fn fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.taps.iter().map(AsFd::as_fd)
    }

    /// Reads what has come.
    pub(super) fn turn(&mut self) -> Next {
        let now = Instant::now();
        let mut next = Next::Nothing;
        for tap in &mut self.taps {
            for _ in 0..FRAMES_A_TURN {
                // A link that cannot be read any more wakes nobody; the pod is being taken away.
                let Ok(Some(frame)) = tap.next() else { break };
                let meaning = meaning(ethernet(frame), &self.own);
                match self.sensor.arrived(frame, meaning, now) {
                    Next::Nothing => {}
                    wake => next = wake,
                }
            }
        }
        next
    }

    /// The sandbox' processes have ended. Its address is put back, so that others still find the link that it is on.
    pub(super) fn asleep(&mut self, pod: &PodRecord) -> anyhow::Result<Next> {
        if let Some(namespace) = &pod.network_namespace {
            net::put_back(namespace, &pod.addresses)?;
        }
        Ok(self.sensor.asleep(Instant::now()))
    }

    pub(super) fn is_asleep(&self) -> bool {
        self.sensor.is_asleep()
    }

    pub(super) fn wake_failed(&mut self) {
        self.sensor.wake_failed(Instant::now());
    }

    /// The sandbox runs: it hears again, first what has waited for it.
    pub(super) fn release(mut self) {
        let _ = self.turn();
        drop(self.hush.take());
        // A pod with several links: each frame goes the way it came as long as there is one.
        let Some(tap) = self.taps.first() else { return };
        for frame in self.sensor.release() {
            // What does not get through is sent again by who wants to be heard.
            let _ = tap.send(&frame);
        }
    }
}

fn taps(pod: &PodRecord) -> anyhow::Result<Vec<Tap>> {
    let namespace = pod.network_namespace.as_deref();
    let namespace = namespace.context("the pod has no network namespace of its own")?;
    let taps = net::peers(namespace)?
        .into_iter()
        .map(Tap::open)
        .collect::<Result<Vec<_>, _>>()?;
    ensure!(
        !taps.is_empty(),
        "the pod's link has no end on the host (only veth pairs have one)"
    );
    Ok(taps)
}
