"""Request batching: processes all waiting requests together and never waits for more.

While a batch is worked on the next one gathers, so batches grow with the load and a lone request
goes at once. In the order of arrival: Ray Serve's own batching puts a request that does not fit
into the batch behind all that came later, and refuses one that is larger than a batch.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass
class _Waiting(Generic[Item, Result]):
    item: Item
    size: int
    future: "asyncio.Future[Result]"


class Batcher(Generic[Item, Result]):
    """Calls `work` with the items of several callers, in one thread, one batch at a time."""

    def __init__(
        self, work: Callable[[Sequence[Item]], Sequence[Result]], *, largest_batch: int
    ) -> None:
        """Create a batcher; `work` maps the items of a batch to results in the same order.

        Args:
            largest_batch: sum of the sizes of a batch's items; a larger item goes alone.
        """
        self._work = work
        self._largest_batch = largest_batch
        self._queue: deque[_Waiting[Item, Result]] = deque()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="batches")
        self._draining: asyncio.Task[None] | None = None

    async def __call__(self, item: Item, size: int) -> Result:
        """Result of the item; raises what `work` raises for it.

        A caller that is cancelled while its item waits takes it out.
        """
        waiting = _Waiting[Item, Result](item, size, asyncio.get_running_loop().create_future())
        self._queue.append(waiting)
        if self._draining is None or self._draining.done():
            self._draining = asyncio.create_task(self._drain())
        return await waiting.future

    async def _drain(self) -> None:
        loop = asyncio.get_running_loop()
        while batch := self._next_batch():
            results = await loop.run_in_executor(self._thread, self._each, batch)
            for waiting, result in zip(batch, results, strict=True):
                if waiting.future.done():
                    continue
                if isinstance(result, BaseException):
                    waiting.future.set_exception(result)
                else:
                    waiting.future.set_result(result)

    def _next_batch(self) -> list[_Waiting[Item, Result]]:
        batch: list[_Waiting[Item, Result]] = []
        size = 0
        while self._queue:
            first = self._queue[0]
            if batch and size + first.size > self._largest_batch:
                break
            self._queue.popleft()
            if not first.future.done():
                batch.append(first)
                size += first.size
        return batch

    def _each(self, batch: Sequence[_Waiting[Item, Result]]) -> Sequence[Result | BaseException]:
        """Result or error of each item; after an error each is processed alone."""
        try:
            return self._work([waiting.item for waiting in batch])
        except Exception as error:  # noqa: BLE001 - told to the callers, whatever it is
            if len(batch) == 1:
                return [error]
            return [result for waiting in batch for result in self._each([waiting])]
