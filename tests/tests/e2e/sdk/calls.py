"""Uses sandboxes with upstream's synchronous client, in each way to reach one.

Arguments: namespace, address of the router. The pools `w` (two members) and `v` (no
members, its template has a volume) exist.
"""

import sys
import time

from k8s_agent_sandbox import SandboxClient
from k8s_agent_sandbox.exceptions import (
    SandboxNotFoundError,
    SandboxRequestError,
    SandboxWarmPoolNotFoundError,
)
from k8s_agent_sandbox.models import (
    SandboxDirectConnectionConfig,
    SandboxInClusterConnectionConfig,
    SandboxLocalTunnelConnectionConfig,
)

NAMESPACE, ROUTER = sys.argv[1:]
LIMIT = 60
BYTES = bytes(range(256)) * 4096


def until(what, holds):
    end = time.monotonic() + LIMIT
    while not holds():
        assert time.monotonic() < end, f"not seen within {LIMIT} s: {what}"
        time.sleep(0.1)


def fails(kind, call):
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}")


def commands_and_files(sandbox):
    done = sandbox.commands.run("sh -c 'echo out; echo err >&2; exit 3'")
    assert (done.stdout, done.stderr, done.exit_code) == ("out\n", "err\n", 3), done
    files = sandbox.files
    assert not files.exists("bytes")
    files.write("bytes", BYTES)
    assert files.exists("bytes")
    assert files.read("bytes") == BYTES
    # Commands and clients see the same files.
    seen = sandbox.commands.run("wc -c bytes").stdout
    assert seen.split() == [str(len(BYTES)), "bytes"], seen
    assert sandbox.commands.run("sh -c 'echo hello > greeting'").exit_code == 0
    assert files.read("greeting") == b"hello\n"
    entries = {entry.name: entry for entry in files.list(".")}
    assert (entries["bytes"].size, entries["bytes"].type) == (len(BYTES), "file"), entries
    error = fails(SandboxRequestError, lambda: files.read("missing"))
    assert error.status_code == 404, error
    # The program of the image runs beside the runtime, and has since before the claim.
    assert int(files.read("n")) > 0


def pod_has_label(client, name, key, value):
    """Waits for a label, which the Pod gets a moment after its claim is Ready, as upstream."""
    deadline = time.monotonic() + LIMIT
    while True:
        pod = client.k8s_helper.core_v1_api.read_namespaced_pod(name, NAMESPACE)
        if pod.metadata.labels.get(key) == value:
            return
        assert time.monotonic() < deadline, pod.metadata.labels
        time.sleep(0.1)


def pool_is_ready(client):
    """Reports whether a warm sandbox is ready; without one a claim gets a cold one, as upstream."""
    pool = client.k8s_helper.custom_objects_api.get_namespaced_custom_object(
        "extensions.agents.x-k8s.io", "v1beta1", NAMESPACE, "sandboxwarmpools", "w"
    )
    return pool.get("status", {}).get("readyReplicas", 0) > 0


def a_life(client, way):
    """Claims a sandbox, uses it, looks it up, lists it and deletes it."""
    until("the pool has a ready sandbox", lambda: pool_is_ready(client))
    sandbox = client.create_sandbox(
        "w", namespace=NAMESPACE, sandbox_ready_timeout=LIMIT, labels={"way": way},
        pod_labels={"sandbox.users.io/way": way},
    )
    claim = sandbox.claim_name
    assert sandbox.status()[0] == "SandboxReady", sandbox.status()
    assert sandbox.sandbox_id.startswith("w-"), sandbox.sandbox_id
    assert sandbox.get_pod_ip() and sandbox.get_sandbox_name_hash()
    pod_has_label(client, sandbox.get_pod_name(), "sandbox.users.io/way", way)
    commands_and_files(sandbox)

    assert client.list_active_sandboxes() == [(NAMESPACE, claim)]
    assert client.list_all_sandboxes(NAMESPACE, label_selector=f"way={way}") == [claim]
    assert client.list_all_sandboxes(NAMESPACE, label_selector="way=none") == []
    assert client.get_sandbox_claim_warmpool_name(claim, NAMESPACE) == "w"
    assert client.get_sandbox(claim, NAMESPACE) is sandbox
    sandbox.close_connection()
    again = client.get_sandbox(claim, NAMESPACE)
    assert again is not sandbox
    assert again.files.read("greeting") == b"hello\n"

    client.delete_sandbox(claim, NAMESPACE)
    until("the claim is gone", lambda: claim not in client.list_all_sandboxes(NAMESPACE))
    until("the Sandbox is gone", lambda: not client.k8s_helper.get_sandbox(sandbox.sandbox_id, NAMESPACE))
    fails(SandboxNotFoundError, lambda: client.get_sandbox(claim, NAMESPACE, resolve_timeout=1))


def with_volume_and_environment(client):
    """Claims with a volume and a variable; the claim gets a sandbox of its own, named like the claim."""
    volume = {
        "metadata": {"name": "data"},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "24Mi"}}},
    }
    sandbox = client.create_sandbox(
        "v", namespace=NAMESPACE, sandbox_ready_timeout=LIMIT,
        volume_claim_templates=[volume], env={"GREETING": "from the claim"},
    )
    assert sandbox.sandbox_id == sandbox.claim_name
    volumes = client.k8s_helper.core_v1_api.list_namespaced_persistent_volume_claim(NAMESPACE).items
    asked = {v.metadata.name: v.spec.resources.requests["storage"] for v in volumes}
    assert asked == {f"data-{sandbox.sandbox_id}": "24Mi"}, asked
    assert sandbox.commands.run("sh -c 'echo $GREETING'").stdout == "from the claim\n"
    sandbox.files.write("kept", b"on the volume")
    mounted = sandbox.commands.run("grep ' /data ' /proc/mounts")
    assert mounted.exit_code == 0 and sandbox.files.read("kept") == b"on the volume", mounted
    return sandbox


def main():
    ways = {
        "direct": SandboxDirectConnectionConfig(api_url=ROUTER),
        "tunnel": SandboxLocalTunnelConnectionConfig(),
        "incluster": SandboxInClusterConnectionConfig(),
    }
    clients = {way: SandboxClient(connection_config=config) for way, config in ways.items()}
    client = clients["direct"]
    # The claim lives long enough to be Ready first; it ends during the rest.
    begin = time.monotonic()
    passing = client.create_sandbox(
        "w", namespace=NAMESPACE, sandbox_ready_timeout=LIMIT, shutdown_after_seconds=15
    )
    assert passing.commands.run("true").exit_code == 0
    passing.close_connection()
    client.list_active_sandboxes()
    for way, each in clients.items():
        a_life(each, way)
        print(f"{time.monotonic() - begin:.1f} s: {way}", flush=True)
    owned = with_volume_and_environment(client)
    fails(SandboxWarmPoolNotFoundError, lambda: client.create_sandbox("none", namespace=NAMESPACE))
    until(
        "the claim with a shutdown time is gone",
        lambda: passing.claim_name not in client.list_all_sandboxes(NAMESPACE),
    )
    assert time.monotonic() - begin >= 14, "the claim ended before its time"
    assert client.list_all_sandboxes(NAMESPACE) == [owned.claim_name]
    client.delete_all()
    until("all claims are gone", lambda: client.list_all_sandboxes(NAMESPACE) == [])
    print(f"{time.monotonic() - begin:.1f} s: done", flush=True)


main()
