"""The contrastive loss as it was written before losses were members of a table, for comparison."""

import torch
from former_candidates import former_batch_candidates
from torch.nn import functional

from rayembed.distributed.collectives import gather, gather_with_gradient, rank
from rayembed.losses.candidates import Rows, own_candidates, own_places


def former_contrastive_loss(embeddings, rows, targets, stage, parameters):
    width = embeddings.shape[1]
    queries = embeddings[targets.query]
    documents = torch.cat([targets.positive.unsqueeze(1), targets.negatives], dim=1)
    candidates = embeddings[documents.clamp(min=0)]
    temperature = stage.loss.temperature
    if not stage.batch.in_batch_negatives:
        mask = own_candidates(rows, targets.not_negatives)
        return torch.stack(
            [
                _of_own(_cut(queries, d), _cut(candidates, d), mask, temperature).mean()
                for d in (width, *stage.loss.dimensions)
            ]
        ).sum()
    num_rows, num_negatives = targets.negatives.shape
    first_row = rank() * num_rows
    local = torch.cat([candidates[:, 0], candidates[:, 1:].flatten(0, 1)])
    everyone = Rows(**{name: gather(value) for name, value in vars(rows).items()})
    mask = former_batch_candidates(rows, targets.not_negatives, everyone, first_row, num_rows)
    positive = own_places(num_rows, first_row, num_negatives, embeddings.device)[:, 0]
    gathered = gather_with_gradient(local)
    return torch.stack(
        [
            _of_all(_cut(queries, d), _cut(gathered, d), positive, mask, temperature).mean()
            for d in (width, *stage.loss.dimensions)
        ]
    ).sum()


def _cut(vectors, dimension):
    if vectors.shape[-1] == dimension:
        return vectors
    return functional.normalize(vectors[..., :dimension], dim=-1)


def _of_all(queries, candidates, positive, mask, temperature):
    logits = queries.float() @ candidates.float().T / temperature
    logits = logits.masked_fill(~mask, -torch.inf)
    picked = logits.gather(1, positive.unsqueeze(1)).squeeze(1)
    return torch.logsumexp(logits, dim=1) - picked


def _of_own(queries, candidates, mask, temperature):
    logits = torch.einsum("bd,bmd->bm", queries.float(), candidates.float())
    logits = (logits / temperature).masked_fill(~mask, -torch.inf)
    return torch.logsumexp(logits, dim=1) - logits[:, 0]
