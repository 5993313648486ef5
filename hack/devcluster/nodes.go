package main

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"syscall"
	"time"
)

// keepNodes stands for the number of nodes that the cluster has.
const keepNodes = -1

// upCommand is `up [--nodes N]`. Without the number the cluster keeps its nodes.
func upCommand(args []string) error {
	flags := flag.NewFlagSet("up", flag.ContinueOnError)
	count := flags.Int("nodes", keepNodes, fmt.Sprintf("how many nodes (1 to %d)", maxNodes))
	if err := flags.Parse(args); err != nil {
		return flag.ErrHelp
	}
	if flags.NArg() > 0 || *count != keepNodes && (*count < 1 || *count > maxNodes) {
		return fmt.Errorf("usage: up [--nodes N], N from 1 to %d", maxNodes)
	}
	return up(*count)
}

// nodeCommand is `node-down NODE` and `node-up NODE`.
func nodeCommand(command string, args []string) error {
	if len(args) != 1 {
		return fmt.Errorf("which node? usage: %s NODE", command)
	}
	if err := needRoot(command); err != nil {
		return err
	}
	unlock, err := lockCluster()
	if err != nil {
		return err
	}
	defer unlock()
	n, err := nodeNamed(args[0])
	if err != nil {
		return err
	}
	if n.onMachine() {
		return fmt.Errorf("%s has the control plane; `hack/cluster reboot` kills all of it and starts it again", n.name())
	}
	if command == "node-down" {
		if err := n.powerOff(); err != nil {
			return err
		}
		say("%s is off; its disk is kept", n.name())
		return nil
	}
	if !superviserRuns(controlPlane) {
		return errors.New("the control plane does not run; `hack/cluster up` starts it, and all nodes")
	}
	var since time.Time
	if !n.holderRuns() {
		since = time.Now() // the apiserver has yet to learn that it was off
	}
	if err := n.start(); err != nil {
		return err
	}
	if err := n.provideImages(); err != nil {
		return err
	}
	return n.waitReady(since)
}

// onNode becomes a command that runs in the namespaces of a node, and in its cgroup: it ends with
// the node.
func onNode(args []string) error {
	if len(args) < 2 {
		return errors.New("what, and where? usage: on NODE COMMAND…")
	}
	n, err := nodeNamed(args[0])
	if err != nil {
		return err
	}
	command := args[1:]
	if !n.onMachine() {
		within, err := n.within("mount", "net")
		if err != nil {
			return err
		}
		if err := joinCgroup(n.ownCgroup()); err != nil {
			return err
		}
		command = append(within, command...)
	}
	program, err := exec.LookPath(command[0])
	if err != nil {
		return err
	}
	return syscall.Exec(program, command, os.Environ())
}

// start starts what of the node does not run: its namespaces, their link to the machine, its
// programs.
func (n node) start() error {
	if n.onMachine() {
		if err := ensureCgroup(n.cgroup()); err != nil {
			return err
		}
		if err := n.write(); err != nil {
			return err
		}
		return startGroup(n.group().collectingRarely(machineMemory()))
	}
	if err := n.ensureHolder(); err != nil {
		return err
	}
	if err := n.connect(); err != nil {
		return err
	}
	if err := n.write(); err != nil {
		return err
	}
	within, err := n.within("mount", "net")
	if err != nil {
		return err
	}
	g := n.group().collectingRarely(machineMemory())
	g.within = within
	return startGroup(g)
}

// connect joins the node's network to the machine's bridge, and makes the routes between the Pods
// of both. It may be repeated.
func (n node) connect() error {
	holder, err := n.holderPid()
	if err != nil {
		return err
	}
	within, err := n.within("net")
	if err != nil {
		return err
	}
	onMachine, onNode := n.connections(podsHaveIPv6())
	if !fileExists("/sys/class/net/" + n.uplink()) {
		link := []string{"link", "add", n.uplink(), "type", "veth", "peer", "name", "eth0", "address", n.hardwareAddress(), "netns", holder}
		onMachine = slices.Insert(onMachine, 0, link)
	}
	for _, args := range onMachine {
		if _, err := output(10*time.Second, "ip", args...); err != nil {
			return err
		}
	}
	for _, args := range onNode {
		command := slices.Concat(within, []string{"ip"}, args)
		if _, err := output(10*time.Second, command[0], command[1:]...); err != nil {
			return err
		}
	}
	// The machine knows the node now; until then a route through it would be refused.
	for _, args := range n.routes(podsHaveIPv6()) {
		if _, err := output(10*time.Second, "ip", args...); err != nil {
			return err
		}
	}
	return nil
}

// linkLocal is the node's address in routes of IPv6.
func (n node) linkLocal() string { return fmt.Sprintf("fe80::%x", n.index+1) }

// connections are the arguments of ip(8) on the machine and on the node.
func (n node) connections(ipv6 bool) (onMachine, onNode [][]string) {
	onMachine = [][]string{{"link", "set", n.uplink(), "master", machineBridge, "up"}}
	onNode = [][]string{
		{"link", "set", "lo", "up"},
		{"address", "replace", n.address() + "/24", "dev", "eth0"},
		{"link", "set", "eth0", "up"},
		{"route", "replace", "default", "via", machineAddress},
	}
	if ipv6 {
		onMachine = append(onMachine, []string{"address", "replace", inner.linkLocal() + "/64", "dev", machineBridge, "nodad"})
		onNode = append(onNode,
			[]string{"address", "replace", n.linkLocal() + "/64", "dev", "eth0", "nodad"},
			[]string{"-6", "route", "replace", "default", "via", inner.linkLocal(), "dev", "eth0"})
	}
	return onMachine, onNode
}

// routes are the arguments of ip(8) for the machine's routes to the node's Pods.
func (n node) routes(ipv6 bool) [][]string {
	routes := [][]string{{"route", "replace", n.podCIDR(), "via", n.address(), "dev", machineBridge}}
	if ipv6 {
		routes = append(routes, []string{"-6", "route", "replace", n.podCIDR6(), "via", n.linkLocal(), "dev", machineBridge})
	}
	return routes
}

// powerOff ends the node as the loss of its power would: every process at once, and with them its
// mounts, links and packet filter, and what lies below its /run. Its disk is kept.
func (n node) powerOff() error {
	if unified() {
		// One write for all; the file is missing before Linux 5.14.
		os.WriteFile(filepath.Join(cgroupMount, n.cgroup(), "cgroup.kill"), []byte("1"), 0)
	}
	err := killUntilNone(func() map[int]bool {
		living := cgroupProcesses(n.cgroup())
		delete(living, os.Getpid())
		return living
	})
	if err != nil {
		return err
	}
	if err := removeLink(n.uplink()); err != nil {
		return err
	}
	if err := removeCgroups(n.cgroup()); err != nil {
		return err
	}
	return removeTree(n.run())
}

// remove takes a node that is off out of the cluster, with its disk.
func (n node) remove() error {
	if _, err := kubectlRun(time.Minute, nil, "delete", "node", n.name(), "--ignore-not-found"); err != nil {
		return err
	}
	// The controllers would delete them after a minute.
	if _, err := kubectlRun(time.Minute, nil, "delete", "pods", "--all-namespaces", "--force", "--grace-period=0", "--field-selector=spec.nodeName="+n.name()); err != nil {
		return err
	}
	for _, args := range [][]string{{"route", "flush", n.podCIDR()}, {"-6", "route", "flush", n.podCIDR6()}} {
		if _, err := output(10*time.Second, "ip", args...); err != nil {
			return err
		}
	}
	keys, _ := filepath.Glob(pkiPath(n.name() + "*"))
	for _, key := range keys {
		os.Remove(key)
	}
	// Its presence makes the node a member: it goes last.
	if err := removeTree(n.state()); err != nil {
		return err
	}
	say("%s is removed", n.name())
	return nil
}
