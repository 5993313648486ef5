//! The controller against an apiserver in memory: upstream's cases, Torpor's own, and random sequences of events.

mod at_work;
mod claims;
mod cluster;
mod conditions;
mod dependents;
mod evicted;
mod expiry;
mod injection;
mod lifecycle;
mod memory;
mod metrics;
mod networks;
mod objects;
mod origin;
mod outlines;
mod pod_snapshots;
mod pool_conditions;
mod pools;
mod property;
mod restore;
mod retention;
mod schedules;
mod sleep_of_template;
mod snapshots;
mod suspensions;
mod sync;
mod takeover;
mod told;
mod tracing;
mod turns;
mod unclaimed;
mod wakeup;
mod warm;
mod wiring;
mod world;

use torpor_test_apiserver as apiserver;
