//! The runtime as clients see it: the process itself, on its sockets.

mod archives;
mod changes;
mod client;
mod commands;
mod processes;
mod program;
mod rest;
mod terminals;
mod token;
mod transfers;
mod watches;
mod world;
