"""Handle each kind of task: convert rows to inputs, inputs to batches, and outputs to
scores.

B texts, C choices, T tokens, H hidden size.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rayembed.search.exact import top_k
from rayembed_papers.backbone.heads import IGNORED
from rayembed_papers.backbone.metrics import (
    Metrics,
    answer_metrics,
    class_metrics,
    correlation_metrics,
    ranking_metrics,
    tag_metrics,
)
from rayembed_papers.backbone.tasks import Finetuning, Row
from rayembed_papers.backbone.tokens import BackboneTokenizer, Feature

Batch = dict[str, Any]

Output = dict[str, np.ndarray]
"""Outputs of the model for one input, by name, padding included."""

Predict = Callable[[Sequence[Feature], Callable[[Sequence[Feature]], Batch]], list[Output]]
"""Function from inputs and a collator of batches to outputs in the order of the inputs."""

STRIDE = 128
"""Number of tokens shared by two windows of a long context."""

_BEST = 20
_LONGEST_ANSWER = 30
"""Maximum tokens of an answer, as in transformers' example and the paper's pipeline."""

QUERY_LENGTH = 96
"""Maximum tokens of a query; documents have the protocol's length."""

_DEPTH = 20

_SEARCHED_TOGETHER = ("LAReQA",)
"""Tasks whose queries in one language are searched among the documents of all languages."""


@dataclass(frozen=True)
class TaskWork:
    """Handles tasks on one or two texts with a class or a score as label; base class of the other
    kinds.
    """

    finetuning: Finetuning
    tokenizer: BackboneTokenizer

    def inputs(self, rows: Sequence[Row]) -> list[Feature]:
        """Tokenise rows into model inputs without labels."""
        columns = list(zip(*(row[:-1] for row in rows), strict=True))
        return self.tokenizer.texts(columns[0], columns[1] if len(columns) > 1 else None)

    def training_inputs(self, rows: Sequence[Row]) -> list[Feature]:
        """Tokenise rows into model inputs with labels."""
        made = self.inputs(rows)
        for feature, row in zip(made, rows, strict=True):
            feature["labels"] = row[-1]
        return made

    def padded(self, features: Sequence[Feature]) -> dict[str, Tensor]:
        """Pad inputs to a batch of tensors."""
        return self.tokenizer.padded(features)

    def collate(self, features: Sequence[Feature]) -> Batch:
        """Build the model's arguments: tokens, and labels (B,) if inputs have them, float32 scores
        or int64 classes.
        """
        batch: Batch = self.padded(features)
        if "labels" in features[0]:
            dtype = torch.float32 if self.finetuning.kind == "score" else torch.long
            batch["labels"] = torch.tensor([f["labels"] for f in features], dtype=dtype)
        return batch

    def score(
        self, predict: Predict, task: str, rows: Mapping[str, Sequence[Row]]
    ) -> dict[str, Metrics]:
        """Predict and compute the metrics of each subset of rows."""
        return {subset: self.score_subset(predict, some) for subset, some in rows.items()}

    def score_subset(self, predict: Predict, rows: Sequence[Row]) -> Metrics:
        """Predict and compute the metrics of one subset of rows."""
        logits = np.stack([o["logits"] for o in predict(self.inputs(rows), self.collate)])
        true = [row[-1] for row in rows]
        if self.finetuning.kind == "score":
            return correlation_metrics(logits[:, 0], true)
        num_classes = len(self.finetuning.labels) if self.finetuning.kind == "classes" else 0
        return class_metrics(logits.argmax(axis=1), true, num_classes)


class ChoiceWork(TaskWork):
    """Handles multiple choice: a premise with a question, and the index of the text that continues
    it.
    """

    def inputs(self, rows: Sequence[Row]) -> list[Feature]:
        """Tokenise each choice of each row; `input_ids` is the longest choice, by which rows are
        sorted.
        """
        template, num_choices = self.finetuning.template, len(rows[0]) - 3
        premises = [template.format(premise=row[0], question=row[1]) for row in rows]
        flat = self.tokenizer.texts(
            [premise for premise in premises for _ in range(num_choices)],
            [choice for row in rows for choice in row[2:-1]],
        )
        cut = range(0, len(flat), num_choices)
        choices = [flat[place : place + num_choices] for place in cut]
        return [
            {"choices": some, "input_ids": max((c["input_ids"] for c in some), key=len)}
            for some in choices
        ]

    def padded(self, features: Sequence[Feature]) -> dict[str, Tensor]:
        """Pad the choices to tensors (B, C, T)."""
        flat = self.tokenizer.padded([c for feature in features for c in feature["choices"]])
        return {name: v.view(len(features), -1, v.shape[1]) for name, v in flat.items()}


class TagWork(TaskWork):
    """Handles tagging of words; each tag is learnt and predicted at the first token of its word.
    Words beyond the maximum length are excluded, as in the paper's pipeline.
    """

    def training_inputs(self, rows: Sequence[Row]) -> list[Feature]:
        """Tokenise rows into inputs with a label for each token."""
        encoded = self.tokenizer.encode(
            [row[0] for row in rows], is_split_into_words=True, truncation=True
        )
        made = self.tokenizer.features(encoded)
        for number, (feature, row) in enumerate(zip(made, rows, strict=True)):
            feature["labels"] = _labels(encoded.word_ids(number), row[1])
        return made

    def collate(self, features: Sequence[Feature]) -> Batch:
        """Build the model's arguments: tokens and `labels` (B, T)."""
        labels = self.tokenizer.padded_values(features, "labels", IGNORED)
        return {**self.padded(features), "labels": labels}

    def score_subset(self, predict: Predict, rows: Sequence[Row]) -> Metrics:
        """Compute the F1 of spans and the accuracy of tags."""
        inputs = self.training_inputs(rows)
        guess, true = [], []
        for feature, output in zip(inputs, predict(inputs, self.collate), strict=True):
            labels = feature["labels"]
            counted = labels != IGNORED
            predicted = output["logits"][: len(labels)].argmax(axis=-1)
            guess.append(self._names(predicted[counted]))
            true.append(self._names(labels[counted]))
        return tag_metrics(guess, true)

    def _names(self, numbers: np.ndarray) -> list[str]:
        return [self.finetuning.labels[number] for number in numbers]


def _labels(words: Sequence[int | None], tags: Sequence[Any]) -> np.ndarray:
    """(T,) tag of each word, placed at its first token."""
    labels = np.full(len(words), IGNORED, dtype=np.int64)
    before: int | None = None
    for place, word in enumerate(words):
        if word is not None and word != before:
            labels[place] = tags[word]
        before = word
    return labels


class SpanWork(TaskWork):
    """Handles questions whose answer is a span of a context (SQuAD and its translations).

    Long contexts are read in windows that overlap; the best span of all windows is the answer. In
    training, a window without the answer asks for the first token.
    """

    def training_inputs(self, rows: Sequence[Row]) -> list[Feature]:
        """Cut rows into windows, each with the answer's first and last token."""
        made = self.inputs(rows)
        for feature in made:
            answers = rows[feature["row"]][2]
            begin = int(answers["answer_start"][0])
            end = begin + len(answers["text"][0])
            feature["start"], feature["end"] = _tokens_of(feature["offsets"], begin, end)
        return made

    def collate(self, features: Sequence[Feature]) -> Batch:
        """Build the model's arguments: tokens, and in training `start_positions` and
        `end_positions` (B,).
        """
        batch: Batch = self.padded(features)
        if "start" in features[0]:
            batch["start_positions"] = torch.tensor([f["start"] for f in features])
            batch["end_positions"] = torch.tensor([f["end"] for f in features])
        return batch

    def score_subset(self, predict: Predict, rows: Sequence[Row]) -> Metrics:
        """Compute F1 and exact match of the answers."""
        windows = self.inputs(rows)
        outputs = predict(windows, self.collate)
        best: dict[int, tuple[float, str]] = defaultdict(lambda: (-np.inf, ""))
        for window, output in zip(windows, outputs, strict=True):
            number = window["row"]
            here = _best_span(output, window["offsets"], rows[number][1])
            best[number] = max(best[number], here, key=lambda found: found[0])
        predicted = [best[number][1] for number in range(len(rows))]
        return answer_metrics(predicted, [row[2]["text"] for row in rows])

    def inputs(self, rows: Sequence[Row]) -> list[Feature]:
        """Cut rows into windows with their `row` and the `offsets` (T, 2) of tokens in the context,
        -1 outside of it.
        """
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
    """Find the first and last token of a character span; both 0 if the window does not contain all
    of it.
    """
    inside = np.flatnonzero(offsets[:, 0] >= 0)
    if not len(inside) or offsets[inside[0], 0] > begin or offsets[inside[-1], 1] < end:
        return 0, 0
    first = inside[offsets[inside, 0] <= begin][-1]
    last = inside[offsets[inside, 1] >= end][0]
    return int(first), int(last)


def _best_span(output: Output, offsets: np.ndarray, context: str) -> tuple[float, str]:
    """Return the score and the text of the best answer span in a window."""
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
    """Yield answer spans of the context, formed from the best first and last tokens."""
    for first in np.argsort(-start)[:_BEST]:
        for last in np.argsort(-end)[:_BEST]:
            of_context = offsets[first, 0] >= 0 and offsets[last, 0] >= 0
            if of_context and first <= last < first + _LONGEST_ANSWER:
                yield first, last


class RetrievalWork(TaskWork):
    """Handles retrieval: queries and the documents that answer them, embedded by their first
    tokens.

    The documents of a task are all that its rows have, each once.
    """

    def training_inputs(self, rows: Sequence[Row]) -> list[Feature]:
        """Tokenise queries and their documents; rows are sorted by the document's length."""
        queries = self._queries([row[0] for row in rows])
        documents = self.tokenizer.texts([row[1] for row in rows])
        return [
            {"query": query, "document": document, "input_ids": document["input_ids"]}
            for query, document in zip(queries, documents, strict=True)
        ]

    def collate(self, features: Sequence[Feature]) -> Batch:
        """Build the model's arguments: `query` and `document`, each with tokens."""
        sides = ("query", "document")
        return {side: self.padded([feature[side] for feature in features]) for side in sides}

    def score(
        self, predict: Predict, task: str, rows: Mapping[str, Sequence[Row]]
    ) -> dict[str, Metrics]:
        """Embed queries and documents and compute the metrics of each subset."""
        if task in _SEARCHED_TOGETHER:
            return self._score(predict, rows)
        found: dict[str, Metrics] = {}
        for subset, some in rows.items():
            found |= self._score(predict, {subset: some})
        return found

    def _score(self, predict: Predict, rows: Mapping[str, Sequence[Row]]) -> dict[str, Metrics]:
        pairs = [row for some in rows.values() for row in some]
        numbers: dict[str, int] = {}
        for _, document in pairs:
            numbers.setdefault(document, len(numbers))
        documents = self._vectors(predict, self.tokenizer.texts(list(numbers)))
        queries = self._vectors(predict, self._queries([query for query, _ in pairs]))
        _, found = top_k(queries, [documents], min(_DEPTH, len(numbers)))
        right = found == np.array([numbers[document] for _, document in pairs])[:, None]
        ends = np.cumsum([len(some) for some in rows.values()])
        parts = np.split(right, ends[:-1])
        return {
            subset: ranking_metrics(part, _DEPTH) for subset, part in zip(rows, parts, strict=True)
        }

    def _queries(self, texts: Sequence[str]) -> list[Feature]:
        return self.tokenizer.texts(texts, length=min(QUERY_LENGTH, self.tokenizer.max_length))

    def _vectors(self, predict: Predict, inputs: Sequence[Feature]) -> np.ndarray:
        outputs = predict(inputs, lambda some: {"query": self.padded(some)})
        return np.stack([output["vectors"] for output in outputs])


_WORKS: Mapping[str, type[TaskWork]] = {
    "choices": ChoiceWork,
    "tags": TagWork,
    "spans": SpanWork,
    "retrieval": RetrievalWork,
}


def work_of(finetuning: Finetuning, tokenizer: BackboneTokenizer) -> TaskWork:
    """Create the handler of a finetuning's kind of task."""
    return _WORKS.get(finetuning.kind, TaskWork)(finetuning, tokenizer)
