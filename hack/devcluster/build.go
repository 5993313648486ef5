package main

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"time"
)

// The gVisor that Torpor is built and tested with. docs/how-to/gvisor.md
// describes a move.
const (
	gvisorModule  = "gvisor.dev/gvisor@v0.0.0-20260905035102-160fafc42237"
	gvisorRelease = "release-20260905.0"
	// runscVersion is what `runsc --version` says; the tail tells our build from Google's of the
	// same day.
	runscVersion     = gvisorRelease + "-torpor"
	runscVersionFlag = "-X gvisor.dev/gvisor/runsc/version.version="
)

// artifact is one thing that is built once and kept in the cache below a hash of what built it.
type artifact struct {
	name  string
	files []string // what must be there afterwards
	// One of: Go packages at a version, a Go module of this repository, packages of a copy of a Go
	// module, a C file of it, or a crate at a version.
	packages []string
	module   string
	copied   *copiedModule
	cSource  string
	crate    string
	// Further settings of the Go build.
	cgo     bool
	tags    string
	ldflags string
	links   []string // further names of files[0]
	about   string   // cold build time on two cores, printed before it starts
}

// copiedModule is built in a copy of its sources. A program of ours may make there what the
// module's own build system makes and its Go module lacks.
type copiedModule struct {
	module    string // with its version
	generator string // a Go file of this repository that runs in the copy; may be empty
	main      string // the packages that are built then, paths in the module
}

var artifacts = []artifact{
	containerd(),
	{
		name: "runc", about: "12 s", cgo: true, tags: "seccomp",
		packages: []string{"github.com/opencontainers/runc@v1.4.3"},
		files:    []string{"runc"},
	},
	{
		name: "cni", about: "5 s",
		packages: []string{
			"github.com/containernetworking/plugins/plugins/main/bridge@v1.9.1",
			"github.com/containernetworking/plugins/plugins/main/loopback@v1.9.1",
			"github.com/containernetworking/plugins/plugins/ipam/host-local@v1.9.1",
			"github.com/containernetworking/plugins/plugins/meta/portmap@v1.9.1",
		},
		files: []string{"bridge", "loopback", "host-local", "portmap"},
	},
	{name: "pause", about: "1 s", cSource: "hack/devcluster/pause/pause.c", files: []string{"pause"}},
	{
		name: "runsc", about: "70 s",
		copied: &copiedModule{
			module:    gvisorModule,
			generator: "hack/devcluster/runsc/prepare.go",
			main:      "./runsc",
		},
		// The added file links to a variable of Go's runtime, which the linker refuses by default.
		ldflags: "-checklinkname=0 " + runscVersionFlag + runscVersion,
		files:   []string{"runsc"},
	},
	{
		name: "kubernetes", about: "5 min", module: "hack/devcluster/kubernetes",
		files: []string{"kubernetes"},
		// The apiserver refuses to start on a version that it cannot parse, and clients show it.
		ldflags: "-X k8s.io/component-base/version.gitVersion=v1.36.3 -X k8s.io/component-base/version.gitMajor=1 -X k8s.io/component-base/version.gitMinor=36",
		links:   []string{"cri-execsync", "etcd", "kube-apiserver", "kube-controller-manager", "kube-proxy", "kube-scheduler", "kubectl", "kubelet"},
	},
	{
		name: "coredns", about: "2 min",
		packages: []string{"github.com/coredns/coredns@v1.15.0"},
		files:    []string{"coredns"},
	},
}

// containerdOlder is the environment variable that selects the older containerd that Torpor
// supports.
const containerdOlder = "TORPOR_CONTAINERD"

// isContainerd1 reports whether the cluster runs the older containerd.
func isContainerd1() bool { return os.Getenv(containerdOlder) == "1.7" }

// containerd is the container runtime of the cluster.
func containerd() artifact {
	files := []string{"containerd", "containerd-shim-runc-v2", "ctr"}
	if isContainerd1() {
		return artifact{
			name: "containerd", about: "80 s",
			// Its module excludes a version of another one, which `go install` refuses.
			copied: &copiedModule{
				module: "github.com/containerd/containerd@v1.7.35",
				main:   "./cmd/containerd ./cmd/containerd-shim-runc-v2 ./cmd/ctr",
			},
			ldflags: "-X github.com/containerd/containerd/version.Version=v1.7.35",
			files:   files,
		}
	}
	return artifact{
		name: "containerd", about: "80 s",
		packages: []string{
			"github.com/containerd/containerd/v2/cmd/containerd@v2.4.2",
			"github.com/containerd/containerd/v2/cmd/containerd-shim-runc-v2@v2.4.2",
			"github.com/containerd/containerd/v2/cmd/ctr@v2.4.2",
		},
		ldflags: "-X github.com/containerd/containerd/v2/version.Version=v2.4.2",
		files:   files,
	}
}

// helmArtifact is built only by what uses it: nothing of the cluster needs it.
var helmArtifact = artifact{
	name: "helm", about: "2 min",
	packages: []string{"helm.sh/helm/v3/cmd/helm@v3.22.0"},
	// Without a version of Kubernetes helm believes in 1.20 where it sees no cluster.
	ldflags: "-X helm.sh/helm/v3/internal/version.version=v3.22.0" +
		" -X helm.sh/helm/v3/pkg/chartutil.k8sVersionMajor=1 -X helm.sh/helm/v3/pkg/chartutil.k8sVersionMinor=36" +
		" -X helm.sh/helm/v3/pkg/lint/rules.k8sVersionMajor=1 -X helm.sh/helm/v3/pkg/lint/rules.k8sVersionMinor=36",
	files: []string{"helm"},
}

// stockRunsc is what Google's release is but for the build settings of Bazel: no file and no flag
// of Torpor's. A test installs it in place of ours.
var stockRunsc = artifact{
	name: "runsc-stock", about: "70 s",
	packages: []string{strings.Replace(gvisorModule, "@", "/runsc@", 1)},
	ldflags:  runscVersionFlag + gvisorRelease,
	files:    []string{"runsc"},
}

// kwokArtifact makes fake nodes: for the benchmark's control plane only.
var kwokArtifact = artifact{
	name: "kwok", about: "90 s",
	packages: []string{"sigs.k8s.io/kwok/cmd/kwok@v0.8.0"},
	files:    []string{"kwok"},
}

// artifactNamed is one of the cluster's.
func artifactNamed(name string) artifact {
	return artifacts[slices.IndexFunc(artifacts, func(a artifact) bool { return a.name == name })]
}

// key is the hash of all that decides what the build makes.
func (a artifact) key(goVersion string) (string, error) {
	h := sha256.New()
	fmt.Fprintf(h, "%q %q %q %v %q %q %q %s %s", a.packages, a.files, a.links, a.cgo, a.tags, a.ldflags, buildFlags, goVersion, runtime.GOARCH)
	var sources []string
	switch {
	case a.crate != "":
		fmt.Fprintf(h, "%q %q", a.crate, crateEnvironment)
	case a.cSource != "":
		sources = []string{filepath.Join(repoRoot, a.cSource)}
	case a.copied != nil:
		fmt.Fprintf(h, "%q %q", a.copied.module, a.copied.main)
		if a.copied.generator != "" {
			sources = []string{filepath.Join(repoRoot, a.copied.generator)}
		}
	case a.module != "":
		entries, err := os.ReadDir(filepath.Join(repoRoot, a.module))
		if err != nil {
			return "", err
		}
		for _, e := range entries {
			sources = append(sources, filepath.Join(repoRoot, a.module, e.Name()))
		}
	}
	for _, path := range sources {
		content, err := os.ReadFile(path)
		if err != nil {
			return "", err
		}
		fmt.Fprintf(h, "%s %x", filepath.Base(path), sha256.Sum256(content))
	}
	return hex.EncodeToString(h.Sum(nil))[:16], nil
}

var buildFlags = []string{"-trimpath"}

// goEnvironment is what every Go build here runs with: the caller's own flags must not decide what
// is cached.
func goEnvironment(cgo bool) []string {
	flag := "CGO_ENABLED=0"
	if cgo {
		flag = "CGO_ENABLED=1"
	}
	return []string{flag, "GOFLAGS=-buildvcs=false", "GOWORK=off", "GOOS=", "GOARCH="}
}

// toolset says where each built file is.
type toolset map[string]string

// builtTools returns the files of all artifacts of the development cluster; those that are missing
// are built first if build is true, otherwise their absence is an error.
func builtTools(build bool) (toolset, error) { return toolsOf(artifacts, build) }

// toolsOf does the same for some artifacts.
func toolsOf(artifacts []artifact, build bool) (toolset, error) {
	cache, err := cacheRoot()
	if err != nil {
		return nil, err
	}
	root := filepath.Join(cache, "bin")
	if err := os.MkdirAll(root, 0o755); err != nil {
		return nil, err
	}
	goVersion, err := output(time.Minute, "go", "env", "GOVERSION")
	if err != nil {
		return nil, fmt.Errorf("cannot ask Go for its version: %w", err)
	}
	tools := toolset{}
	var missing []artifact
	places := map[string]string{}
	for _, a := range artifacts {
		key, err := a.key(strings.TrimSpace(goVersion))
		if err != nil {
			return nil, fmt.Errorf("%s: cannot hash its sources: %w", a.name, err)
		}
		place := filepath.Join(root, a.name+"-"+key)
		places[a.name] = place
		for _, f := range slices.Concat(a.files, a.links) {
			tools[f] = filepath.Join(place, f)
		}
		if !a.present(place) {
			missing = append(missing, a)
		}
	}
	if len(missing) == 0 {
		return tools, markUsed(root, places)
	}
	if !build {
		return nil, fmt.Errorf("%s is not built; run `hack/cluster build`", missing[0].name)
	}
	if err := buildMissing(cache, missing, places); err != nil {
		return nil, err
	}
	return tools, markUsed(root, places)
}

// markUsed records the use of each artifact, and removes artifacts without use in a month and the
// folders of builds that were killed a day ago or more.
func markUsed(root string, places map[string]string) error {
	now := time.Now()
	for _, place := range places {
		if err := os.Chtimes(place, now, now); err != nil {
			return err
		}
	}
	entries, err := os.ReadDir(root)
	if err != nil {
		return err
	}
	for _, e := range entries {
		info, err := e.Info()
		if err != nil {
			continue // another run removed it
		}
		limit := 30 * 24 * time.Hour
		if strings.HasPrefix(e.Name(), ".building-") {
			limit = 24 * time.Hour
		}
		if now.Sub(info.ModTime()) > limit {
			if err := os.RemoveAll(filepath.Join(root, e.Name())); err != nil {
				return err
			}
		}
	}
	return nil
}

func buildMissing(cache string, missing []artifact, places map[string]string) error {
	unlock, err := lockFile(filepath.Join(cache, "build.lock"), "another build of the cluster's programs")
	if err != nil {
		return err
	}
	defer unlock()
	if err := ensurePackages(buildPackages); err != nil {
		return err
	}
	for i, a := range missing {
		if a.present(places[a.name]) { // the run that held the lock before us made it
			continue
		}
		say("build %s (%d of %d missing; takes about %s when nothing is cached)", a.name, i+1, len(missing), a.about)
		begin := time.Now()
		if err := during("build "+a.name, func() error { return a.build(places[a.name]) }); err != nil {
			return fmt.Errorf("build of %s failed: %w", a.name, err)
		}
		say("built %s in %.0f s", a.name, time.Since(begin).Seconds())
	}
	return nil
}

func (a artifact) present(place string) bool {
	for _, f := range slices.Concat(a.files, a.links) {
		if info, err := os.Stat(filepath.Join(place, f)); err != nil || info.Size() == 0 {
			return false
		}
	}
	return true
}

// build makes everything in a folder beside the final one and renames it: a half build never
// counts.
func (a artifact) build(place string) error {
	work, err := os.MkdirTemp(filepath.Dir(place), ".building-"+a.name+"-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(work)
	if err := a.compile(work); err != nil {
		return err
	}
	for _, name := range a.links {
		if err := os.Symlink(a.files[0], filepath.Join(work, name)); err != nil {
			return err
		}
	}
	if !a.present(work) {
		return fmt.Errorf("the build ended well but did not make all of %s", strings.Join(a.files, ", "))
	}
	if err := os.Chmod(work, 0o755); err != nil {
		return err
	}
	if err := os.RemoveAll(place); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return os.Rename(work, place)
}

func (a artifact) compile(work string) error {
	const limit = 40 * time.Minute
	if a.cSource != "" {
		_, err := output(limit, "cc", "-Os", "-static", "-s", "-o", filepath.Join(work, a.files[0]), filepath.Join(repoRoot, a.cSource))
		return err
	}
	if a.crate != "" {
		return installCrate(a.crate, work, limit)
	}
	args := append([]string{}, buildFlags...)
	args = append(args, "-ldflags", strings.TrimSpace("-s -w "+a.ldflags))
	if a.tags != "" {
		args = append(args, "-tags", a.tags)
	}
	if a.copied != nil {
		args = append(append([]string{"build"}, args...), "-o", work+"/")
		args = append(args, strings.Fields(a.copied.main)...)
		return a.copied.compile(work, limit, goEnvironment(a.cgo), args)
	}
	if a.module != "" {
		args = append(append([]string{"build", "-mod=readonly"}, args...), "-o", filepath.Join(work, a.files[0]), ".")
		_, err := outputIn(limit, filepath.Join(repoRoot, a.module), goEnvironment(a.cgo), nil, "go", args...)
		return err
	}
	args = append(append([]string{"install"}, args...), a.packages...)
	_, err := outputIn(limit, work, append(goEnvironment(a.cgo), "GOBIN="+work), nil, "go", args...)
	return err
}

// crateEnvironment is for tools that run for seconds: they are built sooner than they would be
// optimised.
var crateEnvironment = []string{
	"CARGO_PROFILE_RELEASE_OPT_LEVEL=0", "CARGO_PROFILE_RELEASE_LTO=off", "CARGO_PROFILE_RELEASE_CODEGEN_UNITS=16", "CARGO_PROFILE_RELEASE_DEBUG=false",
}

// installCrate builds the programs of a crate, with the versions of its own Cargo.lock, and leaves
// nothing else.
func installCrate(crate, work string, limit time.Duration) error {
	built := filepath.Join(work, "built")
	defer os.RemoveAll(built)
	environ := append(slices.Clone(crateEnvironment), "CARGO_TARGET_DIR="+filepath.Join(built, "target"))
	args := append([]string{"install", "--locked", "--no-track", "--root", built}, strings.Fields(crate)...)
	// In the repository, whose toolchain it takes.
	if _, err := outputIn(limit, repoRoot, environ, nil, "cargo", args...); err != nil {
		return err
	}
	programs, err := os.ReadDir(filepath.Join(built, "bin"))
	if err != nil {
		return err
	}
	for _, program := range programs {
		if err := os.Rename(filepath.Join(built, "bin", program.Name()), filepath.Join(work, program.Name())); err != nil {
			return err
		}
	}
	return nil
}

// compile copies the module below work, runs the generator in the copy, and then Go with the
// arguments.
func (m copiedModule) compile(work string, limit time.Duration, environment, args []string) error {
	downloaded, err := outputIn(limit, work, environment, nil, "go", "mod", "download", "-json", m.module)
	if err != nil {
		return err
	}
	var place struct{ Dir string }
	if err := json.Unmarshal([]byte(downloaded), &place); err != nil {
		return fmt.Errorf("what `go mod download -json %s` said: %w", m.module, err)
	}
	sources := filepath.Join(work, "sources")
	defer os.RemoveAll(sources)
	// The module cache is read-only and has no links; os.CopyFS makes files that can be written.
	if err := os.CopyFS(sources, os.DirFS(place.Dir)); err != nil {
		return err
	}
	if m.generator != "" {
		if _, err := outputIn(limit, sources, environment, nil, "go", "run", filepath.Join(repoRoot, m.generator)); err != nil {
			return err
		}
	}
	_, err = outputIn(limit, sources, environment, nil, "go", args...)
	return err
}

// lockFile takes an exclusive lock, telling once what it waits for. The lock ends with the process.
func lockFile(path, heldBy string) (unlock func(), err error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return nil, err
	}
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		say("%s is running; waiting for it to end (lock %s)", heldBy, path)
		if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX); err != nil {
			f.Close()
			return nil, fmt.Errorf("lock %s: %w", path, err)
		}
	}
	return func() { f.Close() }, nil
}
