//! Tests of the driver with a fake containerd, alone and with the planner.

mod fake;

use std::path::Path;
use std::time::Duration;

use fake::{Fake, Fault, POD, VMM, Verb, id};
use jiff::Timestamp;
use tokio::net::UnixListener;
use torpor_core::ids::PodUid;
use torpor_core::pressure::Pressure;
use torpor_core::state::{
    Desired, Doze, Failures, Live, Observed, PodPresence, Policy, Power, SleepAfter,
};
use torpor_core::steps::{Action, Outcome, StepKind};
use torpor_kata::containerd::Containerd;
use torpor_kata::driver::{Driver, Seen};
use torpor_kata::proto::tasks::Status::{self, *};

/// Limit of a call, longer than any answer of the fake containerd.
const LIMIT: Duration = Duration::from_secs(20);
/// Limit of a call that the fake lets hang. A call that ends too early is repeated like any other.
const IMPATIENT: Duration = Duration::from_millis(300);

struct Test {
    fake: Fake,
    driver: Driver,
    impatient: Driver,
    /// Directory of the fake cgroups of version 2.
    cgroups: tempfile::TempDir,
    runtime: tokio::runtime::Runtime,
    _socket: tempfile::TempDir,
}

fn pod() -> PodUid {
    PodUid::new(POD).expect("a UID")
}

fn test(tasks: &[(&str, Status)]) -> Test {
    let fake = Fake::with(tasks);
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let directory = tempfile::tempdir().expect("a directory");
    let socket = directory.path().join("containerd.sock");
    let inside = runtime.enter();
    let listener = UnixListener::bind(&socket).expect("a socket");
    drop(inside);
    runtime.spawn(fake.serve(listener));
    let cgroups = tempfile::tempdir().expect("a directory");
    std::fs::write(cgroups.path().join("cgroup.controllers"), "memory").expect("written");
    let group = cgroups.path().join("kubepods/pod1/5");
    std::fs::create_dir_all(&group).expect("made");
    for (file, text) in [
        ("cgroup.procs", format!("{VMM}\n")),
        ("memory.current", "90000000\n".to_owned()),
        ("memory.reclaim", String::new()),
        ("memory.swap.max", "max\n".to_owned()),
    ] {
        std::fs::write(group.join(file), text).expect("written");
    }
    Test {
        fake,
        driver: driver(&socket, &runtime, cgroups.path(), LIMIT),
        impatient: driver(&socket, &runtime, cgroups.path(), IMPATIENT),
        cgroups,
        runtime,
        _socket: directory,
    }
}

fn driver(
    socket: &Path,
    runtime: &tokio::runtime::Runtime,
    cgroups: &Path,
    limit: Duration,
) -> Driver {
    let containerd = Containerd::at(socket, runtime.handle().clone(), limit);
    Driver::new(containerd, vec!["io.containerd.kata*".to_owned()], cgroups).expect("cgroups")
}

impl Test {
    fn look(&self) -> Seen {
        self.driver
            .look(&pod())
            .expect("looked")
            .expect("a sandbox")
    }

    fn act(&self, action: &Action) -> Outcome {
        self.driver.act(&self.look().sandbox, action)
    }

    fn done(&self) -> Vec<(Verb, String)> {
        std::mem::take(&mut self.fake.world().done)
    }

    fn fails(&self, letter: &str, fault: Fault) {
        self.fake.world().faults.insert(id(letter), fault);
    }

    /// Returns the bytes of the last reclaim.
    fn reclaimed(&self) -> String {
        let file = self.cgroups.path().join("kubepods/pod1/5/memory.reclaim");
        std::fs::read_to_string(file).expect("read")
    }
}

/// Statuses of the sandbox container, two running containers and an ended one. The fake adds
/// container `e` without a task.
const RUNS: [(&str, Status); 4] = [
    ("5", Running),
    ("a", Running),
    ("b", Running),
    ("c", Stopped),
];

const RECLAIM: Action = Action::Reclaim { image: None };

#[test]
fn every_container_but_the_sandboxs_own_is_paused_and_resumed_in_the_other_order() {
    let test = test(&RUNS);
    assert_eq!(test.look().standing.live, Live::Running);
    assert_eq!(test.act(&Action::Doze), Outcome::Done);
    assert_eq!(test.look().standing.live, Live::Paused);
    let (a, b) = (id("a"), id("b"));
    assert_eq!(
        test.done(),
        [(Verb::Pause, a.clone()), (Verb::Pause, b.clone())]
    );
    assert_eq!(test.act(&Action::Resume), Outcome::Done);
    assert_eq!(test.done(), [(Verb::Resume, b), (Verb::Resume, a)]);
    assert_eq!(test.look().standing.live, Live::Running);
}

#[test]
fn each_step_may_be_done_twice() {
    let test = test(&RUNS);
    assert_eq!(test.act(&Action::Resume), Outcome::Already);
    assert_eq!(test.act(&Action::Pause), Outcome::Done);
    assert_eq!(test.act(&Action::Pause), Outcome::Already);
    assert_eq!(test.act(&Action::Doze), Outcome::Already);
    for _ in 0..2 {
        assert_eq!(test.act(&RECLAIM), Outcome::Done);
        assert_eq!(test.reclaimed(), "90000000");
    }
    assert_eq!(test.act(&Action::Resume), Outcome::Done);
    assert_eq!(test.act(&Action::Resume), Outcome::Already);
}

#[test]
fn a_step_that_needs_an_image_is_refused() {
    let test = test(&RUNS);
    let image = torpor_core::ImageId::new(pod(), 1).expect("an image's name");
    for action in [
        Action::Checkpoint {
            image: image.clone(),
        },
        Action::End {
            image: image.clone(),
        },
        Action::Reclaim { image: Some(image) },
    ] {
        assert!(
            matches!(test.act(&action), Outcome::Failed { reason, .. } if reason == "NoImages")
        );
    }
    assert_eq!(test.done(), []);
}

#[test]
fn memory_of_a_running_sandbox_or_a_foreign_process_is_not_pushed_out() {
    let test = test(&RUNS);
    let reason = |outcome| match outcome {
        Outcome::Failed { reason, .. } => reason,
        other => panic!("{other:?}"),
    };
    assert_eq!(reason(test.act(&RECLAIM)), "NotPaused");
    test.act(&Action::Pause);
    let procs = test.cgroups.path().join("kubepods/pod1/5/cgroup.procs");
    std::fs::write(procs, "1\n").expect("written");
    assert_eq!(reason(test.act(&RECLAIM)), "NoCgroup");
    assert_eq!(test.reclaimed(), "");
}

#[test]
fn a_pause_that_is_refused_leaves_all_running_and_one_without_an_answer_is_unknown() {
    let test = test(&RUNS);
    test.fails("b", Fault::Refuses);
    let refused = test.act(&Action::Doze);
    assert!(
        matches!(&refused, Outcome::Failed { reason, message }
        if reason == "ContainerdRefused" && message.contains("OCI runtime failed")),
        "{refused:?}"
    );
    assert_eq!(test.look().standing.live, Live::Running);
    for fault in [Fault::HangsBefore, Fault::HangsAfter] {
        test.fails("b", fault);
        let sandbox = test.look().sandbox;
        assert!(
            matches!(
                test.impatient.act(&sandbox, &Action::Doze),
                Outcome::Unknown { .. }
            ),
            "{fault:?}"
        );
        let standing = test.look().standing;
        // The sandbox is partly or completely paused. A resume ends both states.
        assert_eq!(standing.live, Live::Paused);
        assert_eq!(standing.half, fault == Fault::HangsBefore);
        assert_eq!(test.act(&Action::Resume), Outcome::Done);
        assert_eq!(test.look().standing.live, Live::Running);
    }
}

#[test]
fn a_resume_that_fails_for_one_container_is_done_for_the_other_containers() {
    let test = test(&RUNS);
    test.act(&Action::Pause);
    test.fails("b", Fault::Refuses);
    assert!(matches!(test.act(&Action::Resume), Outcome::Failed { .. }));
    assert_eq!(test.fake.status("a"), Some(Running));
    assert_eq!(test.act(&Action::Resume), Outcome::Done);
}

#[test]
fn a_container_that_ends_or_goes_in_the_middle_is_no_failure() {
    let test = test(&RUNS);
    let seen = test.look();
    test.fake.remove("a");
    test.fake.set("b", Stopped);
    assert_eq!(
        test.driver.act(&seen.sandbox, &Action::Doze),
        Outcome::Already
    );
    assert_eq!(test.look().standing.live, Live::None);
    let starting = self::test(&[("5", Running), ("a", Created)]);
    assert!(
        matches!(starting.act(&Action::Doze), Outcome::Failed { reason, .. } if reason == "Starting")
    );
}

#[test]
fn a_step_without_containerd_is_unknown_and_is_done_once_containerd_is_back() {
    let test = test(&RUNS);
    let directory = tempfile::tempdir().expect("a directory");
    let socket = directory.path().join("later.sock");
    let driver = driver(&socket, &test.runtime, test.cgroups.path(), LIMIT);
    let seen = test.look();
    driver.look(&pod()).expect_err("nobody listens");
    assert!(matches!(
        driver.act(&seen.sandbox, &Action::Doze),
        Outcome::Unknown { .. }
    ));
    let inside = test.runtime.enter();
    let listener = UnixListener::bind(&socket).expect("a socket");
    drop(inside);
    test.runtime.spawn(test.fake.serve(listener));
    assert_eq!(driver.act(&seen.sandbox, &Action::Doze), Outcome::Done);
}

/// An agent. Its state does not survive its death.
struct Agent<'a> {
    test: &'a Test,
    driver: &'a Driver,
    failures: Failures,
    doze: Option<Doze>,
    idle_since: Option<Timestamp>,
}

fn at(second: i64) -> Timestamp {
    Timestamp::from_second(second).expect("a time")
}

impl<'a> Agent<'a> {
    fn new(test: &'a Test) -> Self {
        Self {
            test,
            driver: &test.driver,
            failures: Failures::default(),
            doze: None,
            idle_since: None,
        }
    }

    fn observe(&self) -> (Seen, Observed) {
        let seen = self.test.look();
        let standing = seen.standing;
        let doze = self
            .doze
            .filter(|_| standing.live == Live::Paused && !standing.half);
        let observed = Observed {
            sandbox: Some(seen.sandbox.id.clone()),
            live: standing.live,
            doze,
            capable: Err("no snapshot".to_owned()),
            dozes_unsaved: true,
            idle_since: self.idle_since,
            failures: self.failures.clone(),
            ..Observed::nothing()
        };
        (seen, observed)
    }

    /// Plans once and executes the steps like the agent. Returns the executed steps, each with its
    /// success.
    fn pass(&mut self, desired: &Desired, now: i64) -> Vec<(StepKind, bool)> {
        let (seen, observed) = self.observe();
        let plan = torpor_core::plan(desired, &observed, &Policy::default(), at(now));
        let mut done = Vec::new();
        for step in &plan.steps {
            let outcome = self.driver.act(&seen.sandbox, &step.action);
            self.failures.note(&step.action, &outcome, at(now));
            let succeeded = matches!(outcome, Outcome::Done | Outcome::Already);
            done.push((step.action.kind(), succeeded));
            if !succeeded {
                break;
            }
            self.doze = match step.action {
                Action::Doze => Some(Doze { reclaimed: false }),
                Action::Reclaim { .. } => Some(Doze { reclaimed: true }),
                _ => None,
            };
        }
        done
    }

    /// Passes until the plan is empty, and returns the time of the last pass. The time between two
    /// passes is longer than any wait after a failure.
    fn settle(&mut self, desired: &Desired, mut now: i64) -> i64 {
        for _ in 0..20 {
            now += 4000;
            if self.pass(desired, now).is_empty() {
                return now;
            }
        }
        panic!("it does not settle: {:?}", self.observe().1);
    }
}

fn desired(power: Power, doze: bool) -> Desired {
    Desired {
        pod_uid: pod(),
        pod: PodPresence::Present,
        departure: None,
        answer: None,
        power,
        sleep: SleepAfter {
            doze: doze.then_some(Duration::from_secs(30)),
            hibernate: None,
        },
        pressure: Pressure::default(),
        evicted: false,
        keep_last_image: false,
        wake_up: std::collections::BTreeSet::new(),
        snapshots: Vec::new(),
        claim: None,
        has_sleep_condition: false,
        containers: std::collections::BTreeSet::new(),
        ready: true,
    }
}

#[test]
fn an_idle_sandbox_dozes_and_is_resumed_once_dozing_is_no_longer_requested() {
    let test = test(&RUNS);
    let mut agent = Agent::new(&test);
    agent.idle_since = Some(at(0));
    let dozing = desired(Power::Awake, true);
    assert_eq!(agent.pass(&dozing, 29), []);
    assert_eq!(agent.pass(&dozing, 30), [(StepKind::Doze, true)]);
    assert_eq!(agent.pass(&dozing, 30), [(StepKind::Reclaim, true)]);
    assert_eq!(agent.pass(&dozing, 31), []);
    assert_eq!(
        agent.pass(&desired(Power::Awake, false), 32),
        [(StepKind::Resume, true)]
    );
    assert_eq!(test.look().standing.live, Live::Running);
}

/// Kills the agent before or after each call of each step, or lets the call fail. A killed agent
/// gets no answer, and the next agent has no state. In the end the sandbox must be in the desired
/// state and its sandbox container must run.
#[test]
fn a_step_that_was_cut_off_is_completed_by_the_next_agent() {
    let dozing = desired(Power::Awake, true);
    for fault in [Fault::HangsBefore, Fault::HangsAfter, Fault::Refuses] {
        for letter in ["a", "b"] {
            for (falls_asleep, dies) in [(true, true), (true, false), (false, true), (false, false)]
            {
                let test = test(&RUNS);
                let mut agent = Agent::new(&test);
                agent.idle_since = Some(at(0));
                if !falls_asleep {
                    agent.settle(&dozing, 100);
                }
                test.fails(letter, fault);
                let wish = desired(Power::Awake, falls_asleep);
                agent.driver = &test.impatient;
                agent.pass(&wish, 8100);
                agent.driver = &test.driver;
                if dies {
                    agent = Agent::new(&test);
                    // The new agent does not know how long the sandbox has been idle, nor the
                    // packets that arrived while no agent ran.
                    let now = agent.settle(&wish, 9000);
                    assert_eq!(test.look().standing.live, Live::Running);
                    agent.idle_since = Some(at(now));
                    agent.settle(&wish, now);
                } else {
                    agent.settle(&wish, 9000);
                }
                let expected = if falls_asleep {
                    Live::Paused
                } else {
                    Live::Running
                };
                let standing = test.look().standing;
                assert_eq!(
                    (standing.live, standing.half),
                    (expected, false),
                    "{fault:?} {letter} {falls_asleep} {dies}"
                );
                assert_eq!(test.fake.status("5"), Some(Running));
            }
        }
    }
}
