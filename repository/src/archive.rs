//! Records of archived Sandboxes, one beside each archived image. Their content is the caller's.

use bytes::Bytes;

use crate::names::ImageName;
use crate::object::ARCHIVE;
use crate::{Error, Repository};

impl Repository {
    /// Writes the record of an archived image, in place of an earlier one.
    pub async fn put_archive(&self, name: &ImageName, record: &[u8]) -> Result<(), Error> {
        let (path, sealer) = (self.names.archive(name), self.sealer(name)?);
        let cluster = self.names.cluster();
        let encoded = ARCHIVE.encode(cluster, name, &[], record, sealer.as_ref());
        let encoded = encoded.map_err(|why| self.damaged(&path, why))?;
        self.put(&path, Bytes::from(encoded)).await
    }

    /// Returns the record of an archived image.
    pub async fn archive(&self, name: &ImageName) -> Result<Vec<u8>, Error> {
        let path = self.names.archive(name);
        let missing = || Error::NoArchive {
            object: path.to_string(),
            repository: self.shown.clone(),
        };
        let bytes = self
            .read(&path, ARCHIVE.largest)
            .await?
            .ok_or_else(missing)?;
        let decoded = ARCHIVE.decode(&bytes, self.names.cluster(), name, &self.keys);
        decoded
            .map(|content| content.body)
            .map_err(|why| self.unreadable(&path, why))
    }
}
