package main

import (
	"errors"
	"fmt"
	"os"
	"strings"
)

// reboot does to the cluster what a power failure and a boot do to a node: every process ends
// without a word, all that lives in memory is gone (mounts, links, packet filter, cgroups, kernel
// settings, what lies below /run), and what lies on the disk is started again.
func reboot() error {
	if err := needRoot("reboot"); err != nil {
		return err
	}
	unlock, err := lockCluster()
	if err != nil {
		return err
	}
	defer unlock()
	record, err := readMachineRecord()
	if err != nil {
		return err
	}
	if record == nil {
		return errors.New("no cluster is there; run `hack/cluster up`")
	}
	tools, err := builtTools(true)
	if err != nil {
		return err
	}
	if err := killAll(record); err != nil {
		return err
	}
	say("all processes of the cluster were killed")
	if err := loseMemory(record); err != nil {
		return err
	}
	if err := bringUp(tools); err != nil {
		return fmt.Errorf("%w\n%s", err, failingComponents())
	}
	say("the cluster is up again on what was on its disk")
	return nil
}

// loseMemory removes what no boot finds again. Nothing of the cluster may run.
func loseMemory(record *machineRecord) error {
	sockets := shimSockets()
	failures := []error{unmountBelow(ownedRoots(record)...), removeLinks(), removeTables(record), removeCgroups(cgroupName)}
	for _, s := range sockets {
		os.Remove(s)
	}
	volatile := []string{runRoot}
	for _, path := range record.Absent {
		if strings.HasPrefix(path, "/run/") {
			volatile = append(volatile, path)
		}
	}
	for _, path := range volatile {
		failures = append(failures, removeTree(path))
	}
	for name, value := range record.Sysctls {
		failures = append(failures, restoreSysctl(name, value))
	}
	return errors.Join(failures...)
}
