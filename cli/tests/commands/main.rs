//! The commands against an apiserver in memory. The tests play the controller.

mod change;
mod copies;
mod drain;
mod listing;
mod reference;
mod support;
mod wake;
