use super::*;

/// A manifest as version 1 wrote it. Do not edit it: a program that cannot read this file cannot
/// read the images on users' disks.
const GOLDEN: &[u8] = include_bytes!("../../tests/golden/manifest-v1.json");

fn fingerprint() -> Fingerprint {
    Fingerprint {
        runsc_digest: "sha256:00ff".into(),
        runsc_version: "release-20260901".into(),
        platform: "systrap".into(),
        flags: vec![
            "--overlay2=root:self".into(),
            "--allow-connected-on-save".into(),
        ],
        cpu_features_digest: "sha256:0102".into(),
        cpu_features: vec!["avx".into(), "avx2".into(), "sse4_2".into()],
        kernel: "6.1.0-18-amd64".into(),
    }
}

fn container(name: SavedName) -> SavedContainer {
    let spec_digest = Digest::of(name.as_str().as_bytes());
    SavedContainer {
        name,
        image_id: "sha256:aa".into(),
        spec_digest,
    }
}

fn named(name: &str) -> SavedName {
    SavedName::Named(ContainerName::new(name).unwrap())
}

fn manifest() -> Manifest {
    let image = ImageId::parse("0b7e6c1a-4f0e-4a52-9c1f-2b8f5f3f9d10.2").unwrap();
    let file = |name: &str, size| FileEntry {
        name: name.into(),
        size,
        blake3: Digest::of(name.as_bytes()),
    };
    let draft = ManifestDraft {
        pod_name: "notebook-0".into(),
        sandbox_name: "notebook".into(),
        reason: SaveReason::Suspend,
        created_at: "2026-11-21T06:00:00.25Z".parse().unwrap(),
        fingerprint: fingerprint(),
        containers: vec![container(SavedName::Root), container(named("app"))],
        completed: vec![CompletedContainer {
            name: ContainerName::new("init").unwrap(),
            exit_code: 0,
        }],
        parent: Some(ImageId::parse("0b7e6c1a-4f0e-4a52-9c1f-2b8f5f3f9d10.1").unwrap()),
    };
    let files = vec![file("checkpoint.img", 65_536), file("pages.img", 1 << 33)];
    Manifest::new(Namespace::new("team-a").unwrap(), image, files, draft)
}

fn specs() -> Vec<ContainerSpecDigest> {
    let spec = |c: &SavedContainer| ContainerSpecDigest {
        name: c.name.clone(),
        digest: c.spec_digest,
    };
    manifest().containers.iter().rev().map(spec).collect()
}

#[test]
fn the_golden_manifest_of_version_1_is_read_and_written_byte_for_byte() {
    assert_eq!(Manifest::decode(GOLDEN).unwrap().0, manifest());
    let (bytes, digest) = manifest().encode().unwrap();
    assert_eq!(
        String::from_utf8(bytes).unwrap(),
        String::from_utf8(GOLDEN.to_vec()).unwrap()
    );
    assert_eq!(Manifest::decode(GOLDEN).unwrap().1, digest);
}

fn changed(from: &str, to: &str) -> Vec<u8> {
    let text = std::str::from_utf8(GOLDEN).unwrap();
    assert!(text.contains(from), "{from}");
    text.replacen(from, to, 1).into_bytes()
}

#[test]
fn another_version_or_magic_is_named_whatever_else_is_in_it() {
    let newer = br#"{"digest":17,"manifest":{"magic":"torpor-image","version":2,"new":{}}}"#;
    assert_eq!(
        Manifest::decode(newer),
        Err(DecodeError::Version { found: 2 })
    );
    let other = changed("torpor-image", "other-image");
    assert!(matches!(
        Manifest::decode(&other),
        Err(DecodeError::Magic { .. })
    ));
}

#[test]
fn unknown_fields_other_spellings_and_wrong_digests_are_refused() {
    let extra = changed("\"parent\":", "\"extra\":1,\"parent\":");
    assert!(matches!(
        Manifest::decode(&extra),
        Err(DecodeError::Malformed(_))
    ));
    let spaced = changed("\"version\":1", "\"version\": 1");
    assert!(matches!(
        Manifest::decode(&spaced),
        Err(DecodeError::Malformed(_))
    ));
    let moved = changed("\"exit_code\":0", "\"exit_code\":1");
    assert!(matches!(
        Manifest::decode(&moved),
        Err(DecodeError::Digest { .. })
    ));
    for bytes in [
        &b""[..],
        b"{}",
        b"null",
        b"[1]",
        &GOLDEN[..GOLDEN.len() - 1],
    ] {
        assert!(matches!(
            Manifest::decode(bytes),
            Err(DecodeError::Malformed(_))
        ));
    }
    let huge = vec![b' '; MAX_BYTES + 1];
    assert!(matches!(
        Manifest::decode(&huge),
        Err(DecodeError::TooLarge { .. })
    ));
}

#[test]
fn a_manifest_that_breaks_a_rule_is_neither_written_nor_read() {
    type Break = fn(&mut Manifest);
    let cases: [(&str, Break); 9] = [
        ("no files", |m| m.files.clear()),
        ("file with a path", |m| m.files[0].name = "../x".into()),
        ("file with a reserved name", |m| {
            m.files[0].name = "consumed".into()
        }),
        ("unsorted files", |m| m.files.reverse()),
        ("no containers", |m| m.containers.clear()),
        ("root not first", |m| m.containers.reverse()),
        ("a container twice", |m| {
            m.containers.push(container(named("app")))
        }),
        ("another pod", |m| m.pod_uid = PodUid::new("other").unwrap()),
        ("too many flags", |m| {
            m.fingerprint.flags = vec!["x".into(); MAX_FLAGS + 1]
        }),
    ];
    for (what, damage) in cases {
        let mut manifest = manifest();
        damage(&mut manifest);
        assert!(
            matches!(manifest.encode(), Err(DecodeError::Rule(_))),
            "{what}"
        );
        let body = serde_json::to_string(&manifest).unwrap();
        let digest = Digest::of(body.as_bytes());
        let bytes = format!("{{\"digest\":\"{digest}\",\"manifest\":{body}}}\n");
        assert!(
            matches!(
                Manifest::decode(bytes.as_bytes()),
                Err(DecodeError::Rule(_))
            ),
            "{what}"
        );
    }
}

#[track_caller]
fn mismatch(change: fn(&mut Fingerprint)) -> Mismatch {
    let mut node = fingerprint();
    change(&mut node);
    let mismatch = manifest().check(&node, &specs()).unwrap_err();
    assert_eq!(mismatch.reason(), "FingerprintMismatch");
    mismatch
}

#[test]
fn a_relevant_difference_of_a_node_is_named() {
    assert_eq!(
        mismatch(|n| n.runsc_digest = "sha256:ee".into()).to_string(),
        "the image was made by runsc release-20260901 (sha256:00ff) and this node has runsc release-20260901 (sha256:ee); \
         restore it on a node with the same build, or start cold"
    );
    assert!(matches!(
        mismatch(|n| n.platform = "kvm".into()),
        Mismatch::Platform { .. }
    ));
    assert!(matches!(
        mismatch(|n| n.flags.clear()),
        Mismatch::Flags { .. }
    ));
    let missing = mismatch(|n| {
        n.cpu_features_digest = "sha256:03".into();
        n.cpu_features = vec!["avx".into(), "sse4_2".into(), "sse5".into()];
    });
    assert_eq!(
        missing,
        Mismatch::CpuFeatures {
            missing: "avx2".into()
        }
    );
    let unknown = mismatch(|n| {
        n.cpu_features_digest = "sha256:03".into();
        n.cpu_features.clear();
    });
    assert!(matches!(unknown, Mismatch::CpuFeatures { .. }));
}

#[test]
fn a_newer_kernel_and_more_cpu_features_do_not_matter() {
    let mut node = fingerprint();
    node.kernel = "7.0".into();
    node.cpu_features.push("sse5".into());
    node.cpu_features_digest = "sha256:09".into();
    manifest().check(&node, &specs()).unwrap();
}

#[test]
fn containers_must_be_those_that_were_saved() {
    let check =
        |specs: &[ContainerSpecDigest]| manifest().check(&fingerprint(), specs).unwrap_err();
    let added = ContainerSpecDigest {
        name: named("extra"),
        digest: Digest::of(b"x"),
    };
    let name = added.name.clone();
    assert_eq!(
        check(&[specs(), vec![added]].concat()),
        Mismatch::ContainerAdded { name }
    );
    assert_eq!(
        check(&specs()[1..]),
        Mismatch::ContainerMissing { name: named("app") }
    );
    let mut other = specs();
    other[0].digest = Digest::of(b"changed");
    assert_eq!(check(&other), Mismatch::Spec { name: named("app") });
    assert_eq!(check(&other).reason(), "SpecMismatch");
}

#[test]
fn the_pause_container_has_a_name_that_no_container_can_have() {
    assert_eq!(SavedName::try_from(String::new()).unwrap(), SavedName::Root);
    assert_eq!(
        SavedName::try_from(ROOT_NAME.to_owned()).unwrap(),
        SavedName::Root
    );
    ContainerName::new(ROOT_NAME).unwrap_err();
    SavedName::try_from("a/b".to_owned()).unwrap_err();
}

proptest::proptest! {
    #[test]
    fn decoding_never_panics(bytes in proptest::collection::vec(proptest::prelude::any::<u8>(), 0..200), at in 0..GOLDEN.len()) {
        let _ = Manifest::decode(&bytes);
        let mut spliced = GOLDEN.to_vec();
        spliced.splice(at..at, bytes);
        let _ = Manifest::decode(&spliced);
    }
}
