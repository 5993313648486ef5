package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
)

// A holder is a process that keeps the mount and network namespaces of a node other than node-0. It
// does nothing else: the node's supervisor, and all that this starts, enters its namespaces. They
// end with the last process in them, and so do the node's mounts, links and packet filter.

func (n node) holderLock() string { return n.run("holder.lock") }
func (n node) holderFile() string { return n.run("holder.pid") }
func (n node) holderRuns() bool   { return isLocked(n.holderLock()) }

// diskFolders are those of the machine in whose place a node has folders of its own, which stay
// when it loses its power. /run is a tmpfs of its own.
var diskFolders = []string{"/opt", "/var/lib", "/var/log"}

func coveredFolders() []string { return append(slices.Clone(diskFolders), "/run") }

// disk is the folder of the machine that the node sees at a path below diskFolders.
func (n node) disk(path string) string { return n.state("disk", path) }

// ensureHolder starts the node's holder unless it runs.
func (n node) ensureHolder() error {
	if n.holderRuns() {
		return nil
	}
	// Namespaces without a holder cannot be entered again.
	if err := n.powerOff(); err != nil {
		return err
	}
	if err := ensureCgroup(n.ownCgroup()); err != nil {
		return err
	}
	for _, dir := range []string{n.state(), n.run(), inner.state(), inner.run()} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return err
		}
	}
	for _, folder := range diskFolders {
		if err := os.MkdirAll(n.disk(folder), 0o755); err != nil {
			return err
		}
	}
	cache, err := cacheRoot()
	if err != nil {
		return err
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	cmd := exec.Command(self, "hold", n.name(), cache)
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNS | syscall.CLONE_NEWNET}
	return startBackground(n.name()+" holder", cmd, logPath(n.name(), "holder"), n.holderLock())
}

// hold is the process of a holder. It takes its lock when its namespaces are complete.
func hold(name, cache string) error {
	n, err := nodeNamed(name)
	if err != nil {
		return err
	}
	lock, err := os.OpenFile(n.holderLock(), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return err
	}
	if err := joinCgroup(n.ownCgroup()); err != nil {
		return err
	}
	if err := n.makeMounts(cache); err != nil {
		return err
	}
	if err := setNodeSysctls(); err != nil {
		return err
	}
	if err := writeFile(n.holderFile(), fmt.Appendf(nil, "%d\n", os.Getpid()), 0o644); err != nil {
		return err
	}
	if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		return fmt.Errorf("another holder of %s runs", n.name())
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	<-ctx.Done()
	return nil
}

func (n node) holderPid() (string, error) {
	content, err := os.ReadFile(n.holderFile())
	if err != nil || !n.holderRuns() {
		return "", fmt.Errorf("%s is off; `hack/cluster node-up %s` starts it", n.name(), n.name())
	}
	return strings.TrimSpace(string(content)), nil
}

// within is the command that runs another one in the node's namespaces: "mount", "net".
func (n node) within(namespaces ...string) ([]string, error) {
	pid, err := n.holderPid()
	if err != nil {
		return nil, err
	}
	command := []string{"nsenter", "--target=" + pid}
	for _, namespace := range namespaces {
		command = append(command, "--"+namespace)
	}
	return append(command, "--"), nil
}

// makeMounts makes this process's mount namespace the node's. The cluster's own folders, and the
// cache with its programs, are those of the machine.
func (n node) makeMounts(cache string) error {
	if err := mount("", "/", "", syscall.MS_REC|syscall.MS_PRIVATE, ""); err != nil {
		return err
	}
	kept := []string{stateRoot, runRoot}
	if isCovered(cache) && fileExists(cache) {
		kept = append(kept, cache)
	}
	// Folders stay reachable by these when a mount covers them.
	origins := map[string]string{}
	for _, path := range kept {
		origins[path] = path
	}
	for _, folder := range diskFolders {
		origins[folder] = n.disk(folder)
	}
	for path, origin := range origins {
		const oPath = 0x200000 // O_PATH, open(2)
		fd, err := syscall.Open(origin, oPath|syscall.O_DIRECTORY|syscall.O_CLOEXEC, 0)
		if err != nil {
			return &os.PathError{Op: "open", Path: origin, Err: err}
		}
		defer syscall.Close(fd)
		origins[path] = fmt.Sprintf("/proc/self/fd/%d", fd)
	}
	if err := dropMounts(kept); err != nil {
		return err
	}
	for _, folder := range diskFolders {
		if err := mount(origins[folder], folder, "", syscall.MS_BIND, ""); err != nil {
			return err
		}
	}
	const flags = syscall.MS_NOSUID | syscall.MS_NODEV | syscall.MS_NOEXEC
	if err := mount("tmpfs", "/run", "tmpfs", flags, "mode=0755,size=10%"); err != nil {
		return err
	}
	for _, path := range kept {
		if err := bind(origins[path], path); err != nil {
			return err
		}
	}
	if err := bind(n.state(), inner.state()); err != nil {
		return err
	}
	if err := bind(n.run(), inner.run()); err != nil {
		return err
	}
	if err := mountSys(); err != nil {
		return err
	}
	// Containers may ask for mounts that reach the node or come from it.
	return mount("", "/", "", syscall.MS_REC|syscall.MS_SHARED, "")
}

func isCovered(path string) bool {
	return slices.ContainsFunc(coveredFolders(), func(folder string) bool { return below(path, folder) })
}

// dropMounts unmounts, in this namespace, what is mounted below the folders that the node does not
// see: it would be kept busy on the machine. The mounts in which the kept folders lie remain.
func dropMounts(kept []string) error {
	points, err := mountPoints()
	if err != nil {
		return err
	}
	for _, point := range slices.Backward(points) {
		strictly := isCovered(point) && !slices.Contains(coveredFolders(), point)
		if !strictly || slices.ContainsFunc(kept, func(path string) bool { return below(path, point) }) {
			continue
		}
		err := syscall.Unmount(point, syscall.MNT_DETACH)
		if err != nil && !errors.Is(err, syscall.EINVAL) && !errors.Is(err, syscall.ENOENT) {
			return &os.PathError{Op: "unmount", Path: point, Err: err}
		}
	}
	return nil
}

// mountSys replaces /sys by one that shows the links of this network namespace, with the mounts
// that the machine has there (cgroups).
func mountSys() error {
	points, err := mountPoints()
	if err != nil {
		return err
	}
	const staging = "/run/sys"
	if err := os.Mkdir(staging, 0o755); err != nil {
		return err
	}
	if err := mount("sysfs", staging, "sysfs", syscall.MS_NOSUID|syscall.MS_NODEV|syscall.MS_NOEXEC, ""); err != nil {
		return err
	}
	for _, point := range outermostBelow(points, "/sys") {
		if err := mount(point, filepath.Join(staging, strings.TrimPrefix(point, "/sys")), "", syscall.MS_BIND|syscall.MS_REC, ""); err != nil {
			return err
		}
	}
	if err := syscall.Unmount("/sys", syscall.MNT_DETACH); err != nil {
		return &os.PathError{Op: "unmount", Path: "/sys", Err: err}
	}
	if err := mount(staging, "/sys", "", syscall.MS_MOVE, ""); err != nil {
		return err
	}
	return os.Remove(staging)
}

// outermostBelow are the mount points below a folder that are not below another one of them.
func outermostBelow(points []string, folder string) []string {
	var found []string
	for _, point := range points {
		inFound := slices.ContainsFunc(found, func(outer string) bool { return below(point, outer) })
		if point != folder && below(point, folder) && !inFound {
			found = append(found, point)
		}
	}
	return found
}

func bind(from, to string) error {
	if err := os.MkdirAll(to, 0o755); err != nil {
		return err
	}
	return mount(from, to, "", syscall.MS_BIND, "")
}

func mount(from, to, kind string, flags uintptr, data string) error {
	if err := syscall.Mount(from, to, kind, flags, data); err != nil {
		return fmt.Errorf("mount %s at %s: %w", from, to, err)
	}
	return nil
}

// setNodeSysctls sets, in this network namespace, what prepareMachine sets in the machine's.
func setNodeSysctls() error {
	for name, value := range changedSysctls {
		if value == "" || !strings.HasPrefix(name, "net/") || !fileExists(settingPath(name)) {
			continue
		}
		if err := os.WriteFile(settingPath(name), []byte(value), 0); err != nil {
			return fmt.Errorf("sysctl %s: %w", strings.ReplaceAll(name, "/", "."), err)
		}
	}
	return nil
}
