//! The pause container's keeper watches the pod's link while its sandbox is saved, sleeps and wakes: see `torpor-wake`.

use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use torpor_gvisor::hush::Hush;
use torpor_gvisor::net;
use torpor_gvisor::record::PodRecord;
use torpor_wake::owner::Kubelet;
use torpor_wake::packet::{Tcp, meaning, tcp};
use torpor_wake::probes::Responder;
use torpor_wake::sensor::{Next, Sensor};
use torpor_wake::tap::{Mouth, Tap, ethernet};

/// Between two looks at the requests; a flood does not keep the keeper from answering.
const FRAMES_A_TURN: usize = 256;

pub(super) struct Watch {
    /// What arrives waits, and the pod hears nothing.
    _hush: Hush,
    sensor: Sensor,
    links: Vec<Link>,
    own: Vec<IpAddr>,
    probed_ports: Vec<u16>,
    kubelet: Kubelet,
    /// The sandbox' processes have ended and its address was put back.
    is_home: bool,
}

/// One of the pod's links.
struct Link {
    tap: Tap,
    mouth: Mouth,
    probes: Responder,
}

impl Watch {
    /// From now on the pod hears nothing, what arrives for it waits, and the kubelet's probes of these ports are answered.
    pub(super) fn begin(
        pod: &PodRecord,
        probed_ports: &[u16],
        kubelet_port: u16,
    ) -> anyhow::Result<Self> {
        let namespace = pod.network_namespace.as_deref();
        let namespace = namespace.context("the pod has no network namespace of its own")?;
        let own = pod.addresses.ips()?;
        // In this order: what comes in between is lost as on any link. The other way round it would be heard twice.
        let hush = Hush::begin(namespace)?;
        Ok(Self {
            _hush: hush,
            sensor: Sensor::default(),
            links: links(namespace, &own)?,
            own,
            probed_ports: probed_ports.to_vec(),
            kubelet: Kubelet::at(kubelet_port),
            is_home: false,
        })
    }

    pub(super) fn fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.links.iter().map(|link| link.tap.as_fd())
    }

    /// When there is something to do although nothing has come.
    pub(super) fn turn_again(&mut self) -> Option<Duration> {
        let now = Instant::now();
        self.links
            .iter_mut()
            .filter_map(|link| link.probes.turn_again(now))
            .min()
    }

    /// Reads what has come.
    pub(super) fn turn(&mut self) -> Next {
        let now = Instant::now();
        let mut next = Next::Nothing;
        for link in &mut self.links {
            for _ in 0..FRAMES_A_TURN {
                // A link that cannot be read any more wakes nobody; the pod is being taken away.
                let Ok(Some(frame)) = link.tap.receive() else {
                    break;
                };
                if let Some(segment) = tcp(ethernet(frame), &self.own)
                    && (link.probes.has(&segment)
                        || is_probe(&mut self.kubelet, &self.probed_ports, &segment)
                            && link.probes.begin(&segment, ethernet(frame), now))
                {
                    link.probes.hear(ethernet(frame), now);
                    continue;
                }
                let meaning = meaning(ethernet(frame), &self.own);
                match self.sensor.arrived(frame, meaning, now) {
                    Next::Nothing => {}
                    wake => next = wake,
                }
            }
            link.speak(now);
        }
        next
    }

    /// The sandbox stands still: its memory is in it, and so is its address.
    pub(super) fn standing(&mut self) -> Next {
        self.sensor.asleep(Instant::now())
    }

    /// The sandbox' processes have ended. Its address is put back, so that others still find the link that it is on.
    pub(super) fn asleep(&mut self, pod: &PodRecord) -> Next {
        self.is_home = true;
        if let Some(namespace) = &pod.network_namespace
            && let Err(error) = net::put_back(namespace, &pod.addresses)
        {
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

    /// The sandbox runs: it hears again, first what has waited for it.
    pub(super) fn release(mut self) {
        let _ = self.turn();
        let Self {
            _hush: hush,
            links,
            mut sensor,
            ..
        } = self;
        drop(hush);
        // All on the first link, which for a pod with several may be another than they came on: its address is the same.
        let Some(link) = links.first() else { return };
        for frame in sensor.release() {
            // What does not get through is sent again by who wants to be heard.
            let _ = link.tap.send(&frame);
        }
    }
}

impl Link {
    fn speak(&mut self, now: Instant) {
        self.probes.turn(now);
        while let Some(frame) = self.probes.says() {
            // The kubelet asks again.
            let _ = self.mouth.send(&frame);
        }
    }
}

/// When the kernel does not say whose it is, it is somebody who wants the sandbox.
fn is_probe(kubelet: &mut Kubelet, ports: &[u16], segment: &Tcp) -> bool {
    segment.begins && ports.contains(&segment.local_port) && kubelet.owns(segment).unwrap_or(false)
}

fn links(namespace: &Path, own: &[IpAddr]) -> anyhow::Result<Vec<Link>> {
    let pairs = net::pairs(namespace)?;
    ensure!(
        !pairs.is_empty(),
        "the pod's link has no end on the host (only veth pairs have one)"
    );
    let links = pairs.into_iter().map(|pair| {
        Ok(Link {
            tap: Tap::open(pair.host)?,
            mouth: net::inside(namespace, || Mouth::open(pair.pod))??,
            probes: Responder::new(own, Instant::now()),
        })
    });
    links.collect()
}
