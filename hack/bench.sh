#!/usr/bin/env bash
# Measures what a hibernated sandbox costs and how fast it wakes, beside bare runsc on the same machine in the same run.
# usage: hack/bench.sh [RUNS]        (default 20; needs a running development cluster with Torpor: hack/demo.sh leaves one)
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
. "$REPO_ROOT/hack/benchrunsc.sh"

RUNS=${1:-20}
NAMESPACE=torpor-bench
SLEEPERS=${SLEEPERS:-19}
CLUSTER=/var/lib/torpor-dev
ENDPOINT=unix:///run/torpor-dev/node-0/containerd.sock
k() { timeout 120 "$CLUSTER/bin/kubectl" --kubeconfig "$CLUSTER/admin.kubeconfig" "$@"; }

[ "$(id -u)" = 0 ] || die "must run as root: it reads the pods' processes"
[ -x "$CLUSTER/bin/cri-execsync" ] || die "no development cluster with its programs: run hack/cluster up"
RUNSC=$(installed_runsc)
[ -x "$RUNSC" ] || die "Torpor is not installed on this node: run hack/cluster install-torpor"

TMP=$(mktemp -d)
cleanup() {
	k delete namespace "$NAMESPACE" --ignore-not-found --wait=false >/dev/null 2>&1 || true
	"$RUNSC" --root "$TMP/root" "${FLAGS[@]}" delete --force bare >/dev/null 2>&1 || true
	ip netns del torpor-bench 2>/dev/null || true
	umount "$TMP/root/null-netns" 2>/dev/null || true
	rm -rf "$TMP"
}
trap cleanup EXIT

micros() { echo $(($(date +%s%N) / 1000)); }

# percentile P FILE: of one number a line.
percentile() { sort -n "$2" | awk -v p="$1" '{ v[NR] = $1 } END { i = int((NR - 1) * p / 100 + 0.5) + 1; print v[i] }'; }
ms() { awk -v u="$1" 'BEGIN { printf "%.1f", u / 1000 }'; }
ratio() { awk -v a="$1" -v b="$2" 'BEGIN { printf "%.2f", a / b }'; }

# row WORDS FILE BASE-FILE: p50 and p99 in milliseconds, each with its ratio to the base.
row() {
	local p50 p99 b50 b99
	p50=$(percentile 50 "$2") p99=$(percentile 99 "$2") b50=$(percentile 50 "$3") b99=$(percentile 99 "$3")
	printf '%-46s p50 %8s ms (%s x)   p99 %8s ms (%s x)\n' "$1" "$(ms "$p50")" "$(ratio "$p50" "$b50")" "$(ms "$p99")" "$(ratio "$p99" "$b99")"
}

pod() { # NAME IMAGE COMMAND-JSON
	cat <<-Y
		apiVersion: v1
		kind: Pod
		metadata: {name: $1, namespace: $NAMESPACE}
		spec:
		  runtimeClassName: torpor
		  terminationGracePeriodSeconds: 1
		  containers: [{name: main, image: "$2", imagePullPolicy: Never, command: $3}]
	Y
}

# record NAME: SANDBOX and CONTAINER of the pod, from the node's own records.
record() {
	local uid file
	uid=$(k -n "$NAMESPACE" get pod "$1" -o jsonpath='{.metadata.uid}')
	file=$(grep -l "$uid" /run/torpor/pods/*/pod.json)
	SANDBOX=$(basename "$(dirname "$file")")
	file=$(grep -l "\"sandbox\":\"$SANDBOX\"" /run/torpor/containers/*/container.json | xargs grep -l '"name":"main"')
	CONTAINER=$(basename "$(dirname "$file")")
	POD_UID=$uid
}
sleeps() { grep -q Hibernated "/run/torpor/pods/$SANDBOX/state.json"; }
said_asleep() { [ "$(k -n "$NAMESPACE" get pod "$1" -o jsonpath="{.status.conditions[?(@.type=='torpor.dev/Hibernated')].status}")" = True ]; }

hibernate() {
	record "$1"
	k -n "$NAMESPACE" annotate --overwrite pod "$1" torpor.dev/hibernate=true >/dev/null
	until_true 60 sleeps
	until_true 60 said_asleep "$1"
}

# The same program without Kubernetes: one container, the flags that Torpor uses, a network namespace of its own.
bare_prepare() { # ROOTFS COMMAND-JSON
	ip netns add torpor-bench 2>/dev/null || true
	mkdir -p "$TMP/bundle"
	cat >"$TMP/bundle/config.json" <<-J
		{"ociVersion": "1.2.0", "root": {"path": "$1", "readonly": true},
		 "process": {"user": {"uid": 0, "gid": 0}, "args": $2, "cwd": "/", "env": ["PATH=/usr/bin:/bin:/usr/local/bin"]},
		 "mounts": [{"destination": "/proc", "type": "proc", "source": "proc"}, {"destination": "/tmp", "type": "tmpfs", "source": "tmpfs"}],
		 "linux": {"namespaces": [{"type": "pid"}, {"type": "mount"}, {"type": "network", "path": "/run/netns/torpor-bench"}]}}
	J
	rm -rf "$TMP/image"
	bare create --bundle "$TMP/bundle" bare
	bare start bare
	# The program has its memory when the sandbox holds as much as the pod did.
	until_true 30 bare_is_full "$3"
	bare checkpoint --leave-running --compression=none --exclude-committed-zero-pages --image-path="$TMP/image" bare
	bare delete --force bare
}
bare() { "$RUNSC" --root "$TMP/root" "${FLAGS[@]}" "$@" </dev/null >>"$TMP/bare.log" 2>&1; }
bare_is_full() { [ "$("$RUNSC" --root "$TMP/root" usage bare 2>/dev/null | sed -n 's/.*"Total": *\([0-9]*\).*/\1/p')" -ge "$1" ]; }
bare_once() {
	local begin
	begin=$(micros)
	bare create --bundle "$TMP/bundle" bare
	bare restore --detach --bundle "$TMP/bundle" --image-path "$TMP/image" bare
	echo $(($(micros) - begin)) >>"$TMP/$1.bare"
	bare delete --force bare
}

wakes() { # NAME WORDS COMMAND-JSON MINIMUM-BYTES PROGRAM
	local n rootfs
	record "$1"
	rootfs=$(sed -n 's/.*"root":{[^}]*"path":"\([^"]*\)".*/\1/p' "/run/torpor/containers/$CONTAINER/config.json")
	bare_prepare "$rootfs" "$3" "$4"
	for n in $(seq "$RUNS"); do
		hibernate "$1"
		"$CLUSTER/bin/cri-execsync" "$ENDPOINT" "$CONTAINER" "$5" ok | awk '{ print $1 }' >>"$TMP/$1.wake"
		k -n "$NAMESPACE" annotate pod "$1" torpor.dev/hibernate- >/dev/null
		bare_once "$1"
	done
	row "$2: bare create + restore" "$TMP/$1.bare" "$TMP/$1.bare"
	row "$2: ExecSync into a hibernated pod" "$TMP/$1.wake" "$TMP/$1.bare"
	printf '    last wake, stages (us since its begin): %s\n' "$(cat "/run/torpor/pods/$SANDBOX/wake.json")"
}

saves() { # NAME
	local n
	k -n agent-sandbox-system logs daemonset/torpor-agent -c agent --tail=-1 | grep "pod=$POD_UID" |
		sed -n 's/.*kind=\([A-Za-z]*\).*took_ms=\([0-9]*\).*/\1 \2/p' |
		awk '$1 == "Pause" { t = 0 } $1 == "Pause" || $1 == "Checkpoint" || $1 == "Commit" { t += $2 } $1 == "Commit" { print t * 1000 }' >"$TMP/save"
	for n in 1 2 3 4 5; do
		local begin
		begin=$(micros)
		dd if=/dev/zero of=/var/lib/torpor/.bench bs=1M count=105 conv=fsync status=none
		echo $(($(micros) - begin)) >>"$TMP/dd"
		rm -f /var/lib/torpor/.bench
	done
	row "dd conv=fsync of 105 MiB on the same disk" "$TMP/dd" "$TMP/dd"
	row "100 MB: pause to committed, fsynced image" "$TMP/save" "$TMP/dd"
}

# processes_of NAME: what stays while a pod sleeps: its keepers, and the shim that is their parent.
processes_of() {
	local container keeper
	record "$1"
	for container in $(grep -l "\"sandbox\":\"$SANDBOX\"" /run/torpor/containers/*/container.json); do
		keeper=$(sed -n 's/.*"keeper_pid":\([0-9]*\).*/\1/p' "$container")
		echo "$keeper"
	done
	awk '{ print $4 }' "/proc/$keeper/stat"
}
cpu_ticks() { for pid in "$@"; do awk '{ print $14 + $15 }' "/proc/$pid/stat"; done | awk '{ n += $1 } END { print n }'; }
pss_kib() { for pid in "$@"; do awk '$1 == "Pss:" { print $2 }' "/proc/$pid/smaps_rollup"; done | awk '{ n += $1 } END { print n }'; }

# other_shims: of the Pods on this node that Torpor does not run. The kubelet asks every shim alike.
other_shims() {
	local pid id
	for pid in $(pgrep -f 'containerd-shim-runc-v2 .*torpor-dev'); do
		id=$(tr '\0' '\n' <"/proc/$pid/cmdline" | sed -n '/^-id$/{n;p;}')
		[ -e "/run/torpor/pods/$id" ] || echo "$pid"
	done
}
# processor BEFORE N PID…: percent of a processor that each of N has used since, in 30 s of 100 ticks each.
processor() {
	local before=$1 n=$2
	shift 2
	awk -v t=$(($(cpu_ticks "$@") - before)) -v n="$n" 'BEGIN { print t / 30 / n }'
}

# PSS divides a page among those that have it, so a pod alone on its node bears the programs' text by itself.
remaining() {
	local names=(small) pids=() others=() n before others_before used others_used
	hibernate small
	mapfile -t pids < <(processes_of small)
	printf '%-46s %d KiB PSS in %d processes\n' "one hibernated pod on the node: shim and keepers" "$(pss_kib "${pids[@]}")" "${#pids[@]}"
	for n in $(seq "$SLEEPERS"); do
		pod "sleeper-$n" torpor.dev/busybox:dev "$SMALL" | k create -f - >/dev/null
		names+=("sleeper-$n")
	done
	pids=()
	for n in "${names[@]}"; do
		until_true 120 is_ready pod "$n"
		[ "$n" = small ] || hibernate "$n"
		mapfile -t -O "${#pids[@]}" pids < <(processes_of "$n")
	done
	mapfile -t others < <(other_shims)
	before=$(cpu_ticks "${pids[@]}") others_before=$(cpu_ticks "${others[@]}")
	sleep 30
	printf '%-46s %d KiB PSS each\n' "${#names[@]} hibernated pods: shim and keepers" $(($(pss_kib "${pids[@]}") / ${#names[@]}))
	used=$(processor "$before" "${#names[@]}" "${pids[@]}") others_used=$(processor "$others_before" "${#others[@]}" "${others[@]}")
	printf '%-46s %.3f %% of a processor each over 30 s (%s x)\n' "shims of ${#others[@]} Pods that runc runs" "$others_used" 1.00
	printf '%-46s %.3f %% of a processor each over 30 s (%s x)\n' "the hibernated pods' shims and keepers" "$used" "$(ratio "$used" "$others_used")"
	k -n "$NAMESPACE" delete pod "${names[@]}" --wait=true --timeout=100s >/dev/null
}

ready() { # KIND NAME
	until_true 60 is_ready "$1" "$2"
}
is_ready() { [ "$(k -n "$NAMESPACE" get "$1" "$2" -o jsonpath="{.status.conditions[?(@.type=='Ready')].status}")" = True ]; }

creates() {
	local n begin
	for n in $(seq "$RUNS"); do
		pod "pod-$n" torpor.dev/busybox:dev '["sh","-c","while :; do sleep 1000; done"]' >"$TMP/pod.yaml"
		begin=$(micros)
		k create -f "$TMP/pod.yaml" >/dev/null
		ready pod "pod-$n"
		echo $(($(micros) - begin)) >>"$TMP/create.pod"
		k -n "$NAMESPACE" delete pod "pod-$n" --wait=false >/dev/null
		cat >"$TMP/sandbox.yaml" <<-Y
			apiVersion: agents.x-k8s.io/v1beta1
			kind: Sandbox
			metadata: {name: sandbox-$n, namespace: $NAMESPACE}
			spec:
			  podTemplate:
			    spec:
			      runtimeClassName: torpor
			      terminationGracePeriodSeconds: 1
			      containers: [{name: main, image: "torpor.dev/busybox:dev", imagePullPolicy: Never, command: ["sh","-c","while :; do sleep 1000; done"]}]
		Y
		begin=$(micros)
		k create -f "$TMP/sandbox.yaml" >/dev/null
		ready sandbox "sandbox-$n"
		echo $(($(micros) - begin)) >>"$TMP/create.sandbox"
		k -n "$NAMESPACE" delete sandbox "sandbox-$n" --wait=false >/dev/null
	done
	row "create to Ready: a Pod by kubectl" "$TMP/create.pod" "$TMP/create.pod"
	row "create to Ready: a Sandbox" "$TMP/create.sandbox" "$TMP/create.pod"
}

k delete namespace "$NAMESPACE" --ignore-not-found --timeout=100s >/dev/null
k create namespace "$NAMESPACE" >/dev/null
SMALL='["sh","-c","while :; do sleep 1000; done"]'
LARGE='["python3","-c","import os,time; block = os.urandom(100 << 20); print(1, flush=True); time.sleep(1e9)"]'
pod small torpor.dev/busybox:dev "$SMALL" | k create -f - >/dev/null
pod large torpor.dev/demo-python:dev "$LARGE" | k create -f - >/dev/null
until_true 60 is_ready pod small
until_true 60 is_ready pod large
until_true 60 grep -q 1 <(k -n "$NAMESPACE" logs large -f --limit-bytes=1)
printf '%s runs each, %s\n' "$RUNS" "$(uname -srm), $(nproc) processors"
wakes small "small" "$SMALL" 0 echo
wakes large "100 MB" "$LARGE" 100000000 echo
saves large
remaining
creates
