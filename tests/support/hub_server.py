"""A Hugging Face hub of data sets on loopback, for tests that set `HF_ENDPOINT` to it.

Knows repositories by name, each at the revisions that it is given: information, trees, information
on paths, and files whole or by ranges. Nothing else that the hub does.
"""

import gzip
import hashlib
import io
import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pyarrow as pa
import pyarrow.parquet as pq

Rows = Sequence[Mapping[str, Any]]

Repositories = Mapping[str, Mapping[str, Mapping[str, bytes]]]
"""Name → revision → path → content."""


def encoded(path: str, rows: Rows) -> bytes:
    """The file's content, in the format that its ending names."""
    if path.endswith(".parquet"):
        buffer = io.BytesIO()
        pq.write_table(pa.Table.from_pylist(list(rows)), buffer)
        return buffer.getvalue()
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
    return gzip.compress(lines, mtime=0) if path.endswith(".gz") else lines


@contextmanager
def running_hub(repositories: Repositories) -> Iterator[tuple[str, list[str]]]:
    """The hub's address, and the requests that it answered, `GET /path`, in their order."""
    asked: list[str] = []
    handler = type("Hub", (_Hub,), {"repositories": repositories, "asked": asked})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Hub(BaseHTTPRequestHandler):
    repositories: Repositories
    asked: list[str]
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._serve(b"")

    def do_HEAD(self) -> None:
        self._serve(b"")

    def do_POST(self) -> None:
        self._serve(self.rfile.read(int(self.headers.get("Content-Length", 0))))

    def _serve(self, body: bytes) -> None:
        path = urlsplit(self.path).path
        self.asked.append(f"{self.command} {path}")
        start, what, rest = self._parts(path)
        found = self._files(start, rest)
        if found is None:
            missing = "RepoNotFound" if start not in self.repositories else "RevisionNotFound"
            return self._send(404, b"", {"X-Error-Code": missing})
        commit, files, inside = found
        if what == "revision":
            siblings = [{"rfilename": name} for name in files]
            return self._json({"id": start, "sha": commit, "siblings": siblings, "tags": []})
        if what == "tree":
            return self._json(_below(files, inside, "recursive=true" in self.path.lower()))
        if what == "paths-info":
            paths = parse_qs(body.decode())["paths"]
            return self._json([info for name in paths for info in _info(files, name)])
        if inside not in files:
            return self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
        return self._file(commit, files[inside])

    def _parts(self, path: str) -> tuple[str, str, list[str]]:
        """Name of the repository, what is asked of it, and the rest: revision and path inside."""
        names = [unquote(name) for name in path.strip("/").split("/")]
        if names[:2] == ["api", "datasets"]:
            names = names[2:]
        elif names[:1] == ["datasets"]:
            names = names[1:]
        what = names[2] if len(names) > 2 else "revision"
        return "/".join(names[:2]), what, names[3:]

    def _files(self, name: str, rest: list[str]) -> tuple[str, Mapping[str, bytes], str] | None:
        """Commit and files of a revision, and the path inside; a revision may hold slashes."""
        revisions = self.repositories.get(name, {})
        for revision, files in revisions.items():
            commit = _commit(name, revision)
            for known in (revision, commit):
                joined = "/".join(rest or ["main"])
                if joined == known or joined.startswith(f"{known}/"):
                    return commit, files, joined[len(known) :].strip("/")
        return None

    def _file(self, commit: str, content: bytes) -> None:
        headers = {
            "ETag": f'"{_sha1(content)}"',
            "X-Repo-Commit": commit,
            "Accept-Ranges": "bytes",
        }
        wanted = self.headers.get("Range", "")
        if not wanted.startswith("bytes="):
            return self._send(200, content, headers)
        first, _, last = wanted.removeprefix("bytes=").partition("-")
        start, stop = int(first), min(int(last) + 1 if last else len(content), len(content))
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(content)}"
        return self._send(206, content[start:stop], headers)

    def _json(self, value: Any) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _below(files: Mapping[str, bytes], folder: str, recursive: bool) -> list[dict[str, Any]]:
    """Files below a folder; folders among its own names, or all of them."""
    start = f"{folder}/" if folder else ""
    found: dict[str, dict[str, Any]] = {}
    for name in sorted(files):
        if not name.startswith(start):
            continue
        steps = name.removeprefix(start).split("/")
        for depth in range(1, len(steps) if recursive else min(2, len(steps))):
            inner = start + "/".join(steps[:depth])
            found[inner] = {"type": "directory", "path": inner, "oid": _sha1(b""), "size": 0}
        if recursive or len(steps) == 1:
            found[name] = _file_info(name, files[name])
    return list(found.values())


def _info(files: Mapping[str, bytes], name: str) -> list[dict[str, Any]]:
    if name in files:
        return [_file_info(name, files[name])]
    if any(path.startswith(f"{name}/") for path in files):
        return [{"type": "directory", "path": name, "oid": _sha1(b""), "size": 0}]
    return []


def _file_info(name: str, content: bytes) -> dict[str, Any]:
    return {"type": "file", "path": name, "size": len(content), "oid": _sha1(content)}


def _commit(name: str, revision: str) -> str:
    return revision if len(revision) == 40 else _sha1(f"{name}@{revision}".encode())


def _sha1(content: bytes) -> str:
    return hashlib.sha1(content, usedforsecurity=False).hexdigest()
