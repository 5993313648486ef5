package main

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// checkMachine refuses at once, before anything is built, a machine on which the cluster could not
// run; it changes nothing. Where a cluster is, or what one has left, its own rules and addresses
// would be found.
func checkMachine() error {
	if err := needRoot("check"); err != nil {
		return err
	}
	if fileExists(machineRecordPath()) || clusterRemains() {
		return nil
	}
	for _, check := range []func() error{checkCapabilities, checkCgroups, checkAddresses, checkPorts, checkPacketFilter} {
		if err := check(); err != nil {
			return err
		}
	}
	return nil
}

// Numbers of capabilities, from linux/capability.h.
const (
	capNetAdmin    = 12
	capSysAdmin    = 21
	capSysResource = 24
)

// hasCapability tells whether this process has the capability.
func hasCapability(number uint) bool {
	status, err := os.ReadFile("/proc/self/status")
	return err == nil && capabilityIn(string(status), number)
}

func capabilityIn(status string, number uint) bool {
	for line := range strings.Lines(status) {
		if value, found := strings.CutPrefix(line, "CapEff:"); found {
			bits, err := strconv.ParseUint(strings.TrimSpace(value), 16, 64)
			return err == nil && bits&(1<<number) != 0
		}
	}
	return false
}

func checkCapabilities() error {
	for number, name := range map[uint]string{capNetAdmin: "CAP_NET_ADMIN", capSysAdmin: "CAP_SYS_ADMIN"} {
		if !hasCapability(number) {
			return fmt.Errorf("root lacks %s here, without which there are no mounts, bridges and cgroups: it is root of a container; start that with --privileged, or use a virtual machine", name)
		}
	}
	return nil
}

// neededControllers are the controllers of cgroups without which the kubelet does not run.
var neededControllers = []string{"cpu", "memory", "pids"}

func checkCgroups() error {
	controllers, _ := os.ReadFile(filepath.Join(cgroupMount, "cgroup.controllers"))
	for _, needed := range neededControllers {
		// A hierarchy of its own, or a link to a joint one, on cgroup v1.
		if !slices.Contains(strings.Fields(string(controllers)), needed) && !fileExists(filepath.Join(cgroupMount, needed)) {
			return fmt.Errorf("cgroups below %s lack the controller %q: mount them, or start the kernel with it (memory: cgroup_enable=memory)", cgroupMount, needed)
		}
	}
	return nil
}

func checkAddresses() error {
	links, err := net.Interfaces()
	if err != nil {
		return err
	}
	for _, link := range links {
		addresses, err := link.Addrs()
		if err != nil {
			continue // it went
		}
		for _, address := range addresses {
			prefix, err := netip.ParsePrefix(address.String())
			if err != nil {
				continue
			}
			if network := networkOf(prefix.Addr()); network != "" {
				return fmt.Errorf("this machine has the address %s (link %s), and the cluster would take %s for itself: use a machine whose networks are others (hack/devcluster/layout.go names the cluster's)", prefix, link.Name, network)
			}
		}
	}
	return nil
}

// networkOf is the one of the cluster's networks that the address lies in; empty if it lies in
// none.
func networkOf(address netip.Addr) string {
	for _, network := range []string{machineNetwork, podNetwork, podNetwork6, serviceNetwork} {
		if netip.MustParsePrefix(network).Contains(address) {
			return network
		}
	}
	return ""
}

// checkPorts names a port that another program has. The addresses of the bridge do not exist yet. A
// program that blocks them listens on all addresses, and so on an unused one of the loopback, too.
func checkPorts() error {
	const local, everywhere = "127.0.0.1", "127.0.0.254"
	addresses := []string{}
	add := func(host string, ports ...int) {
		for _, port := range ports {
			addresses = append(addresses, net.JoinHostPort(host, strconv.Itoa(port)))
		}
	}
	add(local, etcdPort, etcdPeerPort, controllerManagerPort, schedulerPort)
	add(everywhere, apiserverPort)
	// The ports of other nodes are in networks of their own.
	add(local, kubeletHealthPort, proxyHealthPort, proxyMetricsPort)
	add(everywhere, kubeletPort)
	return refuseTaken(addresses)
}

func refuseTaken(addresses []string) error {
	for _, address := range addresses {
		listener, err := net.Listen("tcp", address)
		if err == nil {
			listener.Close()
		}
		if errors.Is(err, syscall.EADDRINUSE) {
			_, port, _ := strings.Cut(address, ":")
			return fmt.Errorf("another program has port %s, which the cluster needs: `ss -ltnp sport = :%s` names it; end it, or use another machine", port, port)
		}
	}
	return nil
}

func checkPacketFilter() error {
	if _, err := exec.LookPath("nft"); err != nil {
		return nil // `up` installs it; without it there are hardly rules
	}
	tables, err := nftTables()
	if err != nil {
		return err
	}
	if err := refuseOtherProxy(tables); err != nil {
		return err
	}
	ruleset, err := output(10*time.Second, "nft", "--stateless", "list", "ruleset")
	if err != nil {
		return err
	}
	if hasOtherServices(ruleset) {
		return fmt.Errorf("this machine has the rules of another Kubernetes for Services in %s (KUBE-SERVICES of iptables), which are this cluster's addresses too: use that cluster (KUBECONFIG) or another machine", serviceNetwork)
	}
	for _, chain := range forwardDroppers(ruleset) {
		say("the packet filter of this machine drops what passes through it (%s; Docker sets that up): Pods may not reach one another; `nft insert rule %s iifname %s accept` lets them", chain, chain, nodes[0].podBridge())
	}
	return nil
}

// refuseOtherProxy refuses the rules of a kube-proxy that uses nftables, as ours.
func refuseOtherProxy(tables []string) error {
	for _, t := range tables {
		if t == "ip kube-proxy" || t == "ip6 kube-proxy" {
			return fmt.Errorf("this machine has the nftables table %q of another kube-proxy: it is a Kubernetes node already, and two would undo each other's rules; use that cluster (KUBECONFIG) or another machine", t)
		}
	}
	return nil
}

var serviceAddress = regexp.MustCompile(`daddr 10\.96\.\d+\.\d+`)

// hasOtherServices tells whether a kube-proxy that uses iptables serves addresses that are ours
// too. One with other addresses does no harm.
func hasOtherServices(ruleset string) bool {
	return strings.Contains(ruleset, "chain KUBE-SERVICES ") && serviceAddress.MatchString(ruleset)
}

// forwardDroppers are the chains (as "family table chain") that drop what the machine forwards,
// unless a rule says otherwise, and have none for the Pods' bridge.
func forwardDroppers(ruleset string) []string {
	var found []string
	var table, chain string
	var drops, lets bool
	for line := range strings.Lines(ruleset) {
		words := strings.Fields(line)
		switch {
		case len(words) > 2 && words[0] == "table":
			table = words[1] + " " + words[2]
		case len(words) > 1 && words[0] == "chain":
			chain, drops, lets = words[1], false, false
		case len(words) == 1 && words[0] == "}":
			if chain != "" && drops && !lets {
				found = append(found, table+" "+chain)
			}
			chain = ""
		default:
			drops = drops || strings.Contains(line, " hook forward ") && strings.Contains(line, "policy drop;")
			lets = lets || strings.Contains(line, nodes[0].podBridge())
		}
	}
	return found
}
