//! Records of a Pod that outlive its sandboxes: the result of its last restore, the failure of a
//! fetch and the mark of a suspend. The shim writes the first, the agent the others.

use std::path::PathBuf;

use torpor_core::ids::PodUid;

use crate::error::Error;
use crate::files::{
    list, make_dir_of_agent, make_empty, read_if_there, remove_file, write_error, write_json,
};
use crate::pod::{FetchFailure, RestoreReport};
use crate::records::Records;

impl Records {
    /// Writes the result of a restore. It outlives the sandbox, because the kubelet removes a
    /// sandbox at once if its restore fails.
    pub fn write_report(&self, pod: &PodUid, report: &RestoreReport) -> Result<(), Error> {
        make_dir_of_agent(&self.reports)?;
        write_json(&self.report_path(pod), report)
    }

    /// Reads the result of this Pod's last restore; none if the Pod was never restored.
    pub fn report(&self, pod: &PodUid) -> Result<Option<RestoreReport>, Error> {
        read_if_there(&self.report_path(pod))
    }

    /// Returns the Pods with a report or a mark of a suspend, one entry per file.
    pub fn reported(&self) -> Result<Vec<PodUid>, Error> {
        let names = list(&self.reports)?.into_iter();
        Ok(names
            .filter_map(|name| PodUid::new(name.rsplit_once('.')?.0).ok())
            .collect())
    }

    /// Removes the report and the mark of a Pod that does not exist any more.
    pub fn remove_report(&self, pod: &PodUid) -> Result<(), Error> {
        remove_file(&self.report_path(pod))?;
        remove_file(&self.fetch_path(pod))?;
        remove_file(&self.suspends_path(pod))
    }

    /// Sets or removes the mark that the Pod is being suspended. With the mark, the Pod's memory
    /// stays in its image until another Pod continues the image.
    pub fn note_suspends(&self, pod: &PodUid, suspends: bool) -> Result<(), Error> {
        let path = self.suspends_path(pod);
        match (suspends, path.symlink_metadata().is_ok()) {
            (true, false) => {
                make_dir_of_agent(&self.reports)?;
                make_empty(&path).map_err(|source| write_error(&path, source))
            }
            (false, true) => remove_file(&path),
            _ => Ok(()),
        }
    }

    /// Reports whether [`Self::note_suspends`] has set the mark.
    pub fn suspends(&self, pod: &PodUid) -> bool {
        self.suspends_path(pod).symlink_metadata().is_ok()
    }

    /// Writes or removes the reason why the image that the Pod continues from was not fetched.
    pub fn note_fetch(&self, pod: &PodUid, failure: Option<&FetchFailure>) -> Result<(), Error> {
        match failure {
            Some(failure) => {
                make_dir_of_agent(&self.reports)?;
                write_json(&self.fetch_path(pod), failure)
            }
            None => remove_file(&self.fetch_path(pod)),
        }
    }

    /// Returns what [`Self::note_fetch`] wrote.
    pub fn fetch_failure(&self, pod: &PodUid) -> Result<Option<FetchFailure>, Error> {
        read_if_there(&self.fetch_path(pod))
    }

    fn fetch_path(&self, pod: &PodUid) -> PathBuf {
        self.reports.join(format!("{}.fetch", pod.as_str()))
    }

    fn suspends_path(&self, pod: &PodUid) -> PathBuf {
        self.reports.join(format!("{}.suspends", pod.as_str()))
    }

    fn report_path(&self, pod: &PodUid) -> PathBuf {
        self.reports.join(format!("{}.json", pod.as_str()))
    }
}
