//! Tests of the controller against an apiserver in memory: upstream's cases, Torpor's own, and
//! random sequences of events.

mod archives;
mod backups;
mod claims;
mod cluster;
mod conditions;
mod dependents;
mod elsewhere;
mod evicted;
mod expiry;
mod fairness;
mod golden;
mod injection;
mod late_bind;
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
mod proxy;
mod reference;
mod restore;
mod retention;
mod running_claims;
mod sandbox_events;
mod schedules;
mod scoped;
mod snapshots;
mod staging;
mod suspensions;
mod sync;
mod takeover;
mod template_idle_times;
mod tracing;
mod unclaimed;
mod wakeup;
mod warm;
mod wiring;
mod world;

use torpor_test_apiserver as apiserver;
