#!/usr/bin/env bash
# Measures what a probe of the kubelet costs a node whose sandbox dozes: answered for it, beside resuming it for the probe's instant.
# usage: hack/bench-probes.sh [SECONDS]
# (default 60; needs a running development cluster with Torpor. It makes a file of swap of its own)
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
. "$REPO_ROOT/hack/benchswap.sh"

SECONDS_EACH=${1:-60}
NAMESPACE=torpor-bench-probes
CLUSTER=/var/lib/torpor-dev
k() { timeout 120 "$CLUSTER/bin/kubectl" --kubeconfig "$CLUSTER/admin.kubeconfig" "$@"; }

need_torpor "reads the pods' cgroups"

cleanup() {
	k delete namespace "$NAMESPACE" --ignore-not-found >/dev/null 2>&1 || true
	swap_off
}
trap cleanup EXIT
swap_on file 1024

PROGRAM='
import http.server
class Handler(http.server.BaseHTTPRequestHandler):
  def do_GET(self):
    self.send_response(200); self.send_header("Content-Length", "0"); self.end_headers()
  def log_message(self, *words): pass
http.server.ThreadingHTTPServer(("", 8080), Handler).serve_forever()'

pod() { # NAME ANNOTATIONS PROBE PROBE
	k -n "$NAMESPACE" create -f - >/dev/null <<-Y
		apiVersion: v1
		kind: Pod
		metadata: {name: $1, namespace: $NAMESPACE, annotations: {$2}}
		spec:
		  runtimeClassName: torpor
		  terminationGracePeriodSeconds: 1
		  containers:
		  - name: main
		    image: torpor.dev/demo-python:dev
		    imagePullPolicy: Never
		    command: [python3, -c, $(python3 -c 'import json, sys; print(json.dumps(sys.argv[1]))' "$PROGRAM")]
		    startupProbe: {httpGet: {path: /, port: 8080}, periodSeconds: 1, failureThreshold: 60}
		    $3
		    $4
	Y
}

k delete namespace "$NAMESPACE" --ignore-not-found --timeout=100s >/dev/null
k create namespace "$NAMESPACE" >/dev/null
EACH_SECOND='{httpGet: {path: /, port: 8080}, periodSeconds: 1, timeoutSeconds: 1}'
DOZES='torpor.dev/doze-after: "1s"'
pod probed "$DOZES" "readinessProbe: $EACH_SECOND" "livenessProbe: $EACH_SECOND"
pod resumed "$DOZES" "" ""
pod silent "$DOZES" "" ""
pod awake "" "readinessProbe: $EACH_SECOND" "livenessProbe: $EACH_SECOND"
k -n "$NAMESPACE" wait --for=condition=Ready --timeout=110s pod --all >/dev/null
printf '%s s each, %s, %s processors\n' "$SECONDS_EACH" "$(uname -srm)" "$(nproc)"

PYTHONPATH="$REPO_ROOT/hack" PYTHONDONTWRITEBYTECODE=1 python3 - "$NAMESPACE" "$SECONDS_EACH" "$CLUSTER" <<'P'
import json, os, socket, subprocess, sys, time

import benchpods
from benchpods import until

namespace, seconds, cluster = sys.argv[1], int(sys.argv[2]), sys.argv[3]
TICKS = os.sysconf("SC_CLK_TCK")


class Pod(benchpods.Pod):
    def __init__(self, name):
        command = [f"{cluster}/bin/kubectl", "--kubeconfig", f"{cluster}/admin.kubeconfig", "-n", namespace, "get", "pod", name, "-o", "json"]
        super().__init__(json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=60).stdout))

    def cpu(self):
        """Of the sandbox and its keepers."""
        return benchpods.cpu(self.pod_cgroup)

    def get(self):
        with socket.create_connection((self.ip, 8080), timeout=10) as connection:
            connection.sendall(b"GET / HTTP/1.0\r\n\r\n")
            assert connection.recv(12).endswith(b"200")


def agent():
    """Seconds of processor time of the agent so far."""
    pid = subprocess.run(["pgrep", "-o", "-f", "torpor-agent run"], check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
    fields = open(f"/proc/{pid}/stat").read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


probed, resumed, silent, awake = map(Pod, ["probed", "resumed", "silent", "awake"])
dozing = [probed, resumed, silent]
until("not all doze", lambda: all(pod.dozes() for pod in dozing))
time.sleep(2)


def used(what):
    """What each takes meanwhile."""
    before = [pod.cpu() for pod in dozing + [awake]] + [agent()]
    what()
    after = [pod.cpu() for pod in dozing + [awake]] + [agent()]
    return [then - now for then, now in zip(after, before)]


quiet = used(lambda: time.sleep(seconds))
assert probed.dozes(), "a probe has woken it"
probes = 2 * seconds
answered = (quiet[0] - quiet[2]) / probes * 1000
by_itself = (quiet[3]) / probes * 1000

rounds = max(seconds // 4, 5)
began = time.time()


def resume():
    for _ in range(rounds):
        resumed.get()
        until("it does not doze again", resumed.dozes)


busy = used(resume)
took = time.time() - began
own = busy[1] - quiet[2] * took / seconds
agents = busy[4] - quiet[4] * took / seconds
cost = (own + agents) / rounds * 1000
print(f"a probe that is answered for a dozing sandbox       {answered:7.2f} ms of processor time (1.0 x)")
print(f"a probe that the sandbox answers, awake all the time {by_itself:6.2f} ms of processor time ({by_itself / answered:.1f} x), what it does otherwise included")
print(f"one that it is resumed for, and dozes again         {cost:7.2f} ms of processor time ({cost / answered:.1f} x): sandbox and keeper {own / rounds * 1000:.1f}, agent {agents / rounds * 1000:.1f}")
P
