//! Images on disk. The crate's documentation has the layout.
//!
//! A rename makes a directory an image, after its files, its manifest and the directory itself are
//! durable. Another rename ends the image before its first byte is removed. A crash therefore
//! leaves a whole image, or a directory whose name marks it for removal.

mod copy;
mod error;
mod image;
mod marker;
mod partial;
mod remove;
mod root;

pub use crate::dirs::{PathError as StorePathError, Removed, Unsafe as UnsafePath};
pub use crate::manifest::{CONSUMED, MANIFEST};
pub use error::{ImageError, SaveError};
pub use image::{Consumption, Image};
pub use partial::{Committed, Partial};
pub use root::{Capacity, Listed, Store};
