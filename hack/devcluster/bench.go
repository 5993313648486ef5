package main

import (
	"bytes"
	"context"
	_ "embed"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

//go:embed manifests/kwok.yaml
var kwokConfig []byte

// commandPrefix is what comes before a command's name when this program starts itself.
var commandPrefix []string

const (
	// benchNice keeps other work on the machine from being measured; `hack/dev bench claims` gives
	// itself the same.
	benchNice = -15
	// benchNodes are the fake nodes: as many as upstream's own scalability test has.
	benchNodes = 100
	// controllerIdentity is the certificate of the controller that is measured. Its user is that of
	// the ServiceAccount, so that the roles of deploy/base bind, and cost, what they do in a
	// cluster.
	controllerIdentity = "controller"
	controllerUser     = "system:serviceaccount:" + torporNamespace + ":agent-sandbox-controller"
)

// auditPolicy records each write of the controller, with its times and nothing of its content.
const auditPolicy = `apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived, ResponseStarted]
rules:
- {level: Metadata, users: ["` + controllerUser + `"], verbs: [create, update, patch, delete, deletecollection]}
- {level: None}
`

// useBenchLayout moves everything of the benchmark's control plane away from the development
// cluster.
func useBenchLayout() {
	commandPrefix = []string{"bench"}
	stateRoot, runRoot = "/var/lib/torpor-bench", "/run/torpor-bench"
	machineAddress = "127.0.0.1"
	apiserverPort, etcdPort, etcdPeerPort = 17443, 13379, 13380
	controllerManagerPort, schedulerPort = 12257, 12259
	cgroupName = "torpor-bench"
	nodes = nil
}

func benchCommand(args []string) error {
	useBenchLayout()
	if len(args) == 0 {
		return errors.New("bench what? `hack/cluster help` lists it")
	}
	switch args[0] {
	case "up":
		return benchUp()
	case "down":
		return withBenchLock(benchDown)
	case "env":
		return benchEnvironment()
	case "kubectl":
		return kubectl(args[1:])
	case "logs":
		return logsCommand(args[1:])
	case "supervise":
		return supervise(args[1])
	}
	return fmt.Errorf("no such command: bench %s; `hack/cluster help` lists them", args[0])
}

func withBenchLock(work func() error) error {
	cache, err := cacheRoot()
	if err != nil {
		return err
	}
	unlock, err := lockFile(filepath.Join(cache, "bench.lock"), "another `hack/cluster bench up` or `down`")
	if err != nil {
		return err
	}
	defer unlock()
	return work()
}

// benchUp starts a control plane from nothing: a measurement must not depend on what the one before
// it left.
func benchUp() error {
	if err := needRoot("bench up"); err != nil {
		return err
	}
	tools, err := toolsOf([]artifact{artifactNamed("kubernetes"), kwokArtifact}, true)
	if err != nil {
		return err
	}
	return withBenchLock(func() error {
		if err := benchDown(); err != nil {
			return err
		}
		if err := benchStart(tools); err != nil {
			return fmt.Errorf("%w\n%s", err, failingComponents())
		}
		say("the control plane is up: export KUBECONFIG=%s", adminKubeconfig())
		return nil
	})
}

func benchStart(tools toolset) error {
	if err := linkTools(tools); err != nil {
		return err
	}
	if err := writeKeys(); err != nil {
		return err
	}
	if err := ensureCgroup(filepath.Join(cgroupName, "system")); err != nil {
		return err
	}
	if err := writeBench(); err != nil {
		return err
	}
	if err := startGroup(benchGroup()); err != nil {
		return err
	}
	if err := waitFor("apiserver", time.Minute, exists("/readyz")); err != nil {
		return err
	}
	say("the apiserver is ready")
	return benchPopulate()
}

// benchIdentities are those that this control plane has beside the usual ones.
func benchIdentities() []identity {
	return []identity{
		{file: "kwok", name: "kwok", groups: []string{"system:masters"}},
		{file: controllerIdentity, name: controllerUser},
	}
}

func writeBench() error {
	if err := writeControlPlane(); err != nil {
		return err
	}
	ca, err := loadAuthority()
	if err != nil {
		return err
	}
	for _, id := range benchIdentities() {
		if err := ca.issue(id); err != nil {
			return fmt.Errorf("certificate %s: %w", id.file, err)
		}
		if err := writeKubeconfig(statePath(id.file+".kubeconfig"), id.file); err != nil {
			return err
		}
	}
	if err := writeFile(statePath("kwok.yaml"), kwokConfig, 0o644); err != nil {
		return err
	}
	return writeFile(statePath("audit-policy.yaml"), []byte(auditPolicy), 0o644)
}

func auditLog() string { return logPath(controlPlane, "audit") }

// benchGroup is the control plane of the development cluster, with an audit log of the controller's
// writes, and kwok.
func benchGroup() group {
	g := controlPlaneGroup()
	g.Nice = benchNice
	for i, c := range g.Components {
		switch c.Name {
		case "kube-apiserver":
			g.Components[i].Args = append(c.Args, "--audit-policy-file="+statePath("audit-policy.yaml"), "--audit-log-path="+auditLog(), "--audit-log-mode=batch")
		case "kube-controller-manager":
			// The fake nodes tell seldom that they live, so that the machine is left to what is
			// measured.
			g.Components[i].Args = append(c.Args, "--node-monitor-grace-period=20m")
		}
	}
	g.Components = append(g.Components, component{Name: "kwok", After: []string{apiserverAddress()}, Args: []string{
		binDir("kwok"), "--kubeconfig=" + statePath("kwok.kubeconfig"), "--config=" + statePath("kwok.yaml"),
		"--manage-all-nodes=true", "--node-lease-duration-seconds=600", "--node-port=0", "--cidr=10.8.0.1/14",
	}})
	return g
}

// benchPopulate applies what Torpor needs, without its workloads, and the nodes; it returns when
// they are Ready.
func benchPopulate() error {
	all, err := render("deploy/base", nil)
	if err != nil {
		return err
	}
	early := func(m manifest) bool { return m.kind == "CustomResourceDefinition" || m.kind == "Namespace" }
	workload := func(m manifest) bool { return m.kind == "Deployment" || m.kind == "DaemonSet" }
	apply := func(objects []byte) error {
		_, err := kubectlRun(time.Minute, objects, "apply", "--server-side", "--force-conflicts", "-f", "-")
		return err
	}
	base := slices.DeleteFunc(slices.Clone(all), func(m manifest) bool { return !early(m) })
	rest := slices.DeleteFunc(all, func(m manifest) bool { return early(m) || workload(m) })
	if err := apply(joined(base)); err != nil {
		return err
	}
	for _, m := range base {
		if m.kind != "CustomResourceDefinition" {
			continue
		}
		path := "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/" + m.name
		if err := waitFor("CRD "+m.name, 30*time.Second, hasCondition(path, "Established")); err != nil {
			return err
		}
	}
	if err := apply(append(append(joined(rest), "\n---\n"...), fakeNodes()...)); err != nil {
		return err
	}
	return waitFor(fmt.Sprintf("%d fake nodes", benchNodes), time.Minute, fakeNodesReady)
}

func fakeNodes() []byte {
	var text bytes.Buffer
	for i := range benchNodes {
		fmt.Fprintf(&text, "apiVersion: v1\nkind: Node\nmetadata:\n  name: fake-%03d\n  labels: {kubernetes.io/hostname: fake-%03d, kubernetes.io/os: linux, kubernetes.io/arch: amd64}\n---\n", i, i)
	}
	return text.Bytes()
}

func fakeNodesReady(ctx context.Context) error {
	var list struct {
		Items []struct {
			conditioned
			Spec struct {
				Taints []struct{ Key string }
			}
		}
	}
	if err := get(ctx, "/api/v1/nodes", &list); err != nil {
		return err
	}
	ready := 0
	for _, n := range list.Items {
		isReady := slices.ContainsFunc(n.Status.Conditions, func(c condition) bool { return c.Type == "Ready" && c.Status == "True" })
		if isReady && len(n.Spec.Taints) == 0 {
			ready++
		}
	}
	if ready != benchNodes {
		return fmt.Errorf("%d of %d are ready", ready, benchNodes)
	}
	return nil
}

// benchEnvironment prints, as shell assignments, what a load tool has to know of the control plane.
func benchEnvironment() error {
	pids := []string{}
	for _, g := range clusterGroups() {
		for _, c := range g.Components {
			pids = append(pids, fmt.Sprintf("%s=%d", c.Name, g.runningPid(c.Name)))
		}
	}
	_, err := fmt.Printf("export KUBECONFIG=%s CONTROLLER_KUBECONFIG=%s AUDIT_LOG=%s PROCESSES=%s\n",
		adminKubeconfig(), statePath(controllerIdentity+".kubeconfig"), auditLog(), strings.Join(pids, ","))
	return err
}

// benchDown ends the control plane and removes all that it left.
func benchDown() error {
	if err := needRoot("bench down"); err != nil {
		return err
	}
	if err := killAll(nil); err != nil {
		return err
	}
	if err := removeCgroups(cgroupName); err != nil {
		return err
	}
	return errors.Join(os.RemoveAll(runRoot), os.RemoveAll(stateRoot))
}
