"""Runs code in a warm sandbox through upstream's Python SDK (pip install k8s-agent-sandbox).

usage: interpret.py NAMESPACE ROUTER, such as: interpret.py default http://localhost:8080
"""

import sys

from k8s_agent_sandbox import SandboxClient
from k8s_agent_sandbox.models import SandboxDirectConnectionConfig

namespace, router = sys.argv[1:]
client = SandboxClient(connection_config=SandboxDirectConnectionConfig(api_url=router))
sandbox = client.create_sandbox(warmpool="python", namespace=namespace)
try:
    sandbox.files.write("primes.py", b"print([n for n in range(2, 30) if all(n % d for d in range(2, n))])")
    done = sandbox.commands.run("python3 primes.py")
    print(done.stdout, end="")
    assert done.exit_code == 0, done.stderr
finally:
    sandbox.terminate()
