"""Request batching: token batches shared fairly among all waiting requests, without waiting for
further ones.

While a batch is worked on the next one gathers, so batches grow with the load and a lone request
goes at once. A request is not one item but as many as it has texts: of a large one a batch takes a
share and leaves the rest for later batches, and between two batches with shares of large requests
the small ones have one of their own. So a short text waits for the batch under way and little
more, not for the whole of a large request. What a caller that left has waiting is dropped.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(eq=False)
class _Caller(Generic[Item, Result]):
    waiting: deque[tuple[int, Item, int]]
    """Position, item and cost of items that no batch contains yet."""
    future: "asyncio.Future[None]"
    results: dict[int, Result] = field(default_factory=dict)
    total: int = 0

    @property
    def left(self) -> int:
        """Total cost of the caller's waiting items."""
        return sum(cost for _, _, cost in self.waiting)


_SMALL = 4
"""A request is small if this many fit into a batch, and large if not even one fits."""

_Batch = list[tuple[_Caller[Item, Result], int, Item]]


class Batcher(Generic[Item, Result]):
    """Calls `work` with items of several callers, in one thread, one batch at a time."""

    def __init__(
        self,
        work: Callable[[Sequence[Item]], Sequence[Result | BaseException]],
        *,
        largest_batch: int,
    ) -> None:
        """Create a batcher without waiting items.

        Args:
            work: maps the items of a batch to results in the same order; an error in the place of
                a result is raised for the caller of its item alone.
            largest_batch: sum of the costs of a batch's items; a costlier item goes alone.
        """
        self._work = work
        self._largest_batch = largest_batch
        self._queue: deque[_Caller[Item, Result]] = deque()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="batches")
        self._draining: asyncio.Task[None] | None = None
        self._small_ones_before = False
        self.failures = 0
        """Batches that failed, for one item or all, since the last one that did not."""

    async def __call__(self, items: Sequence[Item], costs: Sequence[int]) -> list[Result]:
        """Process items and return their results in order; raise the error of `work` for any of
        them.

        The costliest items go first. A caller that is cancelled takes out what no batch has yet.
        """
        if not items:
            return []
        order = sorted(range(len(items)), key=lambda place: -costs[place])
        caller = _Caller[Item, Result](
            deque((place, items[place], costs[place]) for place in order),
            asyncio.get_running_loop().create_future(),
            total=len(items),
        )
        self._queue.append(caller)
        if self._draining is None or self._draining.done():
            self._draining = asyncio.create_task(self._drain())
        await caller.future
        return [caller.results[place] for place in range(len(items))]

    async def _drain(self) -> None:
        loop = asyncio.get_running_loop()
        while batch := self._next_batch():
            found = await loop.run_in_executor(self._thread, self._each, batch)
            for (caller, place, _), result in zip(batch, found, strict=True):
                if caller.future.done():
                    continue
                if isinstance(result, BaseException):
                    caller.future.set_exception(result)
                    continue
                caller.results[place] = result
                if len(caller.results) == caller.total:
                    caller.future.set_result(None)

    def _next_batch(self) -> _Batch[Item, Result]:
        """Choose the items of the next batch; every other batch takes only small requests if large
        ones wait too.
        """
        self._queue = deque(one for one in self._queue if not one.future.done())
        left = [(caller, caller.left) for caller in self._queue]
        small = [caller for caller, cost in left if _SMALL * cost <= self._largest_batch]
        large = any(cost > self._largest_batch for _, cost in left)
        self._small_ones_before = bool(small) and large and not self._small_ones_before
        if not self._small_ones_before:
            return self._shared_batch()
        others = [caller for caller in self._queue if caller not in small]
        self._queue = deque(small)
        batch = self._shared_batch()
        self._queue.extend(others)
        return batch

    def _shared_batch(self) -> _Batch[Item, Result]:
        """Fill a batch: each caller in turn adds its share, repeatedly while there is room.

        Who could give nothing more because the batch is full is first in the next one.
        """
        batch: _Batch[Item, Result] = []
        room = self._largest_batch
        share = room // max(1, len(self._queue))
        while self._queue:
            caller = self._queue.popleft()
            given = 0
            while caller.waiting:
                place, item, cost = caller.waiting[0]
                if batch and cost > room:
                    if given:
                        self._queue.append(caller)
                    else:
                        self._queue.appendleft(caller)
                    return batch
                if given and given + cost > share:
                    break
                caller.waiting.popleft()
                batch.append((caller, place, item))
                given += cost
                room -= cost
            if caller.waiting:
                self._queue.append(caller)
        return batch

    def _each(self, batch: _Batch[Item, Result]) -> Sequence[Result | BaseException]:
        """Compute the result or error of each item; after an error, process each caller's items
        separately.
        """
        try:
            results = self._work([item for _, _, item in batch])
        except Exception as error:  # noqa: BLE001 - passed on to the callers
            callers = list({id(caller): caller for caller, _, _ in batch}.values())
            if len(callers) == 1:
                self.failures += 1
                return [error] * len(batch)
            found: dict[tuple[int, int], Result | BaseException] = {}
            for caller in callers:
                own = [one for one in batch if one[0] is caller]
                for (_, place, _), result in zip(own, self._each(own), strict=True):
                    found[id(caller), place] = result
            return [found[id(caller), place] for caller, place, _ in batch]
        failed = any(isinstance(result, BaseException) for result in results)
        self.failures = self.failures + 1 if failed else 0
        return results
