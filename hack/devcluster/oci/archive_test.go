package oci

import (
	"archive/tar"
	"bytes"
	"encoding/json"
	"io"
	"os"
	"path/filepath"
	"slices"
	"testing"
)

func sample(t *testing.T) Image {
	t.Helper()
	file := filepath.Join(t.TempDir(), "program")
	if err := os.WriteFile(file, []byte("program"), 0o755); err != nil {
		t.Fatal(err)
	}
	return Image{
		Name:   "torpor.dev/sample:dev",
		Config: Config{Entrypoint: []string{"/bin/program"}},
		Entries: []Entry{
			{Path: "bin/program", Mode: 0o755, Source: file},
			{Path: "/bin/name", Link: "program"},
			{Path: "tmp", Mode: 0o1777, Dir: true},
			{Path: "tmp", Mode: 0o755, Dir: true},
		},
	}
}

func readTar(t *testing.T, r io.Reader) (names []string, contents map[string][]byte) {
	t.Helper()
	contents = map[string][]byte{}
	reader := tar.NewReader(r)
	for {
		header, err := reader.Next()
		if err == io.EOF {
			return names, contents
		}
		if err != nil {
			t.Fatal(err)
		}
		content, err := io.ReadAll(reader)
		if err != nil {
			t.Fatal(err)
		}
		names = append(names, header.Name)
		contents[header.Name] = content
	}
}

func TestTheSameContentGivesTheSameBytes(t *testing.T) {
	first, second := filepath.Join(t.TempDir(), "a.tar"), filepath.Join(t.TempDir(), "b.tar")
	image := sample(t)
	if _, err := image.Write(first); err != nil {
		t.Fatal(err)
	}
	slices.Reverse(image.Entries[:2])
	if _, err := image.Write(second); err != nil {
		t.Fatal(err)
	}
	a, _ := os.ReadFile(first)
	b, _ := os.ReadFile(second)
	if !bytes.Equal(a, b) {
		t.Fatal("two archives of the same content differ")
	}
}

func TestTheArchiveNamesTheImageAndHoldsEveryBlobUnderItsDigest(t *testing.T) {
	file := filepath.Join(t.TempDir(), "image.tar")
	digest, err := sample(t).Write(file)
	if err != nil {
		t.Fatal(err)
	}
	content, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	_, blobs := readTar(t, bytes.NewReader(content))
	var index struct {
		Manifests []struct {
			Digest      string
			Annotations map[string]string
		}
	}
	if err := json.Unmarshal(blobs["index.json"], &index); err != nil {
		t.Fatal(err)
	}
	if index.Manifests[0].Digest != digest || index.Manifests[0].Annotations["io.containerd.image.name"] != "torpor.dev/sample:dev" {
		t.Fatalf("index %+v, digest %s", index, digest)
	}
	for name, blob := range blobs {
		if filepath.Dir(name) == "blobs/sha256" && blobName(digestOf(blob)) != name {
			t.Errorf("%s holds %s", name, digestOf(blob))
		}
	}
	var manifest struct {
		Layers []struct {
			Digest string
			Size   int
		}
	}
	if err := json.Unmarshal(blobs[blobName(digest)], &manifest); err != nil {
		t.Fatal(err)
	}
	layer := blobs[blobName(manifest.Layers[0].Digest)]
	if len(layer) != manifest.Layers[0].Size {
		t.Fatalf("the layer has %d bytes, the manifest says %d", len(layer), manifest.Layers[0].Size)
	}
	names, _ := readTar(t, bytes.NewReader(layer))
	if want := []string{"bin/", "bin/name", "bin/program", "tmp/"}; !slices.Equal(names, want) {
		t.Fatalf("layer holds %q, want %q", names, want)
	}
}
