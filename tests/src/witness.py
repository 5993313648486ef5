"""Holds memory, counts, has a child and open files, and reports whether all of these are still the same.

The program answers each line on port 8080 with a line of JSON, on any number of connections, and each
datagram with one. Environment: MEGABYTES of random bytes to hold, FILES to write its secret into and to
hold open (separated by colons).
"""

import hashlib
import json
import os
import random
import socket
import socketserver
import subprocess
import threading
import time

PATHS = [path for path in os.environ.get("FILES", "").split(":") if path]

counter = 0
secret = os.urandom(8).hex()
source = random.Random(secret)
memory = {f"block-{n}": source.randbytes(1 << 20) for n in range(int(os.environ.get("MEGABYTES", "1")))}
for path in PATHS:
    with open(path, "a") as file:
        file.write(secret + "\n")
held = {path: open(path) for path in PATHS}
child = subprocess.Popen(["sleep", "1000000"])


def count():
    global counter
    while True:
        counter += 1
        if counter % 10 == 0:
            print("count", counter, flush=True)
        time.sleep(0.05)


def on_disk(path):
    try:
        with open(path) as file:
            return secret in file.read().split()
    except OSError:
        return False


def still_open(file):
    file.seek(0)
    return secret in file.read().split()


def digest():
    total = hashlib.sha256()
    for name in sorted(memory):
        total.update(memory[name])
    return total.hexdigest()


def state():
    return {
        "secret": secret,
        "counter": counter,
        "digest": digest(),
        "pid": os.getpid(),
        "child": child.pid if child.poll() is None else None,
        "hostname": socket.gethostname(),
        "files": {path: on_disk(path) for path in PATHS},
        "open": {path: still_open(file) for path, file in held.items()},
    }


class Lines(socketserver.StreamRequestHandler):
    def handle(self):
        for line in self.rfile:
            self.wfile.write(json.dumps(state()).encode() + b"\n")


class Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
    # A test opens fewer while a slow machine saves and wakes the sandbox; gVisor takes no more.
    request_queue_size = 1024


class Datagrams(socketserver.DatagramRequestHandler):
    def handle(self):
        self.wfile.write(json.dumps(state()).encode())


class OverIPv6:
    """Serves IPv6 at the port of an IPv4 server."""

    address_family = socket.AF_INET6

    def server_bind(self):
        self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        super().server_bind()


class Server6(OverIPv6, Server):
    pass


class UDPServer6(OverIPv6, socketserver.UDPServer):
    pass


threading.Thread(target=count, daemon=True).start()
servers = [socketserver.UDPServer(("", 8080), Datagrams), UDPServer6(("::", 8080), Datagrams), Server6(("::", 8080), Lines)]
for server in servers:
    threading.Thread(target=server.serve_forever, daemon=True).start()
Server(("", 8080), Lines).serve_forever()
