"""Counts the lines of all its connections and answers each line with its life and the count.

The life is the digest of memory that is drawn at the start. It is computed for each answer, so that
changed memory is another life.
"""

import hashlib
import os
import socketserver
import threading

memory = os.urandom(1 << 20)
counted = 0
one_at_a_time = threading.Lock()


class Lines(socketserver.StreamRequestHandler):
    def handle(self):
        global counted
        for _ in self.rfile:
            with one_at_a_time:
                counted += 1
                answer = f"{hashlib.sha256(memory).hexdigest()[:16]} {counted}\n"
            self.wfile.write(answer.encode())


class Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 256

    def handle_error(self, request, client_address):
        """Ignores errors of clients that have gone."""


Server(("", 8080), Lines).serve_forever()
