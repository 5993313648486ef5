package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"
)

// machineRecord is what `up` found before it changed anything; `down` puts it back.
type machineRecord struct {
	BootID string `json:"bootID"`
	// Sysctls holds the values of before, by name with slashes.
	Sysctls map[string]string `json:"sysctls"`
	// Absent are the paths that did not exist and that the cluster, or Torpor in it, makes.
	Absent []string `json:"absent"`
	// Tables are the nftables tables that existed, as "family name".
	Tables []string `json:"tables"`
}

func machineRecordPath() string { return statePath("machine.json") }

// settingPath is the file of a kernel setting: a sysctl by its name with slashes, or any other by
// its path.
func settingPath(name string) string {
	if strings.HasPrefix(name, "/") {
		return name
	}
	return "/proc/sys/" + name
}

// changedSysctls are those that we, the kubelet and the CNI plugins set. An empty value is not set
// by us.
var changedSysctls = map[string]string{
	"net/ipv4/ip_forward":                "1",
	"net/bridge/bridge-nf-call-iptables": "1",
	// The kubelet sets these by itself.
	"vm/overcommit_memory": "", "vm/panic_on_oom": "", "kernel/panic": "", "kernel/panic_on_oops": "",
	"kernel/keys/root_maxkeys": "", "kernel/keys/root_maxbytes": "",
	// The bridge plugin sets it where Pods have IPv6 addresses.
	"net/ipv6/conf/all/forwarding": "",
	// kube-proxy touches this one even when it is told to leave conntrack alone.
	"net/netfilter/nf_conntrack_tcp_be_liberal": "",
	// Each wake sets these for its moment; a wake that is killed leaves them to the next.
	"/sys/kernel/rcu_expedited": "", "/sys/kernel/mm/transparent_hugepage/hugepages-64kB/shmem_enabled": "",
	// The kernel raises it when the last of these is written.
	"vm/min_free_kbytes": "",
}

// foreignPaths lie outside our folders because the programs have them built in, or because they
// belong to Torpor itself. What did not exist before `up` is removed by `down`.
var foreignPaths = []string{
	"/run/containerd", "/run/mount", "/var/lib/cni", "/var/lib/kubelet", "/var/log/containers",
	"/run/torpor", "/var/lib/torpor", "/opt/torpor", hostPathProvisionerDir,
}

// ownTable is the one that only this cluster makes.
const ownTable = "inet torpor-dev"

// clusterTables are the nftables tables that exist while the cluster runs.
var clusterTables = []string{ownTable, "ip kube-proxy", "ip6 kube-proxy", "inet cni_hostport", "ip cni_hostport", "ip6 cni_hostport"}

// readMachineRecord returns nil when there is none: no cluster was started.
func readMachineRecord() (*machineRecord, error) {
	content, err := os.ReadFile(machineRecordPath())
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var r machineRecord
	if err := json.Unmarshal(content, &r); err != nil {
		return nil, fmt.Errorf("%s: %w; `hack/cluster down` removes what it can without it", machineRecordPath(), err)
	}
	return &r, nil
}

// chosen is the value of a kernel setting: of several that its file names, the one in brackets.
func chosen(said string) string {
	if _, rest, found := strings.Cut(said, "["); found {
		said, _, _ = strings.Cut(rest, "]")
	}
	return strings.TrimSpace(said)
}

// recordMachine notes how the machine is before the first change.
func recordMachine() (*machineRecord, error) {
	if err := dropStaleMount(statePath("volumes"), hostPathProvisionerDir); err != nil {
		return nil, err
	}
	r := &machineRecord{BootID: bootID(), Sysctls: map[string]string{}}
	for name := range changedSysctls {
		if value, err := os.ReadFile(settingPath(name)); err == nil {
			r.Sysctls[name] = chosen(string(value))
		}
	}
	for _, path := range foreignPaths {
		if !fileExists(path) {
			r.Absent = append(r.Absent, path)
		}
	}
	tables, err := nftTables()
	if err != nil {
		return nil, err
	}
	r.Tables = tables
	if err := refuseOtherProxy(tables); err != nil {
		return nil, err
	}
	content, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return nil, err
	}
	return r, writeFile(machineRecordPath(), content, 0o600)
}

func bootID() string {
	content, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(content))
}

func nftTables() ([]string, error) {
	out, err := output(10*time.Second, "nft", "list", "tables")
	if err != nil {
		return nil, err
	}
	var tables []string
	for line := range strings.Lines(out) {
		tables = append(tables, strings.TrimPrefix(strings.TrimSpace(line), "table "))
	}
	return tables, nil
}

// prepareMachine makes the network, cgroups and mounts that the cluster runs on. It may be
// repeated.
func prepareMachine() error {
	for name, value := range changedSysctls {
		if value == "" || !fileExists(settingPath(name)) {
			continue
		}
		if err := os.WriteFile(settingPath(name), []byte(value), 0); err != nil {
			return fmt.Errorf("sysctl %s: %w", strings.ReplaceAll(name, "/", "."), err)
		}
	}
	if err := ensureVolatile(); err != nil {
		return err
	}
	if err := ensureMachineBridge(); err != nil {
		return err
	}
	if _, err := outputIn(10*time.Second, "", nil, []byte(firewall), "nft", "-f", "-"); err != nil {
		return err
	}
	if err := ensureCgroup(filepath.Join(cgroupName, "system")); err != nil {
		return err
	}
	return ensureBindMount(statePath("volumes"), hostPathProvisionerDir)
}

// firewall refuses what Pods send beyond the cluster, so that a test that would need the outside
// fails at once and the same way everywhere.
const firewall = "table " + ownTable + "\ndelete table " + ownTable + "\ntable " + ownTable + ` {
  chain forward {
    type filter hook forward priority filter; policy accept;
    ct state established,related accept
    ip saddr ` + podNetwork + ` ip daddr != { ` + podNetwork + `, ` + serviceNetwork + `, ` + machineNetwork + ` } reject
    ip6 saddr ` + podNetwork6 + ` ip6 daddr != ` + podNetwork6 + ` reject
  }
}
`

// ensureVolatile keeps what lies below /run in memory, as on any machine that systemd booted. Where
// /run is on a disk, what is only to last until the next boot would wait for it, and the programs
// would be measured with that.
func ensureVolatile() error {
	record, err := readMachineRecord()
	if err != nil {
		return err
	}
	for _, path := range []string{runRoot, "/run/torpor"} {
		if path != runRoot && (record == nil || !slices.Contains(record.Absent, path)) {
			continue // another's, which `down` leaves
		}
		if err := ensureTmpfs(path); err != nil {
			return err
		}
	}
	return nil
}

// ensureTmpfs mounts one with the flags of Debian's /run, unless the path is in one already or is
// in use: what a cluster from before has in it would be hidden.
func ensureTmpfs(path string) error {
	if err := os.MkdirAll(path, 0o755); err != nil {
		return err
	}
	var at syscall.Statfs_t
	if err := syscall.Statfs(path, &at); err != nil {
		return &os.PathError{Op: "statfs", Path: path, Err: err}
	}
	const tmpfsMagic = 0x01021994 // statfs(2)
	entries, err := os.ReadDir(path)
	if err != nil || at.Type == tmpfsMagic || len(entries) > 0 {
		return err
	}
	_, err = output(10*time.Second, "mount", "-t", "tmpfs", "-o", "mode=0755,size=10%,nosuid,nodev,noexec", "tmpfs", path)
	return err
}

func ensureMachineBridge() error {
	if !fileExists("/sys/class/net/" + machineBridge) {
		if _, err := output(10*time.Second, "ip", "link", "add", machineBridge, "type", "bridge"); err != nil {
			return err
		}
	}
	if _, err := output(10*time.Second, "ip", "address", "replace", machineAddress+"/24", "dev", machineBridge); err != nil {
		return err
	}
	// Without one of its own it would take that of a node, and change it with the nodes.
	if _, err := output(10*time.Second, "ip", "link", "set", machineBridge, "address", inner.hardwareAddress(), "up"); err != nil {
		return err
	}
	return ensureServiceRoute()
}

// ensureServiceRoute adds a route to the addresses of Services on a machine without a default
// route. Without it the kernel refuses a connection before kube-proxy's rules translate the
// address. The route disappears with the bridge.
func ensureServiceRoute() error {
	routes, err := os.ReadFile("/proc/net/route")
	if err != nil || hasDefaultRoute(string(routes)) {
		return err
	}
	_, err = output(10*time.Second, "ip", "route", "replace", serviceNetwork, "dev", machineBridge)
	return err
}

// hasDefaultRoute reads /proc/net/route: link, destination, gateway, flags, references, uses,
// metric, mask. Of a default route destination and mask are zeros.
func hasDefaultRoute(routes string) bool {
	for line := range strings.Lines(routes) {
		fields := strings.Fields(line)
		if len(fields) >= 8 && fields[1] == "00000000" && fields[7] == "00000000" {
			return true
		}
	}
	return false
}

func ensureBindMount(from, to string) error {
	for _, dir := range []string{from, to} {
		if err := os.MkdirAll(dir, 0o777); err != nil {
			return err
		}
	}
	if sameFile(from, to) {
		return nil
	}
	// A removed folder of an earlier cluster is mounted there, in which no file can be created.
	if err := unmountBelow(to); err != nil {
		return err
	}
	_, err := output(10*time.Second, "mount", "--bind", from, to)
	return err
}

// dropStaleMount removes what an interrupted `down` left at to: our mount of from, and the empty
// folder under it.
func dropStaleMount(from, to string) error {
	content, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return err
	}
	for line := range strings.Lines(string(content)) {
		// The root field is relative to its file system; the kernel adds //deleted when the folder
		// is gone.
		fields := strings.Fields(line)
		if len(fields) < 5 || fields[4] != to || !strings.HasSuffix(from, strings.TrimSuffix(fields[3], "//deleted")) {
			continue
		}
		if err := unmountBelow(to); err != nil {
			return err
		}
		if err := os.Remove(to); err != nil && !errors.Is(err, syscall.ENOTEMPTY) {
			return err
		}
		return nil
	}
	return nil
}

func sameFile(a, b string) bool {
	left, err := os.Stat(a)
	if err != nil {
		return false
	}
	right, err := os.Stat(b)
	return err == nil && os.SameFile(left, right)
}

// hostPackage is something the machine must have, and the Debian package that brings it.
type hostPackage struct {
	name    string
	present func() bool
}

func program(name string) func() bool {
	return func() bool { _, err := exec.LookPath(name); return err == nil }
}

var runPackages = []hostPackage{
	{"nftables", program("nft")}, {"iproute2", program("ip")}, {"mount", program("mount")}, {"util-linux", program("nsenter")},
}

var buildPackages = []hostPackage{
	{"gcc", program("cc")},
	{"libc6-dev", func() bool { return fileExists("/usr/include/stdio.h") }},
	{"pkg-config", program("pkg-config")},
	{"libseccomp-dev", func() bool {
		_, err := output(10*time.Second, "pkg-config", "--exists", "libseccomp")
		return err == nil
	}},
	{"ca-certificates", func() bool {
		return fileExists("/etc/ssl/certs/ca-certificates.crt") || fileExists("/etc/pki/tls/certs/ca-bundle.crt")
	}},
}

// ensurePackages installs what is missing of the list, in one go.
func ensurePackages(list []hostPackage) error {
	var missing []string
	for _, p := range list {
		if !p.present() {
			missing = append(missing, p.name)
		}
	}
	if len(missing) == 0 {
		return nil
	}
	if _, err := exec.LookPath("apt-get"); err != nil {
		return fmt.Errorf("missing on this machine: %s (names of Debian packages), and there is no apt-get to install them with; install them by hand", strings.Join(missing, ", "))
	}
	say("install Debian packages that are missing: %s", strings.Join(missing, " "))
	return during("apt-get", func() error {
		if err := aptUpdate(); err != nil {
			return err
		}
		// A machine that has just booted may be installing updates: they hold the lock.
		args := append([]string{"-o", "DPkg::Lock::Timeout=300", "install", "-y", "--no-install-recommends"}, missing...)
		_, err := outputIn(15*time.Minute, "", []string{"DEBIAN_FRONTEND=noninteractive"}, nil, "apt-get", args...)
		return err
	})
}

var aptUpdated bool

// aptUpdate fetches the package lists, once per run.
func aptUpdate() error {
	if aptUpdated {
		return nil
	}
	if _, err := output(5*time.Minute, "apt-get", "update"); err != nil {
		return err
	}
	aptUpdated = true
	return nil
}
