"""A language model that answers at once, in this process, and counts what it is asked."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from written_texts import write

from rayembed_extras.synthesis.requests import ChatAnswer, Request


class FakeLLM:
    """An `Ask` in this process that counts what it is asked."""

    def __init__(
        self,
        broken_share: float = 0.0,
        answer: Callable[[Request], ChatAnswer | None] = lambda request: None,
        dies_after: int | None = None,
    ) -> None:
        self.broken_share = broken_share
        self.answer = answer
        """Takes the place of what would be written, where it gives something."""
        self.dies_after = dies_after
        self.asked: Counter[str] = Counter()

    def __call__(self, requests: Sequence[Request]) -> Iterator[ChatAnswer]:
        # In another order than asked: answers come as they are ready.
        for request in sorted(requests, key=lambda r: r.sampling_seed):
            if self.dies_after is not None and self.asked.total() >= self.dies_after:
                raise KeyboardInterrupt
            self.asked[request.id] += 1
            given = self.answer(request)
            yield given if given is not None else self._written(request)

    def _written(self, request: Request) -> ChatAnswer:
        text = write(request.prompt, request.sampling_seed, broken_share=self.broken_share)
        return ChatAnswer(request.id, request.group, request.key, "answered", text, answer_tokens=7)


def failed(request: Request, outcome: str, problem: str) -> ChatAnswer:
    """An answer without a text."""
    return ChatAnswer(request.id, request.group, request.key, outcome, problem=problem)  # type: ignore[arg-type]
