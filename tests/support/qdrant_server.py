"""A stub of a Qdrant server on the loopback: it answers by the client's local mode and records the
requests. For what a folder does not have: keys, options of collections, errors of a server.
"""

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Request:
    """What the client asked."""

    method: str
    path: str
    key: str | None
    body: Any


@dataclass
class QdrantStub:
    """What the server saw, and what it shall answer."""

    url: str = ""
    key: str | None = None
    """API key that it asks for."""
    version: str = "1.16.0"
    failure: tuple[int, str] | None = None
    """Status and message of every answer."""
    statuses: list[str] = field(default_factory=list)
    """Of collections, one for each time that they are read; then green."""
    requests: list[Request] = field(default_factory=list)

    def written(self) -> list[Request]:
        """Requests that change something."""
        read = ("/points/scroll", "/points/count", "/points/query/batch")
        return [r for r in self.requests if r.method != "GET" and not r.path.endswith(read)]


@contextmanager
def qdrant_server(**settings: Any) -> Iterator[QdrantStub]:
    """A server that runs within the block."""
    from qdrant_client import QdrantClient, models

    seen = QdrantStub(**settings)
    client = QdrantClient(":memory:", force_disable_check_same_thread=True)
    lock = threading.Lock()

    def create(table: str, body: Any) -> Any:
        values = models.CreateCollection(**body)
        return client.create_collection(table, values.vectors, metadata=values.metadata)

    def read(table: str, _: Any) -> Any:
        values = client.get_collection(table).model_dump(mode="json")
        return values | {"status": seen.statuses.pop(0) if seen.statuses else "green"}

    def scroll(table: str, body: Any) -> Any:
        body["with_vectors"] = body.pop("with_vector")
        points, offset = client.scroll(table, **{k: v for k, v in body.items() if v is not None})
        return {"points": [point.model_dump() for point in points], "next_page_offset": offset}

    def search(table: str, body: Any) -> Any:
        queries = [models.QueryRequest(**query) for query in body["searches"]]
        return [one.model_dump() for one in client.query_batch_points(table, queries)]

    def switch(_: str, body: Any) -> Any:
        operations = models.ChangeAliasesOperation(**body).actions
        return client.update_collection_aliases(operations)

    calls: dict[tuple[str, str], Any] = {
        ("GET", "/"): lambda *_: {"title": "stub", "version": seen.version},
        ("GET", "/aliases"): lambda *_: client.get_aliases(),
        ("GET", "/collections"): lambda *_: client.get_collections(),
        ("POST", "/collections/aliases"): switch,
        ("PUT", "T"): create,
        ("GET", "T"): read,
        ("PATCH", "T"): lambda *_: True,
        ("DELETE", "T"): lambda table, _: client.delete_collection(table),
        ("PUT", "T/index"): lambda *_: {"operation_id": 1, "status": "completed"},
        ("PUT", "T/points"): lambda table, body: client.upsert(
            table, models.Batch(**body["batch"])
        ),
        ("POST", "T/points/delete"): lambda table, body: client.delete(
            table, models.PointIdsList(points=body["points"])
        ),
        ("POST", "T/points/count"): lambda table, _: client.count(table),
        ("POST", "T/points/scroll"): scroll,
        ("POST", "T/points/query/batch"): search,
    }

    def answer(request: Request) -> Any:
        path = request.path.split("?")[0]
        if (request.method, path) in calls:
            return calls[request.method, path]("", request.body)
        match = re.fullmatch(r"/collections/([^/]+)(/.*)?", path)
        assert match is not None, path
        return calls[request.method, f"T{match[2] or ''}"](match[1], request.body)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            pass

        def do_any(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length)) if length else None
            request = Request(self.command, self.path, self.headers.get("api-key"), body)
            seen.requests.append(request)
            if seen.failure is not None:
                self.reply(seen.failure[0], {"status": {"error": seen.failure[1]}, "time": 0})
            elif seen.key is not None and request.key != seen.key:
                self.reply(401, {"status": {"error": f"Invalid API key {request.key}"}, "time": 0})
            else:
                try:
                    with lock:
                        result = answer(request)
                except (ValueError, KeyError) as error:
                    self.reply(400, {"status": {"error": str(error)}, "time": 0})
                    return
                if hasattr(result, "model_dump"):
                    result = result.model_dump(mode="json")
                whole = request.path.split("?")[0] == "/"
                self.reply(200, result if whole else {"result": result, "status": "ok", "time": 0})

        do_GET = do_PUT = do_POST = do_PATCH = do_DELETE = do_any

        def reply(self, status: int, value: Any) -> None:
            data = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    seen.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=[0.02], daemon=True)
    thread.start()
    try:
        yield seen
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
