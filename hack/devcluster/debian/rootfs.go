// Package debian makes root file systems out of Debian packages, without running their scripts.
package debian

import (
	"context"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"torpor.dev/hack/devcluster/oci"
)

// unwanted are folders that no program in a container reads.
var unwanted = []string{
	"usr/share/doc", "usr/share/man", "usr/share/info", "usr/share/locale", "usr/share/lintian", "usr/share/bug",
	"usr/share/doc-base", "usr/share/menu", "usr/share/applications", "usr/share/pixmaps", "usr/share/bash-completion", "var/cache", "var/lib/apt",
}

// Rootfs unpacks the packages and all that they depend on below dir. apt resolves the dependencies
// as on a machine with nothing installed. Recommended packages are left out.
func Rootfs(dir string, packages []string) error {
	archives := filepath.Join(dir, ".archives")
	for _, d := range []string{archives + "/partial", dir + "/usr/bin", dir + "/usr/sbin", dir + "/usr/lib", dir + "/usr/lib64"} {
		if err := os.MkdirAll(d, 0o755); err != nil {
			return err
		}
	}
	for _, name := range []string{"bin", "sbin", "lib", "lib64"} { // as on every Debian since 12
		if err := os.Symlink("usr/"+name, filepath.Join(dir, name)); err != nil {
			return err
		}
	}
	status := filepath.Join(dir, ".status")
	if err := os.WriteFile(status, nil, 0o644); err != nil {
		return err
	}
	args := []string{
		"-o", "Dir::State::status=" + status, "-o", "Dir::Cache::archives=" + archives, "-o", "Debug::NoLocking=true",
		"-o", "APT::Sandbox::User=root", "-o", "Dir::State::extended_states=" + status + ".extended",
		"install", "--download-only", "--yes", "--no-install-recommends",
	}
	if err := run("apt-get", append(args, packages...)...); err != nil {
		return err
	}
	debs, err := filepath.Glob(filepath.Join(archives, "*.deb"))
	if err != nil {
		return err
	}
	if len(debs) == 0 {
		return fmt.Errorf("apt-get downloaded no package for %s", strings.Join(packages, " "))
	}
	for _, deb := range debs {
		script := `dpkg-deb --fsys-tarfile "$1" | tar -x --keep-directory-symlink -C "$2"`
		if err := run("bash", "-o", "pipefail", "-c", script, "unpack", deb, dir); err != nil {
			return err
		}
	}
	for _, leftover := range append([]string{".archives", ".status", ".status.extended"}, unwanted...) {
		if err := os.RemoveAll(filepath.Join(dir, leftover)); err != nil {
			return err
		}
	}
	return finish(dir)
}

// finish does what the packages' own scripts would have done and programs need.
func finish(dir string) error {
	if _, err := os.Lstat(dir + "/usr/bin/sh"); err != nil {
		if _, err := os.Stat(dir + "/usr/bin/dash"); err == nil {
			if err := os.Symlink("dash", dir+"/usr/bin/sh"); err != nil {
				return err
			}
		}
	}
	if _, err := os.Stat(dir + "/usr/bin/busybox"); err == nil {
		if err := installApplets(dir); err != nil {
			return err
		}
	}
	libraries, err := filepath.Glob(dir + "/usr/lib/python3.*")
	if err != nil || len(libraries) == 0 {
		return err
	}
	// Compiled once here instead of at every start; checked by nothing, so that the bytes do not
	// depend on the time of the build.
	library := strings.TrimPrefix(libraries[0], dir)
	return run("chroot", dir, "/usr/bin/python3", "-m", "compileall", "-q", "--invalidation-mode", "unchecked-hash", library)
}

// installApplets links every program that busybox is to its name.
func installApplets(dir string) error {
	list, err := exec.Command(dir+"/usr/bin/busybox", "--list").Output()
	if err != nil {
		return fmt.Errorf("busybox --list: %w", err)
	}
	for name := range strings.FieldsSeq(string(list)) {
		link := filepath.Join(dir, "usr/bin", name)
		if _, err := os.Lstat(link); err == nil {
			continue
		}
		if err := os.Symlink("busybox", link); err != nil {
			return err
		}
	}
	return nil
}

// Entries lists a folder as entries of an image, in a stable order.
func Entries(dir string) ([]oci.Entry, error) {
	var entries []oci.Entry
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || path == dir {
			return err
		}
		entry, err := entryOf(dir, path, d)
		if entry != nil {
			entries = append(entries, *entry)
		}
		return err
	})
	slices.SortFunc(entries, func(a, b oci.Entry) int { return strings.Compare(a.Path, b.Path) })
	return entries, err
}

func entryOf(dir, path string, d fs.DirEntry) (*oci.Entry, error) {
	info, err := d.Info()
	if err != nil {
		return nil, err
	}
	uid, gid, err := owner(info)
	if err != nil {
		return nil, err
	}
	name, err := filepath.Rel(dir, path)
	if err != nil {
		return nil, err
	}
	entry := &oci.Entry{Path: name, Mode: unixMode(info.Mode()), UID: uid, GID: gid}
	switch {
	case info.IsDir():
		entry.Dir = true
	case info.Mode()&fs.ModeSymlink != 0:
		entry.Link, err = os.Readlink(path)
	case info.Mode().IsRegular():
		entry.Source = path
	default:
		return nil, nil // devices and pipes are made by the runtime
	}
	return entry, err
}

func unixMode(mode fs.FileMode) int64 {
	bits := int64(mode.Perm())
	for flag, bit := range map[fs.FileMode]int64{fs.ModeSetuid: 0o4000, fs.ModeSetgid: 0o2000, fs.ModeSticky: 0o1000} {
		if mode&flag != 0 {
			bits |= bit
		}
	}
	return bits
}

func run(name string, args ...string) error {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Env = append(os.Environ(), "DEBIAN_FRONTEND=noninteractive", "LC_ALL=C")
	out, err := cmd.CombinedOutput()
	if err != nil {
		said := strings.TrimSpace(string(out))
		if len(said) > 2000 {
			said = "…" + said[len(said)-2000:]
		}
		return fmt.Errorf("%s: %w: %s", name, err, said)
	}
	return nil
}

func owner(info fs.FileInfo) (uid, gid int, err error) {
	stat, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return 0, 0, fmt.Errorf("%s: the file system tells no owner", info.Name())
	}
	return int(stat.Uid), int(stat.Gid), nil
}
