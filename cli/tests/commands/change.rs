//! `hibernate` and `suspend`: the patch, the wait, and its failures.

use std::sync::{Arc, Mutex};

use tokio::sync::Semaphore;
use torpor_cli::change::Changed;
use torpor_cli::error::{Error, full_message};
use torpor_cli::goal::Goal;
use torpor_test_apiserver::{Apiserver, Fault, FaultAnswer};

use crate::support::{
    asked, change, cluster, create, gated, is_hibernate_requested, set_conditions,
};

#[tokio::test]
async fn a_hibernation_annotates_and_reports_conditions_until_the_goal() {
    let server = Apiserver::new();
    create(&server, "demo");
    let lines = Mutex::new(Vec::new());
    let say = |text: &str| lines.lock().unwrap().push(text.to_owned());
    let controller = async {
        server
            .until("the patch", |s| is_hibernate_requested(s, "demo"))
            .await;
        set_conditions(&server, "demo", &[("Hibernated", "False", "Saving")]);
        // The client has to observe this condition before the next is written.
        while !lines
            .lock()
            .unwrap()
            .iter()
            .any(|line| line.contains("Saving"))
        {
            tokio::task::yield_now().await;
        }
        set_conditions(&server, "demo", &[("Hibernated", "True", "Hibernated")]);
    };
    let cluster = cluster(&server);
    let ask = asked(&["demo"], 60);
    let (results, ()) = tokio::join!(change(&cluster, Goal::Hibernate, &ask, &say), controller);
    let done = results[0].as_ref().unwrap();
    assert!(done.took.is_some());
    let lines = lines.into_inner().unwrap();
    assert_eq!(lines.last().unwrap(), "demo: Saving: Saving in words");
}

#[tokio::test]
async fn several_sandboxes_are_patched_at_once_and_each_has_its_own_result() {
    let server = Apiserver::new();
    create(&server, "good");
    create(&server, "bad");
    let controller = async {
        server
            .until("both patches", |s| {
                is_hibernate_requested(s, "good") && is_hibernate_requested(s, "bad")
            })
            .await;
        set_conditions(&server, "good", &[("Hibernated", "True", "Hibernated")]);
        set_conditions(
            &server,
            "bad",
            &[("Hibernated", "False", "RuntimeNotCapable")],
        );
    };
    let cluster = cluster(&server);
    let ask = asked(&["good", "missing", "bad"], 60);
    let (results, ()) = tokio::join!(change(&cluster, Goal::Hibernate, &ask, &|_| {}), controller);
    assert_eq!(results[0].as_ref().unwrap().name, "good");
    assert!(matches!(&results[1], Err(Error::NoSandbox { name, .. }) if name == "missing"));
    let refused = results[2].as_ref().unwrap_err();
    assert!(!refused.is_unknown());
    let text = refused.to_string();
    assert!(
        text.contains("RuntimeNotCapable in words") && text.contains("Remedy"),
        "{text}"
    );
}

#[tokio::test]
async fn a_timeout_is_unknown_and_no_failure() {
    let server = Apiserver::new();
    create(&server, "demo");
    set_conditions(&server, "demo", &[("Hibernated", "False", "SaveFailed")]);
    let results = change(
        &cluster(&server),
        Goal::Hibernate,
        &asked(&["demo"], 1),
        &|_| {},
    )
    .await;
    let error = results[0].as_ref().unwrap_err();
    assert!(error.is_unknown());
    let text = error.to_string();
    assert!(text.contains("not yet hibernated after 1s"), "{text}");
}

#[tokio::test]
async fn a_timeout_of_zero_does_not_wait() {
    let server = Apiserver::new();
    create(&server, "demo");
    let results = change(
        &cluster(&server),
        Goal::Suspend,
        &asked(&["demo"], 0),
        &|_| {},
    )
    .await;
    let expected = Changed {
        name: "demo".to_owned(),
        took: None,
        note: None,
    };
    assert_eq!(results[0].as_ref().unwrap(), &expected);
    let sandbox = server.get("sandboxes", "x", "demo").unwrap();
    assert_eq!(sandbox["spec"]["operatingMode"], "Suspended");
}

#[tokio::test]
async fn a_suspension_that_kept_no_memory_has_a_warning() {
    let server = Apiserver::new();
    create(&server, "demo");
    let controller = async {
        let suspended = |s: &Apiserver| {
            s.get("sandboxes", "x", "demo").unwrap()["spec"]["operatingMode"] == "Suspended"
        };
        server.until("the patch", suspended).await;
        let conditions = [
            ("Suspended", "True", "PodTerminated"),
            ("Hibernated", "False", "RuntimeNotCapable"),
        ];
        set_conditions(&server, "demo", &conditions);
    };
    let cluster = cluster(&server);
    let ask = asked(&["demo"], 60);
    let (results, ()) = tokio::join!(change(&cluster, Goal::Suspend, &ask, &|_| {}), controller);
    let note = results[0].as_ref().unwrap().note.as_deref().unwrap();
    assert!(
        note.starts_with("memory was not kept (RuntimeNotCapable"),
        "{note}"
    );
}

#[tokio::test]
async fn a_sandbox_that_is_deleted_meanwhile_is_a_failure_at_once() {
    let server = Apiserver::new();
    create(&server, "demo");
    let user = async {
        server
            .until("the patch", |s| is_hibernate_requested(s, "demo"))
            .await;
        server.delete("sandboxes", "x", "demo");
    };
    let cluster = cluster(&server);
    let ask = asked(&["demo"], 3600);
    let (results, ()) = tokio::join!(change(&cluster, Goal::Hibernate, &ask, &|_| {}), user);
    let error = results[0].as_ref().unwrap_err();
    assert!(error.to_string().contains("deleted"), "{error}");
}

#[tokio::test]
async fn a_sandbox_deleted_before_the_patch_is_reported_as_deleted() {
    for anew in [false, true] {
        let server = Apiserver::new();
        create(&server, "demo");
        let gate = Arc::new(Semaphore::new(1));
        let cluster = gated(&server, &gate);
        let user = async {
            while server.take_reads().is_empty() {
                tokio::task::yield_now().await;
            }
            server.remove("sandboxes", "x", "demo");
            if anew {
                create(&server, "demo");
            }
            gate.add_permits(10);
        };
        let ask = asked(&["demo"], 60);
        let (results, ()) = tokio::join!(change(&cluster, Goal::Hibernate, &ask, &|_| {}), user);
        let error = results[0].as_ref().unwrap_err();
        assert!(error.to_string().contains("deleted meanwhile"), "{error}");
        assert_eq!(error.remedy(), None);
        if anew {
            assert!(!is_hibernate_requested(&server, "demo"));
        }
    }
}

#[tokio::test]
async fn a_conflict_without_a_change_is_an_error_and_not_retried_forever() {
    let server = Apiserver::new();
    create(&server, "demo");
    server.fail(Fault {
        verb: "patch",
        kind: "sandboxes",
        answer: FaultAnswer::Refuse(409),
    });
    let ask = asked(&["demo"], 60);
    let results = change(&cluster(&server), Goal::Hibernate, &ask, &|_| {}).await;
    assert!(results[0].as_ref().unwrap_err().is_conflict());
}

#[tokio::test]
async fn a_missing_right_is_reported_with_a_remedy() {
    let server = Apiserver::new();
    create(&server, "demo");
    server.fail(Fault {
        verb: "patch",
        kind: "sandboxes",
        answer: FaultAnswer::Refuse(403),
    });
    let results = change(
        &cluster(&server),
        Goal::Suspend,
        &asked(&["demo"], 60),
        &|_| {},
    )
    .await;
    let error = results[0].as_ref().unwrap_err();
    let text = full_message(error);
    assert!(text.starts_with("cannot patch Sandbox demo: "), "{text}");
    assert!(error.remedy().unwrap().starts_with("not allowed"));
    assert!(!error.is_unknown());
}
