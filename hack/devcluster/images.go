package main

import (
	"fmt"
	"os"
	"path/filepath"
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

// loadImages imports archives into the containerd of every node.
func loadImages(archives ...string) error {
	for _, n := range nodes {
		for _, archive := range archives {
			if _, err := os.Stat(archive); err != nil {
				return err
			}
			if _, err := output(5*time.Minute, binDir("ctr"), "--address", n.containerdSocket(), "--namespace", "k8s.io", "images", "import", archive); err != nil {
				return fmt.Errorf("%s: import of %s: %w", n.name(), archive, err)
			}
		}
	}
	return nil
}
