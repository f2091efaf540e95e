"""The numbers of a synthesis for its manifest, and the page that a person reads."""

import heapq
from collections import Counter
from collections.abc import Mapping
from html import escape
from typing import Any

import numpy as np

from rayembed.config.synthesis import PairKind, SynthesisRun
from rayembed.data.hashes import text_hash
from rayembed.data.prepared import EXAMPLES_KEPT
from rayembed.data.records import Record
from rayembed.data.synthesis.answers import count_words
from rayembed.data.synthesis.requests import Answer

_QUANTILES = {"least": 0.0, "median": 0.5, "p90": 0.9, "most": 1.0}


class Audit:
    """Counts while records are made, a few numbers a record."""

    def __init__(self) -> None:
        self.rejected: Counter[str] = Counter()
        """Reason → examples, all kinds together."""
        self._asked: Counter[str] = Counter()
        self._kept: Counter[str] = Counter()
        self._duplicates: Counter[str] = Counter()
        self._rejected: dict[str, Counter[str]] = {}
        self._failed_tries: Counter[str] = Counter()
        self._tokens: Counter[str] = Counter()
        self._words: dict[tuple[str, str], list[int]] = {}
        self._languages: Counter[str] = Counter()
        self._examples: dict[str, list[tuple[int, str, dict[str, Any]]]] = {}

    @property
    def rows_in(self) -> int:
        """Examples asked for."""
        return self._asked.total()

    @property
    def duplicates(self) -> int:
        """Records that repeat others."""
        return self._duplicates.total()

    @property
    def records_made(self) -> int:
        """Records, those that repeat others too."""
        return self._kept.total() + self.duplicates

    def count_try(self, kind: PairKind, failed: list[str], answer: Answer | None) -> None:
        """Count an example that was asked for: the reasons of its failed tries, its last answer."""
        self._asked[kind] += 1
        self._failed_tries.update(failed)
        if answer is not None:
            self._tokens["prompt"] += answer.prompt_tokens
            self._tokens["answer"] += answer.answer_tokens

    def reject(self, kind: PairKind, reason: str) -> None:
        """Count an example that has no usable answer."""
        self.rejected[reason] += 1
        self._rejected.setdefault(kind, Counter())[reason] += 1

    def duplicate(self, kind: PairKind) -> None:
        """Count a record that repeats another."""
        self._duplicates[kind] += 1

    def keep(self, kind: PairKind, record: Record) -> None:
        """Count a record that stays."""
        self._kept[kind] += 1
        self._languages[str(record.language)] += 1
        texts = {
            "query": [record.query],
            "positive": list(record.positives),
            "negative": [negative.text for negative in record.negatives],
        }
        for role, found in texts.items():
            self._words.setdefault((kind, role), []).extend(map(count_words, found))
        self._draw(kind, record)

    def _draw(self, kind: PairKind, record: Record) -> None:
        """Hold the records of the smallest hashes: a draw that only the records decide."""
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
        """Twenty records to read, of all kinds alike."""
        ordered = [
            [shown for _, _, shown in sorted(held, key=lambda item: (-item[0], item[1]))]
            for _, held in sorted(self._examples.items())
        ]
        turns = (held[i] for i in range(EXAMPLES_KEPT) for held in ordered if i < len(held))
        return [shown for shown, _ in zip(turns, range(EXAMPLES_KEPT), strict=False)]

    def numbers(self) -> dict[str, Any]:
        """Further entries of the manifest; lengths in words."""
        return {
            "kinds": {
                kind: {
                    "asked": asked,
                    "records": self._kept[kind],
                    "duplicates": self._duplicates[kind],
                    "rejected": dict(sorted(self._rejected.get(kind, Counter()).items())),
                    "words": {
                        role: _spread(words)
                        for (of, role), words in self._words.items()
                        if of == kind
                    },
                }
                for kind, asked in sorted(self._asked.items())
            },
            "failed_tries": dict(sorted(self._failed_tries.items())),
            "languages": dict(sorted(self._languages.items())),
            "tokens": {name: self._tokens[name] for name in ("prompt", "answer")},
        }


def _spread(words: list[int]) -> dict[str, int]:
    values = np.quantile(words, list(_QUANTILES.values()), method="nearest")
    return {name: int(value) for name, value in zip(_QUANTILES, values, strict=True)}


_STYLE = (
    "body{font:15px/1.5 sans-serif;max-width:60em;margin:2em auto;padding:0 1em}"
    "table{border-collapse:collapse}td,th{border:1px solid #bbb;padding:.2em .6em;text-align:left;"
    "vertical-align:top}td.n{text-align:right}article{border-top:1px solid #bbb;padding:1em 0}"
    "p{white-space:pre-wrap;margin:.3em 0}b{display:inline-block;min-width:6em}"
)


def audit_page(run: SynthesisRun, result: Mapping[str, Any], more: Mapping[str, Any]) -> str:
    """HTML of the numbers and the examples. All texts are escaped: a model wrote them.

    Args:
        run: what was asked for.
        result: rows in, rows out, rejected, examples.
        more: as `Audit.numbers`, with `tasks` and `dropped`.
    """
    kinds = [
        [
            kind,
            more["tasks"][kind]["tasks"],
            numbers["asked"],
            sum(numbers["rejected"].values()),
            numbers["duplicates"],
            numbers["records"],
        ]
        for kind, numbers in more["kinds"].items()
    ]
    words = [
        [kind, role, *spread.values()]
        for kind, numbers in more["kinds"].items()
        for role, spread in numbers["words"].items()
    ]
    counts = {"Examples rejected": result["rejected"], "Tries failed": more["failed_tries"]}
    parts = [
        f"<h1>Synthetic pairs: {escape(run.name)}</h1>",
        f"<p>Written by {escape(run.synthesis.llm.model)}, seed {run.seed}.</p>",
        _table(["Kind", "Tasks", "Asked", "Rejected", "Repeated", "Records"], kinds),
        *(f"<h2>{title}</h2>{_reasons(found)}" for title, found in counts.items()),
        "<h2>Lengths in words</h2>",
        _table(["Kind", "Text", *_QUANTILES], words),
        "<h2>Examples</h2>",
        *map(_example, result["examples"]),
    ]
    head = f"<meta charset=utf-8><title>{escape(run.name)}</title><style>{_STYLE}</style>"
    return f"<!doctype html><html lang=en><head>{head}</head><body>{''.join(parts)}</body></html>\n"


def _reasons(found: Mapping[str, int]) -> str:
    ordered = sorted(found.items(), key=lambda item: (-item[1], item[0]))
    return _table(["Reason", "Number"], [list(item) for item in ordered]) if ordered else "none"


def _table(head: list[str], rows: list[list[Any]]) -> str:
    names = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    return f"<table><tr>{names}</tr>{body}</table>"


def _cell(value: Any) -> str:
    if isinstance(value, int):
        return f"<td class=n>{value:,}</td>"
    return f"<td>{escape(str(value))}</td>"


def _example(shown: Mapping[str, Any]) -> str:
    texts = [
        ("task", shown["task"]),
        ("query", shown["query"]),
        ("positive", shown["positive"]),
        *(("negative", text) for text in shown["negatives"]),
    ]
    lines = "".join(f"<p><b>{role}</b> {escape(text)}</p>" for role, text in texts)
    return f"<article>{lines}</article>"
