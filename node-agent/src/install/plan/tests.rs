use super::*;

const MAIN: &str = "/etc/containerd/config.toml";
const DROP_IN: &str = "/etc/containerd/conf.d/torpor.toml";
const IMPORT: &str = "/etc/containerd/conf.d/torpor*.toml";

fn wanted() -> Wanted {
    Wanted {
        main: MAIN.into(),
        drop_in: DROP_IN.into(),
        handler: Handler {
            name: "torpor".into(),
            shim: "/opt/torpor/bin/containerd-shim-torpor-v1".into(),
        },
        stats_period: "10s".parse().expect("a period"),
    }
}

fn holding(main: &str) -> Current {
    Current {
        main: Some(main.to_owned()),
        ..Current::default()
    }
}

/// Returns the content of the files after the plan, without the mark of a pending restart.
fn carried_out(plan: &Plan, current: &Current) -> Current {
    let after = |change: &Change, before: &Option<String>| match change {
        Change::Keep => before.clone(),
        Change::Write(text) => Some(text.clone()),
        Change::Remove => None,
    };
    Current {
        main: after(&plan.main, &current.main),
        drop_in: after(&plan.drop_in, &current.drop_in),
        edit: plan.edit.clone(),
        restart_pending: false,
    }
}

fn installed(current: &Current) -> Current {
    let plan = install(&wanted(), current).expect("a plan");
    carried_out(&plan, current)
}

/// Returns the path of the runtime's shim in the section of `plugin` of this text.
fn runtime(text: &str, plugin: &str) -> Option<String> {
    let document: toml_edit::DocumentMut = text.parse().expect("TOML");
    let found = document.get("plugins")?.get(plugin)?.get("containerd")?;
    let found = found.get("runtimes")?.get("torpor")?;
    assert_eq!(
        found["runtime_type"].as_str(),
        Some("io.containerd.torpor.v1")
    );
    for passed in ["pod_annotations", "container_annotations"] {
        let patterns = found[passed].as_array().expect("a list");
        assert_eq!(
            patterns.iter().map(|p| p.as_str()).collect::<Vec<_>>(),
            [Some("torpor.dev/*")]
        );
    }
    found["runtime_path"].as_str().map(str::to_owned)
}

fn imports(text: &str) -> Vec<String> {
    let document: toml_edit::DocumentMut = text.parse().expect("TOML");
    let Some(list) = document.get("imports") else {
        return Vec::new();
    };
    list.as_array()
        .expect("a list")
        .iter()
        .filter_map(|v| v.as_str().map(str::to_owned))
        .collect()
}

/// Main files of many kinds: name of the case, text, and plugin whose section must have the handler
/// afterwards.
const MAINS: &[(&str, &str, &str)] = &[
    (
        "version 3 alone",
        "version = 3\n",
        "io.containerd.cri.v1.runtime",
    ),
    (
        "version 4",
        "version = 4\n[debug]\n  level = \"info\"\n",
        "io.containerd.cri.v1.runtime",
    ),
    (
        "imports by pattern",
        "version = 3\nimports = [\"/etc/containerd/conf.d/*.toml\"]\n",
        "io.containerd.cri.v1.runtime",
    ),
    (
        "imports of others, with comments",
        "# ours\nversion = 3 # new\nimports = [\n  \"/etc/a/*.toml\", # a\n  \"b.toml\",\n]\n\n# tables\n[grpc]\n  uid = 0\n",
        "io.containerd.cri.v1.runtime",
    ),
    (
        "an empty list of imports",
        "imports = []\nversion = 3\n",
        "io.containerd.cri.v1.runtime",
    ),
    (
        "no imports before the first table",
        "version = 3\n\n# about plugins\n[plugins.\"io.containerd.cri.v1.images\"]\n  snapshotter = \"overlayfs\"",
        "io.containerd.cri.v1.runtime",
    ),
    (
        "version 2 alone",
        "version = 2\n",
        "io.containerd.grpc.v1.cri",
    ),
    (
        "version 2 with settings of its own",
        "version = 2\n[plugins.\"io.containerd.grpc.v1.cri\"]\n  sandbox_image = \"p\"\n  [plugins.\"io.containerd.grpc.v1.cri\".containerd.runtimes.runc]\n    runtime_type = \"io.containerd.runc.v2\"",
        "io.containerd.grpc.v1.cri",
    ),
    ("no version", "root = \"/var/lib/containerd\"\n", "cri"),
    (
        "no version, long names",
        "[plugins.\"io.containerd.grpc.v1.cri\"]\n",
        "io.containerd.grpc.v1.cri",
    ),
    ("an empty file", "", "cri"),
];

#[test]
fn containerd_finds_the_handler_where_its_version_looks() {
    for (case, main, plugin) in MAINS {
        let after = installed(&holding(main));
        let main = after.main.as_deref().expect("a main file");
        let found = match plugin {
            &"io.containerd.cri.v1.runtime" => {
                assert!(
                    containerd::imports(
                        Path::new(MAIN),
                        &main.parse().expect("TOML"),
                        Path::new(DROP_IN)
                    )
                    .expect("imports"),
                    "{case}: the drop-in is not imported by {main}"
                );
                runtime(after.drop_in.as_deref().expect("a drop-in"), plugin)
            }
            _ => {
                assert_eq!(
                    after.drop_in, None,
                    "{case}: containerd 1 would replace the section"
                );
                runtime(main, plugin)
            }
        };
        assert_eq!(
            found.as_deref(),
            Some("/opt/torpor/bin/containerd-shim-torpor-v1"),
            "{case}"
        );
    }
}

/// Returns the period of containerd's figures in Torpor's own file.
fn stats_period(wanted: &Wanted, main: &str) -> Option<String> {
    let plan = install(wanted, &holding(main)).expect("a plan");
    let Change::Write(text) = plan.drop_in else {
        panic!("no drop-in for {main:?}")
    };
    let document: toml_edit::DocumentMut = text.parse().expect("TOML");
    let plugin = &document["plugins"]["io.containerd.cri.v1.runtime"];
    let period = plugin.get("stats_collect_period")?.as_str();
    Some(period.expect("a string").to_owned())
}

#[test]
fn containerd_measures_at_the_set_period_unless_the_node_sets_its_own() {
    let plain = "version = 3\n";
    assert_eq!(stats_period(&wanted(), plain).as_deref(), Some("10s"));
    let others =
        "version = 3\n[plugins.\"io.containerd.cri.v1.images\"]\nstats_collect_period = 5\n";
    assert_eq!(stats_period(&wanted(), others).as_deref(), Some("10s"));
    let own =
        "version = 3\n[plugins.\"io.containerd.cri.v1.runtime\"]\nstats_collect_period = \"1s\"\n";
    assert_eq!(stats_period(&wanted(), own), None);
    let unchanged = Wanted {
        stats_period: StatsPeriod::Unchanged,
        ..wanted()
    };
    assert_eq!(stats_period(&unchanged, plain), None);
}

#[test]
fn a_second_installation_changes_and_restarts_nothing() {
    for (case, main, _) in MAINS {
        let after = installed(&holding(main));
        let again = install(&wanted(), &after).expect("a plan");
        assert_eq!(
            (&again.main, &again.drop_in),
            (&Change::Keep, &Change::Keep),
            "{case}"
        );
        assert_eq!(again.restart, None, "{case}");
        assert_eq!(again.edit, after.edit, "{case}: the way back was lost");
    }
}

#[test]
fn the_removal_gives_every_byte_back() {
    for (case, main, _) in MAINS {
        let after = installed(&installed(&holding(main)));
        let plan = uninstall(&wanted(), &after).expect("a plan");
        assert_eq!(plan.restart, Some(Restart::Changed), "{case}");
        let removed = carried_out(&plan, &after);
        assert_eq!(removed.main.as_deref(), Some(*main), "{case}");
        assert_eq!(removed.drop_in, None, "{case}");
    }
}

#[test]
fn the_removal_takes_only_torpors_part_of_a_file_that_was_changed_since() {
    for (case, main, plugin) in MAINS {
        let mut after = installed(&holding(main));
        after.main = after
            .main
            .map(|text| format!("# changed\n{text}\n[timeouts]\n  x = \"1s\"\n"));
        let removed = carried_out(&uninstall(&wanted(), &after).expect("a plan"), &after);
        let left = removed.main.expect("the file stays");
        assert!(
            left.starts_with("# changed\n") && left.contains("[timeouts]"),
            "{case}: {left}"
        );
        assert_eq!(runtime(&left, plugin), None, "{case}: {left}");
        assert!(!left.contains("torpor"), "{case}: {left}");
    }
}

#[test]
fn the_removal_without_a_record_leaves_no_import_of_ours() {
    let mut after = installed(&holding("version = 3\nimports = [\"/a.toml\"]\n"));
    after.edit = None;
    let removed = carried_out(&uninstall(&wanted(), &after).expect("a plan"), &after);
    assert_eq!(imports(&removed.main.expect("the file stays")), ["/a.toml"]);
}

#[test]
fn an_import_is_added_only_where_no_pattern_covers_the_file() {
    let kept = install(
        &wanted(),
        &holding("version = 3\nimports = [\"conf.d/*.toml\"]\n"),
    );
    assert_eq!(kept.expect("a plan").main, Change::Keep);
    let after = installed(&holding(
        "version = 3\nimports = [\"/etc/containerd/*.toml\"]\n",
    ));
    assert_eq!(
        imports(&after.main.expect("main")),
        ["/etc/containerd/*.toml", IMPORT]
    );
}

#[test]
fn an_added_import_keeps_comments_and_order() {
    let main = "# ours\nversion = 3\nimports = [\n  \"a.toml\", # first\n  \"b.toml\",\n]\n\n# tables\n[grpc]\n";
    let after = installed(&holding(main)).main.expect("main");
    let line = format!("  \"b.toml\",\n  \"{IMPORT}\",\n]\n\n# tables\n[grpc]\n");
    assert!(
        after.starts_with("# ours\nversion = 3\nimports = [\n  \"a.toml\", # first\n"),
        "{after}"
    );
    assert!(after.ends_with(&line), "{after}");
}

#[test]
fn a_missing_main_file_is_made_and_taken_away() {
    let after = installed(&Current::default());
    let main = after.main.as_deref().expect("main");
    assert!(main.starts_with("version = 2\n"));
    assert!(runtime(main, "io.containerd.grpc.v1.cri").is_some());
    let plan = uninstall(&wanted(), &after).expect("a plan");
    assert_eq!((plan.main, plan.drop_in), (Change::Remove, Change::Keep));
}

#[test]
fn a_change_that_was_not_followed_by_a_restart_is_restarted_for() {
    let mut after = installed(&holding("version = 3\n"));
    after.restart_pending = true;
    let again = install(&wanted(), &after).expect("a plan");
    assert_eq!(
        (again.main, again.restart),
        (Change::Keep, Some(Restart::Pending))
    );
}

#[test]
fn a_drop_in_of_an_older_build_is_replaced() {
    let mut after = installed(&holding("version = 3\n"));
    let good = after.drop_in.replace("version = 3\n# older\n".to_owned());
    let plan = install(&wanted(), &after).expect("a plan");
    assert_eq!(plan.drop_in, Change::Write(good.expect("a drop-in")));
    assert_eq!(
        (plan.main, plan.restart),
        (Change::Keep, Some(Restart::Changed))
    );
}

#[test]
fn a_node_that_moved_to_version_3_gets_the_drop_in_instead_of_the_block() {
    let mut after = installed(&holding("version = 2\n"));
    after.main = after
        .main
        .map(|main| main.replace("version = 2", "version = 3"));
    let moved = installed(&after);
    assert!(moved.drop_in.is_some());
    let main = moved.main.expect("main");
    assert_eq!(runtime(&main, "io.containerd.grpc.v1.cri"), None);
    assert_eq!(imports(&main), [IMPORT]);
}

#[test]
fn another_path_of_the_binary_replaces_the_block_once() {
    let after = installed(&holding("version = 2\n"));
    let mut moved = wanted();
    moved.handler.shim = "/var/torpor/bin/containerd-shim-torpor-v1".into();
    let again = carried_out(&install(&moved, &after).expect("a plan"), &after);
    let main = again.main.as_deref().expect("main");
    assert_eq!(
        runtime(main, "io.containerd.grpc.v1.cri").as_deref(),
        Some("/var/torpor/bin/containerd-shim-torpor-v1")
    );
    assert_eq!(main.matches("[plugins.").count(), 1, "{main}");
    let removed = carried_out(&uninstall(&moved, &again).expect("a plan"), &again);
    assert_eq!(removed.main.as_deref(), Some("version = 2\n"));
}

#[test]
fn a_path_with_a_quote_stays_one_string() {
    let mut odd = wanted();
    odd.handler.shim = "/opt/a\"b\\c/containerd-shim-torpor-v1".into();
    let current = holding("version = 2\n");
    let after = carried_out(&install(&odd, &current).expect("a plan"), &current);
    let found = runtime(
        after.main.as_deref().expect("main"),
        "io.containerd.grpc.v1.cri",
    );
    assert_eq!(
        found.as_deref(),
        Some("/opt/a\"b\\c/containerd-shim-torpor-v1")
    );
}

#[test]
fn an_invalid_main_file_is_refused_and_the_error_names_the_place() {
    let cases = [
        (
            "version = 3\n\nimports = [\"a\n",
            "ContainerdConfigInvalid",
            "config.toml line 3 ",
        ),
        (
            "version = \"three\"\n",
            "ContainerdConfigInvalid",
            "version is not a whole number",
        ),
        (
            "version = 3\nimports = \"a\"\n",
            "ContainerdConfigInvalid",
            "imports is not a list",
        ),
        (
            "version = 3\nimports = [1]\n",
            "ContainerdConfigInvalid",
            "imports is not a list",
        ),
        (
            "version = 2\nplugins = {}\n",
            "RuntimeHandlerTaken",
            "cannot take the runtime handler torpor",
        ),
        (
            "version = 2\n[plugins.\"io.containerd.grpc.v1.cri\".containerd.runtimes.torpor]\n",
            "RuntimeHandlerTaken",
            "cannot take the runtime handler torpor",
        ),
    ];
    for (main, reason, words) in cases {
        let error = install(&wanted(), &holding(main)).expect_err(main);
        assert_eq!(error.reason(), reason, "{main}");
        assert!(error.to_string().contains(words), "{main}: {error}");
    }
}
