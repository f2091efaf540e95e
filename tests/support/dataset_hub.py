"""A hub on loopback that serves made-up data sets: listings, files, ranges of files.

Set `HF_ENDPOINT` to `address`. Every revision that is known has the same files; `commit` names
them.
"""

import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote

DEFAULT_REVISIONS = ("main", "refs/convert/parquet")


@dataclass
class DatasetHub:
    """What is served, and what was asked for."""

    files: dict[str, dict[str, bytes]]
    """`org/name` → path → content."""
    revisions: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """`org/name` → all revisions it has, where they are not `DEFAULT_REVISIONS`."""
    gated: tuple[str, ...] = ()
    """Repositories that need a token."""
    address: str = ""
    ranges: list[tuple[str, int, int]] = field(default_factory=list)
    """Path, first byte and last byte of the ranges that were read."""
    asked: list[str] = field(default_factory=list)
    """Paths of all requests, in their order."""
    fail: int = 0
    """So many reads of content are answered by an error first."""
    refuse: int = 0
    """So many requests for the information about a repository are answered by `refusal` first."""
    refusal: tuple[int, dict[str, str]] = (429, {"Retry_After": "1"})
    """Status and headers."""
    limit: int = 0
    """So many requests of any kind are answered that there were too many of them."""
    before_limit: int = 0
    """So many are answered as usual before these."""
    retry_after: int | None = 1
    """Seconds that such an answer names; None: it names none."""
    down: bool = False
    """Every request is answered by an error of the server."""

    def commit(self, repo: str) -> str:
        """Of the repository's present content."""
        told = sorted((path, _sha1(content)) for path, content in self.files[repo].items())
        return _sha1(repr(told).encode())


@lru_cache(maxsize=1000)  # of a file with gigabytes it takes seconds, and each request wants it
def _sha1(content: bytes) -> str:
    return hashlib.sha1(content, usedforsecurity=False).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    hub: DatasetHub
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # headers and body are sent apart; 40 ms a request otherwise

    def log_message(self, *arguments: Any) -> None:
        pass

    def _answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _json(self, value: Any) -> None:
        self._answer(200, json.dumps(value).encode(), Content_Type="application/json")

    def _repo(self, parts: list[str]) -> str | None:
        """The repository that may be seen; None when the refusal was sent."""
        repo = "/".join(parts[:2])
        if repo not in self.hub.files:
            self._answer(404, X_Error_Code="RepoNotFound")
        elif repo in self.hub.gated and "Authorization" not in self.headers:
            self._answer(403, X_Error_Code="GatedRepo", X_Error_Message="Ask for access")
        else:
            return repo
        return None

    def _known(self, repo: str, revision: str) -> bool:
        known = self.hub.revisions.get(repo, DEFAULT_REVISIONS)
        if revision in (*known, self.hub.commit(repo)):
            return True
        self._answer(404, X_Error_Code="RevisionNotFound")
        return False

    def _entry(self, path: str, content: bytes) -> dict[str, Any]:
        return {"type": "file", "path": path, "size": len(content), "oid": _sha1(content)}

    def _refused(self) -> bool:
        """Whether the request was answered that the hub is down, or was asked too often."""
        hub = self.hub
        if hub.down:
            self._answer(503)
        elif hub.limit and not hub.before_limit:
            hub.limit -= 1
            told = {} if hub.retry_after is None else {"Retry_After": str(hub.retry_after)}
            self._answer(429, **told)
        else:
            hub.before_limit = max(hub.before_limit - 1, 0)
            return False
        return True

    def do_GET(self) -> None:
        path = unquote(self.path.partition("?")[0])
        self.hub.asked.append(path)
        if self._refused():
            return
        if path.startswith("/api/datasets/"):
            self._api(path.removeprefix("/api/datasets/").split("/"))
        elif path.startswith("/datasets/"):
            self._content(path.removeprefix("/datasets/").split("/"))
        else:
            self._answer(404)

    do_HEAD = do_GET

    def _api(self, parts: list[str]) -> None:
        repo = self._repo(parts)
        if repo is None:
            return
        if self.hub.refuse:
            self.hub.refuse -= 1
            status, headers = self.hub.refusal
            self._answer(status, **headers)
            return
        what, rest = parts[2] if len(parts) > 2 else "revision", "/".join(parts[3:]) or "main"
        if what == "revision":
            if self._known(repo, rest):
                self._json({"id": repo, "sha": self.hub.commit(repo), "siblings": [], "tags": []})
            return
        revision, _, inside = rest.partition("/")
        if not self._known(repo, revision):
            return
        below = f"{inside}/" if inside else ""
        files = {p: c for p, c in self.hub.files[repo].items() if p.startswith(below)}
        if not files:
            self._answer(404, X_Error_Code="EntryNotFound")
            return
        folders = {
            path[: len(below) + place]
            for path in files
            for place, sign in enumerate(path[len(below) :])
            if sign == "/"
        }
        entries = [self._entry(*item) for item in files.items()]
        entries += [{"type": "directory", "path": f, "oid": _sha1(b"")} for f in sorted(folders)]
        if "recursive=True" not in self.path and "recursive=true" not in self.path:
            entries = [e for e in entries if "/" not in e["path"].removeprefix(below)]
        self._json(entries)

    def do_POST(self) -> None:
        asked = self.rfile.read(int(self.headers["Content-Length"]))
        parts = unquote(self.path.partition("?")[0]).removeprefix("/api/datasets/").split("/")
        repo = self._repo(parts)
        if repo is None:
            return
        wanted = parse_qs(asked.decode())["paths"]
        files = self.hub.files[repo]
        self._json([self._entry(path, files[path]) for path in wanted if path in files])

    def _content(self, parts: list[str]) -> None:
        repo = self._repo(parts)
        if repo is None:
            return
        path = "/".join(parts[4:])
        content = self.hub.files[repo].get(path)
        if not self._known(repo, parts[3]):
            return
        if content is None:
            self._answer(404, X_Error_Code="EntryNotFound")
            return
        if self.hub.fail and self.command == "GET":
            self.hub.fail -= 1
            self._answer(503)
            return
        commit = parts[3] if re.fullmatch("[0-9a-f]{40}", parts[3]) else self.hub.commit(repo)
        headers = {"ETag": f'"{_sha1(content)}"', "X_Repo_Commit": commit}
        asked = self.headers.get("Range")
        if asked is None:
            self._answer(200, content, **headers)
            return
        first, _, last = asked.removeprefix("bytes=").partition("-")
        start, stop = int(first), min(int(last) + 1, len(content))
        self.hub.ranges.append((path, start, stop - 1))
        told = f"bytes {start}-{stop - 1}/{len(content)}"
        self._answer(206, content[start:stop], Content_Range=told, **headers)


@contextmanager
def dataset_hub(files: Mapping[str, Mapping[str, bytes]], **more: Any) -> Iterator[DatasetHub]:
    """A running hub with these repositories."""
    hub = DatasetHub({repo: dict(found) for repo, found in files.items()}, **more)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Hub", (_Handler,), {"hub": hub}))
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    hub.address = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
