package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

func TestANodesPathsPortsAndRangesDifferFromAnothers(t *testing.T) {
	a, b := node{0}, node{1}
	pairs := [][2]any{
		{a.state(), b.state()}, {a.containerdSocket(), b.containerdSocket()}, {a.podCIDR(), b.podCIDR()}, {a.podCIDR6(), b.podCIDR6()},
		{a.podBridge(), b.podBridge()}, {a.address(), b.address()}, {a.hardwareAddress(), b.hardwareAddress()}, {a.uplink(), b.uplink()}, {a.linkLocal(), b.linkLocal()}, {a.cgroup(), b.cgroup()},
	}
	for _, p := range pairs {
		if p[0] == p[1] {
			t.Errorf("both nodes have %v", p[0])
		}
	}
	last := node{maxNodes - 1}
	for _, link := range []string{last.podBridge(), last.uplink()} {
		if len(link) > 15 {
			t.Errorf("%s is too long for the name of a link", link)
		}
	}
}

func TestPodsGetIPv6UnlessTheMachineWouldLoseItsDefaultRoute(t *testing.T) {
	const rest = " 00000000000000000000000000000000 00 fd000000000000000000000000000001 00000400 00000001 00000000 %08x     eth0\n"
	route := func(destination string, flags int) string { return destination + fmt.Sprintf(rest, flags) }
	const anywhere, link = "00000000000000000000000000000000 00", "fd000000000000000000000000000000 40"
	for routes, wanted := range map[string]bool{
		"":                           false,
		route(link, 0x40001):         false,
		route(anywhere, 0x3):         false,
		route(anywhere, 0x40000|0x3): true,
		route(link, 1) + route(anywhere, 0x450003): true,
		"cannot be read\n":                         false,
	} {
		if got := hasAdvertisedDefaultRoute(routes); got != wanted {
			t.Errorf("%v of %q", got, routes)
		}
	}
	n := node{0}
	for _, ipv6 := range []bool{false, true} {
		var config map[string]any
		if err := json.Unmarshal([]byte(n.cniConfig(ipv6)), &config); err != nil {
			t.Error(err)
		}
		if got := strings.Contains(n.cniConfig(ipv6), n.podCIDR6()); got != ipv6 {
			t.Errorf("IPv6 %v: %s", ipv6, n.cniConfig(ipv6))
		}
	}
}

func TestAKeyChangesWithWhatBuildsTheArtifact(t *testing.T) {
	one := artifact{name: "x", packages: []string{"example.org/x@v1"}, files: []string{"x"}}
	two := one
	two.ldflags = "-X a=b"
	keys := map[string]bool{}
	for _, a := range []artifact{one, two} {
		for _, version := range []string{"go1.26.0", "go1.26.1"} {
			key, err := a.key(version)
			if err != nil {
				t.Fatal(err)
			}
			keys[key] = true
		}
	}
	if len(keys) != 4 {
		t.Fatalf("%d keys for 4 different builds", len(keys))
	}
}

func TestAHalfBuildDoesNotCount(t *testing.T) {
	place := t.TempDir()
	a := artifact{name: "x", files: []string{"one", "two"}}
	if err := os.WriteFile(filepath.Join(place, "one"), []byte("x"), 0o755); err != nil {
		t.Fatal(err)
	}
	if a.present(place) {
		t.Fatal("present although a file is missing")
	}
	if err := os.WriteFile(filepath.Join(place, "two"), nil, 0o755); err != nil {
		t.Fatal(err)
	}
	if a.present(place) {
		t.Fatal("present although a file is empty")
	}
}

func TestOnlyWhatDidNotExistBeforeIsUnmountedAndRemoved(t *testing.T) {
	record := &machineRecord{Absent: []string{"/run/containerd", "/opt/torpor", hostPathProvisionerDir}}
	roots := ownedRoots(record)
	for _, want := range []string{stateRoot, runRoot, "/opt/torpor", hostPathProvisionerDir} {
		if !slices.Contains(roots, want) {
			t.Errorf("%s is not ours", want)
		}
	}
	for _, foreign := range []string{"/run/containerd", "/var/lib/torpor"} {
		if slices.Contains(roots, foreign) {
			t.Errorf("%s is taken for ours", foreign)
		}
	}
}

func TestAPathIsBelowAFolderAndNotBelowOneThatOnlySharesItsBeginning(t *testing.T) {
	if !below("/run/torpor-dev/x", "/run/torpor-dev") || below("/run/torpor-devil", "/run/torpor-dev") {
		t.Fatal("wrong")
	}
}

func TestOfSeveralValuesOfASettingTheOneInBracketsIsItsOwn(t *testing.T) {
	for said, want := range map[string]string{"1\n": "1", "always inherit [never]\n": "never", "[always] never\n": "always"} {
		if got := chosen(said); got != want {
			t.Errorf("%q: %q", said, got)
		}
	}
}

func TestObjectsOfARenderedKustomizationAreRecognised(t *testing.T) {
	text := "apiVersion: apps/v1\nkind: Deployment\nmetadata:\n  labels:\n    name: wrong\n  name: right\n  namespace: there\nspec:\n  template:\n    metadata:\n      name: other\n"
	if first(kindLine, text) != "Deployment" || first(nameLine, text) != "right" || first(namespaceLine, text) != "there" {
		t.Fatalf("%q %q %q", first(kindLine, text), first(nameLine, text), first(namespaceLine, text))
	}
}

func TestTheOwnListOfImagesKeepsTheNewest(t *testing.T) {
	folder := t.TempDir()
	for _, name := range []string{"a", "b", "c"} {
		if err := os.WriteFile(filepath.Join(folder, name+".tar"), nil, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if err := keepNewest(folder, 2); err != nil {
		t.Fatal(err)
	}
	left, _ := filepath.Glob(filepath.Join(folder, "*.tar"))
	if len(left) != 2 {
		t.Fatalf("%q are left", left)
	}
}

func TestAVolumesFolderMountedFromARemovedFolderIsMountedAnew(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("mounting needs root")
	}
	from, to := filepath.Join(t.TempDir(), "volumes"), filepath.Join(t.TempDir(), "provisioner")
	t.Cleanup(func() { unmountBelow(to) })
	usable := func() {
		t.Helper()
		if err := ensureBindMount(from, to); err != nil {
			t.Fatal(err)
		}
		if err := os.Mkdir(filepath.Join(to, "claim"), 0o755); err != nil {
			t.Fatal(err)
		}
		if !fileExists(filepath.Join(from, "claim")) {
			t.Fatal("what is made in the provisioner's folder is not in ours")
		}
	}
	usable()
	if err := os.RemoveAll(from); err != nil { // as a `down` that was interrupted before it unmounted
		t.Fatal(err)
	}
	usable()
	if err := os.RemoveAll(from); err != nil {
		t.Fatal(err)
	}
	if err := dropStaleMount(from, to); err != nil {
		t.Fatal(err)
	}
	if fileExists(to) {
		t.Fatal("the stale mount was left")
	}
}
