//! The share of the disk's time that saves take, on average: a leaky bucket that gives the earliest
//! begin of the next save.
//!
//! An image is written as fast as the disk takes it, because its sandbox is paused meanwhile. The
//! account therefore limits only the begin of an image: a *paced* image begins once the bytes of
//! all images that have begun are paid for, at a rate of bytes per second. In any time, the paced
//! images then write at most what the rate allows, plus one image.
//!
//! An image that a user requested is not paced: it begins at once and is paid for, too, so that the
//! paced images wait for longer. Such images may come without end. A paced image that has waited
//! for as long as its patience (an *overdue* image) therefore begins also once the paced images
//! before it are paid for at a tenth of the rate.

use std::collections::VecDeque;
use std::num::NonZeroU64;
use std::time::Duration;

use jiff::Timestamp;

use crate::time::later;

/// Divisor of the rate at which paced images are paid for, where the next image is overdue.
const OVERDUE_SHARE: u32 = 10;

/// The handle of an image from [`Bandwidth::begin`] to [`Bandwidth::end`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Charge(u64);

/// The account of a node's disk.
#[derive(Debug, Clone)]
pub struct Bandwidth {
    /// Bytes a second.
    rate: NonZeroU64,
    /// Time at which the images are paid for that have ended and began before every image that has
    /// not.
    ended: Paid,
    /// The other images, in the order in which they began.
    images: VecDeque<Image>,
    charges: u64,
}

/// The time at which images are paid for.
#[derive(Debug, Clone, Copy)]
struct Paid {
    /// All images, at the rate.
    at: Timestamp,
    /// Only the paced images, at the rate divided by [`OVERDUE_SHARE`].
    paced_at: Timestamp,
}

#[derive(Debug, Clone)]
struct Image {
    charge: Charge,
    began: Timestamp,
    /// `None`: the image is being written and its size is not known.
    bytes: Option<u64>,
    paced: bool,
    ended: bool,
}

impl Bandwidth {
    /// Makes an account without debts. `rate`: bytes a second.
    pub fn new(rate: NonZeroU64) -> Self {
        let never = Paid {
            at: Timestamp::MIN,
            paced_at: Timestamp::MIN,
        };
        Self {
            rate,
            ended: never,
            images: VecDeque::new(),
            charges: 0,
        }
    }

    /// Records that an image begins. `bytes`: its size, if known. `paced`: the image waited until
    /// the images before it were paid for.
    pub fn begin(&mut self, bytes: Option<u64>, paced: bool, now: Timestamp) -> Charge {
        self.charges += 1;
        let charge = Charge(self.charges);
        self.images.push_back(Image {
            charge,
            began: now,
            bytes,
            paced,
            ended: false,
        });
        charge
    }

    /// Records that an image has been written or given up. From now on the account is as if `bytes`
    /// had been known from its beginning.
    pub fn end(&mut self, charge: Charge, bytes: u64) {
        if let Some(image) = self.images.iter_mut().find(|image| image.charge == charge) {
            image.bytes = Some(bytes);
            image.ended = true;
        }
        while let Some(image) = self.images.pop_front_if(|image| image.ended) {
            self.ended = self.paid(self.ended, &image);
        }
    }

    /// Returns the earliest begin of the next paced image. `overdue`: that image is overdue.
    /// `None`: the size of an image that is being written is not known yet.
    pub fn free_at(&self, overdue: bool) -> Option<Timestamp> {
        if self.images.iter().any(|image| image.bytes.is_none()) {
            return None;
        }
        let images = self.images.iter();
        let paid = images.fold(self.ended, |paid, image| self.paid(paid, image));
        Some(match overdue {
            true => paid.at.min(paid.paced_at),
            false => paid.at,
        })
    }

    /// Returns the time at which `image` is paid for, after the images before it.
    fn paid(&self, before: Paid, image: &Image) -> Paid {
        let nanos = u128::from(image.bytes.unwrap_or(0)) * 1_000_000_000;
        let nanos = nanos.div_ceil(self.rate.get().into());
        let takes = u64::try_from(nanos).map_or(Duration::MAX, Duration::from_nanos);
        let after = |at: Timestamp, takes| later(at.max(image.began), takes);
        Paid {
            at: after(before.at, takes),
            paced_at: match image.paced {
                true => after(before.paced_at, takes.saturating_mul(OVERDUE_SHARE)),
                false => before.paced_at,
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
    }

    /// An account of ten bytes a second.
    fn account() -> Bandwidth {
        Bandwidth::new(NonZeroU64::new(10).unwrap())
    }

    #[test]
    fn an_image_may_begin_when_the_image_before_it_is_paid_for() {
        let mut disk = account();
        assert!(disk.free_at(false) <= Some(at(0)));
        let first = disk.begin(Some(50), true, at(0));
        assert_eq!(disk.free_at(false), Some(at(5)));
        disk.end(first, 50);
        assert_eq!(disk.free_at(false), Some(at(5)));
        // Unused bandwidth is not saved up.
        disk.begin(Some(20), true, at(100));
        assert_eq!(disk.free_at(false), Some(at(102)));
    }

    #[test]
    fn the_written_size_counts_and_not_the_expected_size() {
        let mut disk = account();
        let first = disk.begin(Some(1000), true, at(0));
        let asked = disk.begin(Some(20), false, at(5));
        assert_eq!(disk.free_at(false), Some(at(102)));
        disk.end(asked, 30);
        disk.end(first, 10);
        // The first image was paid for after a second, so that nothing was owed when the other
        // image began.
        assert_eq!(disk.free_at(false), Some(at(8)));
        let given_up = disk.begin(Some(u64::MAX), true, at(8));
        assert_eq!(disk.free_at(false), Some(Timestamp::MAX));
        disk.end(given_up, 0);
        assert_eq!(disk.free_at(false), Some(at(8)));
    }

    #[test]
    fn the_disk_is_not_free_while_the_size_of_an_image_is_unknown() {
        let mut disk = account();
        let unknown = disk.begin(None, false, at(0));
        assert_eq!(disk.free_at(true), None);
        disk.end(unknown, 40);
        assert_eq!(disk.free_at(false), Some(at(4)));
    }

    #[test]
    fn overdue_images_get_a_tenth_of_the_bandwidth_beside_images_that_do_not_wait() {
        let mut disk = account();
        disk.begin(Some(10_000), false, at(0));
        assert!(disk.free_at(true) <= Some(at(0)));
        disk.begin(Some(10), true, at(0));
        assert_eq!(disk.free_at(false), Some(at(1001)));
        assert_eq!(disk.free_at(true), Some(at(10)));
    }
}
