"""Requests to an LLM and its answers. All are planned: number, kind and seed decide their text."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, Protocol

import xxhash

from rayembed.config.synthesis import PairKind
from rayembed.data.hashes import text_hash
from rayembed.data.synthesis.placeholders import draw
from rayembed.data.synthesis.prompts import example_prompt, task_prompt

REQUESTS_PER_GROUP = 1024
"""Whose answers lie together on disk and are read together: some 3 MB of text."""


class Request(Protocol):
    """What an LLM is asked."""

    @property
    def id(self) -> str:
        """Kind, step and number, and which try it is; unique within a run."""
        ...

    @property
    def group(self) -> str:
        """Of `REQUESTS_PER_GROUP` numbers; names a folder."""
        ...

    @property
    def prompt(self) -> str:
        """The user's message."""
        ...

    @property
    def sampling_seed(self) -> int:
        """31 bits."""
        ...

    @property
    def key(self) -> str:
        """Hexadecimal digits of the content: prompt and seed. Answers are found by it."""
        ...


@dataclass(frozen=True)
class TaskRequest:
    """Asks for tasks (first step)."""

    kind: PairKind
    number: int
    seed: int
    """Of the run."""
    how_many: int
    topic: str | None = None

    @property
    def id(self) -> str:
        """As of `Request`."""
        return f"{self.kind}/tasks/{self.number}"

    @property
    def group(self) -> str:
        """As of `Request`."""
        return f"{self.kind}-tasks-{self.number // REQUESTS_PER_GROUP:05d}"

    @property
    def prompt(self) -> str:
        """As of `Request`."""
        return task_prompt(self.kind, self.how_many, self.topic)

    @property
    def sampling_seed(self) -> int:
        """As of `Request`."""
        return _sampling_seed(self.seed, self.id)

    @cached_property
    def key(self) -> str:
        """As of `Request`."""
        return _key(self)


@dataclass(frozen=True)
class ExampleRequest:
    """Asks for an example of a task (second step)."""

    kind: PairKind
    number: int
    seed: int
    """Of the run."""
    task: str
    language: str = "English"
    attempt: int = 0
    """Counted from 0; another one has another seed and the same prompt."""

    @property
    def id(self) -> str:
        """As of `Request`."""
        return f"{self.kind}/examples/{self.number}#{self.attempt}"

    @property
    def group(self) -> str:
        """As of `Request`."""
        return f"{self.kind}-examples-{self.number // REQUESTS_PER_GROUP:05d}"

    @property
    def values(self) -> dict[str, str]:
        """Of the kind's placeholders."""
        return draw(self.kind, self.seed, self.number)

    @property
    def prompt(self) -> str:
        """As of `Request`."""
        return example_prompt(self.kind, self.task, self.values, self.language)

    @property
    def sampling_seed(self) -> int:
        """As of `Request`."""
        return _sampling_seed(self.seed, self.id)

    @cached_property
    def key(self) -> str:
        """As of `Request`."""
        return _key(self)


Outcome = Literal["answered", "refused", "lost", "stopped"]
"""`answered`: there is a text. `refused`: the endpoint refuses this request, as it would again.
`lost`: no answer came, this time. `stopped`: the endpoint refuses whatever it is asked."""


@dataclass(frozen=True)
class Answer:
    """What came of a request."""

    id: str
    """Of the request."""
    group: str
    """Of the request."""
    key: str
    """Of the request."""
    outcome: Outcome
    text: str = ""
    problem: str = ""
    """Why there is no text."""
    cut_off: bool = False
    """The text ended at the limit of tokens."""
    prompt_tokens: int = 0
    answer_tokens: int = 0


Ask = Callable[[Sequence[Request]], Iterator[Answer]]
"""Puts requests to an LLM and yields one answer for each, in any order, as they come."""


def _sampling_seed(seed: int, id: str) -> int:
    return text_hash(f"{seed}/{id}") % 2**31


def _key(request: Request) -> str:
    return xxhash.xxh3_128_hexdigest(f"{request.sampling_seed}\n{request.prompt}".encode())
