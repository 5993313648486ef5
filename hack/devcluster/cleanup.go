package main

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// clusterProcesses returns the ids of all processes of the cluster: those in its cgroups, those
// that inherited its environment, and those that run one of its (or Torpor's) programs.
func clusterProcesses(record *machineRecord) map[int]bool {
	found := cgroupProcesses(cgroupName)
	delete(found, os.Getpid())
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return found
	}
	torporIsOurs := record != nil && slices.Contains(record.Absent, "/opt/torpor")
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil || pid == os.Getpid() {
			continue
		}
		environ, err := os.ReadFile(filepath.Join("/proc", e.Name(), "environ"))
		if err == nil && slices.ContainsFunc(bytes.Split(environ, []byte{0}), func(v []byte) bool { return string(v) == environMark() }) {
			found[pid] = true
		}
		exe, err := os.Readlink(filepath.Join("/proc", e.Name(), "exe"))
		if err == nil && torporIsOurs && strings.HasPrefix(exe, "/opt/torpor/") {
			found[pid] = true
		}
	}
	return found
}

// clusterRemains tells whether anything of a cluster is on the machine, for when there is no record
// of one.
func clusterRemains() bool {
	for _, path := range []string{stateRoot, runRoot, "/sys/class/net/" + machineBridge} {
		if fileExists(path) {
			return true
		}
	}
	if len(clusterProcesses(nil)) > 0 {
		return true
	}
	tables, err := nftTables()
	return err == nil && slices.Contains(tables, ownTable)
}

// killAll kills every process of the cluster and returns when none is left.
func killAll(record *machineRecord) error {
	return killUntilNone(func() map[int]bool { return clusterProcesses(record) })
}

// killUntilNone kills processes and returns when none of them is left.
func killUntilNone(living func() map[int]bool) error {
	deadline := time.Now().Add(20 * time.Second)
	for {
		left := living()
		for pid := range left {
			if isZombie(pid) {
				delete(left, pid)
				continue
			}
			syscall.Kill(pid, syscall.SIGKILL)
		}
		if len(left) == 0 {
			return nil
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("%d processes do not end although killed: %v", len(left), keys(left))
		}
		time.Sleep(20 * time.Millisecond)
	}
}

func keys(set map[int]bool) []int {
	all := make([]int, 0, len(set))
	for k := range set {
		all = append(all, k)
	}
	slices.Sort(all)
	return all
}

func isZombie(pid int) bool {
	content, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return true // gone
	}
	_, rest, _ := bytes.Cut(content, []byte(") "))
	return len(rest) > 0 && (rest[0] == 'Z' || rest[0] == 'X')
}

// mountPoints returns all mount points of this mount namespace, in the order they were made.
func mountPoints() ([]string, error) {
	content, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return nil, err
	}
	unescape := strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`)
	var points []string
	for line := range strings.Lines(string(content)) {
		if fields := strings.Fields(line); len(fields) > 4 {
			points = append(points, strings.TrimSuffix(unescape.Replace(fields[4]), "//deleted"))
		}
	}
	return points, nil
}

func below(path, root string) bool { return path == root || strings.HasPrefix(path, root+"/") }

// unmountBelow unmounts everything at or below the roots, the latest mount first, until nothing is
// left.
func unmountBelow(roots ...string) error {
	for range 10 { // mounts stacked on one another appear once each, so one round is nearly always enough
		points, err := mountPoints()
		if err != nil {
			return err
		}
		left := 0
		for _, point := range slices.Backward(points) {
			if !slices.ContainsFunc(roots, func(r string) bool { return below(point, r) }) {
				continue
			}
			left++
			if err := syscall.Unmount(point, 0); err == nil {
				continue
			}
			if err := syscall.Unmount(point, syscall.MNT_DETACH); err != nil && !errors.Is(err, syscall.EINVAL) {
				return fmt.Errorf("unmount %s: %w", point, err)
			}
		}
		if left == 0 {
			return nil
		}
	}
	return fmt.Errorf("mounts below %s keep coming back", strings.Join(roots, ", "))
}

// removeTree removes a folder of ours after making sure that no mount is left in it: deleting
// through a mount would delete what is mounted.
func removeTree(path string) error {
	if err := unmountBelow(path); err != nil {
		return err
	}
	return os.RemoveAll(path)
}

// ownedRoots are the folders whose mounts are the cluster's: ours, and Torpor's where `up` found
// none.
func ownedRoots(record *machineRecord) []string {
	roots := []string{stateRoot, runRoot}
	if record == nil {
		return append(roots, hostPathProvisionerDir)
	}
	for _, path := range record.Absent {
		if path == hostPathProvisionerDir || strings.Contains(path, "torpor") {
			roots = append(roots, path)
		}
	}
	return roots
}

// shimSockets returns the sockets of this cluster's shims; containerd puts them into a folder
// shared by all containerds of the machine and writes their address into each container's bundle.
func shimSockets() []string {
	var sockets []string
	for _, n := range nodes {
		bundles, _ := filepath.Glob(n.run("containerd", "io.containerd.runtime.v2.task", "*", "*"))
		for _, bundle := range bundles {
			for _, file := range []string{"address", "bootstrap.json"} {
				content, err := os.ReadFile(filepath.Join(bundle, file))
				if err != nil {
					continue
				}
				if _, rest, found := strings.Cut(string(content), "unix://"); found {
					end := strings.IndexFunc(rest, func(r rune) bool { return r == '"' || r == '\n' })
					if end < 0 {
						end = len(rest)
					}
					sockets = append(sockets, rest[:end])
				}
			}
		}
	}
	return sockets
}

// restoreMachine undoes what the cluster changed. Every step is tried even if one before it failed.
func restoreMachine(record *machineRecord) error {
	var failures []error
	try := func(err error) {
		if err != nil {
			failures = append(failures, err)
		}
	}
	sockets := shimSockets()
	try(unmountBelow(ownedRoots(record)...))
	try(removeLinks())
	try(removeTables(record))
	try(removeCgroups(cgroupName))
	for _, s := range sockets {
		os.Remove(s)
	}
	try(removeForeign(record))
	if record != nil {
		for name, value := range record.Sysctls {
			try(restoreSysctl(name, value))
		}
	}
	if len(failures) > 0 {
		return errors.Join(failures...) // the record stays, so that another `down` can go on
	}
	try(removeTree(runRoot))
	try(removeTree(stateRoot))
	return errors.Join(failures...)
}

func restoreSysctl(name, value string) error {
	path := settingPath(name)
	now, err := os.ReadFile(path)
	if err != nil || chosen(string(now)) == value {
		return nil
	}
	if err := os.WriteFile(path, []byte(value), 0); err != nil {
		return fmt.Errorf("put back sysctl %s to %s: %w", strings.ReplaceAll(name, "/", "."), value, err)
	}
	return nil
}

// removeLinks removes our bridges and what is plugged into them.
func removeLinks() error {
	bridges := []string{machineBridge}
	for _, n := range nodes {
		bridges = append(bridges, n.podBridge())
	}
	var failures []error
	for _, bridge := range bridges {
		ports, _ := filepath.Glob("/sys/class/net/" + bridge + "/brif/*")
		for _, link := range append(ports, bridge) {
			failures = append(failures, removeLink(filepath.Base(link)))
		}
	}
	return errors.Join(failures...)
}

func removeLink(name string) error {
	if !fileExists("/sys/class/net/" + name) {
		return nil
	}
	_, err := output(10*time.Second, "ip", "link", "delete", name)
	if err != nil && !fileExists("/sys/class/net/"+name) {
		return nil // the end of its network namespace took it
	}
	return err
}

// removeTables removes the cluster's nftables tables. Without a record, the presence of our own
// tells that the others are ours too: `up` refuses a machine that has them already.
func removeTables(record *machineRecord) error {
	tables, err := nftTables()
	if err != nil {
		return err
	}
	var kept []string
	switch {
	case record != nil:
		kept = record.Tables
	case !slices.Contains(tables, ownTable):
		return nil
	}
	var failures []error
	for _, table := range tables {
		if !slices.Contains(clusterTables, table) || slices.Contains(kept, table) {
			continue
		}
		if _, err := output(10*time.Second, "nft", append([]string{"delete", "table"}, strings.Fields(table)...)...); err != nil {
			failures = append(failures, err)
		}
	}
	return errors.Join(failures...)
}

// removeForeign removes what the cluster's programs left outside our folders: whole folders that
// did not exist before, and single files in those that did.
func removeForeign(record *machineRecord) error {
	var failures []error
	for _, n := range nodes {
		results, _ := filepath.Glob(fmt.Sprintf("/var/lib/cni/results/torpor-dev-%d-*", n.index))
		for _, f := range results {
			os.Remove(f)
		}
	}
	links, _ := filepath.Glob("/var/log/containers/*.log")
	for _, link := range links {
		if target, err := os.Readlink(link); err == nil && below(target, stateRoot) {
			os.Remove(link)
		}
	}
	if record == nil {
		return nil
	}
	for _, path := range record.Absent {
		if !fileExists(path) {
			continue
		}
		if err := removeTree(path); err != nil {
			failures = append(failures, err)
		}
	}
	return errors.Join(failures...)
}
