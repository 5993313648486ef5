//! Handles the requests that a keeper receives over its socket.

use std::collections::VecDeque;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::time::Duration;

use nix::errno::Errno;
use torpor_link::sensor::Next;
use torpor_messages::keeper::{Answer, Request};
use torpor_messages::wire::{accept, receive, send};

use super::Keeper;
use super::relay::window;
use super::watch::{self, Watch};

/// Time between two attempts to accept a connection while the shim has no descriptor left.
const EXHAUSTED_INTERVAL: Duration = Duration::from_millis(50);

/// Accepts a connection; none if the caller has closed it, or if the shim has no descriptor left.
pub(super) fn accepted(listener: &OwnedFd) -> Option<OwnedFd> {
    match accept(listener) {
        Ok(peer) => Some(peer),
        Err(errno) => {
            if let Errno::EMFILE | Errno::ENFILE | Errno::ENOMEM = errno {
                // The connection stays, and would end each poll at once.
                std::thread::sleep(EXHAUSTED_INTERVAL);
            }
            None
        }
    }
}

impl Keeper<'_> {
    /// Receives and handles one request. Returns the keeper's exit code if the request ends it.
    pub(super) fn serve(&mut self) -> anyhow::Result<Option<u8>> {
        let Some(peer) = accepted(&self.listener) else {
            return Ok(None);
        };
        let Ok((bytes, files)) = receive(&peer) else {
            return Ok(None);
        };
        let request = match serde_json::from_slice::<Request>(&bytes) {
            Ok(request) => request,
            Err(error) => {
                answer(
                    &peer,
                    &Answer::refused("BadRequest", error.to_string()),
                    &[],
                );
                return Ok(None);
            }
        };
        Ok(self.handle(&request, files.into(), peer))
    }

    fn handle(
        &mut self,
        request: &Request,
        mut files: VecDeque<OwnedFd>,
        peer: OwnedFd,
    ) -> Option<u8> {
        let done = Answer::ok(serde_json::Value::Null);
        match request {
            Request::Stdio => {
                answer(&peer, &done, &self.streams.fds());
            }
            Request::Console => match files.pop_front().map(|fd| self.carry_console(fd)) {
                Some(Ok(())) => answer(&peer, &done, &[]),
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
                    return Some(code);
                }
                self.input.woke();
                self.release();
                answer(&peer, &done, &[]);
            }
            Request::Hold => {
                let answered = self.watch_packets();
                if let Some(watch) = &mut self.watch {
                    watch.hold();
                }
                answer(&peer, &answered, &[]);
            }
            Request::Rules(rules) => {
                self.rules = rules.clone();
                let next = match &mut self.watch {
                    Some(watch) => watch.set_rules(rules),
                    None => {
                        watch::prepare(rules);
                        Next::Nothing
                    }
                };
                self.act(next);
                answer(&peer, &done, &[]);
            }
            Request::Watch => {
                let answered = self.watch_packets();
                answer(&peer, &answered, &[]);
                let next = self.watch.as_mut().map(Watch::paused);
                self.act(next.unwrap_or(Next::Nothing));
            }
            Request::Hibernated => {
                let answered = self.watch_packets();
                let next = self.watch.as_mut().map(Watch::hibernated);
                // The sandbox sleeps on request also if its packets cannot be watched.
                answer(&peer, &done, &[]);
                if !answered.ok {
                    torpor_sandbox::log_line!("{}", answered.message);
                }
                self.act(next.unwrap_or(Next::Nothing));
            }
            Request::Freeze => {
                let answered = self.watch_packets();
                let next = self.watch.as_mut().map(Watch::frozen);
                answer(&peer, &answered, &[]);
                self.act(next.unwrap_or(Next::Nothing));
            }
            Request::Doze => {
                self.input.fell_asleep(&self.streams.stdin);
                answer(&peer, &done, &[]);
            }
            Request::Halt => {
                let begun = match &mut self.watch {
                    Some(watch) => watch.begin_answers(),
                    None => Err(anyhow::anyhow!(
                        "the keeper does not hold the Pod's packets"
                    )),
                };
                match begun {
                    Ok(next) => {
                        answer(&peer, &done, &[]);
                        self.act(next);
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
                    watch.end_answers();
                }
                let answered = match connected {
                    Ok(_) => done,
                    Err(error) => {
                        let message = format!("{:#}", anyhow::Error::new(error));
                        Answer::refused("NotContinued", message)
                    }
                };
                answer(&peer, &answered, &[]);
            }
            Request::HoldEgress => {
                let held = match &mut self.watch {
                    Some(watch) => watch.hold_egress().map(|()| watch.drop_links()),
                    None => Err(anyhow::anyhow!(
                        "the keeper does not hold the Pod's packets"
                    )),
                };
                match held {
                    Ok(links) => answer(&peer, &done, &links),
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
            Request::Resize { rows, columns } => {
                let window = window(*rows, *columns);
                self.window = Some(window);
                if let Some(relay) = &self.relay {
                    relay.resize(window);
                }
                answer(&peer, &done, &[]);
            }
            Request::Exit { code } => {
                answer(&peer, &done, &[]);
                return Some(*code);
            }
        }
        None
    }
}

/// Sends an answer. A failure is ignored: a caller that has closed its connection needs no answer.
fn answer(peer: &OwnedFd, answer: &Answer, files: &[BorrowedFd<'_>]) {
    if let Ok(bytes) = serde_json::to_vec(answer) {
        let _ = send(peer, &bytes, files);
    }
}
