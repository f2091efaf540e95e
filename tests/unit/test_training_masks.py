"""What a record says of false negatives reaches the loss, in every column of candidates."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from toy_model import ToyTokenizer

from rayembed.config.stage import BatchConfig, StageConfig
from rayembed.data.hashes import text_hash
from rayembed.data.plan import step_batch
from rayembed.data.plan.step_batch import make_step_batch
from rayembed.data.records import Negative, Record
from rayembed.data.words import normalised_hash
from rayembed.losses.candidates import Columns, batch_candidates, own_candidates, own_documents
from rayembed.losses.infonce import InfoNCE
from rayembed.optim.adamw import AdamW
from rayembed.training.contrastive.batch_loss import Targets, contrastive_loss, rows_of

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
            false_negatives=tuple(map(normalised_hash, FALSE.get(i, ()))) if marked else (),
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
        known = {*map(normalised_hash, r.positives), *r.false_negatives}
        assert set(found.tolist()) - {0} == known
    bare = [dataclasses.replace(r, false_negatives=()) for r in rows]
    assert make_step_batch(0, bare, 1, ToyTokenizer()).not_negative_hash.shape == (4, 2)


def spelled(query: str, positives: list[str], negatives: list[str], false: str) -> Record:
    return Record(
        id=query,
        query=query,
        positives=tuple(positives),
        negatives=tuple(map(Negative, negatives)),
        dataset="d",
        false_negatives=(normalised_hash(false),),
    )


SPELLED = [
    spelled("What is it", ["The answer 3", "Ｗider"], ["the answer 3\n", "Other"], "none"),
    spelled(
        "something else", [" THE  answer 3"], ["other ", "wider", "what IS it"], "a FALSE one "
    ),
    spelled("what is  it ", ["another answer"], ["A false one", "wider "], "none"),
]
"""Rows with texts that differ in case, width and white space alone."""


def masks() -> list[list[list[int]]]:
    """Candidates in the batch (positives, then negatives row by row), own ones, own documents."""
    batch = make_step_batch(0, SPELLED, 3, ToyTokenizer())
    assert len(batch.tokens) == 13, "each text is read as it is spelled"
    rows = rows_of(batch, torch.device("cpu"))
    ruled_out = torch.from_numpy(batch.not_negative_hash)
    found = (
        batch_candidates(rows, ruled_out, Columns.of(rows, 3), 0),
        own_candidates(rows, ruled_out),
        own_documents(rows),
    )
    return [mask.int().tolist() for mask in found]


def test_texts_that_differ_by_case_or_white_space_are_the_same_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    in_batch, own, documents = masks()
    assert in_batch == [
        # Its positive, "Other". Not the copies of its positives and of itself, the second "other ",
        # and what the row with the same query has.
        [1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0],
        # Not the copies of its positive, the second "other " and "wider ", its false negative.
        [0, 1, 1, 0, 1, 0, 0, 1, 1, 0, 0, 0],
        # Not what the row with the same query has, its own text, the second "wider ".
        [0, 1, 1, 0, 0, 0, 1, 1, 0, 1, 0, 0],
    ]
    assert own == documents == [[1, 0, 1, 0], [1, 1, 1, 1], [1, 1, 1, 0]]
    monkeypatch.setattr(step_batch, "normalised_hash", text_hash)
    exact, own, documents = masks()
    assert sum(map(sum, exact)) > sum(map(sum, in_batch)), "the control: texts as they are spelled"
    assert own[0] == documents[0] == [1, 1, 1, 0]
