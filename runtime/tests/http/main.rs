//! The runtime as clients see it: the process itself, on a socket.

mod commands;
mod program;
mod transfers;
mod world;
