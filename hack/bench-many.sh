#!/usr/bin/env bash
# Measures many sandboxes on one node: 50 of 30 MB woken at the same instant, dozing and hibernated; and what 300 cost while they sleep,
# shims and keepers and the agent included, beside what they cost awake.
# usage: hack/bench-many.sh [WOKEN [ASLEEP]]
# (default 50 300, each may be 0; needs a running development cluster with Torpor; 300 want 10 GB of memory and 10 of disk for swap.
# Unless the node has swap for them it makes a file; SWAP_KIND=zram: zram, where the kernel has it.
# REST=SECONDS: how long all have slept when it is measured what they cost; the default is 20. Go's runtime, of the shims too, gives
# memory back in the minutes after it was used)
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
. "$REPO_ROOT/hack/benchswap.sh"

WOKEN=${1:-50}
ASLEEP=${2:-300}
NAMESPACE=torpor-bench-many
CLUSTER=/var/lib/torpor-dev
k() { timeout 300 "$CLUSTER/bin/kubectl" --kubeconfig "$CLUSTER/admin.kubeconfig" "$@"; }

need_torpor "reads the pods' processes"

cleanup() {
	k delete namespace "$NAMESPACE" --ignore-not-found --timeout=280s >/dev/null 2>&1 || true
	swap_off
}
trap cleanup EXIT
swap_mb=$(((WOKEN > ASLEEP ? WOKEN : ASLEEP) * 60 + 512))
SWAP_KIND=${SWAP_KIND:-file}
if [ "$SWAP_KIND" = zram ] || [ "$(awk '$1 == "SwapFree:" { print $2 }' /proc/meminfo)" -lt $((swap_mb * 1024)) ]; then
	swap_on "$SWAP_KIND" "$swap_mb"
fi
k delete namespace "$NAMESPACE" --ignore-not-found --timeout=280s >/dev/null
k create namespace "$NAMESPACE" >/dev/null
printf '%s, %s processors, %s of memory\n' "$(uname -srm)" "$(nproc)" "$(free -h | awk '$1 == "Mem:" { print $2 }')"

PYTHONPATH="$REPO_ROOT/hack" PYTHONDONTWRITEBYTECODE=1 python3 - "$NAMESPACE" "$CLUSTER" "$WOKEN" "$ASLEEP" "${REST:-20}" <<'P'
import glob, json, os, selectors, socket, subprocess, sys, time

from benchpods import Pod

namespace, cluster, how_many_woken, how_many_asleep = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
rest = float(sys.argv[5])
# Who holds as much as the argument says, and answers each connection with what it drew at its start.
PROGRAM = """
import os, socket, sys
held = bytearray(os.urandom(int(sys.argv[1]) << 20))
name = held[:8].hex().encode()
s = socket.create_server(("", 8080), backlog=64)
open("/tmp/ready", "w").close()
while True:
  c, _ = s.accept(); c.recv(100); c.sendall(name); c.close()
"""
# Pods that start at the same time; more would only wait for one another.
WAVE = 10


def kubectl(*args, given=None):
    command = [f"{cluster}/bin/kubectl", "--kubeconfig", f"{cluster}/admin.kubeconfig", "-n", namespace, *args]
    done = subprocess.run(command, input=given, check=True, stdout=subprocess.PIPE, text=True, timeout=600)
    return done.stdout


def until(words, condition, seconds=300):
    deadline = time.time() + seconds
    while True:
        left = condition()
        if not left:
            return
        assert time.time() < deadline, f"{words}: {left} not yet"
        time.sleep(0.2)


def manifest(name, megabytes, annotations):
    container = {
        "name": "main", "image": "torpor.dev/demo-python:dev", "imagePullPolicy": "Never",
        "command": ["python3", "-c", PROGRAM, str(megabytes)],
        "startupProbe": {"exec": {"command": ["test", "-e", "/tmp/ready"]}, "periodSeconds": 1, "failureThreshold": 100},
    }
    spec = {"runtimeClassName": "torpor", "terminationGracePeriodSeconds": 1, "automountServiceAccountToken": False, "containers": [container]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "annotations": annotations}, "spec": spec}


def start(how_many, megabytes, annotations):
    """In waves, because a kubelet that starts hundreds at once serves none of them in time."""
    names = [f"p{n}" for n in range(how_many)]
    for begin in range(0, how_many, WAVE):
        wave = names[begin:begin + WAVE]
        pods = {"apiVersion": "v1", "kind": "List", "items": [manifest(name, megabytes, annotations) for name in wave]}
        kubectl("create", "-f", "-", given=json.dumps(pods))
        kubectl("wait", "--for=condition=Ready", "--timeout=280s", *[f"pod/{name}" for name in wave])
        if begin % 50 == 0:
            print(f"    {begin + len(wave)} of {how_many} run", file=sys.stderr, flush=True)
    found = {pod["metadata"]["name"]: pod for pod in json.loads(kubectl("get", "pods", "-o", "json"))["items"]}
    return [Pod(found[name]) for name in names]


def ask_all(pods):
    """Connects to all at the same instant; the seconds until each had answered, and the answers."""
    waiting, took, answers = selectors.DefaultSelector(), {}, {}
    began = time.perf_counter()
    for number, pod in enumerate(pods):
        connection = socket.socket()
        connection.setblocking(False)
        connection.connect_ex((pod.ip, 8080))
        waiting.register(connection, selectors.EVENT_WRITE, number)
    while waiting.get_map():
        ready = waiting.select(timeout=30)
        assert ready, f"{len(waiting.get_map())} of {len(pods)} do not answer"
        for key, events in ready:
            if events & selectors.EVENT_WRITE:
                error = key.fileobj.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                assert error == 0, f"{pods[key.data].ip}: {os.strerror(error)}"
                key.fileobj.sendall(b"x")
                waiting.modify(key.fileobj, selectors.EVENT_READ, key.data)
                continue
            answers[key.data] = key.fileobj.recv(100)
            took[key.data] = time.perf_counter() - began
            waiting.unregister(key.fileobj)
            key.fileobj.close()
    return sorted(took.values()), [answers[n] for n in range(len(pods))]


def say(words, took, base):
    at = lambda values, p: values[round((len(values) - 1) * p)]
    figures = [(name, at(took, p), at(base, p)) for name, p in [("p50", .5), ("p99", .99), ("last", 1)]]
    print(f"{words:<46} " + "   ".join(f"{name} {value * 1000:7.0f} ms ({value / beside:6.1f} x)" for name, value, beside in figures), flush=True)


def all_sleep(pods, condition):
    until("not all sleep", lambda: sum(not condition(pod) for pod in pods))


def processes(pods):
    """Those of the pods: in their cgroups, and their shims apart."""
    found = set()
    roots = ["/sys/fs/cgroup/pids", "/sys/fs/cgroup/memory", "/sys/fs/cgroup"]
    for pod in pods:
        root = next(root for root in roots if os.path.isdir(f"{root}/{pod.pod_cgroup}"))
        for path, _, files in os.walk(f"{root}/{pod.pod_cgroup}"):
            if "cgroup.procs" in files:
                found |= {int(pid) for pid in open(f"{path}/cgroup.procs").read().split()}
    sandboxes, shims = {pod.sandbox for pod in pods}, set()
    for entry in glob.glob("/proc/[0-9]*/cmdline"):
        try:
            words = open(entry).read().split("\0")
        except OSError:
            continue
        if "containerd-shim" in words[0] and sandboxes & set(words):
            shims.add(int(entry.split("/")[2]))
    return found - shims, shims


def pss(pids):
    total = 0
    for pid in pids:
        try:
            text = open(f"/proc/{pid}/smaps_rollup").read()
        except OSError:
            continue
        total += int(text.split("Pss:")[1].split()[0]) / 1024
    return total


def ticks(pid):
    fields = open(f"/proc/{pid}/stat").read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def agent():
    for entry in glob.glob("/proc/[0-9]*/cmdline"):
        try:
            words = open(entry).read().split("\0")
        except OSError:
            continue
        if words[0].endswith("torpor-agent") and "run" in words:
            return int(entry.split("/")[2])
    raise AssertionError("the agent does not run")


def cost(words, pods, base=None):
    sandbox, shim = (pss(pids) / len(pods) for pids in processes(pods))
    each = sandbox + shim
    beside = f" ({each / base:.2f} x)" if base else ""
    print(f"{words:<46} {each:6.1f} MB PSS each{beside}, {shim:.1f} of them the shim's", flush=True)
    return each


def containerds():
    """containerd and its shims: what the node does for every Pod, also one that sleeps."""
    return subprocess.run(["pgrep", "^containerd"], capture_output=True, text=True).stdout.split()


def busy():
    """Seconds of processor time that the whole machine has used."""
    user, nice, system, _, _, irq, softirq = [int(field) for field in open("/proc/stat").readline().split()[1:8]]
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def agents_cost(words, seconds=60):
    pid, others = agent(), containerds()
    before, others_before, busy_before = ticks(pid), sum(map(ticks, others)), busy()
    time.sleep(seconds)
    share, others_share, all_of_it = [
        used / seconds * 100 for used in (ticks(pid) - before, sum(map(ticks, others)) - others_before, busy() - busy_before)
    ]
    resident = int(open(f"/proc/{pid}/status").read().split("VmRSS:")[1].split()[0]) / 1024
    print(f"{words:<46} {resident:6.1f} MB RSS, {share:.2f} % of a processor over {seconds} s", flush=True)
    print(f"    containerd and shims {others_share:.1f} %, the whole machine {all_of_it:.1f} %", flush=True)


def woken(pods):
    base, names = ask_all(pods)
    say(f"{len(pods)} awake, all asked at once", base, base)
    for words, annotation, condition in [("dozing", "torpor.dev/doze-after=1s", Pod.dozes), ("hibernated", "torpor.dev/hibernate=true", Pod.hibernates)]:
        kubectl("annotate", "--overwrite", "pod", "--all", annotation)
        all_sleep(pods, condition)
        time.sleep(3)
        took, answers = ask_all(pods)
        lost = sum(before != after for before, after in zip(names, answers))
        say(f"{len(pods)} {words}: answered since all were asked", took, base)
        print(f"    {lost} lost", flush=True)
        kubectl("annotate", "pod", "--all", annotation.split("=")[0] + "-")


def asleep(pods, awake):
    all_sleep(pods, Pod.dozes)
    time.sleep(rest)
    cost(f"{len(pods)} dozing, shim included", pods, awake)
    agents_cost(f"the agent, while {len(pods)} doze")
    kubectl("annotate", "--overwrite", "pod", "--all", "torpor.dev/hibernate=true")
    until("not all hibernate", lambda: sum(not pod.hibernates() for pod in pods), 900)
    time.sleep(rest)
    cost(f"{len(pods)} hibernated, shim included", pods, awake)
    agents_cost(f"the agent, while {len(pods)} hibernate")


if how_many_woken:
    pods = start(how_many_woken, 26, {})
    cost(f"{len(pods)} awake, 30 MB, shim included", pods)
    woken(pods)
    kubectl("delete", "pod", "--all", "--timeout=280s")
if how_many_asleep:
    pods = start(WAVE, 1, {})
    awake = cost(f"{WAVE} awake, small, shim included", pods)
    kubectl("delete", "pod", "--all", "--timeout=280s")
    asleep(start(how_many_asleep, 1, {"torpor.dev/doze-after": "1s"}), awake)
P
