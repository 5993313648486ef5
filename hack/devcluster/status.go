package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
)

func kill(pid int) { syscall.Kill(pid, syscall.SIGKILL) }

// groupNames are the groups that the cluster may have.
func groupNames() []string {
	names := []string{controlPlane, storeGroup}
	for _, n := range nodes {
		names = append(names, n.name())
	}
	return names
}

// clusterGroups returns the groups as they were last started.
func clusterGroups() []group {
	var groups []group
	for _, name := range groupNames() {
		content, err := os.ReadFile(runPath(name, "components.json"))
		var g group
		if err == nil && json.Unmarshal(content, &g) == nil {
			groups = append(groups, g)
		}
	}
	return groups
}

// runningPid returns the id of a component's process, 0 if it does not run.
func (g group) runningPid(name string) int {
	content, err := os.ReadFile(g.pidfile(name))
	if err != nil {
		return 0
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(content)))
	if err != nil || isZombie(pid) {
		return 0
	}
	return pid
}

// failingComponents lists, for an error message, the programs that do not run and the end of their
// logs.
func failingComponents() string {
	var said strings.Builder
	for _, g := range clusterGroups() {
		for _, c := range g.Components {
			if g.runningPid(c.Name) != 0 {
				continue
			}
			fmt.Fprintf(&said, "--- %s/%s does not run; the end of %s:\n%s\n", g.Name, c.Name, g.logfile(c.Name), tailOf(g.logfile(c.Name), 2000))
		}
	}
	if said.Len() == 0 {
		return "All its programs run; `hack/cluster logs` names their logs."
	}
	return said.String()
}

// status prints what runs; its error says that the cluster is not usable.
func status() error {
	record, err := readMachineRecord()
	if err != nil {
		return err
	}
	if record == nil {
		return errors.New("no cluster is there; `hack/cluster up` makes one")
	}
	unwell := false
	for _, g := range clusterGroups() {
		for _, c := range append([]component{{Name: "supervisor"}}, g.Components...) {
			pid := g.runningPid(c.Name)
			state := fmt.Sprintf("running, pid %d", pid)
			if pid == 0 || !superviserRuns(g.Name) {
				state, unwell = "not running", true
			}
			fmt.Printf("%-14s %-26s %s\n", g.Name, c.Name, state)
		}
	}
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	type question struct {
		what  string
		check func(context.Context) error
	}
	checks := []question{{"apiserver", exists("/readyz")}}
	for _, n := range nodes {
		check := hasCondition("/api/v1/nodes/"+n.name(), "Ready")
		if !n.onMachine() && !n.holderRuns() {
			// The apiserver learns it a minute later.
			check = func(context.Context) error {
				_, err := n.holderPid()
				return err
			}
		}
		checks = append(checks, question{n.name(), check})
	}
	for _, c := range checks {
		state := "ready"
		if err := c.check(ctx); err != nil {
			state, unwell = err.Error(), true
		}
		fmt.Printf("%-41s %s\n", c.what, state)
	}
	fmt.Printf("%-41s %s\n", "kubeconfig", adminKubeconfig())
	if unwell {
		return errors.New("the cluster is not well; `hack/cluster up` repairs it, `hack/cluster logs COMPONENT` says more")
	}
	return nil
}

// kubectl becomes kubectl, with the cluster's kubeconfig.
func kubectl(args []string) error {
	if !fileExists(adminKubeconfig()) {
		return errors.New("no cluster is there; `hack/cluster up` makes one")
	}
	environ := slices.DeleteFunc(os.Environ(), func(v string) bool { return strings.HasPrefix(v, "KUBECONFIG=") })
	return syscall.Exec(binDir("kubectl"), append([]string{"kubectl"}, args...), append(environ, "KUBECONFIG="+adminKubeconfig()))
}
