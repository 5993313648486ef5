//! As much of bpf(2) as two small programs need: instructions, a map with one socket, loading, attaching.
//!
//! Numbers and layouts are the kernel's ABI (include/uapi/linux/bpf.h).

#![allow(unsafe_code)]

use std::mem::size_of;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use nix::libc;

/// Shown to whoever lists programs and maps; at most 15 bytes.
const NAME: [u8; 16] = *b"torpor\0\0\0\0\0\0\0\0\0\0";
/// The helpers that are called ask for no particular licence.
const LICENCE: &std::ffi::CStr = c"Apache-2.0";
/// The verifier's words about thirty instructions.
const MAX_LOG: usize = 64 << 10;

const MAP_TYPE_SOCKMAP: u32 = 15;

/// What a program decides about.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Hook {
    /// Which socket of a network namespace takes a connection.
    SocketLookup,
    /// What becomes of a packet that a link has received, before anybody else sees it: the same for every kind of link.
    Received,
}

impl Hook {
    fn program_type(self) -> u32 {
        match self {
            Self::SocketLookup => 30,
            Self::Received => 6,
        }
    }

    fn attach_type(self) -> u32 {
        match self {
            Self::SocketLookup => 36,
            Self::Received => 37,
        }
    }

    fn flags(self) -> u32 {
        match self {
            Self::SocketLookup => 0,
            // XDP_FLAGS_SKB_MODE: needs nothing of the link's driver.
            Self::Received => 2,
        }
    }
}

/// Why the kernel did not take the program.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("the kernel makes no map of sockets")]
    Map(#[source] std::io::Error),
    #[error("the kernel does not take the listener into the map")]
    Insert(#[source] std::io::Error),
    #[error("the kernel refuses the program{log}")]
    Load {
        #[source]
        source: std::io::Error,
        /// The verifier's words, after a colon; may be empty.
        log: String,
    },
    #[error("the kernel does not attach the program")]
    Attach(#[source] std::io::Error),
    /// A link takes one program of this kind.
    #[error("another program is attached there")]
    Taken,
}

#[derive(Clone, Copy)]
enum Call {
    MapCreate = 0,
    MapUpdateElem = 2,
    ProgLoad = 5,
    LinkCreate = 28,
}

#[repr(C)]
struct MapCreate {
    map_type: u32,
    key_size: u32,
    value_size: u32,
    max_entries: u32,
    map_flags: u32,
    inner_map_fd: u32,
    numa_node: u32,
    name: [u8; 16],
}

#[repr(C)]
struct MapUpdate {
    map_fd: u32,
    padding: u32,
    key: u64,
    value: u64,
    flags: u64,
}

#[repr(C)]
struct ProgLoad {
    program_type: u32,
    instruction_count: u32,
    instructions: u64,
    licence: u64,
    log_level: u32,
    log_size: u32,
    log: u64,
    kernel_version: u32,
    flags: u32,
    name: [u8; 16],
    interface: u32,
    expected_attach_type: u32,
}

#[repr(C)]
struct LinkCreate {
    program_fd: u32,
    target: u32,
    attach_type: u32,
    flags: u32,
}

const _: () = {
    assert!(size_of::<MapCreate>() == 44);
    assert!(size_of::<MapUpdate>() == 32);
    assert!(size_of::<ProgLoad>() == 72);
    assert!(size_of::<LinkCreate>() == 16);
    assert!(size_of::<Instruction>() == 8);
};

/// # Safety
///
/// `attributes` must be the structure that `call` takes, and every address in it must be that of memory which lives, and
/// which nothing else uses, until this returns.
unsafe fn bpf<T>(call: Call, attributes: &T) -> std::io::Result<libc::c_long> {
    // SAFETY: the kernel reads `size_of::<T>()` bytes from a reference of that size; the rest is the caller's promise.
    let answer = unsafe {
        libc::syscall(
            libc::SYS_bpf,
            call as libc::c_long,
            std::ptr::from_ref(attributes),
            size_of::<T>(),
        )
    };
    if answer < 0 {
        Err(std::io::Error::last_os_error())
    } else {
        Ok(answer)
    }
}

/// # Safety
///
/// As for [`bpf`], and `call` must be one that answers a new descriptor.
unsafe fn bpf_fd<T>(call: Call, attributes: &T) -> std::io::Result<OwnedFd> {
    // SAFETY: the caller's promise.
    let answer = unsafe { bpf(call, attributes)? };
    let fd = RawFd::try_from(answer).map_err(std::io::Error::other)?;
    // SAFETY: the kernel has just made this descriptor for us (close-on-exec, as all of bpf's); nobody else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn number(fd: RawFd) -> u32 {
    // Open descriptors are not negative.
    fd.cast_unsigned()
}

/// A map from the index 0 to the socket.
pub(crate) fn socket_map(socket: BorrowedFd<'_>) -> Result<OwnedFd, Error> {
    let attributes = MapCreate {
        map_type: MAP_TYPE_SOCKMAP,
        key_size: 4,
        value_size: 4,
        max_entries: 1,
        map_flags: 0,
        inner_map_fd: 0,
        numa_node: 0,
        name: NAME,
    };
    // SAFETY: the structure of this call, without addresses; the call answers a descriptor.
    let map = unsafe { bpf_fd(Call::MapCreate, &attributes) }.map_err(Error::Map)?;
    let (key, value) = (0_u32, number(socket.as_raw_fd()));
    let attributes = MapUpdate {
        map_fd: number(map.as_raw_fd()),
        padding: 0,
        key: std::ptr::from_ref(&key).addr() as u64,
        value: std::ptr::from_ref(&value).addr() as u64,
        flags: 0,
    };
    // SAFETY: the structure of this call; key and value are of the sizes that the map was made with, and live on.
    unsafe { bpf(Call::MapUpdateElem, &attributes) }.map_err(Error::Insert)?;
    Ok(map)
}

/// Loads a program. The verifier is asked for words only when it has refused.
pub(crate) fn load(hook: Hook, instructions: &[Instruction]) -> Result<OwnedFd, Error> {
    if let Ok(program) = try_load(hook, instructions, &mut []) {
        return Ok(program);
    }
    let mut log = vec![0; MAX_LOG];
    try_load(hook, instructions, &mut log).map_err(|source| {
        let words = log.split(|byte| *byte == 0).next().unwrap_or_default();
        let words = String::from_utf8_lossy(words);
        let log = match words.trim() {
            "" => String::new(),
            words => format!(": {words}"),
        };
        Error::Load { source, log }
    })
}

fn try_load(hook: Hook, instructions: &[Instruction], log: &mut [u8]) -> std::io::Result<OwnedFd> {
    let attributes = ProgLoad {
        program_type: hook.program_type(),
        instruction_count: u32::try_from(instructions.len()).map_err(std::io::Error::other)?,
        instructions: instructions.as_ptr().addr() as u64,
        licence: LICENCE.as_ptr().addr() as u64,
        log_level: u32::from(!log.is_empty()),
        log_size: u32::try_from(log.len()).map_err(std::io::Error::other)?,
        log: if log.is_empty() {
            0
        } else {
            log.as_mut_ptr().addr() as u64
        },
        kernel_version: 0,
        flags: 0,
        name: NAME,
        interface: 0,
        expected_attach_type: hook.attach_type(),
    };
    // SAFETY: the structure of this call; instructions, licence and log are borrowed for longer than the call, the log
    // for writing, each with its length (the licence ends with a zero). The call answers a descriptor.
    unsafe { bpf_fd(Call::ProgLoad, &attributes) }
}

/// Attaches a program to a network namespace for as long as the answer is open.
pub(crate) fn attach_to_namespace(
    hook: Hook,
    program: BorrowedFd<'_>,
    namespace: BorrowedFd<'_>,
) -> Result<OwnedFd, Error> {
    attach(hook, program, number(namespace.as_raw_fd()))
}

/// Attaches a program to a link of this thread's network namespace for as long as the answer is open.
pub(crate) fn attach_to_link(
    hook: Hook,
    program: BorrowedFd<'_>,
    index: u32,
) -> Result<OwnedFd, Error> {
    attach(hook, program, index)
}

fn attach(hook: Hook, program: BorrowedFd<'_>, target: u32) -> Result<OwnedFd, Error> {
    let attributes = LinkCreate {
        program_fd: number(program.as_raw_fd()),
        target,
        attach_type: hook.attach_type(),
        flags: hook.flags(),
    };
    // SAFETY: the structure of this call, without addresses; the call answers a descriptor.
    unsafe { bpf_fd(Call::LinkCreate, &attributes) }.map_err(|error| {
        if error.raw_os_error() == Some(libc::EBUSY) {
            Error::Taken
        } else {
            Error::Attach(error)
        }
    })
}

/// One instruction, as the kernel reads it.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Instruction {
    code: u8,
    registers: u8,
    offset: i16,
    immediate: i32,
}

#[derive(Debug, Clone, Copy)]
pub(crate) enum Register {
    R0,
    R1,
    R2,
    R3,
    R4,
    R5,
    R6,
    R7,
    R10 = 10,
}

/// Functions of the kernel that a program may call.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Helper {
    MapLookupElem = 1,
    SkRelease = 86,
    SkAssign = 124,
}

use Register::R0;

fn instruction(code: u8, to: Register, from: Register, offset: i16, immediate: i32) -> Instruction {
    // Two bit fields in one byte, which C lays out as the machine orders its bytes.
    let (to, from) = (to as u8, from as u8);
    let registers = if cfg!(target_endian = "little") {
        from << 4 | to
    } else {
        to << 4 | from
    };
    Instruction {
        code,
        registers,
        offset,
        immediate,
    }
}

impl Instruction {
    /// Sets where a jump at `from` goes.
    pub(crate) fn jump_to(&mut self, from: usize, target: usize) {
        let distance = target.saturating_sub(from + 1);
        self.offset = i16::try_from(distance).unwrap_or(i16::MAX);
    }
}

pub(crate) fn copy(to: Register, from: Register) -> Instruction {
    instruction(0xbf, to, from, 0, 0)
}

pub(crate) fn set(to: Register, value: i32) -> Instruction {
    instruction(0xb7, to, R0, 0, value)
}

pub(crate) fn add(to: Register, value: i32) -> Instruction {
    instruction(0x07, to, R0, 0, value)
}

pub(crate) fn shift_right(of: Register, bits: i32) -> Instruction {
    instruction(0x77, of, R0, 0, bits)
}

/// A value in network byte order becomes one of this machine's.
pub(crate) fn from_network_order32(of: Register) -> Instruction {
    instruction(0xdc, of, R0, 0, 32)
}

pub(crate) fn load32(to: Register, base: Register, offset: i16) -> Instruction {
    instruction(0x61, to, base, offset, 0)
}

pub(crate) fn load16(to: Register, base: Register, offset: i16) -> Instruction {
    instruction(0x69, to, base, offset, 0)
}

pub(crate) fn load8(to: Register, base: Register, offset: i16) -> Instruction {
    instruction(0x71, to, base, offset, 0)
}

pub(crate) fn store32(base: Register, offset: i16, value: i32) -> Instruction {
    instruction(0x62, base, R0, offset, value)
}

/// The address of a map takes two instructions; the kernel replaces the descriptor in the first.
pub(crate) fn set_map(to: Register, map: RawFd) -> [Instruction; 2] {
    const MAP_BY_FD: Register = Register::R1;
    [
        instruction(0x18, to, MAP_BY_FD, 0, map),
        instruction(0, R0, R0, 0, 0),
    ]
}

pub(crate) fn jump_if_not(register: Register, value: i32) -> Instruction {
    instruction(0x55, register, R0, 0, value)
}

pub(crate) fn jump_if_zero(register: Register) -> Instruction {
    jump_if(register, 0)
}

pub(crate) fn jump_if(register: Register, value: i32) -> Instruction {
    instruction(0x15, register, R0, 0, value)
}

pub(crate) fn jump_if_less(register: Register, value: i32) -> Instruction {
    instruction(0xa5, register, R0, 0, value)
}

pub(crate) fn jump_if_greater(register: Register, value: i32) -> Instruction {
    instruction(0x25, register, R0, 0, value)
}

/// If `register` is greater than `than`.
pub(crate) fn jump_if_greater_than(register: Register, than: Register) -> Instruction {
    instruction(0x2d, register, than, 0, 0)
}

pub(crate) fn call(helper: Helper) -> Instruction {
    instruction(0x85, R0, R0, 0, helper as i32)
}

pub(crate) fn exit() -> Instruction {
    instruction(0x95, R0, R0, 0, 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Needs root.
    #[test]
    fn a_refused_program_comes_with_the_verifiers_words() {
        let error = load(
            Hook::SocketLookup,
            &[copy(Register::R1, Register::R2), exit()],
        )
        .expect_err("refused");
        let words = error.to_string();
        assert!(words.contains("R2 !read_ok"), "{words}");
    }
}
