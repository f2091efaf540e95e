"""Statistics of a synthesis for its manifest and audit."""

import heapq
from collections import Counter
from typing import Any

import numpy as np

from rayembed.data.engine.work_items import EXAMPLES_KEPT
from rayembed.data.hashes import text_hash
from rayembed.data.records import Record
from rayembed_extras.synthesis.answers import count_words
from rayembed_extras.synthesis.requests import Answer
from rayembed_extras.synthesis.settings import PairKind

_QUANTILES = {"least": 0.0, "median": 0.5, "p90": 0.9, "most": 1.0}


class Audit:
    """Running counts while records are made, a few numbers a record."""

    def __init__(self) -> None:
        self.rejected: Counter[str] = Counter()
        """Reason → number of examples, over all kinds."""
        self._asked: Counter[str] = Counter()
        self._kept: Counter[str] = Counter()
        self._duplicates: Counter[str] = Counter()
        self._rejected: dict[str, Counter[str]] = {}
        self._failed_tries: Counter[str] = Counter()
        self._tokens: Counter[str] = Counter()
        self._words: dict[str, list[int]] = {}
        self._languages: Counter[str] = Counter()
        self._examples: dict[str, list[tuple[int, str, dict[str, Any]]]] = {}

    @property
    def rows_in(self) -> int:
        """Number of requested examples."""
        return self._asked.total()

    @property
    def duplicates(self) -> int:
        """Number of duplicate records."""
        return self._duplicates.total()

    @property
    def records_made(self) -> int:
        """Number of records, including duplicates."""
        return self._kept.total() + self.duplicates

    def count_tries(self, kind: PairKind, failed: list[str], answers: list[Answer]) -> None:
        """Count a requested example: failure reasons and token costs of its tries."""
        self._asked[kind] += 1
        self._failed_tries.update(failed)
        self._tokens["prompt"] += sum(answer.prompt_tokens for answer in answers)
        self._tokens["answer"] += sum(answer.answer_tokens for answer in answers)

    def reject(self, kind: PairKind, reason: str) -> None:
        """Count an example without usable answer."""
        self.rejected[reason] += 1
        self._rejected.setdefault(kind, Counter())[reason] += 1

    def duplicate(self, kind: PairKind) -> None:
        """Count a duplicate record."""
        self._duplicates[kind] += 1

    def keep(self, kind: PairKind, record: Record) -> None:
        """Count a kept record."""
        self._kept[kind] += 1
        self._languages[str(record.language)] += 1
        texts = {
            "query": [record.query],
            "positive": list(record.positives),
            "negative": [negative.text for negative in record.negatives],
        }
        for role, found in texts.items():
            self._words.setdefault(f"{kind} {role}", []).extend(map(count_words, found))
        self._draw(kind, record)

    def _draw(self, kind: PairKind, record: Record) -> None:
        """Keep the records with the smallest hashes: a sample that depends only on the records."""
        shown = {
            "id": record.id,
            "task": record.query_instruction,
            "query": record.query,
            "positive": record.positives[0],
            "negatives": [negative.text for negative in record.negatives],
        }
        held = self._examples.setdefault(kind, [])
        heapq.heappush(held, (-text_hash(record.id), record.id, shown))
        if len(held) > EXAMPLES_KEPT:
            heapq.heappop(held)

    def examples(self) -> list[dict[str, Any]]:
        """Twenty example records, spread over all kinds."""
        ordered = [
            [shown for _, _, shown in sorted(held, key=lambda item: (-item[0], item[1]))]
            for _, held in sorted(self._examples.items())
        ]
        turns = (held[i] for i in range(EXAMPLES_KEPT) for held in ordered if i < len(held))
        return [shown for shown, _ in zip(turns, range(EXAMPLES_KEPT), strict=False)]

    def numbers(self) -> dict[str, Any]:
        """Additional manifest entries; lengths in words."""
        return {
            "asked": dict(sorted(self._asked.items())),
            "rejected_by_kind": {
                f"{kind}: {reason}": count
                for kind, reasons in sorted(self._rejected.items())
                for reason, count in sorted(reasons.items())
            },
            "duplicates": dict(sorted(self._duplicates.items())),
            "records": dict(sorted(self._kept.items())),
            "failed_tries": dict(sorted(self._failed_tries.items())),
            "words": {name: _spread(words) for name, words in self._words.items()},
            "languages": dict(sorted(self._languages.items())),
            "tokens": {name: self._tokens[name] for name in ("prompt", "answer")},
        }


def _spread(words: list[int]) -> dict[str, int]:
    values = np.quantile(words, list(_QUANTILES.values()), method="nearest")
    return {name: int(value) for name, value in zip(_QUANTILES, values, strict=True)}
