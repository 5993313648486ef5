package main

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"torpor.dev/hack/devcluster/oci"
)

const (
	controllerImage = "torpor.dev/controller"
	agentImage      = "torpor.dev/agent"
	routerImage     = "torpor.dev/router"
	runtimeImage    = "torpor.dev/runtime"
	torporNamespace = "agent-sandbox-system"
	devOverlay      = "hack/overlays/dev"
	uninstallFolder = "hack/overlays/dev-uninstall"
)

// torporImage is one image of Torpor itself: a static binary, and what lies beside it.
type torporImage struct {
	repository string
	entrypoint string
	files      map[string]string // name in the image → path on this machine
}

// builtImages are the references (repository:hash of the content) of Torpor's images by repository.
// The tag changes with the content, so that applying the manifests again replaces the Pods.
type builtImages map[string]string

// shimProgram is the program that containerd starts for each pod.
const shimProgram = "containerd-shim-torpor-v1"

// insideProgram is the helper that shims run in sandboxes.
const insideProgram = "torpor-inside"

// buildTorpor compiles Torpor, makes its images and, if the cluster runs, loads those it lacks.
func buildTorpor() (builtImages, error) {
	tools, err := builtTools(true)
	if err != nil {
		return nil, err
	}
	target, err := cargoBuild(os.Getenv("TORPOR_PROFILE"))
	if err != nil {
		return nil, err
	}
	built := builtImages{}
	for _, image := range torporImages(target, tools) {
		archive, reference, err := image.make()
		if err != nil {
			return nil, fmt.Errorf("image %s: %w", image.repository, err)
		}
		built[image.repository] = reference
		if err := loadTagged(archive, reference, image.repository+":dev"); err != nil {
			return nil, err
		}
	}
	return built, nil
}

// torporImages are Torpor's, of the programs that cargo has built in this folder and of the build
// of runsc.
func torporImages(target string, tools toolset) []torporImage {
	return []torporImage{
		{controllerImage, "torpor-controller", map[string]string{"torpor-controller": filepath.Join(target, "torpor-controller")}},
		{routerImage, "sandbox-router", map[string]string{"sandbox-router": filepath.Join(target, "sandbox-router")}},
		{runtimeImage, "sandbox-runtime", map[string]string{"sandbox-runtime": filepath.Join(target, "sandbox-runtime")}},
		{agentImage, "torpor-agent", map[string]string{
			"torpor-agent": filepath.Join(target, "torpor-agent"),
			shimProgram:    filepath.Join(target, shimProgram),
			insideProgram:  filepath.Join(target, insideProgram),
			"runsc":        tools["runsc"],
		}},
	}
}

// cargoBuild builds the binaries and returns the folder they are in.
func cargoBuild(profile string) (string, error) {
	version, err := outputIn(time.Minute, repoRoot, nil, nil, "rustc", "-vV")
	if err != nil {
		return "", err
	}
	_, rest, _ := strings.Cut(version, "\nhost: ")
	host, _, _ := strings.Cut(rest, "\n")
	if host == "" {
		return "", fmt.Errorf("rustc -vV does not name its host:\n%s", version)
	}
	arguments, folder, err := cargoArguments(profile)
	if err != nil {
		return "", err
	}
	say("cargo %s", strings.Join(arguments, " "))
	begin := time.Now()
	cmd := exec.Command("cargo", arguments...)
	cmd.Dir, cmd.Stdout, cmd.Stderr = repoRoot, os.Stderr, os.Stderr
	cmd.Env = cargoEnvironment(os.Environ())
	if err := during("cargo build", cmd.Run); err != nil {
		return "", fmt.Errorf("cargo build failed (see above): %w", err)
	}
	say("cargo build took %.0f s", time.Since(begin).Seconds())
	target := os.Getenv("CARGO_TARGET_DIR")
	if target == "" {
		target = "target"
	}
	if !filepath.IsAbs(target) { // as cargo takes it
		target = filepath.Join(repoRoot, target)
	}
	return filepath.Join(target, host, folder), nil
}

// cargoEnvironment leaves out what would replace the target and the flags of .cargo/config.toml: a
// binary that is not static does not start in an image that holds nothing else.
func cargoEnvironment(environ []string) []string {
	replaces := []string{"RUSTFLAGS", "CARGO_ENCODED_RUSTFLAGS", "CARGO_BUILD_TARGET"}
	return slices.DeleteFunc(slices.Clone(environ), func(variable string) bool {
		name, _, _ := strings.Cut(variable, "=")
		return slices.Contains(replaces, name)
	})
}

// cargoArguments returns cargo's arguments for a profile and the folder of its binaries.
//
//   - "cluster" (also ""): optimised programs of the images, for benchmarks and the demo.
//   - "release": programs of a release, with kubectl's plugin.
//   - "dev": the profile and the selection of crates, and so the features, of the unit tests. After
//     them only linking is left. hack/test.sh uses it.
func cargoArguments(profile string) (arguments []string, folder string, err error) {
	switch profile {
	case "", "cluster":
		return []string{"build", "--locked", "--profile", "cluster", "-p", "torpor-controller", "-p", "torpor-router", "-p", "torpor-runtime", "-p", "torpor-agent", "-p", "torpor-shim", "-p", "torpor-inside"}, "cluster", nil
	case "release":
		return []string{"build", "--locked", "--release", "-p", "torpor-controller", "-p", "torpor-router", "-p", "torpor-runtime", "-p", "torpor-agent", "-p", "torpor-shim", "-p", "torpor-inside", "-p", "torpor-cli"}, "release", nil
	case "dev":
		return []string{"build", "--locked", "--workspace", "--exclude", "torpor-tests", "--bins", "--tests"}, "debug", nil
	default:
		return nil, "", fmt.Errorf("TORPOR_PROFILE is %q: it must be cluster (optimised, the default), release or dev", profile)
	}
}

// make writes the image's archive into the cache unless one of the same content is there.
func (t torporImage) make() (archive, reference string, err error) {
	image, tag, err := t.contents("")
	if err != nil {
		return "", "", err
	}
	reference = t.repository + ":" + tag
	image.Name = reference
	cache, err := cacheRoot()
	if err != nil {
		return "", "", err
	}
	folder := filepath.Join(cache, "images", filepath.Base(t.repository))
	archive = filepath.Join(folder, tag+".tar")
	if fileExists(archive) {
		return archive, reference, nil
	}
	if err := os.MkdirAll(folder, 0o755); err != nil {
		return "", "", err
	}
	if _, err := image.Write(archive); err != nil {
		return "", "", err
	}
	say("made image %s", reference)
	return archive, reference, keepNewest(folder, 4)
}

// contents is the image under a name, and the hash of its files.
func (t torporImage) contents(name string) (image oci.Image, tag string, err error) {
	h := sha256.New()
	entries := emptyRoot()
	names := make([]string, 0, len(t.files))
	for file := range t.files {
		names = append(names, file)
	}
	slices.Sort(names)
	for _, file := range names {
		sum, err := fileDigest(t.files[file])
		if err != nil {
			return oci.Image{}, "", err
		}
		fmt.Fprintf(h, "%s %s ", file, sum)
		entries = append(entries, oci.Entry{Path: file, Mode: 0o755, Source: t.files[file]})
	}
	config := oci.Config{Entrypoint: []string{"/" + t.entrypoint}, Env: []string{"PATH=/"}}
	return oci.Image{Name: name, Config: config, Entries: entries}, fmt.Sprintf("%x", h.Sum(nil))[:16], nil
}

func fileDigest(path string) (string, error) {
	f, err := os.Open(path)
	if err != nil {
		return "", err
	}
	defer f.Close()
	h := sha256.New()
	if _, err := io.Copy(h, f); err != nil {
		return "", err
	}
	return fmt.Sprintf("%x", h.Sum(nil)), nil
}

// keepNewest removes all but the newest files of a folder: every build makes another image.
func keepNewest(folder string, count int) error {
	files, err := filepath.Glob(filepath.Join(folder, "*.tar"))
	if err != nil {
		return err
	}
	age := func(path string) time.Time {
		info, err := os.Stat(path)
		if err != nil {
			return time.Time{}
		}
		return info.ModTime()
	}
	slices.SortFunc(files, func(a, b string) int { return age(b).Compare(age(a)) })
	for _, old := range files[min(count, len(files)):] {
		if err := os.Remove(old); err != nil {
			return err
		}
	}
	return nil
}

// loadTagged imports an archive where the reference is missing and points a second name at it.
func loadTagged(archive, reference, alias string) error {
	for _, n := range nodes {
		if !accepts("unix:" + n.containerdSocket()) {
			say("%s does not run: image %s is made, not loaded", n.name(), reference)
			continue
		}
		loaded, err := n.ctr("images", "list", "--quiet")
		if err != nil {
			return err
		}
		if !slices.Contains(strings.Fields(loaded), reference) {
			if _, err := n.ctr("images", "import", archive); err != nil {
				return err
			}
			say("loaded %s into %s", reference, n.name())
		}
		if _, err := n.ctr("images", "tag", "--force", reference, alias); err != nil {
			return err
		}
	}
	return nil
}

// manifest is one object of a rendered kustomization.
type manifest struct {
	kind, namespace, name string
	text                  string
}

var (
	kindLine      = regexp.MustCompile(`(?m)^kind: (\S+)$`)
	nameLine      = regexp.MustCompile(`(?m)^metadata:\n(?:  .*\n)*?  name: (\S+)$`)
	namespaceLine = regexp.MustCompile(`(?m)^metadata:\n(?:  .*\n)*?  namespace: (\S+)$`)
)

// unsetImage is an image's name in the manifests before a registry is set. The registry cannot
// exist (RFC 2606), so that no stranger's image is pulled.
func unsetImage(repository string) string {
	return "torpor.invalid/" + path.Base(repository) + ":unset"
}

// render runs kustomize over a folder of the repository and puts the built images in.
func render(folder string, images builtImages) ([]manifest, error) {
	from := filepath.Join(repoRoot, folder)
	if !fileExists(filepath.Join(from, "kustomization.yaml")) {
		return nil, fmt.Errorf("%s/kustomization.yaml is missing: there is nothing to apply", folder)
	}
	text, err := output(time.Minute, binDir("kubectl"), "kustomize", from)
	if err != nil {
		return nil, err
	}
	for repository, reference := range images {
		text = strings.ReplaceAll(text, unsetImage(repository), reference)
	}
	return parseManifests(folder, text)
}

// parseManifests takes the objects of a text apart that has sorted keys, as kustomize and the chart
// write them.
func parseManifests(origin, text string) ([]manifest, error) {
	var all []manifest
	for document := range strings.SplitSeq("\n"+text, "\n---\n") {
		document = strings.Trim(document, "\n")
		if document == "" {
			continue
		}
		m := manifest{kind: first(kindLine, document), name: first(nameLine, document), namespace: first(namespaceLine, document), text: document}
		if m.kind == "" || m.name == "" {
			return nil, fmt.Errorf("%s: an object without kind or name:\n%s", origin, document)
		}
		all = append(all, m)
	}
	return all, nil
}

func first(pattern *regexp.Regexp, text string) string {
	if found := pattern.FindStringSubmatch(text); found != nil {
		return found[1]
	}
	return ""
}

func joined(manifests []manifest) []byte {
	texts := make([]string, len(manifests))
	for i, m := range manifests {
		texts[i] = m.text
	}
	return []byte(strings.Join(texts, "\n---\n"))
}

func kubectlRun(limit time.Duration, stdin []byte, args ...string) (string, error) {
	return outputIn(limit, "", nil, stdin, binDir("kubectl"), append([]string{"--kubeconfig", adminKubeconfig()}, args...)...)
}

// installTorpor builds what changed, applies the manifests and returns when all of it runs.
func installTorpor() error {
	if !fileExists(adminKubeconfig()) {
		return errors.New("no cluster is there; run `hack/cluster up` first")
	}
	images, err := buildTorpor()
	if err != nil {
		return err
	}
	all, err := render(devOverlay, images)
	if err != nil {
		return err
	}
	early := func(m manifest) bool { return m.kind == "CustomResourceDefinition" || m.kind == "Namespace" }
	var base, rest []manifest
	for _, m := range all {
		if early(m) {
			base = append(base, m)
		} else {
			rest = append(rest, m)
		}
	}
	for _, part := range [][]manifest{base, rest} {
		if len(part) == 0 {
			continue
		}
		if _, err := kubectlRun(2*time.Minute, joined(part), "apply", "--server-side", "--force-conflicts", "--field-manager=torpor-dev", "-f", "-"); err != nil {
			return err
		}
		for _, m := range part {
			if m.kind != "CustomResourceDefinition" {
				continue
			}
			// A controller that starts before would see "no such kind".
			path := "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/" + m.name
			if err := waitFor("definition "+m.name, 30*time.Second, hasCondition(path, "Established")); err != nil {
				return err
			}
		}
	}
	say("applied %d objects of %s", len(all), devOverlay)
	for _, m := range rest {
		if err := waitRollout(m); err != nil {
			return fmt.Errorf("%w\n%s", err, explainPods())
		}
	}
	say("Torpor runs")
	return nil
}

// waitRollout waits until a Deployment or DaemonSet runs its newest template everywhere.
func waitRollout(m manifest) error {
	resource := map[string]string{"Deployment": "deployments", "DaemonSet": "daemonsets"}[m.kind]
	if resource == "" {
		return nil
	}
	path := fmt.Sprintf("/apis/apps/v1/namespaces/%s/%s/%s", m.namespace, resource, m.name)
	err := waitFor(m.kind+" "+m.name, 3*time.Minute, rolledOut(path))
	if err == nil {
		say("%s %s is rolled out", m.kind, m.name)
	}
	return err
}

func rolledOut(path string) func(context.Context) error {
	return func(ctx context.Context) error {
		var object struct {
			Metadata struct{ Generation int64 }
			Spec     struct{ Replicas *int }
			Status   struct {
				ObservedGeneration                                          int64
				Replicas, UpdatedReplicas, ReadyReplicas                    int
				DesiredNumberScheduled, UpdatedNumberScheduled, NumberReady int
			}
		}
		if err := get(ctx, path, &object); err != nil {
			return err
		}
		s := object.Status
		want, have, updated, ready := s.DesiredNumberScheduled, s.DesiredNumberScheduled, s.UpdatedNumberScheduled, s.NumberReady
		if object.Spec.Replicas != nil {
			want, have, updated, ready = *object.Spec.Replicas, s.Replicas, s.UpdatedReplicas, s.ReadyReplicas
		}
		if s.ObservedGeneration < object.Metadata.Generation || want == 0 || have != want || updated < want || ready < want {
			return fmt.Errorf("%d of %d ready, %d of the newest version", ready, want, updated)
		}
		return nil
	}
}

// explainPods prints states, events and the end of the logs of Torpor's Pods.
func explainPods() string {
	questions := [][]string{
		{"get", "pods", "-n", torporNamespace, "-o", "wide"},
		{"get", "events", "-n", torporNamespace, "--sort-by=.lastTimestamp"},
	}
	if pods, err := kubectlRun(20*time.Second, nil, "get", "pods", "-n", torporNamespace, "-o", "name"); err == nil {
		for pod := range strings.FieldsSeq(pods) {
			questions = append(questions, []string{"logs", "-n", torporNamespace, pod, "--all-containers", "--tail=30"})
		}
	}
	var said strings.Builder
	for _, args := range questions {
		out, err := kubectlRun(20*time.Second, nil, args...)
		if err != nil {
			out += err.Error()
		}
		fmt.Fprintf(&said, "--- kubectl %s\n%s\n", strings.Join(args, " "), tailText(out, 6000))
	}
	return said.String()
}

func tailText(s string, size int) string {
	if len(s) > size {
		return "…" + s[len(s)-size:]
	}
	return s
}

// uninstallTorpor takes Torpor off the cluster: the controller and the agents first, so that
// nothing starts again what is being removed, then the nodes' own files by the uninstall Job, then
// the rest.
func uninstallTorpor() error {
	all, err := render(devOverlay, nil)
	if err != nil {
		return err
	}
	workload := func(m manifest) bool { return m.kind == "Deployment" || m.kind == "DaemonSet" }
	var first, rest []manifest
	for _, m := range all {
		if workload(m) {
			first = append(first, m)
		} else {
			rest = append(rest, m)
		}
	}
	remove := func(part []manifest) error {
		if len(part) == 0 {
			return nil
		}
		_, err := kubectlRun(3*time.Minute, joined(part), "delete", "--ignore-not-found", "--timeout=120s", "-f", "-")
		return err
	}
	// The build that made the nodes' files takes them away; without one there are none.
	agent, err := installedAgent()
	if err != nil {
		return err
	}
	if err := remove(first); err != nil {
		return err
	}
	if agent != "" {
		jobs, err := render(uninstallFolder, builtImages{agentImage: agent})
		if err != nil {
			return err
		}
		if err := runUninstallJobs(perNode(jobs)); err != nil {
			return err
		}
	}
	if err := remove(rest); err != nil {
		return err
	}
	say("Torpor is gone from the cluster")
	return nil
}

// installedAgent is the image of the agents in the cluster; empty when there are none.
func installedAgent() (string, error) {
	return kubectlRun(20*time.Second, nil, "get", "daemonset", "torpor-agent", "-n", torporNamespace, "--ignore-not-found",
		"-o", "jsonpath={.spec.template.spec.containers[0].image}")
}

// perNode makes a Job for each node of a Job that is meant for the only one.
func perNode(objects []manifest) []manifest {
	if len(nodes) == 1 {
		return objects
	}
	var all []manifest
	for _, m := range objects {
		if m.kind != "Job" {
			all = append(all, m)
			continue
		}
		for _, n := range nodes {
			job := manifest{kind: m.kind, namespace: m.namespace, name: m.name + "-" + n.name()}
			job.text = strings.Replace(m.text, "\n  name: "+m.name+"\n", "\n  name: "+job.name+"\n", 1)
			job.text = strings.Replace(job.text, "\n    spec:\n", "\n    spec:\n      nodeName: "+n.name()+"\n", 1)
			all = append(all, job)
		}
	}
	return all
}

func runUninstallJobs(jobs []manifest) error {
	if _, err := kubectlRun(time.Minute, joined(jobs), "apply", "--server-side", "--force-conflicts", "-f", "-"); err != nil {
		return err
	}
	for _, m := range jobs {
		if m.kind != "Job" {
			continue
		}
		if err := waitFor("Job "+m.name, 3*time.Minute, jobComplete(m.namespace, m.name)); err != nil {
			return fmt.Errorf("%w\n%s", err, explainPods())
		}
	}
	_, err := kubectlRun(time.Minute, joined(jobs), "delete", "--ignore-not-found", "-f", "-")
	return err
}
