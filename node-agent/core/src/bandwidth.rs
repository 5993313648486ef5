//! How much of the disk's time saves take, on average: a leaky bucket that says when the next save may begin.
//!
//! An image is written as fast as the disk takes it, because its sandbox stands still meanwhile; what is measured out is when the next
//! one begins: not before the bytes of all images that were begun are paid for, at so many bytes a second. So of those that wait,
//! never more is written in any time than the rate allows, but for one image. What does not wait (somebody asked for it) is paid for
//! too, and the others make up for it. So that these come to their turn at all while such come without end, one that has waited for
//! as long as its patience may also begin once the bytes of its like are paid for at a tenth of the rate.

use std::collections::VecDeque;
use std::num::NonZeroU64;
use std::time::Duration;

use jiff::Timestamp;

use crate::state::later;

/// So many times slower are images paid for where only the overdue are considered.
const OVERDUE_SHARE: u32 = 10;

/// An image, from [`Bandwidth::begin`] to [`Bandwidth::end`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Charge(u64);

/// The account of one node's disk.
#[derive(Debug, Clone)]
pub struct Bandwidth {
    /// Bytes a second.
    rate: NonZeroU64,
    /// Of those that have ended, and began before all that have not.
    ended: Paid,
    /// The others, in the order in which they began.
    images: VecDeque<Image>,
    charges: u64,
}

/// When all is paid for.
#[derive(Debug, Clone, Copy)]
struct Paid {
    at: Timestamp,
    /// Only those that waited, at the share of the overdue.
    slowly_at: Timestamp,
}

#[derive(Debug, Clone)]
struct Image {
    charge: Charge,
    began: Timestamp,
    /// None: it is being written and nobody knows.
    bytes: Option<u64>,
    /// Whether it waits for others.
    waits: bool,
    ended: bool,
}

impl Bandwidth {
    /// `rate`: bytes a second.
    pub fn new(rate: NonZeroU64) -> Self {
        let never = Paid {
            at: Timestamp::MIN,
            slowly_at: Timestamp::MIN,
        };
        Self {
            rate,
            ended: never,
            images: VecDeque::new(),
            charges: 0,
        }
    }

    /// An image begins. `bytes`: as far as known. `waits`: whether it is one that waits for the others to be paid for.
    pub fn begin(&mut self, bytes: Option<u64>, waits: bool, now: Timestamp) -> Charge {
        self.charges += 1;
        let charge = Charge(self.charges);
        self.images.push_back(Image {
            charge,
            began: now,
            bytes,
            waits,
            ended: false,
        });
        charge
    }

    /// It has been written, or given up. From now on it is as if `bytes` had been known from its beginning.
    pub fn end(&mut self, charge: Charge, bytes: u64) {
        if let Some(image) = self.images.iter_mut().find(|image| image.charge == charge) {
            image.bytes = Some(bytes);
            image.ended = true;
        }
        while let Some(image) = self.images.pop_front_if(|image| image.ended) {
            self.ended = self.paid(self.ended, &image);
        }
    }

    /// When one that waits may begin, as things are. None: when it is known how much is being written.
    pub fn free_at(&self, overdue: bool) -> Option<Timestamp> {
        if self.images.iter().any(|image| image.bytes.is_none()) {
            return None;
        }
        let images = self.images.iter();
        let paid = images.fold(self.ended, |paid, image| self.paid(paid, image));
        Some(match overdue {
            true => paid.at.min(paid.slowly_at),
            false => paid.at,
        })
    }

    fn paid(&self, before: Paid, image: &Image) -> Paid {
        let nanos = u128::from(image.bytes.unwrap_or(0)) * 1_000_000_000;
        let nanos = nanos.div_ceil(self.rate.get().into());
        let takes = u64::try_from(nanos).map_or(Duration::MAX, Duration::from_nanos);
        let after = |at: Timestamp, takes| later(at.max(image.began), takes);
        Paid {
            at: after(before.at, takes),
            slowly_at: match image.waits {
                true => after(before.slowly_at, takes.saturating_mul(OVERDUE_SHARE)),
                false => before.slowly_at,
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

    /// Ten bytes a second.
    fn account() -> Bandwidth {
        Bandwidth::new(NonZeroU64::new(10).unwrap())
    }

    #[test]
    fn the_next_may_begin_when_the_one_before_is_paid_for() {
        let mut disk = account();
        assert!(disk.free_at(false) <= Some(at(0)));
        let first = disk.begin(Some(50), true, at(0));
        assert_eq!(disk.free_at(false), Some(at(5)));
        disk.end(first, 50);
        assert_eq!(disk.free_at(false), Some(at(5)));
        // What was not used is not saved up.
        disk.begin(Some(20), true, at(100));
        assert_eq!(disk.free_at(false), Some(at(102)));
    }

    #[test]
    fn what_was_written_counts_and_not_what_was_thought() {
        let mut disk = account();
        let first = disk.begin(Some(1000), true, at(0));
        let asked = disk.begin(Some(20), false, at(5));
        assert_eq!(disk.free_at(false), Some(at(102)));
        disk.end(asked, 30);
        disk.end(first, 10);
        // The first was paid for after a second, so that the other began when nothing was owed.
        assert_eq!(disk.free_at(false), Some(at(8)));
        let given_up = disk.begin(Some(u64::MAX), true, at(8));
        assert_eq!(disk.free_at(false), Some(Timestamp::MAX));
        disk.end(given_up, 0);
        assert_eq!(disk.free_at(false), Some(at(8)));
    }

    #[test]
    fn nothing_is_free_while_nobody_knows_how_much_is_being_written() {
        let mut disk = account();
        let unknown = disk.begin(None, false, at(0));
        assert_eq!(disk.free_at(true), None);
        disk.end(unknown, 40);
        assert_eq!(disk.free_at(false), Some(at(4)));
    }

    #[test]
    fn the_overdue_have_a_tenth_whatever_does_not_wait() {
        let mut disk = account();
        disk.begin(Some(10_000), false, at(0));
        assert!(disk.free_at(true) <= Some(at(0)));
        disk.begin(Some(10), true, at(0));
        assert_eq!(disk.free_at(false), Some(at(1001)));
        assert_eq!(disk.free_at(true), Some(at(10)));
    }
}
