// Command dev drives the development cluster: it builds the programs, starts and ends them, and
// makes and loads images. It is run by the script hack/cluster.
package main

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"syscall"
)

// repoRoot is the work tree this program was built for; hack/cluster sets it.
var repoRoot = ""

const usage = `usage: hack/cluster COMMAND

  up [--nodes N]        start the cluster, or repair it; builds what is missing. N adds or removes
                        nodes; without it the cluster keeps those that it has (at first 1)
  down                  end it and put the machine back as it was
  check                 say what keeps the cluster from running on this machine, if anything does; changes nothing
  reboot                kill all of it, take away what a reboot takes away, start it again on the same disk
  node-down NODE        turn a node off as a loss of power does; its disk is kept. Not node-0
  node-up NODE          turn it on again
  on NODE COMMAND…      run a command in a node's mount and network namespaces
  store up|down|status  an S3 server (versitygw) for Pods and nodes, built when first asked for;
                        prints its endpoint, bucket and keys; down keeps its data. up also loads the
                        image of a KMS plug-in (hack/kms.yaml)
  status                what runs
  kubeconfig            print the path of the administrator's kubeconfig
  kubectl ARGS…         kubectl on this cluster
  logs [NAME] [-f]      the log of one program; without NAME, which there are
  load-image FILE.tar…  import OCI archives into the nodes
  image …               make an image, or load those of the tests (see hack/image)
  build-torpor          compile Torpor, make its images, load them if the cluster runs
  install-torpor        build-torpor, apply hack/overlays/dev, wait until it runs
  uninstall-torpor      take Torpor off the cluster and its nodes
                        both take --helm: by the chart deploy/helm instead of kustomize
  book [--if-installed] make the book of docs/ in target/book by mdbook
  deny [--advisories]   check licences, bans and sources of crates by deny.toml; known vulnerabilities too
  release …             make a bundle to install from (see hack/release)
  stock-runsc           build runsc as gVisor's module alone makes it; print its path
  helm ARGS…            helm on this cluster; built when first asked for
  check-chart           the chart says what the kustomize base says; needs no cluster
  bench up|down|logs|kubectl ARGS…|env
                        the control plane of the benchmarks: no kubelet, 100 fake nodes; beside the
                        development cluster, from nothing at each up (see hack/dev bench claims)
  build                 install the Debian packages and build the programs that are missing, start nothing
  help                  this text

TORPOR_CONTAINERD=1.7 runs containerd 1.7 in place of 2; every command needs it then.
`

func main() {
	// The caller's may keep what the cluster writes from the users of its containers.
	syscall.Umask(0o022)
	if len(os.Args) < 2 {
		fmt.Fprint(os.Stderr, usage)
		os.Exit(2)
	}
	if wanted := os.Getenv(containerdOlder); wanted != "" && !isContainerd1() {
		fmt.Fprintf(os.Stderr, "hack/cluster: %s is %q; allowed: 1.7, or nothing for containerd 2\n", containerdOlder, wanted)
		os.Exit(2)
	}
	if err := run(os.Args[1], os.Args[2:]); err != nil {
		if errors.Is(err, flag.ErrHelp) {
			os.Exit(2)
		}
		fmt.Fprintf(os.Stderr, "hack/cluster %s: %v\n", os.Args[1], err)
		os.Exit(1)
	}
}

func run(command string, args []string) error {
	nodes = membersOnDisk()
	switch command {
	case "up":
		return upCommand(args)
	case "node-down", "node-up":
		return nodeCommand(command, args)
	case "on":
		return onNode(args)
	case "store":
		return storeCommand(args)
	case "down":
		return down()
	case "check":
		return checkMachine()
	case "reboot":
		return reboot()
	case "status":
		return status()
	case "kubeconfig":
		fmt.Println(adminKubeconfig())
		return nil
	case "kubectl":
		return kubectl(args)
	case "logs":
		return logsCommand(args)
	case "load-image":
		if len(args) == 0 {
			return errors.New("which archives? usage: load-image FILE.tar…")
		}
		return loadImages(args...)
	case "image":
		return imageCommand(args)
	case "build-torpor":
		_, err := buildTorpor()
		return err
	case "install-torpor", "uninstall-torpor":
		return torporCommand(command, args)
	case "book":
		return bookCommand(args)
	case "deny":
		return denyCommand(args)
	case "release":
		return releaseCommand(args)
	case "stock-runsc":
		tools, err := toolsOf([]artifact{stockRunsc}, true)
		if err == nil {
			fmt.Println(tools["runsc"])
		}
		return err
	case "helm":
		return helmCommand(args)
	case "check-chart":
		return checkChart()
	case "build":
		if err := ensurePackages(runPackages); err != nil {
			return err
		}
		_, err := builtTools(true)
		return err
	case "bench":
		return benchCommand(args)
	case "supervise":
		return supervise(args[0])
	case "hold":
		return hold(args[0], args[1])
	case "help", "-h", "--help":
		fmt.Print(usage)
		return nil
	}
	return fmt.Errorf("no such command; `hack/cluster help` lists them")
}

func logsCommand(args []string) error {
	flags := flag.NewFlagSet("logs", flag.ContinueOnError)
	follow := flags.Bool("f", false, "go on as it grows")
	lines := flags.Int("n", 200, "how many lines")
	name := ""
	if len(args) > 0 && args[0][0] != '-' {
		name, args = args[0], args[1:]
	}
	if err := flags.Parse(args); err != nil {
		return flag.ErrHelp
	}
	if name == "" {
		name = flags.Arg(0)
	}
	return showLogs(name, *follow, *lines)
}
