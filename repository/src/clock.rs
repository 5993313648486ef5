//! Time of the object store. Ages of objects are counted by this clock alone, so that a wrong clock
//! of a node deletes nothing.

use jiff::Timestamp;
use object_store::{ObjectMeta, ObjectStoreExt, PutPayload};

use crate::{Error, Repository};

impl Repository {
    /// Returns the object store's time. Writes one small object.
    pub(crate) async fn now(&self) -> Result<Timestamp, Error> {
        let clock = self.names.clock();
        let wrote = self.objects.put(&clock, PutPayload::from_static(b"torpor"));
        wrote.await.map_err(|e| self.failed("write", &clock, e))?;
        let meta = self.objects.head(&clock).await;
        Ok(modified(
            &meta.map_err(|e| self.failed("examine", &clock, e))?,
        ))
    }
}

/// Returns the time of an object's last write.
pub(crate) fn modified(meta: &ObjectMeta) -> Timestamp {
    let time = meta.last_modified;
    Timestamp::new(time.timestamp(), 0).unwrap_or(Timestamp::MAX)
}
