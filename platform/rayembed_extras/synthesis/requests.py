"""Types of requests to a language model and of their answers. Number, kind and seed of a request
decide its text.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal, Protocol

import xxhash

from rayembed.data.hashes import text_hash
from rayembed_extras.synthesis.prompts import draw, example_prompt, task_prompt
from rayembed_extras.synthesis.settings import PairKind

REQUESTS_PER_GROUP = 1024
"""Requests whose answers are stored and read together: about 3 MB of text."""


class Request(Protocol):
    """Interface of a request to a language model."""

    @property
    def id(self) -> str:
        """Identifier of the request, unique within a run."""
        ...

    @property
    def group(self) -> str:
        """Name of the folder in which answers of this group of requests are stored together."""
        ...

    @property
    def prompt(self) -> str:
        """Text of the user message."""
        ...

    @property
    def sampling_seed(self) -> int:
        """Seed of the model's sampling, 31 bits."""
        ...

    @property
    def key(self) -> str:
        """Key of the stored answer: hash of prompt and seed in hexadecimal digits."""
        ...


@dataclass(frozen=True)
class _NumberedRequest:
    """Base class of the requests of both synthesis steps (tasks, examples), numbered within a kind
    of pairs.
    """

    step: ClassVar[str]

    kind: PairKind
    number: int
    seed: int
    """Seed of the run."""

    @property
    def id(self) -> str:
        """Kind of pairs, step and number."""
        return f"{self.kind}/{self.step}/{self.number}"

    @property
    def group(self) -> str:
        """Storage folder shared by `REQUESTS_PER_GROUP` consecutive numbers; see `Request`."""
        return f"{self.kind}-{self.step}-{self.number // REQUESTS_PER_GROUP:05d}"

    @property
    def sampling_seed(self) -> int:
        """Seed of the model's sampling, derived from the run's seed and the id."""
        return text_hash(f"{self.seed}/{self.id}") % 2**31

    @property
    def prompt(self) -> str:
        """User message; see `Request`."""
        raise NotImplementedError

    @cached_property
    def key(self) -> str:
        """Key of the stored answer; see `Request`."""
        return key_of(self.prompt, self.sampling_seed)


@dataclass(frozen=True)
class TaskRequest(_NumberedRequest):
    """Request for tasks (first step)."""

    step = "tasks"

    how_many: int
    topic: str | None = None

    @property
    def prompt(self) -> str:
        """User message; see `Request`."""
        return task_prompt(self.kind, self.how_many, self.topic)


@dataclass(frozen=True)
class ExampleRequest(_NumberedRequest):
    """Request for an example of a task (second step)."""

    step = "examples"

    task: str
    language: str = "English"
    attempt: int = 0
    """Number of the try, from 0; each has its own seed and the same prompt."""

    @property
    def id(self) -> str:
        """Kind of pairs, step, number, and how often it was retried."""
        return f"{super().id}#{self.attempt}"

    @property
    def values(self) -> dict[str, str]:
        """Values for the placeholders in the kind's prompt."""
        return draw(self.kind, self.seed, self.number)

    @property
    def prompt(self) -> str:
        """User message; see `Request`."""
        return example_prompt(self.kind, self.task, self.values, self.language)


@dataclass(frozen=True)
class PromptRequest:
    """One request about a question, which may be repeated with another seed; see `Request`."""

    group: str
    prompt: str
    sampling_seed: int

    @property
    def id(self) -> str:
        """The key of the answer, so that equal questions share one request."""
        return self.key

    @property
    def key(self) -> str:
        """Key of the stored answer: hash of prompt and seed."""
        return key_of(self.prompt, self.sampling_seed)


Outcome = Literal["answered", "refused", "lost", "stopped"]
"""Outcome of a request. `answered`: there is a text. `refused`: the endpoint rejects this request
permanently. `lost`: no answer came this time. `stopped`: the endpoint rejects all requests."""


@dataclass(frozen=True)
class ChatAnswer:
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


Ask = Callable[[Sequence[Request]], Iterator[ChatAnswer]]
"""Sends requests to an LLM and yields one answer for each, in order of arrival."""


def key_of(prompt: str, sampling_seed: int) -> str:
    """Key of the stored answer to a prompt with a seed, in hexadecimal digits."""
    return xxhash.xxh3_128_hexdigest(f"{sampling_seed}\n{prompt}".encode())
