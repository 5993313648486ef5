# Steps of hack/test.sh, as functions. Source this file after lib.sh and machine.sh; it uses the
# variables of hack/test.sh.

# keep_words: copies the output to a file.
keep_words() {
	said=$(mktemp)
	exec 3>&1 4>&2 > >(exec tee -i "$said") 2>&1
	keeper_of_words=$!
}

# last_words: prints the failed tests, their messages and their reports from the kept output.
last_words() {
	echo "=== what the step said that failed"
	tac "$said" | sed "/ == $STEP_NOW\$/q" | tac >"$said.step"
	grep -E -A 3 'panicked at|\.\.\. FAILED$|: (lost|cut off|stuck|left over): |^[Ee]rror' "$said.step" | cut -c 1-400 | head -c 5000 || true
	sed -n '/^=== report about /,/^=== end of the report/p' "$said.step" | cut -c 1-300 | head -c 8000 || true
	echo "=== and last"
	tail -n 20 "$said.step" | cut -c 1-200
}

finish() {
	local status=$?
	local name words=
	if [ -n "$said" ]; then
		exec >&3 2>&4 3>&- 4>&-
		# With a limit: a process that was left running may keep the pipe open.
		timeout 10 tail --pid="$keeper_of_words" -f /dev/null || true
		[ "$status" = 0 ] || words=$(last_words)
		rm -f "$said" "$said.step"
	fi
	for name in "${!BESIDE_PID[@]}"; do
		kill -- "-${BESIDE_PID[$name]}" 2>/dev/null || true
		rm -f "${BESIDE_LOG[$name]}"
	done
	if [ "$status" != 0 ] && [ -n "$cluster_started" ]; then
		explain >&2 || true
	fi
	if [ -n "$cluster_started" ] && [ -z "${KEEP:-}" ]; then
		"$cluster" down || status=1
		# After a failure more may be left over; the failure itself is reported.
		if [ "$status" = 0 ] && ! is_as_before "$machine_before"; then
			say "down did not leave the machine as it was (see the difference)"
			status=1
		fi
	fi
	[ -z "$machine_before" ] || rm -f "$machine_before"
	print_steps
	[ -z "$words" ] || printf '%s\n' "$words" >&2
	[ ! -s "$unsteady" ] || say "failed once and passed when run again: $(paste -sd ' ' "$unsteady")"
	rm -f "$unsteady"
	if [ "$status" = 0 ]; then
		say "all checks passed"
	else
		say "FAILED in: ${STEP_NOW:-taking the cluster down} (exit code $status)"
	fi
	exit "$status"
}
# explain: prints the state of the cluster after a failure.
explain() {
	echo "=== the cluster at the time of the failure"
	timeout 30 "$cluster" status || true
	timeout 30 "$cluster" kubectl get nodes,pods,sandboxes,sandboxsnapshots,sandboxnodes -A -o wide || true
	timeout 30 "$cluster" kubectl get events -A --sort-by=.lastTimestamp | tail -n 60 || true
	local pod
	for pod in $(timeout 30 "$cluster" kubectl get pods -n agent-sandbox-system -o name 2>/dev/null); do
		echo "--- $pod"
		timeout 30 "$cluster" kubectl logs -n agent-sandbox-system "$pod" --all-containers --tail=100 || true
	done
	local log
	for log in containerd kubelet kube-controller-manager; do
		echo "--- the end of $log's log"
		"$cluster" logs "$log" -n 40 || true
	done
}

# Everything that is missing is named first, and everything that the cluster would refuse later.
toolchains() {
	local cluster_needs=root
	[ -z "${SKIP_E2E:-}" ] || cluster_needs=
	# shellcheck disable=SC2086
	need $cluster_needs go rust
	# A linker for Rust, network namespaces for the unit tests, a client for the selftest.
	# hack/cluster installs the packages of the cluster.
	install_missing cc="gcc libc6-dev" ip=iproute2 curl=curl
	cargo fmt --version >/dev/null 2>&1 && cargo clippy --version >/dev/null 2>&1 || rustup component add rustfmt clippy ||
		die "cargo fmt or clippy is missing: run \`rustup component add rustfmt clippy\`"
	say "$(go version | cut -d ' ' -f 3), $(rustc --version)"
	warn_of_space 35
	[ -z "${SKIP_E2E:-}" ] || return 0
	if [ -n "$foreign_cluster" ]; then
		say "the end-to-end tests use the cluster of KUBECONFIG=$foreign_cluster; unset it for a cluster of their own"
		local server
		server=$(sed -n 's/^ *server: *//p' "$foreign_cluster" | head -n 1)
		curl -ks -o /dev/null --max-time 10 "$server" ||
			die "no cluster answers at ${server:-?} of KUBECONFIG=$foreign_cluster: start it, or unset KUBECONFIG"
	else
		"$cluster" check
	fi
}

go_checks() {
	local unformatted
	unformatted=$(gofmt -l hack/devcluster)
	[ -z "$unformatted" ] || die "not formatted as gofmt would: $unformatted"
	(cd hack/devcluster && GOFLAGS=-buildvcs=false GOWORK=off go vet ./... && GOFLAGS=-buildvcs=false GOWORK=off go test ./...)
}

# Crates whose tests create no mounts, network namespaces or cgroups.
QUIET=api,cli,controller,node-agent/core,router
# The end-to-end tests need a cluster and are a target of a crate of their own. All tests are built
# together even if only some of them run: another selection of crates would have another set of
# features, and so another build.
unit_tests() { cargo test --locked --workspace --exclude torpor-tests "$@"; }
library_tests() { cargo test --locked -p torpor-tests --lib "$@"; }
tests_of() { unit_tests --config "target.'cfg(all())'.runner=['$REPO_ROOT/hack/tests-of', '$1']"; }
quiet_unit_tests() { tests_of "$QUIET"; }
other_unit_tests() {
	tests_of "-$QUIET"
	library_tests
}
all_unit_tests() {
	unit_tests "$@"
	library_tests "$@"
}
# Tests of background steps are built before, so that a background step only runs tests.
build_unit_tests() { all_unit_tests --no-run; }

# beside NAME COMMAND…: starts a background step. `ended NAME` waits for it and prints its output.
beside() {
	local name=$1
	shift
	BESIDE_LOG[$name]=$(mktemp)
	set -m
	("$@") >"${BESIDE_LOG[$name]}" 2>&1 &
	BESIDE_PID[$name]=$!
	set +m
}
ended() {
	local status=0
	wait "${BESIDE_PID[$1]}" || status=$?
	cat "${BESIDE_LOG[$1]}"
	rm -f "${BESIDE_LOG[$1]}"
	unset "BESIDE_PID[$1]" "BESIDE_LOG[$1]"
	return "$status"
}

cluster_up() {
	# Only tests that leave the machine alone run beside this step, and none at its end.
	if [ -z "${KEEP:-}" ]; then
		end_old_swap
		machine_before=$(mktemp)
		fingerprint >"$machine_before"
	fi
	cluster_started=1
	# A cluster that is taken down again gets images of the unit tests' profile, which need only
	# to be linked. A cluster that stays gets optimised images.
	[ -n "${KEEP:-}" ] || export TORPOR_PROFILE=${TORPOR_PROFILE:-dev}
	"$cluster" up
	"$REPO_ROOT/hack/image" dev
}

containerd_config() {
	(cd /var/lib/torpor-dev/node-0/containerd && find . -path ./root -prune -o -type f -exec sha256sum {} + | sort)
}
containerd_pid() { cat /run/torpor-dev/node-0/containerd.pid; }

# install [--helm]
install() {
	config_before=$(containerd_config)
	"$cluster" install-torpor "$@"
	[ "$(containerd_config)" != "$config_before" ] || die "containerd's configuration is as it was: nothing was installed"
}

install_again() {
	local pid
	pid=$(containerd_pid)
	"$cluster" kubectl -n agent-sandbox-system rollout restart daemonset/torpor-installer daemonset/torpor-agent
	"$cluster" kubectl -n agent-sandbox-system rollout status daemonset/torpor-installer --timeout=120s
	"$cluster" kubectl -n agent-sandbox-system rollout status daemonset/torpor-agent --timeout=120s
	[ "$(containerd_pid)" = "$pid" ] || die "an installation that changed nothing restarted containerd"
}

# uninstall [--helm]
uninstall() {
	local left
	"$cluster" uninstall-torpor "$@"
	left=$("$cluster" kubectl get customresourcedefinitions,clusterroles,clusterrolebindings,runtimeclasses,validatingadmissionpolicies,validatingadmissionpolicybindings,namespaces -o name |
		grep -E 'torpor|agents\.x-k8s\.io|agent-sandbox|sandbox-router' | grep -v '/torpor-dev:' || true) # these are the development cluster's own
	[ -z "$left" ] || die "left behind in the cluster: $left"
	diff <(echo "$config_before") <(containerd_config) || die "containerd's configuration is not as it was before Torpor"
	[ ! -e /opt/torpor/bin ] || die "left behind: $(find /opt/torpor)"
	# The cluster mounts /run itself where /run is on a disk.
	if [ -e /run/torpor ]; then
		mountpoint -q /run/torpor && [ -z "$(ls -A /run/torpor)" ] || die "left behind: $(find /run/torpor)"
	fi
	"$cluster" status
}

# The chart installs Torpor, runs a Sandbox with the RuntimeClass, and removes all of it again.
by_helm() {
	install --helm
	"$cluster" kubectl apply -f - <<-END
		apiVersion: agents.x-k8s.io/v1beta1
		kind: Sandbox
		metadata: {name: by-helm, namespace: default}
		spec:
		  podTemplate:
		    spec:
		      runtimeClassName: torpor
		      terminationGracePeriodSeconds: 0
		      containers:
		      - {name: main, image: "torpor.dev/busybox:dev", command: [sleep, infinity]}
	END
	"$cluster" kubectl wait sandbox/by-helm --for=condition=Ready --timeout=60s
	# The garbage collector finds new kinds only twice a minute, so the test does not wait for it.
	"$cluster" kubectl delete sandbox/by-helm --cascade=background --timeout=60s
	"$cluster" kubectl delete pod/by-helm --ignore-not-found --timeout=60s
	"$cluster" helm --namespace agent-sandbox-system status torpor
	uninstall --helm
}

# e2e OPTION…: runs end-to-end tests. Tests that fail are run once more, one after the other, unless
# more than three fail: other tests beside them keep the machine busy. They are named at the end.
e2e() {
	local log status=0 names=()
	log=$(mktemp)
	end_to_end_tests "$@" 2>&1 | tee "$log" || status=$?
	mapfile -t names < <(tac "$log" | sed '/^failures:$/q' | sed -n 's/^    \([a-z_0-9:]*\)$/\1/p')
	rm -f "$log"
	[ "$status" != 0 ] || return 0
	[ "${#names[@]}" -ge 1 ] && [ "${#names[@]}" -le 3 ] || return "$status"
	say "these tests failed and are run once more: ${names[*]}"
	end_to_end_tests --exact "${names[@]}" --test-threads=1 || return
	printf '%s\n' "${names[@]}" >>"$unsteady"
}

end_to_end_tests() { without_proxy cargo test --locked -p torpor-tests --test e2e -- "$@"; }

# The end-to-end tests have three parts: most tests; tests that disturb the agent, beside modules
# that tolerate it; and tests that need the node for themselves, because they kill containerd,
# cordon the node, or count what all sandboxes of the node share.
BUSY_DISK=alone::capacity::images_of_idle
LAST=(alone::controller_away alone::killed alone::drain alone::programs alone::revoked alone::stock "$BUSY_DISK")
BESIDE_AGENT=(
	claims:: inject::the_program inject::a_runtime_that_cannot leftovers:: oci:: resources:: router:: sdk::claims sdk::the_ streams:: volumes::
)

end_to_end() {
	# kubectl finds the plugin in PATH. It is built without optimisation.
	export TORPOR_PLUGIN=${CARGO_TARGET_DIR:-$REPO_ROOT/target}/plugin
	PROFILE=dev hack/plugin "$TORPOR_PLUGIN"
	TORPOR_STOCK_RUNSC=$("$cluster" stock-runsc)
	export TORPOR_STOCK_RUNSC
	local others=() module
	for module in "${BESIDE_AGENT[@]}"; do
		others+=(--skip "$module")
	done
	e2e --skip alone:: --skip nodes:: "${others[@]}" --test-threads="${E2E_THREADS:-6}"
}

# Tests that replace or starve the agent wait most of the time, so others run beside them.
end_to_end_agent() {
	local status=0
	beside others e2e --skip alone:: "${BESIDE_AGENT[@]}" --test-threads=4
	e2e alone:: "${LAST[@]/#/--skip=}" --test-threads=1 || status=$?
	ended others || status=$?
	return "$status"
}

# Tests that disturb the whole node run one after the other. Beside them run the unit tests that
# create network namespaces, mounts and cgroups. These cannot run beside the comparison of the
# machine or beside the test of a busy disk.
end_to_end_node() {
	local status=0
	[ -n "$foreign_cluster" ] || beside other_unit_tests other_unit_tests
	e2e "${LAST[@]}" --skip "$BUSY_DISK" --test-threads=1 || status=$?
	[ -n "$foreign_cluster" ] || ended other_unit_tests || status=$?
	e2e "$BUSY_DISK" --test-threads=1 || status=$?
	return "$status"
}

# Tests of memory that continues on another node: a second node, and an S3 server. Both go again. At
# first the nodes give images to each other, then all images come from the S3 server.
end_to_end_nodes() {
	local status=0 system="$cluster kubectl -n agent-sandbox-system"
	"$cluster" up --nodes 2
	"$cluster" store up
	"$cluster" kubectl apply -f hack/repository.yaml
	# A running Pod would see new Secrets after a minute.
	$system rollout restart daemonset/torpor-agent deployment/agent-sandbox-controller
	local part
	for part in daemonset/torpor-installer daemonset/torpor-agent deployment/agent-sandbox-controller; do
		$system rollout status "$part" --timeout=120s
	done
	e2e nodes::direct --test-threads=1 || status=$?
	$system set env daemonset/torpor-agent TORPOR_IMAGES_ADDRESS-
	$system rollout status daemonset/torpor-agent --timeout=120s
	e2e nodes:: --skip nodes::direct --test-threads=1 || status=$?
	"$cluster" install-torpor
	"$cluster" store down
	"$cluster" up --nodes 1
	return "$status"
}

all_end_to_end() {
	step "end-to-end tests" end_to_end
	step "end-to-end tests that disturb the agent, and those that do not mind" end_to_end_agent
	step "end-to-end tests that disturb the node, and the rest of the unit tests" end_to_end_node
	[ -n "$foreign_cluster" ] || step "end-to-end tests with two nodes and an S3 server" end_to_end_nodes
}

# A short kill test with a random seed, which it prints. hack/chaos is the long one.
chaos() { hack/chaos --cycles 24 --seconds 60; }

# Kills the whole cluster and starts it again, so no step that needs the cluster runs beside it.
reboot() { without_proxy cargo test --locked -p torpor-tests --test reboot; }
