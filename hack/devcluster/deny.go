package main

import (
	"fmt"
	"os"
	"strings"
	"time"
)

// denyArtifact checks the crates that Torpor depends on (deny.toml). Not optimised: it is built in
// two minutes and runs for four seconds.
var denyArtifact = artifact{name: "cargo-deny", about: "2 min", crate: "cargo-deny@0.20.2", files: []string{"cargo-deny"}}

// deny runs checks of cargo-deny, whose words say what is wrong and where.
func deny(checks ...string) error {
	tools, err := toolsOf([]artifact{denyArtifact}, true)
	if err != nil {
		return err
	}
	args := append([]string{"--locked", "check", "--hide-inclusion-graph"}, checks...)
	if err := runLoudly(os.Environ(), tools["cargo-deny"], args...); err != nil {
		return fmt.Errorf("deny.toml does not allow what Cargo.lock has (%s; see above): %w", strings.Join(checks, ", "), err)
	}
	return nil
}

// denyAdvisories looks for known vulnerabilities. Where RustSec's database cannot be fetched it
// says so, and nothing was checked.
func denyAdvisories() (checked bool, err error) {
	tools, err := toolsOf([]artifact{denyArtifact}, true)
	if err != nil {
		return false, err
	}
	if _, err := outputIn(2*time.Minute, repoRoot, nil, nil, tools["cargo-deny"], "--locked", "fetch", "db"); err != nil {
		say("known vulnerabilities are not checked: RustSec's database cannot be fetched from here (%s)", firstLine(err.Error()))
		return false, nil
	}
	return true, deny("advisories")
}

func firstLine(text string) string {
	line, _, _ := strings.Cut(strings.TrimSpace(text), "\n")
	return line
}

// denyCommand checks what hack/test.sh checks; with --advisories known vulnerabilities too, which
// then must be possible.
func denyCommand(args []string) error {
	if len(args) > 1 || len(args) == 1 && args[0] != "--advisories" {
		return fmt.Errorf("%q: the only option is --advisories", args)
	}
	if err := deny("licenses", "bans", "sources"); err != nil || len(args) == 0 {
		return err
	}
	checked, err := denyAdvisories()
	if err == nil && !checked {
		err = fmt.Errorf("known vulnerabilities could not be checked (see above)")
	}
	return err
}
