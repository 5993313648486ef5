"""The demo's client: opens a WebSocket, sends each line of its input over it, and prints what comes back and after how many milliseconds."""

import socket
import sys
import time

import websocket

host, port = sys.argv[1], int(sys.argv[2])
connection = socket.create_connection((host, port), timeout=60)
file = connection.makefile("rwb")
websocket.connect(file, f"{host}:{port}", "/echo")
print("connected", flush=True)
for line in sys.stdin:
    began = time.monotonic()
    websocket.send(file, line.strip(), masked=True)
    answer = websocket.receive(file)
    if answer is None:
        sys.exit("the sandbox has closed the WebSocket")
    print(f"{(time.monotonic() - began) * 1000:.0f} {answer}", flush=True)
