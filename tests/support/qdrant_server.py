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

    def answer(request: Request) -> Any:
        path = request.path.split("?")[0]
        if path == "/":
            return {"title": "stub", "version": seen.version}
        if path == "/aliases":
            return client.get_aliases()
        if path == "/collections" and request.method == "GET":
            return client.get_collections()
        if path == "/collections/aliases":
            operations = models.ChangeAliasesOperation(**request.body).actions
            return client.update_collection_aliases(operations)
        match = re.fullmatch(r"/collections/([^/]+)(/.*)?", path)
        assert match is not None, path
        table, action = match[1], match[2] or ""
        body = request.body or {}
        match request.method, action:
            case "PUT", "":
                values = models.CreateCollection(**body)
                return client.create_collection(table, values.vectors, metadata=values.metadata)
            case "GET", "":
                info = client.get_collection(table).model_dump(mode="json")
                return info | {"status": seen.statuses.pop(0) if seen.statuses else "green"}
            case "PATCH", "":
                return True
            case "DELETE", "":
                return client.delete_collection(table)
            case "PUT", "/points":
                return client.upsert(table, models.Batch(**body["batch"]))
            case "POST", "/points/delete":
                return client.delete(table, models.PointIdsList(points=body["points"]))
            case "POST", "/points/count":
                return client.count(table)
            case "POST", "/points/scroll":
                values = models.ScrollRequest(**body)
                points, offset = client.scroll(
                    table,
                    limit=values.limit,
                    offset=values.offset,
                    with_payload=values.with_payload,
                    with_vectors=values.with_vector,
                )
                return {
                    "points": [point.model_dump(mode="json") for point in points],
                    "next_page_offset": offset,
                }
            case "POST", "/points/query/batch":
                queries = [models.QueryRequest(**search) for search in body["searches"]]
                answers = client.query_batch_points(table, queries)
                return [item.model_dump(mode="json") for item in answers]
            case "PUT", "/index":
                return {"operation_id": 1, "status": "completed"}
        raise AssertionError(f"{request.method} {path}")

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
                except ValueError as error:
                    self.reply(400, {"status": {"error": str(error)}, "time": 0})
                    return
                if hasattr(result, "model_dump"):
                    result = result.model_dump(mode="json")
                whole = request.path.split("?")[0] == "/"
                self.reply(200, result if whole else {"result": result, "status": "ok", "time": 0})

        do_GET = do_PUT = do_POST = do_PATCH = do_DELETE = do_any  # noqa: N815

        def reply(self, status: int, value: Any) -> None:
            data = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    seen.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield seen
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
