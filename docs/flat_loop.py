"""What the platform does in a training step, in one file of plain torch that reads top to bottom.

On one worker in float32, with the same attention in the encoder, it gives the weights of the
platform's trainer bit for bit (tests/distributed/test_flat_loop.py). What it leaves out: ZeRO,
resuming, dropped steps, bfloat16, instructions and prefixes, other architectures.

    python docs/flat_loop.py BERT_FOLDER PAIRS.jsonl

b rows of this worker, K negatives a row, D width, W workers, N = W·b·(1 + K) candidates.
"""

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from torch.nn import functional


@dataclass
class Row:
    """A query, the text that answers it, and texts that only seem to."""

    query: str
    positive: str
    negatives: list[str] = field(default_factory=list)
    answers: list[str] = field(default_factory=list)  # further texts that are no negatives
    label: str | None = None  # rows of one class are not each other's negatives
    in_batch: bool = True  # whether it and the documents of other rows meet


@dataclass
class Settings:
    """What a recipe says of a stage, and how many padded tokens a forward pass may have."""

    steps: int
    num_negatives: int
    temperature: float
    learning_rate: float
    weight_decay: float = 0.01
    warmup_steps: int = 0
    gradient_clipping: float = 1.0
    max_length: int = 128
    micro_batch_tokens: int = 1024


# 1. Tokens: every distinct text is embedded once, in however many rows it stands. ----------------


def distinct_texts(rows, num_negatives):
    """Distinct texts by role, the places (b,) of queries and (b, 1 + K) of documents among them."""
    places = {}
    queries = [places.setdefault((row.query, "query"), len(places)) for row in rows]
    documents = [[places.setdefault((row.positive, ""), len(places))] for row in rows]
    for row, own in zip(rows, documents, strict=True):
        texts = row.negatives[:num_negatives]
        own.extend(places.setdefault((text, ""), len(places)) for text in texts)
        own.extend([0] * (num_negatives - len(texts)))  # any text: the mask leaves it out
    return [text for text, _ in places], torch.tensor(queries), torch.tensor(documents)


# 2. Micro-batches: texts of like length go together, so that little is padded. --------------------


def cut(lengths, budget, pass_cost=48):
    """Cheapest micro-batches of texts by length; each costs its padded tokens and a pass."""
    order = sorted(range(len(lengths)), key=lambda place: -lengths[place])
    costs, starts = [0] + [float("inf")] * len(order), [0] * (len(order) + 1)
    for first, place in enumerate(order):  # costs[n]: of the first n texts, cut at best
        most = max(budget // lengths[place], 1)
        for end in range(first + 1, min(first + most, len(order)) + 1):
            cost = costs[first] + (end - first) * lengths[place] + pass_cost
            if cost < costs[end]:
                costs[end], starts[end] = cost, first
    cuts, end = [], len(order)
    while end:
        cuts.insert(0, order[starts[end] : end])
        end = starts[end]
    return cuts


def collate(tokens, pad_id):
    """Ids and mask (u, longest), padded on the right."""
    longest = max(map(len, tokens))
    padded = [ids + [pad_id] * (longest - len(ids)) for ids in tokens]
    mask = [[1] * len(ids) + [0] * (longest - len(ids)) for ids in tokens]
    return torch.tensor(padded), torch.tensor(mask)


# 3. The model: a transformer, the mean of its last states, unit length. ---------------------------


def embed(encoder, ids, mask):
    """Unit vectors (u, D) of a micro-batch."""
    states = encoder(input_ids=ids, attention_mask=mask).last_hidden_state
    sums = (states * mask.unsqueeze(-1)).sum(dim=1)
    return functional.normalize(sums / mask.sum(dim=1, keepdim=True), dim=-1)


# 4. Gather: each worker's queries meet the documents of all. --------------------------------------


class Gather(torch.autograd.Function):
    """(W·b, D) of each worker's (b, D); a row's gradient is the sum of what all workers send."""

    @staticmethod
    def forward(ctx, local):
        parts = [torch.empty_like(local) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, local.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad)
        return grad.chunk(dist.get_world_size())[dist.get_rank()]


def rank_and_workers():
    """Place of this worker, and how many there are."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


# 5. Mask: which documents of the whole batch are candidates of which query. -----------------------


def candidate_mask(everyone, num_negatives):
    """(b, N) bool for this worker's rows: what is no known answer. The first of equal texts counts.

    Candidates stand as they are gathered: of each worker its positives, then its negatives.
    """
    rank, workers = rank_and_workers()
    share = len(everyone) // workers
    candidates = []  # (number of the row, text, which of the row's documents)
    for start in range(0, len(everyone), share):
        block = range(start, start + share)
        candidates += [(row, everyone[row].positive, 0) for row in block]
        for row in block:
            texts = everyone[row].negatives[:num_negatives]
            texts += [None] * (num_negatives - len(texts))
            candidates += [(row, text, 1) for text in texts]
    positives_first = sorted(range(len(candidates)), key=lambda place: candidates[place][2])
    mask = torch.zeros(share, len(candidates), dtype=torch.bool)
    for i, number in enumerate(range(rank * share, (rank + 1) * share)):
        row, seen = everyone[number], set()
        for place in positives_first:
            owner, text, is_negative = candidates[place]
            other = everyone[owner]
            if owner == number:
                allowed = not is_negative or text not in (None, row.positive, *row.answers)
            else:
                allowed = row.in_batch and other.in_batch and row.query != other.query
                allowed &= text not in (None, row.query, row.positive, *row.answers)
                if row.label is not None:  # the class of another row's negatives is not known
                    allowed &= not is_negative and row.label != other.label
            if allowed and text not in seen:
                mask[i, place] = True
                seen.add(text)
    return mask


# 6. InfoNCE: the positive among the candidates (arXiv 1807.03748, equation 4). --------------------


def info_nce(embedded, order, queries, documents, mask, temperature):
    """Mean over this worker's rows of -log softmax of the positive; `order` is that of texts."""
    rank, workers = rank_and_workers()
    embeddings = embedded[order]
    query_vectors, vectors = embeddings[queries], embeddings[documents]
    candidates = torch.cat([vectors[:, 0], vectors[:, 1:].flatten(0, 1)])
    positives = torch.arange(len(queries)) + rank * len(candidates)
    if workers > 1:
        candidates = Gather.apply(candidates)
    logits = (query_vectors @ candidates.T / temperature).masked_fill(~mask, -torch.inf)
    picked = logits.gather(1, positives.unsqueeze(1)).squeeze(1)
    return (torch.logsumexp(logits, dim=1) - picked).mean()


# 7. GradCache: the gradient of the whole batch with the memory of one micro-batch. ----------------


def backward(encoder, micro_batches, loss_of):
    """The loss's gradient by all embeddings, sent through each micro-batch again (2101.06983)."""
    states, parts = [], []
    with torch.no_grad():
        for ids, mask in micro_batches:
            states.append(torch.get_rng_state())
            parts.append(embed(encoder, ids, mask))
    last_state = torch.get_rng_state()
    embeddings = torch.cat(parts).requires_grad_()
    loss = loss_of(embeddings)
    (grad,) = torch.autograd.grad(loss, embeddings)
    shares = grad.split([len(part) for part in parts])
    for (ids, mask), state, share in zip(micro_batches, states, shares, strict=True):
        torch.set_rng_state(state)  # the dropout of the first pass
        (embed(encoder, ids, mask) * share).sum().backward()
    torch.set_rng_state(last_state)
    return loss.item()


# 8. The loop: one step after the other under AdamW. -----------------------------------------------


def train(encoder, tokenizer, batch_of, settings):
    """Train the encoder on the rows of all workers in each step, `batch_of(step)`; the losses."""
    rank, workers = rank_and_workers()
    learnt = [p for p in encoder.parameters() if p.requires_grad]
    decayed = {"params": [p for p in learnt if p.ndim >= 2], "weight_decay": settings.weight_decay}
    plain = {"params": [p for p in learnt if p.ndim < 2], "weight_decay": 0.0}
    optimizer = torch.optim.AdamW([decayed, plain], fused=True)
    encoder.train()
    losses = []
    for step in range(settings.steps):
        everyone = batch_of(step)
        share = len(everyone) // workers
        rows = everyone[rank * share : (rank + 1) * share]
        texts, *places = distinct_texts(rows, settings.num_negatives)
        tokens = tokenizer(texts, truncation=True, max_length=settings.max_length)["input_ids"]
        cuts = cut([len(ids) for ids in tokens], settings.micro_batch_tokens)
        batches = [collate([tokens[i] for i in one], tokenizer.pad_token_id) for one in cuts]
        order = torch.tensor([place for one in cuts for place in one]).argsort()
        mask = candidate_mask(everyone, settings.num_negatives)
        inputs = (order, *places, mask, settings.temperature)
        losses.append(backward(encoder, batches, lambda rows, given=inputs: info_nce(rows, *given)))
        if workers > 1:
            for p in learnt:
                dist.all_reduce(p.grad)
                p.grad /= workers
        torch.nn.utils.clip_grad_norm_(learnt, settings.gradient_clipping)
        warmup, total = settings.warmup_steps, settings.steps
        falls = 1 - (step - warmup) / (total - warmup)  # to zero one step after the last
        factor = (step + 1) / warmup if step < warmup else falls
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate * factor
        optimizer.step()
        optimizer.zero_grad()
    return losses


if __name__ == "__main__":
    folder, path = sys.argv[1:]
    pairs = [Row(**json.loads(line)) for line in Path(path).read_text().splitlines()]
    size = min(32, len(pairs))
    stage = Settings(len(pairs) // size, 0, temperature=0.05, learning_rate=2e-5)
    model = transformers.AutoModel.from_pretrained(folder, add_pooling_layer=False)
    words = transformers.AutoTokenizer.from_pretrained(folder)
    print(train(model, words, lambda step: pairs[step * size :][:size], stage))
