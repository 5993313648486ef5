package main

import (
	"fmt"
	"path/filepath"
	"runtime"
	"strings"
)

// releaseNotes says what is in a bundle and what to do with it.
func releaseNotes(r *release) string {
	var text strings.Builder
	say := func(format string, args ...any) { fmt.Fprintf(&text, format+"\n", args...) }
	say("# Torpor %s for linux/%s\n", r.version, runtime.GOARCH)
	for _, note := range r.notes {
		say("- Note: %s.", note)
	}
	say("- gVisor: `runsc` %s (module %s, with one file and one linker flag of Torpor's).\n", runscVersion, gvisorModule)
	say("## Check\n\n```\nsha256sum --check SHA256SUMS\n```\n")
	say("`SHA256SUMS` came the same way as the files: compare its own digest with one that you got another way, or check its signature where there is one.")
	say("`sbom/` has CycloneDX bills of materials for scanners.\n")
	say("## Put the images where nodes find them\n")
	if r.registry == "torpor.invalid" {
		say("References in this bundle say `torpor.invalid`, a registry that cannot exist. Name yours first, and write it in its place:\n")
		say("```\nREGISTRY=registry.example/torpor\nsed -i \"s|torpor\\.invalid/|$REGISTRY/|\" torpor.yaml torpor-uninstall.yaml\n```\n")
	} else {
		say("```\nREGISTRY=%s\n```\n", r.registry)
	}
	say("Push them as they are: their digests must stay.\n\n```")
	for _, name := range r.imageNames() {
		say("skopeo copy --preserve-digests oci-archive:images/%s.tar docker://$REGISTRY/%s:%s", name, name, r.version)
	}
	say("```\n\nOr, without a registry, on every node (kubelets look for the name with the digest):\n\n```")
	for _, name := range r.imageNames() {
		tagged := r.registry + "/" + name
		say("ctr -n k8s.io images import images/%s.tar", name)
		say("ctr -n k8s.io images tag --force %s:%s $REGISTRY/%s@%s", tagged, r.version, name, r.digestOf(name))
	}
	say("```\n\n## Install\n\nBy the manifests, with an overlay over `torpor.yaml` where nodes differ from the installer's defaults (docs/how-to/install.md):\n")
	say("```\nkubectl apply --server-side -f torpor.yaml\n```\n\nOr by Helm:\n")
	registry := ""
	if r.registry == "torpor.invalid" {
		registry = " --set image.registry=$REGISTRY"
	}
	say("```\nhelm install torpor torpor-%s.tgz --namespace agent-sandbox-system --create-namespace%s\n```\n", r.version, registry)
	say("Then `kubectl -n agent-sandbox-system rollout status daemonset/torpor-agent` and `kubectl get sandboxnodes`. `bin/` belongs in a folder of `PATH`: `kubectl torpor`.")
	say("Before an upgrade read docs/how-to/upgrade.md and docs/how-to/gvisor.md: suspended Sandboxes are restored by the build of runsc that saved them alone.\n")
	say("## Digests\n\n| image | digest |\n|---|---|")
	for _, name := range r.imageNames() {
		say("| %s | `%s` |", name, r.digestOf(name))
	}
	return text.String()
}

func (r *release) imageNames() []string {
	names := sortedKeys(r.digests)
	for i, repository := range names {
		names[i] = filepath.Base(repository)
	}
	return names
}

func (r *release) digestOf(name string) string { return r.digests["torpor.dev/"+name] }
