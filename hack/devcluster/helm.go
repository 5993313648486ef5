package main

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"
)

const (
	chartFolder    = "deploy/helm"
	devValues      = "hack/overlays/dev/values.yaml"
	devImageValues = "hack/overlays/dev/images.yaml"
	helmRelease    = "torpor"
	crdsFolder     = "deploy/crds"
	uninstallJobs  = "templates/uninstall.yaml"
)

// helmProgram returns helm, built first if it is missing.
var helmProgram = sync.OnceValues(func() (string, error) {
	tools, err := toolsOf([]artifact{helmArtifact}, true)
	return tools["helm"], err
})

// helmEnvironment keeps helm out of the folders of another helm of this machine.
func helmEnvironment() (environ []string, err error) {
	cache, err := cacheRoot()
	if err != nil {
		return nil, err
	}
	for _, folder := range []string{"CACHE", "CONFIG", "DATA"} {
		environ = append(environ, "HELM_"+folder+"_HOME="+filepath.Join(cache, "helm", strings.ToLower(folder)))
	}
	return append(environ, "KUBECONFIG="+adminKubeconfig()), nil
}

func helmCommand(args []string) error {
	helm, err := helmProgram()
	if err != nil {
		return err
	}
	environ, err := helmEnvironment()
	if err != nil {
		return err
	}
	return syscall.Exec(helm, append([]string{"helm"}, args...), append(os.Environ(), environ...))
}

// runHelm returns what helm prints. Its warnings about the chart's links to the kustomize base go
// to standard error and are left there.
func runHelm(limit time.Duration, args ...string) (string, error) {
	helm, err := helmProgram()
	if err != nil {
		return "", err
	}
	environ, err := helmEnvironment()
	if err != nil {
		return "", err
	}
	return outputIn(limit, repoRoot, environ, nil, helm, args...)
}

func torporCommand(command string, args []string) error {
	flags := flag.NewFlagSet(command, flag.ContinueOnError)
	byHelm := flags.Bool("helm", false, "by the chart "+chartFolder)
	if err := flags.Parse(args); err != nil {
		return flag.ErrHelp
	}
	switch {
	case command == "install-torpor" && *byHelm:
		return installByHelm()
	case command == "install-torpor":
		return installTorpor()
	case *byHelm:
		return uninstallByHelm()
	}
	return uninstallTorpor()
}

// installByHelm builds what changed, installs or upgrades the release, and returns when all of it
// runs.
func installByHelm() error {
	if !fileExists(adminKubeconfig()) {
		return errors.New("no cluster is there; run `hack/cluster up` first")
	}
	images, err := buildTorpor()
	if err != nil {
		return err
	}
	args := []string{
		"upgrade", "--install", helmRelease, chartFolder, "--values", devImageValues, "--values", devValues,
		"--namespace", torporNamespace, "--create-namespace", "--wait", "--timeout", "3m",
	}
	for repository, reference := range images {
		value := filepath.Base(repository) + ".image.tag"
		if repository == controllerImage {
			value = "image.tag"
		}
		args = append(args, "--set-string", value+"="+strings.TrimPrefix(reference, repository+":"))
	}
	if _, err := runHelm(4*time.Minute, args...); err != nil {
		return fmt.Errorf("%w\n%s", err, explainPods())
	}
	// Helm is content with a DaemonSet of which as many Pods are missing as may be during an
	// update: on one node that is all.
	text, err := runHelm(time.Minute, "get", "manifest", helmRelease, "--namespace", torporNamespace)
	if err != nil {
		return err
	}
	installed, err := parseManifests("release "+helmRelease, text)
	if err != nil {
		return err
	}
	for _, m := range installed {
		if err := waitRollout(m); err != nil {
			return fmt.Errorf("%w\n%s", err, explainPods())
		}
	}
	say("Torpor runs (release %s)", helmRelease)
	return nil
}

// uninstallByHelm takes the release away, then the nodes' own files by the chart's Jobs, then what
// helm leaves: the CRDs and the namespace.
func uninstallByHelm() error {
	agent, err := installedAgent()
	if err != nil {
		return err
	}
	if _, err := runHelm(3*time.Minute, "uninstall", helmRelease, "--namespace", torporNamespace, "--wait", "--ignore-not-found"); err != nil {
		return err
	}
	if agent != "" {
		text, err := runHelm(time.Minute, "template", helmRelease, chartFolder, "--values", devImageValues, "--values", devValues, "--namespace", torporNamespace,
			"--set-string", "agent.image.tag="+strings.TrimPrefix(agent, agentImage+":"),
			"--set", "uninstall.nodes={"+nodeNames()+"}", "--show-only", uninstallJobs)
		if err != nil {
			return err
		}
		jobs, err := parseManifests(uninstallJobs, text)
		if err != nil {
			return err
		}
		if err := runUninstallJobs(jobs); err != nil {
			return err
		}
	}
	if _, err := kubectlRun(time.Minute, nil, "delete", "namespace", torporNamespace, "--ignore-not-found", "--timeout=60s"); err != nil {
		return err
	}
	if _, err := kubectlRun(2*time.Minute, nil, "delete", "-k", filepath.Join(repoRoot, crdsFolder), "--ignore-not-found", "--timeout=120s"); err != nil {
		return err
	}
	say("Torpor is gone from the cluster")
	return nil
}

func nodeNames() string {
	names := make([]string, len(nodes))
	for i, n := range nodes {
		names[i] = n.name()
	}
	return strings.Join(names, ",")
}

const someDigest = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"

// chartCases are values for which the chart must say exactly what a kustomization says. REPO is the
// path to the repository.
var chartCases = []struct {
	name          string
	kustomization string
	helm          []string
}{
	{
		name:          "default values",
		kustomization: "resources: [REPO/deploy]",
		helm:          []string{"--set", "image.tag=dev"},
	},
	{
		name:          "development cluster",
		kustomization: "resources: [REPO/hack/overlays/dev]",
		helm:          []string{"--values", devValues},
	},
	{
		name:          "router.authzMode tokenreview",
		kustomization: "resources: [REPO/deploy]\ncomponents: [REPO/deploy/router/tokenreview]",
		helm:          []string{"--set", "image.tag=dev,router.authzMode=tokenreview"},
	},
	{
		name:          "router.authzMode scoped-token",
		kustomization: "resources: [REPO/deploy]\ncomponents: [REPO/deploy/router/scoped-token]",
		helm: []string{
			"--set", "image.tag=dev,router.authzMode=scoped-token",
			"--set-json", `router.extraArgs=["--authz-scoped-token-verification-keys-file=/var/run/secrets/sandbox-router/scoped-token/verification-keys.json"]`,
			"--set-json", `router.volumeMounts=[{"name":"scoped-token-verification-keys","mountPath":"/var/run/secrets/sandbox-router/scoped-token","readOnly":true}]`,
			"--set-json", `router.volumes=[{"name":"scoped-token-verification-keys","configMap":{"name":"sandbox-router-scoped-token-keys-v1","items":[{"key":"verification-keys.json","path":"verification-keys.json"}]}}]`,
		},
	},
	{
		name: "router's secrets",
		kustomization: `resources: [REPO/deploy]
patches:
- target: {kind: Deployment, name: sandbox-router}
  patch: |
    - {op: replace, path: /spec/template/spec/containers/0/args/0, value: --authz-mode=scoped-token}
    - {op: add, path: /spec/template/spec/containers/0/env, value: [{name: ROUTER_AUTH_TOKEN, valueFrom: {secretKeyRef: {name: s, key: token}}}]}
    - {op: add, path: /spec/template/spec/containers/0/volumeMounts, value: [{name: s, mountPath: /s, readOnly: true}]}
    - {op: add, path: /spec/template/spec/volumes, value: [{name: s, secret: {secretName: s}}]}
`,
		helm: []string{
			"--set", "image.tag=dev,router.authzMode=scoped-token",
			"--set-json", `router.env=[{"name":"ROUTER_AUTH_TOKEN","valueFrom":{"secretKeyRef":{"name":"s","key":"token"}}}]`,
			"--set-json", `router.volumeMounts=[{"name":"s","mountPath":"/s","readOnly":true}]`,
			"--set-json", `router.volumes=[{"name":"s","secret":{"secretName":"s"}}]`,
		},
	},
	{
		name:          "controller.watchNamespaces",
		kustomization: "resources: [REPO/deploy]\ncomponents: [REPO/deploy/namespaced]",
		helm:          []string{"--set", "image.tag=dev,controller.watchNamespaces={sandboxes}"},
	},
	{
		name: "controller.watchNamespaces without any ClusterRole",
		kustomization: `resources: [REPO/deploy]
components: [REPO/deploy/namespaced]
patches:
- target: {kind: ClusterRole|ClusterRoleBinding, name: agent-sandbox-controller}
  patch: '{$patch: delete, apiVersion: rbac.authorization.k8s.io/v1, kind: any, metadata: {name: any}}'
`,
		helm: []string{"--set", "image.tag=dev,controller.watchNamespaces={sandboxes},rbac.clusterReader=false"},
	},
	{
		name: "admissionPolicies off",
		kustomization: `resources: [REPO/deploy]
patches:
- target: {kind: ValidatingAdmissionPolicy}
  patch: '{$patch: delete, apiVersion: admissionregistration.k8s.io/v1, kind: ValidatingAdmissionPolicy, metadata: {name: any}}'
- target: {kind: ValidatingAdmissionPolicyBinding}
  patch: '{$patch: delete, apiVersion: admissionregistration.k8s.io/v1, kind: ValidatingAdmissionPolicyBinding, metadata: {name: any}}'
`,
		helm: []string{"--set", "image.tag=dev,admissionPolicies.enabled=false"},
	},
	{
		name:          "monitoring",
		kustomization: "resources: [REPO/deploy, REPO/deploy/monitoring]",
		helm:          []string{"--set", "image.tag=dev,metrics.podMonitor.enabled=true,metrics.prometheusRule.enabled=true,metrics.dashboard.enabled=true"},
	},
	{
		name:          "kms",
		kustomization: "resources: [REPO/deploy]\ncomponents: [REPO/deploy/kms]",
		helm:          []string{"--set", "image.tag=dev,kms.enabled=true"},
	},
	{
		name:          "networkPolicy",
		kustomization: "resources: [REPO/deploy]\ncomponents: [REPO/deploy/networkpolicy]",
		helm:          []string{"--set", "image.tag=dev,networkPolicy.enabled=true"},
	},
	{
		name: "networkPolicy.scrapers, without the router",
		kustomization: `resources: [REPO/deploy/base]
components: [REPO/deploy/networkpolicy]
patches:
- target: {kind: NetworkPolicy}
  patch: '- {op: replace, path: /spec/ingress/0/from, value: [{ipBlock: {cidr: 192.0.2.0/24}}]}'
- target: {kind: NetworkPolicy, name: sandbox-router}
  patch: '{$patch: delete, apiVersion: networking.k8s.io/v1, kind: NetworkPolicy, metadata: {name: sandbox-router}}'
`,
		helm: []string{"--set", "image.tag=dev,networkPolicy.enabled=true,networkPolicy.scrapers[0].ipBlock.cidr=192.0.2.0/24,router.enabled=false"},
	},
	{
		name: "networkPolicy without scrapers",
		kustomization: `resources: [REPO/deploy]
components: [REPO/deploy/networkpolicy]
patches:
- target: {kind: NetworkPolicy}
  patch: '- {op: remove, path: /spec/ingress/0}'
`,
		helm: []string{"--set", "image.tag=dev,networkPolicy.enabled=true", "--set-json", "networkPolicy.scrapers=[]"},
	},
	{
		name: "uninstall Job",
		kustomization: `resources: [REPO/hack/overlays/dev-uninstall]
nameSuffix: -node-0
patches:
- target: {kind: Job}
  patch: '- {op: add, path: /spec/template/spec/nodeName, value: node-0}'
`,
		helm: []string{"--values", devValues, "--set", "uninstall.nodes={node-0}", "--show-only", uninstallJobs},
	},
	{
		name: "uninstall Job of a node whose name is too long for a Job's",
		kustomization: `resources: [REPO/deploy/uninstall]
patches:
- target: {kind: Job}
  patch: |
    - {op: replace, path: /metadata/name, value: torpor-uninstall-ip-192-168-100-100.ap-southeast-1.c-57bcf37831}
    - {op: add, path: /spec/template/spec/nodeName, value: ip-192-168-100-100.ap-southeast-1.compute.internal}
  options: {allowNameChange: true}
`,
		helm: []string{"--set", "image.tag=dev,uninstall.nodes={ip-192-168-100-100.ap-southeast-1.compute.internal}", "--show-only", uninstallJobs},
	},
	{
		name: "images by digest in one registry",
		kustomization: `resources: [REPO/deploy/base]
images:
- {name: torpor.invalid/controller, newName: registry.example/torpor/controller, digest: "sha256:` + someDigest + `"}
- {name: torpor.invalid/agent, newName: registry.example/torpor/agent, digest: "sha256:` + someDigest + `"}
patches:
- target: {kind: Deployment}
  patch: '- {op: replace, path: /spec/template/spec/containers/0/args/2, value: "--runtime-image=registry.example/torpor/runtime:v3"}'
`,
		helm: []string{
			"--set", "image.registry=registry.example/torpor,image.repository=torpor.invalid/controller,agent.image.repository=torpor.invalid/agent",
			"--set", "runtime.image.repository=torpor.invalid/runtime,runtime.image.tag=v3,router.enabled=false",
			"--set", "image.digest=sha256:" + someDigest + ",agent.image.digest=sha256:" + someDigest,
		},
	},
	{
		name: "values",
		kustomization: `resources: [REPO/deploy/base]
namespace: elsewhere
images:
- {name: torpor.invalid/controller, newName: registry.example/c, newTag: v1}
- {name: torpor.invalid/agent, newName: torpor.dev/agent, newTag: v2}
patches:
- target: {kind: Deployment}
  patch: |
    - {op: replace, path: /spec/replicas, value: 3}
    - {op: replace, path: /spec/template/spec/containers/0/args/0, value: --leader-elect=false}
    - {op: replace, path: /spec/template/spec/containers/0/args/2, value: "--runtime-image=registry.example/r:v3"}
    - {op: add, path: /spec/template/spec/containers/0/args/-, value: --kube-api-qps=1.5}
    - {op: add, path: /spec/template/spec/containers/0/args/-, value: --pprof-block-profile-rate=1000000}
    - {op: add, path: /spec/template/spec/containers/0/args/-, value: --log-format=json}
    - {op: add, path: /spec/template/spec/containers/0/env, value: [{name: OTEL_EXPORTER_OTLP_ENDPOINT, value: "http://otel:4317"}]}
    - {op: add, path: /spec/template/metadata/annotations, value: {scrape: "yes"}}
    - {op: add, path: /spec/template/metadata/labels/team, value: us}
    - {op: replace, path: /spec/template/spec/containers/0/imagePullPolicy, value: Always}
- target: {kind: DaemonSet}
  patch: |
    - {op: replace, path: /spec/template/spec/nodeSelector, value: {pool: sandboxes}}
    - {op: replace, path: /spec/template/spec/containers/0/imagePullPolicy, value: Always}
- target: {kind: DaemonSet, name: torpor-agent}
  patch: |
    - {op: add, path: /spec/template/spec/containers/0/args/-, value: --save-bandwidth=200Mi}
    - {op: replace, path: /spec/template/spec/containers/0/resources, value: {limits: {memory: 1Gi}}}
- target: {kind: DaemonSet, name: torpor-installer}
  patch: |
    - {op: add, path: /spec/template/spec/initContainers/0/args/-, value: --kubelet-port=10251}
    - {op: replace, path: /spec/template/spec/initContainers/0/imagePullPolicy, value: Always}
- target: {kind: Deployment|DaemonSet}
  patch: '- {op: add, path: /spec/template/spec/imagePullSecrets, value: [{name: key}]}'
- target: {kind: Service}
  patch: '- {op: replace, path: /metadata/name, value: metrics}'
  options: {allowNameChange: true}
`,
		helm: []string{
			"--set", "namespace.name=elsewhere,router.enabled=false,replicaCount=3,service.name=metrics",
			"--set", "image.repository=registry.example/c,image.tag=v1,agent.image.tag=v2,runtime.image.repository=registry.example/r,runtime.image.tag=v3,image.pullPolicy=Always,imagePullSecrets[0].name=key",
			"--set", "controller.leaderElect=false,controller.kubeApiQps=1.5,controller.pprofBlockProfileRate=1000000,controller.extraArgs={--log-format=json}",
			"--set-json", `controller.env=[{"name":"OTEL_EXPORTER_OTLP_ENDPOINT","value":"http://otel:4317"}]`,
			"--set", "podAnnotations.scrape=yes,podLabels.team=us,podLabels.app=hijacked,agent.nodeSelector.pool=sandboxes,agent.saveBandwidth=200Mi,agent.resources.limits.memory=1Gi,agent.installArgs={--kubelet-port=10251}",
		},
	},
}

// chartRefusals are values that the chart must refuse, and words that it must say.
var chartRefusals = []struct{ values, words string }{
	{"replicaCount=1", "image.registry is missing"},
	{"image.registry=registry.example", "image.digest is missing"},
	{"image.registry=registry.example,image.digest=sha256:" + someDigest, "agent.image.digest is missing"},
	{"image.registry=registry.example,image.digest=latest", "digest"},
	{"image.tag=v1,controler.extensions=true", "controler"},
	{"image.tag=v1,controller.sandboxConcurentWorkers=5", "sandboxConcurentWorkers"},
	{"image.tag=v1,controller.sandboxConcurrentWorkers=many", "sandboxConcurrentWorkers"},
	{"image.tag=v1,controller.sandboxConcurrentWorkers=0", "sandboxConcurrentWorkers"},
	{"image.tag=v1,controller.sandboxWarmPoolReadinessGracePeriod=5 minutes", "sandboxWarmPoolReadinessGracePeriod"},
	{"image.tag=v1,controller.watchNamespaces={Not_A_Name}", "watchNamespaces"},
	{"image.tag=v1,image.pullPolicy=Sometimes", "pullPolicy"},
	{"image.tag=v1,namespace.name=Not_A_Name", "namespace"},
	{"image.tag=v1,agent.installArgs={containerd-config}", "installArgs"},
	{"image.tag=v1,agent.saveBandwidth=200 MB", "saveBandwidth"},
	{"image.tag=v1,router.authzMode=none", "authzMode"},
	{"image.tag=v1,agent.storeReserve=100", "storeReserve"},
	{"image.tag=v1,agent.storePerNamespace=120%", "storePerNamespace"},
	{"image.tag=v1,networkPolicy.scrapers[0].namespace=monitoring", "scrapers"},
}

// checkChart renders the chart and the kustomize base for several values and compares the objects.
func checkChart() error {
	// kubectl is in it; nothing else of the cluster is needed.
	kubernetes := slices.IndexFunc(artifacts, func(a artifact) bool { return a.name == "kubernetes" })
	tools, err := toolsOf(artifacts[kubernetes:kubernetes+1], true)
	if err != nil {
		return err
	}
	if _, err := runHelm(time.Minute, "lint", "--strict", chartFolder, "--values", devImageValues); err != nil {
		return err
	}
	for _, c := range chartCases {
		args := append([]string{"template", helmRelease, chartFolder, "--namespace", torporNamespace, "--include-crds", "--values", devImageValues}, c.helm...)
		chart, err := runHelm(time.Minute, args...)
		if err != nil {
			return fmt.Errorf("%s: %w", c.name, err)
		}
		said, err := kustomized(tools["kubectl"], "resources: [chart.yaml]", chart)
		if err != nil {
			return fmt.Errorf("%s: the chart: %w", c.name, err)
		}
		meant, err := kustomized(tools["kubectl"], c.kustomization, "")
		if err != nil {
			return fmt.Errorf("%s: kustomize: %w", c.name, err)
		}
		if differences := compare(meant, said); differences != "" {
			return fmt.Errorf("%s: the chart does not say what the kustomize base says:\n%s", c.name, differences)
		}
		say("chart, %s: %d objects as by kustomize", c.name, len(said))
	}
	for _, c := range chartRefusals {
		_, err := runHelm(time.Minute, "template", helmRelease, chartFolder, "--set", c.values)
		if err == nil || !strings.Contains(err.Error(), c.words) {
			return fmt.Errorf("values %s: the chart must refuse them and name %q; it says: %v", c.values, c.words, err)
		}
	}
	say("chart: %d wrong values are refused in words", len(chartRefusals))
	return nil
}

// kustomized renders a kustomization beside which lies chart.yaml, as objects by kind, namespace
// and name. Namespaces are left out: the chart leaves the release's to helm.
func kustomized(kubectl, kustomization, chart string) (map[string]string, error) {
	folder, err := os.MkdirTemp("", "torpor-chart-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(folder)
	root, err := filepath.Rel(folder, repoRoot)
	if err != nil {
		return nil, err
	}
	for name, text := range map[string]string{
		"kustomization.yaml": strings.ReplaceAll(kustomization, "REPO", root),
		"chart.yaml":         chart,
	} {
		if err := os.WriteFile(filepath.Join(folder, name), []byte(text), 0o600); err != nil {
			return nil, err
		}
	}
	text, err := output(time.Minute, kubectl, "kustomize", folder)
	if err != nil {
		return nil, err
	}
	for _, image := range []string{controllerImage, agentImage, routerImage, runtimeImage} {
		text = strings.ReplaceAll(text, unsetImage(image), image+":dev")
	}
	all, err := parseManifests(kustomization, text)
	if err != nil {
		return nil, err
	}
	objects := map[string]string{}
	for _, m := range all {
		// Kustomize does not know that these kinds have no namespace, and gives them its own.
		if m.namespace != "" && strings.HasPrefix(m.kind, "ValidatingAdmissionPolicy") {
			m.text = strings.Replace(m.text, "  namespace: "+m.namespace+"\n", "", 1)
			m.namespace = ""
		}
		if m.kind != "Namespace" {
			objects[m.kind+" "+m.namespace+"/"+m.name] = m.text
		}
	}
	return objects, nil
}

// compare tells the differences between two sets of objects, line by line; empty when there are
// none.
func compare(meant, said map[string]string) string {
	var told strings.Builder
	for _, name := range sortedKeys(meant, said) {
		a, b := meant[name], said[name]
		switch {
		case a == b:
		case b == "":
			fmt.Fprintf(&told, "%s: missing in the chart\n", name)
		case a == "":
			fmt.Fprintf(&told, "%s: only in the chart\n", name)
		default:
			fmt.Fprintf(&told, "%s:\n%s", name, lineDifferences(a, b))
		}
	}
	return told.String()
}

func sortedKeys(maps ...map[string]string) []string {
	var all []string
	for _, m := range maps {
		for key := range m {
			all = append(all, key)
		}
	}
	slices.Sort(all)
	return slices.Compact(all)
}

// lineDifferences lists the lines that only one of two texts has; their order is not compared.
func lineDifferences(a, b string) string {
	count := map[string]int{}
	for line := range strings.Lines(a + "\n") {
		count[line]--
	}
	for line := range strings.Lines(b + "\n") {
		count[line]++
	}
	var told strings.Builder
	for line := range strings.Lines(a + "\n" + b + "\n") {
		if n := count[line]; n != 0 {
			sign := "-"
			if n > 0 {
				sign = "+"
			}
			told.WriteString(sign + line)
			count[line] = 0
		}
	}
	if told.Len() == 0 {
		return "  the same lines in another order\n"
	}
	return told.String()
}
