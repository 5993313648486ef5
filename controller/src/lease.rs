//! Leader election over a Lease, as client-go does it: whoever holds the lease renews it; who sees
//! it not renewed for its whole duration takes it. No clocks are compared: what counts is how long
//! *this* process has seen the same record.
//!
//! Losing the lease is fatal on purpose. The lease saves work, it is not what keeps the cluster
//! right: every dangerous call is fenced by itself.

use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::{
    api::coordination::v1::{Lease, LeaseSpec},
    apimachinery::pkg::apis::meta::v1::MicroTime,
};
use kube::{Api, Client, api::PostParams};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// Name of the lease.
pub const LEASE_NAME: &str = torpor_api::install::CONTROLLER_LEASE;

/// The three spans of leader election.
#[derive(Clone, Copy, Debug)]
pub struct Timing {
    /// How long a lease lasts without being renewed.
    pub duration: Duration,
    /// Time from a renewal within which the next one has to succeed, all tries together; shorter
    /// than `duration`.
    pub renew_deadline: Duration,
    /// How long to wait between tries.
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
    /// Time that is left for tries to renew a lease; none once the leader has to stop.
    ///
    /// `renewed` is when the request of the last renewal was sent. Another candidate sees the
    /// renewed record later than that, and waits for `duration` from then on: it does not lead
    /// before this one has stopped.
    fn left(&self, renewed: Instant, now: Instant) -> Option<Duration> {
        let since = now.saturating_duration_since(renewed);
        let left = self.renew_deadline.saturating_sub(since);
        (!left.is_zero()).then_some(left)
    }
}

/// How a wait for the lease, or a time as leader, ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// The program is being stopped; the lease was given back.
    Stopped,
    /// Somebody else may hold the lease by now.
    Lost,
}

/// A lease, seen by one candidate.
#[derive(Clone)]
pub struct Candidate {
    api: Api<Lease>,
    identity: String,
    timing: Timing,
    /// The record as last seen, and since when it has been the same.
    seen: Option<(LeaseSpec, Instant)>,
    /// When the request was sent that last made the lease this candidate's.
    renewed: Option<Instant>,
}

impl std::fmt::Debug for Candidate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Candidate({})", self.identity)
    }
}

impl Candidate {
    /// A candidate for the lease of a namespace. `identity` has to differ from that of every other
    /// candidate.
    pub fn new(client: Client, namespace: &str, identity: String, timing: Timing) -> Self {
        Self {
            api: Api::namespaced(client, namespace),
            identity,
            timing,
            seen: None,
            renewed: None,
        }
    }

    /// Waits for the lease. `None`: the program is being stopped.
    pub async fn acquire(&mut self, shutdown: &CancellationToken) -> Option<()> {
        loop {
            match self.limited_try(self.timing.renew_deadline).await {
                Ok(true) => return Some(()),
                Ok(false) => tracing::debug!("another process leads"),
                Err(error) => tracing::warn!(%error, "cannot get the lease"),
            }
            tokio::select! {
                () = shutdown.cancelled() => return None,
                () = tokio::time::sleep(self.timing.retry) => {}
            }
        }
    }

    /// Keeps the lease until `shutdown`, then gives it back; or until it is lost.
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
            match self.limited_try(limit).await {
                Ok(true) => {}
                Ok(false) => return Ended::Lost,
                Err(error) => tracing::warn!(%error, "cannot renew the lease"),
            }
        }
    }

    async fn limited_try(&mut self, limit: Duration) -> Result<bool, Error> {
        let sent = Instant::now();
        let held = tokio::time::timeout(limit, self.try_to_hold())
            .await
            .map_err(|_| Error::NoAnswer)??;
        if held {
            self.renewed = Some(sent);
        }
        Ok(held)
    }

    /// One try to get or renew the lease. `false`: somebody else holds it.
    async fn try_to_hold(&mut self) -> Result<bool, Error> {
        let Some(mut lease) = self.api.get_opt(LEASE_NAME).await.map_err(Error::Call)? else {
            let lease = Lease {
                metadata: kube::api::ObjectMeta {
                    name: Some(LEASE_NAME.to_owned()),
                    ..Default::default()
                },
                spec: Some(self.record(None)),
            };
            return Self::settled(self.api.create(&PostParams::default(), &lease).await);
        };
        let current = lease.spec.take().unwrap_or_default();
        let ours = current.holder_identity.as_deref() == Some(&self.identity);
        if !ours && !self.has_run_out(&current) {
            return Ok(false);
        }
        lease.spec = Some(self.record(Some(&current)));
        // The resourceVersion in the object makes two candidates' writes exclude each other.
        Self::settled(
            self.api
                .replace(LEASE_NAME, &PostParams::default(), &lease)
                .await,
        )
    }

    fn settled(written: Result<Lease, kube::Error>) -> Result<bool, Error> {
        match written {
            Ok(_) => Ok(true),
            // Somebody wrote in between; perhaps an earlier write of ours whose answer was lost.
            // The next look tells.
            Err(kube::Error::Api(status)) if status.is_conflict() || status.is_already_exists() => {
                Err(Error::Raced)
            }
            Err(error) => Err(Error::Call(error)),
        }
    }

    /// Whether nobody holds the lease, or its holder has not renewed it for as long as it lasts.
    fn has_run_out(&mut self, current: &LeaseSpec) -> bool {
        if current.holder_identity.as_deref().unwrap_or("").is_empty() {
            return true;
        }
        let seconds = current
            .lease_duration_seconds
            .and_then(|s| u64::try_from(s).ok());
        let lasts = seconds.map_or(self.timing.duration, Duration::from_secs);
        match &self.seen {
            Some((record, since)) if record == current => since.elapsed() > lasts,
            _ => {
                self.seen = Some((current.clone(), Instant::now()));
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

    /// Gives the lease back, so that the next one need not wait for it to run out.
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
            Ok(Ok(())) => tracing::info!("gave the lease back"),
            Ok(Err(error)) => tracing::warn!(%error, "cannot give the lease back"),
            Err(_) => tracing::warn!("no answer while giving the lease back"),
        }
    }
}

/// A try did not come through.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("no answer from the apiserver")]
    NoAnswer,
    #[error("somebody else wrote the lease at the same time")]
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
    #[case::the_tries_so_far_took_a_while(7, Some(3))]
    #[case::over(10, None)]
    #[case::long_over(22, None)]
    fn all_tries_of_a_renewal_share_one_deadline(#[case] since: u64, #[case] left: Option<u64>) {
        let renewed = Instant::now();
        let now = renewed + Duration::from_secs(since);
        let left = left.map(Duration::from_secs);
        assert_eq!(Timing::default().left(renewed, now), left);
    }
}
