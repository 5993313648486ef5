// Command layers reads `cargo metadata --no-deps` from standard input and checks that the crates of
// the workspace depend on one another only in the direction the architecture allows.
package main

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
)

// allowed lists, for each crate, the crates of the workspace it may use. A crate that is not listed
// is an error.
var allowed = map[string][]string{
	"torpor-api":             {"torpor-test-reference"},
	"torpor-claim-env":       {},
	"torpor-cli":             {"torpor-api", "torpor-test-apiserver", "torpor-test-reference"},
	"torpor-daemon":          {},
	"torpor-controller":      {"torpor-api", "torpor-claim-env", "torpor-daemon", "torpor-repository", "torpor-test-apiserver", "torpor-test-monitoring", "torpor-test-reference"},
	"torpor-router":          {"torpor-api", "torpor-daemon", "torpor-test-apiserver", "torpor-test-monitoring", "torpor-test-reference"},
	"torpor-runtime":         {"torpor-claim-env", "torpor-daemon", "torpor-test-reference"},
	"torpor-core":            {},
	"torpor-inside":          {},
	"torpor-repository":      {},
	"torpor-cgroup":          {},
	"torpor-kata":            {"torpor-core", "torpor-cgroup"},
	"torpor-snapshots":       {"torpor-core"},
	"torpor-records":         {"torpor-core", "torpor-cgroup", "torpor-snapshots"},
	"torpor-messages":        {"torpor-core", "torpor-snapshots", "torpor-records"},
	"torpor-link":            {"torpor-core", "torpor-records", "torpor-test-namespace"},
	"torpor-runsc":           {"torpor-core", "torpor-cgroup", "torpor-snapshots", "torpor-records", "torpor-messages"},
	"torpor-runsc-direct":    {"torpor-link", "torpor-records", "torpor-messages", "torpor-runsc", "torpor-test-namespace"},
	"torpor-sandbox":         {"torpor-claim-env", "torpor-inside", "torpor-core", "torpor-cgroup", "torpor-snapshots", "torpor-records", "torpor-messages", "torpor-link", "torpor-runsc", "torpor-runsc-direct"},
	"torpor-shim":            {"torpor-inside", "torpor-core", "torpor-cgroup", "torpor-snapshots", "torpor-records", "torpor-messages", "torpor-link", "torpor-runsc", "torpor-runsc-direct", "torpor-sandbox"},
	"torpor-agent":           {"torpor-api", "torpor-inside", "torpor-daemon", "torpor-repository", "torpor-core", "torpor-snapshots", "torpor-records", "torpor-messages", "torpor-link", "torpor-runsc", "torpor-runsc-direct", "torpor-cgroup", "torpor-kata", "torpor-test-apiserver", "torpor-test-monitoring", "torpor-test-reference"},
	"torpor-bench":           {"torpor-api", "torpor-repository", "torpor-tests"},
	"torpor-test-apiserver":  {},
	"torpor-test-monitoring": {},
	"torpor-test-namespace":  {},
	"torpor-test-reference":  {},
	"torpor-tests":           {"torpor-api", "torpor-controller", "torpor-core", "torpor-snapshots", "torpor-records", "torpor-messages", "torpor-runsc", "torpor-runsc-direct", "torpor-kata", "torpor-test-monitoring"},
}

// impure are crates that reach outside the process. The planner (torpor-core) decides from values
// only.
var impure = []string{"tokio", "kube", "k8s-openapi", "nix", "rustix", "axum", "tower", "netlink-sys", "rustls"}

type metadata struct {
	Packages []struct {
		Name         string
		Dependencies []struct{ Name, Kind string }
	}
}

// violations returns one sentence for each dependency that the architecture does not allow.
func violations(m metadata) []string {
	var found []string
	for _, p := range m.Packages {
		may, known := allowed[p.Name]
		if !known {
			found = append(found, fmt.Sprintf("%s is not in the table of layers (hack/devcluster/layers/main.go): add it with what it may use", p.Name))
			continue
		}
		for _, d := range p.Dependencies {
			if strings.HasPrefix(d.Name, "torpor-") && !slices.Contains(may, d.Name) {
				found = append(found, fmt.Sprintf("%s uses %s; it may use: %s", p.Name, d.Name, or(strings.Join(may, ", "), "no crate of the workspace")))
			}
			if strings.HasPrefix(d.Name, "torpor-test-") && d.Kind != "dev" {
				found = append(found, fmt.Sprintf("%s uses %s outside of its tests", p.Name, d.Name))
			}
			if p.Name == "torpor-core" && d.Kind != "dev" && slices.Contains(impure, d.Name) {
				found = append(found, fmt.Sprintf("torpor-core uses %s; it is pure and may not reach outside the process", d.Name))
			}
		}
	}
	return found
}

func or(s, otherwise string) string {
	if s == "" {
		return otherwise
	}
	return s
}

func main() {
	input, err := io.ReadAll(os.Stdin)
	var m metadata
	if err == nil {
		err = json.Unmarshal(input, &m)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "layers: cannot read the output of cargo metadata:", err)
		os.Exit(2)
	}
	found := violations(m)
	for _, v := range found {
		fmt.Fprintln(os.Stderr, "layers:", v)
	}
	if len(found) > 0 {
		os.Exit(1)
	}
	fmt.Printf("layers: %d crates depend on one another as they may\n", len(m.Packages))
}
