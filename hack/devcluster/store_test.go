package main

import (
	"slices"
	"strings"
	"testing"
)

func TestTheStoreIsNoPartOfEveryClusterAndListensAtItsEndpoint(t *testing.T) {
	if slices.ContainsFunc(artifacts, func(a artifact) bool { return a.name == storeArtifact.name }) {
		t.Error("every cluster builds it")
	}
	server := storeComponents().Components[0]
	if !slices.Contains(server.Args, "--port="+strings.TrimPrefix(storeEndpoint(), "http://")) {
		t.Errorf("%q does not listen at %s", server.Args, storeEndpoint())
	}
	if !slices.Contains(groupNames(), storeComponents().Name) {
		t.Error("`down` and `status` do not know it")
	}
}
