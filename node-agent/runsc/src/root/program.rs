//! The program of the pause container. It waits for ever. In a Pod whose containers share their
//! processes (`shareProcessNamespace`) it is the first process: there it has the kernel reap the
//! orphans.

use super::fields::fields;

/// Address at which the program is loaded.
const BASE: u64 = 0x40_0000;
/// Bytes of the ELF header and of one program header.
const HEADERS: u64 = 64 + 56;

/// Machine code of `sigaction(SIGCHLD, SIG_IGN)`, by which the kernel reaps ended children (POSIX,
/// sigaction, SA_NOCLDWAIT), and of endless calls of `pause`.
#[cfg(target_arch = "x86_64")]
const CODE: Option<&[u8]> = Some(&[
    0xb8, 0x0d, 0x00, 0x00, 0x00, //       mov eax, 13 (rt_sigaction)
    0xbf, 0x11, 0x00, 0x00, 0x00, //       mov edi, 17 (SIGCHLD)
    0x48, 0x8d, 0x35, 0x17, 0x00, 0x00, 0x00, // lea rsi, [ignore]
    0x31, 0xd2, //                         xor edx, edx
    0x41, 0xba, 0x08, 0x00, 0x00, 0x00, // mov r10d, 8 (bytes of a set of signals)
    0x0f, 0x05, //                         syscall
    0xb8, 0x22, 0x00, 0x00, 0x00, // wait: mov eax, 34 (pause)
    0x0f, 0x05, //                         syscall
    0xeb, 0xf7, //                         jmp wait
    0xcc, 0xcc, 0xcc, 0xcc, //             never reached
    1, 0, 0, 0, 0, 0, 0, 0, //     ignore: SIG_IGN
    0, 0, 0, 0, 0, 0, 0, 0, //             no flags
    0, 0, 0, 0, 0, 0, 0, 0, //             no restorer
    0, 0, 0, 0, 0, 0, 0, 0, //             no mask
]);
#[cfg(not(target_arch = "x86_64"))]
const CODE: Option<&[u8]> = None;

/// Returns an ELF file with one segment, which is loaded as it stands in the file. None where there
/// is no code for the processor.
pub(super) fn elf() -> Option<Vec<u8>> {
    const EM_X86_64: u64 = 62;
    let code = CODE?;
    let size = HEADERS + code.len() as u64;
    let mut file = b"\x7fELF".to_vec();
    file.extend(fields(&[
        (2, 1),              // 64 bits
        (1, 1),              // little endian
        (1, 1),              // version
        (0, 9),              // of the System V ABI
        (2, 2),              // ET_EXEC
        (EM_X86_64, 2),      //
        (1, 4),              // version
        (BASE + HEADERS, 8), // entry
        (64, 8),             // where the program header is
        (0, 8),              // no section headers
        (0, 4),              // flags
        (64, 2),             // bytes of this header
        (56, 2),             // bytes of a program header
        (1, 2),              // program headers
        (0, 6),              // section headers
    ]));
    file.extend(fields(&[
        (1, 4),      // PT_LOAD
        (5, 4),      // PF_R | PF_X
        (0, 8),      // from the file's beginning
        (BASE, 8),   // virtual address
        (BASE, 8),   // physical address
        (size, 8),   // bytes in the file
        (size, 8),   // bytes in memory
        (0x1000, 8), // alignment
    ]));
    file.extend(code);
    Some(file)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;
    use std::process::Command;
    use std::time::{Duration, Instant};

    use super::*;

    #[test]
    fn the_pause_program_waits_and_ignores_the_ends_of_children() {
        let Some(elf) = elf() else { return };
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("pause");
        fs::write(&path, elf).expect("written");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o555)).expect("set");
        let mut child = Command::new(&path).spawn().expect("it is a program");
        let of_proc = |name: &str| {
            fs::read_to_string(format!("/proc/{}/{name}", child.id())).expect("it lives")
        };
        let deadline = Instant::now() + Duration::from_secs(10);
        // 34 is the number of the system call `pause`.
        while !of_proc("syscall").starts_with("34 ") {
            assert!(Instant::now() < deadline, "{}", of_proc("syscall"));
            std::thread::sleep(Duration::from_millis(1));
        }
        let status = of_proc("status");
        let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
        let ignored = u64::from_str_radix(ignored.expect("a line").trim(), 16).expect("a set");
        assert_eq!(ignored & 1 << (17 - 1), 1 << (17 - 1), "{status}");
        child.kill().expect("killed");
        child.wait().expect("it ends");
    }
}
