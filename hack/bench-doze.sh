#!/usr/bin/env bash
# Measures what a dozing sandbox costs and how fast it answers, beside the same sandbox awake, in the same run.
# usage: hack/bench-doze.sh [RUNS]   (default 12; needs a running development cluster with Torpor, and swap: it makes a file if there is none)
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

RUNS=${1:-12}
NAMESPACE=torpor-bench-doze
CLUSTER=/var/lib/torpor-dev
k() { timeout 120 "$CLUSTER/bin/kubectl" --kubeconfig "$CLUSTER/admin.kubeconfig" "$@"; }

[ "$(id -u)" = 0 ] || die "must run as root: it reads the pod's cgroup"
[ -x /opt/torpor/bin/torpor-oci ] || die "Torpor is not installed on this node: run hack/cluster install-torpor"

SWAP=
cleanup() {
	k delete namespace "$NAMESPACE" --ignore-not-found >/dev/null 2>&1 || true
	if [ -n "$SWAP" ]; then
		swapoff "$SWAP" && rm -f "$SWAP"
	fi
}
trap cleanup EXIT
if [ "$(wc -l </proc/swaps)" -le 1 ]; then
	SWAP=$(mktemp /var/tmp/torpor-bench-swap-XXXXXX)
	fallocate -l 512M "$SWAP"
	mkswap -q "$SWAP" >/dev/null
	swapon "$SWAP"
fi

k create namespace "$NAMESPACE" >/dev/null
k apply -f - >/dev/null <<-Y
	apiVersion: v1
	kind: Pod
	metadata: {name: echo, namespace: $NAMESPACE, annotations: {torpor.dev/doze-after: 2s}}
	spec:
	  runtimeClassName: torpor
	  terminationGracePeriodSeconds: 1
	  containers:
	  - name: main
	    image: torpor.dev/demo-python:dev
	    imagePullPolicy: Never
	    command: [python3, -c, "import socket\ns = socket.create_server(('', 8080))\nwhile True:\n  c, _ = s.accept(); d = c.recv(100); c.sendall(d); c.close()"]
Y
k -n "$NAMESPACE" wait --for=condition=Ready --timeout=90s pod/echo >/dev/null
IP=$(k -n "$NAMESPACE" get pod echo -o jsonpath='{.status.podIP}')
POD_UID=$(k -n "$NAMESPACE" get pod echo -o jsonpath='{.metadata.uid}')
POD_DIR=$(dirname "$(grep -l "$POD_UID" /run/torpor/pods/*/pod.json)")

python3 - "$IP" "$POD_DIR" "$RUNS" <<'P'
import glob, json, os, socket, subprocess, sys, time

ip, pod, runs = sys.argv[1], sys.argv[2], int(sys.argv[3])
sandbox = os.path.basename(pod)
cgroup = json.load(open(pod + "/pod.json"))["cgroup"]
files = [f"/sys/fs/cgroup/memory/{cgroup}/memory.usage_in_bytes", f"/sys/fs/cgroup/{cgroup}/memory.current"]
memory = lambda: int(open(next(f for f in files if os.path.exists(f))).read()) / (1 << 20)

def dozes():
    try:
        return json.load(open(pod + "/doze.json"))["reclaimed"]
    except (FileNotFoundError, ValueError):
        return False

def exchange(before_answer=lambda: None):
    began = time.perf_counter()
    connection = socket.create_connection((ip, 8080), timeout=20)
    connection.sendall(b"x")
    before_answer()
    assert connection.recv(1) == b"x"
    return (time.perf_counter() - began) * 1000

def wake():
    began = time.perf_counter()
    # What a keeper that sees the packet runs.
    subprocess.run(["/opt/torpor/bin/torpor-oci", "wake", sandbox], check=True, stdout=subprocess.DEVNULL)
    took.append((time.perf_counter() - began) * 1000)

def say(words, times, base):
    times, base = sorted(times), sorted(base)
    at = lambda values, p: values[round((len(values) - 1) * p)]
    print(f"{words:<58} p50 {at(times, .5):7.1f} ms ({at(times, .5) / at(base, .5):5.1f} x)   max {times[-1]:7.1f} ms ({times[-1] / base[-1]:5.1f} x)")

took, woken, left = [], [], []
exchange()
awake_memory = memory()
awake = [exchange() for _ in range(runs)]
for _ in range(runs):
    deadline = time.time() + 60
    while not dozes():
        assert time.time() < deadline, "it does not doze"
        time.sleep(0.05)
    left.append(memory())
    woken.append(exchange(wake))
say("a TCP exchange, awake", awake, awake)
say("the same, dozing: first packet to first byte", woken, awake)
say("of which torpor-oci wake, with its process", took, awake)
print(f"memory of the sandbox' cgroup: awake {awake_memory:.1f} MiB, dozing {sorted(left)[len(left) // 2]:.1f} MiB ({sorted(left)[len(left) // 2] / awake_memory:.2f} x), {runs} runs")
P
