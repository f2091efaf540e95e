"""Object storage of which requests fail and hang, and can be held while a fault is thrown."""

import logging
import queue
import random
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

import psutil
from moto.server import DomainDispatcherApplication, create_backend_app
from s3_server import BUCKET
from werkzeug.serving import make_server

Environ = dict[str, Any]


@dataclass
class Held:
    """A request that waits until it is let go."""

    prefix: str
    """Of its key."""
    process: psutil.Process
    """That sent it."""
    go_on: threading.Event = field(default_factory=threading.Event)


@dataclass
class UnreliableS3:
    """S3's protocol over HTTP, of which a share of requests is answered with an error, half of them
    after they were carried out, and another share is never answered.
    """

    failing: float
    hanging: float
    hang_seconds: float
    """After which a connection is closed without an answer; clients give up before."""
    environment: dict[str, str] = field(default_factory=dict)
    """Variables under which `s3://bucket/…` is this server."""
    reliable: bool = False
    seen: Counter[str] = field(default_factory=Counter)
    """Number of requests by what became of them."""
    held: "queue.Queue[Held]" = field(default_factory=queue.Queue)

    def __post_init__(self) -> None:
        self._app = DomainDispatcherApplication(create_backend_app)
        self._draw, self._lock = random.Random(0), threading.Lock()
        self._to_pass: dict[str, int] = {}
        self._closing = threading.Event()

    def hold(self, prefixes: Mapping[str, int]) -> None:
        """Let an upload wait for each beginning of a key, after so many of them; it comes to
        `held`.
        """
        with self._lock:
            self._to_pass = {f"/{BUCKET}/{prefix}": count for prefix, count in prefixes.items()}

    def __call__(self, environ: Environ, start_response: Any) -> Iterable[bytes]:
        """Answer a request, as WSGI asks for it."""
        if self.reliable:
            return self._app(environ, start_response)
        self._wait_if_held(environ)
        with self._lock:
            chance, carried_out = self._draw.random(), self._draw.random() < 0.5
        if chance < self.hanging:
            self.seen["hung"] += 1
            self._closing.wait(self.hang_seconds)
            raise ConnectionError("the drill answers nothing")
        if chance < self.hanging + self.failing:
            self.seen["failed"] += 1
            if carried_out:
                list(self._app(environ, lambda *_: None))
            content = b"<Error><Code>SlowDown</Code><Message>the drill</Message></Error>"
            headers = [("Content-Type", "application/xml"), ("Content-Length", str(len(content)))]
            start_response("503 Slow Down", headers)
            return [b"" if environ["REQUEST_METHOD"] == "HEAD" else content]
        self.seen["answered"] += 1
        return self._app(environ, start_response)

    def _wait_if_held(self, environ: Environ) -> None:
        key = unquote(environ["PATH_INFO"])
        with self._lock:
            prefix = next((prefix for prefix in self._to_pass if key.startswith(prefix)), None)
            if prefix is None or environ["REQUEST_METHOD"] != "PUT":
                return
            if self._to_pass[prefix]:
                self._to_pass[prefix] -= 1
                return
            del self._to_pass[prefix]
        held = Held(prefix, _owner_of_port(int(environ["REMOTE_PORT"])))
        self.held.put(held)
        held.go_on.wait()

    def close(self) -> None:
        """Let what hangs end."""
        self._closing.set()


@contextmanager
def unreliable_s3(
    *, failing: float, hanging: float, hang_seconds: float = 60
) -> Iterator[UnreliableS3]:
    """A server with an empty bucket."""
    logging.getLogger("werkzeug").setLevel(logging.WARNING)
    storage = UnreliableS3(failing, hanging, hang_seconds)
    server = make_server("127.0.0.1", 0, storage, threaded=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    storage.environment |= {
        "AWS_ACCESS_KEY_ID": "nobody",
        "AWS_SECRET_ACCESS_KEY": "nothing",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.port}",
    }
    try:
        _make_bucket(storage)
        yield storage
    finally:
        storage.close()
        server.shutdown()


def _make_bucket(storage: UnreliableS3) -> None:
    from urllib.request import Request, urlopen

    storage.reliable = True
    urlopen(Request(f"{storage.environment['AWS_ENDPOINT_URL']}/{BUCKET}", method="PUT")).close()
    storage.reliable = False


def _owner_of_port(port: int) -> psutil.Process:
    for connection in psutil.net_connections("tcp"):
        if connection.laddr.port == port and connection.pid is not None:
            return psutil.Process(connection.pid)
    raise AssertionError(f"no process has port {port}")
