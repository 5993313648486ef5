use super::*;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;

/// Returns the client's connection, the same connection as the keeper accepted it, our end of the
/// helper's stream, and the helper's end.
fn connections() -> (TcpStream, TcpStream, UnixStream, UnixStream) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a listener");
    let dialled = TcpStream::connect(listener.local_addr().expect("an address"));
    let (accepted, _) = listener.accept().expect("accepted");
    let (ours, theirs) = UnixStream::pair().expect("a pair");
    (dialled.expect("connected"), accepted, ours, theirs)
}

fn bytes() -> Vec<u8> {
    (0..5_000_000_u32)
        .map(|n| n.wrapping_mul(0x9e37_79b1).to_le_bytes()[3])
        .collect()
}

#[test]
fn five_megabytes_go_both_ways_at_once_and_arrive_whole() {
    let (mut dialled, accepted, ours, mut theirs) = connections();
    std::thread::scope(|scope| {
        let carried = scope.spawn(|| carry(accepted.as_fd(), ours.as_fd(), None, None));
        let (mut to_server, mut to_client) = (
            dialled.try_clone().expect("a copy"),
            theirs.try_clone().expect("a copy"),
        );
        scope.spawn(move || {
            to_server.write_all(&bytes()).expect("written");
            to_server.shutdown(std::net::Shutdown::Write).expect("shut");
        });
        let sent = scope.spawn(move || to_client.write_all(&bytes()).expect("written"));
        let server = scope.spawn(move || {
            let mut got = Vec::new();
            theirs.read_to_end(&mut got).expect("read to the end");
            sent.join().expect("no panic");
            got
        });
        let mut got = vec![0; 5_000_000];
        dialled.read_exact(&mut got).expect("read");
        assert!(got == bytes(), "to the client");
        assert!(server.join().expect("no panic") == bytes(), "to the server");
        let ended = carried.join().expect("no panic").expect("carried");
        assert_eq!(ended, Ended::Far);
    });
}

#[test]
fn bytes_that_the_far_side_sent_before_it_closed_are_delivered() {
    let (mut dialled, accepted, ours, mut theirs) = connections();
    std::thread::scope(|scope| {
        scope.spawn(move || theirs.write_all(&bytes()).expect("written"));
        let carried = scope.spawn(move || carry(accepted.as_fd(), ours.as_fd(), None, None));
        let mut got = Vec::new();
        dialled.read_to_end(&mut got).expect("read to the end");
        assert!(got == bytes());
        let ended = carried.join().expect("no panic").expect("carried");
        assert_eq!(ended, Ended::Far);
    });
}

#[test]
fn bytes_are_delivered_to_a_client_that_is_still_sending() {
    let (mut dialled, accepted, ours, mut theirs) = connections();
    // All buffers are full: there are always bytes that the far side has not read.
    dialled.set_nonblocking(true).expect("set");
    while dialled.write(&[0; 1 << 16]).is_ok() {}
    dialled.set_nonblocking(false).expect("set");
    theirs.write_all(b"enough").expect("written");
    theirs.shutdown(std::net::Shutdown::Both).expect("shut");
    let ended = carry(accepted.as_fd(), ours.as_fd(), None, None).expect("carried");
    assert_eq!(ended, Ended::Far);
    let mut got = [0; 6];
    dialled.read_exact(&mut got).expect("read");
    assert_eq!(&got, b"enough");
}

#[test]
fn an_answer_reaches_a_client_that_sends_nothing_more_but_not_for_ever() {
    let (mut dialled, accepted, ours, mut theirs) = connections();
    dialled.write_all(b"question").expect("written");
    dialled.shutdown(std::net::Shutdown::Write).expect("shut");
    let limit = Some(Duration::from_millis(300));
    std::thread::scope(|scope| {
        let carried = scope.spawn(|| carry(accepted.as_fd(), ours.as_fd(), None, limit));
        let mut question = Vec::new();
        theirs
            .read_to_end(&mut question)
            .expect("the end is passed on");
        theirs.write_all(b"answer").expect("written");
        let mut answer = [0; 6];
        dialled.read_exact(&mut answer).expect("read");
        assert_eq!(
            (question.as_slice(), &answer),
            (&b"question"[..], b"answer")
        );
        let ended = carried.join().expect("no panic").expect("carried");
        assert_eq!(ended, Ended::Near);
    });
}

#[test]
fn a_reset_by_the_client_ends_the_connection() {
    let (dialled, accepted, ours, _theirs) = connections();
    rustix::net::sockopt::set_socket_linger(&dialled, Some(Duration::ZERO)).expect("set");
    drop(dialled);
    let ended = carry(accepted.as_fd(), ours.as_fd(), None, None).expect("carried");
    assert_eq!(ended, Ended::Near);
}

#[test]
fn a_connection_ends_on_request_although_its_bytes_are_not_read() {
    let (mut dialled, accepted, ours, _theirs) = connections();
    let (stop, mut stopper) = std::io::pipe().expect("a pipe");
    std::thread::scope(|scope| {
        let carried =
            scope.spawn(|| carry(accepted.as_fd(), ours.as_fd(), Some(stop.as_fd()), None));
        dialled.write_all(&[0; 1 << 16]).expect("written");
        stopper.write_all(&[0]).expect("asked");
        let ended = carried.join().expect("no panic").expect("carried");
        assert_eq!(ended, Ended::Stopped);
    });
}
