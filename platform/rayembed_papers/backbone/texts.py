"""Texts and pairs of texts: classes, scores, and the choice among continuations."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rayembed_papers.backbone.metrics import Metrics, class_metrics, correlation_metrics
from rayembed_papers.backbone.tasks import Finetuning
from rayembed_papers.backbone.tokens import Feature, Tokenizer
from rayembed_papers.backbone.work import Batch, Predict, Row


@dataclass(frozen=True)
class TextWork:
    """One or two texts and the number of a class, or a number (`score`)."""

    finetuning: Finetuning
    tokenizer: Tokenizer

    def training_inputs(self, rows: Sequence[Row]) -> list[Feature]:
        """Inputs with labels."""
        return _labelled(self._inputs(rows), rows)

    def collate(self, features: Sequence[Feature]) -> Batch:
        """Tokens, and `labels` (B,): int64, or float32 of scores."""
        batch: Batch = self.tokenizer.padded(features)
        if "labels" in features[0]:
            dtype = torch.float32 if self.finetuning.kind == "score" else torch.long
            batch["labels"] = torch.tensor([f["labels"] for f in features], dtype=dtype)
        return batch

    def score(
        self, predict: Predict, task: str, rows: Mapping[str, Sequence[Row]]
    ) -> dict[str, Metrics]:
        """Metrics by subset."""
        return {subset: self._score(predict, some) for subset, some in rows.items()}

    def _score(self, predict: Predict, rows: Sequence[Row]) -> Metrics:
        logits = np.stack([o["logits"] for o in predict(self._inputs(rows), self.collate)])
        true = [row[-1] for row in rows]
        if self.finetuning.kind == "score":
            return correlation_metrics(logits[:, 0], true)
        return class_metrics(logits.argmax(axis=1), true, len(self.finetuning.labels))

    def _inputs(self, rows: Sequence[Row]) -> list[Feature]:
        columns = [[row[place] for row in rows] for place in range(len(rows[0]) - 1)]
        return self.tokenizer.texts(columns[0], columns[1] if len(columns) > 1 else None)


@dataclass(frozen=True)
class ChoiceWork:
    """A premise with a question, and which of several texts goes on from it."""

    finetuning: Finetuning
    tokenizer: Tokenizer

    def training_inputs(self, rows: Sequence[Row]) -> list[Feature]:
        """Inputs with labels."""
        return _labelled(self._inputs(rows), rows)

    def collate(self, features: Sequence[Feature]) -> Batch:
        """Tokens (B, C, T), and `labels` (B,)."""
        flat = [choice for feature in features for choice in feature["choices"]]
        padded = self.tokenizer.padded(flat)
        batch: Batch = {name: v.view(len(features), -1, v.shape[1]) for name, v in padded.items()}
        if "labels" in features[0]:
            batch["labels"] = torch.tensor([f["labels"] for f in features])
        return batch

    def score(
        self, predict: Predict, task: str, rows: Mapping[str, Sequence[Row]]
    ) -> dict[str, Metrics]:
        """Metrics by subset."""
        found = {}
        for subset, some in rows.items():
            outputs = predict(self._inputs(some), self.collate)
            guess = [int(output["logits"].argmax()) for output in outputs]
            right = [float(a == row[-1]) for a, row in zip(guess, some, strict=True)]
            found[subset] = {"accuracy": float(np.mean(right))}
        return found

    def _inputs(self, rows: Sequence[Row]) -> list[Feature]:
        template, num_choices = self.finetuning.template, len(rows[0]) - 3
        premises = [template.format(premise=row[0], question=row[1]) for row in rows]
        flat = self.tokenizer.texts(
            [premise for premise in premises for _ in range(num_choices)],
            [choice for row in rows for choice in row[2:-1]],
        )
        cut = range(0, len(flat), num_choices)
        choices = [flat[place : place + num_choices] for place in cut]
        # The longest stands for the row where rows are sorted by length.
        return [
            {"choices": some, "input_ids": max((c["input_ids"] for c in some), key=len)}
            for some in choices
        ]


def _labelled(features: list[Feature], rows: Sequence[Row]) -> list[Feature]:
    """The features of the rows, each with the last of its row's values as label."""
    for feature, row in zip(features, rows, strict=True):
        feature["labels"] = row[-1]
    return features
