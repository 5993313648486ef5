use super::*;

#[test]
fn paths_of_both_cgroup_drivers_are_understood() {
    let text = |path: &str| relative_path(path).expect("a path").display().to_string();
    assert_eq!(
        text("/kubepods/burstable/pod1/abc"),
        "kubepods/burstable/pod1/abc"
    );
    assert_eq!(
        text("kubepods-burstable-pod1_2.slice:cri-containerd:abc"),
        "kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod1_2.slice/\
         cri-containerd-abc.scope"
    );
}

#[test]
fn a_path_that_leaves_the_hierarchy_is_refused() {
    for path in [
        "/kubepods/../../etc",
        "",
        "/",
        "a:b",
        "x.service:p:n",
        "a-b.slice:..:/",
    ] {
        assert!(relative_path(path).is_err(), "{path}");
    }
}

#[test]
fn the_sandbox_sits_beside_its_containers() {
    let path = sandbox_path("/kubepods/pod1/abc", "0123456789abcdef").expect("a path");
    assert_eq!(path, Path::new("kubepods/pod1/torpor-0123456789ab"));
}

fn v2_tree() -> tempfile::TempDir {
    let root = tempfile::tempdir().expect("a directory");
    std::fs::write(root.path().join("cgroup.controllers"), "memory").expect("written");
    std::fs::create_dir_all(root.path().join("kubepods/pod1")).expect("made");
    root
}

#[test]
fn on_v2_there_is_one_hierarchy_and_create_is_idempotent() {
    let root = v2_tree();
    let hierarchies = Hierarchies::find(root.path()).expect("found");
    let leaf = Path::new("kubepods/pod1/torpor-x");
    hierarchies.create(leaf).expect("created");
    hierarchies.create(leaf).expect("created again");
    assert!(root.path().join(leaf).is_dir());
    hierarchies.remove(leaf).expect("removed");
    hierarchies.remove(leaf).expect("removed again");
}

#[test]
fn on_v2_the_memory_of_a_cgroup_made_in_a_pod_is_counted_separately() {
    let root = v2_tree();
    let pod = root.path().join("kubepods/pod1");
    let handed_down = pod.join("cgroup.subtree_control");
    std::fs::write(
        pod.join("cgroup.controllers"),
        "cpuset cpu io memory pids\n",
    )
    .expect("written");
    std::fs::write(&handed_down, "").expect("written");
    let hierarchies = Hierarchies::find(root.path()).expect("found");
    let leaf = Path::new("kubepods/pod1/torpor-x");
    hierarchies.create(leaf).expect("created");
    assert_eq!(
        std::fs::read_to_string(&handed_down).expect("read"),
        "+memory"
    );
    std::fs::remove_file(&handed_down).expect("removed");
    hierarchies
        .create(leaf)
        .expect("a refusal keeps nothing from running");
}

#[test]
fn a_quota_is_lifted_and_put_back_unless_it_was_changed_meanwhile() {
    let root = v2_tree();
    let pod = Path::new("kubepods/pod1");
    let file = root.path().join(pod).join("cpu.max");
    let now = || std::fs::read_to_string(&file).expect("read");
    let hierarchies = Hierarchies::find(root.path()).expect("found");
    std::fs::write(&file, "max 100000\n").expect("written");
    assert_eq!(hierarchies.quotas(pod), []);

    std::fs::write(&file, "20000 100000\n").expect("written");
    let quotas = hierarchies.quotas(pod);
    quotas[0].lift().expect("lifted");
    assert_eq!(now(), "max 100000");
    quotas[0].put_back().expect("put back");
    assert_eq!(now().trim_end(), "20000 100000");
    quotas[0].put_back().expect("put back again");
    std::fs::write(&file, "50000 100000\n").expect("written");
    quotas[0].put_back().expect("left alone");
    assert_eq!(now(), "50000 100000\n");
    // v1 has a number without a period in a file with another name.
    assert_eq!(unlimited("20000"), Some("-1".to_owned()));
}

#[test]
fn the_working_set_is_the_used_memory_without_idle_file_cache() {
    let root = v2_tree();
    let pod = Path::new("kubepods/pod1");
    let hierarchies = Hierarchies::find(root.path()).expect("found");
    assert_eq!(hierarchies.working_set(pod), None);
    let write = |file: &str, text: &str| {
        std::fs::write(root.path().join(pod).join(file), text).expect("written");
    };
    write("memory.current", "5000\n");
    assert_eq!(hierarchies.working_set(pod), Some(5000));
    write(
        "memory.stat",
        "anon 10\ninactive_file 1200\nactive_file 7\n",
    );
    assert_eq!(hierarchies.working_set(pod), Some(3800));
    assert_eq!(idle_cache("inactive_file 1\ntotal_inactive_file 9\n"), 9);
}

#[test]
fn a_cgroup_holds_only_the_processes_in_it_and_below_it() {
    let root = v2_tree();
    let below = root.path().join("kubepods/pod1/vmm");
    std::fs::create_dir(&below).expect("made");
    for (directory, pids) in [
        ("kubepods", "1\n"),
        ("kubepods/pod1", "7\n"),
        ("kubepods/pod1/vmm", "70\n71\n"),
    ] {
        let file = root.path().join(directory).join("cgroup.procs");
        std::fs::write(file, pids).expect("written");
    }
    let hierarchies = Hierarchies::find(root.path()).expect("found");
    let holds = |pid| hierarchies.holds(Path::new("kubepods/pod1"), pid);
    for (pid, expected) in [(7, true), (71, true), (1, false), (8, false)] {
        assert_eq!(holds(pid).expect("read"), expected, "{pid}");
    }
    let gone = hierarchies.holds(Path::new("kubepods/pod2"), 7);
    assert!(!gone.expect("read"));
}

#[test]
fn processor_time_is_read_in_both_versions() {
    let root = v2_tree();
    let pod = Path::new("kubepods/pod1");
    let hierarchies = Hierarchies::find(root.path()).expect("found");
    assert_eq!(hierarchies.processor_time(pod), None);
    let write = |file: &str, text: &str| {
        std::fs::write(root.path().join(pod).join(file), text).expect("written");
    };
    write("cpu.stat", "usage_usec 1500\nuser_usec 1000\n");
    let time = || hierarchies.processor_time(pod);
    assert_eq!(time(), Some(Duration::from_micros(1500)));
    write("cpuacct.usage", "2000000\n");
    assert_eq!(time(), Some(Duration::from_millis(2)));
}

#[test]
fn a_limit_of_processor_time_is_read_in_both_versions() {
    let root = v2_tree();
    let pod = Path::new("kubepods/pod1");
    let hierarchies = Hierarchies::find(root.path()).expect("found");
    let limit = || hierarchies.processor_limit(pod);
    let write = |file: &str, text: &str| {
        std::fs::write(root.path().join(pod).join(file), text).expect("written");
    };
    assert_eq!(limit(), None);
    write("cpu.cfs_quota_us", "-1\n");
    write("cpu.cfs_period_us", "100000\n");
    assert_eq!(limit(), None);
    write("cpu.cfs_quota_us", "1000\n");
    assert_eq!(limit(), Some(Duration::from_millis(10)));
    write("cpu.max", "max 100000\n");
    assert_eq!(limit(), None);
    write("cpu.max", "50000 100000\n");
    assert_eq!(limit(), Some(Duration::from_millis(500)));
}

#[test]
fn on_v1_a_new_cpuset_takes_its_parents_values() {
    let root = tempfile::tempdir().expect("a directory");
    let parent = root.path().join("cpuset/kubepods");
    std::fs::create_dir_all(parent.join("leaf")).expect("made");
    std::fs::write(root.path().join("cpuset/cgroup.procs"), "").expect("written");
    for (file, value) in [("cpuset.cpus", "0-1\n"), ("cpuset.mems", "0\n")] {
        std::fs::write(parent.join(file), value).expect("written");
        std::fs::write(parent.join("leaf").join(file), "\n").expect("written");
    }
    let hierarchies = Hierarchies::find(root.path()).expect("found");
    hierarchies
        .create(Path::new("kubepods/leaf"))
        .expect("created");
    let cpus = std::fs::read_to_string(parent.join("leaf/cpuset.cpus")).expect("read");
    assert_eq!(cpus.trim(), "0-1");
}
