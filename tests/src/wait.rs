//! Waits for conditions, with a time limit and a description of what was not seen.
//!
//! Objects of the API are watched, everything else is polled.

use std::fmt::Debug;
use std::pin::pin;
use std::sync::LazyLock;
use std::time::{Duration, Instant};

use futures::StreamExt;
use kube::api::{ListParams, WatchEvent, WatchParams};
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, Resource, ResourceExt};
use serde::de::DeserializeOwned;

/// Shortest and longest time between two looks.
const PAUSE: Duration = Duration::from_millis(150);
const LONG_PAUSE: Duration = Duration::from_millis(500);

/// Environment variable: how many times slower than usual this machine is (an emulated one: 20).
const TIME_SCALE: &str = "TORPOR_TIME_SCALE";

/// Returns the time limit for this machine.
pub fn scaled(limit: Duration) -> Duration {
    static SCALE: LazyLock<u32> = LazyLock::new(|| scale(std::env::var(TIME_SCALE).ok()));
    limit.saturating_mul(*SCALE)
}

fn scale(value: Option<String>) -> u32 {
    let Some(value) = value else {
        return 1;
    };
    let number = value.parse().ok().filter(|number| *number > 0);
    number.unwrap_or_else(|| panic!("{TIME_SCALE}={value} is no whole number from 1"))
}

/// Result of a look at a condition: it holds, with a value, or not yet, with the reason.
pub type Look<T> = anyhow::Result<Result<T, String>>;

/// Polls until the condition holds; an error of the condition ends the wait at once.
///
/// `words` complete "not seen: …".
pub async fn until<T>(
    words: &str,
    limit: Duration,
    mut condition: impl AsyncFnMut() -> Look<T>,
) -> anyhow::Result<T> {
    let limit = scaled(limit);
    let deadline = Instant::now() + limit;
    loop {
        let began = Instant::now();
        let why = match condition().await? {
            Ok(value) => return Ok(value),
            Err(why) => why,
        };
        anyhow::ensure!(
            Instant::now() < deadline,
            "not seen within {limit:?}: {words} (last: {why})"
        );
        tokio::time::sleep(pause_after(began.elapsed())).await;
    }
}

/// Returns the pause after a look that took this long.
///
/// A look that starts a kubectl or reads about every process takes the processor from the awaited
/// event, so it is not repeated at once.
fn pause_after(look: Duration) -> Duration {
    look.saturating_mul(2).clamp(PAUSE, LONG_PAUSE)
}

/// Watches one object until `look` returns a value for one of its states; `None` is its absence.
pub async fn object<K, T>(
    api: Api<K>,
    name: &str,
    words: &str,
    limit: Duration,
    mut look: impl FnMut(Option<K>) -> Result<T, String>,
) -> anyhow::Result<T>
where
    K: Resource<DynamicType: Default> + Clone + DeserializeOwned + Debug + Send + 'static,
{
    let limit = scaled(limit);
    let mut last = "no state of it was seen".to_owned();
    let seen = async {
        let mut changes = pin!(watcher::watch_object(api, name).default_backoff());
        while let Some(change) = changes.next().await {
            match change.map(&mut look) {
                Ok(Ok(found)) => return Some(found),
                Ok(Err(why)) => last = why,
                // The watch begins again.
                Err(error) => last = error.to_string(),
            }
        }
        None
    };
    let seen = tokio::time::timeout(limit, Box::pin(seen)).await;
    let seen = seen.ok().flatten();
    seen.ok_or_else(|| anyhow::anyhow!("not seen within {limit:?}: {words} (last: {last})"))
}

/// Watches one object for this time; `look` must accept all of its states.
pub async fn stays<K>(
    api: Api<K>,
    name: &str,
    words: &str,
    time: Duration,
    mut look: impl FnMut(Option<K>) -> Result<(), String>,
) -> anyhow::Result<()>
where
    K: Resource<DynamicType: Default> + Clone + DeserializeOwned + Debug + Send + 'static,
{
    let mut seen = false;
    let fault = async {
        let mut changes = pin!(watcher::watch_object(api, name).default_backoff());
        while let Some(change) = changes.next().await {
            // After an error the watch begins again with the current state.
            if let Ok(found) = change {
                seen = true;
                look(found)?;
            }
        }
        Ok::<(), String>(())
    };
    let began = Instant::now();
    let fault = tokio::time::timeout(time, Box::pin(fault)).await;
    if let Ok(Err(why)) = fault {
        anyhow::bail!("{words}: not after {:?}: {why}", began.elapsed());
    }
    anyhow::ensure!(seen, "{words}: no state of it was seen within {time:?}");
    Ok(())
}

/// Waits until there is no object of the kind any more.
pub async fn none<K>(api: &Api<K>, words: &str, limit: Duration) -> anyhow::Result<()>
where
    K: Resource<DynamicType: Default> + Clone + DeserializeOwned + Debug,
{
    let limit = scaled(limit);
    let mut left = Vec::new();
    let gone = async {
        loop {
            let found = api.list(&ListParams::default()).await?;
            left = found.items.iter().map(ResourceExt::name_any).collect();
            if left.is_empty() {
                return anyhow::Ok(());
            }
            let version = found.metadata.resource_version.unwrap_or_default();
            let mut changes = pin!(api.watch(&WatchParams::default(), &version).await?);
            while let Some(change) = changes.next().await {
                // An object is gone, or the watch has to begin again.
                if matches!(
                    change,
                    Ok(WatchEvent::Deleted(_) | WatchEvent::Error(_)) | Err(_)
                ) {
                    break;
                }
            }
        }
    };
    let gone = tokio::time::timeout(limit, Box::pin(gone)).await;
    gone.unwrap_or_else(|_| {
        Err(anyhow::anyhow!(
            "not seen within {limit:?}: {words} (still there: {left:?})"
        ))
    })
}

/// Returns the look at a condition that is only true or false.
pub fn holds(truth: bool, otherwise: impl FnOnce() -> String) -> Look<()> {
    Ok(if truth { Ok(()) } else { Err(otherwise()) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_look_is_repeated_less_often_but_within_the_limit() {
        assert_eq!(pause_after(Duration::ZERO), PAUSE);
        assert_eq!(pause_after(PAUSE), PAUSE * 2);
        assert_eq!(pause_after(Duration::from_secs(20)), LONG_PAUSE);
        assert_eq!(pause_after(Duration::MAX), LONG_PAUSE);
    }

    #[test]
    fn limits_are_as_they_are_written_unless_the_machine_is_slow() {
        assert_eq!(scale(None), 1);
        assert_eq!(scale(Some("20".to_owned())), 20);
        for wrong in ["0", "", "-1", "1.5", "fast"] {
            let refused = std::panic::catch_unwind(|| scale(Some(wrong.to_owned())));
            assert!(refused.is_err(), "{wrong}");
        }
    }

    #[tokio::test]
    async fn a_condition_that_never_holds_is_reported_with_its_last_reason() {
        let mut looks = 0;
        let limit = Duration::from_millis(10);
        let scaled = scaled(limit);
        let seen = until("the end", limit, async || {
            looks += 1;
            Ok(Err::<(), String>(format!("look {looks}")))
        })
        .await;
        let error = seen.expect_err("it never holds").to_string();
        // A busy machine may take the whole time for the first look.
        let last = format!("not seen within {scaled:?}: the end (last: look {looks})");
        assert_eq!(error, last);
    }
}
