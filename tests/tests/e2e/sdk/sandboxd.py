"""What upstream's client does with sandboxd's APIs (files over REST, commands over gRPC), in each way to reach them.

Arguments: namespace, address of the router. The pool `w` is there.
"""

import io
import sys
import time

import grpc
from google.protobuf import empty_pb2
from k8s_agent_sandbox import SandboxClient
from k8s_agent_sandbox.commands._process_stubs import process_pb2 as wire
from k8s_agent_sandbox.commands._process_stubs import process_pb2_grpc as service
from k8s_agent_sandbox.exceptions import SandboxRequestError
from k8s_agent_sandbox.models import (
    SandboxdInClusterConnectionConfig,
    SandboxdPodTunnelConnectionConfig,
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


def keeps_files(sandbox):
    files = sandbox.files
    assert not files.exists("deep")
    files.write("deep/er/bytes", BYTES)
    files.write("deep/er/pieces", io.BytesIO(BYTES))
    assert files.exists("deep/er/bytes")
    assert files.read("deep/er/bytes") == BYTES
    read = io.BytesIO()
    assert files.read_to("deep/er/pieces", read) == len(BYTES)
    assert read.getvalue() == BYTES
    entries = [(e.name, e.type, e.size, e.mode) for e in files.list("deep/er")]
    expected = [(name, "file", len(BYTES), "0644") for name in ("bytes", "pieces")]
    assert entries == expected, entries
    assert "deep" in {entry.name for entry in files.list(".")}
    error = fails(SandboxRequestError, lambda: files.delete("deep"))
    assert error.status_code == 409, error
    files.delete("deep", recursive=True)
    error = fails(SandboxRequestError, lambda: files.read("deep/er/bytes"))
    assert error.status_code == 404, error
    # The program of the image runs beside it, and writes where clients read.
    assert int(files.read("n")) > 0


def runs_commands(sandbox):
    run = sandbox.commands.run
    done = run("echo out; echo err >&2; exit 3")
    assert (done.stdout, done.stderr, done.exit_code) == ("out\n", "err\n", 3), done
    sandbox.files.write("sub/word", b"word")
    done = run('echo "$ASKED"; pwd; cat word', env={"ASKED": "a=b  c"}, cwd="sub")
    assert done.stdout == "a=b  c\n/data/sub\nword", done
    late = run("sleep 1000", command_timeout=1)
    assert (late.timed_out, late.exit_code) == (True, 124), late
    error = fails(RuntimeError, lambda: run("true", cwd="missing"))
    assert "NOT_FOUND" in str(error), error


def heard(events, output, words):
    """Takes events until so much, and nothing else, was said on one output."""
    said = b""
    while said != words:
        event = next(events)
        assert event.WhichOneof("event") == output, event
        said += getattr(event, output)
        assert words.startswith(said), said


def talks_with_commands(calls, metadata=None):
    """Commands that are heard while they run. The SDK has no call of its own for this, but the stubs for it."""
    options = {"timeout": LIMIT, "metadata": metadata}

    def shell(script):
        return wire.ProcessConfig(command=["sh", "-c", script])

    def start(script, **more):
        events = calls.Start(wire.StartRequest(config=shell(script), **more), **options)
        number = next(events).init.process_id
        assert number > 0
        return events, number

    def write(number, **payload):
        calls.WriteStdin(wire.WriteStdinRequest(process_id=number, **payload), **options)

    # What was said comes while the command waits for more.
    events, number = start("read word; echo got $word; cat >&2; exit 5")
    write(number, input=b"one\n")
    heard(events, "stdout", b"got one\n")
    write(number, input=b"two")
    heard(events, "stderr", b"two")
    write(number, eof=empty_pb2.Empty())
    assert next(events).exit.exit_code == 5
    assert next(events, None) is None

    # More than a message may hold.
    events, _ = start("head -c 5000000 /dev/zero")
    received = sum(len(event.stdout) for event in events)
    assert received == 5_000_000, received

    events, number = start("stty size; read line; exit 6", pty=wire.PTY(cols=100, rows=30))
    heard(events, "stdout", b"30 100\r\n")
    write(number, input=b"typed\n")
    last = list(events)[-1]
    assert last.exit.exit_code == 6, last

    events, _ = start("echo $$; exec sleep 1000")
    child = int(next(events).stdout)
    events.cancel()
    asked = wire.ExecuteRequest(config=shell(f"kill -0 {child}"))
    until("a command ends with its call", lambda: calls.Execute(asked, **options).exit_code != 0)


def main():
    begin = time.monotonic()
    ways = {
        # Of which the SDK says that it does not work with gVisor.
        "tunnel": SandboxdPodTunnelConnectionConfig(),
        "directly": SandboxdInClusterConnectionConfig(mode="in-cluster-pod-ip"),
    }
    clients = {way: SandboxClient(connection_config=config) for way, config in ways.items()}
    claimed = clients["tunnel"].create_sandbox(
        "w", namespace=NAMESPACE, sandbox_ready_timeout=LIMIT
    )
    claim, name = claimed.claim_name, claimed.sandbox_id
    for way, client in clients.items():
        sandbox = client.get_sandbox(claim, NAMESPACE)
        keeps_files(sandbox)
        runs_commands(sandbox)
        talks_with_commands(service.ProcessServiceStub(sandbox.connector.grpc_channel()))
        sandbox.close_connection()
        print(f"{time.monotonic() - begin:.1f} s: {way}", flush=True)
    with grpc.insecure_channel(ROUTER.removeprefix("http://")) as router:
        metadata = (
            ("x-sandbox-id", name),
            ("x-sandbox-namespace", NAMESPACE),
            ("x-sandbox-port", "9090"),
        )
        talks_with_commands(service.ProcessServiceStub(router), metadata)
    print(f"{time.monotonic() - begin:.1f} s: through the router", flush=True)
    clients["tunnel"].delete_sandbox(claim, NAMESPACE)


main()
