//! Classifies error responses of an apiserver.

use kube::core::Status;

/// Reports whether a patch failed because its uid is not that of the object that has the name now.
///
/// The apiserver does not answer with a conflict, but with 422: the patch would change an immutable
/// field.
pub fn is_of_another(status: &Status) -> bool {
    status.code == 422 && status.message.contains("metadata.uid: ")
}
