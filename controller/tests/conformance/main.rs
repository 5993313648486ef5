//! The controller against an apiserver in memory: upstream's cases, Torpor's own, and random sequences of events.

mod dependents;
mod lifecycle;
mod memory;
mod objects;
mod property;
mod restore;
mod wiring;
mod world;

use torpor_test_apiserver as apiserver;
