"""A hub on loopback that takes an upload: a new repository and a commit of small files."""

import base64
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

TOKEN = "hf_" + "secretsecretsecretsecretsecretsec"


class _Hub(BaseHTTPRequestHandler):
    def log_message(self, *arguments):
        pass

    def _answer(self, status, value):
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        self.server.asked.append(self.path)
        self._answer(200, {"id": "org/name", "sha": "a" * 40, "siblings": [], "tags": []})

    def do_POST(self):
        self.server.asked.append(self.path)
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        assert self.headers["Authorization"] == f"Bearer {TOKEN}"
        if self.server.refuses:
            self._answer(403, {"error": "You don't have the rights"})
        elif self.path == "/api/repos/create":
            self.server.made = json.loads(body)
            made = self.server.made
            url = f"http://127.0.0.1/{made['organization']}/{made['name']}"
            self._answer(200, {"url": url})
        elif self.path == "/api/validate-yaml":
            self._answer(200, {"errors": [], "warnings": []})
        elif "/preupload/" in self.path:
            asked = json.loads(body)["files"]
            more = {"uploadMode": "regular", "shouldIgnore": False}
            files = [{"path": f["path"], **more} for f in asked]
            self._answer(200, {"files": files})
        else:
            for line in body.decode().splitlines():
                one = json.loads(line)
                if one["key"] == "file":
                    content = base64.b64decode(one["value"]["content"])
                    self.server.files[one["value"]["path"]] = content
            self._answer(
                200, {"commitUrl": "http://127.0.0.1/org/name/commit/b", "commitOid": "b" * 40}
            )


@contextmanager
def upload_hub(monkeypatch, *, refuses=False):
    """Server with the `files` it got and what was `made`, named by `HF_ENDPOINT`."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Hub)
    server.refuses, server.files, server.asked, server.made = refuses, {}, [], None
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
