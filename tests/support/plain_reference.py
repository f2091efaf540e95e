"""A stage in one process: the loss written with loops over texts and no masks, AdamW by hand."""

from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rayembed.config.stage import StageConfig
from rayembed.data.records import Record
from rayembed.models.contract import EmbeddingModel
from rayembed.training.optimizer import learning_rate_factor


def reference_loss(
    model: EmbeddingModel,
    records: Sequence[Record],
    *,
    temperature: float,
    num_negatives: int,
    in_batch: bool,
    context_rows: Sequence[int] | None = None,
    of_row: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Mean over records of -log softmax of the positive among its candidates, plus auxiliary.

    Args:
        of_row: in place of that, of the cosines of a row's candidates, the positive first.
        context_rows: records whose positives are the context; None: all.
    """
    keys = Counter()
    for r in records:
        keys[r.query, "query"] += 1
        for text in (r.positives[0], *(n.text for n in r.negatives[:num_negatives])):
            keys[text, "document"] += 1
    context = None
    if model.uses_context:
        chosen = range(len(records)) if context_rows is None else context_rows
        positives = [records[row].positives[0] for row in chosen]
        context = model.embed_context(
            model.tokenizer.collate(model.tokenizer(positives, "document"))
        )
    vectors, statistics = {}, []
    for text, role in keys:
        output = model(model.tokenizer.collate(model.tokenizer([text], role)), context)
        vectors[text, role] = output.embeddings[0]
        found = output.statistics
        statistics.append(None if found is None else found * keys[text, role])
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
        cosines = torch.stack([query @ vectors[t, "document"] for t in distinct])
        if of_row is not None:
            losses.append(of_row(cosines))
            continue
        losses.append(-torch.log_softmax(cosines / temperature, dim=0)[0])
    loss = torch.stack(losses).mean()
    return (
        loss
        if statistics[0] is None
        else loss + model.auxiliary_loss(torch.stack(statistics).sum(0))
    )


def train_by_hand(
    model: EmbeddingModel,
    stage: StageConfig,
    records_of: Callable[[int], Sequence[Record]],
    context_rows_of: Callable[[int], Sequence[int] | None] = lambda step: None,
) -> tuple[dict[str, Tensor], list[float]]:
    """The model's trained weights after the stage, and the gradient's norm before clipping."""
    config = stage.optimizer
    learnt = {n: p for n, p in model.named_parameters() if p.requires_grad}
    moments = {n: [torch.zeros_like(p), torch.zeros_like(p)] for n, p in learnt.items()}
    norms = []
    for step in range(stage.steps):
        model.zero_grad()
        reference_loss(
            model,
            records_of(step),
            temperature=stage.loss.temperature,
            num_negatives=stage.batch.num_negatives,
            in_batch=stage.batch.in_batch_negatives,
            context_rows=context_rows_of(step),
        ).backward()
        norm = torch.sqrt(sum((p.grad**2).sum() for p in learnt.values()))
        norms.append(norm.item())
        limit = config.gradient_clipping
        scale = min(1.0, limit / norm.item()) if limit else 1.0
        with torch.no_grad():
            for name, p in learnt.items():
                backbone = model.backbone_parameter(name)
                peak = config.learning_rate if backbone else config.pooling_learning_rate
                rate = peak * learning_rate_factor(step, stage)
                if p.ndim >= 2:
                    p.mul_(1 - rate * config.weight_decay)
                first, second = moments[name]
                first.mul_(0.9).add_(p.grad * scale, alpha=0.1)
                second.mul_(0.999).add_((p.grad * scale) ** 2, alpha=0.001)
                unbiased = (second / (1 - 0.999 ** (step + 1))).sqrt() + config.eps
                p.sub_(rate * (first / (1 - 0.9 ** (step + 1))) / unbiased)
    return {n: p.detach().clone() for n, p in learnt.items()}, norms
