//! The part of bpf(2) that this crate needs.
//!
//! The part covers instructions, maps with a socket, a flag, times or connections, and loading and
//! attaching programs. Numbers and layouts are the kernel's ABI (include/uapi/linux/bpf.h).

#![allow(unsafe_code)]

use std::cell::Cell;
use std::mem::size_of;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::time::Duration;

use nix::libc;

pub(crate) use instruction::*;

mod instruction;
pub(crate) mod packet;

/// The name of programs and maps in lists of them; at most 15 bytes.
const NAME: [u8; 16] = *b"torpor\0\0\0\0\0\0\0\0\0\0";
/// The programs' licence. The helpers that they call require no particular one.
const LICENCE: &std::ffi::CStr = c"Apache-2.0";
/// Size of the verifier's log, which is enough for programs of this crate.
const LOG_SIZE: usize = 64 << 10;

const MAP_TYPE_HASH: u32 = 1;
const MAP_TYPE_ARRAY: u32 = 2;
const MAP_TYPE_LRU_HASH: u32 = 9;
const MAP_TYPE_SOCKMAP: u32 = 15;

/// A place in the kernel where a program runs.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Hook {
    /// Chooses the socket of a network namespace that takes a connection.
    SocketLookup,
    /// XDP: decides about a packet that a link has received, before anything else reads it. The
    /// same program serves every kind of link.
    Received,
    /// Classifier: runs in a link's queueing discipline, see [`crate::net::attach_to_links`].
    Classify,
}

impl Hook {
    fn program_type(self) -> u32 {
        match self {
            Self::SocketLookup => 30,
            Self::Received => 6,
            Self::Classify => 3,
        }
    }

    fn attach_type(self) -> u32 {
        match self {
            Self::SocketLookup => 36,
            Self::Received => 37,
            Self::Classify => 0,
        }
    }

    fn flags(self) -> u32 {
        match self {
            Self::SocketLookup | Self::Classify => 0,
            // XDP_FLAGS_SKB_MODE: requires nothing of the link's driver.
            Self::Received => 2,
        }
    }
}

/// Why a map or a program could not be used.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("the kernel did not create the BPF map")]
    Map(#[source] std::io::Error),
    #[error("the kernel did not add the entry to the BPF map")]
    Insert(#[source] std::io::Error),
    #[error("the kernel does not return the BPF map (any more)")]
    Read(#[source] std::io::Error),
    #[error("the kernel refuses the BPF program{log}")]
    Load {
        #[source]
        source: std::io::Error,
        /// The verifier's log after a colon; may be empty.
        log: String,
    },
    #[error("the kernel did not attach the BPF program")]
    Attach(#[source] std::io::Error),
    /// A link takes one program of this kind.
    #[error("another BPF program is attached already")]
    Taken,
}

#[derive(Clone, Copy)]
enum Call {
    MapCreate = 0,
    MapLookupElem = 1,
    MapUpdateElem = 2,
    MapGetNextKey = 4,
    ProgLoad = 5,
    MapGetFdById = 14,
    ObjGetInfoByFd = 15,
    MapLookupBatch = 24,
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

/// A key, and the address of a value (or of the next key) that the kernel reads or writes.
#[repr(C)]
struct MapUpdate {
    map_fd: u32,
    padding: u32,
    key: u64,
    value: u64,
    flags: u64,
}

/// Arguments of a call that reads many keys and values at once.
#[repr(C)]
struct MapBatch {
    /// The address of the position to continue at; 0: at the beginning.
    begin: u64,
    /// The address of four bytes where the kernel writes the position to continue at.
    end: u64,
    keys: u64,
    values: u64,
    /// The number of entries with room; the kernel writes the number of entries found.
    count: Cell<u32>,
    map_fd: u32,
    element_flags: u64,
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

#[repr(C)]
struct GetById {
    id: u32,
    next_id: u32,
    open_flags: u32,
}

#[repr(C)]
struct GetInfo {
    fd: u32,
    length: u32,
    info: u64,
}

/// The beginning of the kernel's `struct bpf_map_info`.
#[repr(C)]
#[derive(Default)]
struct MapInfo {
    map_type: u32,
    id: u32,
    key_size: u32,
    value_size: u32,
    max_entries: u32,
}

impl MapInfo {
    const LENGTH: u32 = 20;
}

const _: () = {
    assert!(size_of::<GetById>() == 12);
    assert!(size_of::<GetInfo>() == 16);
    assert!(size_of::<MapInfo>() == MapInfo::LENGTH as usize);
    assert!(size_of::<MapCreate>() == 44);
    assert!(size_of::<MapUpdate>() == 32);
    assert!(size_of::<MapBatch>() == 56);
    assert!(size_of::<ProgLoad>() == 72);
    assert!(size_of::<LinkCreate>() == 16);
    assert!(size_of::<Instruction>() == 8);
};

/// # Safety
///
/// `attributes` must be the structure that `call` takes. Every address in it must be of memory that
/// lives, and that nothing else uses, until this returns.
unsafe fn bpf<T>(call: Call, attributes: &T) -> std::io::Result<libc::c_long> {
    // SAFETY: the kernel reads `size_of::<T>()` bytes from a reference of that size; the caller
    // promises the rest.
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
/// As for [`bpf`], and `call` must be one that returns a new descriptor.
unsafe fn bpf_fd<T>(call: Call, attributes: &T) -> std::io::Result<OwnedFd> {
    // SAFETY: the caller's promise.
    let answer = unsafe { bpf(call, attributes)? };
    let fd = RawFd::try_from(answer).map_err(std::io::Error::other)?;
    // SAFETY: the kernel has just made this descriptor (close-on-exec, as all of bpf's); nothing
    // else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn number(fd: RawFd) -> u32 {
    // Open descriptors are not negative.
    fd.cast_unsigned()
}

/// Size of a key that is a number, in bytes.
const NUMBER: u32 = 4;
/// Size of a flag, in bytes.
const FLAG: u32 = 4;

fn map(map_type: u32, key_size: u32, value_size: u32, max_entries: u32) -> Result<OwnedFd, Error> {
    let attributes = MapCreate {
        map_type,
        key_size,
        value_size,
        max_entries,
        map_flags: 0,
        inner_map_fd: 0,
        numa_node: 0,
        name: NAME,
    };
    // SAFETY: the structure of this call, without addresses; the call returns a descriptor.
    unsafe { bpf_fd(Call::MapCreate, &attributes) }.map_err(Error::Map)
}

/// # Safety
///
/// The map's keys must be of four bytes, and its values of the size of `T`.
unsafe fn element<T>(
    call: Call,
    map: BorrowedFd<'_>,
    key: u32,
    value: &mut T,
) -> std::io::Result<()> {
    let attributes = MapUpdate {
        map_fd: number(map.as_raw_fd()),
        padding: 0,
        key: std::ptr::from_ref(&key).addr() as u64,
        value: std::ptr::from_mut(value).addr() as u64,
        flags: 0,
    };
    // SAFETY: the structure of these calls. Key and value live on and have the sizes of the map, as
    // the caller promises.
    unsafe { bpf(call, &attributes) }.map(drop)
}

/// Creates a map from the index 0 to the socket.
pub(crate) fn socket_map(socket: BorrowedFd<'_>) -> Result<OwnedFd, Error> {
    let map = map(MAP_TYPE_SOCKMAP, NUMBER, 4, 1)?;
    let mut value = number(socket.as_raw_fd());
    // SAFETY: this map was made with values of four bytes.
    unsafe { element(Call::MapUpdateElem, map.as_fd(), 0, &mut value) }.map_err(Error::Insert)?;
    Ok(map)
}

/// Creates a map with one number, at first zero, which a program reads by [`set_map_value`].
pub(crate) fn flag_map() -> Result<OwnedFd, Error> {
    map(MAP_TYPE_ARRAY, NUMBER, FLAG, 1)
}

/// Sets the number in a [`flag_map`] to one.
pub(crate) fn raise_flag(map: BorrowedFd<'_>) -> Result<(), Error> {
    let mut value = 1_u32;
    // SAFETY: these maps have values of four bytes.
    unsafe { element(Call::MapUpdateElem, map, 0, &mut value) }.map_err(Error::Insert)
}

/// Creates a map from numbers to times: nanoseconds of the clock of [`now`].
pub(crate) fn time_map(max_entries: u32) -> Result<OwnedFd, Error> {
    const TIME: u32 = 8; // bytes of nanoseconds
    map(MAP_TYPE_HASH, NUMBER, TIME, max_entries)
}

/// Inserts a time into a [`time_map`].
pub(crate) fn insert_time(map: BorrowedFd<'_>, key: u32, nanoseconds: u64) -> Result<(), Error> {
    let mut value = nanoseconds;
    // SAFETY: the values of these maps have eight bytes.
    unsafe { element(Call::MapUpdateElem, map, key, &mut value) }.map_err(Error::Insert)
}

/// Returns the entries of a [`time_map`].
pub(crate) fn times(map: BorrowedFd<'_>) -> Result<Vec<(u32, Duration)>, Error> {
    let mut found = Vec::new();
    for key in keys(map)? {
        let mut value = 0_u64;
        // SAFETY: the values of these maps have eight bytes.
        unsafe { element(Call::MapLookupElem, map, key, &mut value) }.map_err(Error::Read)?;
        found.push((key, Duration::from_nanos(value)));
    }
    Ok(found)
}

/// Returns the keys of a [`time_map`].
///
/// No program removes an entry, so the kernel returns each key once.
fn keys(map: BorrowedFd<'_>) -> Result<Vec<u32>, Error> {
    let mut keys = Vec::new();
    let mut at: Option<u32> = None;
    loop {
        let mut next = 0_u32;
        let attributes = MapUpdate {
            map_fd: number(map.as_raw_fd()),
            padding: 0,
            key: at
                .as_ref()
                .map_or(0, |key| std::ptr::from_ref(key).addr() as u64),
            value: std::ptr::from_mut(&mut next).addr() as u64,
            flags: 0,
        };
        // SAFETY: the structure of this call; both keys live on and have four bytes, as those of
        // the map.
        match unsafe { bpf(Call::MapGetNextKey, &attributes) } {
            Ok(_) => {}
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(keys),
            Err(error) => return Err(Error::Read(error)),
        }
        keys.push(next);
        at = Some(next);
    }
}

/// Creates a map that drops about the least recently used entry when it is full. Sizes: bytes.
pub(crate) fn lru_map(key_size: u32, value_size: u32, max_entries: u32) -> Result<OwnedFd, Error> {
    map(MAP_TYPE_LRU_HASH, key_size, value_size, max_entries)
}

/// A key of a map and its value.
pub(crate) type Entry<const KEY: usize, const VALUE: usize> = ([u8; KEY], [u8; VALUE]);

/// Returns all entries of an [`lru_map`] of these sizes.
pub(crate) fn entries<const KEY: usize, const VALUE: usize>(
    map: BorrowedFd<'_>,
) -> Result<Vec<Entry<KEY, VALUE>>, Error> {
    let info = map_info(map)?;
    let sizes = [info.key_size, info.value_size].map(usize::try_from);
    if sizes != [Ok(KEY), Ok(VALUE)] {
        return Err(Error::Read(std::io::ErrorKind::InvalidData.into()));
    }
    let room = usize::try_from(info.max_entries).unwrap_or(0);
    let mut keys = vec![[0; KEY]; room];
    let mut values = vec![[0; VALUE]; room];
    let mut end = 0_u32;
    let attributes = MapBatch {
        begin: 0,
        end: std::ptr::from_mut(&mut end).addr() as u64,
        keys: keys.as_mut_ptr().addr() as u64,
        values: values.as_mut_ptr().addr() as u64,
        count: Cell::new(info.max_entries),
        map_fd: number(map.as_raw_fd()),
        element_flags: 0,
        flags: 0,
    };
    // SAFETY: the structure of this call. `keys` and `values` have room for `count` entries of the
    // sizes of the map. The kernel writes four bytes at `end`. All of them live on.
    match unsafe { bpf(Call::MapLookupBatch, &attributes) } {
        Ok(_) => {}
        // The map has no more entries.
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
        Err(error) => return Err(Error::Read(error)),
    }
    let found = usize::try_from(attributes.count.get()).unwrap_or(0);
    Ok(keys.into_iter().zip(values).take(found).collect())
}

/// Returns the number by which [`map_by_id`] finds the map while a process or a program uses it.
pub(crate) fn map_id(map: BorrowedFd<'_>) -> Result<u32, Error> {
    Ok(map_info(map)?.id)
}

fn map_info(map: BorrowedFd<'_>) -> Result<MapInfo, Error> {
    let mut info = MapInfo::default();
    let attributes = GetInfo {
        fd: number(map.as_raw_fd()),
        length: MapInfo::LENGTH,
        info: std::ptr::from_mut(&mut info).addr() as u64,
    };
    // SAFETY: the structure of this call; `info` lives on, and the kernel writes at most its bytes.
    unsafe { bpf(Call::ObjGetInfoByFd, &attributes) }.map_err(Error::Read)?;
    Ok(info)
}

/// Opens the map of this number.
pub(crate) fn map_by_id(id: u32) -> Result<OwnedFd, Error> {
    let attributes = GetById {
        id,
        next_id: 0,
        open_flags: 0,
    };
    // SAFETY: the structure of this call, without addresses; the call returns a descriptor.
    unsafe { bpf_fd(Call::MapGetFdById, &attributes) }.map_err(Error::Read)
}

/// Returns the time of the clock that programs read (CLOCK_MONOTONIC), since its beginning.
pub(crate) fn now() -> Duration {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: the kernel writes one timespec; this clock is always there.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut time) };
    Duration::new(
        u64::try_from(time.tv_sec).unwrap_or(0),
        u32::try_from(time.tv_nsec).unwrap_or(0),
    )
}

/// Loads a program. Requests the verifier's log only after the verifier has refused the program.
pub(crate) fn load(hook: Hook, instructions: &[Instruction]) -> Result<OwnedFd, Error> {
    if let Ok(program) = try_load(hook, instructions, &mut []) {
        return Ok(program);
    }
    let mut log = vec![0; LOG_SIZE];
    try_load(hook, instructions, &mut log).map_err(|source| {
        let text = log.split(|byte| *byte == 0).next().unwrap_or_default();
        let text = String::from_utf8_lossy(text);
        let log = match text.trim() {
            "" => String::new(),
            text => format!(": {text}"),
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
    // SAFETY: the structure of this call. Instructions, licence and log are borrowed for longer
    // than the call, the log for writing, each with its length (the licence ends with a zero).
    // The call returns a descriptor.
    unsafe { bpf_fd(Call::ProgLoad, &attributes) }
}

/// Attaches a program to a network namespace while the returned descriptor is open.
pub(crate) fn attach_to_namespace(
    hook: Hook,
    program: BorrowedFd<'_>,
    namespace: BorrowedFd<'_>,
) -> Result<OwnedFd, Error> {
    attach(hook, program, number(namespace.as_raw_fd()))
}

/// Attaches a program to a link of this thread's network namespace while the returned descriptor is
/// open.
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
    // SAFETY: the structure of this call, without addresses; the call returns a descriptor.
    unsafe { bpf_fd(Call::LinkCreate, &attributes) }.map_err(|error| {
        if error.raw_os_error() == Some(libc::EBUSY) {
            Error::Taken
        } else {
            Error::Attach(error)
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Needs root.
    #[test]
    fn the_error_of_a_refused_program_has_the_verifiers_message() {
        let error = load(
            Hook::SocketLookup,
            &[copy(Register::R1, Register::R2), exit()],
        )
        .expect_err("refused");
        let words = error.to_string();
        assert!(words.contains("R2 !read_ok"), "{words}");
    }
}
