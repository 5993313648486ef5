use super::*;
use std::os::unix::net::UnixListener;

#[test]
fn wait_status_is_read_as_a_shell_reads_it() {
    assert_eq!(WaitStatus(0).exit_code(), 0);
    assert_eq!(WaitStatus(3 << 8).exit_code(), 3);
    assert_eq!(WaitStatus(9).exit_code(), 137);
    assert_eq!(WaitStatus(0x80 | 11).exit_code(), 139);
}

fn answering(answer: &'static str) -> (tempfile::TempDir, Control) {
    let dir = tempfile::tempdir().expect("a directory");
    let listener = UnixListener::bind(socket_path(dir.path(), "s")).expect("a socket");
    std::thread::spawn(move || {
        let (mut peer, _) = listener.accept().expect("a connection");
        let mut buffer = [0; 4096];
        let _ = peer.read(&mut buffer).expect("a request");
        peer.write_all(answer.as_bytes()).expect("an answer");
    });
    let control = Control::connect(dir.path(), "s").expect("connected");
    (dir, control)
}

#[test]
fn a_refusal_has_gvisors_message() {
    let (_dir, mut control) = answering(r#"{"success":false,"err":"not paused","result":null}"#);
    let error = control.resume(Duration::from_secs(5)).expect_err("refused");
    assert!(matches!(&error, Error::Refused { message, .. } if message == "not paused"));
    assert!(!error.is_unknown());
}

#[test]
fn a_refusal_has_no_stacks_in_it() {
    let (_dir, mut control) = answering(
        r#"{"success":false,"err":"no space left on device:\ngoroutine 7 [running]:\nmain.save()","result":null}"#,
    );
    let error = control.pause(Duration::from_secs(5)).expect_err("refused");
    assert!(
        error.to_string().ends_with("no space left on device"),
        "{error}"
    );
}

#[test]
fn a_sandbox_that_ends_before_it_answers_leaves_the_outcome_unknown() {
    let (_dir, mut control) = answering("");
    let error = control
        .pause(Duration::from_secs(5))
        .expect_err("no answer");
    assert!(error.is_unknown(), "{error}");
}

#[test]
fn an_answer_in_small_pieces_has_the_same_time_limit_as_a_whole_answer() {
    let dir = tempfile::tempdir().expect("a directory");
    let listener = UnixListener::bind(socket_path(dir.path(), "s")).expect("a socket");
    let answers = std::thread::spawn(move || {
        let (mut peer, _) = listener.accept().expect("a connection");
        // Each byte comes in time, and all together do not. The peer may have closed the
        // connection.
        for _ in 0..100 {
            if peer.write_all(b" ").is_err() {
                return;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        let _ = peer.write_all(br#"{"success":true,"err":"","result":null}"#);
    });
    let mut control = Control::connect(dir.path(), "s").expect("connected");
    let error = control
        .resume(Duration::from_millis(200))
        .expect_err("no answer in time");
    let over = |source: &std::io::Error| source.kind() == ErrorKind::TimedOut;
    assert!(
        matches!(&error, Error::NoAnswer { source, .. } if over(source)),
        "{error:?}"
    );
    assert!(error.is_unknown());
    drop(control);
    answers.join().expect("no panic");
}

#[test]
fn a_call_that_is_not_read_is_given_up_and_had_no_effect() {
    let dir = tempfile::tempdir().expect("a directory");
    let listener = UnixListener::bind(socket_path(dir.path(), "s")).expect("a socket");
    let mut control = Control::connect(dir.path(), "s").expect("connected");
    let (given_up, waits) = std::sync::mpsc::channel::<()>();
    let never_reads = std::thread::spawn(move || {
        // Limited: the test waits for this thread.
        let _ = waits.recv_timeout(Duration::from_secs(10));
        drop(listener);
    });
    // More than a socket holds.
    let long = "x".repeat(8 << 20);
    let error = control
        .destroy_container(&long, Duration::from_millis(200))
        .expect_err("not read");
    let over = |source: &std::io::Error| source.kind() == ErrorKind::TimedOut;
    assert!(
        matches!(&error, Error::Send { source, .. } if over(source)),
        "{error:?}"
    );
    assert!(!error.is_unknown());
    drop(given_up);
    never_reads.join().expect("no panic");
}

#[test]
fn a_call_to_a_sandbox_that_ends_without_reading_it_was_not_received() {
    for accepts in [true, false] {
        let dir = tempfile::tempdir().expect("a directory");
        let listener = UnixListener::bind(socket_path(dir.path(), "s")).expect("a socket");
        let mut control = Control::connect(dir.path(), "s").expect("connected");
        let peer = accepts.then(|| listener.accept().expect("a connection"));
        let dies = std::thread::spawn(move || {
            if let Some((peer, _)) = &peer {
                wait_until_readable(peer);
            }
            drop((peer, listener));
        });
        let error = control.resume(Duration::from_secs(5)).expect_err("dead");
        assert!(
            matches!(error, Error::NotReceived { .. }),
            "{accepts} {error}"
        );
        assert!(!error.is_unknown());
        dies.join().expect("no panic");
    }
}

fn wait_until_readable(stream: &UnixStream) {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let limit = Timespec {
        tv_sec: 5,
        tv_nsec: 0,
    };
    let mut fds = [PollFd::new(stream, PollFlags::IN)];
    poll(&mut fds, Some(&limit)).expect("bytes to read");
}

#[test]
fn a_sandbox_that_takes_no_connections_is_not_taken_for_gone() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = socket_path(dir.path(), "s");
    let limit = Duration::from_millis(50);
    let _listener = UnixListener::bind(&path).expect("it listens");
    // Until the queue of connections that nobody accepts is full.
    let queued: Vec<_> = (0..10_000)
        .map_while(|_| torpor_messages::wire::dial(&path, SockType::Stream, limit).ok())
        .collect();
    assert!(queued.len() < 10_000, "the queue has an end");
    let connected = Control::connect_within(path, limit);
    let error = connected.expect_err("it does not hear");
    assert!(matches!(error, Error::Unreachable { .. }), "{error:?}");
    assert!(!error.is_unknown());
}

#[test]
fn a_sandbox_without_a_listening_socket_is_not_running() {
    let dir = tempfile::tempdir().expect("a directory");
    let error = Control::connect(dir.path(), "s").expect_err("nobody there");
    assert!(matches!(error, Error::NotRunning { .. }));
}
