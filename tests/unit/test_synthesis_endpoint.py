"""Requests to endpoints: at once, bounded, resent, and never with an exception."""

import asyncio
import json
import socket
from typing import Any

import pytest
from chat_server import Reply, chat_server, completion
from waits import Replaced

from rayembed_extras.synthesis.chat_endpoint import ask_endpoint
from rayembed_extras.synthesis.endpoint_settings import OpenAICompatible
from rayembed_extras.synthesis.requests import ChatAnswer, PromptRequest

QUICK = {"first_wait_seconds": 0.01, "max_resends": 2, "timeout_seconds": 10}


def ask(endpoint: OpenAICompatible, number: int = 1, key: str | None = None) -> list[ChatAnswer]:
    """Answers to so many requests, in the order of the requests."""
    sent = ask_endpoint(endpoint, key, temperature=1, top_p=1, max_tokens=50)
    requests = [PromptRequest("group", f"ask {i}", i) for i in range(number)]
    answers = {answer.key: answer for answer in sent(requests)}
    return [answers[request.key] for request in requests]


def settings(url: str, **changes: Any) -> OpenAICompatible:
    return OpenAICompatible(url=url, model="writer", **(QUICK | changes))


def test_what_is_sent_and_what_comes_back() -> None:
    with chat_server(reply=lambda body, before: completion("the text")) as server:
        (found,) = ask(settings(server.url), key="secret")
    assert (found.outcome, found.text, found.problem, found.cut_off) == (
        *("answered", "the text"),
        *("", False),
    )
    assert (found.prompt_tokens, found.answer_tokens) == (11, 7)
    assert (found.group, found.id) == ("group", found.key)
    (body,), (headers,) = server.bodies, server.headers
    assert body == {
        "model": "writer",
        "messages": [{"role": "user", "content": "ask 0"}],
        "temperature": 1,
        "top_p": 1,
        "max_tokens": 50,
        "seed": 0,
    }
    assert headers["Authorization"] == "Bearer secret"
    assert headers["Content-Type"] == "application/json"


def test_what_some_endpoints_want_otherwise() -> None:
    with chat_server() as server:
        changed = settings(server.url + "/", send_seed=False, limit_name="max_completion_tokens")
        ask(changed)
    (body,), (headers,) = server.bodies, server.headers
    assert "seed" not in body
    assert "max_tokens" not in body
    assert body["max_completion_tokens"] == 50
    assert "Authorization" not in headers
    azure = settings("https://host/deployment?api-version=1")
    assert azure.completions_url == "https://host/deployment/chat/completions?api-version=1"


def test_requests_of_a_batch_run_at_the_same_time_up_to_the_bound() -> None:
    slow = Reply(200, completion("a").body, seconds=0.1)
    with chat_server(reply=lambda body, before: slow) as server:
        assert len(ask(settings(server.url, concurrency=4), 12)) == 12
    assert server.most_in_flight == 4


@pytest.mark.parametrize("status", [408, 409, 425, 429, 500, 502, 503, 504, 529])
def test_what_may_pass_is_sent_again(status: int) -> None:
    def twice(body, before):
        return Reply(status, "<html>wait</html>") if before < 2 else completion("at last")

    with chat_server(reply=twice) as server:
        (found,) = ask(settings(server.url))
    assert (found.outcome, found.text) == ("answered", "at last")
    assert server.asked.total() == 3


def test_resends_are_bounded_and_the_reason_is_told() -> None:
    with chat_server(reply=lambda body, before: Reply(500, "out of memory")) as server:
        (found,) = ask(settings(server.url))
    assert (found.outcome, found.problem) == ("lost", "HTTP 500: out of memory")
    assert server.asked.total() == 3


@pytest.mark.parametrize(
    ("status", "outcome"),
    [(400, "refused"), (413, "refused"), (422, "refused"), (401, "stopped"), (402, "stopped"),
     (403, "stopped"), (404, "stopped"), (405, "stopped"), (204, "stopped")],
)  # fmt: skip
def test_refusals_are_not_sent_again(status: int, outcome: str) -> None:
    reply = Reply(status, "" if status == 204 else "no")
    with chat_server(reply=lambda body, before: reply) as server:
        (found,) = ask(settings(server.url))
    assert found.outcome == outcome
    assert found.problem.startswith(f"HTTP {status}")
    assert server.asked.total() == 1


def test_the_endpoint_may_say_how_long_to_wait(monkeypatch) -> None:
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    monkeypatch.setattr(f"{ask_endpoint.__module__}.asyncio", Replaced(asyncio, sleep=sleep))
    said = iter(["7", "3600", "Wed, 21 Oct 2026 07:28:00 GMT", "nan", "-1"])

    def busy(body, before):
        return Reply(429, "busy", {"Retry-After": next(said)}) if before < 5 else completion("a")

    with chat_server(reply=busy) as server:
        ask(settings(server.url, max_resends=5, first_wait_seconds=0.5))
    assert waits == [7, 60, 2, 4, 8]


def test_a_timeout_and_a_closed_port_are_losses() -> None:
    with chat_server(reply=lambda body, before: Reply(200, "{}", seconds=2)) as server:
        endpoint = settings(server.url, timeout_seconds=0.2, max_resends=1)
        (found,) = ask(endpoint)
    assert (found.outcome, found.problem) == ("lost", "timeout: no answer within 0.2 s")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        closed = settings(f"http://127.0.0.1:{free.getsockname()[1]}/v1", max_resends=0)
        (found,) = ask(closed)
    assert found.outcome == "lost"
    assert "ClientConnectorError" in found.problem


@pytest.mark.parametrize(
    "body",
    [
        "",
        "<html>a proxy's page</html>",
        "[]",
        "null",
        "{}",
        '{"choices": []}',
        '{"choices": [{}]}',
        '{"choices": [{"message": "text"}]}',
        '{"choices": [{"message": {"content": 7}}]}',
        '{"error": "none"}',
        "[" * 100_000,
    ],
)
def test_a_body_that_is_no_completion_is_a_loss(body: str) -> None:
    with chat_server(reply=lambda sent, before: Reply(200, body)) as server:
        (found,) = ask(settings(server.url, max_resends=0))
    assert found.outcome == "lost"
    assert found.problem.startswith("no completion: ")
    assert len(found.problem) <= 300


@pytest.mark.parametrize("content", ['"a b"', '["a ", {"type": "text", "text": "b"}, {"x": 1}]'])
@pytest.mark.parametrize(
    "usage", ["null", "7", '"many"', '{"prompt_tokens": "many"}', '{"prompt_tokens": Infinity}',
              '{"prompt_tokens": null}', '{"prompt_tokens": [1]}', "[]"],
)  # fmt: skip
def test_an_answer_that_was_paid_for_is_read_and_not_bought_again(content, usage) -> None:
    body = f'{{"choices": [{{"message": {{"content": {content}}}}}], "usage": {usage}}}'
    with chat_server(reply=lambda sent, before: Reply(200, body)) as server:
        (found,) = ask(settings(server.url))
    assert (found.outcome, found.text, found.prompt_tokens) == ("answered", "a b", 0)
    assert server.asked.total() == 1


def test_odd_completions_fit_a_file() -> None:
    odd = {"choices": [{"message": {"content": "\ud800a"}, "finish_reason": "length"}]}
    large = odd | {"usage": {"prompt_tokens": 10**40, "completion_tokens": -5}}
    bodies = [json.dumps(large), completion(None).body]
    with chat_server(reply=lambda sent, before: Reply(200, bodies[sent["seed"]])) as server:
        first, second = ask(settings(server.url), 2)
    assert (first.text, first.cut_off) == ("?a", True)
    assert (first.prompt_tokens, first.answer_tokens) == (1 << 32, 0)
    assert (second.outcome, second.text) == ("answered", "")
