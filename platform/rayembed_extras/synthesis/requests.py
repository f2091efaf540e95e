"""LLM requests and answers. Number, kind and seed of a request decide its text."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, Protocol

import xxhash

from rayembed.data.hashes import text_hash
from rayembed_extras.synthesis.prompts import draw, example_prompt, task_prompt
from rayembed_extras.synthesis.settings import PairKind

REQUESTS_PER_GROUP = 1024
"""Requests whose answers are stored and read together: about 3 MB of text."""


class Request(Protocol):
    """A request to an LLM."""

    @property
    def id(self) -> str:
        """Unique id within a run: kind, step, number and try."""
        ...

    @property
    def group(self) -> str:
        """Group of `REQUESTS_PER_GROUP` consecutive numbers; names a folder."""
        ...

    @property
    def prompt(self) -> str:
        """User message."""
        ...

    @property
    def sampling_seed(self) -> int:
        """Sampling seed, 31 bits."""
        ...

    @property
    def key(self) -> str:
        """Content hash of prompt and seed in hexadecimal digits; key of the stored answer."""
        ...


@dataclass(frozen=True)
class TaskRequest:
    """Request for tasks (first step)."""

    kind: PairKind
    number: int
    seed: int
    """Seed of the run."""
    how_many: int
    topic: str | None = None

    @property
    def id(self) -> str:
        """Unique id within a run; see `Request`."""
        return f"{self.kind}/tasks/{self.number}"

    @property
    def group(self) -> str:
        """Group of requests; see `Request`."""
        return f"{self.kind}-tasks-{self.number // REQUESTS_PER_GROUP:05d}"

    @property
    def prompt(self) -> str:
        """User message; see `Request`."""
        return task_prompt(self.kind, self.how_many, self.topic)

    @property
    def sampling_seed(self) -> int:
        """Sampling seed; see `Request`."""
        return _sampling_seed(self.seed, self.id)

    @cached_property
    def key(self) -> str:
        """Key of the stored answer; see `Request`."""
        return key_of(self.prompt, self.sampling_seed)


@dataclass(frozen=True)
class ExampleRequest:
    """Request for an example of a task (second step)."""

    kind: PairKind
    number: int
    seed: int
    """Seed of the run."""
    task: str
    language: str = "English"
    attempt: int = 0
    """Number of the try, from 0; each has its own seed and the same prompt."""

    @property
    def id(self) -> str:
        """Unique id within a run; see `Request`."""
        return f"{self.kind}/examples/{self.number}#{self.attempt}"

    @property
    def group(self) -> str:
        """Group of requests; see `Request`."""
        return f"{self.kind}-examples-{self.number // REQUESTS_PER_GROUP:05d}"

    @property
    def values(self) -> dict[str, str]:
        """Values of the kind's placeholders."""
        return draw(self.kind, self.seed, self.number)

    @property
    def prompt(self) -> str:
        """User message; see `Request`."""
        return example_prompt(self.kind, self.task, self.values, self.language)

    @property
    def sampling_seed(self) -> int:
        """Sampling seed; see `Request`."""
        return _sampling_seed(self.seed, self.id)

    @cached_property
    def key(self) -> str:
        """Key of the stored answer; see `Request`."""
        return key_of(self.prompt, self.sampling_seed)


Outcome = Literal["answered", "refused", "lost", "stopped"]
"""Outcome of a request. `answered`: there is a text. `refused`: the endpoint rejects this request
permanently. `lost`: no answer came this time. `stopped`: the endpoint rejects all requests."""


@dataclass(frozen=True)
class Answer:
    """Answer to a request, or its failure."""

    id: str
    """Id of the request."""
    group: str
    """Group of the request."""
    key: str
    """Key of the request."""
    outcome: Outcome
    text: str = ""
    problem: str = ""
    """Reason why there is no text."""
    cut_off: bool = False
    """Whether the text ended at the token limit."""
    prompt_tokens: int = 0
    answer_tokens: int = 0


Ask = Callable[[Sequence[Request]], Iterator[Answer]]
"""Sends requests to an LLM and yields one answer for each, in order of arrival."""


def _sampling_seed(seed: int, id: str) -> int:
    return text_hash(f"{seed}/{id}") % 2**31


def key_of(prompt: str, sampling_seed: int) -> str:
    """Key of the stored answer to a prompt with a seed, in hexadecimal digits."""
    return xxhash.xxh3_128_hexdigest(f"{sampling_seed}\n{prompt}".encode())
