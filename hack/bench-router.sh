#!/usr/bin/env bash
# Measures the router beside a direct connection to the same sandbox, in the same run on the same machine.
# usage: hack/bench-router.sh [SECONDS] [IDLE]     (default 10 s of load each; 10000 idle WebSockets)
#
# The sandbox, the router (5,000 sandboxes in its caches, no access log) and wrk are processes of their own and share the
# machine's cores. Installs wrk from Debian if it is missing.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
need rust
cd "$REPO_ROOT"
seconds=${1:-10}
idle=${2:-10000}
connections=50
# The router needs two descriptors for each tunnel. Root may raise the limit on most machines, and here and there not.
ulimit -n "$((idle * 2 + 4096))" 2>/dev/null || ulimit -n "$(ulimit -Hn)"
if [ "$(ulimit -n)" -lt "$((idle * 2 + 4096))" ]; then
	idle=$((($(ulimit -n) - 4096) / 2))
	[ "$idle" -gt 0 ] || idle=$((($(ulimit -n) - 512) / 2))
	say "only $(ulimit -n) open files are allowed: $idle idle WebSockets"
fi

command -v wrk >/dev/null || { apt-get update -qq && apt-get install -qq -y wrk >/dev/null; } || die "wrk is missing (Debian package wrk)"

built=$(cargo bench --locked --profile cluster -p torpor-router --bench serve --no-run --message-format=json |
	sed -n 's/.*"name":"serve".*"executable":"\([^"]*\)".*/\1/p' | tail -n 1)
[ -x "$built" ] || die "cargo did not say where it built the benchmark"

work=$(mktemp -d)
started=()
cleanup() {
	[ ${#started[@]} -eq 0 ] || kill "${started[@]}" 2>/dev/null || true
	rm -rf "$work"
}
trap cleanup EXIT

# serve NAME: starts a server and sets port.
serve() {
	"$built" "$1" >"$work/$1" 2>"$work/$1.log" &
	started+=($!)
	for _ in $(seq 300); do
		port=$(head -n 1 "$work/$1")
		[ -z "$port" ] || return 0
		sleep 0.1
	done
	die "$1 does not start: $(cat "$work/$1.log")"
}

# load NAME PORT: requests per second, p50 and p99 of wrk's report into $work/NAME.result.
load() {
	wrk -t2 -c"$connections" -d"${seconds}s" --latency -H 'X-Sandbox-ID: s' -H 'X-Sandbox-Namespace: ns' \
		-H "X-Sandbox-Port: $sandbox" "http://127.0.0.1:$2/" >"$work/$1.wrk"
	if grep -E 'Non-2xx|Socket errors' "$work/$1.wrk" >&2; then die "$1: not all requests succeeded"; fi
	awk '/Requests\/sec/ {rate = $2} $1 == "50%" {p50 = $2} $1 == "99%" {p99 = $2} END {print rate, p50, p99}' "$work/$1.wrk" >"$work/$1.result"
}

serve sandbox
sandbox=$port
serve router
router=$port
router_pid=${started[1]}
load warm-up "$router"
load direct "$sandbox"
load router "$router"
read -r direct_rate direct_p50 direct_p99 <"$work/direct.result"
read -r router_rate router_p50 router_p99 <"$work/router.result"
rss() { awk '/VmRSS/ {printf "%.0f", $2 / 1024}' "/proc/$router_pid/status"; }
loaded=$(rss)
printf '%-8s %12s %10s %10s\n' "$connections conns" 'requests/s' p50 p99
printf '%-8s %12.0f %10s %10s\n' direct "$direct_rate" "$direct_p50" "$direct_p99"
printf '%-8s %12.0f %10s %10s\n' router "$router_rate" "$router_p50" "$router_p99"
awk -v d="$direct_rate" -v r="$router_rate" 'BEGIN {printf "ratio    %12.2f\n", r / d}'
printf 'router RSS after the load: %s MiB\n' "$loaded"
"$built" websockets "$router" "$sandbox" "$idle"
