package main

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"torpor.dev/hack/devcluster/oci"
)

const (
	pauseImage   = "torpor.dev/pause:dev"
	coreDNSImage = "torpor.dev/coredns:dev"
)

// fileImage returns where an image made from the given built file is kept: beside it, in its own
// folder of the cache, so that it goes when what it was made of goes.
func fileImage(name string, tools toolset, file string, config oci.Config) (string, error) {
	archive := filepath.Join(filepath.Dir(tools[file]), file+".image.tar")
	if fileExists(archive) {
		return archive, nil
	}
	image := oci.Image{Name: name, Config: config, Entries: append(emptyRoot(), oci.Entry{Path: file, Mode: 0o755, Source: tools[file]})}
	if _, err := image.Write(archive); err != nil {
		return "", fmt.Errorf("image %s: %w", name, err)
	}
	return archive, nil
}

// emptyRoot are the folders a runtime mounts over, and /tmp.
func emptyRoot() []oci.Entry {
	return []oci.Entry{
		{Path: "tmp", Mode: 0o1777, Dir: true}, {Path: "proc", Mode: 0o755, Dir: true}, {Path: "sys", Mode: 0o755, Dir: true},
		{Path: "dev", Mode: 0o755, Dir: true}, {Path: "etc", Mode: 0o755, Dir: true},
		{Path: "etc/passwd", Mode: 0o644, Content: []byte("root:x:0:0:root:/:/\nnobody:x:65534:65534:nobody:/:/\n")},
		{Path: "etc/group", Mode: 0o644, Content: []byte("root:x:0:\nnogroup:x:65534:\n")},
	}
}

// systemImages are those without which no Pod of the cluster can start.
func systemImages(tools toolset) ([]string, error) {
	pause, err := fileImage(pauseImage, tools, "pause", oci.Config{Entrypoint: []string{"/pause"}, User: "65534:65534"})
	if err != nil {
		return nil, err
	}
	coredns, err := fileImage(coreDNSImage, tools, "coredns", oci.Config{Entrypoint: []string{"/coredns"}})
	if err != nil {
		return nil, err
	}
	return []string{pause, coredns}, nil
}

// loadImages imports archives into the containerd of every node that is on. Another one gets them
// when it is started.
func loadImages(archives ...string) error {
	for _, n := range nodes {
		if !n.onMachine() && !accepts("unix:"+n.containerdSocket()) {
			continue
		}
		for _, archive := range archives {
			if _, err := os.Stat(archive); err != nil {
				return err
			}
			if _, err := n.ctr("images", "import", archive); err != nil {
				return fmt.Errorf("%s: import of %s: %w", n.name(), archive, err)
			}
		}
	}
	return nil
}

// ctr asks the node's containerd about what its kubelet sees.
func (n node) ctr(args ...string) (string, error) {
	return output(5*time.Minute, binDir("ctr"), append([]string{"--address", n.containerdSocket(), "--namespace", "k8s.io"}, args...)...)
}

// imageCopies are the names of images that one containerd has and another lacks, or has with other
// content, of what `ctr images list` prints of both. Names that containerd gives by itself are left
// out.
func imageCopies(have, lacking string) []string {
	digests := func(list string) map[string]string {
		found := map[string]string{}
		for line := range strings.Lines(list) {
			fields := strings.Fields(line)
			if len(fields) > 2 && strings.HasPrefix(fields[2], "sha256:") && !strings.Contains(fields[0], "sha256:") {
				found[fields[0]] = fields[2]
			}
		}
		return found
	}
	old := digests(lacking)
	var names []string
	for name, digest := range digests(have) {
		if old[name] != digest {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names
}

// provideImages copies into the node's containerd the images of node-0 that it lacks, and lets the
// node's kubelet start.
func (n node) provideImages() error {
	if err := n.waitContainerd(); err != nil {
		return err
	}
	if n.onMachine() {
		return nil
	}
	have, err := inner.ctr("images", "list")
	if err != nil {
		return err
	}
	lacking, err := n.ctr("images", "list")
	if err != nil {
		return err
	}
	if names := imageCopies(have, lacking); len(names) > 0 {
		// `ctr images export` has reported success once and left an archive that was cut short.
		err := n.copyImages(names)
		for tries := 1; err != nil && tries < 3; tries++ {
			say("the images are copied again: %v", err)
			err = n.copyImages(names)
		}
		if err != nil {
			return err
		}
		say("copied %d images from %s to %s", len(names), inner.name(), n.name())
	}
	return writeFile(n.imagesMark(), nil, 0o644)
}

// copyImages copies images of node-0 into the node's containerd.
func (n node) copyImages(names []string) error {
	archive := n.state("images.tar")
	defer os.Remove(archive)
	if _, err := inner.ctr(append([]string{"images", "export", archive}, names...)...); err != nil {
		return err
	}
	_, err := n.ctr("images", "import", archive)
	return err
}
