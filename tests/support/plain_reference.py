"""The global batch's loss in one process, written with loops over texts and no masks."""

from collections.abc import Sequence

import torch
from torch import Tensor

from rayembed.data.records import Record
from rayembed.models.contract import EmbeddingModel


def reference_loss(
    model: EmbeddingModel,
    records: Sequence[Record],
    *,
    temperature: float,
    num_negatives: int,
    in_batch: bool,
) -> Tensor:
    """Mean over records of -log softmax of the positive among its candidates, plus auxiliary."""
    keys = {}
    for r in records:
        keys[r.query, "query"] = None
        for text in (r.positives[0], *(n.text for n in r.negatives[:num_negatives])):
            keys[text, "document"] = None
    context = None
    if model.uses_context:
        positives = [r.positives[0] for r in records]
        context = model.embed_context(
            model.tokenizer.collate(model.tokenizer(positives, "document"))
        )
    vectors, statistics = {}, []
    for text, role in keys:
        output = model(model.tokenizer.collate(model.tokenizer([text], role)), context)
        vectors[text, role] = output.embeddings[0]
        statistics.append(output.statistics)
    losses = []
    for i, r in enumerate(records):
        query = vectors[r.query, "query"]
        candidates = [r.positives[0]]
        candidates += [n.text for n in r.negatives[:num_negatives] if n.text not in r.positives]
        if in_batch and r.in_batch:
            for j, other in enumerate(records):
                if j == i or not other.in_batch or other.query == r.query:
                    continue
                same_class = r.label is not None and (r.dataset, r.label) == (
                    other.dataset,
                    other.label,
                )
                foreign = [] if same_class else [other.positives[0]]
                if r.label is None:
                    foreign += [n.text for n in other.negatives[:num_negatives]]
                candidates += [t for t in foreign if t not in r.positives and t != r.query]
        distinct = dict.fromkeys(candidates)
        scores = torch.stack([query @ vectors[t, "document"] for t in distinct]) / temperature
        losses.append(-torch.log_softmax(scores, dim=0)[0])
    loss = torch.stack(losses).mean()
    return (
        loss
        if statistics[0] is None
        else loss + model.auxiliary_loss(torch.stack(statistics).sum(0))
    )
