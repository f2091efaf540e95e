"""Questions whose answer is a span of a context (SQuAD and its translations)."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rayembed_papers.backbone.metrics import Metrics, answer_metrics
from rayembed_papers.backbone.tasks import Finetuning
from rayembed_papers.backbone.tokens import Feature, Tokenizer
from rayembed_papers.backbone.work import Batch, Output, Predict, Row

STRIDE = 128
"""Tokens that two windows of a long context share."""

_BEST = 20
_LONGEST_ANSWER = 30
"""Tokens; as in transformers' example and the paper's pipeline."""


@dataclass(frozen=True)
class SpanWork:
    """Long contexts are read in windows that overlap; the best span of all windows is the answer.

    In training, a window without the answer asks for the first token.
    """

    finetuning: Finetuning
    tokenizer: Tokenizer

    def training_inputs(self, rows: Sequence[Row]) -> list[Feature]:
        """Windows with the first and last token of the answer."""
        made = self._windows(rows)
        for feature in made:
            answers = rows[feature["row"]][2]
            begin = int(answers["answer_start"][0])
            end = begin + len(answers["text"][0])
            feature["start"], feature["end"] = _tokens_of(feature["offsets"], begin, end)
        return made

    def collate(self, features: Sequence[Feature]) -> Batch:
        """Tokens, and `start_positions` and `end_positions` (B,) in training."""
        batch: Batch = self.tokenizer.padded(features)
        if "start" in features[0]:
            batch["start_positions"] = torch.tensor([f["start"] for f in features])
            batch["end_positions"] = torch.tensor([f["end"] for f in features])
        return batch

    def score(
        self, predict: Predict, task: str, rows: Mapping[str, Sequence[Row]]
    ) -> dict[str, Metrics]:
        """Metrics by subset."""
        found = {}
        for subset, some in rows.items():
            windows = self._windows(some)
            outputs = predict(windows, self.collate)
            best: dict[int, tuple[float, str]] = defaultdict(lambda: (-np.inf, ""))
            for window, output in zip(windows, outputs, strict=True):
                number = window["row"]
                here = _best_span(output, window["offsets"], some[number][1])
                best[number] = max(best[number], here, key=lambda found: found[0])
            told = [best[number][1] for number in range(len(some))]
            found[subset] = answer_metrics(told, [row[2]["text"] for row in some])
        return found

    def _windows(self, rows: Sequence[Row]) -> list[Feature]:
        """Inputs with `row`, and `offsets` (T, 2) in the context, -1 where a token is not of it."""
        room = self.tokenizer.max_length // 3
        encoded = self.tokenizer.encode(
            [row[0].lstrip() for row in rows],
            [row[1] for row in rows],
            truncation="only_second",
            stride=min(STRIDE, room),
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
        )
        made = self.tokenizer.features(encoded)
        for number, feature in enumerate(made):
            feature["row"] = encoded["overflow_to_sample_mapping"][number]
            of_context = np.array([part == 1 for part in encoded.sequence_ids(number)])
            offsets = np.array(encoded["offset_mapping"][number], dtype=np.int32)
            feature["offsets"] = np.where(of_context[:, None], offsets, -1)
        return made


def _tokens_of(offsets: np.ndarray, begin: int, end: int) -> tuple[int, int]:
    """First and last token of the characters; both 0 where the window does not hold them all."""
    inside = np.flatnonzero(offsets[:, 0] >= 0)
    if not len(inside) or offsets[inside[0], 0] > begin or offsets[inside[-1], 1] < end:
        return 0, 0
    first = inside[offsets[inside, 0] <= begin][-1]
    last = inside[offsets[inside, 1] >= end][0]
    return int(first), int(last)


def _best_span(output: Output, offsets: np.ndarray, context: str) -> tuple[float, str]:
    """The score and the text of the best span of a window."""
    length = len(offsets)
    start, end = output["start_logits"][:length], output["end_logits"][:length]
    best = (-np.inf, "")
    for first, last in _candidates(start, end, offsets):
        score = float(start[first] + end[last])
        if score > best[0]:
            best = (score, context[offsets[first, 0] : offsets[last, 1]])
    return best


def _candidates(
    start: np.ndarray, end: np.ndarray, offsets: np.ndarray
) -> Iterator[tuple[Any, Any]]:
    """Spans of the context among the best first and last tokens."""
    for first in np.argsort(-start)[:_BEST]:
        for last in np.argsort(-end)[:_BEST]:
            of_context = offsets[first, 0] >= 0 and offsets[last, 0] >= 0
            if of_context and first <= last < first + _LONGEST_ANSWER:
                yield first, last
