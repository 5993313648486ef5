//! What others ask of a keeper over its socket.

use std::collections::VecDeque;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::process::{Command, Stdio};

use nix::sys::socket::{SockFlag, accept4};
use torpor_core::ids::ImageId;
use torpor_link::sensor::Next;
use torpor_records::WakeCause;
use torpor_runsc::keeper::{Answer, Request, Verb, receive, send};

use super::Keeper;
use super::children::Purpose;
use super::relay::{self, Relay};
use super::watch::{self, Watch};

/// Requests that wait for an answer of a program that the keeper started are answered by that program.
pub(super) enum Handled {
    Answered,
    Exit(u8),
}

impl Keeper<'_> {
    /// Takes one request.
    pub(super) fn serve(&mut self) -> anyhow::Result<Handled> {
        let peer = match accept4(self.listener.as_raw_fd(), SockFlag::SOCK_CLOEXEC) {
            Ok(raw) => own(raw),
            // The one who asked has given up.
            Err(_) => return Ok(Handled::Answered),
        };
        let Ok((bytes, files)) = receive(&peer) else {
            return Ok(Handled::Answered);
        };
        let request = match serde_json::from_slice::<Request>(&bytes) {
            Ok(request) => request,
            Err(error) => {
                answer(
                    &peer,
                    &Answer::refused("BadRequest", error.to_string()),
                    &[],
                );
                return Ok(Handled::Answered);
            }
        };
        Ok(self.handle(&request, files.into(), peer))
    }

    fn handle(
        &mut self,
        request: &Request,
        mut files: VecDeque<OwnedFd>,
        peer: OwnedFd,
    ) -> Handled {
        let done = Answer::ok(serde_json::Value::Null);
        match request {
            Request::Stdio => {
                let (stdin, stdout, stderr) =
                    (std::io::stdin(), std::io::stdout(), std::io::stderr());
                answer(
                    &peer,
                    &done,
                    &[stdin.as_fd(), stdout.as_fd(), stderr.as_fd()],
                );
            }
            Request::Console => match files
                .pop_front()
                .map(|console| Relay::new(console, self.terminal_mode.take()))
            {
                Some(Ok(relay)) => {
                    self.relay = Some(relay);
                    answer(&peer, &done, &[]);
                }
                Some(Err(error)) => {
                    answer(
                        &peer,
                        &Answer::refused("ConsoleFailed", format!("{error:#}")),
                        &[],
                    );
                }
                None => answer(
                    &peer,
                    &Answer::refused("BadRequest", "no console".into()),
                    &[],
                ),
            },
            Request::Attach => {
                if let Some(code) = self.wait_on() {
                    answer(&peer, &done, &[]);
                    return Handled::Exit(code);
                }
                self.typing.woke();
                self.release();
                answer(&peer, &done, &[]);
            }
            Request::Hold(rules) => {
                let answered = self.watch(rules);
                if let Some(watch) = &mut self.watch {
                    watch.hold();
                }
                answer(&peer, &answered, &[]);
            }
            Request::Rules(rules) => {
                let next = match &mut self.watch {
                    Some(watch) => watch.set_rules(rules),
                    None => {
                        watch::prepare(rules);
                        Next::Nothing
                    }
                };
                self.follow(next);
                answer(&peer, &done, &[]);
            }
            Request::Watch(rules) => {
                let answered = self.watch(rules);
                answer(&peer, &answered, &[]);
                let next = self.watch.as_mut().map(Watch::standing);
                self.follow(next.unwrap_or(Next::Nothing));
            }
            Request::Freeze(rules) => {
                let answered = self.watch(rules);
                let next = self.watch.as_mut().map(Watch::frozen);
                answer(&peer, &answered, &[]);
                self.follow(next.unwrap_or(Next::Nothing));
            }
            Request::Doze => {
                self.typing.fell_asleep(relay::borrow_stdin());
                answer(&peer, &done, &[]);
            }
            Request::Halt => {
                let halted = match &mut self.watch {
                    Some(watch) => watch.halt(),
                    None => Err(anyhow::anyhow!(
                        "the keeper does not hold the Pod's packets"
                    )),
                };
                match halted {
                    Ok(next) => {
                        answer(&peer, &done, &[]);
                        self.follow(next);
                    }
                    Err(error) => {
                        let refused = Answer::refused("NotHalted", format!("{error:#}"));
                        answer(&peer, &refused, &[]);
                    }
                }
            }
            Request::GoOn => {
                let sandbox = &self.record.sandbox;
                let connected = self.node.runsc.connect(sandbox);
                if let Some(watch) = &mut self.watch {
                    watch.go_on();
                }
                let answered = match connected {
                    Ok(_) => done,
                    Err(error) => {
                        let words = format!("{:#}", anyhow::Error::new(error));
                        Answer::refused("NotContinued", words)
                    }
                };
                answer(&peer, &answered, &[]);
            }
            Request::HoldEgress => {
                let muted = match &mut self.watch {
                    Some(watch) => watch.mute().map(|()| watch.barriers()),
                    None => Err(anyhow::anyhow!(
                        "the keeper does not hold the Pod's packets"
                    )),
                };
                match muted {
                    Ok(barriers) => answer(&peer, &done, &barriers),
                    Err(error) => {
                        let refused = Answer::refused("NotMuted", format!("{error:#}"));
                        answer(&peer, &refused, &[]);
                    }
                }
            }
            Request::Release => {
                self.release();
                answer(&peer, &done, &[]);
            }
            Request::Exit { code } => {
                answer(&peer, &done, &[]);
                return Handled::Exit(*code);
            }
            Request::Mind { container } => match files.pop_front() {
                Some(end) => {
                    self.others.add(container.clone(), end);
                    answer(&peer, &done, &[]);
                }
                None => {
                    let missing = "no pidfd of the keeper".into();
                    answer(&peer, &Answer::refused("BadRequest", missing), &[]);
                }
            },
            Request::Exec { pid } => match files.pop_front() {
                Some(end) => {
                    self.execs.add(*pid, end);
                    answer(&peer, &done, &[]);
                }
                None => answer(&peer, &Answer::refused("BadRequest", "no pipe".into()), &[]),
            },
            Request::Run { verb, image, cause } => match files.pop_front() {
                Some(lock) => self.run(*verb, image.as_ref(), *cause, lock, peer),
                None => answer(&peer, &Answer::refused("BadRequest", "no lock".into()), &[]),
            },
        }
        Handled::Answered
    }

    /// The program's standard output is the connection: its answer is the answer.
    fn run(
        &mut self,
        verb: Verb,
        image: Option<&ImageId>,
        cause: Option<WakeCause>,
        lock: OwnedFd,
        peer: OwnedFd,
    ) {
        // The other verbs know of no cause.
        let cause = cause.filter(|_| verb == Verb::Wake);
        let cause = cause.map(|cause| format!("--cause={}", cause.as_str()));
        let Ok(copy) = peer.try_clone() else { return };
        let spawned = Command::new("/proc/self/exe")
            .arg(verb.as_str())
            .arg(self.record.sandbox.as_str())
            .args(image.map(ToString::to_string))
            .args(cause)
            .stdin(lock)
            .stdout(peer)
            .stderr(Stdio::null())
            .spawn();
        match spawned {
            Ok(child) => self.children.add(Purpose::Verb, child),
            Err(error) => {
                let message = format!("cannot run torpor-oci {}: {error}", verb.as_str());
                answer(&copy, &Answer::refused("SpawnFailed", message), &[]);
            }
        }
    }
}

/// Nobody is harmed when the one who asked no longer listens.
fn answer(peer: &OwnedFd, answer: &Answer, files: &[BorrowedFd<'_>]) {
    if let Ok(bytes) = serde_json::to_vec(answer) {
        let _ = send(peer, &bytes, files);
    }
}

#[allow(unsafe_code)]
fn own(raw: i32) -> OwnedFd {
    // SAFETY: accept has just made this descriptor; nobody else owns it.
    unsafe { OwnedFd::from_raw_fd(raw) }
}
