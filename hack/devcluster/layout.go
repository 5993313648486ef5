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
	machineNetwork = "10.245.0.0/24" // node-N (N > 0) would be 10.245.0.(N+1), in a network namespace of its own
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

// node is one member of the cluster. The index decides its paths, ports and addresses, so that a
// second one needs no other code here than a network namespace to run in.
type node struct{ index int }

func (n node) name() string { return fmt.Sprintf("node-%d", n.index) }
func (n node) state(p ...string) string {
	return filepath.Join(append([]string{stateRoot, n.name()}, p...)...)
}
func (n node) run(p ...string) string {
	return filepath.Join(append([]string{runRoot, n.name()}, p...)...)
}
func (n node) address() string          { return fmt.Sprintf("10.245.0.%d", n.index+1) }
func (n node) podCIDR() string          { return fmt.Sprintf("10.246.%d.0/22", n.index*4) } // 1021 Pods
func (n node) podCIDR6() string         { return fmt.Sprintf("fd74:6f72:706f:%x::/64", n.index) }
func (n node) podBridge() string        { return fmt.Sprintf("trpcni%d", n.index) }
func (n node) cgroup() string           { return filepath.Join(cgroupName, n.name()) }
func (n node) containerdSocket() string { return n.run("containerd.sock") }
func (n node) containerdConfig() string { return n.state("containerd", "config.toml") }
func (n node) kubeletPort() int         { return 11250 + 20*n.index }
func (n node) kubeletHealthPort() int   { return 11251 + 20*n.index }
func (n node) proxyHealthPort() int     { return 11252 + 20*n.index }
func (n node) proxyMetricsPort() int    { return 11253 + 20*n.index }

// nodes are the members `up` starts.
var nodes = []node{{0}}

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
