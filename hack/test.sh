#!/usr/bin/env bash
# All checks of the repository, from formatting to the end-to-end tests in a development cluster.
#
#   hack/test.sh            everything; the cluster is taken down at the end
#   KEEP=1 hack/test.sh     leave the cluster as it is at the end
#   KUBECONFIG=… hack/test.sh   end-to-end tests on that cluster, where Torpor must be installed
#   SKIP_E2E=1 hack/test.sh     only the checks that need no cluster
#   VM=1 hack/test.sh       also a short set in a virtual machine with cgroup v2 (hack/vm)
#   E2E_THREADS=N hack/test.sh  number of end-to-end tests at once (6, for two processors)
#
# A development cluster that runs already is used and stays as it is. CI replaces it.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
. "$REPO_ROOT/hack/machine.sh"
. "$REPO_ROOT/hack/teststeps.sh"
cd "$REPO_ROOT"
cluster=$REPO_ROOT/hack/cluster
foreign_cluster=${KUBECONFIG:-}
cluster_started=
# The machine's state before the cluster, for a comparison after it.
machine_before=
# CI shows the end of the output only: the whole output, and the process that keeps it.
said=
keeper_of_words=
# A busy machine may be several times slower than usual. A longer limit costs time only where a test
# fails. The virtual machine has a default of its own.
vm_scale=${TORPOR_TIME_SCALE:-}
export TORPOR_TIME_SCALE=${TORPOR_TIME_SCALE:-2}
# Names of end-to-end tests that failed and passed when they were run again.
unsteady=$(mktemp)
# Process groups and logs of background steps, by name.
declare -A BESIDE_PID=() BESIDE_LOG=()

trap finish EXIT
trap 'exit 130' INT TERM
[ -z "${CI:-}" ] || keep_words

step "toolchains" toolchains
step "cargo fmt" cargo fmt --all --check
beside scripts hack/check-scripts
[ -n "${SKIP_E2E:-}$foreign_cluster" ] || beside chart "$cluster" check-chart
step "layers" hack/check-layers
step "guarantees" hack/check-guarantees
step "prose" hack/check-prose
step "licences, bans and sources of crates" "$cluster" deny
step "book of docs/" "$cluster" book --if-installed
step "development cluster: format, vet, tests" go_checks
step "clippy" cargo clippy --locked --workspace --all-targets -- -D warnings
step "scripts" ended scripts
if [ -n "${SKIP_E2E:-}" ]; then
	step "unit tests" all_unit_tests
	exit 0
fi
step "unit tests: build" build_unit_tests
if [ -n "$foreign_cluster" ]; then
	step "unit tests" all_unit_tests
	all_end_to_end
	exit 0
fi
# The selftest compares the machine before and after, including kubectl's processes.
step "Helm chart" ended chart
beside quiet_unit_tests quiet_unit_tests
if [ -n "${CI:-}" ] || [ ! -e /var/lib/torpor-dev/machine.json ]; then
	step "development cluster: selftest" hack/selftest --replace
else
	say "a development cluster is there: it is used, and left at the end"
	KEEP=1
fi
step "upstream's Python SDK" hack/python-sdk
step "cluster up" cluster_up
KUBECONFIG=$("$cluster" kubeconfig)
TORPOR_DEV=$cluster
export KUBECONFIG TORPOR_DEV
if [ -n "${KEEP:-}" ] && [ -e /opt/torpor/bin ]; then
	step "unit tests that leave the machine alone" ended quiet_unit_tests
	step "install Torpor" "$cluster" install-torpor
	all_end_to_end
	step "reboot of the node" reboot
	exit 0
fi
step "install by Helm, and take it off" by_helm
step "unit tests that leave the machine alone" ended quiet_unit_tests
step "install Torpor" install
all_end_to_end
[ -z "${CI:-}" ] || step "kill test, a short run" chaos
step "reboot of the node" reboot
step "install Torpor again" install_again
[ -n "${KEEP:-}" ] || step "take Torpor off" uninstall
[ -z "${VM:-}" ] || step "a machine with a stock kernel and cgroup v2" env -u TORPOR_TIME_SCALE ${vm_scale:+"TORPOR_TIME_SCALE=$vm_scale"} hack/vm short
