#!/usr/bin/env bash
# Measures what idle detection costs a sandbox that is awake: throughput and latency of an HTTP server in it, with idle detection on and off
# in turns on the same sandbox, and the ratio pair by pair.
# usage: hack/bench-awake.sh [PAIRS [SECONDS [CONNECTIONS]]]
# (default 8 pairs of 6 s with 16 connections; needs a running development cluster with Torpor; installs wrk from Debian if it is missing)
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

PAIRS=${1:-8}
LENGTH=${2:-6}
CONNECTIONS=${3:-16}
NAMESPACE=torpor-bench-awake
CLUSTER=/var/lib/torpor-dev
k() { timeout 120 "$CLUSTER/bin/kubectl" --kubeconfig "$CLUSTER/admin.kubeconfig" "$@"; }

[ "$(id -u)" = 0 ] || die "must run as root: it looks at the node"
[ -x /opt/torpor/bin/torpor-oci ] || die "Torpor is not installed on this node: run hack/cluster install-torpor"
command -v wrk >/dev/null || { apt-get update -qq && apt-get install -qq -y wrk >/dev/null; } || die "wrk is missing (Debian package wrk)"

TMP=$(mktemp -d)
cleanup() {
	k delete namespace "$NAMESPACE" --ignore-not-found --wait=false >/dev/null 2>&1 || true
	rm -rf "$TMP"
}
trap cleanup EXIT
k delete namespace "$NAMESPACE" --ignore-not-found --timeout=100s >/dev/null
k create namespace "$NAMESPACE" >/dev/null
k apply -f - >/dev/null <<-Y
	apiVersion: v1
	kind: Pod
	metadata: {name: web, namespace: $NAMESPACE}
	spec:
	  runtimeClassName: torpor
	  terminationGracePeriodSeconds: 1
	  containers:
	  - name: main
	    image: torpor.dev/demo-python:dev
	    imagePullPolicy: Never
	    command:
	    - python3
	    - -c
	    - |
	      import asyncio
	      class Http(asyncio.Protocol):
	        def connection_made(self, transport): self.transport = transport
	        def data_received(self, data):
	          self.transport.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok" * data.count(b"\r\n\r\n"))
	      async def serve(): await (await asyncio.get_running_loop().create_server(Http, "", 8080)).serve_forever()
	      asyncio.run(serve())
Y
k -n "$NAMESPACE" wait --for=condition=Ready --timeout=90s pod/web >/dev/null
IP=$(k -n "$NAMESPACE" get pod web -o jsonpath='{.status.podIP}')

# one ON|OFF: requests a second, p50 and p99 in ms of one run.
one() {
	if [ "$1" = on ]; then
		k -n "$NAMESPACE" annotate --overwrite pod web torpor.dev/doze-after=30s torpor.dev/hibernate-after=10m >/dev/null
	else
		k -n "$NAMESPACE" annotate pod web torpor.dev/doze-after- torpor.dev/hibernate-after- >/dev/null
	fi
	# The agent looks at least every five seconds.
	sleep 6
	wrk --latency -t 1 -c "$CONNECTIONS" -d "$LENGTH" "http://$IP:8080/" >"$TMP/wrk"
	awk '
		function ms(t) { return t ~ /us$/ ? t / 1000 : t ~ /ms$/ ? t + 0 : t * 1000 }
		$1 == "50%" { p50 = ms($2) } $1 == "99%" { p99 = ms($2) } $1 == "Requests/sec:" { rate = $2 }
		END { if (!rate) exit 1; print rate, p50, p99 }' "$TMP/wrk"
}

one off >/dev/null
for pair in $(seq "$PAIRS"); do
	# Each is first as often as the other.
	if [ $((pair % 2)) = 1 ]; then off=$(one off) on=$(one on); else on=$(one on) off=$(one off); fi
	echo "$off $on" >>"$TMP/pairs"
done
python3 - "$TMP/pairs" <<'P'
import statistics, sys

pairs = [[float(word) for word in line.split()] for line in open(sys.argv[1])]
print(f"{len(pairs)} pairs; medians, and the median, least and greatest ratio of a pair")
for number, (words, unit) in enumerate([("requests/s", ""), ("latency p50", " ms"), ("latency p99", " ms")]):
    off, on = [pair[number] for pair in pairs], [pair[number + 3] for pair in pairs]
    ratios = sorted(b / a for a, b in zip(off, on))
    print(f"{words:<12} off {statistics.median(off):9.2f}{unit}   on {statistics.median(on):9.2f}{unit}   on/off {statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})")
P
