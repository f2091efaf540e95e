"""Write synthetic pairs in two steps: tasks, then examples of each task.

    storage/data/answers/<model and sampling>/       every answer, reused by all runs
    storage/data/synthetic/<name>-<fingerprint>/     records, manifest, rejected.jsonl, audit.html

The driver plans the requests, stores the answers and reads them group by group; it holds the tasks,
a small object for each open request, and two hashes for each record. An `Ask` sends the requests.
"""

import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from rayembed.assets.storage import file_name, join, write_atomic
from rayembed.config.document import fingerprint
from rayembed.data.audit import write_folder_audit
from rayembed.data.engine.artifacts import ArtifactWriter, DatasetArtifact
from rayembed.data.engine.parts import ROWS_PER_PART, Part, write_part
from rayembed.data.hashes import text_hash
from rayembed.data.records import Negative, Record
from rayembed.errors import DataError
from rayembed_extras.synthesis.answer_store import AnswerStore, Tried, ask_and_store, tried
from rayembed_extras.synthesis.answers import WrittenPair, normalised, read_pair
from rayembed_extras.synthesis.audit import Audit
from rayembed_extras.synthesis.chat_endpoint import ask_endpoint, read_key
from rayembed_extras.synthesis.endpoint_settings import OpenAICompatible
from rayembed_extras.synthesis.find_tasks import CODE_VERSION, Tasks, find_tasks
from rayembed_extras.synthesis.prompts import draw_language, least_words, prompts_fingerprint
from rayembed_extras.synthesis.questions import check_failed
from rayembed_extras.synthesis.requests import REQUESTS_PER_GROUP, Ask, ChatAnswer, ExampleRequest
from rayembed_extras.synthesis.settings import PairKind, SynthesisConfig, SynthesisRun

log = logging.getLogger(__name__)

_TASK_OF: dict[PairKind, str] = {
    "short-long": "retrieval",
    "long-short": "classification",
    "short-short": "retrieval",
}

REJECTED = "rejected.jsonl"
"""File of rejected examples in the folder: the last answer and the reason why it is unusable."""

_CHARACTERS_SHOWN = 300
_CHARACTERS_KEPT = 1000


def synthesize(run: SynthesisRun) -> DatasetArtifact:
    """Write records with the run's LLM; return their folder; see `make_synthetic`.

    An endpoint is asked from this process, vLLM works on the cluster.

    Raises:
        ConfigError: the variable of the endpoint's key is not set, or vLLM is not installed.
        AssetError, DataError: as `make_synthetic`.
        PlacementError: as `fetch_llm`.
    """
    config, llm = run.synthesis, run.synthesis.llm
    if isinstance(llm, OpenAICompatible):
        ask = ask_endpoint(
            llm,
            read_key(llm, "synthesis.llm"),
            temperature=config.temperature,
            top_p=config.top_p,
            max_tokens=config.max_tokens,
        )
        return make_synthetic(run, fingerprint([llm.model, llm.revision]), ask)
    from rayembed.pipeline.run.on_ray import connect
    from rayembed_extras.synthesis.on_ray import ask_vllm, fetch_llm

    connect()
    path, weights = fetch_llm(llm.model)
    identity = fingerprint([weights, llm.dtype, llm.quantization])
    return make_synthetic(run, identity, ask_vllm(config, llm, path))


def make_synthetic(run: SynthesisRun, model: str, ask: Ask) -> DatasetArtifact:
    """Write records with an LLM, reusing stored answers; return the folder of records.

    Args:
        run: what is asked for.
        model: identifies the LLM: a fingerprint of its weights, or its name.
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
    """All examples to request, by kind of pairs and task."""

    run: SynthesisRun
    tasks: dict[PairKind, list[str]]

    @property
    def config(self) -> SynthesisConfig:
        return self.run.synthesis

    def groups(self) -> Iterator[list[ExampleRequest]]:
        """Yield the first request of each example, kind by kind, in the groups in which answers are
        stored.
        """
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
        """Return the language code that a request was assigned."""
        seed = self.run.seed
        return draw_language(self.config.languages, request.kind, seed, request.number)


def _tried(
    plan: _Plan, first: ExampleRequest, answers: Mapping[str, ChatAnswer]
) -> Tried[ExampleRequest, WrittenPair]:
    least = plan.config.min_words_share * least_words(first.kind, first.values)
    read = partial(read_pair, first.kind, language=plan.language(first), least_words=least)
    tries = [replace(first, attempt=attempt) for attempt in range(plan.config.retries + 1)]
    return tried(tries, answers, read)


def _ask_for_examples(plan: _Plan, ask: Ask, kept: AnswerStore) -> None:
    """Request each example until its answer is usable or the limit of retries is reached.

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
    """Writes data files from stored answers in the order of requests, one group at a time."""

    def __init__(self, plan: _Plan, writer: ArtifactWriter, kept: AnswerStore) -> None:
        self.plan, self.writer, self.kept = plan, writer, kept
        self.audit = Audit()
        self._seen: set[int] = set()
        self._buffer: list[Record] = []
        self._parts: list[Part] = []
        self._rejected: list[dict[str, Any]] = []

    def finish(self, tasks: dict[PairKind, Tasks]) -> DatasetArtifact:
        """Write the remaining records and the manifest; return the finished folder.

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
            raise DataError("the synthesis produced no records: all examples were rejected")
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

    def _add(self, found: Tried[ExampleRequest, WrittenPair]) -> None:
        kind = found.request.kind
        self.audit.count_tries(kind, found.problems, found.answers)
        if found.value is None:
            last = found.answers[-1] if found.answers else None
            self.audit.reject(kind, found.problem)
            self._rejected.append(
                {
                    "id": found.request.id,
                    "reason": found.problem,
                    "tries": len(found.problems),
                    "task": found.request.task,
                    "problem": last.problem if last else "",
                    "answer": last.text[:_CHARACTERS_KEPT] if last else "",
                }
            )
            return
        record = self._record(found.request, found.value)
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

    def _record(self, request: ExampleRequest, pair: WrittenPair) -> Record:
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
        place, share = join(self.writer.folder, REJECTED), self.plan.config.max_failed_share
        if not self._rejected:
            return
        row, rows_in = self._rejected[0], self.audit.rows_in
        shown = (
            f"{row['id']}: {(row['problem'] or row['answer'])[:_CHARACTERS_SHOWN]!r} of {place!r}"
        )
        check_failed(share, "synthesis", "examples", rows_in, self.audit.rejected, shown)
