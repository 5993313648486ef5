"""Uses sandboxes with upstream's asynchronous client: through the router, and directly with either
runtime's calls.

Arguments: namespace, address of the router. The pool `w` exists.
"""

import asyncio
import sys
import time

from k8s_agent_sandbox import AsyncSandboxClient
from k8s_agent_sandbox.exceptions import SandboxNotFoundError, SandboxRequestError
from k8s_agent_sandbox.models import (
    SandboxDirectConnectionConfig,
    SandboxInClusterConnectionConfig,
    SandboxdInClusterConnectionConfig,
)

NAMESPACE, ROUTER = sys.argv[1:]
LIMIT = 60


async def until(what, holds):
    end = time.monotonic() + LIMIT
    while not await holds():
        assert time.monotonic() < end, f"not seen within {LIMIT} s: {what}"
        await asyncio.sleep(0.1)


async def a_life(way, config):
    async with AsyncSandboxClient(connection_config=config) as client:
        sandbox = await client.create_sandbox(
            "w", namespace=NAMESPACE, sandbox_ready_timeout=LIMIT, labels={"way": way}
        )
        claim = sandbox.claim_name
        assert (await sandbox.status())[0] == "SandboxReady"
        # Both calls run at once, on one sandbox.
        done, written = await asyncio.gather(
            sandbox.commands.run("sh -c 'echo out; echo err >&2; exit 3'"),
            sandbox.files.write("greeting", b"hello"),
        )
        assert (done.stdout, done.stderr, done.exit_code) == ("out\n", "err\n", 3), done
        assert await sandbox.files.exists("greeting")
        assert not await sandbox.files.exists("missing")
        assert await sandbox.files.read("greeting") == b"hello"
        assert "greeting" in {entry.name for entry in await sandbox.files.list(".")}
        try:
            await sandbox.files.read("missing")
            raise AssertionError("a file that is not there was read")
        except SandboxRequestError as error:
            assert error.status_code == 404, error
        listed = await client.list_all_sandboxes(NAMESPACE, label_selector=f"way={way}")
        assert listed == [claim], listed
        assert await client.get_sandbox(claim, NAMESPACE) is sandbox
    # The sandbox is left without a delete: the client's end deletes the claim.
    async with AsyncSandboxClient(connection_config=config, cleanup=False) as client:

        async def gone():
            return claim not in await client.list_all_sandboxes(NAMESPACE)

        await until("the claim is gone", gone)
        try:
            await client.get_sandbox(claim, NAMESPACE, resolve_timeout=1)
            raise AssertionError("a claim that is gone was found")
        except SandboxNotFoundError:
            pass


async def main():
    begin = time.monotonic()
    await asyncio.gather(
        a_life("async-direct", SandboxDirectConnectionConfig(api_url=ROUTER)),
        a_life("async-incluster", SandboxInClusterConnectionConfig()),
        a_life("async-sandboxd", SandboxdInClusterConnectionConfig(mode="in-cluster-pod-ip")),
    )
    print(f"{time.monotonic() - begin:.1f} s: done", flush=True)


asyncio.run(main())
