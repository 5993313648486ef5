//! The largest size of an image. The sandbox writes its image and is hostile. The kernel's count of
//! its Pod's memory therefore gives the expected size, and the size at which a save is stopped.

use serde::{Deserialize, Serialize};

const MIB: u64 = 1 << 20;
/// Bytes by which an image may be larger than the count, if a quarter of the count is less. An
/// image contains the sandbox's state beside its memory, so that a small excess is no fault.
const LEAST_MARGIN: u64 = 64 * MIB;

/// Sizes of a sandbox before its save, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Figures {
    /// Memory by the sandbox's own count. This count is used only where the kernel does not count
    /// the memory of cgroups.
    pub by_sandbox: Option<u64>,
    /// Memory of the sandbox's Pod, in swap or not, by the kernel's count.
    pub counted: Option<u64>,
    /// Files on the node's disk in which gVisor keeps the writes of the containers. An image
    /// contains them.
    pub filestores: Option<u64>,
}

impl Figures {
    /// Returns the expected size. The size decides whether there is room, how long the save may
    /// take, and how long others wait for it.
    pub fn expected(&self) -> Option<u64> {
        let memory = self.counted.or(self.by_sandbox)?;
        Some(memory.saturating_add(self.filestores.unwrap_or(0)))
    }

    /// Returns the size at which the save is stopped; `None`: a part of the image cannot be counted
    /// from outside the sandbox.
    pub fn cap(&self) -> Option<u64> {
        let whole = self.counted?.saturating_add(self.filestores?);
        Some(whole.saturating_add(LEAST_MARGIN.max(whole / 4)))
    }
}

/// The cause that stops a save while the sandbox writes its image.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Stop {
    #[error(
        "the sandbox wrote {} MiB, but its image can have {} MiB at most by the kernel's count of its memory. The sandbox is at fault; no part of the image was kept",
        written / MIB, cap / MIB
    )]
    TooLarge { written: u64, cap: u64 },
    #[error(
        "no room on the disk that holds the images: {} MiB are free during the save, and a save is stopped below {} MiB, half of the reserve (--store-reserve). Delete SandboxSnapshots, or enlarge the disk",
        free / MIB, least / MIB
    )]
    DiskShort { free: u64, least: u64 },
}

impl Stop {
    /// Returns a CamelCase reason for conditions and metrics.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::TooLarge { .. } => "ImageTooLarge",
            Self::DiskShort { .. } => "DiskFull",
        }
    }
}

/// Returns the cause that stops a save, if there is one. `written`: bytes in the files of the save;
/// `free`: bytes left on the disk; `least`: half of the reserve.
pub fn stop(written: u64, cap: Option<u64>, free: Option<u64>, least: u64) -> Option<Stop> {
    if let Some(cap) = cap.filter(|cap| written > *cap) {
        return Some(Stop::TooLarge { written, cap });
    }
    let free = free.filter(|free| *free < least)?;
    Some(Stop::DiskShort { free, least })
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    #[test]
    fn the_kernels_count_decides_and_not_the_sandboxs_report() {
        for told in [None, Some(0), Some(GIB), Some(u64::MAX)] {
            let figures = Figures {
                by_sandbox: told,
                counted: Some(GIB),
                filestores: Some(MIB),
            };
            assert_eq!(figures.expected(), Some(GIB + MIB), "{told:?}");
            assert_eq!(figures.cap(), Some((GIB + MIB) / 4 * 5), "{told:?}");
        }
    }

    #[test]
    fn memory_without_a_count_has_no_cap_and_the_best_known_estimate() {
        let told = Some(GIB);
        let not_counted = Figures {
            by_sandbox: told,
            ..Figures::default()
        };
        assert_eq!((not_counted.expected(), not_counted.cap()), (told, None));
        let no_filestores = Figures {
            counted: Some(MIB),
            ..not_counted
        };
        assert_eq!(no_filestores.expected(), Some(MIB));
        assert_eq!(no_filestores.cap(), None);
        assert_eq!(Figures::default().expected(), None);
    }

    #[test]
    fn a_small_sandbox_has_room_for_its_state() {
        let small = Figures {
            counted: Some(10 * MIB),
            filestores: Some(0),
            ..Figures::default()
        };
        assert_eq!(small.cap(), Some(74 * MIB));
    }

    #[test]
    fn a_save_is_stopped_above_its_cap_and_when_half_of_the_reserve_is_gone() {
        let cap = Some(GIB);
        assert_eq!(stop(GIB, cap, Some(100), 100), None);
        let large = stop(GIB + 1, cap, Some(100), 100).expect("stopped");
        assert_eq!(large.reason(), "ImageTooLarge");
        let short = stop(0, cap, Some(99), 100).expect("stopped");
        assert_eq!(short.reason(), "DiskFull");
        assert_eq!(stop(u64::MAX, None, None, 100), None);
        assert_eq!(stop(0, cap, Some(0), 0), None, "without a reserve");
    }
}
