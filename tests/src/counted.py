"""Sends counted bytes on each of its connections and checks those that it gets, both at once.

The program accepts connections on port 8090 and makes DIAL connections to HOST:PORT. On each it
sends BLOCKS blocks of BYTES bytes, one every PACE seconds. A connection to port 8091 gets a line of
JSON at once: the results of the other connections.
"""

import json
import os
import socketserver
import socket
import threading
import time

BLOCKS = int(os.environ["BLOCKS"])
BYTES = int(os.environ["BYTES"])
PACE = float(os.environ["PACE"])

fates = {}
names = iter(range(1 << 30))


def block(number):
    """Returns the block of this number: the number, repeated."""
    return number.to_bytes(8, "big") * (BYTES // 8)


def send(connection, fate):
    try:
        for number in range(BLOCKS):
            connection.sendall(block(number))
            time.sleep(PACE)
        connection.shutdown(socket.SHUT_WR)
        fate["sent"] = "whole"
    except OSError as error:
        fate["sent"] = type(error).__name__


def receive(connection, fate):
    received = bytearray()
    number = 0
    try:
        while data := connection.recv(1 << 16):
            received += data
            while len(received) >= BYTES:
                if received[:BYTES] != block(number):
                    fate["received"] = f"block {number} is wrong"
                    return
                del received[:BYTES]
                number += 1
        fate["received"] = "whole" if (number, len(received)) == (BLOCKS, 0) else f"{number} blocks"
    except OSError as error:
        fate["received"] = type(error).__name__


def exchange(connection):
    fate = {"sent": None, "received": None}
    fates[f"{next(names)}"] = fate
    sender = threading.Thread(target=send, args=(connection, fate))
    sender.start()
    receive(connection, fate)
    sender.join()


class Exchange(socketserver.BaseRequestHandler):
    def handle(self):
        exchange(self.request)


class Report(socketserver.BaseRequestHandler):
    def handle(self):
        self.request.sendall(json.dumps(list(fates.values())).encode() + b"\n")


class Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 1024


def dial():
    exchange(socket.create_connection((os.environ["HOST"], int(os.environ["PORT"]))))


# A peer that was dialled may dial back at once.
server = Server(("", 8090), Exchange)
threading.Thread(target=Server(("", 8091), Report).serve_forever, daemon=True).start()
for _ in range(int(os.environ["DIAL"])):
    threading.Thread(target=dial, daemon=True).start()
server.serve_forever()
