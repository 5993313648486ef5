//! What answers of an apiserver mean.

use kube::core::Status;

/// Whether a patch named the uid of another object than has the name by now. To the apiserver that is an attempt to change a field that cannot be changed (422), and no conflict.
pub fn is_of_another(status: &Status) -> bool {
    status.code == 422 && status.message.contains("metadata.uid: ")
}
