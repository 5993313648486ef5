package main

import (
	"fmt"
	"os"
	"path/filepath"
)

// The cluster owns everything below these two folders and removes both on `down`. They, the ports
// and the cgroup are those of the development cluster unless useBenchLayout has
// changed them.
var (
	stateRoot = "/var/lib/torpor-dev" // survives the processes: etcd data, images, logs, keys
	runRoot   = "/run/torpor-dev"     // sockets and pidfiles; short, because a socket path holds 107 bytes
)

// Addresses, chosen so that a real cluster on the same machine keeps its own.
const (
	machineBridge  = "trpdev0"       // the network the nodes of the cluster share
	machineNetwork = "10.245.0.0/24" // node-N is 10.245.0.(N+1)
	podNetwork     = "10.246.0.0/16"
	podNetwork6    = "fd74:6f72:706f::/48"
	serviceNetwork = "10.96.0.0/16"
	apiServiceIP   = "10.96.0.1"
	dnsServiceIP   = "10.96.0.10"
	clusterDomain  = "cluster.local"
)

// Addresses and ports of the control plane.
var (
	machineAddress        = "10.245.0.1" // the apiserver's, and that of node-0
	apiserverPort         = 16443
	etcdPort              = 12379
	etcdPeerPort          = 12380
	controllerManagerPort = 11257
	schedulerPort         = 11259
)

// cgroupName is the group, in every hierarchy that is mounted, below which all processes of the
// cluster live.
var cgroupName = "torpor-dev"

// environMark is set for every process of the cluster and inherited, so that orphans can be
// recognised.
func environMark() string { return "TORPOR_DEV_CLUSTER=" + runRoot }

// hostPathProvisionerDir is wired into the controller-manager's provisioner; we mount a folder of
// ours there.
const hostPathProvisionerDir = "/tmp/hostpath_pv"

// node is one member of the cluster. The index decides its paths and addresses. node-0 runs on the
// machine itself; every other node runs in namespaces of its own (holder.go).
type node struct{ index int }

// inner is the node whose paths the programs of every node use: a holder mounts its node's folders
// there. The containerd of each node, and Torpor on it, so have the same configuration.
var inner = node{0}

// maxNodes is more than a machine of two processors carries well.
const maxNodes = 4

// Ports of a node's programs. Every node has a network of its own.
const (
	kubeletPort       = 11250
	kubeletHealthPort = 11251
	proxyHealthPort   = 11252
	proxyMetricsPort  = 11253
)

func (n node) name() string { return fmt.Sprintf("node-%d", n.index) }
func (n node) state(p ...string) string {
	return filepath.Join(append([]string{stateRoot, n.name()}, p...)...)
}
func (n node) run(p ...string) string {
	return filepath.Join(append([]string{runRoot, n.name()}, p...)...)
}
func (n node) address() string          { return fmt.Sprintf("10.245.0.%d", n.index+1) }
func (n node) hardwareAddress() string  { return fmt.Sprintf("0a:58:0a:f5:00:%02x", n.index+1) }
func (n node) podCIDR() string          { return fmt.Sprintf("10.246.%d.0/22", n.index*4) } // 1021 Pods
func (n node) podCIDR6() string         { return fmt.Sprintf("fd74:6f72:706f:%x::/64", n.index) }
func (n node) podBridge() string        { return fmt.Sprintf("trpcni%d", n.index) }
func (n node) cgroup() string           { return filepath.Join(cgroupName, n.name()) } // of its Pods
func (n node) ownCgroup() string        { return filepath.Join(n.cgroup(), "system") } // of a node with a holder
func (n node) uplink() string           { return fmt.Sprintf("trpnode%d", n.index) }   // its port in the machine's bridge
func (n node) imagesMark() string       { return n.run("images-loaded") }
func (n node) containerdSocket() string { return n.run("containerd.sock") }
func (n node) containerdConfig() string { return n.state("containerd", "config.toml") }

// onMachine tells whether the node has the machine's own namespaces.
func (n node) onMachine() bool { return n.index == 0 }

// healthAddress is where the machine reaches the health checks of the node's programs.
func (n node) healthAddress() string {
	if n.onMachine() {
		return "127.0.0.1"
	}
	return n.address()
}

// nodes are the members of the cluster.
var nodes = firstNodes(1)

func firstNodes(count int) []node {
	all := make([]node, count)
	for i := range all {
		all[i] = node{i}
	}
	return all
}

// membersOnDisk are the nodes with a folder on the disk; node-0 always is one.
func membersOnDisk() []node {
	count := 1
	for i := 1; i < maxNodes; i++ {
		if fileExists(node{i}.state()) {
			count = i + 1
		}
	}
	return firstNodes(count)
}

// nodeNamed is a member of the cluster.
func nodeNamed(name string) (node, error) {
	for _, n := range nodes {
		if n.name() == name {
			return n, nil
		}
	}
	return node{}, fmt.Errorf("there is no %s; `hack/cluster up --nodes 2` adds node-1", name)
}

const controlPlane = "control-plane"

func statePath(p ...string) string { return filepath.Join(append([]string{stateRoot}, p...)...) }
func runPath(p ...string) string   { return filepath.Join(append([]string{runRoot}, p...)...) }

// binDir holds links to the cached binaries this cluster runs.
func binDir(p ...string) string { return statePath(append([]string{"bin"}, p...)...) }

func adminKubeconfig() string { return statePath("admin.kubeconfig") }

func apiserverURL() string { return fmt.Sprintf("https://%s:%d", machineAddress, apiserverPort) }

// cacheRoot is where built binaries and images are kept between clusters: $XDG_CACHE_HOME/torpor.
func cacheRoot() (string, error) {
	base := os.Getenv("XDG_CACHE_HOME")
	if base == "" {
		home, err := os.UserHomeDir()
		if err != nil {
			return "", fmt.Errorf("no cache folder: set XDG_CACHE_HOME or HOME: %w", err)
		}
		base = filepath.Join(home, ".cache")
	}
	return filepath.Join(base, "torpor"), nil
}
