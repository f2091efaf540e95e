"""Conversion tasks: write parts of records and reject rows with reasons."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from rayembed.assets.resolver import resolve
from rayembed.config.data import DatasetConfig
from rayembed.config.sources import WikipediaSource
from rayembed.data.hashes import text_hash
from rayembed.data.parts import ROWS_PER_PART, Part, write_part
from rayembed.data.records import Record
from rayembed.data.sources.wikipedia import Article, held_out_texts, held_out_titles, read_articles
from rayembed.data.sources.wikipedia_records import Examples, convert, examples_of
from rayembed.data.work_items import Result

EXAMPLES_PER_ITEM = 3
_SHOWN_CHARACTERS = 300

HELD_OUT_TITLE = "held-out title"
HELD_OUT_TEXT = "has a held-out text"
HELD_OUT_ROW = "held out"
NOT_SIMILAR = "not similar"
NOT_RELEVANT = "not relevant"
NO_ENTAILMENT = "premise without entailment"
ONLY_EXAMPLE = "only example of its class"

NOT_BAD = frozenset(
    {
        *(HELD_OUT_TITLE, HELD_OUT_TEXT, HELD_OUT_ROW),
        *(NOT_SIMILAR, NOT_RELEVANT, NO_ENTAILMENT, ONLY_EXAMPLE),
    }
)
"""Rejection reasons of good rows; they do not count against `max_rejected_share`."""


@dataclass(frozen=True)
class HeldOutRows:
    """Rows of one data set that are held out, known by their texts, wherever a row stands."""

    documents: frozenset[int]
    """Hashes of the held-out documents."""
    queries: frozenset[int] | None = None
    """Hashes of the held-out queries; None: every query of a held-out document."""

    def has(self, record: Record) -> bool:
        """Whether the record's row is held out: a positive is, and so is the query."""
        if self.queries is not None and text_hash(record.query.strip()) not in self.queries:
            return False
        return any(text_hash(text.strip()) in self.documents for text in record.positives)


@dataclass(frozen=True)
class HeldOut:
    """Articles, rows and texts excluded from training."""

    titles: frozenset[str] = frozenset()
    texts: frozenset[int] = frozenset()
    """Hashes of the texts that an evaluation may show."""
    rows: HeldOutRows | None = None
    """Held-out rows of the data set that is converted."""

    def touches(self, record: Record) -> bool:
        """Whether the record's query or one of its positives is held out."""
        return bool(self.texts) and any(map(self._has, (record.query, *record.positives)))

    def without_negatives(self, record: Record) -> tuple[Record, int]:
        """The record without held-out negatives, and how many these were.

        A row is worth more than one of its negatives: with seven of each and a tenth of the
        documents held out, half of all rows have a held-out one.
        """
        if not self.texts or not record.negatives:
            return record, 0
        kept = tuple(negative for negative in record.negatives if not self._has(negative.text))
        lost = len(record.negatives) - len(kept)
        return (replace(record, negatives=kept) if lost else record), lost

    def _has(self, text: str) -> bool:
        return text_hash(text.strip()) in self.texts


def hold_out(articles: Iterable[Sequence[Article]], num_titles: int, seed: int) -> HeldOut:
    """Held-out articles and texts of the given sources, each with `num_titles` of its own."""
    sources = list(articles)
    titles = frozenset[str]().union(*(held_out_titles(s, num_titles, seed) for s in sources))
    texts = frozenset[str]().union(*(held_out_texts(s, titles) for s in sources))
    return HeldOut(titles, frozenset(text_hash(text) for text in texts))


@dataclass(frozen=True)
class ArticleRange:
    """Articles of a source by position in the file."""

    first: int
    last: int

    @property
    def key(self) -> str:
        """Unique name from the range."""
        return f"{self.first}-{self.last}"


@dataclass(frozen=True)
class ConvertArticles:
    """Task: convert a range of articles."""

    folder: str
    reference: str
    content: str
    """Content fingerprint of the file; a process that read an older version reads it again."""
    dataset: DatasetConfig
    seed: int
    held_out: HeldOut

    def __call__(self, item: ArticleRange) -> Result:
        """Report `parts`, counts and examples of rejected articles."""
        articles = _articles(resolve(self.reference), self.content)
        examples = self._examples(articles)
        translations = self._translations()
        writer = RecordWriter(self.folder, self.held_out)
        for article in articles[item.first : item.last]:
            if article.title in self.held_out.titles:
                writer.reject(HELD_OUT_TITLE, article.title)
                continue
            made = convert(article, self.dataset, self.seed, examples, translations)
            if isinstance(made, str):
                writer.reject(made, article.title)
            else:
                writer.take([replace(made, origin=(article.title,))], article.title)
        return writer.finish()

    def _translations(self) -> Mapping[str, Article]:
        source = self.dataset.source
        assert isinstance(source, WikipediaSource)
        if source.translations is None:
            return {}
        return {a.title: a for a in _articles(resolve(source.translations), self.content)}

    def _examples(self, articles: Sequence[Article]) -> Examples | None:
        source = self.dataset.source
        assert isinstance(source, WikipediaSource)
        if source.pairs != "topic":
            return None
        training = [a for a in articles if a.title not in self.held_out.titles]
        return examples_of(training, source, self.held_out.texts)


class RecordWriter:
    """Collects one task's records and rejections; writes a part whenever it is full."""

    def __init__(self, folder: str, held_out: HeldOut) -> None:
        self.folder, self.held_out = folder, held_out
        self.waiting: list[Record] = []
        self.parts: list[Part] = []
        self.rows_used = 0
        self.rejected: dict[str, int] = {}
        self.negatives_held_out = 0
        self.examples: list[dict[str, str]] = []

    def take(self, records: Sequence[Record], shown: Any, rows: int = 1) -> None:
        """Add the records made from `rows` rows, unless the row or one of its texts is held out;
        of the negatives only those that are held out are left out.
        """
        own = self.held_out.rows
        if own is not None and own.has(records[0]):
            self.reject(HELD_OUT_ROW, shown, rows)
            return
        if any(map(self.held_out.touches, records)):
            self.reject(HELD_OUT_TEXT, shown, rows)
            return
        self.rows_used += rows
        for record in records:
            kept, lost = self.held_out.without_negatives(record)
            self.negatives_held_out += lost
            self.waiting.append(kept)
            if len(self.waiting) == ROWS_PER_PART:
                self._flush()

    def reject(self, reason: str, shown: Any, rows: int = 1) -> None:
        """Count rows as rejected, keeping some examples."""
        self.rejected[reason] = self.rejected.get(reason, 0) + rows
        seen = sum(example["reason"] == reason for example in self.examples)
        if seen < EXAMPLES_PER_ITEM:
            text = str(shown)[:_SHOWN_CHARACTERS].encode("utf-8", "replace").decode()
            self.examples.append({"reason": reason, "row": text})

    def finish(self) -> Result:
        """Write the rest; `parts`, counts and examples of rejected rows."""
        self._flush()
        return {
            "rows_in": self.rows_used + sum(self.rejected.values()),
            "rows_used": self.rows_used,
            "rows_out": sum(part.rows for part in self.parts),
            "rejected": self.rejected,
            "negatives_held_out": self.negatives_held_out,
            "examples": self.examples,
            "parts": [[part.name, part.rows] for part in self.parts],
        }

    def _flush(self) -> None:
        if self.waiting:
            self.parts.append(write_part(self.folder, self.waiting))
            self.waiting = []


@lru_cache(maxsize=4)
def _articles(path: Path, content: str) -> tuple[Article, ...]:
    return tuple(read_articles(path))
