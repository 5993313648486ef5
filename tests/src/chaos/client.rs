//! Client of one sandbox: asks, checks the answers and reports faults.

use std::io;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;

use super::counting::{Answer, Counting, Loss, Progress};
use crate::pods::python;

const PORT: u16 = 8080;
/// Time for an answer; after it the client asks again on another connection.
///
/// A wake may wait for an agent or a containerd that was killed.
const ANSWER_LIMIT: Duration = Duration::from_secs(10);

/// Returns the spec of a Pod that runs the counting program.
pub fn pod_spec() -> Value {
    json!({ "containers": [python("counter", include_str!("counter.py"))] })
}

/// Reason why a question had no answer.
#[derive(Debug, thiserror::Error)]
pub enum Unanswered {
    /// The peer refused, reset or closed the connection.
    #[error("the connection was ended: {0}")]
    Ended(#[source] io::Error),
    #[error("no answer within {ANSWER_LIMIT:?}")]
    Late,
    /// The question reached no peer.
    #[error("unreachable: {0}")]
    Unreachable(#[source] io::Error),
    #[error(transparent)]
    Loss(#[from] Loss),
}

/// Client of one sandbox, with one question at a time.
#[derive(Debug, Default)]
pub struct Client {
    counting: Counting,
    connection: Option<BufReader<TcpStream>>,
}

impl Client {
    /// Closes the connection; the next question opens another one.
    pub fn hang_up(&mut self) {
        self.connection = None;
    }

    /// Asks at the address, over the open connection or a new one.
    ///
    /// `may_start_anew` is called once the answer is there.
    pub async fn ask(
        &mut self,
        address: &str,
        may_start_anew: impl FnOnce() -> bool,
    ) -> Result<Progress, Unanswered> {
        self.counting.record_question();
        let asked = tokio::time::timeout(ANSWER_LIMIT, exchange(&mut self.connection, address));
        let answered = asked.await.unwrap_or(Err(Unanswered::Late));
        if answered.is_err() {
            self.hang_up();
        }
        Ok(self.counting.check(answered?, may_start_anew())?)
    }
}

async fn exchange(
    connection: &mut Option<BufReader<TcpStream>>,
    address: &str,
) -> Result<Answer, Unanswered> {
    let stream = match connection {
        Some(stream) => stream,
        None => {
            let stream = TcpStream::connect((address, PORT))
                .await
                .map_err(of_connection)?;
            connection.insert(BufReader::new(stream))
        }
    };
    stream.write_all(b"?\n").await.map_err(of_connection)?;
    let mut line = String::new();
    stream.read_line(&mut line).await.map_err(of_connection)?;
    let closed = || Unanswered::Ended(io::ErrorKind::UnexpectedEof.into());
    Answer::parse(&line).ok_or_else(closed)
}

fn of_connection(error: io::Error) -> Unanswered {
    use io::ErrorKind::{BrokenPipe, ConnectionAborted, ConnectionRefused, ConnectionReset};
    match error.kind() {
        ConnectionRefused | ConnectionReset | ConnectionAborted | BrokenPipe => {
            Unanswered::Ended(error)
        }
        _ => Unanswered::Unreachable(error),
    }
}
