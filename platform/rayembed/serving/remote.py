"""A served model whose copies are other processes, reached by a handle of Ray Serve."""

import asyncio
from collections.abc import Mapping
from typing import Any

from rayembed.serving.service import Answer, ServiceError, State


class RemoteService:
    """A served model whose copies are other processes."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    async def answer(self, path: str, body: Mapping[str, Any]) -> Answer:
        """As the service's; given up there, too, where it is cancelled here."""
        result = await _result(self._handle.answer.remote(path, dict(body)))
        if isinstance(result, ServiceError):
            raise result
        answer: Answer = result
        return answer

    async def describe(self) -> dict[str, Any]:
        """As the service's."""
        entry: dict[str, Any] = await _result(self._handle.describe.remote())
        return entry

    async def state(self) -> State:
        """As the service's, of one of the copies."""
        state: State = await _result(self._handle.state.remote())
        return state


async def _result(response: Any) -> Any:
    try:
        return await response
    except asyncio.CancelledError:
        response.cancel()
        raise
