#!/usr/bin/env bash
# Shows that connections go on after a long silence: opens WebSockets (every other one with TCP keepalives) and SSH connections to a Pod,
# hibernates it, says nothing for an hour, and then speaks on all of them at once. Fails if one is lost, or something has woken the Pod.
# usage: hack/bench-hour.sh [SECONDS [CONNECTIONS]]
# (default 3600 and 20; needs a running development cluster with Torpor, KUBECONFIG or its own; whatever else runs there may go on)
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

SECONDS_OF_SILENCE=${1:-3600}
CONNECTIONS=${2:-20}
CLUSTER=/var/lib/torpor-dev
KUBECONFIG=${KUBECONFIG:-$CLUSTER/admin.kubeconfig}
NAMESPACE=torpor-bench-hour
IMAGE=torpor.dev/bench-ssh:dev
k() { timeout 120 "$CLUSTER/bin/kubectl" --kubeconfig "$KUBECONFIG" "$@"; }

need_torpor "loads an image into the node"
install_missing ssh=openssh-client python3=python3

TMP=$(mktemp -d)
cleanup() {
	k delete namespace "$NAMESPACE" --ignore-not-found --wait=false >/dev/null 2>&1 || true
	rm -rf "$TMP"
}
trap cleanup EXIT

# Root comes in without a password: the Pod is there for this run alone, and holds nothing of anybody's.
echo 'root::0:0:root:/:/bin/sh' >"$TMP/passwd"
"$REPO_ROOT/hack/image" debian "$IMAGE" "$TMP/ssh.tar" --packages dropbear-bin,busybox-static "$TMP/passwd:etc/passwd"
"$REPO_ROOT/hack/cluster" load-image "$TMP/ssh.tar"

k delete namespace "$NAMESPACE" --ignore-not-found --timeout=100s >/dev/null
k create namespace "$NAMESPACE" >/dev/null
k -n "$NAMESPACE" create configmap program --from-file="$REPO_ROOT/hack/demo/holder.py" --from-file="$REPO_ROOT/hack/demo/websocket.py" >/dev/null
k create -f - >/dev/null <<-Y
	apiVersion: v1
	kind: Pod
	metadata: {name: hour, namespace: $NAMESPACE}
	spec:
	  runtimeClassName: torpor
	  terminationGracePeriodSeconds: 1
	  containers:
	  - name: websocket
	    image: torpor.dev/demo-python:dev
	    imagePullPolicy: Never
	    command: [python3, /program/holder.py]
	    startupProbe: {tcpSocket: {port: 8080}, periodSeconds: 1, failureThreshold: 60}
	    volumeMounts: [{name: program, mountPath: /program}, {name: data, mountPath: /data}, {name: scratch, mountPath: /scratch}]
	  - name: ssh
	    image: $IMAGE
	    imagePullPolicy: Never
	    command: [sh, -c, "mkdir -p /etc/dropbear && exec dropbear -F -E -R -B -p 2222"]
	    startupProbe: {tcpSocket: {port: 2222}, periodSeconds: 1, failureThreshold: 60}
	  volumes:
	  - name: program
	    configMap: {name: program}
	  - name: data
	    emptyDir: {}
	  - name: scratch
	    emptyDir: {}
Y
k -n "$NAMESPACE" wait --for=condition=Ready --timeout=110s pod/hour >/dev/null

PYTHONPATH=$REPO_ROOT/hack/demo PYTHONDONTWRITEBYTECODE=1 python3 - "$SECONDS_OF_SILENCE" "$CONNECTIONS" \
	"$CLUSTER/bin/kubectl" --kubeconfig "$KUBECONFIG" -n "$NAMESPACE" <<'P'
import concurrent.futures, json, socket, subprocess, sys, threading, time

import websocket

silence, count, program = float(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
LIMIT = 60
# As programs in Go do, and many a proxy.
KEEPALIVES = [(socket.TCP_KEEPIDLE, 15), (socket.TCP_KEEPINTVL, 15), (socket.TCP_KEEPCNT, 9)]
# Answers as the demo's program does over a WebSocket: each line with how many there have been on this connection.
ECHO = 'n=0; while read -r line; do n=$((n + 1)); echo "$n $line"; done'


def kubectl(*args):
    return subprocess.run([*program, *args], check=True, stdout=subprocess.PIPE, text=True, timeout=120).stdout


def pod():
    return json.loads(kubectl("get", "pod", "hour", "-o", "json"))["status"]


class WebSocket:
    kind = "WebSocket"

    def __init__(self, address):
        self.socket = socket.create_connection((address, 8080), timeout=LIMIT)
        self.file = self.socket.makefile("rwb")
        websocket.connect(self.file, f"{address}:8080", "/echo")

    def exchange(self, text):
        websocket.send(self.file, text, masked=True)
        return websocket.receive(self.file)


class KeptAlive(WebSocket):
    kind = "WebSocket with keepalives"

    def __init__(self, address):
        super().__init__(address)
        for option, value in KEEPALIVES:
            self.socket.setsockopt(socket.IPPROTO_TCP, option, value)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


class Ssh:
    kind = "SSH"

    def __init__(self, address):
        options = ["BatchMode=yes", "StrictHostKeyChecking=no", "UserKnownHostsFile=/dev/null", "LogLevel=ERROR"]
        command = ["ssh", "-T", "-F", "/dev/null", "-p", "2222", *(word for option in options for word in ("-o", option))]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = subprocess.Popen([*command, f"root@{address}", ECHO], text=True, bufsize=1, **pipes)

    def exchange(self, text):
        late = threading.Timer(LIMIT, self.process.kill)
        late.start()
        try:
            self.process.stdin.write(f"{text}\n")
            return self.process.stdout.readline().strip()
        finally:
            late.cancel()


def say(connection, text, number):
    """How many milliseconds an answer took, and what is wrong with it."""
    began = time.monotonic()
    try:
        answer = connection.exchange(text)
    except (OSError, ValueError) as error:
        answer = repr(error)
    took = (time.monotonic() - began) * 1000
    return took, None if answer == f"{number} {text}" else f"{connection.kind}: {answer!r} came"


def sleeps():
    """Whether it sleeps, and since when that has been so."""
    found = [one for one in pod()["conditions"] if one["type"] == "torpor.dev/Hibernated"]
    return found and (found[0]["status"], found[0]["lastTransitionTime"])


def until_it_sleeps():
    kubectl("annotate", "pod", "hour", "torpor.dev/hibernate=true")
    kubectl("wait", "--for=condition=torpor.dev/Hibernated", "--timeout=90s", "pod/hour")
    # Somebody may have been about to say something; then it sleeps again.
    time.sleep(20)
    kubectl("wait", "--for=condition=torpor.dev/Hibernated", "--timeout=90s", "pod/hour")
    return sleeps()


kinds = [WebSocket, KeptAlive, Ssh]
address = pod()["podIP"]
connections = []
for n in range(count):
    connections.append(kinds[n % len(kinds)](address))
    _, wrong = say(connections[-1], f"before-{n}", 1)
    assert wrong is None, wrong
asleep = until_it_sleeps()
of_each = ", ".join(f"{sum(one.kind == kind.kind for one in connections)} {kind.kind}" for kind in kinds)
print(f"{count} connections ({of_each}) to a Pod that hibernates; silence for {silence:.0f} s from {time.strftime('%H:%M:%S')} on", flush=True)
time.sleep(silence)
now = sleeps()
slept = asleep == now and now[0] == "True"
print(f"it has slept all the time, since {now[1]}" if slept else f"WRONG: something has woken it: {asleep}, then {now}", flush=True)
with concurrent.futures.ThreadPoolExecutor(count) as pool:
    said = list(pool.map(lambda n: say(connections[n], f"after-{n}", 2), range(count)))
wrongs = [wrong for _, wrong in said if wrong]
times = sorted(took for took, wrong in said if not wrong)
if times:
    print(f"{len(times)} of {count} go on: the first answer came after {times[0]:.0f} ms, the last after {times[-1]:.0f} ms")
for wrong in wrongs:
    print(f"WRONG: {wrong}")
restarts = sum(one["restartCount"] for one in pod()["containerStatuses"])
if restarts:
    print(f"WRONG: {restarts} restarts")
for connection in connections:
    if isinstance(connection, Ssh):
        connection.process.kill()
sys.exit(bool(wrongs or restarts or not slept))
P
