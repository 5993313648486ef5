package main

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// A user who applies the manifests without a registry must not pull a stranger's images.
func TestManifestsNameNoExistingRegistry(t *testing.T) {
	named := regexp.MustCompile(`(?m)(?:^\s*(?:- )?image:|--runtime-image=)\s*(\S+)`)
	found := 0
	err := filepath.WalkDir("../../deploy", func(path string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if entry.IsDir() {
			if name := entry.Name(); name == "helm" || name == "crds" {
				return filepath.SkipDir
			}
			return nil
		}
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		for _, match := range named.FindAllStringSubmatch(string(text), -1) {
			found++
			if image := match[1]; image != unsetImage(strings.TrimSuffix(image, ":unset")) {
				t.Errorf("%s: %s", path, image)
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if found < 6 {
		t.Errorf("only %d images are found: is the pattern right?", found)
	}
}

func TestObjectsOfBothToolsAreTakenApartAlike(t *testing.T) {
	const object = "apiVersion: v1\nkind: Service\nmetadata:\n  labels:\n    app: a\n  name: s\n  namespace: n\nspec: {}"
	for origin, text := range map[string]string{
		"kustomize": object + "\n---\n" + object + "\n",
		"helm":      "---\n# Source: torpor/templates/x.yaml\n" + object + "\n---\n# Source: torpor/templates/y.yaml\n" + object + "\n",
	} {
		all, err := parseManifests(origin, text)
		if err != nil {
			t.Fatal(err)
		}
		if len(all) != 2 {
			t.Fatalf("%s: %d objects", origin, len(all))
		}
		for _, m := range all {
			if m.kind != "Service" || m.namespace != "n" || m.name != "s" {
				t.Errorf("%s: %+v", origin, m)
			}
		}
	}
	if _, err := parseManifests("x", "kind: Service\n"); err == nil {
		t.Error("an object without a name is taken")
	}
}

func TestDifferencesAreToldByObjectAndLine(t *testing.T) {
	meant := map[string]string{"A": "x: 1\ny: 2", "B": "z: 3", "C": "same"}
	said := map[string]string{"A": "x: 1\ny: 4", "D": "w: 5", "C": "same"}
	told := compare(meant, said)
	for _, words := range []string{"A:\n-y: 2\n+y: 4\n", "B: missing in the chart\n", "D: only in the chart\n"} {
		if !strings.Contains(told, words) {
			t.Errorf("no %q in\n%s", words, told)
		}
	}
	if compare(meant, meant) != "" {
		t.Error("a set differs from itself")
	}
	if told := compare(map[string]string{"A": "x\ny"}, map[string]string{"A": "y\nx"}); told == "" {
		t.Error("another order is not told")
	}
}
