"""Conversion tasks: write parts of records and reject rows with reasons."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rayembed.data.hashes import text_hash
from rayembed.data.parts import ROWS_PER_PART, Part, write_part
from rayembed.data.records import Record
from rayembed.data.work_items import Result

EXAMPLES_PER_ITEM = 3
_SHOWN_CHARACTERS = 300

HELD_OUT_TEXT = "has a held-out text"
NOT_SIMILAR = "not similar"
NOT_RELEVANT = "not relevant"
NO_ENTAILMENT = "premise without entailment"
ONLY_EXAMPLE = "only example of its class"

NOT_BAD = frozenset({HELD_OUT_TEXT, NOT_SIMILAR, NOT_RELEVANT, NO_ENTAILMENT, ONLY_EXAMPLE})
"""Rejection reasons of good rows; they do not count against `max_rejected_share`."""


@dataclass(frozen=True)
class HeldOut:
    """Texts excluded from training."""

    texts: frozenset[int] = frozenset()
    """Hashes of the texts that an evaluation may show."""

    def touches(self, record: Record) -> bool:
        """Whether any of the record's texts is held out."""
        texts = [record.query, *record.positives, *(n.text for n in record.negatives)]
        return bool(self.texts) and any(text_hash(text.strip()) in self.texts for text in texts)


class RecordWriter:
    """Collects one task's records and rejections; writes a part whenever it is full."""

    def __init__(self, folder: str, held_out: HeldOut) -> None:
        self.folder, self.held_out = folder, held_out
        self.waiting: list[Record] = []
        self.parts: list[Part] = []
        self.rows_used = 0
        self.rejected: dict[str, int] = {}
        self.examples: list[dict[str, str]] = []

    def take(self, records: Sequence[Record], shown: Any, rows: int = 1) -> None:
        """Add the records made from `rows` rows, unless one has a held-out text."""
        if any(map(self.held_out.touches, records)):
            self.reject(HELD_OUT_TEXT, shown, rows)
            return
        self.rows_used += rows
        for record in records:
            self.waiting.append(record)
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
            "examples": self.examples,
            "parts": [[part.name, part.rows] for part in self.parts],
        }

    def _flush(self) -> None:
        if self.waiting:
            self.parts.append(write_part(self.folder, self.waiting))
            self.waiting = []
