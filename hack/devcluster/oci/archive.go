// Package oci writes OCI image archives: a tar file that `ctr images import` takes, made without a
// container engine. The same content gives the same bytes.
package oci

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"time"
)

// Config is what the image says about the process to run.
type Config struct {
	Entrypoint []string `json:"Entrypoint,omitempty"`
	Cmd        []string `json:"Cmd,omitempty"`
	Env        []string `json:"Env,omitempty"`
	WorkingDir string   `json:"WorkingDir,omitempty"`
	User       string   `json:"User,omitempty"`
}

// Entry is one file, folder or link of the image's only layer.
type Entry struct {
	Path    string // inside the image, without a leading slash
	Mode    int64  // permission bits
	UID     int
	GID     int
	Source  string // a file on this machine; or
	Content []byte // the content itself; or
	Link    string // the target of a symbolic link; or
	Dir     bool
}

// Image is an image to be written.
type Image struct {
	Name    string // repository:tag
	Config  Config
	Entries []Entry
}

// Write writes the archive to file and returns the digest of its manifest. Parents of the entries
// that are not entries themselves become folders of mode 0755.
func (i Image) Write(file string) (digest string, err error) {
	layer, err := os.CreateTemp(filepath.Dir(file), ".layer-*")
	if err != nil {
		return "", err
	}
	defer os.Remove(layer.Name())
	defer layer.Close()
	hash := sha256.New()
	if err := writeLayer(io.MultiWriter(layer, hash), i.Entries); err != nil {
		return "", err
	}
	size, err := layer.Seek(0, io.SeekCurrent)
	if err != nil {
		return "", err
	}
	layerDigest := "sha256:" + hex.EncodeToString(hash.Sum(nil))
	config := mustJSON(map[string]any{
		"architecture": runtime.GOARCH, "os": "linux", "config": i.Config,
		"rootfs": map[string]any{"type": "layers", "diff_ids": []string{layerDigest}},
	})
	const vendor = "application/vnd.oci.image."
	manifest := mustJSON(map[string]any{
		"schemaVersion": 2, "mediaType": vendor + "manifest.v1+json",
		"config": descriptor(vendor+"config.v1+json", config),
		"layers": []any{map[string]any{"mediaType": vendor + "layer.v1.tar", "digest": layerDigest, "size": size}},
	})
	top := descriptor(vendor+"manifest.v1+json", manifest)
	top["annotations"] = map[string]string{"io.containerd.image.name": i.Name, "org.opencontainers.image.ref.name": i.Name}
	index := mustJSON(map[string]any{"schemaVersion": 2, "mediaType": vendor + "index.v1+json", "manifests": []any{top}})

	out, err := os.CreateTemp(filepath.Dir(file), ".image-*")
	if err != nil {
		return "", err
	}
	defer os.Remove(out.Name())
	defer out.Close()
	w := tar.NewWriter(out)
	for _, blob := range []struct {
		name    string
		content []byte
	}{{"oci-layout", []byte(`{"imageLayoutVersion":"1.0.0"}`)}, {"index.json", index}, {blobName(digestOf(manifest)), manifest}, {blobName(digestOf(config)), config}} {
		if err := writeFile(w, blob.name, int64(len(blob.content)), bytes.NewReader(blob.content)); err != nil {
			return "", err
		}
	}
	if _, err := layer.Seek(0, io.SeekStart); err != nil {
		return "", err
	}
	if err := writeFile(w, blobName(layerDigest), size, layer); err != nil {
		return "", err
	}
	if err := w.Close(); err != nil {
		return "", err
	}
	if err := out.Chmod(0o644); err != nil {
		return "", err
	}
	return digestOf(manifest), os.Rename(out.Name(), file)
}

func blobName(digest string) string { return "blobs/" + strings.Replace(digest, ":", "/", 1) }

func writeFile(w *tar.Writer, name string, size int64, content io.Reader) error {
	if err := w.WriteHeader(&tar.Header{Name: name, Size: size, Mode: 0o644, Typeflag: tar.TypeReg, ModTime: epoch}); err != nil {
		return err
	}
	_, err := io.Copy(w, content)
	return err
}

// epoch is the time of every file, so that the bytes do not depend on when they were written.
var epoch = time.Unix(0, 0)

func writeLayer(out io.Writer, entries []Entry) error {
	w := tar.NewWriter(out)
	entries = slices.Clone(entries)
	slices.SortStableFunc(entries, func(a, b Entry) int { return strings.Compare(a.Path, b.Path) })
	written := map[string]bool{".": true, "": true}
	for _, e := range entries {
		e.Path = strings.Trim(path.Clean("/"+e.Path), "/")
		if written[e.Path] {
			continue // an entry given twice, or the root
		}
		if err := writeParents(w, written, e.Path); err != nil {
			return err
		}
		written[e.Path] = true
		if err := e.write(w); err != nil {
			return fmt.Errorf("%s: %w", e.Path, err)
		}
	}
	return w.Close()
}

func writeParents(w *tar.Writer, written map[string]bool, name string) error {
	parent := path.Dir(name)
	if written[parent] {
		return nil
	}
	if err := writeParents(w, written, parent); err != nil {
		return err
	}
	written[parent] = true
	return w.WriteHeader(&tar.Header{Name: parent + "/", Mode: 0o755, Typeflag: tar.TypeDir, ModTime: epoch})
}

func (e Entry) write(w *tar.Writer) error {
	header := tar.Header{Name: e.Path, Mode: e.Mode, Uid: e.UID, Gid: e.GID, ModTime: epoch, Typeflag: tar.TypeReg}
	switch {
	case e.Dir:
		header.Typeflag, header.Name = tar.TypeDir, e.Path+"/"
		return w.WriteHeader(&header)
	case e.Link != "":
		header.Typeflag, header.Linkname, header.Mode = tar.TypeSymlink, e.Link, 0o777
		return w.WriteHeader(&header)
	case e.Source == "":
		header.Size = int64(len(e.Content))
		if err := w.WriteHeader(&header); err != nil {
			return err
		}
		_, err := w.Write(e.Content)
		return err
	}
	f, err := os.Open(e.Source)
	if err != nil {
		return err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return err
	}
	header.Size = info.Size()
	if err := w.WriteHeader(&header); err != nil {
		return err
	}
	_, err = io.Copy(w, f)
	return err
}

func digestOf(content []byte) string {
	sum := sha256.Sum256(content)
	return "sha256:" + hex.EncodeToString(sum[:])
}

func descriptor(mediaType string, content []byte) map[string]any {
	return map[string]any{"mediaType": mediaType, "digest": digestOf(content), "size": len(content)}
}

func mustJSON(v any) []byte {
	content, err := json.Marshal(v)
	if err != nil {
		panic(err) // only maps, strings and numbers get here
	}
	return content
}
