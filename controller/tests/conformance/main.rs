//! The controller against an apiserver in memory: upstream's cases, Torpor's own, and random sequences of events.

mod apiserver;
mod claims;
mod cluster;
mod dependents;
mod lifecycle;
mod memory;
mod objects;
mod property;
mod restore;
mod sync;
mod wiring;
mod world;
