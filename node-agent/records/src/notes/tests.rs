use std::os::unix::fs::MetadataExt;
use std::time::{Duration, Instant};

use super::*;
use crate::tests::one_pod;

/// Reports whether a thread waits for the lock of the file with this inode (proc_locks(5)).
fn has_waiter(inode: u64) -> bool {
    let locks = std::fs::read_to_string("/proc/locks").expect("the machine's locks");
    let inode = format!(":{inode} ");
    let mut waiting = locks.lines().filter(|line| line.contains("-> FLOCK"));
    waiting.any(|line| line.contains(&inode))
}

#[test]
fn a_cause_is_called_the_same_in_records_and_arguments() {
    for cause in WakeCause::ALL {
        assert_eq!(cause.as_str().parse(), Ok(cause));
        let written = serde_json::to_string(&cause).expect("a word");
        assert_eq!(written, format!("\"{}\"", cause.as_str()));
        assert_eq!(format!("{cause:?}"), cause.as_str());
    }
    let unknown = "Moonlight".parse::<WakeCause>();
    assert_eq!(unknown, Err(UnknownCause("Moonlight".to_owned())));
}

#[test]
fn a_session_that_begins_during_a_look_for_sessions_counts() {
    let (_dir, records, sandbox) = one_pod();
    let (_, file) = records
        .file_to_lock(&sandbox, Session::Use.file())
        .expect("a file");
    let inode = file.metadata().expect("its inode").ino();
    let exclusive = locks::try_exclusive(file).expect("tried");
    std::thread::scope(|scope| {
        let joins = scope.spawn(|| records.join_sessions(&sandbox, Session::Use));
        let deadline = Instant::now() + Duration::from_secs(10);
        while !has_waiter(inode) {
            assert!(Instant::now() < deadline, "no one waits for the lock");
            std::thread::sleep(Duration::from_millis(1));
        }
        drop(exclusive);
        let session = joins.join().expect("no panic").expect("joined");
        let has_some = || records.has_sessions(&sandbox, Session::Use);
        assert!(has_some().expect("looked"));
        drop(session);
        assert!(!has_some().expect("looked"));
    });
}

#[test]
fn a_restore_note_is_read_back_with_its_time() {
    let (_dir, records, sandbox) = one_pod();
    assert_eq!(records.restored_at(&sandbox), None);
    let note = RestoreNote {
        image: ImageId::parse("pod-a.1").expect("an image's name"),
        stages_end_micros: [("prepared".to_owned(), 10)].into(),
    };
    records.write_restore(&sandbox, &note).expect("noted");
    assert_eq!(records.restore(&sandbox).expect("noted"), note);
    assert!(records.restored_at(&sandbox).is_some());
}

#[test]
fn the_reason_why_packets_do_not_wake_a_pod_is_noted_until_it_is_removed() {
    let (_dir, records, sandbox) = one_pod();
    assert_eq!(records.not_watched(&sandbox), None);
    records
        .note_not_watched(&sandbox, "no veth pair")
        .expect("noted");
    assert_eq!(
        records.not_watched(&sandbox).as_deref(),
        Some("no veth pair")
    );
    for _ in 0..2 {
        records.forget_not_watched(&sandbox).expect("forgotten");
        assert_eq!(records.not_watched(&sandbox), None);
    }
}

#[test]
fn the_times_of_probes_add_up_even_if_probes_end_together() {
    let (_dir, records, sandbox) = one_pod();
    assert_eq!(
        records.probed(&sandbox).expect("none"),
        ProbeNote::default()
    );
    let taken = |used_micros, took_micros| ProbeNote {
        used_micros,
        took_micros,
    };
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| records.note_probe(&sandbox, taken(3, 5)).expect("noted"));
        }
    });
    assert_eq!(records.probed(&sandbox).expect("noted"), taken(24, 40));
    records
        .note_probe(&sandbox, taken(u64::MAX, 1))
        .expect("noted");
    assert_eq!(
        records.probed(&sandbox).expect("noted"),
        taken(u64::MAX, 41)
    );
}
