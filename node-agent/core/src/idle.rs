//! The time since which a sandbox has been idle. Pure: observations in, a time out.
//!
//! A sandbox is idle while all of this holds:
//! - no exec, copy or forwarded connection is open
//! - its processor time stays below a floor
//! - no packet but those of the kubelet's probes comes or goes
//! - its program has not marked itself as busy
//!
//! The first two are cheap and are observed every few seconds ([`Look`]). The other two cost a
//! process on the host. The agent therefore observes the other two ([`Inquiry`]) only when the
//! first two would let the sandbox fall asleep, and the idle time then counts from the last packet
//! on. A sandbox that receives a packet every minute and is to sleep after half an hour has
//! one inquiry in half an hour.

use std::time::Duration;

use jiff::Timestamp;

use crate::time::later;

/// Processor time that counts as idle, on average between two looks: a hundredth of one processor.
/// An idle gVisor with an idle Python or Node.js in it needs a tenth of that.
pub const CPU_FLOOR: f64 = 0.01;

/// gVisor counts processor time in ticks. Between two close looks, one tick above the average
/// proves nothing.
const TICK: Duration = Duration::from_millis(10);

/// A cheap observation of a running sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Look {
    pub at: Timestamp,
    /// The moment of the look by a clock that is never set and that stands still while the machine
    /// sleeps.
    pub up: Duration,
    /// Processor time that the programs of the sandbox have used since it started or was woken, by
    /// gVisor's count. gVisor counts a program as working while that program waits for the host's
    /// processors.
    pub cpu: Duration,
    /// Processor time by the host's count, where that count is known. The host's count includes
    /// gVisor's own part and that of probes.
    pub host: Option<HostTime>,
    /// An exec or a forwarded connection is open.
    pub in_use: bool,
    /// Time at which an exec last began or ended, or another caller last used the sandbox.
    pub last_use: Option<Timestamp>,
}

/// Processor time of a sandbox's cgroup since the cgroup was made.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct HostTime {
    pub used: Duration,
    pub probes: ProbeTime,
    /// Processor time that the Pod may use in a second; `None`: no limit.
    pub limit: Option<Duration>,
}

/// Sums over all exec probes that have ended.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ProbeTime {
    /// Processor time of the sandbox while the probes ran.
    pub used: Duration,
    /// Time for which the probes ran.
    pub took: Duration,
}

/// An expensive observation, made only before a sandbox falls asleep.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Inquiry {
    pub at: Timestamp,
    /// Time of the last packet that was not a probe's; `None`: there was none since the sandbox was
    /// made.
    pub last_packet: Option<Timestamp>,
    /// The program has marked itself as busy.
    pub busy: bool,
}

/// The state that is kept of a sandbox between its looks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IdleWatch {
    since: Timestamp,
    last_look: Option<Look>,
}

impl IdleWatch {
    /// Makes the state of a sandbox that has just been started or woken, or has not been observed
    /// before. The idle time begins now, whatever the sandbox did before.
    pub fn new(now: Timestamp) -> Self {
        Self {
            since: now,
            last_look: None,
        }
    }

    /// Records a look.
    pub fn look(&mut self, look: &Look) {
        let worked = self
            .last_look
            .is_some_and(|before| has_worked(&before, look));
        self.last_look = Some(*look);
        if look.in_use || worked {
            self.used(look.at);
        }
        if let Some(last) = look.last_use {
            // The time comes from a file: a time in the future is replaced by now.
            self.used(last.min(look.at));
        }
    }

    /// Records that the sandbox was paused at `at`, when the machine had run for `up`. The next
    /// look is then measured from here: a pause does not count as time for work.
    pub fn stood_still(&mut self, at: Timestamp, up: Duration) {
        if let Some(last_look) = &mut self.last_look {
            (last_look.at, last_look.up) = (at, up);
        }
    }

    /// Records an inquiry.
    pub fn inquired(&mut self, inquiry: &Inquiry) {
        if inquiry.busy {
            self.used(inquiry.at);
        }
        if let Some(last) = inquiry.last_packet {
            self.used(last.min(inquiry.at));
        }
    }

    fn used(&mut self, at: Timestamp) {
        self.since = self.since.max(at);
    }

    /// Returns the time since which the sandbox has been idle, by all observations.
    pub fn since(&self) -> Timestamp {
        self.since
    }

    /// Returns whether the sandbox has been idle for `after`, so that an inquiry is worth its cost.
    pub fn is_due(&self, after: Duration, now: Timestamp) -> bool {
        later(self.since, after) <= now
    }
}

/// Returns whether the sandbox worked between two looks: both counts of processor time have to show
/// work.
///
/// A clock that was set back counts as work, and so does processor time that went back (another
/// sandbox). The work is measured against the time in which the machine ran. A sleep of the
/// machine, or a clock that was set forward, therefore does not make the sandbox appear less busy.
fn has_worked(before: &Look, now: &Look) -> bool {
    let passed = (now.up.checked_sub(before.up)).filter(|_| now.at >= before.at);
    let Some(passed) = passed else {
        return true;
    };
    let in_gvisor = now.cpu.checked_sub(before.cpu);
    let on_host = before.host.zip(now.host);
    in_gvisor.is_none_or(|used| used > floor(passed))
        && on_host.is_none_or(|(before, now)| works_on_host(&before, &now, passed))
}

/// Returns whether the host's count shows work beside that of probes. If probes took most of the
/// time, a program could hide behind them: then all processor time counts.
fn works_on_host(before: &HostTime, now: &HostTime, passed: Duration) -> bool {
    let Some(used) = now.used.checked_sub(before.used) else {
        return true;
    };
    let probing = now.probes.took.saturating_sub(before.probes.took);
    if probing > passed / 2 {
        return used > floor_on_host(now.limit, passed);
    }
    let probes_used = now.probes.used.saturating_sub(before.probes.used);
    used.saturating_sub(probes_used) > floor_on_host(now.limit, passed - probing)
}

fn floor(passed: Duration) -> Duration {
    passed.mul_f64(CPU_FLOOR) + TICK
}

/// Returns the processor time that counts as idle on the host: at most half of the Pod's limit,
/// however small that limit is.
fn floor_on_host(limit: Option<Duration>, passed: Duration) -> Duration {
    let half = |limit: Duration| {
        // A limit above one processor is far above the floor and would only enlarge the numbers.
        let share = limit.as_secs_f64().min(1.0);
        passed.mul_f64(share / 2.0)
    };
    limit.map_or_else(|| floor(passed), |limit| half(limit).min(floor(passed)))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
    }

    fn look(second: i64, cpu_ms: u64) -> Look {
        Look {
            at: at(second),
            up: Duration::from_secs(second.unsigned_abs()),
            cpu: Duration::from_millis(cpu_ms),
            host: None,
            in_use: false,
            last_use: None,
        }
    }

    fn watched(looks: &[Look]) -> IdleWatch {
        let mut watch = IdleWatch::new(at(0));
        for look in looks {
            watch.look(look);
        }
        watch
    }

    #[test]
    fn a_sandbox_is_idle_since_its_last_work_or_use() {
        let open = |second| Look {
            in_use: true,
            ..look(second, 0)
        };
        let used = |second, last| Look {
            last_use: Some(at(last)),
            ..look(second, 0)
        };
        for (looks, since) in [
            // The first look shows no work: there is no earlier look to compare it with.
            (vec![look(10, 9_000)], 0),
            // A hundredth of a processor and one tick are idle; more is work.
            (vec![look(10, 0), look(20, 110)], 0),
            (vec![look(10, 0), look(20, 111)], 20),
            (vec![look(10, 0), look(20, 500), look(30, 500)], 20),
            // Another sandbox, or a clock that was set back.
            (vec![look(10, 500), look(20, 0)], 20),
            (vec![look(20, 0), look(10, 0)], 10),
            (vec![open(10), look(20, 0)], 10),
            // An exec that began and ended between two looks.
            (vec![look(10, 0), used(20, 13)], 13),
            (vec![used(20, 99)], 20),
        ] {
            assert_eq!(watched(&looks).since(), at(since), "{looks:?}");
        }
    }

    #[test]
    fn work_right_after_a_sleep_is_not_averaged_over_the_sleep() {
        let half_an_hour = 1800;
        let worked = look(10 + half_an_hour + 5, 3_000);
        let mut watch = watched(&[look(10, 0)]);
        watch.stood_still(at(10 + half_an_hour), Duration::from_secs(1810));
        watch.look(&worked);
        assert_eq!(watch.since(), worked.at);
        assert_eq!(watched(&[look(10, 0), worked]).since(), at(0));
        // Without an earlier look there is nothing to compare with.
        let mut watch = IdleWatch::new(at(0));
        watch.stood_still(at(5), Duration::from_secs(5));
        watch.look(&worked);
        assert_eq!(watch.since(), at(0));
    }

    #[test]
    fn work_must_be_in_the_counts_of_gvisor_and_host_and_excludes_probes() {
        let ms = Duration::from_millis;
        // Returns the begin of the idle time after ten seconds with `in_gvisor` ms of work by
        // gVisor's count.
        let since = |before, now, in_gvisor| {
            let host = |host, look| Look {
                host: Some(host),
                ..look
            };
            watched(&[host(before, look(10, 0)), host(now, look(20, in_gvisor))]).since()
        };
        let worked = |used: u64, probes_used: u64, probing: u64| {
            let before = HostTime {
                used: ms(70),
                probes: ProbeTime {
                    used: ms(20),
                    took: ms(30),
                },
                limit: None,
            };
            let now = HostTime {
                used: before.used + ms(used),
                probes: ProbeTime {
                    used: before.probes.used + ms(probes_used),
                    took: before.probes.took + ms(probing),
                },
                limit: None,
            };
            since(before, now, 3_000) == at(20)
        };
        assert!(!worked(110, 0, 0), "it waited for the host's processors");
        assert!(worked(111, 0, 0));
        assert!(!worked(1_000, 910, 2_000), "a probe's");
        assert!(worked(1_000, 500, 2_000), "beside probes");
        assert!(worked(1_000, 1_000, 6_000), "behind probes");
        assert!(!worked(110, 110, 6_000));
        // Probes of two containers that run at once are counted twice.
        assert!(!worked(500, 800, 1_000));
        let host = |used| HostTime {
            used: ms(used),
            ..HostTime::default()
        };
        assert_eq!(since(host(50), host(0), 3_000), at(20), "another cgroup");
        assert_eq!(since(host(0), host(9_000), 100), at(0), "gVisor's own work");
    }

    /// A look at `seconds`: `host` and `in_gvisor` ms of work, a probe of `probing` ms, `limit` ms
    /// a second.
    fn given(seconds: i64, host: u64, in_gvisor: u64, probing: u64, limit: Option<u64>) -> Look {
        let ms = Duration::from_millis;
        Look {
            host: Some(HostTime {
                used: ms(host),
                probes: ProbeTime {
                    used: Duration::ZERO,
                    took: ms(probing),
                },
                limit: limit.map(ms),
            }),
            ..look(seconds, in_gvisor)
        }
    }

    #[test]
    fn a_sandbox_above_half_of_a_small_processor_limit_counts_as_working() {
        let worked = |used, in_gvisor, limit| {
            let looks = [
                given(10, 0, 0, 0, limit),
                given(15, used, in_gvisor, 0, limit),
            ];
            watched(&looks).since() == at(15)
        };
        // The limit is a hundredth of a processor: 50 ms in five seconds.
        assert!(worked(48, 500, Some(10)));
        assert!(!worked(48, 500, None), "without a limit it is next to none");
        assert!(!worked(25, 500, Some(10)), "half of it");
        assert!(!worked(48, 60, Some(10)), "gVisor's own work");
        // A larger limit does not raise the floor.
        assert!(worked(61, 500, Some(2_000)) && !worked(60, 500, Some(2_000)));
        assert!(worked(61, 500, Some(u64::MAX)));
    }

    #[test]
    fn a_sandbox_that_works_across_a_clock_jump_or_a_machine_sleep_is_not_idle() {
        // Five seconds of the machine, in which the clock went on by an hour.
        let after_it = |cpu_ms| Look {
            up: Duration::from_secs(15),
            ..look(3_615, cpu_ms)
        };
        let since = |cpu_ms| watched(&[look(10, 0), after_it(cpu_ms)]).since();
        assert_eq!(since(5_000), at(3_615), "all of one processor");
        assert_eq!(since(60), at(0), "nothing to speak of");
    }

    #[test]
    fn a_packet_and_a_busy_mark_hold_off_sleep_from_their_own_time_on() {
        let after = Duration::from_secs(60);
        let mut watch = watched(&[look(10, 0), look(60, 0)]);
        assert!(watch.is_due(after, at(60)));
        watch.inquired(&Inquiry {
            at: at(60),
            last_packet: Some(at(40)),
            busy: false,
        });
        assert!(!watch.is_due(after, at(99)));
        assert!(watch.is_due(after, at(100)));
        watch.inquired(&Inquiry {
            at: at(100),
            last_packet: Some(at(40)),
            busy: true,
        });
        assert_eq!(watch.since(), at(100));
    }

    proptest! {
        /// No sequence of looks makes the idle time begin earlier, and no use is forgotten.
        #[test]
        fn idle_time_never_begins_earlier(looks in proptest::collection::vec((0_i64..100, 0_u64..1000, any::<bool>(), proptest::option::of(0_i64..100)), 0..20)) {
            let mut watch = IdleWatch::new(at(0));
            for (second, cpu, in_use, last) in looks {
                let before = watch.since();
                let next = Look { in_use, last_use: last.map(at), ..look(second, cpu) };
                watch.look(&next);
                prop_assert!(watch.since() >= before);
                prop_assert!(!in_use || watch.since() >= next.at);
            }
        }
    }
}
