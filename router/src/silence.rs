//! How long a client waits for an answer, as it says in `X-Sandbox-Timeout`. The Python SDK sends there the time after which it gives the request up itself.

use std::{future::Future, pin::pin, time::Duration};

use http::HeaderMap;

use crate::{body::Seen, target};

/// What a client says: seconds, with a fraction or not. As with upstream's Python router, what is no positive number counts as not said; and so does a number that no clock
/// holds.
pub fn allowed(headers: &HeaderMap) -> Option<Duration> {
    let text = target::single(headers, &target::TIMEOUT).ok().flatten()?;
    let seconds: f64 = text.trim().parse().ok()?;
    let allowed = Duration::try_from_secs_f64(seconds).ok()?;
    (!allowed.is_zero()).then_some(allowed)
}

/// Nothing came for as long as is allowed.
#[derive(Debug, PartialEq, Eq)]
pub struct Silent;

/// Waits for an answer. A client that is still sending its request does not wait for it yet: until then the time begins anew when it has run out and more of the request's body has
/// come meanwhile, and once more when all of it is on its way.
pub async fn answered<T>(
    allowed: Duration,
    seen: &Seen,
    answer: impl Future<Output = T>,
) -> Result<T, Silent> {
    let mut answer = pin!(answer);
    loop {
        let before = seen.bytes();
        tokio::select! {
            answer = &mut answer => return Ok(answer),
            () = seen.sent() => break,
            () = tokio::time::sleep(allowed) => {
                if seen.bytes() == before {
                    return Err(Silent);
                }
            }
        }
    }
    let answered = tokio::time::timeout(allowed, answer).await;
    answered.map_err(|_| Silent)
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
    #[case::less_than_the_clock_counts(&["1e-300"], None)]
    #[case::negative(&["-1"], None)]
    #[case::infinite(&["inf"], None)]
    #[case::infinitely_negative(&["-Infinity"], None)]
    #[case::not_a_number(&["NaN"], None)]
    #[case::beyond_the_clock(&["1e300"], None)]
    #[case::two(&["60", "6"], None)]
    #[case::not_ascii(&["60\u{e9}"], None)]
    fn what_is_no_time_counts_as_not_said(
        #[case] values: &[&str],
        #[case] expected: Option<Duration>,
    ) {
        let mut headers = HeaderMap::new();
        for value in values {
            let value = HeaderValue::from_bytes(value.as_bytes()).unwrap();
            headers.append(target::TIMEOUT, value);
        }
        assert_eq!(allowed(&headers), expected);
    }

    #[tokio::test]
    async fn who_waits_for_an_answer_waits_so_long_and_no_longer() {
        let seen = Seen::default();
        let short = Duration::from_millis(5);
        assert_eq!(answered(short, &seen, pending::<()>()).await, Err(Silent));
        assert_eq!(answered(short, &seen, async { 7 }).await, Ok(7));
    }

    #[tokio::test]
    async fn a_client_that_is_still_sending_does_not_wait_yet() {
        let seen = Seen::default();
        let short = Duration::from_millis(5);
        // Each time the clock runs out, one more byte has come; the tenth is the last.
        let mut sent = 0;
        let sending = std::future::poll_fn(|_| {
            if sent < 10 {
                sent += 1;
                seen.add(1);
            }
            std::task::Poll::<()>::Pending
        });
        assert_eq!(answered(short, &seen, sending).await, Err(Silent));
        assert_eq!(seen.bytes(), 10);
    }
}
