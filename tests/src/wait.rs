//! Waiting for conditions: bounded, and with words for what did not come. Objects of the API are watched, everything else is looked at again and again.

use std::fmt::Debug;
use std::pin::pin;
use std::sync::LazyLock;
use std::time::{Duration, Instant};

use futures::StreamExt;
use kube::api::{ListParams, WatchEvent, WatchParams};
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, Resource, ResourceExt};
use serde::de::DeserializeOwned;

/// Between two looks, and between two that take long.
const PAUSE: Duration = Duration::from_millis(150);
const LONG_PAUSE: Duration = Duration::from_millis(500);

/// Environment: how many times slower than a usual one this machine is (an emulated one: 20).
const TIME_SCALE: &str = "TORPOR_TIME_SCALE";

/// A limit of time for this machine.
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

/// What a condition says of itself: it holds, with a value, or not yet, with the reason.
pub type Look<T> = anyhow::Result<Result<T, String>>;

/// Asks until the condition holds; an error of the condition ends the wait at once. `words` complete "not seen: …".
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

/// A look that starts a kubectl or reads about every process takes the processor from what is waited for: it is not repeated at once.
fn pause_after(look: Duration) -> Duration {
    look.saturating_mul(2).clamp(PAUSE, LONG_PAUSE)
}

/// Follows one object until `look` has found what it looks for in it; `None` is its absence.
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
    let mut last = "nothing was heard of it".to_owned();
    let seen = async {
        let mut changes = pin!(watcher::watch_object(api, name).default_backoff());
        while let Some(change) = changes.next().await {
            match change.map(&mut look) {
                Ok(Ok(found)) => return Some(found),
                Ok(Err(why)) => last = why,
                // The watch is begun again.
                Err(error) => last = error.to_string(),
            }
        }
        None
    };
    let seen = tokio::time::timeout(limit, Box::pin(seen)).await;
    let seen = seen.ok().flatten();
    seen.ok_or_else(|| anyhow::anyhow!("not seen within {limit:?}: {words} (last: {last})"))
}

/// Follows one object for so long: `look` finds fault with none of its states.
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
    let mut heard = false;
    let fault = async {
        let mut changes = pin!(watcher::watch_object(api, name).default_backoff());
        while let Some(change) = changes.next().await {
            // After an error the watch is begun again, with what is there by then.
            if let Ok(found) = change {
                heard = true;
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
    anyhow::ensure!(heard, "{words}: nothing was heard of it within {time:?}");
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
                // One that is gone, or a watch that has to begin again.
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

/// The look of a condition that is only true or false.
pub fn holds(truth: bool, otherwise: impl FnOnce() -> String) -> Look<()> {
    Ok(if truth { Ok(()) } else { Err(otherwise()) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_looks_long_looks_less_often_but_never_seldom() {
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
    async fn a_condition_that_never_holds_is_told_with_its_last_reason() {
        let mut looks = 0;
        let limit = Duration::from_millis(10);
        let scaled = scaled(limit);
        let seen = until("the end", limit, async || {
            looks += 1;
            Ok(Err::<(), String>(format!("look {looks}")))
        })
        .await;
        let error = seen.expect_err("it never holds").to_string();
        // One look or two: a busy machine may take the whole time for the first.
        let last = format!("not seen within {scaled:?}: the end (last: look {looks})");
        assert_eq!(error, last);
    }
}
