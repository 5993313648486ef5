//! Results and faults of a cycle.

use std::fmt;

use super::schedule::Victim;

/// Fault that must not happen.
#[derive(Debug, Clone, thiserror::Error)]
pub enum Trouble {
    #[error("lost: {0}")]
    Lost(String),
    #[error("cut off: {0}")]
    CutOff(String),
    #[error("stuck: {0}")]
    Stuck(String),
    #[error("left over: {0}")]
    LeftOver(String),
    /// Fault of the test or the cluster, not of Torpor.
    #[error("{0}")]
    Broken(String),
}

impl From<anyhow::Error> for Trouble {
    fn from(error: anyhow::Error) -> Self {
        Self::Broken(format!("{error:#}"))
    }
}

impl From<kube::Error> for Trouble {
    fn from(error: kube::Error) -> Self {
        anyhow::Error::from(error).into()
    }
}

/// Result of a cycle.
#[derive(Debug, Clone, Default)]
pub struct Done {
    /// Planned victims, and whether each was found.
    pub kills: Vec<(Victim, bool)>,
    pub started_anew: u64,
}

impl fmt::Display for Done {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let missed = self.kills.iter().filter(|(_, hit)| !hit).count();
        write!(f, "ok")?;
        if missed > 0 {
            write!(f, ", {missed} not there")?;
        }
        if self.started_anew > 0 {
            write!(f, ", started anew")?;
        }
        Ok(())
    }
}
