"""Count what a synthesis accepts and rejects, for its manifest and audit page."""

from collections import Counter, defaultdict
from itertools import zip_longest
from typing import Any

import numpy as np

from rayembed.data.engine.work_items import EXAMPLES_KEPT
from rayembed.data.hashes import text_hash
from rayembed.data.records import Record
from rayembed_extras.synthesis.answers import count_words
from rayembed_extras.synthesis.requests import ChatAnswer
from rayembed_extras.synthesis.settings import PairKind

_QUANTILES = {"least": 0.0, "median": 0.5, "p90": 0.9, "most": 1.0}


class Audit:
    """Running counts of examples, records and rejections, a few numbers for each record."""

    def __init__(self) -> None:
        self._counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
        """Entry of the manifest → kind, reason or language → number."""
        self._words: defaultdict[str, list[int]] = defaultdict(list)
        self._examples: defaultdict[str, list[tuple[int, str, dict[str, Any]]]] = defaultdict(list)

    @property
    def rejected(self) -> Counter[str]:
        """Reason → number of rejected examples, over all kinds of pairs."""
        return self._counts["rejected"]

    @property
    def rows_in(self) -> int:
        """Number of requested examples."""
        return self._counts["asked"].total()

    @property
    def duplicates(self) -> int:
        """Number of duplicate records."""
        return self._counts["duplicates"].total()

    @property
    def records_made(self) -> int:
        """Number of records, including duplicates."""
        return self._counts["records"].total() + self.duplicates

    def count_tries(self, kind: PairKind, failed: list[str], answers: list[ChatAnswer]) -> None:
        """Count a requested example, with the failure reasons and token costs of its requests."""
        self._counts["asked"][kind] += 1
        self._counts["failed_tries"].update(failed)
        self._counts["tokens"]["prompt"] += sum(answer.prompt_tokens for answer in answers)
        self._counts["tokens"]["answer"] += sum(answer.answer_tokens for answer in answers)

    def reject(self, kind: PairKind, reason: str) -> None:
        """Count an example for which no answer was usable."""
        self.rejected[reason] += 1
        self._counts["rejected_by_kind"][f"{kind}: {reason}"] += 1

    def duplicate(self, kind: PairKind) -> None:
        """Count a duplicate record."""
        self._counts["duplicates"][kind] += 1

    def keep(self, kind: PairKind, record: Record) -> None:
        """Count a kept record."""
        self._counts["records"][kind] += 1
        self._counts["languages"][str(record.language)] += 1
        texts = {
            "query": [record.query],
            "positive": list(record.positives),
            "negative": [negative.text for negative in record.negatives],
        }
        for role, found in texts.items():
            self._words[f"{kind} {role}"].extend(map(count_words, found))
        shown = {
            "id": record.id,
            "task": record.query_instruction,
            "query": record.query,
            "positive": record.positives[0],
            "negatives": texts["negative"],
        }
        # Those with the smallest hashes: a sample that depends only on the records.
        held = [*self._examples[kind], (text_hash(record.id), record.id, shown)]
        self._examples[kind] = sorted(held)[:EXAMPLES_KEPT]

    def examples(self) -> list[dict[str, Any]]:
        """Return twenty example records, spread over all kinds of pairs."""
        turns = zip_longest(*(held for _, held in sorted(self._examples.items())))
        shown = [one[2] for turn in turns for one in turn if one is not None]
        return shown[:EXAMPLES_KEPT]

    def numbers(self) -> dict[str, Any]:
        """Return the counts for the manifest; lengths are in words."""
        names = ("asked", "rejected_by_kind", "duplicates", "records", "failed_tries", "languages")
        return {
            **{name: dict(sorted(self._counts[name].items())) for name in names},
            "words": {name: _spread(words) for name, words in self._words.items()},
            "tokens": dict(self._counts["tokens"]),
        }


def _spread(words: list[int]) -> dict[str, int]:
    values = np.quantile(words, list(_QUANTILES.values()), method="nearest")
    return {name: int(value) for name, value in zip(_QUANTILES, values, strict=True)}
