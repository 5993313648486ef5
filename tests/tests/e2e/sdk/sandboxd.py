"""Uses sandboxd's APIs (files over REST, commands over gRPC) with upstream's client, in each way to
reach them, and
checks that no path leaves the root by these or the legacy API.

Arguments: namespace, address of the router. The pool `w` exists.
"""

import http.client
import io
import json
import sys
import tarfile
import time

import grpc
from google.protobuf import empty_pb2
from k8s_agent_sandbox import SandboxClient
from k8s_agent_sandbox.commands._process_stubs import process_pb2 as wire
from k8s_agent_sandbox.commands._process_stubs import process_pb2_grpc as service
from k8s_agent_sandbox.exceptions import SandboxRequestError
from k8s_agent_sandbox.models import (
    SandboxInClusterConnectionConfig,
    SandboxdInClusterConnectionConfig,
    SandboxdPodTunnelConnectionConfig,
)

NAMESPACE, ROUTER = sys.argv[1:]
LIMIT = 60
BYTES = bytes(range(256)) * 4096

DENIED = {"message": "Access denied"}
ESCAPE = {
    "code": "PERMISSION_DENIED",
    "message": "path traversal outside sandbox root is forbidden",
}
# Port, request, body of the answer with status 403. `out` is a link to a file beside the root,
# `top` is a link to `/`.
WAYS_OUT = [
    (8888, "GET /download/../dev/shm/secret", DENIED),
    (8888, "GET /download/..%2Fdev%2Fshm%2Fsecret", DENIED),
    (8888, "GET /download/%252e%252e%252fdev%252fshm%252fsecret", DENIED),
    (8888, "GET /download/out", DENIED),
    (8888, "GET /download/word%00", DENIED),
    (8888, "GET /list/top%2Fdev", DENIED),
    (8888, "GET /exists/top/dev/shm/secret", DENIED),
    (8080, "GET /v1/files/../dev/shm/secret", ESCAPE),
    (8080, "GET /v1/files/%2e%2e%2fdev%2fshm%2fsecret", ESCAPE),
    (8080, "GET /v1/files/out", ESCAPE),
    (8080, "GET /v1/files/word%00", ESCAPE),
    (8080, "GET /v1/files/top%2Fdev", ESCAPE),
    (8080, "PUT /v1/files/top/dev/shm/new", ESCAPE),
    (8080, "PUT /v1/files/%2E%2E/dev/shm/new", ESCAPE),
    (8080, "DELETE /v1/files/top/dev/shm/secret", ESCAPE),
    (8080, "DELETE /v1/files/%2E%2E/dev/shm/secret?recursive=true", ESCAPE),
    (8080, "GET /v1/files/out?stat=true", ESCAPE),
    (8080, "GET /v1/files/top?recursive=true", ESCAPE),
    (8080, "POST /v1/files/top/dev/shm/new?op=mkdir", ESCAPE),
    (8080, "POST /v1/files/word?op=move&to=top%2Fdev%2Fshm%2Fnew", ESCAPE),
    (8080, "POST /v1/files/top/dev/shm/secret?op=move&to=taken", ESCAPE),
    (8080, "POST /v1/files/out?op=copy&to=taken", ESCAPE),
    (8080, "POST /v1/files/word?op=copy&to=..%2Fdev%2Fshm%2Fnew", ESCAPE),
    (8080, "POST /v1/files/top/dev/shm?op=extract", ESCAPE),
]
# An absolute path is below the root, where no file of that name exists.
ABSOLUTE = [
    (8888, "GET /download/%2Fdev%2Fshm%2Fsecret", {"message": "File not found"}),
    (
        8080,
        "GET /v1/files/%2Fdev%2Fshm%2Fsecret",
        {"code": "NOT_FOUND", "message": "path does not exist within the sandbox"},
    ),
]


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
    # The program of the image runs beside the runtime, and writes where clients read.
    assert int(files.read("n")) > 0


def runs_commands(sandbox):
    run = sandbox.commands.run
    done = run("echo out; echo err >&2; exit 3")
    assert (done.stdout, done.stderr, done.exit_code) == ("out\n", "err\n", 3), done
    sandbox.files.write("sub/word", b"word")
    done = run('echo "$ASKED"; pwd; cat word', env={"ASKED": "a=b  c"}, cwd="sub")
    assert done.stdout == "a=b  c\n/data/sub\nword", done
    assert run("kill -9 $$").exit_code == 137
    late = run("sleep 1000", command_timeout=1)
    assert (late.timed_out, late.exit_code) == (True, 124), late
    error = fails(RuntimeError, lambda: run("true", cwd="missing"))
    assert "NOT_FOUND" in str(error), error


def heard(events, output, words):
    """Takes events until these words, and nothing else, came on one output."""
    said = b""
    while said != words:
        event = next(events)
        assert event.WhichOneof("event") == output, event
        said += getattr(event, output)
        assert words.startswith(said), said


def talks_with_commands(calls, metadata=None):
    """Exchanges data with running commands. The SDK has no calls for this, only the stubs."""
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

    # The output arrives while the command waits for more input.
    events, number = start("read word; echo got $word; cat >&2; exit 5")
    write(number, input=b"one\n")
    heard(events, "stdout", b"got one\n")
    write(number, input=b"two")
    heard(events, "stderr", b"two")
    write(number, eof=empty_pb2.Empty())
    assert next(events).exit.exit_code == 5
    assert next(events, None) is None

    # This is more than a message may hold.
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


def ask(address, port, request, body=None):
    """Sends a path as it is written; other clients would normalize it."""
    method, path = request.split(" ")
    connection = http.client.HTTPConnection(address, port, timeout=LIMIT)
    try:
        connection.request(method, path, body=b"new" if method == "PUT" else body)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def packed(*members):
    """Returns an archive of files (name, content) and links (name, target) as Python writes it."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for name, content in members:
            member = tarfile.TarInfo(name)
            if isinstance(content, bytes):
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
            else:
                member.type, member.linkname = tarfile.SYMTYPE, content
                tar.addfile(member)
    return archive.getvalue()


def changes_files(sandbox):
    """Makes the calls that this SDK does not have."""
    address, run = sandbox.get_pod_ip(), sandbox.commands.run

    def call(status, request, body=None):
        answer = ask(address, 8080, request.replace(" ", " /v1/files/", 1), body)
        assert answer[0] == status, (request, answer)
        return answer[1]

    call(204, "POST moves/from?op=mkdir")
    long = "long/" * 30 + "name"
    archive = packed(("a/b", b"one"), ("link", "a/b"), (long, b"x"))
    told = call(200, "POST moves/from?op=extract", archive)
    assert json.loads(told) == {"entries": 3}, told
    call(204, "POST moves/from?op=copy&to=moves%2Fcopy")
    call(204, "POST moves/from/a/b?op=move&to=moves%2Fmoved")
    call(409, "POST moves/moved?op=move&to=moves%2Fcopy%2Fa%2Fb")
    call(409, "PUT moves/moved?overwrite=false")
    seen = run("cd moves && cat moved copy/link && readlink copy/link && ls from/a").stdout
    assert seen == "oneonea/b\n", seen
    listed = json.loads(call(200, "GET moves/copy?recursive=true"))["entries"]
    names = {entry["name"] for entry in listed}
    assert {"a", "a/b", "link", long} <= names, names
    told = json.loads(call(200, "GET moves/moved?stat=true"))
    assert (told["name"], told["type"], told["size"]) == ("moved", "file", 3), told
    # A member outside of the root ends an archive, and what came before the member stays.
    refused = call(403, "POST moves?op=extract", packed(("before", b""), ("../after", b"")))
    assert b"1 entries before it were extracted" in refused, refused
    call(400, "POST moves?op=extract", packed(("leads", "from"), ("leads/new", b"")))
    seen = run("ls moves; test -e after")
    left = ["before", "copy", "from", "leads", "moved"]
    assert (seen.stdout.split(), seen.exit_code) == (left, 1), seen
    call(204, "DELETE moves?recursive=true")


def no_path_leaves_the_root(sandbox):
    # Commands may make links, and clients then meet these.
    made = sandbox.commands.run(
        "echo secret >/dev/shm/secret; echo >word; ln -s ../dev/shm/secret out; ln -s / top;"
        " cat out top/dev/shm/secret"
    )
    assert made.stdout == "secret\nsecret\n", made
    address = sandbox.get_pod_ip()
    for status, requests in ((403, WAYS_OUT), (404, ABSOLUTE)):
        for port, request, told in requests:
            answer = ask(address, port, request)
            assert answer[0] == status and json.loads(answer[1]) == told, (port, request, answer)
    legacy = SandboxClient(connection_config=SandboxInClusterConnectionConfig())
    files = legacy.get_sandbox(sandbox.claim_name, NAMESPACE).files
    for name in ("../dev/shm/new", "top/dev/shm/new"):
        error = fails(
            SandboxRequestError, lambda: files.write(name, b"new", allow_unsafe_paths=True)
        )
        assert (error.status_code, error.response.json()) == (403, DENIED), (name, error)
    for cwd in ("..", "top", "top/dev/shm"):
        error = fails(RuntimeError, lambda: sandbox.commands.run("pwd", cwd=cwd))
        assert "PERMISSION_DENIED" in str(error), (cwd, error)
    after = sandbox.commands.run("cat /dev/shm/secret; test -e /dev/shm/new")
    assert (after.stdout, after.exit_code) == ("secret\n", 1), after


def main():
    begin = time.monotonic()
    ways = {
        # According to the SDK this way does not work with gVisor.
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
        if way == "directly":
            changes_files(sandbox)
            no_path_leaves_the_root(sandbox)
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
