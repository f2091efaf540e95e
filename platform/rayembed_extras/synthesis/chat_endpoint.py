"""Send requests to an OpenAI-compatible endpoint from this process; failures are returned as
answers.

Each request that an endpoint may take the next time is sent again, and ends with an `Answer` that
says what came of it.
"""

import asyncio
import json
import math
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from queue import SimpleQueue
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from rayembed.errors import ConfigError
from rayembed_extras.synthesis.endpoint_settings import OpenAICompatible
from rayembed_extras.synthesis.requests import Ask, ChatAnswer, Outcome, Request

_SENT_AGAIN = frozenset({408, 409, 425, 429})
_REFUSES_ALL = frozenset({401, 402, 403, 404, 405})
"""Fatal status codes (wrong key, no credit, wrong address or model); further requests would fail
too."""

_LONGEST_WAIT_SECONDS = 60.0
_CHARACTERS_OF_PROBLEM = 300
_CONNECT_SECONDS = 5.0
_MOST_TOKENS = 1 << 32
"""Plausibility limit on the token count of an answer that an endpoint reports."""


def ask_endpoint(
    endpoint: OpenAICompatible,
    key: str | None,
    *,
    temperature: float,
    top_p: float,
    max_tokens: int,
) -> Ask:
    """Create a function that sends requests to an endpoint, at most `endpoint.concurrency` at the
    same time.

    It runs in a thread with an event loop of its own, so that notebooks, which have one, can ask
    too. Where no more answers are taken, what is in flight is cancelled.
    """
    timeout = aiohttp.ClientTimeout(total=endpoint.timeout_seconds)
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}

    def body(request: Request) -> dict[str, Any]:
        """Build a chat completion request with one user message."""
        made = {
            "model": endpoint.model,
            "messages": [{"role": "user", "content": request.prompt}],
            "temperature": temperature,
            "top_p": top_p,
            endpoint.limit_name: max_tokens,
        }
        return made | {"seed": request.sampling_seed} if endpoint.send_seed else made

    async def send_all(
        requests: Sequence[Request], answers: SimpleQueue[ChatAnswer | None]
    ) -> None:
        left = iter(requests)  # of all workers: each takes the next one when it is free
        connector = aiohttp.TCPConnector(limit=0)  # the number of workers is the limit
        session = aiohttp.ClientSession(timeout=timeout, connector=connector, headers=headers)
        async with session, asyncio.TaskGroup() as group:

            async def work() -> None:
                for request in left:
                    none_yet = ChatAnswer(request.id, request.group, request.key, "lost")
                    answers.put(await _answer(session, endpoint, body(request), none_yet))

            for _ in range(min(endpoint.concurrency, len(requests))):
                group.create_task(work())

    def ask(requests: Sequence[Request]) -> Iterator[ChatAnswer]:
        answers: SimpleQueue[ChatAnswer | None] = SimpleQueue()
        loop = asyncio.new_event_loop()
        sending = loop.create_task(send_all(requests, answers))

        def run() -> None:
            try:
                loop.run_until_complete(sending)
            finally:
                answers.put(None)
                loop.close()

        with ThreadPoolExecutor(1) as pool:
            done = pool.submit(run)
            try:
                while (answer := answers.get()) is not None:
                    yield answer
            finally:
                with suppress(RuntimeError):  # of a loop that is closed
                    loop.call_soon_threadsafe(sending.cancel)
            done.result()

    return ask


async def _answer(
    session: aiohttp.ClientSession,
    endpoint: OpenAICompatible,
    body: Mapping[str, Any],
    none_yet: ChatAnswer,
) -> ChatAnswer:
    """Send a request until it is answered; transient errors are retried."""
    wait = endpoint.first_wait_seconds
    for resent in range(endpoint.max_resends + 1):
        found, asked_to_wait = await _send(session, endpoint, body, none_yet)
        if found.outcome != "lost" or resent == endpoint.max_resends:
            break
        await asyncio.sleep(min(max(wait, asked_to_wait), _LONGEST_WAIT_SECONDS))
        wait *= 2
    return found


async def _send(
    session: aiohttp.ClientSession,
    endpoint: OpenAICompatible,
    body: Mapping[str, Any],
    none_yet: ChatAnswer,
) -> tuple[ChatAnswer, float]:
    """Send a request once; return the answer and the wait in seconds that the endpoint requests."""
    try:
        async with session.post(endpoint.completions_url, json=body) as response:
            text = await response.text(errors="replace")
            asked_to_wait = _seconds(response.headers.get("Retry-After"))
    except aiohttp.InvalidURL as error:
        return _failed(none_yet, "stopped", f"no address: {error}"), 0.0
    except TimeoutError:
        seconds = endpoint.timeout_seconds
        return _failed(none_yet, "lost", f"timeout: no answer within {seconds:g} s"), 0.0
    except (aiohttp.ClientError, OSError) as error:
        return _failed(none_yet, "lost", f"{type(error).__name__}: {error}"), 0.0
    status = response.status
    if status == 200:
        return _read_completion(text, none_yet), asked_to_wait
    outcome: Outcome
    if status in _SENT_AGAIN or status >= 500:
        outcome = "lost"
    elif status in _REFUSES_ALL or status < 400:
        outcome = "stopped"
    else:
        outcome = "refused"
    return _failed(none_yet, outcome, f"HTTP {status}: {text}"), asked_to_wait


def read_key(endpoint: OpenAICompatible, setting: str) -> str | None:
    """Read the API key from this process's environment; None if the endpoint needs none.

    Args:
        setting: path of the endpoint's settings, for the message.

    Raises:
        ConfigError: the variable is not set.
    """
    if endpoint.api_key_env is None:
        return None
    key = os.environ.get(endpoint.api_key_env, "").strip()
    if not key:
        raise ConfigError(
            f"{setting}.api_key_env names the environment variable {endpoint.api_key_env}, which "
            "is not set in the job's environment; export it, or for a submitted job pass it with "
            f"--runtime-env-json '{{\"env_vars\": {{…}}}}'"
        )
    return key


def check_listens(url: str) -> None:
    """Raise if no connection to the address's host and port can be opened.

    Raises:
        OSError: it cannot, within a few seconds.
    """
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    socket.create_connection((parts.hostname or "", port), _CONNECT_SECONDS).close()


def _read_completion(body: str, none_yet: ChatAnswer) -> ChatAnswer:
    """Parse the body of a chat completion; any other content counts as unanswered."""
    try:
        completion = json.loads(body)
        choice = completion["choices"][0]
        text = _joined(choice["message"]["content"])
        usage = completion.get("usage")
        cut_off = choice.get("finish_reason") == "length"
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return _failed(none_yet, "lost", f"no completion: {body}")
    if text is None:  # a refusal, or a model that only thought
        text = ""
    if not isinstance(text, str):
        return _failed(none_yet, "lost", f"no completion: {body}")
    return replace(
        none_yet,
        outcome="answered",
        text=text.encode("utf-8", "replace").decode(),  # halves of characters fit no file
        cut_off=cut_off,
        prompt_tokens=_tokens(usage, "prompt_tokens"),
        answer_tokens=_tokens(usage, "completion_tokens"),
    )


def _joined(content: Any) -> Any:
    """Join the parts of a message's content into one text; other content is unchanged."""
    if not isinstance(content, list):
        return content
    parts = [part.get("text") if isinstance(part, dict) else part for part in content]
    return "".join(part for part in parts if isinstance(part, str))


def _tokens(usage: Any, name: str) -> int:
    """Read a token count from a completion's usage; 0 if it is missing."""
    number = usage.get(name) if isinstance(usage, dict) else None
    if not isinstance(number, int | float) or not math.isfinite(number):
        return 0
    return min(max(int(number), 0), _MOST_TOKENS)


def _failed(none_yet: ChatAnswer, outcome: Outcome, problem: str) -> ChatAnswer:
    shown = problem.encode("utf-8", "replace").decode()[:_CHARACTERS_OF_PROBLEM]
    return replace(none_yet, outcome=outcome, problem=shown)


def _seconds(retry_after: str | None) -> float:
    """Parse the seconds of a `Retry-After` header; a date is ignored."""
    try:
        return max(float(retry_after or 0), 0.0)
    except ValueError:
        return 0.0
