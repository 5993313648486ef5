//! Pauses, resumes and reclaims a sandbox. Each call may be repeated. The next observation shows
//! the result of an interrupted call.

use std::path::Path;
use std::time::Duration;

use torpor_cgroup::Hierarchies;
use torpor_cgroup::reclaim::{self, Reclaimed, Whose};
use torpor_cgroup::swap::{self, Forbidden};
use torpor_core::ids::PodUid;
use torpor_core::state::Live;
use torpor_core::steps::{Action, Outcome};

use crate::containerd::{self, Containerd};
use crate::proto::tasks::{Process, Status};
use crate::sandbox::{Member, Sandbox, Standing, sandboxes, standing};

/// Error of pausing, resuming or reclaiming a sandbox.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Containerd(#[from] containerd::Error),
    #[error("container {0} is being started")]
    Starting(String),
    #[error("a container of the sandbox must be paused first")]
    NotPaused,
    #[error(
        "no process of the sandbox is in a cgroup that containerd names (set Kata's sandbox_cgroup_only to true)"
    )]
    NoCgroup,
    #[error(transparent)]
    Cgroup(#[from] torpor_cgroup::Error),
    #[error(transparent)]
    Reclaim(#[from] reclaim::Error),
}

impl Error {
    /// Returns the reason for conditions and metrics, in CamelCase.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Containerd(_) => "ContainerdRefused",
            Self::Starting(_) => "Starting",
            Self::NotPaused => "NotPaused",
            Self::NoCgroup => "NoCgroup",
            Self::Cgroup(_) => "CgroupFailed",
            Self::Reclaim(error) => error.reason(),
        }
    }

    fn is_unknown(&self) -> bool {
        matches!(self, Self::Containerd(error) if error.is_unknown())
    }
}

/// Converts the result of a step to its outcome. `Ok(false)` becomes `Already`.
pub fn outcome(done: Result<bool, Error>) -> Outcome {
    match done {
        Ok(true) => Outcome::Done,
        Ok(false) => Outcome::Already,
        Err(error) if error.is_unknown() => Outcome::Unknown {
            message: words(&error),
        },
        Err(error) => Outcome::Failed {
            reason: error.reason().to_owned(),
            message: words(&error),
        },
    }
}

fn words(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(error.source(), |cause| cause.source());
    causes.fold(error.to_string(), |text, cause| format!("{text}: {cause}"))
}

/// An observation of a sandbox.
#[derive(Debug, Clone)]
pub struct Seen {
    pub sandbox: Sandbox,
    pub standing: Standing,
    /// Process of the sandbox container. For each container of a Kata sandbox it is the virtual
    /// machine.
    pub pid: Option<u32>,
}

/// Driver of the sandboxes of some of containerd's runtimes.
#[derive(Debug)]
pub struct Driver {
    containerd: Containerd,
    runtimes: Vec<String>,
    cgroups: Hierarchies,
}

impl Driver {
    /// Makes a driver. `runtimes`: containerd's names of the runtimes, complete or as a prefix with
    /// `*`. `cgroups`: mount point of the host's cgroups.
    pub fn new(
        containerd: Containerd,
        runtimes: Vec<String>,
        cgroups: &Path,
    ) -> Result<Self, torpor_cgroup::Error> {
        Ok(Self {
            containerd,
            runtimes,
            cgroups: Hierarchies::find(cgroups)?,
        })
    }

    /// Observes the sandbox of a Pod; none if the Pod has no sandbox. If there are several, returns
    /// the first that is not ended, else the last.
    pub fn look(&self, pod: &PodUid) -> Result<Option<Seen>, Error> {
        let containers = self.containerd.containers_of(pod)?;
        let mut last = None;
        for sandbox in sandboxes(&containers, &self.runtimes) {
            let own = self.containerd.task(sandbox.id.as_str())?;
            let tasks = sandbox
                .members
                .iter()
                .map(|member| self.containerd.task(&member.id));
            let tasks = tasks.collect::<Result<Vec<Option<Process>>, _>>()?;
            let standing = standing(own.as_ref(), &tasks);
            let seen = Seen {
                sandbox,
                standing,
                pid: own.map(|task| task.pid),
            };
            if standing.live != Live::None {
                return Ok(Some(seen));
            }
            last = Some(seen);
        }
        Ok(last)
    }

    /// Pauses all running containers but the sandbox container. Returns false if none ran. If a
    /// container cannot be paused, resumes the containers that this call has paused.
    pub fn pause(&self, sandbox: &Sandbox) -> Result<bool, Error> {
        let mut paused = Vec::new();
        for member in &sandbox.members {
            match self.pause_one(&member.id) {
                Ok(true) => paused.push(&member.id),
                Ok(false) => {}
                // It is unknown which containers are paused now. The next observation shows it.
                Err(error) if error.is_unknown() => return Err(error),
                Err(error) => {
                    for id in paused.iter().rev() {
                        // After an error the next observation finds the container paused, and the
                        // agent resumes it.
                        let _ = self.resume_one(id);
                    }
                    return Err(error);
                }
            }
        }
        Ok(!paused.is_empty())
    }

    /// Resumes all paused containers, the last one first. Returns false if none was paused. If a
    /// container cannot be resumed, resumes the others nevertheless and returns the first error.
    pub fn resume(&self, sandbox: &Sandbox) -> Result<bool, Error> {
        let mut resumed = false;
        let mut failed = None;
        for member in sandbox.members.iter().rev() {
            match self.resume_one(&member.id) {
                Ok(done) => resumed |= done,
                Err(error) => drop(failed.get_or_insert(error)),
            }
        }
        match failed {
            Some(error) => Err(error),
            None => Ok(resumed),
        }
    }

    fn pause_one(&self, id: &str) -> Result<bool, Error> {
        match self.status(id)? {
            Status::Running => {}
            Status::Created => return Err(Error::Starting(id.to_owned())),
            Status::Paused | Status::Stopped | Status::Pausing | Status::Unknown => {
                return Ok(false);
            }
        }
        match self.containerd.pause(id) {
            Ok(()) => Ok(true),
            Err(error) if error.is_unknown() => Err(error.into()),
            // The container may have been paused or may have ended meanwhile.
            Err(error) => match self.status(id)? {
                Status::Paused | Status::Stopped => Ok(false),
                _ => Err(error.into()),
            },
        }
    }

    fn resume_one(&self, id: &str) -> Result<bool, Error> {
        match self.status(id)? {
            Status::Paused | Status::Pausing => {}
            Status::Created | Status::Running | Status::Stopped | Status::Unknown => {
                return Ok(false);
            }
        }
        match self.containerd.resume(id) {
            Ok(()) => Ok(true),
            Err(error) if error.is_unknown() => Err(error.into()),
            Err(error) => match self.status(id)? {
                Status::Running | Status::Stopped => Ok(false),
                _ => Err(error.into()),
            },
        }
    }

    /// Returns the status of a container. A container without a task has ended.
    fn status(&self, id: &str) -> Result<Status, Error> {
        let task = self.containerd.task(id)?;
        Ok(task.map_or(Status::Stopped, |task| task.status()))
    }

    /// Pushes the memory of a paused sandbox into swap. Uses only cgroups with processes of the
    /// sandbox.
    pub fn reclaim(&self, sandbox: &Sandbox) -> Result<Reclaimed, Error> {
        let groups = self.groups(sandbox)?;
        let mut sum: Option<Reclaimed> = None;
        for group in groups {
            let done = reclaim::reclaim(&self.cgroups, group, Whose::Others)?;
            let before = sum.unwrap_or(Reclaimed {
                bytes_before: 0,
                bytes_after: 0,
            });
            sum = Some(Reclaimed {
                bytes_before: before.bytes_before.saturating_add(done.bytes_before),
                bytes_after: before.bytes_after.saturating_add(done.bytes_after),
            });
        }
        sum.ok_or(Error::NoCgroup)
    }

    /// Returns the cgroups with processes of the sandbox. A Kata sandbox has one, with the virtual
    /// machine.
    fn groups<'a>(&self, sandbox: &'a Sandbox) -> Result<Vec<&'a Path>, Error> {
        let own = sandbox.cgroup.as_deref();
        let mut groups = Vec::new();
        for Member { id, cgroup } in &sandbox.members {
            let Some(task) = self.containerd.task(id)? else {
                continue;
            };
            match task.status() {
                Status::Paused => {}
                Status::Stopped => continue,
                _ => return Err(Error::NotPaused),
            }
            let candidates = [own, cgroup.as_deref()].into_iter().flatten();
            for group in candidates {
                if self.cgroups.holds(group, task.pid)? && !groups.contains(&group) {
                    groups.push(group);
                }
            }
        }
        Ok(groups)
    }

    /// Executes one step of a plan. The planner plans no other actions, because Kata has no images.
    pub fn act(&self, sandbox: &Sandbox, action: &Action) -> Outcome {
        match action {
            Action::Pause | Action::Freeze | Action::Doze => outcome(self.pause(sandbox)),
            Action::Resume => outcome(self.resume(sandbox)),
            Action::Reclaim { image: None } => outcome(self.reclaim(sandbox).map(|_| true)),
            other => Outcome::Failed {
                reason: "NoImages".to_owned(),
                message: format!("{:?} needs an image, and Kata makes none", other.kind()),
            },
        }
    }

    /// Returns the processor time that the Pod has used; none if the kernel does not count it.
    pub fn processor_time(&self, sandbox: &Sandbox) -> Option<Duration> {
        self.cgroups.processor_time(self.pod_cgroup(sandbox)?)
    }

    /// Returns the Pod's working set in bytes, as the kubelet computes it.
    pub fn working_set(&self, sandbox: &Sandbox) -> Option<u64> {
        self.cgroups.working_set(self.pod_cgroup(sandbox)?)
    }

    /// Returns an error if the Pod's cgroup or a cgroup above it forbids swap. [`Self::reclaim`]
    /// finds a cgroup below it that forbids swap.
    pub fn may_swap(&self, sandbox: &Sandbox) -> Result<(), Forbidden> {
        let pod = self.pod_cgroup(sandbox);
        pod.map_or(Ok(()), |pod| swap::allowed(&self.cgroups, pod))
    }

    /// Returns the Pod's cgroup: the parent of the sandbox container's cgroup.
    fn pod_cgroup<'a>(&self, sandbox: &'a Sandbox) -> Option<&'a Path> {
        let parent = sandbox.cgroup.as_deref()?.parent()?;
        (parent != Path::new("")).then_some(parent)
    }
}
