use rstest::rstest;

use super::*;
use crate::directory::PodAt;

fn target(uid: Option<&str>) -> Target {
    Target {
        id: "s".into(),
        namespace: "ns".into(),
        port: 80,
        uid: uid.map(str::to_owned),
    }
}

fn view(change: impl Fn(&mut View)) -> View {
    let mut view = View {
        uid: "u".into(),
        version: "7".into(),
        suspended: false,
        resume: false,
        unclaimed: false,
        pod: Some(PodAt {
            uid: "p".into(),
            address: "10.0.0.1".parse().unwrap(),
        }),
    };
    change(&mut view);
    view
}

fn route() -> Step {
    Step::Route(Destination {
        namespace: "ns".into(),
        sandbox_uid: "u".into(),
        pod_uid: "p".into(),
        address: "10.0.0.1".parse().unwrap(),
        port: 80,
    })
}

fn resume() -> Step {
    Step::Resume {
        uid: "u".into(),
        version: "7".into(),
    }
}

fn suspended() -> Step {
    Step::Refuse(Refusal::Suspended("s".into()))
}

#[rstest]
#[case::running(|_: &mut View| {}, None, route())]
#[case::running_and_meant(|_: &mut View| {}, Some("u"), route())]
#[case::another_of_that_name(|_: &mut View| {}, Some("v"), Step::Wait(WaitLimit::Dial))]
#[case::no_pod_yet(|v: &mut View| v.pod = None, None, Step::Wait(WaitLimit::Dial))]
#[case::no_pod_yet_after_a_resume(|v: &mut View| { v.pod = None; v.resume = true }, None, Step::Wait(WaitLimit::Resume))]
#[case::suspended(|v: &mut View| v.suspended = true, None, suspended())]
#[case::suspended_without_pod(|v: &mut View| { v.suspended = true; v.pod = None }, None, suspended())]
#[case::suspended_and_resumable(|v: &mut View| { v.suspended = true; v.resume = true }, None, resume())]
#[case::suspended_and_resumable_without_pod(|v: &mut View| { v.suspended = true; v.resume = true; v.pod = None }, None, resume())]
#[case::unclaimed(|v: &mut View| v.unclaimed = true, None, Step::Wait(WaitLimit::Dial))]
#[case::unclaimed_but_named_by_uid(|v: &mut View| v.unclaimed = true, Some("u"), route())]
#[case::unclaimed_and_suspended(|v: &mut View| { v.unclaimed = true; v.suspended = true; v.resume = true }, None, Step::Wait(WaitLimit::Dial))]
fn each_state_has_its_step(
    #[case] change: impl Fn(&mut View),
    #[case] uid: Option<&str>,
    #[case] step: Step,
) {
    assert_eq!(decide(&target(uid), Some(&view(change))), step);
}

#[test]
fn a_request_for_an_unknown_sandbox_waits() {
    assert_eq!(decide(&target(None), None), Step::Wait(WaitLimit::Dial));
}
