package main

import (
	"bytes"
	"context"
	"crypto/sha256"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

//go:embed manifests/cluster.yaml
var clusterManifest []byte

var changes = `The development cluster runs as root on this machine. While it runs, it
  - keeps its data in ` + stateRoot + ` and ` + runRoot + `
  - adds the bridges trpdev0 and trpcni0, nftables tables, and the cgroup torpor-dev; a second
    node (--nodes 2) runs in namespaces of its own, behind the link trpnode1
  - sets net.ipv4.ip_forward=1 (the kubelet sets vm.overcommit_memory and kernel.panic*)
  - mounts a tmpfs at ` + runRoot + ` and /run/torpor, unless /run is one
  - mounts a folder of its own at ` + hostPathProvisionerDir + ` for persistent volumes
` + "`hack/cluster down` puts all of this back."

// up brings the cluster into its running state, with so many nodes, from whatever state it is in.
func up(count int) error {
	if err := needRoot("up"); err != nil {
		return err
	}
	unlock, err := lockCluster()
	if err != nil {
		return err
	}
	defer unlock()
	if count == keepNodes {
		count = len(nodes)
	}
	if err := ensurePackages(runPackages); err != nil {
		return err
	}
	if err := checkMachine(); err != nil {
		return err
	}
	tools, err := builtTools(true)
	if err != nil {
		return err
	}
	if err := settleRemains(); err != nil {
		return err
	}
	var removed []node
	if count < len(nodes) {
		removed = nodes[count:]
	}
	for _, n := range removed {
		if err := n.powerOff(); err != nil {
			return err
		}
	}
	nodes = firstNodes(count)
	if err := bringUp(tools); err != nil {
		return fmt.Errorf("%w\n%s", err, failingComponents())
	}
	for _, n := range removed {
		if err := n.remove(); err != nil {
			return err
		}
	}
	say("the cluster is up: export KUBECONFIG=%s (or hack/cluster kubectl …)", adminKubeconfig())
	return nil
}

func bringUp(tools toolset) error {
	if err := linkTools(tools); err != nil {
		return err
	}
	if err := writeKeys(); err != nil {
		return err
	}
	if err := prepareMachine(); err != nil {
		return err
	}
	if err := writeControlPlane(); err != nil {
		return err
	}
	if err := startGroup(controlPlaneGroup().collectingRarely(machineMemory())); err != nil {
		return err
	}
	images, err := systemImages(tools)
	if err != nil {
		return err
	}
	for _, n := range nodes {
		if err := n.start(); err != nil {
			return err
		}
	}
	if err := inner.waitContainerd(); err != nil {
		return err
	}
	if err := loadOnce("system-images", images); err != nil {
		return err
	}
	say("containerd answers; system images are loaded")
	for _, n := range nodes {
		if err := n.provideImages(); err != nil {
			return err
		}
	}
	if fileExists(storeMark()) {
		if err := startStore(); err != nil {
			return err
		}
	}
	return waitCluster()
}

func (n node) waitContainerd() error {
	return waitFor(n.name()+" containerd", 30*time.Second, func(context.Context) error {
		_, err := output(5*time.Second, binDir("ctr"), "--address", n.containerdSocket(), "version")
		return err
	})
}

// waitReady waits for the node's kubelet, and for a report of it since a time.
func (n node) waitReady(since time.Time) error {
	health := fmt.Sprintf("http://%s:%d/healthz", n.healthAddress(), kubeletHealthPort)
	if err := waitFor(n.name()+" kubelet", time.Minute, healthy(health)); err != nil {
		return err
	}
	if err := waitFor(n.name(), time.Minute, hasConditionSince("/api/v1/nodes/"+n.name(), "Ready", since)); err != nil {
		return err
	}
	say("%s is Ready", n.name())
	return nil
}

func waitCluster() error {
	if err := waitFor("apiserver", time.Minute, exists("/readyz")); err != nil {
		return err
	}
	say("the apiserver is ready")
	hash := fmt.Sprintf("%x", sha256.Sum256(clusterManifest))[:12]
	manifest := bytes.ReplaceAll(clusterManifest, []byte("@HASH@"), []byte(hash))
	_, err := outputIn(time.Minute, "", nil, manifest, binDir("kubectl"), "--kubeconfig", adminKubeconfig(),
		"apply", "--server-side", "--force-conflicts", "--field-manager=torpor-dev", "-f", "-")
	if err != nil {
		return err
	}
	for _, n := range nodes {
		if err := n.waitReady(time.Time{}); err != nil {
			return err
		}
	}
	// Without it no Pod may be created in the namespace.
	if err := waitFor("default ServiceAccount", time.Minute, exists("/api/v1/namespaces/default/serviceaccounts/default")); err != nil {
		return err
	}
	if err := waitFor("CoreDNS", 2*time.Minute, deploymentReady("kube-system", "coredns")); err != nil {
		return err
	}
	if err := waitFor("names of Services", time.Minute, resolvesNames); err != nil {
		return err
	}
	say("CoreDNS answers at %s", dnsServiceIP)
	return nil
}

// resolvesNames asks for a name through the Service of CoreDNS, so that kube-proxy's rules, the
// bridge and CoreDNS itself are known to work. The apiserver's status may be from before a crash.
func resolvesNames(ctx context.Context) error {
	resolver := net.Resolver{PreferGo: true, Dial: func(ctx context.Context, network, _ string) (net.Conn, error) {
		ctx, cancel := context.WithTimeout(ctx, 500*time.Millisecond)
		defer cancel()
		return new(net.Dialer).DialContext(ctx, network, dnsServiceIP+":53")
	}}
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	addresses, err := resolver.LookupHost(ctx, "kubernetes.default.svc."+clusterDomain+".")
	if err == nil && !slices.Contains(addresses, apiServiceIP) {
		return fmt.Errorf("kubernetes.default is %v", addresses)
	}
	return err
}

// settleRemains looks at what an earlier `up` left. Supervisors that run are kept. If they are gone
// (the processes were killed) what else still runs is ended and the state kept, so that the cluster
// goes on where it was. State from before a reboot is dropped: etcd does not wait for the disk
// here.
func settleRemains() error {
	record, err := readMachineRecord()
	if err != nil {
		return err
	}
	if record != nil && record.BootID != bootID() {
		say("the state in %s is from before a reboot; starting afresh", stateRoot)
		record.Sysctls = nil // the reboot has put them back
		if err := errors.Join(killAll(record), restoreMachine(record)); err != nil {
			return err
		}
		record = nil
	}
	if record == nil {
		fmt.Fprintln(os.Stderr, changes)
		if clusterRemains() {
			say("removing what is left of a cluster whose records are gone")
			if err := errors.Join(killAll(nil), restoreMachine(nil)); err != nil {
				return err
			}
		}
		_, err := recordMachine()
		return err
	}
	for _, n := range nodes {
		if !n.onMachine() && !n.holderRuns() {
			if err := n.powerOff(); err != nil {
				return err
			}
		}
	}
	for _, g := range groupNames() {
		if superviserRuns(g) {
			continue
		}
		if err := endOrphans(g); err != nil {
			return err
		}
	}
	return nil
}

// endOrphans ends the programs of a group whose supervisor died without them. Shims and what runs
// in Pods are left: containerd takes them over again.
func endOrphans(groupName string) error {
	content, err := os.ReadFile(runPath(groupName, "components.json"))
	if err != nil {
		return nil // it was never started
	}
	var g group
	if err := json.Unmarshal(content, &g); err != nil {
		return fmt.Errorf("%s: %w", groupName, err)
	}
	say("%s was not stopped in order; its state is kept and its programs are started again", groupName)
	programs := map[string]bool{}
	for _, c := range g.Components {
		programs[strings.Join(c.Args, "\x00")+"\x00"] = true
	}
	return waitFor("end of what is left of "+groupName, 20*time.Second, func(context.Context) error {
		left := 0
		for pid := range cgroupProcesses(g.cgroup()) {
			commandLine, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
			if err == nil && programs[string(commandLine)] && !isZombie(pid) {
				left++
				kill(pid)
			}
		}
		if left > 0 {
			return fmt.Errorf("%d programs still run", left)
		}
		return nil
	})
}

// linkTools puts a link to every built program into the cluster's own bin folder.
func linkTools(tools toolset) error {
	if err := os.MkdirAll(binDir(), 0o755); err != nil {
		return err
	}
	for name, target := range tools {
		link := binDir(name)
		if old, err := os.Readlink(link); err == nil && old == target {
			continue
		}
		temporary := filepath.Join(binDir(), ".new-"+name)
		os.Remove(temporary)
		if err := os.Symlink(target, temporary); err != nil {
			return err
		}
		if err := os.Rename(temporary, link); err != nil {
			return err
		}
	}
	return nil
}

// down ends the cluster and puts the machine back as `up` found it. What was built stays in the
// cache.
func down() error {
	if err := needRoot("down"); err != nil {
		return err
	}
	unlock, err := lockCluster()
	if err != nil {
		return err
	}
	defer unlock()
	record, err := readMachineRecord()
	if err != nil {
		say("%v; going on without it", err)
	}
	if record == nil && !clusterRemains() {
		say("no cluster is there")
		return nil
	}
	// The nodes' programs first, and not in order: with the control plane gone they could only
	// complain.
	if err := killAll(record); err != nil {
		return err
	}
	say("all processes of the cluster have ended")
	if err := restoreMachine(record); err != nil {
		return fmt.Errorf("the machine is not fully as it was; run `hack/cluster down` again after solving this:\n%w", err)
	}
	say("mounts, links, nftables tables, cgroups, settings and folders are as they were")
	return nil
}

func lockCluster() (func(), error) {
	cache, err := cacheRoot()
	if err != nil {
		return nil, err
	}
	unlock, err := lockFile(filepath.Join(cache, "cluster.lock"), "another `hack/cluster up` or `down`")
	if err != nil {
		return nil, err
	}
	nodes = membersOnDisk() // the one before may have changed them
	return unlock, nil
}

func needRoot(command string) error {
	if os.Geteuid() != 0 {
		return fmt.Errorf("`%s` needs root (it makes bridges, mounts and cgroups): run it with sudo -E env \"PATH=$PATH\" or in a virtual machine", command)
	}
	return nil
}
