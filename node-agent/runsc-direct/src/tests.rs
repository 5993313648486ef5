use std::collections::BTreeMap;

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use serde_json::Value;

use super::plan::Descriptors;
use super::*;
use torpor_test_namespace::{Namespace, sh};

/// Returns runsc's record of a pause container (release-20260905.0), without the fields that this
/// crate does not read.
pub(super) fn record() -> Value {
    json!({
        "id": "s", "bundleDir": "/b", "status": "created", "goferPid": 0,
        "goferMountConfs": [{ "lower": 2, "upper": 0 }],
        "sandbox": {
            "id": "s", "pid": 7, "uid": 0, "gid": 0, "checkpointed": true, "restored": false,
            "metricMetadata": {
                "coretags": "false", "cpuarch": "amd64", "experiment": "", "fsmode": "directfs", "go": "go1.26.8",
                "network": "sandbox", "numcores": "2", "overlay": "root:self", "platform": "systrap",
                "version": "release-20260905.0-torpor",
            },
        },
        "spec": {
            "process": { "args": ["/pause"], "cwd": "/" },
            "annotations": {
                "dev.gvisor.spec.rootfs.source": "/opt/pause.erofs",
                "dev.gvisor.spec.rootfs.type": "erofs",
            },
            "linux": {
                "namespaces": [
                    { "type": "pid" }, { "type": "ipc" }, { "type": "uts" }, { "type": "mount" },
                    { "type": "network", "path": "/netns/a" }, { "type": "user" },
                ],
                "uidMappings": [{ "containerID": 0, "hostID": 0, "size": 4294967295_u32 }],
                "gidMappings": [
                    { "containerID": 0, "hostID": 1000, "size": 1 },
                    { "containerID": 1, "hostID": 1, "size": 65535 },
                ],
                "sysctl": { "net.ipv4.ping_group_range": "0 2147483647" },
            },
        },
    })
}

fn kept(record: Value) -> RunscRecord {
    RunscRecord {
        sandbox: record,
        containers: BTreeMap::new(),
    }
}

#[test]
fn the_plan_of_a_sandbox_is_derived_from_runscs_record() {
    let plan = plan::plan(&kept(record()), &json!({}), "s").expect("known");
    let expected = Plan {
        root: Root::Image("/opt/pause.erofs".into()),
        network_namespace: "/netns/a".into(),
        uid_map: "0 0 4294967295\n".to_owned(),
        gid_map: "0 1000 1\n1 1 65535\n".to_owned(),
    };
    assert_eq!(plan, expected);
}

#[test]
fn a_missing_record_of_runsc_is_taken_from_an_earlier_copy() {
    let of = |records: &[(&str, i32)]| {
        let records = records
            .iter()
            .map(|(id, record)| ((*id).to_owned(), json!(record)));
        RunscRecord {
            sandbox: record(),
            containers: records.collect(),
        }
    };
    let (earlier, now) = (of(&[("a", 1), ("b", 1), ("gone", 1)]), of(&[("a", 2)]));
    let known = ["a", "b", "c"];
    let kept = now.clone().or_from(Some(earlier), known);
    assert_eq!(kept, of(&[("a", 2), ("b", 1)]));
    assert_eq!(now.clone().or_from(None, known), now);
}

/// The root file system of the pause container's image has a gofer.
#[test]
fn a_first_container_that_is_served_has_a_plan_of_its_gofer() {
    let mut record = record();
    record["goferPid"] = json!(8);
    record["goferMountConfs"] = json!([{ "lower": 1, "upper": 0 }]);
    record["spec"]["annotations"] = json!({ "io.kubernetes.cri.container-type": "sandbox" });
    record["spec"]["mounts"] = json!([]);
    let spec = json!({ "root": { "path": "/rootfs" }, "mounts": [] });
    let plan = plan::plan(&kept(record.clone()), &spec, "s").expect("known");
    let gofer = gofer::plan::Plan::new(&record, &spec, "s").expect("known");
    assert_eq!(plan.root.mount_confs(), "lisafs:none");
    assert_eq!(plan.root, Root::Served(Box::new(gofer)));
}

#[test]
fn a_record_with_an_unknown_setting_is_left_to_runsc() {
    let known = |pointer: &str, value: Value| {
        let mut record = record();
        let (parent, key) = pointer.rsplit_once('/').expect("a pointer");
        let parent = record.pointer_mut(parent).expect("it is there");
        match parent {
            Value::Array(array) => array.push(value),
            parent => parent[key] = value,
        }
        plan::plan(&kept(record), &json!({}), "s").is_some()
    };
    let metadata = |key: &str| format!("/sandbox/metricMetadata/{key}");
    for version in ["release-20260905.0", "release-20260905.0-torpor"] {
        assert!(known(&metadata("version"), json!(version)), "{version}");
    }
    for version in [
        "release-20260905.0-12-gabc",
        "release-20260905.01",
        "release-20260701.0",
        "",
        "x-release-20260905.0",
    ] {
        assert!(!known(&metadata("version"), json!(version)), "{version}");
    }
    for (pointer, value) in [
        (metadata("platform"), json!("kvm")),
        (metadata("network"), json!("host")),
        (metadata("fsmode"), json!("goferfs")),
        (metadata("coretags"), json!("true")),
        (metadata("experiment"), json!("x")),
        ("/goferPid".to_owned(), json!(8)),
        (
            "/goferMountConfs".to_owned(),
            json!([{ "lower": 1, "upper": 2 }]),
        ),
        ("/spec/process/terminal".to_owned(), json!(true)),
        (
            "/spec/hooks".to_owned(),
            json!({ "prestart": [{ "path": "/bin/true" }] }),
        ),
        (
            "/spec/linux/sysctl/net.ipv6.conf.all.disable_ipv6".to_owned(),
            json!("1"),
        ),
        (
            "/spec/annotations/dev.gvisor.spec.rootfs.type".to_owned(),
            json!("bind"),
        ),
        (
            "/spec/annotations/dev.gvisor.spec.rootfs.overlay".to_owned(),
            json!("memory"),
        ),
        ("/spec/linux/uidMappings".to_owned(), json!([])),
        (
            "/spec/linux/gidMappings".to_owned(),
            json!([{ "containerID": 0 }]),
        ),
        (
            "/spec/linux/namespaces".to_owned(),
            json!([{ "type": "network", "path": "/n" }]),
        ),
        (
            "/spec/linux/namespaces".to_owned(),
            json!([{ "type": "user" }, { "type": "network" }]),
        ),
        // Appended to the record's namespaces.
        (
            "/spec/linux/namespaces/-".to_owned(),
            json!({ "type": "network", "path": "/netns/b" }),
        ),
        (
            "/spec/linux/namespaces/-".to_owned(),
            json!({ "type": "user", "path": "/userns" }),
        ),
    ] {
        assert!(!known(&pointer, value.clone()), "{pointer} {value}");
    }
    for (pointer, value) in [
        ("/spec/hooks", json!(null)),
        ("/spec/hooks", json!({})),
        ("/spec/process/terminal", json!(false)),
        (
            "/spec/linux/sysctl/net.ipv6.conf.all.disable_ipv6",
            json!("0"),
        ),
    ] {
        assert!(known(pointer, value.clone()), "{pointer} {value}");
    }
}

#[test]
fn runsc_finds_in_its_record_the_sandbox_that_runs_now() {
    let mut expected = record();
    expected["status"] = json!("running");
    expected["sandbox"]["pid"] = json!(4711);
    expected["sandbox"]["checkpointed"] = json!(false);
    expected["sandbox"]["restored"] = json!(true);
    assert_eq!(plan::running_sandbox(&kept(record()), 4711, None), expected);
    expected["goferPid"] = json!(4712);
    assert_eq!(
        plan::running_sandbox(&kept(record()), 4711, Some(4712)),
        expected
    );
}

#[test]
fn the_last_execution_of_runsc_has_the_arguments_of_runscs_own() {
    let image = BootArgs {
        flags: vec!["--root=/r".to_owned(), "--platform=systrap".to_owned()],
        bundle: "/b".into(),
        sandbox: "s".to_owned(),
        memory: 4096,
        limits: vec!["--total-memory=1024".to_owned()],
        host_flags: vec!["--product-name=Box 1".to_owned()],
        mount_confs: "erofs:none".to_owned(),
        connections: 1,
        filestores: 0,
    };
    let served = BootArgs {
        mount_confs: "lisafs:none,lisafs:none,none:self".to_owned(),
        connections: 2,
        filestores: 1,
        ..image.clone()
    };
    let words = |args: &BootArgs, file_systems: &[i32]| {
        let descriptors = Descriptors {
            log: 3,
            booted: 5,
            control: 6,
            spec: 7,
            stdio: [8, 9, 10],
            proc_sync: 11,
            file_systems: file_systems.to_vec(),
        };
        let words = args.to_args(&descriptors);
        let words: Vec<String> = words.iter().map(|word| word.replace(' ', "_")).collect();
        words.join(" ")
    };
    let expected = |confs: &str, io: &str, others: &str| {
        format!(
            "--root=/r --platform=systrap --log-fd=3 boot --product-name=Box_1 --total-memory=1024 --apply-caps=false --setup-root=false --bundle=/b \
             --gofer-mount-confs={confs} --total-host-memory=4096 --io-fds={io} --start-sync-fd=5 \
             --controller-fd=6 --spec-fd=7 --stdio-fds=8,9,10 --proc-mount-sync-fd=11{others} s"
        )
    };
    assert_eq!(words(&image, &[4]), expected("erofs:none", "4", ""));
    assert_eq!(
        words(&served, &[12, 13, 14, 15]),
        expected(
            "lisafs:none,lisafs:none,none:self",
            "12,13",
            " --gofer-filestore-fds=14 --mounts-fd=15"
        )
    );
}

#[test]
fn settings_of_the_host_that_gvisor_cannot_read_are_given_as_flags() {
    let machine = |path: &str| match path {
        "/sys/devices/virtual/dmi/id/product_name" => Some("Box 1\n".to_owned()),
        "/sys/kernel/mm/transparent_hugepage/shmem_enabled" => {
            Some("always within_size [advise] never\n".to_owned())
        }
        _ => None,
    };
    assert_eq!(
        host_flags(machine),
        ["--product-name=Box 1", "--host-thp-shmem-enabled=advise"]
    );
    assert_eq!(host_flags(|_| None), Vec::<String>::new());
    assert_eq!(host_flags(|_| Some("[".to_owned())), ["--product-name=["]);
}

/// The expected arguments are those that runsc read of such a namespace (its debug log, "Setting up
/// network, config"), in Go's JSON.
#[test]
fn a_sandbox_gets_the_links_addresses_and_routes_of_its_pod_which_loses_the_addresses() {
    let namespace = Namespace::with_addresses();
    let name = namespace.name();
    // A link drops its neighbours when its own address changes.
    sh(&format!(
        "ip -n {name} link set eth0 address 02:00:00:00:00:aa mtu 1400
         ip -n {name} neigh replace 10.201.0.1 lladdr 02:00:00:00:00:01 dev eth0 nud permanent
         ip -n {name} neigh replace fd00:201::1 lladdr 02:00:00:00:00:01 dev eth0 nud permanent
         ip -n {name} route add 192.0.2.0/24 via 10.201.0.2 dev eth0 mtu 1300
         ip -n {name} route add 198.51.100.0/24 dev lo
         ip -n {name} -6 addr flush dev eth0 scope link
         ip -n {name} -6 addr flush dev eth1"
    ));
    let (arguments, sockets) = net::within(&namespace.path(), take_links).expect("taken");
    // The other end of the pair is in the namespace too. It is up and has no address.
    assert_eq!(sockets.len(), 1);
    let link = &arguments["FDBasedLinks"][0];
    assert!(
        link["GSOMaxSize"].as_u64() >= Some(1 << 16) && link["GVisorGSOEnabled"] == json!(false),
        "{link}"
    );
    let route = |ip: &str, mask: &str, gateway: &str, mtu: u32| json!({ "Destination": { "IP": ip, "Mask": mask }, "Gateway": gateway, "MTU": mtu });
    let v6 = |ones: usize| BASE64_STANDARD.encode([vec![0xff; ones], vec![0; 16 - ones]].concat());
    let expected = json!({
        "LoopbackLinks": [{
            "Name": "lo",
            "Addresses": [{ "Address": "127.0.0.1", "PrefixLen": 8 }, { "Address": "::1", "PrefixLen": 128 }],
            "Routes": [
                route("127.0.0.0", "/wAAAA==", "", 0), route("::1", &v6(16), "", 0),
                route("198.51.100.0", "////AA==", "", 0),
            ],
        }],
        "FDBasedLinks": [{
            "Name": "eth0", "MTU": 1400, "LinkAddress": "AgAAAACq",
            "Addresses": [{ "Address": "10.201.3.4", "PrefixLen": 16 }, { "Address": "fd00:201::4", "PrefixLen": 64 }],
            "Routes": [
                route("0.0.0.0", "AAAAAA==", "10.201.0.1", 0), route("10.201.0.0", "//8AAA==", "", 0),
                route("192.0.2.0", "////AA==", "10.201.0.2", 1300),
                route("fd00:201::", &v6(8), "", 0), route("::", &v6(0), "fd00:201::1", 0),
            ],
            "Neighbors": [
                { "IP": "10.201.0.1", "HardwareAddr": "AgAAAAAB" }, { "IP": "fd00:201::1", "HardwareAddr": "AgAAAAAB" },
            ],
            "GSOMaxSize": link["GSOMaxSize"], "GVisorGSOEnabled": false, "RXChecksumOffload": true, "QDisc": 1, "NumChannels": 1,
        }],
        "AllowConnectedOnSave": true,
        "IsRestore": true,
    });
    assert_eq!(arguments, expected);
    assert_eq!(sh(&format!("ip -n {name} -o addr show dev eth0")), "");
    // A second call changes nothing: a link without an address is none of the sandbox'.
    let (arguments, sockets) = net::within(&namespace.path(), take_links).expect("taken");
    assert!(sockets.is_empty() && arguments["FDBasedLinks"] == json!([]));
}

#[test]
fn without_the_links_own_offload_gvisor_cuts_segments_itself() {
    let namespace = Namespace::with_addresses();
    let name = namespace.name();
    sh(&format!(
        "ip -n {name} link set eth0 gso_max_size 32768; ip -n {name} -6 addr flush dev eth1"
    ));
    let found = net::within(&namespace.path(), || found(&mut Netlink::open()?)).expect("read");
    let gso = |offloads: bool| {
        let arguments = found.arguments(&found.links(), &[offloads]);
        let link = &arguments["FDBasedLinks"][0];
        (
            link["GSOMaxSize"].as_u64(),
            link["GVisorGSOEnabled"].as_bool(),
        )
    };
    assert_eq!(gso(true), (Some(32768), Some(false)));
    assert_eq!(gso(false), (Some(65536), Some(true)));
}
