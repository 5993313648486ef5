//! Puts this program where another container of the Pod finds it.

use std::{
    fs::{self, File},
    io,
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
};

/// Its name there.
pub const NAME: &str = "sandbox-runtime";
/// For everybody to run and nobody to write.
const MODE: u32 = 0o555;

/// The program was not put there.
#[derive(Debug, thiserror::Error)]
#[error("cannot {what} {}", .path.display())]
pub struct Error {
    what: &'static str,
    path: PathBuf,
    #[source]
    source: io::Error,
}

/// Copies this program into `directory`. Whole or not at all, and as often as one likes: a kubelet may start an init container again.
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
    // The mode is not the umask's to say.
    let mode = std::os::unix::fs::PermissionsExt::from_mode(MODE);
    copy.set_permissions(mode)
        .map_err(error("set the mode of", &new))?;
    fs::rename(&new, &destination).map_err(error("rename to", &destination))?;
    Ok(destination)
}
