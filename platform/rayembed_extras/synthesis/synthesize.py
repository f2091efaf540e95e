"""Synthetic pairs in two steps: tasks, then examples of each task; records in a finished folder.

    storage/data/answers/<model and sampling>/       every answer, reused by all runs
    storage/data/synthetic/<name>-<fingerprint>/     records, manifest, rejected.jsonl, audit.html

The driver plans the requests, stores the answers and reads them group by group; it holds the tasks,
a small object for each open request, and two hashes for each record. An `Ask` sends the requests.
"""

import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from rayembed.assets.storage import file_name, join, write_atomic
from rayembed.config.document import fingerprint
from rayembed.data.audit import write_folder_audit
from rayembed.data.engine.artifacts import ArtifactWriter, DatasetArtifact
from rayembed.data.engine.parts import ROWS_PER_PART, Part, write_part
from rayembed.data.hashes import text_hash
from rayembed.data.records import Negative, Record
from rayembed.errors import DataError
from rayembed_extras.synthesis.answer_store import AnswerStore, ask_and_store
from rayembed_extras.synthesis.answers import Pair, RejectedAnswer, normalised, read_pair
from rayembed_extras.synthesis.audit import Audit
from rayembed_extras.synthesis.find_tasks import CODE_VERSION, Tasks, find_tasks
from rayembed_extras.synthesis.prompts import draw_language, least_words, prompts_fingerprint
from rayembed_extras.synthesis.requests import REQUESTS_PER_GROUP, Answer, Ask, ExampleRequest
from rayembed_extras.synthesis.settings import PairKind, SynthesisConfig, SynthesisRun

log = logging.getLogger(__name__)

_TASK_OF: dict[PairKind, str] = {
    "short-long": "retrieval",
    "long-short": "classification",
    "short-short": "retrieval",
}

REJECTED = "rejected.jsonl"
"""File of rejected examples in the folder: the last answer and why it is unusable."""

_SHOWN = 3
_CHARACTERS_SHOWN = 300
_CHARACTERS_KEPT = 1000


def make_synthetic(run: SynthesisRun, model: str, ask: Ask) -> DatasetArtifact:
    """Folder of records written by an LLM; stored answers are reused.

    Args:
        run: what is asked for.
        model: what tells the LLM apart from others: a fingerprint of its weights, or its name.
        ask: puts requests to it.

    Raises:
        AssetError: the LLM cannot be reached or refuses all requests.
        DataError: too few different tasks, or too many examples without a usable answer.
    """
    config = run.synthesis
    settings = config.model_dump(mode="json", exclude={"llm"})
    inputs = {
        "code": CODE_VERSION,
        "prompts": [prompts_fingerprint(kind) for kind in config.examples],
        "settings": settings,
        "model": model,
        "seed": run.seed,
    }
    storage = run.placement.storage_path
    writer = ArtifactWriter(storage, "synthetic", run.name, inputs)
    if (found := writer.existing()) is not None:
        write_folder_audit(found)
        return found
    sampling = [model, config.temperature, config.top_p, config.max_tokens]
    kept = AnswerStore(join(storage, "data", "answers", fingerprint(sampling)))
    tasks = find_tasks(config, run.seed, ask, kept)
    plan = _Plan(run, {kind: found.texts for kind, found in tasks.items()})
    _ask_for_examples(plan, ask, kept)
    prepared = _RecordsWriter(plan, writer, kept).finish(tasks)
    write_folder_audit(prepared)
    return prepared


@dataclass(frozen=True)
class _Plan:
    """Planned examples."""

    run: SynthesisRun
    tasks: dict[PairKind, list[str]]

    @property
    def config(self) -> SynthesisConfig:
        return self.run.synthesis

    def groups(self) -> Iterator[list[ExampleRequest]]:
        """First tries of all examples, kind by kind, grouped as their answers are stored."""
        for kind, wanted in self.config.examples.items():
            for first in range(0, wanted, REQUESTS_PER_GROUP):
                last = min(first + REQUESTS_PER_GROUP, wanted)
                yield [self._request(kind, number) for number in range(first, last)]

    def _request(self, kind: PairKind, number: int) -> ExampleRequest:
        code = draw_language(self.config.languages, kind, self.run.seed, number)
        return ExampleRequest(
            kind,
            number,
            self.run.seed,
            task=self.tasks[kind][number // self.config.examples_per_task],
            language=self.config.languages[code],
        )

    def language(self, request: ExampleRequest) -> str:
        """Language code of the request."""
        seed = self.run.seed
        return draw_language(self.config.languages, request.kind, seed, request.number)


@dataclass
class _Attempts:
    """Tries of one example so far."""

    request: ExampleRequest
    """The last answered try, or the first one."""
    answers: list[Answer] = field(default_factory=list)
    """Answers of the tries, in order."""
    pair: Pair | None = None
    reasons: list[str] = field(default_factory=list)
    """Failure reason of each failed try."""
    next: ExampleRequest | None = None
    """The open try; None if there is a pair or the limit is reached."""


def _tried(plan: _Plan, first: ExampleRequest, answers: dict[str, Answer]) -> _Attempts:
    config = plan.config
    tried = _Attempts(first)
    for attempt in range(config.retries + 1):
        request = replace(first, attempt=attempt)
        answer = answers.get(request.key)
        if answer is None:
            tried.next = request
            return tried
        tried.request = request
        tried.answers.append(answer)
        least = config.min_words_share * least_words(request.kind, request.values)
        try:
            if answer.outcome == "refused":
                raise RejectedAnswer("refused by the endpoint")
            tried.pair = read_pair(
                request.kind, answer, language=plan.language(request), least_words=least
            )
            return tried
        except RejectedAnswer as error:
            tried.reasons.append(str(error))
    return tried


def _ask_for_examples(plan: _Plan, ask: Ask, kept: AnswerStore) -> None:
    """Ask until each example has a usable answer or has reached the limit of tries.

    An example without an answer is also requested again in each round.
    """
    settled: set[int] = set()
    for round_ in range(plan.config.retries + 1):
        open_: list[ExampleRequest] = []
        for index, group in enumerate(plan.groups()):
            if index in settled:
                continue
            answers = kept.read(group[0].group)
            left = [r for first in group if (r := _tried(plan, first, answers).next) is not None]
            open_.extend(left)
            if not left:
                settled.add(index)
        if not open_:
            return
        ask_and_store("examples" if round_ == 0 else f"examples, retry {round_}", open_, ask, kept)


class _RecordsWriter:
    """Writes parts from stored answers in request order, one group at a time."""

    def __init__(self, plan: _Plan, writer: ArtifactWriter, kept: AnswerStore) -> None:
        self.plan, self.writer, self.kept = plan, writer, kept
        self.audit = Audit()
        self._seen: set[int] = set()
        self._buffer: list[Record] = []
        self._parts: list[Part] = []
        self._rejected: list[dict[str, Any]] = []

    def finish(self, tasks: dict[PairKind, Tasks]) -> DatasetArtifact:
        """Write the rest and the manifest; the finished folder.

        Raises:
            DataError: too many examples have no usable answer.
        """
        for group in self.plan.groups():
            answers = self.kept.read(group[0].group)
            for first in group:
                self._add(_tried(self.plan, first, answers))
        rejected = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in self._rejected)
        write_atomic(join(self.writer.folder, REJECTED), rejected.encode())
        self._check()
        self._write(flush=True)
        if not self._parts:
            raise DataError("no record came of the synthesis: all examples were rejected")
        audit = self.audit
        result = {
            "rows_in": audit.rows_in,
            "rows_out": audit.records_made,
            "rejected": dict(audit.rejected),
            "examples": audit.examples(),
        }
        more = {
            "tasks": {kind: len(found.texts) for kind, found in tasks.items()},
            "tasks_repeated": {kind: found.repeated for kind, found in tasks.items()},
            "task_requests": {kind: found.asked for kind, found in tasks.items()},
            "task_answers_rejected": {
                f"{kind}: {reason}": count
                for kind, found in tasks.items()
                for reason, count in found.rejected.items()
            },
            **audit.numbers(),
            "llm": self.plan.config.llm.model_dump(mode="json"),
            "answers": f"answers/{file_name(self.kept.folder)}",
        }
        parts = [(part.name, part.rows) for part in self._parts]
        return self.writer.finish([result], parts, {"duplicate": audit.duplicates}, **more)

    def _add(self, tried: _Attempts) -> None:
        kind = tried.request.kind
        self.audit.count_tries(kind, tried.reasons, tried.answers)
        if tried.pair is None:
            reason = tried.reasons[-1] if tried.reasons else "no answer"
            last = tried.answers[-1] if tried.answers else None
            self.audit.reject(kind, reason)
            self._rejected.append(
                {
                    "id": tried.request.id,
                    "reason": reason,
                    "tries": len(tried.reasons),
                    "task": tried.request.task,
                    "problem": last.problem if last else "",
                    "answer": _cut(last.text, _CHARACTERS_KEPT) if last else "",
                }
            )
            return
        record = self._record(tried, tried.pair)
        own = {
            text_hash(f"{record.query_instruction}\n{normalised(record.query)}"),
            text_hash(f"{normalised(record.query)}\n{normalised(record.positives[0])}"),
        }
        if own & self._seen:
            self.audit.duplicate(kind)
            return
        self._seen |= own
        self.audit.keep(kind, record)
        self._buffer.append(record)
        self._write()

    def _record(self, tried: _Attempts, pair: Pair) -> Record:
        request = tried.request
        # Two texts with one label would be each other's negatives within a batch.
        is_label = request.kind == "long-short"
        return Record(
            id=f"{self.plan.run.name}/{request.kind}/{request.number}",
            query=pair.query,
            positives=(pair.positive,),
            negatives=tuple(Negative(text, rule="synthetic") for text in pair.negatives),
            dataset=self.plan.run.name,
            task=_TASK_OF[request.kind],
            query_instruction=request.task,
            in_batch=not is_label,
            label=normalised(pair.positive) if is_label else None,
            language=self.plan.language(request),
            origin=(request.id,),
        )

    def _write(self, flush: bool = False) -> None:
        while len(self._buffer) >= (1 if flush else ROWS_PER_PART):
            rows, self._buffer = self._buffer[:ROWS_PER_PART], self._buffer[ROWS_PER_PART:]
            self._parts.append(write_part(self.writer.parts_folder, rows))

    def _check(self) -> None:
        failed, asked = len(self._rejected), self.audit.rows_in
        if failed <= self.plan.config.max_failed_share * asked:
            return
        reasons = "; ".join(f"{n} × {reason}" for reason, n in self.audit.rejected.most_common(5))
        shown = "\n".join(
            f"  {row['id']}: {row['reason']} {row['problem']}: "
            f"{_cut(row['answer'], _CHARACTERS_SHOWN)!r}"
            for row in self._rejected[:_SHOWN]
        )
        raise DataError(
            f"{failed} of {asked} examples have no usable answer ({reasons}), more than "
            f"synthesis.max_failed_share={self.plan.config.max_failed_share} allows:\n{shown}\n"
            f"All of them: {join(self.writer.folder, REJECTED)}. Answers are kept: start the job "
            "again for examples without an answer, raise synthesis.retries for the others, or take "
            "another model"
        )


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else text[:length] + "…"
