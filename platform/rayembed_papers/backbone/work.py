"""The contract of every kind of task: rows to inputs, inputs to batches, outputs to scores."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from rayembed_papers.backbone.metrics import Metrics
from rayembed_papers.backbone.tokens import Feature

Row = tuple[Any, ...]
"""Cells in the order of the kind's columns."""

Batch = dict[str, Any]

Output = dict[str, np.ndarray]
"""Outputs of the model for one input, by name, padding included."""

Predict = Callable[[Sequence[Feature], Callable[[Sequence[Feature]], Batch]], list[Output]]
"""Function from inputs and a collator of batches to outputs in the order of the inputs."""


class Work(Protocol):
    """A kind of task, with the finetuning's labels and tokenizer."""

    def training_inputs(self, rows: Sequence[Row]) -> list[Feature]:
        """Inputs with labels."""
        ...

    def collate(self, features: Sequence[Feature]) -> Batch:
        """Arguments of the model for inputs; with labels where the inputs have them."""
        ...

    def score(
        self, predict: Predict, task: str, rows: Mapping[str, Sequence[Row]]
    ) -> dict[str, Metrics]:
        """Metrics by subset."""
        ...
