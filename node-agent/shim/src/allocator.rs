//! Keeps the memory of a shim small: it runs for as long as its pod, mostly idle.

/// Has all threads allocate from one arena. With one for each thread, every thread that has ever
/// allocated would keep pages of its own.
#[allow(unsafe_code)]
pub(crate) fn use_one_arena() {
    #[cfg(target_env = "gnu")]
    // SAFETY: no pointers. The function may be called at any time (mallopt(3)).
    unsafe {
        nix::libc::mallopt(nix::libc::M_ARENA_MAX, 1);
    }
}
