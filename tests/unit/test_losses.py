"""InfoNCE against values worked out by hand, and the candidate masks."""

import math

import pytest
import torch

from rayembed.losses.candidates import (
    Columns,
    Rows,
    batch_candidates,
    batch_documents,
    own_candidates,
    own_documents,
    own_places,
)
from rayembed.losses.infonce import info_nce


def rows(query, positive, negatives, ruled_out=None, label=None, in_batch=None):
    """Rows, and the hashes of the texts that are no negatives of each."""
    return Rows(
        query=torch.tensor(query),
        positive=torch.tensor(positive),
        negatives=torch.tensor(negatives).reshape(len(query), -1),
        label=torch.tensor(label or [0] * len(query)),
        in_batch=torch.tensor(in_batch or [True] * len(query)),
    ), torch.tensor(ruled_out or [[p] for p in positive])


def test_loss_of_two_queries_worked_out_by_hand():
    queries = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    candidates = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.6, 0.8]])
    mask = torch.tensor([[True, True, False], [True, True, True]])
    loss = info_nce(queries, candidates, torch.tensor([0, 1]), mask, temperature=0.5)
    first = -math.log(math.exp(2.0) / (math.exp(2.0) + math.exp(0.0)))
    second = -math.log(math.exp(2.0) / (math.exp(0.0) + math.exp(2.0) + math.exp(1.6)))
    torch.testing.assert_close(loss, torch.tensor([first, second]))


def test_logits_are_float32_for_bfloat16_embeddings():
    queries = torch.tensor([[1.0, 0.0]], dtype=torch.bfloat16)
    candidates = torch.tensor([[1.0, 0.0], [0.99, 0.14]], dtype=torch.bfloat16)
    loss = info_nce(queries, candidates, torch.tensor([0]), torch.ones(1, 2).bool(), 0.02)
    assert loss.dtype == torch.float32


def test_own_candidates_form_equals_the_masked_matrix():
    torch.manual_seed(0)
    queries, candidates = torch.randn(3, 4), torch.randn(3, 3, 4)
    mask = torch.tensor([[True, True, True], [True, False, True], [True, True, False]])
    own = info_nce(queries, candidates, torch.zeros(3, dtype=torch.int64), mask, 0.1)
    wide = torch.zeros(3, 9, dtype=torch.bool)
    for row in range(3):
        wide[row, 3 * row : 3 * row + 3] = mask[row]
    whole = info_nce(queries, candidates.flatten(0, 1), torch.tensor([0, 3, 6]), wide, 0.1)
    torch.testing.assert_close(own, whole)


def test_a_row_alone_has_loss_zero():
    alone, place = torch.ones(1, 1, 2), torch.zeros(1, dtype=torch.int64)
    loss = info_nce(torch.ones(1, 2), alone, place, torch.ones(1, 1).bool(), 0.1)
    assert loss.item() == 0.0


# Candidates of two rows of one worker: [positive 0, positive 1, negative 0, negative 1].
@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("all", rows([1, 2], [11, 12], [21, 22]), [[1, 1, 1, 1], [1, 1, 1, 1]]),
        ("short list", rows([1, 2], [11, 12], [0, 22]), [[1, 1, 0, 1], [1, 1, 0, 1]]),
        ("same positive", rows([1, 2], [11, 11], [21, 22]), [[1, 0, 1, 1], [0, 1, 1, 1]]),
        (
            "foreign negative is my positive",
            rows([1, 2], [11, 12], [21, 11]),
            [[1, 1, 1, 0], [1, 1, 1, 0]],
        ),
        (
            "own negative is my positive",
            rows([1, 2], [11, 12], [11, 22]),
            [[1, 1, 0, 1], [1, 1, 0, 1]],
        ),
        (
            "foreign positive is my query",
            rows([12, 2], [11, 12], [21, 22]),
            [[1, 0, 1, 1], [1, 1, 1, 1]],
        ),
        (
            "row out of in-batch",
            rows([1, 2], [11, 12], [21, 22], in_batch=[True, False]),
            [[1, 0, 1, 0], [0, 1, 0, 1]],
        ),
        (
            "same class",
            rows([1, 2], [11, 12], [21, 22], label=[5, 5]),
            [[1, 0, 1, 0], [0, 1, 0, 1]],
        ),
        (
            "other class",
            rows([1, 2], [11, 12], [21, 22], label=[5, 6]),
            [[1, 1, 1, 0], [1, 1, 0, 1]],
        ),
        ("same query", rows([1, 1], [11, 12], [21, 22]), [[1, 0, 1, 0], [0, 1, 0, 1]]),
        ("negative of both", rows([1, 2], [11, 12], [21, 21]), [[1, 1, 1, 0], [1, 1, 1, 0]]),
        (
            "positive of one, negative of the other",
            rows([1, 2], [11, 12], [12, 22]),
            [[1, 1, 0, 1], [1, 1, 0, 1]],
        ),
        (
            "negative of both, the first one masked",
            rows([1, 2], [11, 12], [21, 21], in_batch=[False, True]),
            [[1, 0, 1, 0], [0, 1, 0, 1]],
        ),
        (
            "second positive, or a false negative",
            rows([1, 2], [11, 12], [21, 22], ruled_out=[[11, 12], [12, 0]]),
            [[1, 0, 1, 1], [1, 1, 1, 1]],
        ),
        (
            "hard negatives that are false ones",
            rows([1, 2], [11, 12], [21, 22], ruled_out=[[11, 22, 21], [12, 0, 21]]),
            [[1, 1, 0, 0], [1, 1, 0, 1]],
        ),
    ],
)
def test_candidates(name, given, expected):
    batch, ruled_out = given
    mask = batch_candidates(batch, ruled_out, Columns.of(batch, rows_per_worker=2), first_row=0)
    assert mask.int().tolist() == expected


def test_a_workers_mask_is_its_rows_of_the_whole_mask_in_its_layout():
    everyone, ruled_out = rows([1, 2, 3, 4], [11, 12, 11, 14], [21, 22, 23, 0], label=[0, 5, 0, 5])
    second = Rows(**{name: value[2:] for name, value in vars(everyone).items()})
    whole = batch_candidates(everyone, ruled_out, Columns.of(everyone, 4), 0)
    part = batch_candidates(second, ruled_out[2:], Columns.of(everyone, 2), 2)
    # One worker: p0 p1 p2 p3 n0 n1 n2 n3; two workers: p0 p1 n0 n1 p2 p3 n2 n3.
    assert part.tolist() == whole[2:][:, [0, 1, 4, 5, 2, 3, 6, 7]].tolist()
    assert own_places(2, 2, 1, torch.device("cpu")).tolist() == [[4, 6], [5, 7]]


def test_own_candidates_drop_missing_and_positive_texts():
    given = rows([1, 2, 3], [11, 12, 13], [[21, 0], [12, 22], [23, 23]])
    assert own_candidates(*given).int().tolist() == [[1, 1, 0], [1, 0, 1], [1, 1, 0]]


def test_own_documents_have_each_text_once_as_the_documents_of_a_batch():
    given, _ = rows([1, 2, 3], [11, 12, 13], [[11, 21, 0], [22, 22, 23], [0, 13, 21]])
    expected = [[1, 0, 1, 0], [1, 1, 0, 1], [1, 0, 0, 1]]
    assert own_documents(given).int().tolist() == expected
    for row, own in enumerate(expected):
        alone = Rows(**{name: value[row : row + 1] for name, value in vars(given).items()})
        assert batch_documents(alone, Columns.of(alone, 1), 0).int().tolist() == [own]
