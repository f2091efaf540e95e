"""Words and their tags: parts of speech, names."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rayembed_papers.backbone.heads import IGNORED
from rayembed_papers.backbone.metrics import Metrics, tag_metrics
from rayembed_papers.backbone.tasks import Finetuning
from rayembed_papers.backbone.tokens import Feature, Tokenizer
from rayembed_papers.backbone.work import Batch, Predict, Row


@dataclass(frozen=True)
class TagWork:
    """A tag is learnt and told by the first token of its word; words beyond the maximum length
    count neither here nor in the paper's pipeline.
    """

    finetuning: Finetuning
    tokenizer: Tokenizer

    def training_inputs(self, rows: Sequence[Row]) -> list[Feature]:
        """Inputs with labels of tokens."""
        encoded = self.tokenizer.encode(
            [row[0] for row in rows], is_split_into_words=True, truncation=True
        )
        made = self.tokenizer.features(encoded)
        for number, (feature, row) in enumerate(zip(made, rows, strict=True)):
            feature["labels"] = _labels(encoded.word_ids(number), row[1])
        return made

    def collate(self, features: Sequence[Feature]) -> Batch:
        """Tokens and `labels` (B, T)."""
        batch: Batch = self.tokenizer.padded(features)
        batch["labels"] = self.tokenizer.padded_labels(features, batch["input_ids"].shape[1])
        return batch

    def score(
        self, predict: Predict, task: str, rows: Mapping[str, Sequence[Row]]
    ) -> dict[str, Metrics]:
        """Metrics by subset."""
        found = {}
        for subset, some in rows.items():
            inputs = self.training_inputs(some)
            outputs = predict(inputs, self.collate)
            guess, true = [], []
            for feature, output in zip(inputs, outputs, strict=True):
                labels = feature["labels"]
                counted = labels != IGNORED
                told = output["logits"][: len(labels)].argmax(axis=-1)
                guess.append(self._names(told[counted]))
                true.append(self._names(labels[counted]))
            found[subset] = tag_metrics(guess, true)
        return found

    def _names(self, numbers: np.ndarray) -> list[str]:
        return [self.finetuning.labels[number] for number in numbers]


def _labels(words: Sequence[int | None], tags: Sequence[Any]) -> np.ndarray:
    """(T,) the tag of each word at its first token."""
    labels = np.full(len(words), IGNORED, dtype=np.int64)
    before: int | None = None
    for place, word in enumerate(words):
        if word is not None and word != before:
            labels[place] = tags[word]
        before = word
    return labels
