package main

import (
	"archive/tar"
	"compress/gzip"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"time"
)

const releaseUsage = `usage: hack/release [--registry REGISTRY] [--output FOLDER] [VERSION]

Makes FOLDER/torpor-VERSION-ARCH and a tarball of it:

  images/*.tar          OCI archives of controller, router, runtime and agent (with the shim and runsc)
  torpor.yaml           all of deploy/, images by digest
  torpor-uninstall.yaml the Job that takes Torpor off a node
  torpor-CHART.tgz      the Helm chart, images by digest
  bin/                  kubectl-torpor and what kubectl's completion runs
  sbom/*.cdx.json       CycloneDX: each Rust program, and runsc
  SHA256SUMS, NOTES.md, LICENSE

  --registry REGISTRY   what stands before /agent, /controller, …: registry.example/torpor. Without it the
                        references say torpor.invalid, which nobody can have, and NOTES.md says how to name yours
  --output FOLDER       default: target/release-bundle
  VERSION               a semantic version; default: the workspace's, with the commit

It builds for this machine's architecture only: the other one's standard library of Rust is not fetched. The
programs are optimised (TORPOR_PROFILE=release; dev and cluster are for a try). A second run does again only
what changed. Licences, bans and sources of all crates are checked; known vulnerabilities too, where the database can be fetched.
`

// The tools of a release.
var (
	cycloneDXArtifact = artifact{name: "cargo-cyclonedx", about: "1 min", crate: "cargo-cyclonedx@0.5.9", files: []string{"cargo-cyclonedx"}}
	goModArtifact     = artifact{
		name: "cyclonedx-gomod", about: "20 s",
		packages: []string{"github.com/CycloneDX/cyclonedx-gomod/cmd/cyclonedx-gomod@v1.10.0"},
		files:    []string{"cyclonedx-gomod"},
	}
)

// release is one bundle in the making.
type release struct {
	version  string // without a leading v
	registry string
	folder   string // where it is made
	tools    toolset
	target   string            // cargo's folder of the built programs
	digests  map[string]string // of the images, by their repositories
	notes    []string          // what the reader must know of this very bundle
}

func releaseCommand(args []string) error {
	flags := flag.NewFlagSet("release", flag.ContinueOnError)
	flags.Usage = func() { fmt.Fprint(os.Stderr, releaseUsage) }
	registry := flags.String("registry", "", "")
	output := flags.String("output", filepath.Join(repoRoot, "target", "release-bundle"), "")
	if err := flags.Parse(args); err != nil {
		return flag.ErrHelp
	}
	if flags.NArg() > 1 {
		return fmt.Errorf("one version, not %q", flags.Args())
	}
	version, err := releaseVersion(flags.Arg(0))
	if err != nil {
		return err
	}
	if *registry, err = releaseRegistry(*registry); err != nil {
		return err
	}
	name := "torpor-" + version + "-" + runtime.GOARCH
	if err := os.MkdirAll(*output, 0o755); err != nil {
		return err
	}
	work, err := os.MkdirTemp(*output, ".making-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(work)
	r := &release{version: version, registry: *registry, folder: filepath.Join(work, name), digests: map[string]string{}}
	if err := r.make(); err != nil {
		return err
	}
	final := filepath.Join(*output, name)
	tarball := filepath.Join(work, name+".tar.gz")
	if err := writeTarball(tarball, work, name); err != nil {
		return err
	}
	if err := os.RemoveAll(final); err != nil {
		return err
	}
	if err := errors.Join(os.Rename(r.folder, final), os.Rename(tarball, final+".tar.gz")); err != nil {
		return err
	}
	for _, note := range r.notes {
		say("note: %s", note)
	}
	say("the bundle is %s, and %s.tar.gz; NOTES.md in it says what to do with it", final, final)
	return nil
}

var semanticVersion = regexp.MustCompile(`^[0-9]+\.[0-9]+\.[0-9]+(-[0-9A-Za-z.-]+)?$`)

// releaseVersion checks the given version, or makes one of the workspace's version and the commit.
func releaseVersion(asked string) (string, error) {
	if asked != "" {
		version := strings.TrimPrefix(asked, "v")
		if !semanticVersion.MatchString(version) || len(version) > 100 {
			return "", fmt.Errorf("%q is no semantic version that an image's tag can have, such as 1.2.3 or 1.2.3-rc.1", asked)
		}
		return version, nil
	}
	text, err := os.ReadFile(filepath.Join(repoRoot, "Cargo.toml"))
	if err != nil {
		return "", err
	}
	workspace := first(regexp.MustCompile(`(?m)^version = "(.*)"$`), string(text))
	commit, err := gitCommit()
	if err != nil {
		return "", fmt.Errorf("which version? %w", err)
	}
	return workspace + "-g" + commit, nil
}

// gitCommit returns the abbreviated commit of the sources, with "-dirty" after changes.
func gitCommit() (string, error) {
	commit, err := outputIn(time.Minute, repoRoot, nil, nil, "git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*")
	if err != nil {
		return "", fmt.Errorf("Git does not tell the commit of these sources: %w", err)
	}
	return strings.TrimSpace(commit), nil
}

var registryName = regexp.MustCompile(`^[a-z0-9][-a-z0-9.]*(:[0-9]+)?(/[a-z0-9]+([._-]+[a-z0-9]+)*)*$`)

// releaseRegistry checks the registry that the user named. The default is a name that cannot exist.
func releaseRegistry(asked string) (string, error) {
	if asked == "" {
		return "torpor.invalid", nil
	}
	registry := strings.TrimSuffix(asked, "/")
	if !registryName.MatchString(registry) {
		return "", fmt.Errorf("%q is no registry: say HOST[:PORT][/PATH] in lower case, without https://", asked)
	}
	return registry, nil
}

// reference is an image by its digest, in the registry.
func (r *release) reference(repository string) string {
	return r.registry + "/" + filepath.Base(repository) + "@" + r.digests[repository]
}

func (r *release) make() error {
	for _, folder := range []string{"images", "bin", "sbom"} {
		if err := os.MkdirAll(filepath.Join(r.folder, folder), 0o755); err != nil {
			return err
		}
	}
	steps := []func() error{r.checkDependencies, r.build, r.writeImages, r.writeManifests, r.writeChart, r.writeBills, r.writeNotes, r.writeSums}
	for _, step := range steps {
		if err := step(); err != nil {
			return err
		}
	}
	return nil
}

// checkDependencies ends the release for a licence or source that deny.toml does not allow, and for
// a known vulnerability.
func (r *release) checkDependencies() error {
	if err := deny("licenses", "bans", "sources"); err != nil {
		return err
	}
	checked, err := denyAdvisories()
	if err != nil {
		return err
	}
	if !checked {
		r.notes = append(r.notes, "known vulnerabilities of the crates were NOT checked: RustSec's database could not be fetched")
	}
	return nil
}

func (r *release) build() (err error) {
	r.tools, err = toolsOf([]artifact{artifactNamed("runsc"), artifactNamed("kubernetes"), helmArtifact, cycloneDXArtifact, goModArtifact}, true)
	if err != nil {
		return err
	}
	profile := os.Getenv("TORPOR_PROFILE")
	if profile == "" {
		profile = "release"
	}
	if profile != "release" {
		r.notes = append(r.notes, "the programs are built in profile "+profile+": this bundle is a try, not a release")
	}
	commit, err := gitCommit()
	if err != nil {
		return err
	}
	// Programs print it with --version (.cargo/config.toml has the default).
	if err := os.Setenv("TORPOR_GIT_COMMIT", commit); err != nil {
		return err
	}
	r.target, err = cargoBuild(profile)
	if err != nil {
		return err
	}
	for name, source := range map[string]string{
		"kubectl-torpor":          filepath.Join(r.target, "kubectl-torpor"),
		"kubectl_complete-torpor": filepath.Join(repoRoot, "cli/kubectl_complete-torpor"),
	} {
		to := filepath.Join(r.folder, "bin", name)
		if err := errors.Join(copyFile(source, to), os.Chmod(to, 0o755)); err != nil {
			return err
		}
	}
	if runtime.GOARCH == "amd64" {
		r.notes = append(r.notes, "for amd64 alone; on an arm64 machine hack/release makes the bundle for arm64")
	}
	return nil
}

func (r *release) writeImages() error {
	for _, image := range torporImages(r.target, r.tools) {
		name := filepath.Base(image.repository)
		made, _, err := image.contents(r.registry + "/" + name + ":" + r.version)
		if err != nil {
			return err
		}
		digest, err := made.Write(filepath.Join(r.folder, "images", name+".tar"))
		if err != nil {
			return fmt.Errorf("image %s: %w", name, err)
		}
		r.digests[image.repository] = digest
		say("image %s is %s", name, digest)
	}
	return nil
}

func (r *release) writeManifests() error {
	for file, folder := range map[string]string{"torpor.yaml": "deploy", "torpor-uninstall.yaml": "deploy/uninstall"} {
		text, err := output(time.Minute, r.tools["kubectl"], "kustomize", filepath.Join(repoRoot, folder))
		if err != nil {
			return err
		}
		for repository := range r.digests {
			text = strings.ReplaceAll(text, unsetImage(repository), r.reference(repository))
		}
		if strings.Contains(text, ":unset") {
			return fmt.Errorf("%s names an image that the release does not have", folder)
		}
		if err := writeFile(filepath.Join(r.folder, file), []byte(text), 0o644); err != nil {
			return err
		}
	}
	return nil
}

// writeChart packs a copy of the chart whose values have the digests.
func (r *release) writeChart() error {
	chart := filepath.Join(filepath.Dir(r.folder), "torpor")
	if err := copyFollowing(filepath.Join(repoRoot, chartFolder), chart); err != nil {
		return err
	}
	path := filepath.Join(chart, "values.yaml")
	text, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	values, err := valuesByDigest(string(text), r.registry, r.digests)
	if err != nil {
		return err
	}
	if err := writeFile(path, []byte(values), 0o644); err != nil {
		return err
	}
	_, err = runHelm(time.Minute, "package", chart, "--version", r.version, "--app-version", r.version, "--destination", r.folder)
	return err
}

// valuesByDigest puts registry and digests into the chart's values, each in the one place that
// there is for it.
func valuesByDigest(values, registry string, digests map[string]string) (string, error) {
	put := func(pattern, text string) error {
		found := regexp.MustCompile(pattern)
		if places := found.FindAllStringIndex(values, -1); len(places) != 1 {
			return fmt.Errorf("the chart's values have %d places for %q: one was expected", len(places), text)
		}
		values = found.ReplaceAllString(values, "${1}"+text)
		return nil
	}
	if registry != "torpor.invalid" {
		if err := put(`(?m)^(  registry: )""$`, registry); err != nil {
			return "", err
		}
	}
	for repository, digest := range digests {
		name := regexp.QuoteMeta("torpor.invalid/" + filepath.Base(repository))
		if err := put(`(?m)^(\s*repository: `+name+`\n(?:\s*#.*\n)*\s*digest: )""$`, digest); err != nil {
			return "", err
		}
	}
	return values, nil
}

// shippedCrates are the packages whose programs the bundle has, by their folders.
var shippedCrates = map[string]string{
	"controller": "torpor-controller", "router": "torpor-router", "runtime": "torpor-runtime",
	"node-agent": "torpor-agent", "node-agent/shim": "torpor-shim", "node-agent/inside": "torpor-inside", "cli": "torpor-cli",
}

// writeBills says what each program is made of. cargo-cyclonedx writes beside each Cargo.toml, so
// it works on a copy.
func (r *release) writeBills() error {
	copied := filepath.Join(filepath.Dir(r.folder), "sources")
	tracked, err := outputIn(time.Minute, repoRoot, nil, nil, "git", "ls-files", "-z", "--", "*.rs", "*Cargo.toml", "Cargo.lock", "rust-toolchain.toml")
	if err != nil {
		return err
	}
	for name := range strings.SplitSeq(strings.Trim(tracked, "\x00"), "\x00") {
		to := filepath.Join(copied, name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(to), 0o755), copyFile(filepath.Join(repoRoot, name), to)); err != nil {
			return err
		}
	}
	const file = "bill"
	environ := []string{"PATH=" + filepath.Dir(r.tools["cargo-cyclonedx"]) + ":" + os.Getenv("PATH")}
	_, err = outputIn(5*time.Minute, copied, environ, nil, "cargo", "cyclonedx", "--format", "json", "--spec-version", "1.5", "--override-filename", file, "--target", rustTarget(), "--no-build-deps")
	if err != nil {
		return fmt.Errorf("SBOM of the crates: %w", err)
	}
	for folder, name := range shippedCrates {
		bill, err := os.ReadFile(filepath.Join(copied, folder, file+".json"))
		if err != nil {
			return err
		}
		if err := writeFile(filepath.Join(r.folder, "sbom", name+".cdx.json"), []byte(withoutPlace(string(bill), copied)), 0o644); err != nil {
			return err
		}
	}
	_, err = output(5*time.Minute, r.tools["cyclonedx-gomod"], "bin", "-json", "-version", runscVersion,
		"-output", filepath.Join(r.folder, "sbom", "runsc.cdx.json"), r.tools["runsc"])
	if err != nil {
		return fmt.Errorf("SBOM of runsc: %w", err)
	}
	return nil
}

// withoutPlace replaces the build folder in the names of the workspace's crates.
func withoutPlace(bill, place string) string {
	return strings.ReplaceAll(bill, "file://"+place+"/", "file:///torpor/")
}

// rustTarget is Rust's name of what the programs are built for.
func rustTarget() string {
	return map[string]string{"amd64": "x86_64", "arm64": "aarch64"}[runtime.GOARCH] + "-unknown-linux-gnu"
}

func (r *release) writeNotes() error {
	if err := copyFile(filepath.Join(repoRoot, "LICENSE"), filepath.Join(r.folder, "LICENSE")); err != nil {
		return err
	}
	return writeFile(filepath.Join(r.folder, "NOTES.md"), []byte(releaseNotes(r)), 0o644)
}

// writeSums lists the digests of all files of the bundle, as `sha256sum --check` reads them.
func (r *release) writeSums() error {
	var lines []string
	err := filepath.WalkDir(r.folder, func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		sum, err := fileDigest(path)
		if err != nil {
			return err
		}
		name, err := filepath.Rel(r.folder, path)
		lines = append(lines, sum+"  "+name+"\n")
		return err
	})
	if err != nil {
		return err
	}
	slices.SortFunc(lines, func(a, b string) int { return strings.Compare(a[64:], b[64:]) })
	return writeFile(filepath.Join(r.folder, "SHA256SUMS"), []byte(strings.Join(lines, "")), 0o644)
}

// copyFollowing copies a folder; links become what they lead to.
func copyFollowing(from, to string) error {
	info, err := os.Stat(from)
	if err != nil {
		return err
	}
	if !info.IsDir() {
		return copyFile(from, to)
	}
	entries, err := os.ReadDir(from)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(to, 0o755); err != nil {
		return err
	}
	for _, entry := range entries {
		if err := copyFollowing(filepath.Join(from, entry.Name()), filepath.Join(to, entry.Name())); err != nil {
			return err
		}
	}
	return nil
}

// writeTarball packs the folder `name` of `parent`, without times and owners.
func writeTarball(file, parent, name string) error {
	out, err := os.Create(file)
	if err != nil {
		return err
	}
	defer out.Close()
	packed := gzip.NewWriter(out)
	w := tar.NewWriter(packed)
	err = filepath.WalkDir(filepath.Join(parent, name), func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		info, err := entry.Info()
		if err != nil {
			return err
		}
		inside, err := filepath.Rel(parent, path)
		if err != nil {
			return err
		}
		header := tar.Header{Name: inside, Size: info.Size(), Mode: int64(info.Mode().Perm()), Typeflag: tar.TypeReg, ModTime: time.Unix(0, 0)}
		if err := w.WriteHeader(&header); err != nil {
			return err
		}
		in, err := os.Open(path)
		if err != nil {
			return err
		}
		defer in.Close()
		_, err = io.Copy(w, in)
		return err
	})
	return errors.Join(err, w.Close(), packed.Close(), out.Close())
}

// run a program whose words are for the user.
func runLoudly(environ []string, program string, args ...string) error {
	cmd := exec.Command(program, args...)
	cmd.Dir, cmd.Env, cmd.Stdout, cmd.Stderr = repoRoot, environ, os.Stderr, os.Stderr
	return cmd.Run()
}
