//! Waiting for conditions: polled, bounded, and with words for what did not come.

use std::time::{Duration, Instant};

/// Between two looks. The apiserver of a development cluster answers in a few milliseconds.
const PAUSE: Duration = Duration::from_millis(100);

/// What a condition says of itself: it holds, with a value, or not yet, with the reason.
pub type Look<T> = anyhow::Result<Result<T, String>>;

/// Asks until the condition holds; an error of the condition ends the wait at once. `words` complete "not seen: …".
pub async fn until<T>(
    words: &str,
    limit: Duration,
    mut condition: impl AsyncFnMut() -> Look<T>,
) -> anyhow::Result<T> {
    let deadline = Instant::now() + limit;
    loop {
        let why = match condition().await? {
            Ok(value) => return Ok(value),
            Err(why) => why,
        };
        anyhow::ensure!(
            Instant::now() < deadline,
            "not seen within {limit:?}: {words} (last: {why})"
        );
        tokio::time::sleep(PAUSE).await;
    }
}

/// The look of a condition that is only true or false.
pub fn holds(truth: bool, otherwise: impl FnOnce() -> String) -> Look<()> {
    Ok(if truth { Ok(()) } else { Err(otherwise()) })
}
