//! Percentiles and medians.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Percentiles of times, in milliseconds.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Times {
    pub count: usize,
    pub p50: f64,
    pub p90: f64,
    pub p99: f64,
    pub max: f64,
}

impl Times {
    /// Returns the percentiles of the times; without any time all are 0.
    pub(crate) fn of(times: &[Duration]) -> Self {
        let mut sorted = times.to_vec();
        sorted.sort_unstable();
        Self {
            count: sorted.len(),
            p50: milliseconds(percentile(&sorted, 50)),
            p90: milliseconds(percentile(&sorted, 90)),
            p99: milliseconds(percentile(&sorted, 99)),
            max: milliseconds(sorted.last().copied().unwrap_or_default()),
        }
    }
}

/// Returns the smallest of the sorted times that `percent` of all do not exceed.
fn percentile(sorted: &[Duration], percent: usize) -> Duration {
    let rank = (sorted.len() * percent).div_ceil(100);
    sorted
        .get(rank.saturating_sub(1))
        .copied()
        .unwrap_or_default()
}

/// Returns the middle value; of an even number of values the mean of the two in the middle, and 0
/// without any.
pub(crate) fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    match (sorted.get(middle), sorted.len() % 2) {
        (None, _) => 0.0,
        (Some(value), 1) => *value,
        (Some(value), _) => (sorted[middle - 1] + value) / 2.0,
    }
}

/// Returns milliseconds with three decimals.
pub(crate) fn milliseconds(time: Duration) -> f64 {
    (time.as_secs_f64() * 1e6).round() / 1e3
}

/// Returns a quantile of a Prometheus histogram, interpolated as its own `histogram_quantile` does.
///
/// `buckets` are upper bounds and the number of observations at or below each, in order; the last
/// bound is infinite.
pub(crate) fn histogram_quantile(buckets: &[(f64, f64)], quantile: f64) -> Option<f64> {
    let total = buckets.last().map(|(_, count)| *count)?;
    if total == 0.0 {
        return None;
    }
    let rank = quantile * total;
    let at = buckets.iter().position(|(_, count)| *count >= rank)?;
    let (bound, count) = buckets[at];
    let (lower, before) = match at.checked_sub(1) {
        Some(previous) => buckets[previous],
        None => (0.0, 0.0),
    };
    if bound.is_infinite() {
        return Some(lower);
    }
    let share = (rank - before) / (count - before).max(f64::MIN_POSITIVE);
    Some(lower + (bound - lower) * share)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_times_that_occurred() {
        let times: Vec<Duration> = (1..=200).map(Duration::from_millis).collect();
        let of = Times::of(&times);
        assert_eq!(
            (of.count, of.p50, of.p90, of.p99, of.max),
            (200, 100.0, 180.0, 198.0, 200.0)
        );
        assert_eq!(Times::of(&[]), Times::default());
        let one = Times::of(&[Duration::from_millis(7)]);
        assert_eq!((one.p50, one.p99), (7.0, 7.0));
    }

    #[test]
    fn a_median_lies_between_the_two_middle_values() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), 2.5);
        assert_eq!(median(&[]), 0.0);
    }

    #[test]
    fn quantiles_are_interpolated_within_their_bucket() {
        let buckets = [(10.0, 50.0), (20.0, 100.0), (f64::INFINITY, 100.0)];
        assert_eq!(histogram_quantile(&buckets, 0.5), Some(10.0));
        assert_eq!(histogram_quantile(&buckets, 0.25), Some(5.0));
        assert_eq!(histogram_quantile(&buckets, 0.9), Some(18.0));
        let beyond = [(10.0, 0.0), (f64::INFINITY, 4.0)];
        assert_eq!(histogram_quantile(&beyond, 0.5), Some(10.0));
        assert_eq!(histogram_quantile(&[(f64::INFINITY, 0.0)], 0.5), None);
        assert_eq!(histogram_quantile(&[], 0.5), None);
    }
}
