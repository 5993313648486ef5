package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestVersionsAndRegistriesAreTakenOrRefused(t *testing.T) {
	for asked, version := range map[string]string{"1.2.3": "1.2.3", "v0.1.0-rc.1": "0.1.0-rc.1"} {
		if got, err := releaseVersion(asked); err != nil || got != version {
			t.Errorf("%s: %q, %v", asked, got, err)
		}
	}
	for _, asked := range []string{"1.2", "latest", "1.2.3+dirty", "../1.2.3", "1.2.3 ; id"} {
		if got, err := releaseVersion(asked); err == nil {
			t.Errorf("%s is taken as %s", asked, got)
		}
	}
	for asked, registry := range map[string]string{"": "torpor.invalid", "registry.example:5000/a/b/": "registry.example:5000/a/b"} {
		if got, err := releaseRegistry(asked); err != nil || got != registry {
			t.Errorf("%s: %q, %v", asked, got, err)
		}
	}
	for _, asked := range []string{"https://registry.example", "Registry.example", "a b", "registry.example/..", "registry.example/|x"} {
		if got, err := releaseRegistry(asked); err == nil {
			t.Errorf("%s is taken as %s", asked, got)
		}
	}
}

func someDigests() map[string]string {
	digests := map[string]string{}
	for i, image := range []string{controllerImage, agentImage, routerImage, runtimeImage} {
		digests[image] = "sha256:" + strings.Repeat(string(rune('a'+i)), 64)
	}
	return digests
}

func TestTheChartsValuesGetRegistryAndDigests(t *testing.T) {
	text, err := os.ReadFile(filepath.Join("../..", chartFolder, "values.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	values, err := valuesByDigest(string(text), "registry.example/torpor", someDigests())
	if err != nil {
		t.Fatal(err)
	}
	for _, words := range []string{"\n  registry: registry.example/torpor\n", "digest: sha256:aaa", "digest: sha256:bbb", "digest: sha256:ccc", "digest: sha256:ddd"} {
		if strings.Count(values, words) != 1 {
			t.Errorf("%q is there %d times", words, strings.Count(values, words))
		}
	}
	if strings.Contains(values, `digest: ""`) {
		t.Error("an image has no digest")
	}
	if _, err := valuesByDigest("image: {}\n", "torpor.invalid", someDigests()); err == nil {
		t.Error("values without a place for a digest are taken")
	}
}

func TestNotesSayHowToPushEachImageUnderItsDigest(t *testing.T) {
	for _, registry := range []string{"torpor.invalid", "registry.example/torpor"} {
		r := &release{version: "1.2.3", registry: registry, digests: someDigests(), notes: []string{"a try"}}
		notes := releaseNotes(r)
		for _, words := range []string{
			"- Note: a try.", "sha256sum --check SHA256SUMS", "--preserve-digests oci-archive:images/agent.tar docker://$REGISTRY/agent:1.2.3",
			"$REGISTRY/runtime@sha256:ddd", "helm install torpor torpor-1.2.3.tgz",
		} {
			if !strings.Contains(notes, words) {
				t.Errorf("%s: no %q in\n%s", registry, words, notes)
			}
		}
		if strings.Contains(notes, "sed -i") != (registry == "torpor.invalid") {
			t.Errorf("%s: who has a registry replaces nothing", registry)
		}
	}
}

func TestSumsNameEveryFileOfTheBundleOnce(t *testing.T) {
	r := &release{folder: t.TempDir()}
	for _, name := range []string{"b", "images/a.tar", "a"} {
		path := filepath.Join(r.folder, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte("x"), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if err := r.writeSums(); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(filepath.Join(r.folder, "SHA256SUMS"))
	if err != nil {
		t.Fatal(err)
	}
	const sum = "2d711642b726b04401627ca9fbac32f5c8530fb1903cc4db02258717921a4881"
	if want := sum + "  a\n" + sum + "  b\n" + sum + "  images/a.tar\n"; string(text) != want {
		t.Errorf("%s", text)
	}
}

func TestBillsDoNotSayWhereTheyWereMade(t *testing.T) {
	got := withoutPlace(`{"bom-ref":"path+file:///home/me/x/sources/api#torpor-api@0.1.0"}`, "/home/me/x/sources")
	if want := `{"bom-ref":"path+file:///torpor/api#torpor-api@0.1.0"}`; got != want {
		t.Errorf("%s", got)
	}
}
