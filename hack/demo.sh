#!/usr/bin/env bash
# The demo. A Sandbox is suspended with its memory and resumed, hibernates in place and is woken,
# falls asleep when idle and wakes by a curl. The script installs missing packages, builds, starts
# the development cluster and installs Torpor. KEEP=0 takes all of it down at the end.
# With KUBECONFIG set the demo runs on that cluster, which must have Torpor and the image
# torpor.dev/demo-python:dev.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

NAMESPACE=torpor-demo
FAILED=0
# The development cluster may run already.
STARTED=no

if [ -n "${KUBECONFIG:-}" ]; then
	kubectl() { command kubectl "$@"; }
	own_cluster=no
else
	kubectl() { "$REPO_ROOT/hack/cluster" kubectl "$@"; }
	own_cluster=yes
fi

# now: prints seconds since the epoch, with milliseconds.
now() { date +%s.%3N; }
since() { awk -v a="$1" -v b="$(now)" 'BEGIN { printf "%.2f", b - a }'; }

# check WORDS COMMAND…: prints one line with the outcome of the command.
check() {
	local words=$1
	shift
	if "$@" >/dev/null 2>&1; then
		printf '    ok    %s\n' "$words"
	else
		printf '    WRONG %s\n' "$words"
		FAILED=1
	fi
}

# wait_until SECONDS WORDS COMMAND…: polls until the command succeeds. After the time limit it ends
# the demo with the state of the cluster. TORPOR_TIME_SCALE multiplies the limit on a slow machine.
wait_until() {
	local deadline=$((SECONDS + $1 * ${TORPOR_TIME_SCALE:-1})) words=$2
	shift 2
	until "$@" >/dev/null 2>&1; do
		[ "$SECONDS" -lt "$deadline" ] || lost "not seen in time: $words"
		sleep 0.1
	done
}

# lost WORDS: prints the state of the cluster and ends the demo.
lost() {
	printf '\n%s\n' "$*" >&2
	explain
	exit 1
}

explain() {
	kubectl -n "$NAMESPACE" get sandboxes,pods,sandboxsnapshots -o wide >&2 || true
	kubectl -n "$NAMESPACE" describe sandbox demo >&2 || true
	kubectl -n "$NAMESPACE" describe pod demo >&2 || true
	kubectl -n agent-sandbox-system logs daemonset/torpor-agent --tail=40 >&2 || true
	kubectl -n agent-sandbox-system logs --prefix --selector=app=agent-sandbox-controller --tail=40 >&2 || true
}

condition() {
	kubectl -n "$NAMESPACE" get "$1" -o jsonpath="{.status.conditions[?(@.type=='$2')].status}"
}
is() { [ "$(condition "$1" "$2")" = "$3" ]; }
pod_field() { kubectl -n "$NAMESPACE" get pod demo -o jsonpath="{$1}"; }
gone() { ! kubectl -n "$NAMESPACE" get "$1" >/dev/null 2>&1; }
state() { kubectl -n "$NAMESPACE" exec demo -c python -- python3 /demo/state.py; }
ask() { state >"$TMP/$1"; }
value() { awk -v name="$2" '$1 == name { print $2 }' "$TMP/$1"; }
same() { [ -n "$(value after "$1")" ] && [ "$(value before "$1")" = "$(value after "$1")" ]; }
at_least() { [ "$(value after "$1")" -ge "$(value before "$1")" ]; }

# pod_memory UID: prints the Pod's working set in MiB as the kubelet counts it: the cgroup's memory
# less droppable page cache, such as that of a new image. Prints nothing for a Pod
# of another machine.
pod_memory() {
	local root cgroup
	for root in /sys/fs/cgroup/memory /sys/fs/cgroup; do
		cgroup=$(find "$root" -maxdepth 8 -type d -name "*pod*${1//-/?}*" -print -quit 2>/dev/null) || true
		[ -n "$cgroup" ] || continue
		# The first two files are those of cgroup v1 and v2.
		{ cat "$cgroup/memory.usage_in_bytes" "$cgroup/memory.current" "$cgroup/memory.stat" 2>/dev/null || true; } | awk '
			NF == 1 { used = $1 }
			$1 == "total_inactive_file" || ($1 == "inactive_file" && !cache) { cache = $2 }
			END { printf "%d", (used - cache) / 1048576 }'
		return
	done
}

# own_cluster_needs, other_cluster_needs: name everything that is missing before anything else.
own_cluster_needs() {
	need root go rust
	# A linker for Rust, and clients for a request and for a WebSocket. The sandbox has its own
	# python3.
	install_missing cc="gcc libc6-dev" curl=curl python3=python3
	warn_of_space 15
}
other_cluster_needs() {
	type -P kubectl >/dev/null || die "KUBECONFIG is set, and kubectl, by which the demo would use that cluster, is missing: install it, or unset KUBECONFIG for a cluster of the demo's own"
	say "the demo uses the cluster of KUBECONFIG=$KUBECONFIG; unset it for a cluster of its own"
	kubectl --request-timeout=10s get customresourcedefinition/sandboxes.agents.x-k8s.io runtimeclass/torpor >/dev/null ||
		die "that cluster does not answer, or has no Torpor (see above): install it as README.md says, or unset KUBECONFIG for a cluster of the demo's own"
}

prepare() {
	if [ "$own_cluster" = no ]; then
		other_cluster_needs
	else
		own_cluster_needs
		STARTED=yes
		"$REPO_ROOT/hack/cluster" up
		"$REPO_ROOT/hack/image" dev
		"$REPO_ROOT/hack/cluster" install-torpor
	fi
	kubectl delete namespace "$NAMESPACE" --ignore-not-found --wait=true --timeout=120s
	kubectl create namespace "$NAMESPACE"
	kubectl -n "$NAMESPACE" create configmap demo-program --from-file="$REPO_ROOT/hack/demo/holder.py" \
		--from-file="$REPO_ROOT/hack/demo/state.py" --from-file="$REPO_ROOT/hack/demo/websocket.py"
}

start() {
	kubectl apply -f "$REPO_ROOT/hack/demo/sandbox.yaml"
	wait_until 120 "Sandbox Ready" is sandbox/demo Ready True
	wait_until 60 "the program answers" ask before
	uid=$(pod_field .metadata.uid)
	local used
	used=$(pod_memory "$uid")
	printf '    a Python program holds %s MiB in a dict; its pod uses %s MiB of memory\n' "$(value before memory_mib)" "${used:-?}"
}

verify() {
	check "the dict is the same, block for block (sha256 $(value after memory_sha256 | cut -c 1-12)…)" same memory_sha256
	check "the counter went on: $(value before counter) → $(value after counter)" at_least counter
	check "same process since $(value after born), secret $(value after secret)" same secret
	check "the child process runs ($(value after child))" child_runs
	check "files on the PVC, the root file system and the emptyDir" files_there
	check "the file that was open is still open" open_file_there
	check "same hostname: $(value after hostname)" same hostname
}
child_runs() { same child && [ "$(value after child_runs)" = True ]; }
files_there() {
	local file
	for file in pvc root empty_dir; do [ "$(value after files.$file)" = True ] || return 1; done
}
open_file_there() { [ "$(value after open_file)" = True ]; }

suspend() {
	local begin
	begin=$(now)
	old_uid=$(pod_field .metadata.uid)
	local used
	used=$(pod_memory "$old_uid")
	kubectl -n "$NAMESPACE" patch sandbox demo --type=merge -p '{"spec":{"operatingMode":"Suspended"}}'
	wait_until 60 "Sandbox Suspended" is sandbox/demo Suspended True
	printf '    suspended after %s s\n' "$(since "$begin")"
	check "the Pod is gone" gone pod/demo
	check "nothing of it is left in the node's memory (it used ${used:-?} MiB)" has_no_cgroup "$old_uid"
	kubectl -n "$NAMESPACE" get sandboxsnapshots
}
has_no_cgroup() { [ -z "$(pod_memory "$1")" ]; }

resume() {
	local begin
	begin=$(now)
	kubectl -n "$NAMESPACE" patch sandbox demo --type=merge -p '{"spec":{"operatingMode":"Running"}}'
	wait_until 60 "Sandbox Ready" is sandbox/demo Ready True
	wait_until 60 "the program answers" ask after
	printf '    answered again after %s s\n' "$(since "$begin")"
	check "it is a new Pod" [ "$(pod_field .metadata.uid)" != "$old_uid" ]
	verify
}

hibernate() {
	local begin uid used left
	uid=$(pod_field .metadata.uid)
	used=$(pod_memory "$uid")
	ip=$(pod_field .status.podIP)
	ask before
	begin=$(now)
	kubectl -n "$NAMESPACE" annotate sandbox demo torpor.dev/hibernate=true
	wait_until 60 "Sandbox Hibernated" is sandbox/demo Hibernated True
	printf '    hibernated after %s s\n' "$(since "$begin")"
	left=$(pod_memory "$uid")
	[ -z "$used" ] || check "its memory is free: the pod uses $left MiB, it used $used" [ "$left" -lt $((used / 5)) ]
	check "the Pod is still there and Running" [ "$(pod_field .status.phase)" = Running ]
	check "it never restarted" [ "$(pod_field .status.containerStatuses[0].restartCount)" = 0 ]
}

wake() {
	local begin
	begin=$(now)
	kubectl -n "$NAMESPACE" exec demo -c python -- true
	printf '    an exec woke it: kubectl exec took %s s in all\n' "$(since "$begin")"
	ask after
	verify
	check "same Pod address: $ip" [ "$(pod_field .status.podIP)" = "$ip" ]
	check "it never restarted" [ "$(pod_field .status.containerStatuses[0].restartCount)" = 0 ]
	kubectl -n "$NAMESPACE" annotate sandbox demo torpor.dev/hibernate-
}

# hear: reads the next line of the WebSocket's client into `said`.
hear() { read -r -t 20 said <&7 || lost "nothing came over the WebSocket within 20 s"; }

# The WebSocket opens before the sandbox sleeps and is silent until the sandbox is awake again.
fall_asleep() {
	local begin uid said
	uid=$(pod_field .metadata.uid)
	ask before
	coproc WEBSOCKET { exec python3 "$REPO_ROOT/hack/demo/talk.py" "$ip" 8080; }
	# Bash closes the descriptors of a coprocess that has ended.
	exec 7<&"${WEBSOCKET[0]}" 8>&"${WEBSOCKET[1]}"
	hear
	echo "before the sleep" >&8
	hear
	check "a WebSocket to the Pod echoes: ${said#* }" [ "${said#* }" = "1 before the sleep" ]
	begin=$(now)
	kubectl -n "$NAMESPACE" annotate sandbox demo torpor.dev/hibernate-after=3s
	wait_until 90 "Sandbox Hibernated" is sandbox/demo Hibernated True
	printf '    fell asleep %s s after it was told to when idle for 3 s; the pod uses %s MiB\n' "$(since "$begin")" "$(pod_memory "$uid")"
}

# Only the time of the request matters. A proxy has no route to a Pod.
wake_by_request() {
	local took status said
	took=$(curl --silent --show-error --noproxy '*' --max-time 20 --dump-header "$TMP/head" --output /dev/null --write-out '%{time_total}' "http://$ip:8080/") ||
		lost "curl http://$ip:8080/ got no answer (limit: 20 s)"
	printf '    one curl woke it: the answer was there after %.2f s\n' "$took"
	status=$(head -n 1 "$TMP/head" | tr -d '\r')
	check "the answer: $status" [ "$(cut -d ' ' -f 2 <<<"$status")" = 200 ]
	echo "after the sleep" >&8
	hear
	check "the WebSocket from before the sleep goes on, and its server knows it: ${said#* } (after ${said%% *} ms)" [ "${said#* }" = "2 after the sleep" ]
	exec 7<&- 8>&-
	kubectl -n "$NAMESPACE" annotate sandbox demo torpor.dev/hibernate-after-
	ask after
	verify
	check "it never restarted" [ "$(pod_field .status.containerStatuses[0].restartCount)" = 0 ]
}

finish() {
	local status=$?
	rm -rf "$TMP"
	[ "$status" = 0 ] || [ -z "$STEP_NOW" ] || say "FAILED in: $STEP_NOW (exit code $status)"
	if [ "$STARTED" = yes ] && [ "${KEEP:-1}" = 0 ]; then
		"$REPO_ROOT/hack/cluster" down || status=1
	fi
	exit "$status"
}
TMP=$(mktemp -d)
trap finish EXIT
step "prepare: cluster, images, Torpor" prepare
step "start a Sandbox" start
step "suspend it: its memory is saved, its Pod deleted" suspend
step "resume it: a new Pod continues" resume
step "hibernate it in place" hibernate
step "wake it by kubectl exec" wake
# This machine may have no route to a Pod of another cluster.
if [ "$own_cluster" = yes ]; then
	step "let it fall asleep by itself" fall_asleep
	step "wake it by one curl" wake_by_request
fi
echo
print_steps
left="The cluster is still up: hack/cluster kubectl -n $NAMESPACE get sandboxes; hack/cluster down ends it"
if [ "$own_cluster" = no ]; then
	left="kubectl delete namespace $NAMESPACE takes away what it made"
elif [ "${KEEP:-1}" = 0 ]; then
	step "take everything down" "$REPO_ROOT/hack/cluster" down
	STARTED=no
	left="The machine is as it was"
fi
if [ "$FAILED" != 0 ]; then
	echo "the demo FAILED: see the lines marked WRONG" >&2
	exit 1
fi
echo "everything held. $left" >&2
