//! Timeout of a client for its response, from `X-Sandbox-Timeout`.
//!
//! The Python SDK sends in this header the time after which it gives up the request.

use std::{future::Future, pin::pin, time::Duration};

use http::HeaderMap;

use crate::{body::BodyProgress, target};

/// Reads the timeout: seconds, with or without a fraction.
///
/// As with upstream's Python router, a value that is not a positive number counts as absent. A
/// number that `Duration` cannot hold counts as absent too.
pub fn from_headers(headers: &HeaderMap) -> Option<Duration> {
    let text = target::single(headers, &target::TIMEOUT).ok().flatten()?;
    let seconds: f64 = text.trim().parse().ok()?;
    let timeout = Duration::try_from_secs_f64(seconds).ok()?;
    (!timeout.is_zero()).then_some(timeout)
}

/// Error of a response that did not come within the timeout.
#[derive(Debug, PartialEq, Eq)]
pub struct TimedOut;

/// Waits for a response.
///
/// The timeout restarts while the client sends its request: each time it expires, if more of the
/// body has come meanwhile, and once when the whole body is sent.
pub async fn await_response<T>(
    timeout: Duration,
    progress: &BodyProgress,
    answer: impl Future<Output = T>,
) -> Result<T, TimedOut> {
    let mut answer = pin!(answer);
    loop {
        let before = progress.bytes();
        tokio::select! {
            answer = &mut answer => return Ok(answer),
            () = progress.sent() => break,
            () = tokio::time::sleep(timeout) => {
                if progress.bytes() == before {
                    return Err(TimedOut);
                }
            }
        }
    }
    let answered = tokio::time::timeout(timeout, answer).await;
    answered.map_err(|_| TimedOut)
}

#[cfg(test)]
mod tests {
    use std::future::pending;

    use http::HeaderValue;
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case(&["60"], Some(Duration::from_secs(60)))]
    #[case(&["0.5"], Some(Duration::from_millis(500)))]
    #[case(&[" 1e2 "], Some(Duration::from_secs(100)))]
    #[case(&["60", "60"], Some(Duration::from_secs(60)))]
    #[case::none(&[], None)]
    #[case::empty(&[""], None)]
    #[case::no_number(&["invalid"], None)]
    #[case::unit(&["60s"], None)]
    #[case::zero(&["0"], None)]
    #[case::below_a_nanosecond(&["1e-300"], None)]
    #[case::negative(&["-1"], None)]
    #[case::infinite(&["inf"], None)]
    #[case::infinitely_negative(&["-Infinity"], None)]
    #[case::not_a_number(&["NaN"], None)]
    #[case::too_large(&["1e300"], None)]
    #[case::two(&["60", "6"], None)]
    #[case::not_ascii(&["60\u{e9}"], None)]
    fn an_invalid_timeout_counts_as_absent(
        #[case] values: &[&str],
        #[case] expected: Option<Duration>,
    ) {
        let mut headers = HeaderMap::new();
        for value in values {
            let value = HeaderValue::from_bytes(value.as_bytes()).unwrap();
            headers.append(target::TIMEOUT, value);
        }
        assert_eq!(from_headers(&headers), expected);
    }

    #[tokio::test]
    async fn a_response_is_awaited_until_the_timeout() {
        let progress = BodyProgress::default();
        let short = Duration::from_millis(5);
        assert_eq!(
            await_response(short, &progress, pending::<()>()).await,
            Err(TimedOut)
        );
        assert_eq!(await_response(short, &progress, async { 7 }).await, Ok(7));
    }

    #[tokio::test]
    async fn a_client_that_is_still_sending_does_not_wait_yet() {
        let progress = BodyProgress::default();
        let short = Duration::from_millis(5);
        // One more byte has come each time the timeout expires; the tenth is the last.
        let mut sent = 0;
        let sending = std::future::poll_fn(|_| {
            if sent < 10 {
                sent += 1;
                progress.add(1);
            }
            std::task::Poll::<()>::Pending
        });
        assert_eq!(
            await_response(short, &progress, sending).await,
            Err(TimedOut)
        );
        assert_eq!(progress.bytes(), 10);
    }
}
