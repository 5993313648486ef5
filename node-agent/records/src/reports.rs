//! What is known of a Pod beyond the life of its sandboxes: how its last restore ended, and that it is being suspended.

use std::path::PathBuf;

use torpor_core::ids::PodUid;

use super::files::{list, make_dir, read_if_there, remove_file, write_error, write_json};
use super::{Error, Records, RestoreReport};

impl Records {
    /// The report outlives the sandbox: one that could not be restored is taken away by the kubelet at once.
    pub fn write_report(&self, pod: &PodUid, report: &RestoreReport) -> Result<(), Error> {
        make_dir(&self.reports)?;
        write_json(&self.report_path(pod), report)
    }

    /// How the last restore of this Pod ended; none if there was none.
    pub fn report(&self, pod: &PodUid) -> Result<Option<RestoreReport>, Error> {
        read_if_there(&self.report_path(pod))
    }

    /// The Pods of which there is a report.
    pub fn reported(&self) -> Result<Vec<PodUid>, Error> {
        let names = list(&self.reports)?.into_iter();
        Ok(names
            .filter_map(|name| PodUid::new(name.rsplit_once('.')?.0).ok())
            .collect())
    }

    /// Forgets what is known of a Pod that is gone.
    pub fn remove_report(&self, pod: &PodUid) -> Result<(), Error> {
        remove_file(&self.report_path(pod))?;
        remove_file(&self.suspends_path(pod))
    }

    /// Notes whether the Pod is being suspended: then its memory stays in its image until another Pod goes on from it.
    pub fn note_suspends(&self, pod: &PodUid, suspends: bool) -> Result<(), Error> {
        let path = self.suspends_path(pod);
        match (suspends, path.exists()) {
            (true, false) => {
                make_dir(&self.reports)?;
                std::fs::write(&path, "").map_err(|source| write_error(&path, source))
            }
            (false, true) => remove_file(&path),
            _ => Ok(()),
        }
    }

    /// What [`Self::note_suspends`] noted.
    pub fn suspends(&self, pod: &PodUid) -> bool {
        self.suspends_path(pod).exists()
    }

    fn suspends_path(&self, pod: &PodUid) -> PathBuf {
        self.reports.join(format!("{}.suspends", pod.as_str()))
    }

    fn report_path(&self, pod: &PodUid) -> PathBuf {
        self.reports.join(format!("{}.json", pod.as_str()))
    }
}
