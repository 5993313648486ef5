package main

import (
	"encoding/json"
	"strings"
	"testing"
)

func check(t *testing.T, input string) []string {
	t.Helper()
	var m metadata
	if err := json.Unmarshal([]byte(input), &m); err != nil {
		t.Fatal(err)
	}
	return violations(m)
}

func TestADependencyAgainstTheDirectionIsNamedWithBothCrates(t *testing.T) {
	found := check(t, `{"packages":[{"name":"torpor-core","dependencies":[{"name":"torpor-snapshots","kind":null}]}]}`)
	if len(found) != 1 || !strings.Contains(found[0], "torpor-core uses torpor-snapshots") {
		t.Fatalf("got %q", found)
	}
}

func TestTheDirectionsOfTheArchitectureAreAllowed(t *testing.T) {
	found := check(t, `{"packages":[{"name":"torpor-agent","dependencies":[{"name":"torpor-api"},{"name":"torpor-runsc"},{"name":"tokio"}]}]}`)
	if len(found) != 0 {
		t.Fatalf("got %q", found)
	}
}

func TestThePlannerMayNotReachOutsideTheProcessExceptInItsTests(t *testing.T) {
	found := check(t, `{"packages":[{"name":"torpor-core","dependencies":[{"name":"tokio","kind":null},{"name":"nix","kind":"dev"}]}]}`)
	if len(found) != 1 || !strings.Contains(found[0], "tokio") {
		t.Fatalf("got %q", found)
	}
}

func TestACrateWithoutAPlaceIsAnError(t *testing.T) {
	if found := check(t, `{"packages":[{"name":"torpor-new","dependencies":[]}]}`); len(found) != 1 {
		t.Fatalf("got %q", found)
	}
}

func TestTheApiserverOfTheTestsIsForTestsOnly(t *testing.T) {
	found := check(t, `{"packages":[{"name":"torpor-router","dependencies":[{"name":"torpor-test-apiserver","kind":null}]}]}`)
	if len(found) != 1 || !strings.Contains(found[0], "outside of its tests") {
		t.Fatalf("got %q", found)
	}
	found = check(t, `{"packages":[{"name":"torpor-router","dependencies":[{"name":"torpor-test-apiserver","kind":"dev"}]}]}`)
	if len(found) != 0 {
		t.Fatalf("got %q", found)
	}
}
