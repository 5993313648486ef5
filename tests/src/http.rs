//! Minimal HTTP/1.1 client for tests: one request, one connection.

use std::time::Duration;

use anyhow::Context;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::wait;

/// Time for a request that resumes a suspended sandbox.
const LIMIT: Duration = Duration::from_secs(60);

/// One request. `headers` are whole lines, each with its CRLF.
#[derive(Debug, Clone, Copy, Default)]
pub struct Request<'a> {
    pub method: &'a str,
    pub path: &'a str,
    pub headers: &'a str,
    pub body: &'a str,
}

impl<'a> Request<'a> {
    /// A GET of `path`.
    pub fn get(path: &'a str) -> Self {
        Self {
            method: "GET",
            path,
            ..Self::default()
        }
    }
}

/// Sends a request and returns the status and body of the answer, which the server ends by closing
/// the connection.
///
/// # Errors
/// The server cannot be reached, does not answer within a minute, or answers no HTTP.
pub async fn ask(address: &str, port: u16, request: Request<'_>) -> anyhow::Result<(u16, String)> {
    let Request {
        method,
        path,
        headers,
        body,
    } = request;
    let words = || format!("{method} http://{address}:{port}{path}");
    let exchange = async {
        let mut stream = TcpStream::connect((address, port)).await?;
        let length = body.len();
        let request = format!(
            "{method} {path} HTTP/1.1\r\nHost: {address}\r\n{headers}Content-Length: {length}\r\n\
             Connection: close\r\n\r\n{body}"
        );
        stream.write_all(request.as_bytes()).await?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await?;
        anyhow::Ok(answer)
    };
    let answer = tokio::time::timeout(wait::scaled(LIMIT), exchange).await;
    let answer = answer
        .with_context(|| format!("{}: no answer within {LIMIT:?}", words()))?
        .with_context(words)?;
    let (head, body) = answer
        .split_once("\r\n\r\n")
        .with_context(|| format!("{}: no head in {answer:?}", words()))?;
    let status = head.split(' ').nth(1).context("no status")?.parse()?;
    Ok((status, body.to_owned()))
}
