//! Installation of this program into a directory that another container of the Pod mounts.

use std::{
    fs::{self, File},
    io,
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
};

/// File name of the copy.
pub const NAME: &str = "sandbox-runtime";
const MODE: u32 = 0o555;

/// Failure to install the program.
#[derive(Debug, thiserror::Error)]
#[error("cannot {what} {}", .path.display())]
pub struct Error {
    what: &'static str,
    path: PathBuf,
    #[source]
    source: io::Error,
}

/// Copies this program into `directory` atomically, and returns the path of the copy.
///
/// The copy may exist already: a kubelet may run an init container again.
pub fn install(directory: &Path) -> Result<PathBuf, Error> {
    let error = |what, path: &Path| {
        let path = path.to_owned();
        move |source| Error { what, path, source }
    };
    let own = Path::new("/proc/self/exe");
    let (new, destination) = (directory.join(".new"), directory.join(NAME));
    match fs::remove_file(&new) {
        Err(missing) if missing.kind() == io::ErrorKind::NotFound => {}
        removed => removed.map_err(error("remove", &new))?,
    }
    let mut source = File::open(own).map_err(error("open", own))?;
    let mut copy = File::options()
        .write(true)
        .create_new(true)
        .mode(MODE)
        .open(&new)
        .map_err(error("create", &new))?;
    io::copy(&mut source, &mut copy).map_err(error("write", &new))?;
    // The umask has changed the mode at the creation.
    let mode = std::os::unix::fs::PermissionsExt::from_mode(MODE);
    copy.set_permissions(mode)
        .map_err(error("set the mode of", &new))?;
    fs::rename(&new, &destination).map_err(error("rename to", &destination))?;
    Ok(destination)
}
