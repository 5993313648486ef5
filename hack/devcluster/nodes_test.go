package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
)

// onDisk moves the cluster's folders below a temporary one.
func onDisk(t *testing.T) {
	t.Helper()
	oldState, oldRun, oldNodes := stateRoot, runRoot, nodes
	root := t.TempDir()
	stateRoot, runRoot = filepath.Join(root, "state"), filepath.Join(root, "run")
	t.Cleanup(func() { stateRoot, runRoot, nodes = oldState, oldRun, oldNodes })
}

func TestTheMembersAreTheNodesWithAFolder(t *testing.T) {
	onDisk(t)
	if got := membersOnDisk(); !slices.Equal(got, firstNodes(1)) {
		t.Errorf("%v without any folder", got)
	}
	if err := os.MkdirAll(node{1}.state(), 0o755); err != nil {
		t.Fatal(err)
	}
	nodes = membersOnDisk()
	if !slices.Equal(nodes, []node{{0}, {1}}) {
		t.Errorf("%v", nodes)
	}
	if n, err := nodeNamed("node-1"); err != nil || n.index != 1 {
		t.Errorf("%v %v", n, err)
	}
	if _, err := nodeNamed("node-2"); err == nil {
		t.Error("node-2 is found")
	}
}

func TestTheProgramsOfAllNodesHaveTheSamePaths(t *testing.T) {
	a, b := node{0}.group(), node{1}.group()
	if !slices.Equal(a.Components[0].Args, b.Components[0].Args) {
		t.Errorf("containerd: %q and %q", a.Components[0].Args, b.Components[0].Args)
	}
	kubelet := strings.Join(b.Components[1].Args, " ")
	for _, want := range []string{"--root-dir=" + node{0}.state("kubelet"), "--hostname-override=node-1", "--node-ip=10.245.0.2"} {
		if !strings.Contains(kubelet, want) {
			t.Errorf("%s is not in %s", want, kubelet)
		}
	}
	if a.cgroup() == b.cgroup() || !below(b.cgroup(), node{1}.cgroup()) {
		t.Errorf("cgroups %s and %s", a.cgroup(), b.cgroup())
	}
	for _, text := range []string{node{1}.kubeletYAML(), node{1}.proxyYAML(), node{1}.cniConfig(true)} {
		if strings.Contains(text, node{1}.state()) || strings.Contains(text, node{1}.run()) {
			t.Errorf("a path of the machine: %s", text)
		}
	}
	if !strings.Contains(node{0}.kubeletYAML(), "healthzBindAddress: 127.0.0.1\n") || !strings.Contains(node{1}.kubeletYAML(), "healthzBindAddress: 10.245.0.2\n") {
		t.Error("addresses of the health checks")
	}
}

func TestAComponentWaitsForAFile(t *testing.T) {
	mark := filepath.Join(t.TempDir(), "mark")
	if accepts("file:" + mark) {
		t.Error("it is not there")
	}
	if err := os.WriteFile(mark, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	if !accepts("file:" + mark) {
		t.Error("it is there")
	}
}

func TestANodesRoutesAreOfIPv6OnlyWherePodsHaveIt(t *testing.T) {
	n := node{1}
	for _, ipv6 := range []bool{false, true} {
		onMachine, onNode := n.connections(ipv6)
		said := fmt.Sprint(onMachine, onNode, n.routes(ipv6))
		for _, want := range []string{"10.245.0.2/24 dev eth0", "default via 10.245.0.1", "10.246.4.0/22 via 10.245.0.2 dev trpdev0"} {
			if !strings.Contains(said, want) {
				t.Errorf("%q is not in %s", want, said)
			}
		}
		for _, want := range []string{"default via fe80::1 dev eth0", "fd74:6f72:706f:1::/64 via fe80::2 dev trpdev0"} {
			if strings.Contains(said, want) != ipv6 {
				t.Errorf("IPv6 %v: %s", ipv6, said)
			}
		}
	}
}

func TestImagesThatAreMissingOrOlderAreCopied(t *testing.T) {
	const head = "REF TYPE DIGEST SIZE PLATFORMS LABELS\n"
	line := func(name, digest string) string {
		return name + " application/vnd.oci.image.manifest.v1+json sha256:" + digest + " 1.0 MiB linux/amd64 io.cri-containerd.image=managed\n"
	}
	have := head + line("torpor.dev/a:dev", "a2") + line("torpor.dev/b:dev", "b") + line("torpor.dev/c:dev", "c") +
		line("sha256:a2", "a2") + line("import-2026-01-01@sha256:a2", "a2")
	lacking := head + line("torpor.dev/a:dev", "a1") + line("torpor.dev/b:dev", "b") + line("torpor.dev/d:dev", "d")
	if got := imageCopies(have, lacking); !slices.Equal(got, []string{"torpor.dev/a:dev", "torpor.dev/c:dev"}) {
		t.Errorf("%q", got)
	}
	if got := imageCopies(have, have); len(got) != 0 {
		t.Errorf("%q of the same", got)
	}
}

func TestAnUninstallationHasAJobForEachNode(t *testing.T) {
	onDisk(t)
	const text = "apiVersion: batch/v1\nkind: Job\nmetadata:\n  labels:\n    app.kubernetes.io/name: torpor-uninstall\n  name: torpor-uninstall\n" +
		"  namespace: there\nspec:\n  template:\n    metadata:\n      labels:\n        x: y\n    spec:\n      containers:\n      - name: uninstall"
	jobs, err := parseManifests("test", text)
	if err != nil {
		t.Fatal(err)
	}
	nodes = firstNodes(1)
	if got := perNode(jobs); len(got) != 1 || got[0] != jobs[0] {
		t.Errorf("on one node: %v", got)
	}
	nodes = firstNodes(2)
	got := perNode(jobs)
	if len(got) != 2 {
		t.Fatalf("%d Jobs", len(got))
	}
	for i, job := range got {
		again, err := parseManifests("test", job.text)
		if err != nil || again[0].name != fmt.Sprintf("torpor-uninstall-node-%d", i) || again[0] != job {
			t.Errorf("%v %v", again, err)
		}
		if !strings.Contains(job.text, fmt.Sprintf("\n    spec:\n      nodeName: node-%d\n      containers:", i)) {
			t.Errorf("%s", job.text)
		}
	}
}

func TestOnlyTheOutermostMountsBelowAFolderAreFound(t *testing.T) {
	points := []string{"/", "/sys", "/sys/fs/cgroup", "/sys/fs/cgroup/cpu", "/sys/kernel/debug", "/system"}
	if got := outermostBelow(points, "/sys"); !slices.Equal(got, []string{"/sys/fs/cgroup", "/sys/kernel/debug"}) {
		t.Errorf("%q", got)
	}
}

// holderProbe is set for the process of the test below that makes the mounts.
const holderProbe = "TORPOR_TEST_HOLDER"

func TestANodeHasFoldersOfItsOwnAndThoseOfTheClusterAreShared(t *testing.T) {
	if folder := os.Getenv(holderProbe); folder != "" {
		probeHolder(t, folder)
		return
	}
	if os.Getuid() != 0 {
		t.Skip("mounting needs root")
	}
	// Below folders that a node has of its own, as the cluster's are.
	folder, err := os.MkdirTemp("/var/lib", "torpor-test-holder-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(folder) })
	cmd := exec.Command("/proc/self/exe", "-test.run=^"+t.Name()+"$", "-test.v")
	cmd.Env = append(os.Environ(), holderProbe+"="+folder)
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNS | syscall.CLONE_NEWNET}
	if said, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, said)
	}
	for _, path := range []string{"state/node-1/from-inside", "run/node-1/from-inside", "state/node-1/disk/opt/own"} {
		if !fileExists(filepath.Join(folder, path)) {
			t.Errorf("%s is not on the machine", path)
		}
	}
	if fileExists("/opt/own") || fileExists("/run/own") {
		t.Error("what the node made is on the machine")
	}
}

// probeHolder runs in namespaces of its own.
func probeHolder(t *testing.T, folder string) {
	stateRoot, runRoot = filepath.Join(folder, "state"), filepath.Join(folder, "run")
	n := node{1}
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	for _, dir := range []string{n.state(), n.run(), inner.state(), inner.run(), n.disk("/opt"), n.disk("/var/lib"), n.disk("/var/log")} {
		must(os.MkdirAll(dir, 0o755))
	}
	must(n.makeMounts(statePath("no-cache")))
	for _, path := range []string{inner.state("from-inside"), inner.run("from-inside"), "/opt/own", "/run/own"} {
		must(os.WriteFile(path, nil, 0o644))
	}
	for _, path := range []string{n.state("from-inside"), n.run("from-inside")} {
		if !fileExists(path) {
			t.Errorf("%s is not there", path)
		}
	}
	links, err := os.ReadDir("/sys/class/net")
	must(err)
	for _, link := range links {
		if link.Name() == "eth0" {
			t.Error("/sys shows the machine's links")
		}
	}
	if _, err := hierarchies(); err != nil {
		t.Error(err)
	}
	points, err := mountPoints()
	must(err)
	for _, wanted := range []string{"/opt", "/var/lib", "/var/log", "/run", "/sys", "/sys/fs/cgroup", inner.state(), inner.run()} {
		if !slices.Contains(points, wanted) {
			t.Errorf("nothing is mounted at %s", wanted)
		}
	}
}
