package main

import (
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
)

func TestCapabilitiesAreReadFromTheEffectiveOnes(t *testing.T) {
	const container = "Name:\tdev\nCapPrm:\t000001ffffffffff\nCapEff:\t00000000a80425fb\nCapBnd:\t000001ffffffffff\n"
	full := strings.ReplaceAll(container, "00000000a80425fb", "000001ffffffffff")
	for _, number := range []uint{capNetAdmin, capSysAdmin, capSysResource} {
		if capabilityIn(container, number) || !capabilityIn(full, number) || capabilityIn("", number) {
			t.Errorf("capability %d", number)
		}
	}
}

func TestAnAddressOfTheMachineInANetworkOfTheClusterIsSeen(t *testing.T) {
	for address, network := range map[string]string{
		"10.245.0.17": machineNetwork, "10.245.1.17": "", "10.246.3.4": podNetwork, "10.96.0.1": serviceNetwork, "10.97.0.1": "",
		"fd74:6f72:706f::1": podNetwork6, "fd74:6f72:7070::1": "", "192.168.1.2": "", "::1": "",
	} {
		if got := networkOf(netip.MustParseAddr(address)); got != network {
			t.Errorf("%s is in %q", address, got)
		}
	}
}

func TestAPortThatAnotherProgramHasIsNamed(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	address := listener.Addr().String()
	err = refuseTaken([]string{address})
	if err == nil || !strings.Contains(err.Error(), "port "+strings.TrimPrefix(address, "127.0.0.1:")) {
		t.Errorf("it says: %v", err)
	}
	listener.Close()
	if err := refuseTaken([]string{address}); err != nil {
		t.Errorf("nobody has it: %v", err)
	}
}

func TestAnotherKubernetesIsRefusedWhereItIsInTheWay(t *testing.T) {
	if refuseOtherProxy([]string{"ip filter", "inet torpor-dev"}) != nil || refuseOtherProxy([]string{"ip filter", "ip6 kube-proxy"}) == nil {
		t.Error("tables")
	}
	const iptables = "table ip nat {\n\tchain KUBE-SERVICES {\n\t\tmeta l4proto tcp ip daddr ADDRESS tcp dport 443 counter jump KUBE-SVC-X\n\t}\n}\n"
	for address, refused := range map[string]bool{"10.96.0.1": true, "10.43.0.1": false, "110.96.0.1": false} {
		if hasOtherServices(strings.ReplaceAll(iptables, "ADDRESS", address)) != refused {
			t.Errorf("%s: %v", address, !refused)
		}
	}
	if hasOtherServices("table ip nat {\n\tchain PREROUTING {\n\t\tip daddr 10.96.0.1 accept\n\t}\n}\n") {
		t.Error("no Kubernetes")
	}
}

func TestChainsThatDropWhatIsForwardedAreFoundUnlessTheyLetThePodsPass(t *testing.T) {
	const docker = `table ip nat {
	chain DOCKER {
		iifname "docker0" return
	}
}
table ip filter {
	chain DOCKER-USER {
		return
	}

	chain FORWARD {
		type filter hook forward priority filter; policy drop;
		jump DOCKER-USER
	}

	chain INPUT {
		type filter hook input priority filter; policy drop;
	}
}
`
	if got := forwardDroppers(docker); !slices.Equal(got, []string{"ip filter FORWARD"}) {
		t.Errorf("%q", got)
	}
	lets := strings.ReplaceAll(docker, "\t\tjump DOCKER-USER", "\t\tiifname \"trpcni0\" accept\n\t\tjump DOCKER-USER")
	accepts := strings.ReplaceAll(docker, "hook forward priority filter; policy drop", "hook forward priority filter; policy accept")
	for _, ruleset := range []string{lets, accepts, firewall, ""} {
		if got := forwardDroppers(ruleset); len(got) != 0 {
			t.Errorf("%q of %s", got, ruleset)
		}
	}
}

func TestOnlyWhatDecidesHowImagesAreLinkedIsKeptFromCargo(t *testing.T) {
	environ := []string{"HOME=/root", "RUSTFLAGS=-C target-cpu=native", "CARGO_BUILD_TARGET=x", "CARGO_ENCODED_RUSTFLAGS=", "RUSTFLAGS_OF_MINE=x", "CARGO_TARGET_DIR=/t"}
	left := cargoEnvironment(environ)
	if !slices.Equal(left, []string{"HOME=/root", "RUSTFLAGS_OF_MINE=x", "CARGO_TARGET_DIR=/t"}) || len(environ) != 6 {
		t.Errorf("%q", left)
	}
}

func TestAMachineHasADefaultRouteOrNot(t *testing.T) {
	const (
		head    = "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT\n"
		network = "eth0\t000200C0\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0\n"
		through = "eth0\t00000000\t010200C0\t0003\t0\t0\t0\t00000000\t0\t0\t0\n"
		half    = "eth0\t00000000\t010200C0\t0003\t0\t0\t0\t00000080\t0\t0\t0\n"
	)
	for routes, want := range map[string]bool{"": false, head: false, head + network + half: false, head + network + through: true} {
		if got := hasDefaultRoute(routes); got != want {
			t.Errorf("%q: %v", routes, got)
		}
	}
}
