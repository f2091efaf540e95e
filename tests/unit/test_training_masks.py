"""What a record says of false negatives reaches the loss, in every column of candidates."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from toy_model import ToyTokenizer

from rayembed.config.stage import BatchConfig, StageConfig
from rayembed.data.hashes import text_hash
from rayembed.data.plan.step_batch import make_step_batch
from rayembed.data.records import Negative, Record
from rayembed.losses.infonce import InfoNCE
from rayembed.optim.adamw import AdamW
from rayembed.training.batch_loss import Targets, contrastive_loss, rows_of

TEMPERATURE = 0.5  # all candidates weigh something

FALSE = {
    0: ("positive 2", "negative 0"),  # of another row, and its own hard one
    1: ("negative 0", "negative 3", "a text of another batch"),
    3: ("positive 0", "positive 1", "positive 2", "negative 1"),
}


def records(marked: bool) -> list[Record]:
    return [
        Record(
            id=str(i),
            query=f"query {i}",
            positives=(f"positive {i}", f"further {i}") if i == 2 else (f"positive {i}",),
            negatives=(Negative(f"negative {i}"),),
            dataset="d",
            false_negatives=tuple(map(text_hash, FALSE.get(i, ()))) if marked else (),
        )
        for i in range(4)
    ]


def stage(in_batch: bool) -> StageConfig:
    return StageConfig(
        name="s",
        datasets={"d": 1},
        batch=BatchConfig(global_pairs=4, num_negatives=1, in_batch_negatives=in_batch),
        loss=InfoNCE(temperature=TEMPERATURE),
        optimizer=AdamW(learning_rate=1e-3),
        steps=1,
    )


def by_hand(vectors: dict[str, torch.Tensor], in_batch: bool, removed: bool) -> torch.Tensor:
    """Mean loss over candidates that are written down one by one."""
    losses = []
    for i in range(4):
        others = [f"negative {i}"]
        if in_batch:
            others = [f"positive {j}" for j in range(4) if j != i]
            others += [f"negative {j}" for j in range(4)]
        if removed:
            others = [text for text in others if text not in FALSE.get(i, ())]
        documents = torch.stack([vectors[text] for text in (f"positive {i}", *others)])
        logits = documents @ vectors[f"query {i}"] / TEMPERATURE
        losses.append(torch.logsumexp(logits, 0) - logits[0])
    return torch.stack(losses).mean()


@pytest.mark.parametrize("in_batch", [True, False])
@pytest.mark.parametrize("marked", [True, False])
def test_false_negatives_are_as_if_removed_by_hand(in_batch: bool, marked: bool) -> None:
    batch = make_step_batch(0, records(marked), 1, ToyTokenizer())
    texts = [f"{kind} {i}" for kind in ("query", "positive", "negative") for i in range(4)]
    torch.manual_seed(0)
    raw = torch.randn(len(texts), 8, dtype=torch.float32, requires_grad=True)
    vectors = dict(zip(texts, F.normalize(raw, dim=1), strict=True))
    places = dict(zip(batch.query, texts[:4], strict=True))
    places |= dict(zip(batch.positive, texts[4:8], strict=True))
    places |= dict(zip(batch.negatives[:, 0], texts[8:], strict=True))
    embeddings = torch.stack([vectors[places[i]] for i in range(len(batch.tokens))])
    device = torch.device("cpu")
    ours = contrastive_loss(
        embeddings, rows_of(batch, device), Targets.of(batch, device), stage(in_batch), {}
    )
    (gradient,) = torch.autograd.grad(ours, raw, retain_graph=True)
    wanted = by_hand(vectors, in_batch, removed=marked)
    torch.testing.assert_close(ours, wanted)
    (expected,) = torch.autograd.grad(wanted, raw, retain_graph=True)
    torch.testing.assert_close(gradient, expected)
    other = by_hand(vectors, in_batch, removed=not marked)
    assert abs((other - ours).item()) > 1e-2, "without the mechanism the loss is another"


def test_hashes_of_the_batch_are_positives_and_false_negatives() -> None:
    rows = records(marked=True)
    batch = make_step_batch(0, rows, 1, ToyTokenizer())
    for found, r in zip(batch.not_negative_hash, rows, strict=True):
        assert set(found.tolist()) - {0} == {*map(text_hash, r.positives), *r.false_negatives}
    bare = [dataclasses.replace(r, false_negatives=()) for r in rows]
    assert make_step_batch(0, bare, 1, ToyTokenizer()).not_negative_hash.shape == (4, 2)
