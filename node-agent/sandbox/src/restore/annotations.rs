//! Annotations of the Pod that a restore reads. The controller sets them, or copies the user's
//! from the Sandbox.

/// The image to restore.
pub(super) const RESTORE_IMAGE: &str = "torpor.dev/restore-image";
/// `true`: the user requested the image by name.
pub(super) const RESTORE_COPY: &str = "torpor.dev/restore-copy";
/// The digest of the image's manifest, where the image is in a repository.
pub(super) const RESTORE_DIGEST: &str = "torpor.dev/restore-digest";
/// The user's command after a restore in a new place: a JSON array of words.
pub(super) const ON_RESTORE_EXEC: &str = "torpor.dev/on-restore-exec";
/// The name of the container in which the command runs.
pub(super) const ON_RESTORE_EXEC_CONTAINER: &str = "torpor.dev/on-restore-exec-container";
/// The user's choice how a sandbox starts that crashed while it was awake.
pub(super) const ON_CRASH: &str = "torpor.dev/on-crash";
