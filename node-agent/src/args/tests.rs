use std::path::Path;

use clap::CommandFactory;

use super::*;

#[test]
fn the_command_line_is_consistent() {
    Args::command().debug_assert();
}

/// The kubelet probes the Pod's first address, which may be of IPv4 or IPv6.
#[test]
fn health_and_metrics_are_served_at_the_addresses_of_both_families() {
    let args = Args::try_parse_from(["torpor-agent", "run", "--node-name=n"]).expect("parses");
    let Command::Run(run) = args.command else {
        panic!("{args:?}")
    };
    for address in [run.health_bind_address, run.metrics_bind_address] {
        assert!(
            address.is_ipv6() && address.ip().is_unspecified(),
            "{address}"
        );
    }
}

#[test]
fn install_needs_no_option_on_an_ordinary_node() {
    let args = Args::try_parse_from(["torpor-agent", "install"]).expect("parses");
    let Command::Install(install) = args.command else {
        panic!("{args:?}")
    };
    assert_eq!(install.host_root, Path::new("/host"));
    assert_eq!(
        install.containerd.containerd_restart,
        ContainerdRestart::Systemd("containerd".into())
    );
}

#[test]
fn the_default_reserve_is_above_the_kubelets_eviction_limits() {
    let run = |more: &[&str]| {
        let all = ["torpor-agent", "run", "--node-name=n"];
        let args = Args::try_parse_from(all.iter().chain(more)).expect("parses");
        match args.command {
            Command::Run(run) => run,
            other => panic!("{other:?}"),
        }
    };
    let default = run(&[]);
    let reserves = [None, Some(10), Some(30), Some(100)].map(|limit| default.reserve(limit));
    assert_eq!(reserves, [20, 20, 35, 95]);
    assert_eq!(run(&["--store-reserve=7"]).reserve(Some(30)), 7);
    assert_eq!(run(&["--store-reserve=off"]).reserve(Some(30)), 0);
    let run = default;
    assert_eq!(run.store_per_namespace, PerNamespace::Percent(50));
}

#[test]
fn the_limit_of_a_namespace_is_bytes_or_percent_or_none() {
    for (text, limit) in [
        ("0", PerNamespace::Unlimited),
        ("off", PerNamespace::Unlimited),
        ("1%", PerNamespace::Percent(1)),
        ("100%", PerNamespace::Percent(100)),
        (
            "5Gi",
            PerNamespace::Bytes(NonZeroU64::new(5 << 30).expect("not zero")),
        ),
    ] {
        assert_eq!(per_namespace(text), Ok(limit), "{text}");
    }
    for wrong in ["", "0%", "101%", "%", "-1", "5GiB", "50 %"] {
        per_namespace(wrong).expect_err(wrong);
    }
}

#[test]
fn limits_are_read_and_can_be_switched_off() {
    assert_eq!("off".parse(), Ok(Limit(None)));
    assert_eq!("10".parse(), Ok(Limit(Some(10))));
    for wrong in ["", "0", "100", "-1", "10%", "none"] {
        assert!(wrong.parse::<Limit>().is_err(), "{wrong:?} was read");
    }
    assert_eq!(at_least_one("0").ok(), None);
}

#[test]
fn a_bandwidth_is_read_as_a_quantity_and_can_be_switched_off() {
    let read = |text: &str| text.parse().map(Bytes::bytes);
    assert_eq!(read("off"), Ok(None));
    for (text, bytes) in [
        ("1", 1),
        ("3k", 3000),
        ("200Mi", 200 << 20),
        ("2G", 2_000_000_000),
    ] {
        assert_eq!(read(text), Ok(NonZeroU64::new(bytes)), "{text}");
    }
    for wrong in [
        "",
        "0",
        "0Mi",
        "-1",
        "1.5Gi",
        "Mi",
        "1mi",
        "1 Mi",
        "99999999999Gi",
    ] {
        assert!(read(wrong).is_err(), "{wrong:?} was read");
    }
}

#[test]
fn the_period_of_containerds_figures_is_read_and_can_be_left_alone() {
    let seconds = |seconds| NonZeroU32::new(seconds).map(StatsPeriod::Seconds);
    assert_eq!("10s".parse().ok(), seconds(10));
    assert_eq!("unchanged".parse(), Ok(StatsPeriod::Unchanged));
    for wrong in ["", "10", "0s", "-1s", "1m", "1.5s", "s", "off", "1s\""] {
        assert!(wrong.parse::<StatsPeriod>().is_err(), "{wrong:?} was read");
    }
}

#[test]
fn the_share_of_memory_that_becomes_swap_is_read() {
    let half = doze_swap("zram:50%").expect("a share");
    assert_eq!(half.of(1 << 30), (1 << 29) - (64 << 10));
    for wrong in [
        "",
        "50%",
        "zram",
        "zram:50",
        "zram:0%",
        "zram:201%",
        "zram:-1%",
        "file:1%",
    ] {
        assert!(doze_swap(wrong).is_err(), "{wrong:?} was read");
    }
}

#[test]
fn ways_to_restart_are_read_and_others_refused() {
    let read = ContainerdRestart::from_str;
    assert_eq!(read("none"), Ok(ContainerdRestart::None));
    assert_eq!(
        read("pidfile:/run/c.pid"),
        Ok(ContainerdRestart::Pidfile("/run/c.pid".into()))
    );
    for wrong in [
        "",
        "systemd",
        "systemd:",
        "systemd:--now",
        "pidfile:c.pid",
        "none:x",
    ] {
        assert!(read(wrong).is_err(), "{wrong:?} was read");
    }
}

#[test]
fn a_handler_that_would_break_the_configuration_is_refused() {
    for wrong in ["", "a.b", "a]", "A", "a\n"] {
        assert!(handler(wrong).is_err(), "{wrong:?} was read");
    }
    assert_eq!(handler("torpor-2"), Ok("torpor-2".to_owned()));
}

#[test]
fn reference_of_flags_is_current() {
    let page = torpor_test_reference::flags(<Args as clap::CommandFactory>::command());
    torpor_test_reference::assert_page("flags-agent.md", &page);
}
