"""The demo's program: holds memory, counts, keeps a child and open files, tells about them over HTTP, and echoes over WebSockets."""

import hashlib
import http.server
import json
import os
import random
import socket
import subprocess
import threading
import time

import websocket

MEGABYTES = 100
FILES = {"pvc": "/data/kept.txt", "root": "/var/kept.txt", "empty_dir": "/scratch/kept.txt"}

counter = 0


def count():
    global counter
    while True:
        counter += 1
        time.sleep(0.05)


# A hundred blocks of bytes that do not compress and of which no two are the same.
source = random.Random(4)
memory = {f"block-{n}": source.randbytes(1 << 20) for n in range(MEGABYTES)}
born = time.time()
secret = os.urandom(8).hex()

for path in FILES.values():
    with open(path, "a") as file:
        file.write(f"{secret}\n")
open_file = open(FILES["empty_dir"])
child = subprocess.Popen(["sleep", "1000000"])
threading.Thread(target=count, daemon=True).start()


def read(path):
    try:
        with open(path) as file:
            return file.read().split()
    except OSError as error:
        return [str(error)]


def state():
    digest = hashlib.sha256()
    for name in sorted(memory):
        digest.update(memory[name])
    open_file.seek(0)
    return {
        "secret": secret,
        "born": born,
        "counter": counter,
        "memory_mib": sum(len(block) for block in memory.values()) >> 20,
        "memory_sha256": digest.hexdigest(),
        "pid": os.getpid(),
        "child": child.pid,
        "child_runs": child.poll() is None,
        "hostname": socket.gethostname(),
        "files": {name: secret in read(path) for name, path in FILES.items()},
        "open_file": secret in open_file.read().split(),
    }


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        if self.path == "/echo" and self.headers.get("Sec-WebSocket-Key"):
            return self.echo()
        body = json.dumps(state()).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def echo(self):
        self.send_response(101)
        self.send_header("Upgrade", "websocket")
        self.send_header("Connection", "Upgrade")
        self.send_header("Sec-WebSocket-Accept", websocket.accept(self.headers["Sec-WebSocket-Key"]))
        self.end_headers()
        number = 0
        while (text := websocket.receive(self.rfile)) is not None:
            number += 1
            websocket.send(self.wfile, f"{number} {text}", masked=False)
        self.close_connection = True

    def log_message(self, *arguments):
        pass


print("ready", flush=True)
http.server.ThreadingHTTPServer(("", 8080), Handler).serve_forever()
