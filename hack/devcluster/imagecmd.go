package main

import (
	"crypto/sha256"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"runtime"
	"slices"
	"strings"

	"torpor.dev/hack/devcluster/debian"
	"torpor.dev/hack/devcluster/oci"
)

const imageUsage = `usage: hack/image from-files NAME OUT.tar [--entrypoint WORDS] [--cmd WORDS] [--env K=V]… [--user UID] HOST:DEST…
       hack/image debian     NAME OUT.tar --packages A,B [--entrypoint WORDS] [--cmd WORDS] [--env K=V]… [HOST:DEST…]
       hack/image dev [NAME…] make the images of tests and demos (busybox, demo-python, runtimes;
                             default: all) and load them into the cluster
`

const (
	busyboxImage = "torpor.dev/busybox:dev"
	pythonImage  = "torpor.dev/demo-python:dev"
	// Language runtimes that size themselves by what they see of the machine.
	runtimesImage = "torpor.dev/runtimes:dev"
)

// debianRecipe is changed with the code that makes a root file system, so that cached images are
// made anew.
const debianRecipe = "1"

// debianImage is an image out of Debian packages and files of this machine.
type debianImage struct {
	name     string
	packages []string
	config   oci.Config
	files    []string // HOST:DEST
}

var devImages = []debianImage{
	{
		name: busyboxImage, packages: []string{"busybox-static"},
		config: oci.Config{Cmd: []string{"sh"}, Env: []string{imagePath}},
	},
	{
		// tar is for kubectl cp; the rest is what a person needs to look around in.
		name: pythonImage, packages: []string{"python3", "dash", "coreutils", "tar", "sed", "grep", "libc-bin"},
		config: oci.Config{Cmd: []string{"python3"}, Env: []string{imagePath, "PYTHONUNBUFFERED=1", "LANG=C.UTF-8"}},
	},
	{
		name: runtimesImage, packages: []string{"python3", "python3-psutil", "nodejs", "openjdk-17-jre-headless", "dash", "coreutils"},
		config: oci.Config{Cmd: []string{"python3"}, Env: []string{imagePath, "LANG=C.UTF-8"}},
	},
}

const imagePath = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// words is a flag of words separated by blanks.
type words []string

func (w *words) String() string     { return strings.Join(*w, " ") }
func (w *words) Set(s string) error { *w = append(*w, strings.Fields(s)...); return nil }

func imageCommand(args []string) error {
	if len(args) > 0 && args[0] == "dev" {
		return loadDevImages(args[1:])
	}
	if len(args) < 3 {
		fmt.Fprint(os.Stderr, imageUsage)
		return errors.New("too few arguments")
	}
	kind, name, out := args[0], args[1], args[2]
	flags := flag.NewFlagSet("image", flag.ContinueOnError)
	flags.Usage = func() { fmt.Fprint(os.Stderr, imageUsage) }
	var entrypoint, cmd, env words
	flags.Var(&entrypoint, "entrypoint", "")
	flags.Var(&cmd, "cmd", "")
	flags.Var(&env, "env", "")
	packages := flags.String("packages", "", "")
	user := flags.String("user", "", "")
	if err := flags.Parse(args[3:]); err != nil {
		return flag.ErrHelp
	}
	if len(env) == 0 {
		env = words{imagePath}
	}
	config := oci.Config{Entrypoint: entrypoint, Cmd: cmd, Env: env, User: *user}
	switch kind {
	case "from-files":
		entries, err := fileEntries(flags.Args())
		if err != nil {
			return err
		}
		digest, err := oci.Image{Name: name, Config: config, Entries: append(entries, emptyRoot()...)}.Write(out)
		fmt.Println(digest)
		return err
	case "debian":
		if *packages == "" {
			return errors.New("which packages? --packages A,B")
		}
		archive, err := debianImage{name, strings.Split(*packages, ","), config, flags.Args()}.make()
		if err != nil {
			return err
		}
		return copyFile(archive, out)
	}
	fmt.Fprint(os.Stderr, imageUsage)
	return fmt.Errorf("no such kind of image: %s", kind)
}

// fileEntries reads HOST:DEST pairs. Modes are 0755 for what may be executed, else 0644.
func fileEntries(pairs []string) ([]oci.Entry, error) {
	var entries []oci.Entry
	for _, pair := range pairs {
		host, dest, found := strings.Cut(pair, ":")
		if !found {
			return nil, fmt.Errorf("%q is not HOST:DEST", pair)
		}
		info, err := os.Stat(host)
		if err != nil {
			return nil, err
		}
		if !info.Mode().IsRegular() {
			return nil, fmt.Errorf("%s is not a regular file", host)
		}
		mode := int64(0o644)
		if info.Mode()&0o111 != 0 {
			mode = 0o755
		}
		entries = append(entries, oci.Entry{Path: dest, Mode: mode, Source: host})
	}
	return entries, nil
}

// make returns the archive of the image, from the cache if it was made before from the same list.
func (d debianImage) make() (string, error) {
	cache, err := cacheRoot()
	if err != nil {
		return "", err
	}
	files, err := fileEntries(d.files)
	if err != nil {
		return "", err
	}
	h := sha256.New()
	fmt.Fprintf(h, "%s %s %q %q %+q", debianRecipe, runtime.GOARCH, d.name, d.packages, d.config)
	for _, f := range files {
		content, err := os.ReadFile(f.Source)
		if err != nil {
			return "", err
		}
		fmt.Fprintf(h, "%s %o %x", f.Path, f.Mode, sha256.Sum256(content))
	}
	archive := filepath.Join(cache, "images", fmt.Sprintf("%x.tar", h.Sum(nil)[:12]))
	if fileExists(archive) {
		return archive, nil
	}
	if err := needRoot("image debian"); err != nil {
		return "", err
	}
	if err := os.MkdirAll(filepath.Dir(archive), 0o755); err != nil {
		return "", err
	}
	say("make image %s from Debian packages %s", d.name, strings.Join(d.packages, " "))
	return archive, during("image "+d.name, func() error { return d.write(archive, files) })
}

func (d debianImage) write(archive string, files []oci.Entry) error {
	root, err := d.rootfs(filepath.Dir(archive))
	if err != nil {
		return err
	}
	defer os.RemoveAll(root)
	entries, err := debian.Entries(root)
	if err != nil {
		return err
	}
	// The first entry of a path counts: the given files come first, the folders of every root last.
	entries = slices.Concat(files, entries, emptyRoot())
	_, err = oci.Image{Name: d.name, Config: d.config, Entries: entries}.Write(archive)
	return err
}

// rootfs unpacks the packages. When apt cannot find one, its lists may be missing or old: they are
// fetched and it is tried once more.
func (d debianImage) rootfs(parent string) (string, error) {
	for attempt := 1; ; attempt++ {
		root, err := os.MkdirTemp(parent, ".rootfs-")
		if err != nil {
			return "", err
		}
		if err := os.Chmod(root, 0o755); err != nil {
			return "", err
		}
		err = debian.Rootfs(root, d.packages)
		if err == nil {
			return root, nil
		}
		os.RemoveAll(root)
		if attempt == 2 || aptUpdated {
			return "", err
		}
		if err := aptUpdate(); err != nil {
			return "", err
		}
	}
}

// loadDevImages makes the named images of tests and demos, all of them without a name, and loads
// those that the cluster lacks.
func loadDevImages(names []string) error {
	var archives []string
	for _, d := range devImages {
		short := strings.TrimSuffix(path.Base(d.name), ":dev")
		if len(names) > 0 && !slices.Contains(names, short) {
			continue
		}
		archive, err := d.make()
		if err != nil {
			return fmt.Errorf("image %s: %w", d.name, err)
		}
		archives = append(archives, archive)
	}
	if len(archives) < len(names) {
		return fmt.Errorf("not all of %q are images of the tests; `hack/image` lists them", names)
	}
	if !accepts("unix:" + nodes[0].containerdSocket()) {
		say("the cluster does not run: the images are made, not loaded")
		return nil
	}
	return loadOnce("dev-images", archives)
}

// loadOnce imports archives unless exactly these were imported into this cluster before under that
// mark.
func loadOnce(mark string, archives []string) error {
	file, want := statePath("loaded", mark), strings.Join(archives, "\n")
	if have, err := os.ReadFile(file); err == nil && string(have) == want {
		return nil
	}
	if err := loadImages(archives...); err != nil {
		return err
	}
	return writeFile(file, []byte(want), 0o644)
}

func copyFile(from, to string) error {
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer in.Close()
	out, err := os.CreateTemp(filepath.Dir(to), ".copy-*")
	if err != nil {
		return err
	}
	defer os.Remove(out.Name())
	if _, err := io.Copy(out, in); err != nil {
		return err
	}
	if err := out.Chmod(0o644); err != nil {
		return err
	}
	if err := out.Close(); err != nil {
		return err
	}
	return os.Rename(out.Name(), to)
}
