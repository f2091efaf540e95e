"""Queries and the documents that answer them, by the vectors of their first tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rayembed.search.exact import top_k
from rayembed_papers.backbone.metrics import Metrics, ranking_metrics
from rayembed_papers.backbone.tasks import Finetuning
from rayembed_papers.backbone.tokens import Feature, Tokenizer
from rayembed_papers.backbone.work import Batch, Predict, Row

QUERY_LENGTH = 96
"""Tokens of a query; documents have the protocol's length."""

_DEPTH = 20

_SEARCHED_TOGETHER = ("LAReQA",)
"""Tasks whose queries of one language are searched for among the documents of all."""


@dataclass(frozen=True)
class RetrievalWork:
    """A dual encoder; the documents of a task are all that its rows have, each once."""

    finetuning: Finetuning
    tokenizer: Tokenizer

    def training_inputs(self, rows: Sequence[Row]) -> list[Feature]:
        """Queries with their documents; the document's tokens stand for the row's length."""
        queries = self._queries([row[0] for row in rows])
        documents = self.tokenizer.texts([row[1] for row in rows])
        return [
            {"query": query, "document": document, "input_ids": document["input_ids"]}
            for query, document in zip(queries, documents, strict=True)
        ]

    def collate(self, features: Sequence[Feature]) -> Batch:
        """`query` and `document`, each with tokens."""
        return {
            side: self.tokenizer.padded([feature[side] for feature in features])
            for side in ("query", "document")
        }

    def score(
        self, predict: Predict, task: str, rows: Mapping[str, Sequence[Row]]
    ) -> dict[str, Metrics]:
        """Metrics by subset."""
        if task in _SEARCHED_TOGETHER:
            return self._score(predict, rows)
        return {
            subset: self._score(predict, {subset: some})[subset] for subset, some in rows.items()
        }

    def _score(self, predict: Predict, rows: Mapping[str, Sequence[Row]]) -> dict[str, Metrics]:
        pairs = [row for some in rows.values() for row in some]
        numbers: dict[str, int] = {}
        for _, document in pairs:
            numbers.setdefault(document, len(numbers))
        documents = self._vectors(predict, self.tokenizer.texts(list(numbers)))
        queries = self._vectors(predict, self._queries([query for query, _ in pairs]))
        _, found = top_k(queries, [documents], min(_DEPTH, len(numbers)))
        right = {place: numbers[document] for place, (_, document) in enumerate(pairs)}
        metrics, begin = {}, 0
        for subset, some in rows.items():
            places = range(begin, begin + len(some))
            begin += len(some)
            ranked = {place: found[place].tolist() for place in places}
            metrics[subset] = ranking_metrics(ranked, {p: right[p] for p in places}, _DEPTH)
        return metrics

    def _queries(self, texts: Sequence[str]) -> list[Feature]:
        return self.tokenizer.texts(texts, length=min(QUERY_LENGTH, self.tokenizer.max_length))

    def _vectors(self, predict: Predict, inputs: Sequence[Feature]) -> np.ndarray:
        outputs = predict(inputs, lambda some: {"query": self.tokenizer.padded(some)})
        return np.stack([output["vectors"] for output in outputs])
