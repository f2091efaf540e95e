"""Store LLM answers permanently, so that no answered request is sent again.

    storage/data/answers/<model and sampling>/<group>/<content>.parquet

Answers are written in small files as they arrive, and looked up by the content of their request.
Other numbers of examples, other limits or another parser reuse existing answers.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import timedelta
from typing import Any, Generic, TypeVar

import pyarrow as pa
import xxhash

from rayembed.assets.arrow_files import parquet_bytes, read_sealed
from rayembed.assets.storage import join, list_files, write_atomic
from rayembed.errors import AssetError
from rayembed_extras.synthesis.answers import RejectedAnswer, ValueT
from rayembed_extras.synthesis.requests import Ask, ChatAnswer, Request

log = logging.getLogger(__name__)

_SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("group", pa.string()),
        ("key", pa.string()),
        ("outcome", pa.string()),
        ("text", pa.string()),
        ("problem", pa.string()),
        ("cut_off", pa.bool_()),
        ("prompt_tokens", pa.int64()),
        ("answer_tokens", pa.int64()),
    ]
)
assert _SCHEMA.names == [one.name for one in fields(ChatAnswer)]

_ANSWERS_PER_FILE = 256
_SECONDS_PER_FILE = 10.0
"""Seconds between files; a kill loses the answers since the last file and requests in flight."""

_REMEDY = "Remove this file alone and start the job again, which requests its answers again"

RequestT = TypeVar("RequestT", bound=Request)

NO_ANSWER = "no answer"
REFUSED = "refused by the endpoint"

_SECONDS_BETWEEN_LOGS = 5.0
_SHOWN = 300
"""Maximum characters of an answer in messages."""

_LOST_IN_A_ROW = 100
"""Consecutive failed requests, each retried several times, after which the endpoint counts as down.
Each further request would wait as long."""


class AnswerStore:
    """Answers of one model with one sampling setting, in storage."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._buffer: list[ChatAnswer] = []
        self._written = time.monotonic()

    def read(self, group: str) -> dict[str, ChatAnswer]:
        """Read the answers of a group of requests: key of a request → its answer."""
        folder = join(self.folder, group)
        found: dict[str, ChatAnswer] = {}
        for name in list_files(folder, recursive=False):
            if name.endswith(".parquet"):
                rows = read_sealed(join(folder, name), remedy=_REMEDY).to_pylist()
                found |= {row["key"]: ChatAnswer(**row) for row in rows}
        return found

    def answers(self, requests: Iterable[Request]) -> dict[str, ChatAnswer]:
        """Read the answers of all groups of the requests: key of a request → its answer."""
        groups = dict.fromkeys(request.group for request in requests)
        return {key: one for group in groups for key, one in self.read(group).items()}

    def add(self, answer: ChatAnswer) -> None:
        """Store an answer; it is on disk shortly after, or after `flush`."""
        self._buffer.append(answer)
        waited = time.monotonic() - self._written
        if len(self._buffer) >= _ANSWERS_PER_FILE or waited > _SECONDS_PER_FILE:
            self.flush()

    def flush(self) -> None:
        """Write all pending answers to disk."""
        groups: dict[str, list[dict[str, Any]]] = {}
        for answer in self._buffer:
            groups.setdefault(answer.group, []).append(asdict(answer))
        for group, rows in groups.items():
            content = parquet_bytes(pa.Table.from_pylist(rows, _SCHEMA))
            name = f"{xxhash.xxh3_128_hexdigest(content)}.parquet"
            write_atomic(join(self.folder, group, name), content)
        self._buffer.clear()
        self._written = time.monotonic()


@dataclass
class Tried(Generic[RequestT, ValueT]):
    """State of one question: the requests sent so far, their answers, and the next request."""

    request: RequestT
    """The last answered try, or the first one."""
    answers: list[ChatAnswer] = field(default_factory=list)
    """Answers of the tries, in order."""
    value: ValueT | None = None
    """Value read from the last answer; None: no usable answer yet."""
    problems: list[str] = field(default_factory=list)
    """Reason why each failed try has no value."""
    next: RequestT | None = None
    """The next try; None if there is a value or no try is left."""
    lost: str = ""
    """Reason why the next try got no answer in this run."""

    @property
    def problem(self) -> str:
        """Reason why the question has no usable answer; empty if it has one."""
        if self.value is not None:
            return ""
        if self.lost:
            return f"{NO_ANSWER} ({short_reason(self.lost)})"
        return self.problems[-1] if self.problems else NO_ANSWER

    @property
    def shown(self) -> str:
        """First characters of an unusable answer, for messages; empty if the answer is usable."""
        if self.value is not None or not (self.lost or self.answers):
            return ""
        return (self.lost or self.answers[-1].text or self.answers[-1].problem)[:_SHOWN]


def tried(
    tries: Sequence[RequestT],
    answers: Mapping[str, ChatAnswer],
    read: Callable[[ChatAnswer], ValueT],
) -> Tried[RequestT, ValueT]:
    """Derive the state of a question (answered, open, given up) from stored answers.

    Args:
        tries: of the question, in order.
        answers: key of a request → its answer.
        read: raises `RejectedAnswer` where an answer cannot be used.
    """
    found: Tried[RequestT, ValueT] = Tried(tries[0])
    for request in tries:
        answer = answers.get(request.key)
        if answer is None:
            found.next = request
            return found
        found.request = request
        found.answers.append(answer)
        try:
            if answer.outcome == "refused":
                raise RejectedAnswer(REFUSED)
            found.value = read(answer)
            return found
        except RejectedAnswer as problem:
            found.problems.append(str(problem))
    return found


def ask_and_store(
    what: str,
    requests: Sequence[Request],
    ask: Ask,
    kept: AnswerStore,
    lost_in_a_row: int = _LOST_IN_A_ROW,
) -> dict[str, str]:
    """Send requests and store their answers; return the key of each unanswered request → the
    reason.

    Args:
        what: names the requests in the log.
        requests: that have no answer yet.
        ask: puts them to the LLM.
        kept: where answers go.
        lost_in_a_row: requests without an answer between them from which the endpoint is away.

    Raises:
        AssetError: the endpoint refuses all requests, or does not answer any more.
    """
    lost: dict[str, str] = {}
    if not requests:
        return lost
    done = in_a_row = 0
    began = logged = time.monotonic()
    try:
        for done, answer in enumerate(ask(requests), 1):
            match answer.outcome:
                case "answered" | "refused":
                    kept.add(answer)
                    in_a_row = 0
                case "lost":
                    lost[answer.key] = answer.problem
                    in_a_row += 1
                case "stopped":
                    raise AssetError(
                        f"{what}: the endpoint refuses every request: {answer.problem}"
                    )
            if in_a_row >= min(lost_in_a_row, _LOST_IN_A_ROW):
                raise AssetError(
                    f"{what}: {in_a_row} consecutive requests got no answer; the last problem: "
                    f"{answer.problem}. Answers received so far are kept; start the job again "
                    "when the endpoint is back"
                )
            now = time.monotonic()
            if now - logged > _SECONDS_BETWEEN_LOGS or done == len(requests):
                logged = now
                log.info("%s: %s", what, _progress(done, len(requests), now - began))
    finally:
        kept.flush()
    assert done == len(requests), (done, len(requests))
    if lost:
        counts = Counter(map(short_reason, lost.values())).most_common(3)
        reasons = "; ".join(f"{count} × {reason}" for reason, count in counts)
        log.warning("%s: %d requests got no answer: %s", what, len(lost), reasons)
    return lost


def short_reason(problem: str) -> str:
    """Shorten a problem to its kind, without details: `HTTP 500`, `timeout`."""
    return problem.partition(":")[0]


def _progress(done: int, total: int, seconds: float) -> str:
    rate = done / max(seconds, 1e-9)
    status = f"{done:,}/{total:,} answers, {rate:,.1f} answers/s"
    if done == total:
        return f"{status}, {timedelta(seconds=round(seconds))}"
    return f"{status}, {timedelta(seconds=round((total - done) / rate))} left"
