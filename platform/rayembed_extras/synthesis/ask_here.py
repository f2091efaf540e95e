"""Requests to an endpoint from this process, without Ray: for steps whose driver asks alone."""

import asyncio
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from queue import SimpleQueue

from rayembed_extras.synthesis.chat_endpoint import ChatEndpoint, payload
from rayembed_extras.synthesis.endpoint_settings import OpenAICompatible
from rayembed_extras.synthesis.requests import Answer, Ask, Request


def ask_here(
    endpoint: OpenAICompatible,
    key: str | None,
    *,
    temperature: float,
    top_p: float,
    max_tokens: int,
) -> Ask:
    """`Ask` that sends at most `endpoint.concurrency` requests at a time.

    It runs in a thread with an event loop of its own, so that notebooks, which have one, can ask
    too. Where no more answers are taken, what is in flight is cancelled.
    """
    sampling = {"temperature": temperature, "top_p": top_p}

    def body(request: Request) -> str:
        made = payload(
            endpoint, request.prompt, request.sampling_seed, max_tokens=max_tokens, **sampling
        )
        return json.dumps(made)

    async def send_all(requests: Sequence[Request], answers: SimpleQueue[Answer | None]) -> None:
        left = iter(requests)  # of all workers: each takes the next one when it is free
        sessions = ChatEndpoint(endpoint, key)
        async with sessions() as session, asyncio.TaskGroup() as group:

            async def work() -> None:
                for request in left:
                    response = await session.post(sessions.url, headers={}, data=body(request))
                    found = await response.json()
                    answers.put(Answer(request.id, request.group, request.key, **found))

            for _ in range(min(endpoint.concurrency, len(requests))):
                group.create_task(work())

    def ask(requests: Sequence[Request]) -> Iterator[Answer]:
        answers: SimpleQueue[Answer | None] = SimpleQueue()
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
