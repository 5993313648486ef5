#!/usr/bin/env bash
# What the SandboxSnapshots of one tenant cost an agent that has nothing to do with them: small objects that name Pods which nobody knows.
# Prints the agent's share of a processor and its memory without them and with them; what of this is its index alone: `cargo run --release -p torpor-agent --example snapshots`.
# usage: hack/bench-snapshots.sh [NUMBER [SECONDS]]
# (default 20000 and 60; needs a running development cluster with Torpor, KUBECONFIG or its own, and nothing else that runs there)
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

NUMBER=${1:-20000}
SECONDS_EACH=${2:-60}
CLUSTER=/var/lib/torpor-dev
KUBECONFIG=${KUBECONFIG:-$CLUSTER/admin.kubeconfig}
NAMESPACE=torpor-bench-snapshots
AT_ONCE=500
k() { timeout 600 "$CLUSTER/bin/kubectl" --kubeconfig "$KUBECONFIG" "$@"; }

TICKS=$(getconf CLK_TCK)
TMP=$(mktemp -d)
cleanup() {
	k delete namespace "$NAMESPACE" --ignore-not-found --wait=false >/dev/null 2>&1 || true
	rm -rf "$TMP"
}
trap cleanup EXIT

# agent: the process of the agent.
agent() {
	local pid
	pid=$(pgrep -f 'torpor-agent run' | head -n 1)
	[ -n "$pid" ] || die "torpor-agent does not run on this machine"
	echo "$pid"
}

# ticks PID: what it has used of a processor so far; the fields of proc(5) behind the name.
ticks() { sed 's/.*) //' "/proc/$1/stat" | awk '{ print $12 + $13 }'; }

# share WORDS: what the agent uses from here on.
share() {
	local pid before
	pid=$(agent)
	before=$(ticks "$pid")
	sleep "$SECONDS_EACH"
	awk -v words="$1" -v used="$(($(ticks "$pid") - before))" -v ticks="$TICKS" -v seconds="$SECONDS_EACH" \
		'/VmRSS/ { printf "%s: %.2f %% of a core, %.1f MB\n", words, 100 * used / ticks / seconds, $2 / 1024 }' "/proc/$pid/status"
}

k delete namespace "$NAMESPACE" --ignore-not-found --timeout=500s >/dev/null
k create namespace "$NAMESPACE" >/dev/null
share "without"
for ((first = 0; first < NUMBER; first += AT_ONCE)); do
	for ((n = first; n < first + AT_ONCE && n < NUMBER; n++)); do
		printf '{"apiVersion":"torpor.dev/v1alpha1","kind":"SandboxSnapshot","metadata":{"name":"s-%d","namespace":"%s"},"spec":{"sandboxName":"s","podUID":"unknown-%d"}}\n' "$n" "$NAMESPACE" "$n"
	done >"$TMP/snapshots"
	k create -f "$TMP/snapshots" >/dev/null
	say "$n snapshots"
done
share "with $NUMBER"
