"""WebSockets (RFC 6455), as far as the demo needs them: text in single frames, over a socket's file."""

import base64
import hashlib
import os
import struct

GUID = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
TEXT, CLOSE = 1, 8
LONGEST = 1 << 16


def accept(key):
    """What a server answers to a client's Sec-WebSocket-Key."""
    return base64.b64encode(hashlib.sha1((key + GUID).encode()).digest()).decode()


def send(file, text, masked):
    """One frame of text. A client masks what it sends, a server does not."""
    data = text.encode()
    head = bytes([0x80 | TEXT])
    length = len(data)
    mark = 0x80 if masked else 0
    head += bytes([mark | length]) if length < 126 else bytes([mark | 126]) + struct.pack(">H", length)
    if masked:
        mask = os.urandom(4)
        head += mask
        data = bytes(byte ^ mask[n % 4] for n, byte in enumerate(data))
    file.write(head + data)
    file.flush()


def receive(file):
    """The text of the next frame; None when the other end closes."""
    head = file.read(2)
    if len(head) < 2 or head[0] & 0x0F == CLOSE:
        return None
    if head[0] != 0x80 | TEXT:
        raise ValueError("neither a whole text nor a close")
    length = head[1] & 0x7F
    if length == 126:
        (length,) = struct.unpack(">H", file.read(2))
    elif length == 127:
        raise ValueError(f"a frame of more than {LONGEST} bytes")
    mask = file.read(4) if head[1] & 0x80 else bytes(4)
    data = file.read(length)
    return bytes(byte ^ mask[n % 4] for n, byte in enumerate(data)).decode()


def connect(file, host, path):
    """Asks the server for a WebSocket."""
    key = base64.b64encode(os.urandom(16)).decode()
    lines = [f"GET {path} HTTP/1.1", f"Host: {host}", "Upgrade: websocket", "Connection: Upgrade"]
    lines += [f"Sec-WebSocket-Key: {key}", "Sec-WebSocket-Version: 13", "", ""]
    file.write("\r\n".join(lines).encode())
    file.flush()
    status = file.readline().decode().strip()
    headers = {}
    while line := file.readline().decode().strip():
        name, _, value = line.partition(":")
        headers[name.lower()] = value.strip()
    if " 101 " not in f"{status} " or headers.get("sec-websocket-accept") != accept(key):
        raise ConnectionError(f"no WebSocket: {status}")
