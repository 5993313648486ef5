//! Leader election with a Lease, as client-go does it. The holder renews the Lease. Another
//! candidate takes the Lease after it has seen no renewal for the Lease's whole duration. No clocks
//! are compared: a candidate measures how long it has itself seen the same record.
//!
//! A process that loses the Lease exits on purpose. The Lease only saves work. Correctness does not
//! depend on it, because every dangerous call has its own fence.

use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::{
    api::coordination::v1::{Lease, LeaseSpec},
    apimachinery::pkg::apis::meta::v1::MicroTime,
};
use kube::{Api, Client, api::PostParams};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// Name of the Lease.
pub const LEASE_NAME: &str = torpor_api::install::CONTROLLER_LEASE;

/// Durations of leader election.
#[derive(Clone, Copy, Debug)]
pub struct Timing {
    /// Time after which a Lease that was not renewed expires.
    pub duration: Duration,
    /// Time from a renewal within which the next one must succeed, over all tries; shorter than
    /// `duration`.
    pub renew_deadline: Duration,
    /// Time between tries.
    pub retry: Duration,
}

impl Default for Timing {
    fn default() -> Self {
        Self {
            duration: Duration::from_secs(15),
            renew_deadline: Duration::from_secs(10),
            retry: Duration::from_secs(2),
        }
    }
}

impl Timing {
    /// Returns the time left to renew the Lease, or `None` if the leader must stop.
    ///
    /// `renewed` is when the request of the last renewal was sent. Another candidate sees the
    /// renewed record later than that, and waits for `duration` from then on. It therefore does not
    /// lead before this process has stopped.
    fn left(&self, renewed: Instant, now: Instant) -> Option<Duration> {
        let since = now.saturating_duration_since(renewed);
        let left = self.renew_deadline.saturating_sub(since);
        (!left.is_zero()).then_some(left)
    }
}

/// End of a wait for the Lease, or of a time as leader.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// The process is stopping and has released the Lease.
    Stopped,
    /// Another process may hold the Lease.
    Lost,
}

/// State of one candidate for the Lease.
#[derive(Clone)]
pub struct Candidate {
    api: Api<Lease>,
    identity: String,
    timing: Timing,
    /// Record as last seen, and since when it has been the same.
    observed: Option<(LeaseSpec, Instant)>,
    /// Time at which the request of the last successful renewal was sent.
    renewed: Option<Instant>,
}

impl std::fmt::Debug for Candidate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Candidate({})", self.identity)
    }
}

impl Candidate {
    /// Makes a candidate for the Lease of a namespace. `identity` must be unique among the
    /// candidates.
    pub fn new(client: Client, namespace: &str, identity: String, timing: Timing) -> Self {
        Self {
            api: Api::namespaced(client, namespace),
            identity,
            timing,
            observed: None,
            renewed: None,
        }
    }

    /// Waits for the Lease. Returns `None` if the process is stopping.
    pub async fn acquire(&mut self, shutdown: &CancellationToken) -> Option<()> {
        loop {
            match self.try_within(self.timing.renew_deadline).await {
                Ok(true) => return Some(()),
                Ok(false) => tracing::debug!("another process holds the lease"),
                Err(error) => tracing::warn!(%error, "cannot get the lease"),
            }
            tokio::select! {
                () = shutdown.cancelled() => return None,
                () = tokio::time::sleep(self.timing.retry) => {}
            }
        }
    }

    /// Renews the Lease until `shutdown` and then releases it, or until it is lost.
    pub async fn keep(&mut self, shutdown: &CancellationToken) -> Ended {
        let began = Instant::now();
        let left = |this: &Self| {
            let renewed = this.renewed.unwrap_or(began);
            this.timing.left(renewed, Instant::now())
        };
        loop {
            let Some(wait) = left(self) else {
                return Ended::Lost;
            };
            tokio::select! {
                () = shutdown.cancelled() => {
                    self.release().await;
                    return Ended::Stopped;
                }
                () = tokio::time::sleep(wait.min(self.timing.retry)) => {}
            }
            let Some(limit) = left(self) else {
                return Ended::Lost;
            };
            match self.try_within(limit).await {
                Ok(true) => {}
                Ok(false) => return Ended::Lost,
                Err(error) => tracing::warn!(%error, "cannot renew the lease"),
            }
        }
    }

    async fn try_within(&mut self, limit: Duration) -> Result<bool, Error> {
        let sent = Instant::now();
        let held = tokio::time::timeout(limit, self.try_to_hold())
            .await
            .map_err(|_| Error::NoAnswer)??;
        if held {
            self.renewed = Some(sent);
        }
        Ok(held)
    }

    /// Tries once to get or renew the Lease. Returns `false` if another process holds it.
    async fn try_to_hold(&mut self) -> Result<bool, Error> {
        let Some(mut lease) = self.api.get_opt(LEASE_NAME).await.map_err(Error::Call)? else {
            let lease = Lease {
                metadata: kube::api::ObjectMeta {
                    name: Some(LEASE_NAME.to_owned()),
                    ..Default::default()
                },
                spec: Some(self.record(None)),
            };
            return Self::write_result(self.api.create(&PostParams::default(), &lease).await);
        };
        let current = lease.spec.take().unwrap_or_default();
        let ours = current.holder_identity.as_deref() == Some(&self.identity);
        if !ours && !self.has_expired(&current) {
            return Ok(false);
        }
        lease.spec = Some(self.record(Some(&current)));
        // The resourceVersion in the object makes two candidates' writes exclude each other.
        Self::write_result(
            self.api
                .replace(LEASE_NAME, &PostParams::default(), &lease)
                .await,
        )
    }

    fn write_result(written: Result<Lease, kube::Error>) -> Result<bool, Error> {
        match written {
            Ok(_) => Ok(true),
            // Another write came in between, perhaps an earlier one of ours whose answer was lost.
            // The next read shows the holder.
            Err(kube::Error::Api(status)) if status.is_conflict() || status.is_already_exists() => {
                Err(Error::Raced)
            }
            Err(error) => Err(Error::Call(error)),
        }
    }

    /// Reports whether the Lease has no holder, or its holder has not renewed it for its duration.
    fn has_expired(&mut self, current: &LeaseSpec) -> bool {
        if current.holder_identity.as_deref().unwrap_or("").is_empty() {
            return true;
        }
        let seconds = current
            .lease_duration_seconds
            .and_then(|s| u64::try_from(s).ok());
        let lasts = seconds.map_or(self.timing.duration, Duration::from_secs);
        match &self.observed {
            Some((record, since)) if record == current => since.elapsed() > lasts,
            _ => {
                self.observed = Some((current.clone(), Instant::now()));
                false
            }
        }
    }

    fn record(&self, current: Option<&LeaseSpec>) -> LeaseSpec {
        let now = MicroTime(Timestamp::now());
        let held_by_us = current.filter(|c| c.holder_identity.as_deref() == Some(&self.identity));
        let transitions = current
            .and_then(|c| c.lease_transitions)
            .unwrap_or_default();
        LeaseSpec {
            holder_identity: Some(self.identity.clone()),
            lease_duration_seconds: i32::try_from(self.timing.duration.as_secs()).ok(),
            renew_time: Some(now.clone()),
            acquire_time: held_by_us
                .and_then(|c| c.acquire_time.clone())
                .or(Some(now)),
            lease_transitions: Some(match (current, held_by_us) {
                (None, _) => 0,
                (Some(_), Some(_)) => transitions,
                (Some(_), None) => transitions + 1,
            }),
            ..LeaseSpec::default()
        }
    }

    /// Releases the Lease, so that the next candidate need not wait until it expires.
    async fn release(&self) {
        let release = async {
            let mut lease = self.api.get(LEASE_NAME).await?;
            let Some(spec) = &mut lease.spec else {
                return Ok(());
            };
            if spec.holder_identity.as_deref() != Some(&self.identity) {
                return Ok(());
            }
            spec.holder_identity = Some(String::new());
            spec.lease_duration_seconds = Some(1);
            self.api
                .replace(LEASE_NAME, &PostParams::default(), &lease)
                .await
                .map(drop)
        };
        match tokio::time::timeout(self.timing.retry, release).await {
            Ok(Ok(())) => tracing::info!("released the lease"),
            Ok(Err(error)) => tracing::warn!(%error, "cannot release the lease"),
            Err(_) => tracing::warn!("no answer while releasing the lease"),
        }
    }
}

/// Failure of a try to get or renew the Lease.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("no answer from the apiserver")]
    NoAnswer,
    #[error("another process wrote the lease at the same time")]
    Raced,
    // kube's Display names its causes already.
    #[error("{0}")]
    Call(kube::Error),
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case::just_renewed(0, Some(10))]
    #[case::earlier_tries_took_time(7, Some(3))]
    #[case::over(10, None)]
    #[case::long_over(22, None)]
    fn all_tries_of_a_renewal_share_one_deadline(#[case] since: u64, #[case] left: Option<u64>) {
        let renewed = Instant::now();
        let now = renewed + Duration::from_secs(since);
        let left = left.map(Duration::from_secs);
        assert_eq!(Timing::default().left(renewed, now), left);
    }
}
