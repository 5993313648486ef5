//! Tests of the runtime as a process, by its sockets.

mod archives;
mod changes;
mod client;
mod commands;
mod processes;
mod program;
mod reference;
mod rest;
mod terminals;
mod token;
mod transfers;
mod watches;
mod world;
