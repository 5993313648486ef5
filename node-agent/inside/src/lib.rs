//! torpor-inside: the helper that Torpor runs in a sandbox, in one of its containers.
//!
//! gVisor gets it as a sealed memfd (`torpor_sandbox::process::helper`), so no file of the host is
//! handed into a sandbox. Shims of earlier versions run the helper of this one: its arguments stay
//! as they are.
//!
//! | arguments | act |
//! |---|---|
//! | `forward PORT` | connect to a port of the loopback, and carry the bytes of standard input |
//! | `set-generation TEXT` | write the generation of the container |
//! | `has-claim UID` | succeed if the container has the mark of the claim |
//! | `set-claim UID` | mark the container: the claim has arrived |

pub mod carry;
pub mod forward;
pub mod notes;

/// File name of the program, beside the shim's.
pub const PROGRAM: &str = "torpor-inside";
