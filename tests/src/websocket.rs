//! Client of WebSockets (RFC 6455), as far as tests need it: text in single frames.

use std::io;

use anyhow::{Context as _, ensure};
use tokio::{
    io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufStream},
    net::TcpStream,
};

/// Key of the handshake and the answer to it, as in the example of the RFC.
const KEY: &str = "dGhlIHNhbXBsZSBub25jZQ==";
const ACCEPT: &str = "s3pPLMBiTxaQ9kYGzzhZRbK+xOo=";
/// First byte of a frame with a whole text.
const TEXT: u8 = 0x81;
/// Bit of the second byte: the frame is masked, as every client's is.
const MASKED: u8 = 0x80;
/// Length that says that the real length follows in two bytes.
const TWO_BYTES: u8 = 126;

/// An open WebSocket.
#[derive(Debug)]
pub struct WebSocket(BufStream<TcpStream>);

impl WebSocket {
    /// Requests a WebSocket over a connection.
    pub async fn open(stream: TcpStream, host: &str, path: &str) -> anyhow::Result<Self> {
        let mut stream = BufStream::new(stream);
        let request = format!(
            "GET {path} HTTP/1.1\r\nHost: {host}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\
             Sec-WebSocket-Key: {KEY}\r\nSec-WebSocket-Version: 13\r\n\r\n"
        );
        stream.write_all(request.as_bytes()).await?;
        stream.flush().await?;
        let mut head = String::new();
        while !head.ends_with("\r\n\r\n") {
            let length = stream.read_line(&mut head).await?;
            ensure!(length > 0, "no WebSocket: {head}");
        }
        let accepted = head.lines().any(|line| {
            let (name, value) = line.split_once(':').unwrap_or_default();
            name.eq_ignore_ascii_case("sec-websocket-accept") && value.trim() == ACCEPT
        });
        let status = head.split(' ').nth(1);
        ensure!(accepted && status == Some("101"), "no WebSocket: {head}");
        Ok(Self(stream))
    }

    /// Sends a text of at most 125 bytes.
    pub async fn send(&mut self, text: &str) -> anyhow::Result<()> {
        let frame = frame(text, fastrand::u32(..).to_be_bytes())?;
        self.0.write_all(&frame).await?;
        Ok(self.0.flush().await?)
    }

    /// Returns the next text.
    pub async fn receive(&mut self) -> anyhow::Result<String> {
        let head = self.0.read_u16().await?;
        let [kind, length] = head.to_be_bytes();
        ensure!(kind == TEXT, "a frame of another kind: {kind:#x}");
        let length = match length {
            TWO_BYTES => self.0.read_u16().await?,
            short if short < TWO_BYTES => u16::from(short),
            _ => return Err(io::Error::other("a masked or a huge frame").into()),
        };
        let mut text = vec![0; usize::from(length)];
        self.0.read_exact(&mut text).await?;
        Ok(String::from_utf8(text)?)
    }
}

/// Returns a masked frame of text.
fn frame(text: &str, mask: [u8; 4]) -> anyhow::Result<Vec<u8>> {
    let length = u8::try_from(text.len())
        .ok()
        .filter(|length| *length < TWO_BYTES);
    let length = length.context("a long text")?;
    let mut frame = vec![TEXT, MASKED | length];
    frame.extend(mask);
    frame.extend(
        text.bytes()
            .zip(mask.iter().cycle())
            .map(|(byte, mask)| byte ^ mask),
    );
    Ok(frame)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_frame_is_encoded_as_in_the_rfc() {
        // RFC 6455, 5.7: a single-frame masked text message.
        let mask = [0x37, 0xfa, 0x21, 0x3d];
        let expected = [
            0x81, 0x85, 0x37, 0xfa, 0x21, 0x3d, 0x7f, 0x9f, 0x4d, 0x51, 0x58,
        ];
        assert_eq!(frame("Hello", mask).expect("a frame"), expected);
        frame(&"x".repeat(126), mask).expect_err("a long text");
    }
}
