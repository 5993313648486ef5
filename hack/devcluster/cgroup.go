package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
)

const cgroupMount = "/sys/fs/cgroup"

// unified tells whether the machine has cgroup v2 only.
func unified() bool { return fileExists(filepath.Join(cgroupMount, "cgroup.controllers")) }

// hierarchies returns where each mounted cgroup hierarchy is: one on cgroup v2, many on v1.
func hierarchies() ([]string, error) {
	if unified() {
		return []string{cgroupMount}, nil
	}
	entries, err := os.ReadDir(cgroupMount)
	if err != nil {
		return nil, fmt.Errorf("no cgroups are mounted: %w", err)
	}
	var all []string
	for _, e := range entries {
		// Joint hierarchies (cpu,cpuacct) have links beside them that must not be counted twice.
		if e.IsDir() {
			all = append(all, filepath.Join(cgroupMount, e.Name()))
		}
	}
	return all, nil
}

// ensureCgroup makes the group (and its parents) in every hierarchy, ready to hold groups with
// limits.
func ensureCgroup(name string) error {
	all, err := hierarchies()
	if err != nil {
		return err
	}
	for _, root := range all {
		place := root
		for part := range strings.SplitSeq(name, "/") {
			if unified() {
				if err := delegate(place); err != nil {
					return err
				}
			}
			parent := place
			place = filepath.Join(place, part)
			if err := os.Mkdir(place, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
				return fmt.Errorf("cgroup %s: %w", place, err)
			}
			if err := inheritCPUSet(parent, place); err != nil {
				return err
			}
		}
		// The leaf of processes gets no groups below it; every other one does.
		if unified() && filepath.Base(name) != "system" {
			if err := delegate(place); err != nil {
				return err
			}
		}
	}
	return nil
}

// delegate enables every controller that the group has for the groups below it (cgroup v2).
func delegate(group string) error {
	enabled := filepath.Join(group, "cgroup.subtree_control")
	content, err := os.ReadFile(filepath.Join(group, "cgroup.controllers"))
	if err != nil {
		return err
	}
	for controller := range strings.FieldsSeq(string(content)) {
		err := os.WriteFile(enabled, []byte("+"+controller), 0)
		if err != nil && group != cgroupMount { // the root's owner may have reasons to refuse one
			return fmt.Errorf("cgroup %s: controller %s: %w", group, controller, err)
		}
	}
	content, err = os.ReadFile(enabled)
	if err != nil {
		return err
	}
	for _, needed := range neededControllers {
		if !slices.Contains(strings.Fields(string(content)), needed) {
			return fmt.Errorf("cgroup %s: controller %q cannot be enabled for the groups below it; in a container, start it with a cgroup of its own whose root holds no process (or use a virtual machine)", group, needed)
		}
	}
	return nil
}

// inheritCPUSet fills the two files that are empty in a new cpuset group of cgroup v1, where no
// process could enter it otherwise.
func inheritCPUSet(parent, child string) error {
	for _, file := range []string{"cpuset.cpus", "cpuset.mems"} {
		content, err := os.ReadFile(filepath.Join(child, file))
		if unified() || err != nil || strings.TrimSpace(string(content)) != "" {
			continue
		}
		content, err = os.ReadFile(filepath.Join(parent, file))
		if err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(child, file), content, 0); err != nil {
			return fmt.Errorf("%s: %w", filepath.Join(child, file), err)
		}
	}
	return nil
}

// joinCgroup moves this process, and so all that it starts, into the group. On cgroup v1 only the
// pids hierarchy is joined: that is enough to find the processes, and limits set on the caller stay
// in force.
func joinCgroup(name string) error {
	root := cgroupMount
	if !unified() {
		root = filepath.Join(cgroupMount, "pids")
	}
	return os.WriteFile(filepath.Join(root, name, "cgroup.procs"), []byte(strconv.Itoa(os.Getpid())), 0)
}

// cgroupProcesses returns the ids of all processes in a group and those below it, in any hierarchy.
func cgroupProcesses(name string) map[int]bool {
	found := map[int]bool{}
	all, err := hierarchies()
	if err != nil {
		return found
	}
	for _, root := range all {
		filepath.WalkDir(filepath.Join(root, name), func(path string, entry fs.DirEntry, err error) error {
			if err != nil || !entry.IsDir() {
				return nil
			}
			content, err := os.ReadFile(filepath.Join(path, "cgroup.procs"))
			if err != nil {
				return nil
			}
			for pid := range strings.FieldsSeq(string(content)) {
				if n, err := strconv.Atoi(pid); err == nil && n > 0 {
					found[n] = true
				}
			}
			return nil
		})
	}
	return found
}

// removeCgroups removes a group and all below it, from the leaves up. A group stays busy for a
// moment after the last process in it was killed.
func removeCgroups(name string) error {
	all, err := hierarchies()
	if err != nil {
		return err
	}
	for _, root := range all {
		var groups []string
		filepath.WalkDir(filepath.Join(root, name), func(path string, entry fs.DirEntry, err error) error {
			if err == nil && entry.IsDir() {
				groups = append(groups, path)
			}
			return nil
		})
		for i := len(groups) - 1; i >= 0; i-- {
			if err := removeCgroup(groups[i]); err != nil {
				return err
			}
		}
	}
	return nil
}

func removeCgroup(path string) error {
	deadline := time.Now().Add(5 * time.Second)
	for {
		err := syscall.Rmdir(path)
		if err == nil || errors.Is(err, syscall.ENOENT) {
			return nil
		}
		if !errors.Is(err, syscall.EBUSY) || time.Now().After(deadline) {
			return fmt.Errorf("cgroup %s cannot be removed: %w", path, err)
		}
		time.Sleep(10 * time.Millisecond)
	}
}
