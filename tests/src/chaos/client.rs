//! The client of one sandbox: asks, remembers, and says what went wrong.

use std::io;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;

use super::counting::{Answer, Counting, Loss, News};
use crate::pods::python;

const PORT: u16 = 8080;
/// What has had no answer by then is asked again on another connection. A wake may wait for an agent or a containerd that was
/// killed.
const ANSWER_LIMIT: Duration = Duration::from_secs(10);

/// A Pod's spec with the program in it.
pub fn pod_spec() -> Value {
    json!({ "containers": [python("counter", include_str!("counter.py"))] })
}

/// Why a question had no answer.
#[derive(Debug, thiserror::Error)]
pub enum Unanswered {
    /// Refused, reset or closed: somebody said no.
    #[error("the connection was ended: {0}")]
    Ended(#[source] io::Error),
    #[error("no answer within {ANSWER_LIMIT:?}")]
    Late,
    /// Nobody was asked.
    #[error("no way there: {0}")]
    Unreachable(#[source] io::Error),
    #[error(transparent)]
    Loss(#[from] Loss),
}

/// Asks one sandbox, one question at a time.
#[derive(Debug, Default)]
pub struct Client {
    counting: Counting,
    connection: Option<BufReader<TcpStream>>,
}

impl Client {
    /// From now on over another connection.
    pub fn hang_up(&mut self) {
        self.connection = None;
    }

    /// Asks at the address, over the connection that is there or another one. `may_start_anew` is asked when the answer is there.
    pub async fn ask(
        &mut self,
        address: &str,
        may_start_anew: impl FnOnce() -> bool,
    ) -> Result<News, Unanswered> {
        self.counting.asks();
        let asked = tokio::time::timeout(ANSWER_LIMIT, exchange(&mut self.connection, address));
        let answered = asked.await.unwrap_or(Err(Unanswered::Late));
        if answered.is_err() {
            self.hang_up();
        }
        Ok(self.counting.hears(answered?, may_start_anew())?)
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
