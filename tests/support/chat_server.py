"""A stub of an OpenAI-compatible server on the loopback, with the faults of real ones."""

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from written_texts import write


@dataclass
class Reply:
    """What the server sends."""

    status: int = 200
    body: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    """Waited before."""


def completion(text: str | None, finish_reason: str = "stop") -> Reply:
    """A chat completion with this text."""
    choice = {"index": 0, "message": {"content": text}, "finish_reason": finish_reason}
    usage = {"prompt_tokens": 11, "completion_tokens": 7}
    return Reply(body=json.dumps({"id": "x", "choices": [choice], "usage": usage}))


@dataclass
class ChatServer:
    """What the server saw."""

    url: str = ""
    reply: Callable[[dict[str, Any], int], Reply | None] = lambda body, time: None
    """Of a request's body and how often it came before; None: an answer of the fake LLM."""
    broken_share: float = 0.0
    asked: Counter[tuple[str, int]] = field(default_factory=Counter)
    """Prompt and seed → how often."""
    answered: Counter[tuple[str, int]] = field(default_factory=Counter)
    """Prompt and seed → how often with status 200."""
    headers: list[dict[str, str]] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    in_flight: int = 0
    most_in_flight: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


@contextmanager
def chat_server(**settings: Any) -> Iterator[ChatServer]:
    """A server that runs within the block."""
    seen = ChatServer(**settings)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            key = body["messages"][0]["content"], body.get("seed", -1)
            with seen.lock:
                before = seen.asked[key]
                seen.asked[key] += 1
                seen.headers.append(dict(self.headers))
                seen.bodies.append(body)
                seen.in_flight += 1
                seen.most_in_flight = max(seen.most_in_flight, seen.in_flight)
            reply = Reply(404, "no such path")
            if self.path == "/v1/chat/completions":
                reply = seen.reply(body, before) or completion(
                    write(*key, broken_share=seen.broken_share)
                )
            time.sleep(reply.seconds)
            with seen.lock:
                seen.in_flight -= 1
                seen.answered[key] += reply.status == 200
            content = reply.body.encode()
            try:
                self.send_response(reply.status)
                for name, value in reply.headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)
            except ConnectionError:
                pass  # the client waited long enough

        def log_message(self, *args: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 64

    server = Server(("127.0.0.1", 0), Handler)
    seen.url = f"http://127.0.0.1:{server.server_port}/v1"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield seen
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
