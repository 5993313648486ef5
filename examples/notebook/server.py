"""A notebook server in the shape of Jupyter: cells run in one interpreter, whose variables stay.

POST /run executes the request's body and answers what it printed; GET / lists the cells so far.
"""

import contextlib
import http.server
import io
import traceback

cells = []
variables = {}


def run(source):
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        try:
            exec(compile(source, f"cell {len(cells) + 1}", "exec"), variables)
        except Exception:
            traceback.print_exc(file=output)
    cells.append(source)
    return output.getvalue()


class Handler(http.server.BaseHTTPRequestHandler):
    def answer(self, text):
        body = text.encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        self.answer("".join(f"[{number}] {cell}\n" for number, cell in enumerate(cells, 1)))

    def do_POST(self):
        length = int(self.headers.get("Content-Length", 0))
        self.answer(run(self.rfile.read(length).decode()))


http.server.ThreadingHTTPServer(("", 8888), Handler).serve_forever()
