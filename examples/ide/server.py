"""A browser editor in the shape of VS Code's server: an open buffer that lives in memory until it is saved.

GET / shows the editor, PUT /buffer replaces the buffer, GET /buffer answers it.
"""

import http.server

PAGE = b"""<!doctype html><title>Editor</title>
<textarea id=text rows=30 cols=100></textarea>
<script>
const text = document.getElementById("text");
fetch("buffer").then(answer => answer.text()).then(buffer => text.value = buffer);
text.oninput = () => fetch("buffer", {method: "PUT", body: text.value});
</script>
"""

buffer = b""


class Handler(http.server.BaseHTTPRequestHandler):
    def answer(self, body, kind):
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        if self.path == "/buffer":
            self.answer(buffer, "text/plain; charset=utf-8")
        else:
            self.answer(PAGE, "text/html; charset=utf-8")

    def do_PUT(self):
        global buffer
        buffer = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.answer(b"", "text/plain")


http.server.ThreadingHTTPServer(("", 8888), Handler).serve_forever()
