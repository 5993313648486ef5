#!/usr/bin/env bash
# Measures how fast a sleeping sandbox answers the first packet, dozing and hibernated, small and with 100 MB, and what it costs meanwhile;
# beside the same sandbox awake, in the same run.
# usage: hack/bench-doze.sh [ROUNDS]
# (default 6, of four small and two large sandboxes each; needs a running development cluster with Torpor. It makes swap of its own that
# comes before the node's: zram where the kernel has it, else a file. SWAP_KIND=file: a file; SWAP_KIND=node: the node's, as it is.
# REST=SECONDS: how long all sleep before the first is woken; the default is 2. Go's runtime collects garbage every 120)
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
. "$REPO_ROOT/hack/benchswap.sh"

ROUNDS=${1:-6}
NAMESPACE=torpor-bench-doze
SMALL=4
LARGE=2
CLUSTER=/var/lib/torpor-dev
ENDPOINT=unix:///run/torpor-dev/node-0/containerd.sock
k() { timeout 120 "$CLUSTER/bin/kubectl" --kubeconfig "$CLUSTER/admin.kubeconfig" "$@"; }

need_torpor "reads the pods' cgroups"

cleanup() {
	k delete namespace "$NAMESPACE" --ignore-not-found >/dev/null 2>&1 || true
	swap_off
}
trap cleanup EXIT
SWAP_KIND=${SWAP_KIND:-zram}
[ "$SWAP_KIND" = node ] || swap_on "$SWAP_KIND" 2048

# Answers "x" at once, and anything else after touching 5 MB of what it holds.
PROGRAM='
import os, socket, sys
held = bytearray(os.urandom(int(sys.argv[1]) << 20))
s = socket.create_server(("", 8080), backlog=64)
open("/tmp/ready", "w").close()
while True:
  c, _ = s.accept(); d = c.recv(100)
  if d != b"x":
    for at in range(0, min(len(held), 5 << 20), 4096): held[at] ^= 1
  c.sendall(d); c.close()'

pod() { # NAME MEGABYTES
	k -n "$NAMESPACE" create -f - >/dev/null <<-Y
		apiVersion: v1
		kind: Pod
		metadata: {name: $1, namespace: $NAMESPACE}
		spec:
		  runtimeClassName: torpor
		  terminationGracePeriodSeconds: 1
		  containers:
		  - name: main
		    image: torpor.dev/demo-python:dev
		    imagePullPolicy: Never
		    command: [python3, -c, $(python3 -c 'import json, sys; print(json.dumps(sys.argv[1]))' "$PROGRAM"), "$2"]
		    startupProbe: {exec: {command: [test, -e, /tmp/ready]}, periodSeconds: 1}
	Y
}

k delete namespace "$NAMESPACE" --ignore-not-found --timeout=100s >/dev/null
k create namespace "$NAMESPACE" >/dev/null
for n in $(seq "$SMALL"); do
	pod "small-$n" 1
	pod "exec-$n" 1
done
for n in $(seq "$LARGE"); do pod "large-$n" 100; done
k -n "$NAMESPACE" wait --for=condition=Ready --timeout=110s pod --all >/dev/null
printf '%s rounds, %s, %s processors, swap: %s\n' "$ROUNDS" "$(uname -srm)" "$(nproc)" "${SWAP:-$(awk 'NR == 2 { print $1 }' /proc/swaps)}"

PYTHONPATH="$REPO_ROOT/hack" PYTHONDONTWRITEBYTECODE=1 python3 - "$NAMESPACE" "$ROUNDS" "$CLUSTER" "$ENDPOINT" "$SMALL" "$LARGE" "${REST:-2}" <<'P'
import json, os, socket, subprocess, sys, time

import benchpods
from benchpods import until

namespace, rounds, cluster, endpoint, rest = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4], float(sys.argv[7])
how_many = {"small": int(sys.argv[5]), "exec": int(sys.argv[5]), "large": int(sys.argv[6])}


def kubectl(*args):
    command = [f"{cluster}/bin/kubectl", "--kubeconfig", f"{cluster}/admin.kubeconfig", "-n", namespace, *args]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=120).stdout


class Pod(benchpods.Pod):
    def __init__(self, name):
        self.name = name
        said = json.loads(kubectl("get", "pod", name, "-o", "json"))
        super().__init__(said)
        self.container = said["status"]["containerStatuses"][0]["containerID"].split("//")[1]

    def memory(self):
        files = [f"/sys/fs/cgroup/memory/{self.cgroup}/memory.usage_in_bytes", f"/sys/fs/cgroup/{self.cgroup}/memory.current"]
        return int(open(next(f for f in files if os.path.exists(f))).read()) / (1 << 20)

    def exchange(self, word=b"x"):
        began = time.perf_counter()
        connection = socket.create_connection((self.ip, 8080), timeout=20)
        connection.sendall(word)
        assert connection.recv(1) == word[:1]
        return (time.perf_counter() - began) * 1000

    def exec(self):
        """As CRI ExecSync, without the start of the program that asks."""
        command = [f"{cluster}/bin/cri-execsync", endpoint, self.container, "true"]
        return int(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout.split()[0]) / 1000

    def cpu(self):
        """Of the sandbox."""
        return benchpods.cpu(self.cgroup)

    def stages(self):
        """How long each stage of the last wake took, in milliseconds."""
        ends = {"began": 0} | self.note("wake.json")["stagesEndMicros"]
        names = sorted(ends, key=ends.get)
        return {after: (ends[after] - ends[before]) / 1000 for before, after in zip(names, names[1:])}


def say(words, times, base):
    times, base = sorted(times), sorted(base)
    at = lambda values, p: values[round((len(values) - 1) * p)]
    print(f"{words:<62} p50 {at(times, .5):7.1f} ms ({at(times, .5) / at(base, .5):5.1f} x)   p99 {at(times, .99):7.1f} ms ({at(times, .99) / at(base, .99):5.1f} x)", flush=True)


pods = {kind: [Pod(f"{kind}-{n + 1}") for n in range(count)] for kind, count in how_many.items()}
everybody = [pod for group in pods.values() for pod in group]
smalls, larges, execs = pods["small"], pods["large"], pods["exec"]


def asleep(annotation, condition):
    """Puts all to sleep, and lets the machine come to rest."""
    kubectl("annotate", "--overwrite", "pod", "--all", annotation)
    until("not all sleep", lambda: all(condition(pod) for pod in everybody))
    time.sleep(rest)


def woken(times, group, wake, stages=None):
    for pod in group:
        times.append(wake(pod))
        time.sleep(0.3)
    if stages is not None:
        stages += [pod.stages() for pod in group]


def say_stages(stages):
    middle = lambda name: sorted(one.get(name, 0.0) for one in stages)[len(stages) // 2]
    print("    stages of it, p50 in ms:", ", ".join(f"{name} {middle(name):.1f}" for name in stages[0]), flush=True)


touch = lambda pod: pod.exchange(b"touch")
base, base_large, base_exec = [], [], []
for _ in range(3):
    woken(base, smalls, Pod.exchange)
    woken(base_large, larges, touch)
    woken(base_exec, execs, Pod.exec)
say("a TCP exchange, awake, small", base, base)
say("the same with 100 MB, 5 MB of them touched", base_large, base_large)
say("exec, awake", base_exec, base_exec)

memory = sum(pod.memory() for pod in smalls) / len(smalls)
dozing, dozing_large, dozing_exec, hibernated, hibernated_large, hibernated_exec = [], [], [], [], [], []
stages_dozing, stages_hibernated = [], []
for turn in range(rounds):
    asleep("torpor.dev/doze-after=1s", Pod.dozes)
    if turn == 0:
        left = sum(pod.memory() for pod in smalls) / len(smalls)
        cpu, seconds = sum(pod.cpu() for pod in smalls), 20
        time.sleep(seconds)
        share = (sum(pod.cpu() for pod in smalls) - cpu) / seconds / len(smalls) * 100
        print(f"dozing, small: {left:.1f} MiB of {memory:.1f} ({left / memory:.2f} x), {share:.3f} % of a processor over {seconds} s", flush=True)
    woken(dozing, smalls, Pod.exchange, stages_dozing)
    woken(dozing_large, larges, touch)
    woken(dozing_exec, execs, Pod.exec)
    kubectl("annotate", "pod", "--all", "torpor.dev/doze-after-")
    asleep("torpor.dev/hibernate=true", Pod.hibernates)
    woken(hibernated, smalls, Pod.exchange, stages_hibernated)
    woken(hibernated_large, larges, touch)
    woken(hibernated_exec, execs, Pod.exec)
    kubectl("annotate", "pod", "--all", "torpor.dev/hibernate-")
say("dozing, first packet to first byte, small", dozing, base)
say("    the first of each round, when all others sleep", dozing[::len(smalls)], base)
say_stages(stages_dozing)
say("dozing, the same, 100 MB of which 5 are touched", dozing_large, base_large)
say("dozing, exec", dozing_exec, base_exec)
say("hibernated, first packet to first byte, small", hibernated, base)
say_stages(stages_hibernated)
say("hibernated, the same, 100 MB of which 5 are touched", hibernated_large, hibernated)
say("hibernated, exec", hibernated_exec, base_exec)
P
