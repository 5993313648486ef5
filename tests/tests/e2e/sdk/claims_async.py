"""Begins and ends claims with upstream's asynchronous client: with a volume and a variable, at their
shutdown time, and deleted in each way.

Arguments: namespace, address of the router. The pools `w` (two members) and `v` (no
members, its template has a volume) exist.
"""

import asyncio
import sys
import time

from k8s_agent_sandbox import AsyncSandboxClient
from k8s_agent_sandbox.exceptions import SandboxNotFoundError, SandboxWarmPoolNotFoundError
from k8s_agent_sandbox.models import SandboxDirectConnectionConfig

NAMESPACE, ROUTER = sys.argv[1:]
LIMIT = 60
# The claim lives long enough to be Ready first; it ends during the rest.
LIFETIME = 15


async def until(what, holds):
    end = time.monotonic() + LIMIT
    while not await holds():
        assert time.monotonic() < end, f"not seen within {LIMIT} s: {what}"
        await asyncio.sleep(0.1)


async def fails(kind, call):
    try:
        await call
    except kind:
        return
    raise AssertionError(f"no {kind.__name__}")


async def goes(client, claim, sandbox_id):
    """Waits until the claim and its Sandbox are gone."""

    async def gone():
        claims = await client.list_all_sandboxes(NAMESPACE)
        return claim not in claims and not await client.k8s_helper.get_sandbox(sandbox_id, NAMESPACE)

    await until(f"claim {claim} and its Sandbox are gone", gone)


async def ends_at_its_time(client, sandbox, begin):
    await goes(client, sandbox.claim_name, sandbox.sandbox_id)
    lived = time.monotonic() - begin
    # The time in the claim is in whole seconds.
    assert lived >= LIFETIME - 1, f"the claim ended after {lived:.1f} s"


async def with_volume_and_environment(client):
    """Claims with a volume and a variable; the claim gets a sandbox of its own, named like the claim."""
    volume = {
        "metadata": {"name": "data"},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "24Mi"}}},
    }
    sandbox = await client.create_sandbox(
        "v", namespace=NAMESPACE, sandbox_ready_timeout=LIMIT,
        volume_claim_templates=[volume], env={"GREETING": "from the claim"},
    )
    assert sandbox.sandbox_id == sandbox.claim_name
    found = await client.k8s_helper.core_v1_api.list_namespaced_persistent_volume_claim(NAMESPACE)
    asked = {each.metadata.name: each.spec.resources.requests["storage"] for each in found.items}
    assert asked == {f"data-{sandbox.sandbox_id}": "24Mi"}, asked
    said = await sandbox.commands.run("sh -c 'echo $GREETING'")
    assert said.stdout == "from the claim\n", said
    await sandbox.files.write("kept", b"on the volume")
    mounted = await sandbox.commands.run("grep ' /data ' /proc/mounts")
    assert mounted.exit_code == 0, mounted
    assert await sandbox.files.read("kept") == b"on the volume"
    return sandbox


async def is_deleted(client, delete):
    sandbox = await client.create_sandbox("w", namespace=NAMESPACE, sandbox_ready_timeout=LIMIT)
    # The handle forgets both names once the sandbox is deleted.
    claim, sandbox_id = sandbox.claim_name, sandbox.sandbox_id
    await delete(sandbox)
    assert not sandbox.is_active
    await goes(client, claim, sandbox_id)
    await fails(SandboxNotFoundError, client.get_sandbox(claim, NAMESPACE, resolve_timeout=1))
    assert (NAMESPACE, claim) not in await client.list_active_sandboxes()


async def the_rest(client):
    owned = await with_volume_and_environment(client)
    await is_deleted(client, lambda sandbox: client.delete_sandbox(sandbox.claim_name, NAMESPACE))
    await is_deleted(client, lambda sandbox: sandbox.terminate())
    await fails(SandboxWarmPoolNotFoundError, client.create_sandbox("none", namespace=NAMESPACE))
    return owned


async def main():
    config = SandboxDirectConnectionConfig(api_url=ROUTER)
    async with AsyncSandboxClient(connection_config=config) as client:
        begin = time.monotonic()
        passing = await client.create_sandbox(
            "w", namespace=NAMESPACE, sandbox_ready_timeout=LIMIT, shutdown_after_seconds=LIFETIME
        )
        assert (await passing.commands.run("true")).exit_code == 0
        owned, _ = await asyncio.gather(the_rest(client), ends_at_its_time(client, passing, begin))
        print(f"{time.monotonic() - begin:.1f} s: one has ended, two were deleted", flush=True)

        # Claim and Sandbox have one name.
        left = owned.sandbox_id

        async def only_that_is_left():
            return await client.list_all_sandboxes(NAMESPACE) == [left]

        await until("nothing but the claim with the volume is left", only_that_is_left)
        await client.delete_all()
        await goes(client, left, left)
        print(f"{time.monotonic() - begin:.1f} s: done", flush=True)


asyncio.run(main())
