"""A WebSocket server (RFC 6455). It answers each text of up to 100 bytes with its number and the text."""

import base64
import hashlib
import socketserver

GUID = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
WHOLE_TEXT, CLOSE = 0x81, 0x88


class Handler(socketserver.StreamRequestHandler):
    def handshake(self):
        key = ""
        while line := self.rfile.readline().decode().strip():
            name, _, value = line.partition(":")
            if name.lower() == "sec-websocket-key":
                key = value.strip()
        accept = base64.b64encode(hashlib.sha1((key + GUID).encode()).digest()).decode()
        self.wfile.write(
            "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            f"Sec-WebSocket-Accept: {accept}\r\n\r\n".encode()
        )

    def receive(self):
        """Returns the next text, or None when the client closes."""
        kind, length = self.rfile.read(2) or (CLOSE, 0)
        if kind != WHOLE_TEXT or length & 0x7F > 100:
            return None
        mask = self.rfile.read(4)
        data = self.rfile.read(length & 0x7F)
        return bytes(byte ^ mask[n % 4] for n, byte in enumerate(data))

    def handle(self):
        self.handshake()
        count = 0
        while (text := self.receive()) is not None:
            count += 1
            answer = b"%d " % count + text
            self.wfile.write(bytes([WHOLE_TEXT, len(answer)]) + answer)


class Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True


Server(("", 8080), Handler).serve_forever()
