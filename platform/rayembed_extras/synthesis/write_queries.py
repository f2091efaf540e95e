"""Write queries for given documents with a language model, as records in a finished folder.

    storage/data/answers/<model and sampling>/queries-…/     every answer
    storage/data/synthetic/<data set>-<fingerprint>/         records, manifest, audit.html

The driver reads the documents and asks; it holds a hash of each, and the texts of one file's piece.
"""

import heapq
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from rayembed.config.data import DatasetConfig
from rayembed.config.types import has_content, is_unicode
from rayembed.data.audit import write_folder_audit
from rayembed.data.engine.artifacts import ArtifactWriter, DatasetArtifact, PipelineContext
from rayembed.data.engine.parts import Part, write_part
from rayembed.data.engine.work_items import EXAMPLES_KEPT
from rayembed.data.hashes import seeded_hash, text_hash
from rayembed.data.records import Record
from rayembed.data.sources.cells import RowError, text_in
from rayembed.data.sources.file_rows import ResolvedDataset, record_of
from rayembed.data.sources.rows import BadRow, read_rows
from rayembed.errors import DataError
from rayembed_extras.synthesis.answers import RejectedAnswer, first_usable, normalised
from rayembed_extras.synthesis.questions import Interview, Question, asker, check_failed, cut
from rayembed_extras.synthesis.requests import REQUESTS_PER_GROUP, Ask, ChatAnswer

CODE_VERSION = 1
"""Code version of prompt and records; raise it when the same documents yield other records."""

_MAX_WORDS = 100
"""Maximum words of a query; longer answers are rejected."""

_PROMPT = """\
Write {count} search {noun} that the document below answers and that somebody could ask who does \
not know it.{wanted} Use the language of the document. Do not speak of "the document" or "the \
text", name what is asked about, and use other words than the document where you can.

Document:
{document}

Answer with one JSON object and nothing else: {{"queries": [{count} texts]}}."""


def make_queries(
    context: PipelineContext, checked: ResolvedDataset, source: Any
) -> DatasetArtifact:
    """Write a record for each query of each document, reusing stored answers; return the folder of
    records.

    Args:
        context: storage and seed.
        checked: the data set with its files.
        source: a `QueriesSource`, of the data set.

    Raises:
        AssetError: the endpoint refuses all requests, or does not answer any more.
        ConfigError: the key is not in the environment.
        DataError: no document, too many bad rows, or too many without a usable answer.
    """
    dataset = checked.dataset
    own = source.model_dump(
        mode="json", include={"text", "per_document", "documents", "wanted", "language"}
    )
    inputs = {
        "code": CODE_VERSION,
        "model": source.identity,
        "settings": own,
        "task": dataset.task,
        "source": checked.content,
        "seed": context.seed,
    }
    writer = ArtifactWriter(context.storage, "synthetic", dataset.name, inputs)
    made = writer.get_or_make(lambda: _Writing(context, checked, source, writer).made())
    write_folder_audit(made)
    return made


class _Writing:
    """State and counts while queries for all documents are written."""

    def __init__(
        self,
        context: PipelineContext,
        checked: ResolvedDataset,
        source: Any,
        writer: ArtifactWriter,
    ) -> None:
        self.dataset: DatasetConfig = checked.dataset
        self.source, self.writer, self.checked = source, writer, checked
        self.seed = context.seed
        self.interview = Interview(source, context.seed, context.storage)
        self.setting = f"data.datasets.{self.dataset.name}.source"
        self.rejected: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()
        self.rows = self.documents = self.made_records = 0
        self.parts: list[Part] = []
        self.examples: list[dict[str, Any]] = []
        self.shown = ""

    def made(self) -> DatasetArtifact:
        """Write the records; return the finished folder."""
        ask, last = asker(self.source, self.setting), self._last_key()
        group: list[Record] = []
        for number, document in enumerate(self._drawn(last)):
            group.append(document)
            if len(group) == REQUESTS_PER_GROUP:
                self._ask(number // REQUESTS_PER_GROUP, group, ask)
                group = []
        if group:
            self._ask(self.documents // REQUESTS_PER_GROUP, group, ask)
        self._check()
        result = {
            "rows_in": self.rows,
            "rows_used": self.rows - self.rejected.total() - self.failed.total(),
            "rows_out": self.made_records,
            "rejected": dict(self.rejected + self.failed),
            "examples": self.examples,
        }
        parts = [(part.name, part.rows) for part in self.parts]
        return self.writer.finish(
            [result],
            parts,
            llm=self.source.llm.model,
            documents=self.documents,
            without_usable_answer=dict(sorted(self.failed.items())),
        )

    def _last_key(self) -> int | None:
        """Largest hash key of the drawn documents; None if all documents are used."""
        if self.source.documents is None:
            return None
        keys = heapq.nsmallest(self.source.documents, self._keys())
        return keys[-1] if len(keys) == self.source.documents else None

    def _keys(self) -> Iterator[int]:
        seen: set[int] = set()
        for _, text, _ in self._texts():
            if isinstance(text, str) and text_hash(text) not in seen:
                seen.add(text_hash(text))
                yield seeded_hash(self.seed, "queries", text)

    def _texts(self) -> Iterator[tuple[str, str | RowError, str | None]]:
        """Yield origin, text (or reason for rejection) and language of every row."""
        source = self.source
        for piece in self.checked.files["path"]:
            for row in read_rows(piece, tuple(source.columns.values())):
                if isinstance(row, BadRow):
                    yield row.origin, RowError(row.reason), None
                    continue
                try:
                    text = text_in(row.values, source.text)
                    language = text_in(row.values, source.language) if source.language else None
                    if text is None or not has_content(text):
                        raise RowError("no text")
                except RowError as problem:
                    yield row.origin, problem, None
                else:
                    yield row.origin, text, language

    def _drawn(self, last: int | None) -> Iterator[Record]:
        """Yield the distinct documents to ask about, as records whose query is empty."""
        seen: set[int] = set()
        for origin, text, language in self._texts():
            self.rows += 1
            if isinstance(text, RowError):
                self._reject(str(text), origin)
            elif text_hash(text) in seen:
                self.rejected["duplicate"] += 1
            elif last is not None and seeded_hash(self.seed, "queries", text) > last:
                self.rejected["not drawn"] += 1
            else:
                seen.add(text_hash(text))
                self.documents += 1
                yield Record(
                    "", "", (text,), self.dataset.name, language=language, origin=(origin,)
                )

    def _ask(self, number: int, documents: Sequence[Record], ask: Ask) -> None:
        """Ask for queries about a group of documents and write their records."""
        read = partial(read_queries, count=self.source.per_document)
        questions = [
            Question(queries_prompt(self.source, one.positives[0]), read) for one in documents
        ]
        group = f"queries-{self.checked.content}-{number:05d}"
        replies = self.interview.ask(f"queries {number}", group, questions, ask)
        records = []
        for document, reply in zip(documents, replies, strict=True):
            try:
                if reply.value is None:
                    raise RowError(reply.problem)
                records += [
                    record_of(
                        self.dataset,
                        query,
                        document.positives,
                        origin=document.origin,
                        language=document.language,
                    )
                    for query in reply.value
                ]
            except RowError as problem:
                self.failed[str(problem)] += 1
                self.shown = self.shown or reply.shown
        if records:
            self.parts.append(write_part(self.writer.parts_folder, records))
            self.made_records += len(records)

    def _reject(self, reason: str, origin: str) -> None:
        self.rejected[reason] += 1
        if len(self.examples) < EXAMPLES_KEPT:
            self.examples.append({"reason": reason, "row": origin})

    def _check(self) -> None:
        """Raise if there are no documents, too many bad rows, or too few answers."""
        name, of = self.source.place, f"documents of {self.source.place!r}"
        bad = self.rejected.total() - self.rejected["duplicate"] - self.rejected["not drawn"]
        if bad > self.source.max_rejected_share * self.rows:
            raise DataError(
                f"data set {self.dataset.name!r}: {bad} of {self.rows} rows of {name!r} have no "
                f"document ({dict(self.rejected)}), more than the share "
                f"{self.source.max_rejected_share:g} that {self.setting}.max_rejected_share "
                "allows; correct the rows or raise the share"
            )
        if not self.documents:
            raise DataError(
                f"data set {self.dataset.name!r}: no row of {name!r} has a usable document"
            )
        share = self.source.max_failed_share
        check_failed(share, self.setting, of, self.documents, self.failed, repr(self.shown))
        if not self.parts:
            raise DataError(
                f"data set {self.dataset.name!r}: the language model wrote no usable query for "
                f"{name!r}"
            )


def queries_prompt(source: Any, text: str) -> str:
    """Build the user message about a document."""
    one = source.per_document == 1
    wanted = source.wanted.strip().rstrip(".")
    return _PROMPT.format(
        count=source.per_document,
        noun="query" if one else "queries, as different as can be,",
        wanted=f" Wanted are {wanted}." if wanted else "",
        document=cut(text, source.max_words),
    )


def read_queries(answer: ChatAnswer, count: int) -> tuple[str, ...]:
    """Parse the queries of an answer, without repetitions and at most `count`.

    Raises:
        RejectedAnswer: there are fewer.
    """

    def read(value: dict[str, Any]) -> tuple[str, ...]:
        named = value.get("queries")
        if not isinstance(named, list) or not all(isinstance(one, str) for one in named):
            raise RejectedAnswer("the answer has no list of queries")
        texts = {normalised(one): " ".join(one.split()) for one in reversed(named)}
        usable = [one for one in reversed(texts.values()) if _is_query(one)]
        if len(usable) < count:
            raise RejectedAnswer("too few usable queries")
        return tuple(usable[:count])

    return first_usable(answer, read)


def _is_query(text: str) -> bool:
    return is_unicode(text) and has_content(text) and len(text.split()) <= _MAX_WORDS
