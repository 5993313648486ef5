"""Suspends and resumes a sandbox, by the SDK's extension and by a change of operatingMode, and checks
that it continues.

Arguments: namespace, address of the router. The pool `w` exists, and deploy/podsnapshots is applied.
"""

import subprocess
import sys
import time

from k8s_agent_sandbox.gke_extensions.snapshots import PodSnapshotSandboxClient
from k8s_agent_sandbox.models import SandboxDirectConnectionConfig

NAMESPACE, ROUTER = sys.argv[1:]
LIMIT = 60


def until(what, holds):
    end = time.monotonic() + LIMIT
    while not holds():
        assert time.monotonic() < end, f"not seen within {LIMIT} s: {what}"
        time.sleep(0.1)


def kubectl(*words):
    subprocess.run(["kubectl", "-n", NAMESPACE, *words], check=True, timeout=LIMIT)


def images():
    words = ["kubectl", "-n", NAMESPACE, "get", "sandboxsnapshots", "-o", "name"]
    return subprocess.run(words, check=True, timeout=LIMIT, capture_output=True, text=True).stdout.split()


class Witness:
    """State of a sandbox in memory: its program's count, and a process that a client started."""

    def __init__(self, sandbox):
        self.sandbox = sandbox
        started = sandbox.commands.run("sh -c 'sleep 100000 >/dev/null 2>&1 & echo $!'")
        self.child = int(started.stdout)
        sandbox.files.write("note", b"before")
        self.count = self.now()
        self.uid = self.pod().metadata.uid

    def now(self):
        return int(self.sandbox.files.read("n"))

    def pod(self):
        return self.sandbox.k8s_helper.core_v1_api.read_namespaced_pod(
            self.sandbox.get_pod_name(), NAMESPACE
        )

    def went_on(self):
        pod = self.pod()
        assert pod.metadata.uid != self.uid, "it is the same Pod"
        assert sum(c.restart_count for c in pod.status.container_statuses) == 0
        # After a fresh start the program would count from zero, and the child would be gone.
        count = self.now()
        assert self.count <= count < self.count + 10 * LIMIT, (self.count, count)
        assert self.sandbox.commands.run(f"kill -0 {self.child}").exit_code == 0
        assert self.sandbox.files.read("note") == b"before"
        self.count, self.uid = count, pod.metadata.uid


def main():
    begin = time.monotonic()
    client = PodSnapshotSandboxClient(connection_config=SandboxDirectConnectionConfig(api_url=ROUTER))
    sandbox = client.create_sandbox("w", namespace=NAMESPACE, sandbox_ready_timeout=LIMIT)
    witness = Witness(sandbox)

    # By default the SDK first takes a PodSnapshot of the running sandbox.
    suspended = sandbox.suspend(wait_timeout=LIMIT)
    assert suspended.success and suspended.snapshot_response.success, suspended
    taken = suspended.snapshot_response.snapshot_uid
    assert sandbox.is_suspended()
    assert sandbox.status()[0] == "SandboxNotReady", sandbox.status()
    resumed = sandbox.resume(wait_timeout=LIMIT)
    assert resumed.success and resumed.restored_from_snapshot, resumed
    assert resumed.snapshot_uid == taken, (resumed, taken)
    witness.went_on()
    print(f"{time.monotonic() - begin:.1f} s: by the SDK", flush=True)

    # The snapshots are listed. A restore from one is refused, and the SDK gets the reason: the
    # sandbox continues from its newest memory.
    by_hand = sandbox.snapshots.create("by-hand", podsnapshot_timeout=LIMIT)
    assert by_hand.success, by_hand
    listed = sandbox.snapshots.list()
    assert [one.snapshot_uid for one in listed.snapshots] == [by_hand.snapshot_uid, taken], listed
    assert {one.source_pod for one in listed.snapshots} == {sandbox.get_pod_name()}, listed
    suspended = sandbox.suspend(snapshot_before_suspend=False, wait_timeout=LIMIT)
    assert suspended.success, suspended
    refused = sandbox.restore(taken, sandbox_ready_timeout=LIMIT)
    assert not refused.success and "torpor.dev/restore-from" in refused.error_reason, refused
    witness.went_on()
    print(f"{time.monotonic() - begin:.1f} s: restore refused", flush=True)

    # The snapshots are deleted, and Torpor saves without them all the same.
    deleted = sandbox.snapshots.delete_all(timeout=LIMIT)
    assert deleted.success and len(deleted.deleted_snapshots) == 2, deleted
    suspended = sandbox.suspend(snapshot_before_suspend=False, wait_timeout=LIMIT)
    assert suspended.success, suspended
    resumed = sandbox.resume(wait_timeout=LIMIT)
    assert resumed.success and not resumed.restored_from_snapshot, resumed
    witness.went_on()
    print(f"{time.monotonic() - begin:.1f} s: without a PodSnapshot", flush=True)

    mode = '{"spec":{"operatingMode":"%s"}}'
    kubectl("patch", "sandbox", sandbox.sandbox_id, "--type=merge", "-p", mode % "Suspended")
    kubectl("wait", f"sandbox/{sandbox.sandbox_id}", "--for=condition=Suspended", f"--timeout={LIMIT}s")
    until("it has no address", lambda: sandbox.get_pod_ip() is None)
    kubectl("patch", "sandbox", sandbox.sandbox_id, "--type=merge", "-p", mode % "Running")
    kubectl("wait", f"sandbox/{sandbox.sandbox_id}", "--for=condition=Ready", f"--timeout={LIMIT}s")
    witness.went_on()
    print(f"{time.monotonic() - begin:.1f} s: by kubectl", flush=True)
    # Kubernetes' garbage collection looks for new kinds every 30 s.
    until("the images of the PodSnapshots are gone", lambda: not images())
    print(f"{time.monotonic() - begin:.1f} s: images gone", flush=True)
    sandbox.terminate()


main()
