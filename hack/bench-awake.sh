#!/usr/bin/env bash
# Measures what idle detection costs a sandbox that is awake: throughput and latency of an HTTP server in it, with idle detection on and off
# in turns on the same sandbox, and the ratio pair by pair. Off means without both of its parts: the programs on the Pod's link (those that
# note what nobody has acknowledged among them), which every Pod has, and the agent's looks, which one has that may fall asleep by itself.
# usage: hack/bench-awake.sh [PAIRS [SECONDS [CONNECTIONS]]]
# (default 8 pairs of 6 s with 16 connections; needs a running development cluster with Torpor, and tc; installs wrk from Debian if it is missing)
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

PAIRS=${1:-8}
LENGTH=${2:-6}
CONNECTIONS=${3:-16}
NAMESPACE=torpor-bench-awake
CLUSTER=/var/lib/torpor-dev
k() { timeout 120 "$CLUSTER/bin/kubectl" --kubeconfig "$CLUSTER/admin.kubeconfig" "$@"; }

need_torpor "looks at the node"
command -v tc >/dev/null && command -v curl >/dev/null || die "tc or curl is missing (Debian packages iproute2, curl)"
command -v wrk >/dev/null || { apt-get update -qq && apt-get install -qq -y wrk >/dev/null; } || die "wrk is missing (Debian package wrk)"

TMP=$(mktemp -d)
cleanup() {
	k delete namespace "$NAMESPACE" --ignore-not-found --wait=false >/dev/null 2>&1 || true
	! mountpoint -q "$TMP/bpf" || umount "$TMP/bpf"
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

UID_OF_POD=$(k -n "$NAMESPACE" get pod web -o jsonpath='{.metadata.uid}')
RECORD=$(grep -l "$UID_OF_POD" /run/torpor/pods/*/pod.json)
NETNS=$(python3 -c 'import json, sys; print(json.load(open(sys.argv[1]))["network_namespace"])' "$RECORD")
AGENT=$(k -n agent-sandbox-system get pod -l app.kubernetes.io/name=torpor-agent -o jsonpath='{.items[0].status.podIP}')
in_pod() { nsenter --net="$NETNS" "$@"; }

# The programs on the link, kept by files while they are off it.
mkdir "$TMP/bpf"
mount -t bpf bpf "$TMP/bpf"
for side in ingress egress; do
	ids=$(in_pod tc filter show dev eth0 "$side" | grep -o ' id [0-9]*' | cut -d ' ' -f 3) || true
	[ -n "$ids" ] || die "no program of idle detection is on the Pod's $side"
	for program in $ids; do
		python3 - "$program" "$TMP/bpf/$side-$program" <<-'P'
			import ctypes, os, struct, sys

			def bpf(command, attributes):
			  held = ctypes.create_string_buffer(attributes, 128)
			  answer = libc.syscall(321, command, held, len(held))
			  if answer < 0: raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
			  return answer

			assert os.uname().machine == "x86_64", "the number of bpf(2) is that of x86_64"
			libc = ctypes.CDLL(None, use_errno=True)
			BPF_OBJ_PIN, BPF_PROG_GET_FD_BY_ID = 6, 13
			program = bpf(BPF_PROG_GET_FD_BY_ID, struct.pack("III", int(sys.argv[1]), 0, 0))
			path = ctypes.create_string_buffer(sys.argv[2].encode())
			bpf(BPF_OBJ_PIN, struct.pack("QII", ctypes.addressof(path), program, 0))
		P
	done
done
programs() { in_pod tc filter show dev eth0 ingress | grep -c ' id ' || true; }

# How many sandboxes the agent watches.
watched() { curl -sf "http://$AGENT:9644/metrics" | awk '$1 == "torpor_agent_sandboxes_watched" { print $2 }'; }
until_watched() { # WORDS TEST…: every half second, for as long as the agent may take to look twice
	for _ in $(seq 60); do
		! [ "$(watched)" "${@:2}" ] || return 0
		sleep 0.5
	done
	die "the agent does not $1: it watches $(watched)"
}
# Whoever else is in the cluster is watched too.
OTHERS=$(watched)

on() {
	[ "$(programs)" != 0 ] || for side in ingress egress; do
		for program in "$TMP/bpf/$side"-*; do
			in_pod tc filter add dev eth0 "$side" pref 7 protocol all bpf da object-pinned "$program"
		done
	done
	k -n "$NAMESPACE" annotate --overwrite pod web torpor.dev/doze-after=30s torpor.dev/hibernate-after=10m >/dev/null
	until_watched "watch the sandbox" -gt "$OTHERS"
	[ "$(programs)" != 0 ] || die "no program is on the Pod's link"
}
off() {
	[ "$(programs)" = 0 ] || for side in ingress egress; do in_pod tc filter del dev eth0 "$side" pref 7; done
	k -n "$NAMESPACE" annotate pod web torpor.dev/doze-after- torpor.dev/hibernate-after- >/dev/null
	until_watched "leave the sandbox alone" -le "$OTHERS"
	[ "$(programs)" = 0 ] || die "a program is still on the Pod's link"
}

# one ON|OFF: requests a second, p50 and p99 in ms of one run.
one() {
	"$1"
	wrk --latency -t 1 -c "$CONNECTIONS" -d "$LENGTH" "http://$IP:8080/" >"$TMP/wrk"
	awk '
		function ms(t) { return t ~ /us$/ ? t / 1000 : t ~ /ms$/ ? t + 0 : t * 1000 }
		$1 == "50%" { p50 = ms($2) } $1 == "99%" { p99 = ms($2) } $1 == "Requests/sec:" { rate = $2 }
		END { if (!rate) exit 1; print rate, p50, p99 }' "$TMP/wrk"
}

one on >/dev/null
for pair in $(seq "$PAIRS"); do
	# Each is first as often as the other.
	if [ $((pair % 2)) = 1 ]; then
		off=$(one off)
		on=$(one on)
	else
		on=$(one on)
		off=$(one off)
	fi
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
