//go:build ignore

// Prepares the copy of gVisor's sources in which it runs:
//
//   - It writes gVisor's own seccomp programs, compiled ahead, into the file
//     runsc/boot/filter/filter_precompiled.go. Google's releases have them by a rule of their
//     Bazel build. A build from the Go module has none and compiles its program at each start of a
//     sandbox (20 ms of processor time here).
//   - It adds runsc/torpor.go. Garbage is then collected every hour, not every two minutes
//     (docs/decisions/2026-11-26-gvisor-garbage-collection-hourly.md). And `runsc boot` reads
//     further flags from a file of its bundle, the Pod's limits, which runsc itself reads only from
//     a cgroup of its own (docs/decisions/2026-11-26-pod-limits-shown-in-sandbox.md).
package main

import (
	"fmt"
	"log"
	"os"
	"strings"

	"gvisor.dev/gvisor/runsc/boot/filter/config"
)

const (
	registry = "runsc/boot/filter/filter_precompiled.go"
	disabled = "const PrecompilationDisabledAtBuildTime = true"
	empty    = "\tprograms := make(map[string]precompiledseccomp.Program)\n"
)

// added is a file of runsc's package main. The runtime's variable is not part of Go's compatibility
// promise: a Go without it does not link this file.
const added = `package main

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"
	_ "unsafe" // for go:linkname
)

//go:linkname forcegcperiod runtime.forcegcperiod
var forcegcperiod int64

func init() {
	forcegcperiod = int64(time.Hour)
	os.Args = withBootFlags(os.Args)
}

// withBootFlags inserts the words of the bundle's file boot-flags before the sandbox's id, which is
// the last argument. The last value of a repeated flag counts.
func withBootFlags(args []string) []string {
	command := slices.Index(args, "boot")
	if command < 0 {
		return args
	}
	for _, arg := range args[command:] {
		bundle, found := strings.CutPrefix(arg, "--bundle=")
		if !found {
			continue
		}
		flags, err := os.ReadFile(filepath.Join(bundle, "boot-flags"))
		if err != nil {
			return args
		}
		return slices.Insert(slices.Clone(args), len(args)-1, strings.Fields(string(flags))...)
	}
	return args
}
`

func main() {
	log.SetFlags(0)
	if err := os.WriteFile("runsc/torpor.go", []byte(added), 0o644); err != nil {
		log.Fatal(err)
	}
	source, err := os.ReadFile(registry)
	if err != nil {
		log.Fatal(err)
	}
	programs, err := config.PrecompiledPrograms()
	if err != nil {
		log.Fatal(err)
	}
	registered := empty
	for _, program := range programs {
		registered += program.Registration("\t", "precompiledseccomp", "programs")
	}
	text := string(source)
	for _, change := range [][2]string{{disabled, strings.Replace(disabled, "true", "false", 1)}, {empty, registered}} {
		if strings.Count(text, change[0]) != 1 {
			log.Fatalf("%s does not have %q once: this gVisor registers its programs otherwise", registry, change[0])
		}
		text = strings.Replace(text, change[0], change[1], 1)
	}
	if err := os.WriteFile(registry, []byte(text), 0o644); err != nil {
		log.Fatal(err)
	}
	fmt.Printf("%d seccomp programs\n", len(programs))
}
