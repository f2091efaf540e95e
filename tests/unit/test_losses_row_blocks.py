"""Masks and losses in blocks of rows: the same numbers, in memory that does not grow with rows."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from former_candidates import former_batch_candidates
from toy_model import ToyTokenizer

from rayembed.config.stage import BatchConfig, StageConfig
from rayembed.data.plan.step_batch import make_step_batch
from rayembed.data.records import Negative, Record
from rayembed.losses.candidates import Columns, Rows, batch_candidates
from rayembed.losses.infonce import InfoNCE
from rayembed.losses.listwise_kl import ListwiseKL
from rayembed.machine.device import deterministic
from rayembed.optim.adamw import AdamW
from rayembed.training.contrastive import batch_loss
from rayembed.training.contrastive.batch_loss import (
    Targets,
    contrastive_loss,
    in_row_blocks,
    pairs_that_fit,
    rows_of,
)
from rayembed.training.memory.graph_room import LiveBytes

CPU = torch.device("cpu")


def random_rows(count, negatives, texts, seed):
    """Rows with many equal texts, and the hashes that are no negatives of each."""
    draw = torch.Generator().manual_seed(seed)

    def hashes(*shape, low=1):
        return torch.randint(low, texts, shape, generator=draw)

    rows = Rows(
        query=hashes(count),
        positive=hashes(count),
        negatives=hashes(count, negatives, low=0),
        label=torch.randint(0, 4, (count,), generator=draw),
        in_batch=torch.rand(count, generator=draw) > 0.2,
    )
    return rows, torch.cat([rows.positive.unsqueeze(1), hashes(count, 3, low=0)], dim=1)


def part(rows, start, stop):
    return Rows(**{name: value[start:stop] for name, value in vars(rows).items()})


@pytest.mark.parametrize("negatives", [0, 1, 3])
@pytest.mark.parametrize("texts", [6, 60, 10**6])
def test_masks_are_the_former_ones_whatever_the_block(negatives, texts):
    for seed, workers in itertools.product(range(20), (1, 2, 3)):
        rows, ruled_out = random_rows(24, negatives, texts, seed)
        num = 24 // workers
        columns = Columns.of(rows, num)
        for worker in range(workers):
            first = worker * num
            mine, out = part(rows, first, first + num), ruled_out[first : first + num]
            expected = former_batch_candidates(mine, out, rows, first, num)
            blocks = [
                batch_candidates(part(mine, at, at + 5), out[at : at + 5], columns, first + at)
                for at in range(0, num, 5)
            ]
            assert torch.equal(torch.cat(blocks), expected)


def step_of(pairs, negatives, loss):
    records = [
        Record(
            id=str(i),
            query=f"query {i}",
            positives=(f"positive {i % (pairs - 3)}",),
            positive_score=0.5 + 0.4 * (i % 2),
            negatives=tuple(Negative(f"negative {i} {k}", score=0.1 * k) for k in range(negatives)),
            dataset="d",
        )
        for i in range(pairs)
    ]
    stage = StageConfig(
        name="s",
        datasets={"d": 1},
        batch=BatchConfig(global_pairs=pairs, num_negatives=negatives, in_batch_negatives=True),
        loss=loss,
        optimizer=AdamW(learning_rate=1e-3),
        steps=1,
    )
    return make_step_batch(0, records, negatives, ToyTokenizer()), stage


def loss_and_gradient(batch, stage, width=16):
    torch.manual_seed(0)
    raw = torch.randn(len(batch.tokens), width, requires_grad=True)
    targets = Targets.of(batch, CPU)
    loss = contrastive_loss(F.normalize(raw, dim=1), rows_of(batch, CPU), targets, stage, {})
    (gradient,) = torch.autograd.grad(loss, raw)
    return loss.detach(), gradient


@pytest.mark.parametrize("loss", [InfoNCE(dimensions=(8,)), ListwiseKL()])
@pytest.mark.parametrize("in_batch", [True, False])
def test_the_loss_and_its_gradient_are_those_of_one_block(monkeypatch, loss, in_batch):
    batch, stage = step_of(20, 2, loss)
    own = stage.batch.model_copy(update={"in_batch_negatives": in_batch})
    stage = stage.model_copy(update={"batch": own})
    whole = loss_and_gradient(batch, stage)
    monkeypatch.setattr(batch_loss, "_BLOCK", 7 if not in_batch else 7 * 60)
    for found, expected in zip(loss_and_gradient(batch, stage), whole, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)


def blocks_of(rows, candidates, device, *, cut=True):
    """How many rows each block has."""
    found = []

    def of_block(block):
        found.append(len(range(rows)[block]))
        return (torch.zeros(found[-1]),)

    (made,) = in_row_blocks(of_block, rows, candidates, cut, torch.device(device))
    assert len(made) == rows
    return found


def test_blocks_on_a_gpu_are_as_large_as_its_memory_allows(monkeypatch):
    memory = {"total": 80 * 2**30, "free": 30 * 2**30}
    monkeypatch.setattr(batch_loss, "total_memory", lambda: memory["total"])
    monkeypatch.setattr(batch_loss, "free_memory", lambda _: memory["free"])
    # 65,536 pairs with seven negatives on eight workers.
    rows, candidates = 8192, 8 * 65_536
    assert blocks_of(rows, candidates, "cpu") == [16] * 512
    assert blocks_of(rows, candidates, "cuda") == [128] * 64
    memory["free"] = 2**30  # a quarter of it takes 4 million pairs
    assert blocks_of(rows, candidates, "cuda") == [16] * 512
    assert blocks_of(rows, candidates, "cuda", cut=False) == [rows]
    with deterministic(True):
        assert blocks_of(rows, candidates, "cuda") == [128] * 64, "whatever is free"


@pytest.mark.parametrize("gigabytes", [8, 16, 24, 40, 80, 141, 192])
def test_a_block_takes_a_sixteenth_of_the_memory_and_a_quarter_of_what_is_free(gigabytes):
    total = gigabytes * 2**30
    for free in (total, total // 2, total // 8, 2**30, 0):
        pairs = pairs_that_fit(total, free)
        least = batch_loss._BLOCK
        assert pairs == least or 64 * pairs <= min(total / 16, free / 4)
        assert pairs >= least
    assert pairs_that_fit(total, total) * 64 > total / 32 or gigabytes <= 16


def test_small_batches_do_not_ask_a_gpu_for_its_memory(monkeypatch):
    monkeypatch.setattr(batch_loss, "total_memory", None)
    assert blocks_of(1024, 8192, "cuda") == [1024]


def test_a_loss_of_rows_that_look_at_each_other_is_not_cut(monkeypatch):
    class Together(InfoNCE):
        row_blocks = False

        def of_rows(self, queries_BD, candidates, parameters):
            assert len(queries_BD) == 20
            return super().of_rows(queries_BD, candidates, parameters)

    monkeypatch.setattr(batch_loss, "_BLOCK", 1)
    loss_and_gradient(*step_of(20, 2, Together()))


def peak(pairs, block, monkeypatch):
    monkeypatch.setattr(batch_loss, "_BLOCK", block)
    batch, stage = step_of(pairs, 3, InfoNCE())
    with LiveBytes() as live:
        loss_and_gradient(batch, stage)
    return live.peak


def test_memory_is_that_of_a_block_and_not_of_all_rows(monkeypatch):
    block = 64 * 1024
    small, large = (peak(pairs, block, monkeypatch) for pairs in (128, 512))
    rows_alone = 4 * 512 * 5 * 16 * 4 * 4  # vectors of four times the texts, some copies
    assert large - small < rows_alone
    whole = peak(512, 2**40, monkeypatch)
    assert whole > 3 * large


def test_bytes_that_live_are_counted_once_and_until_they_go():
    given = torch.randn(100, 10, requires_grad=True)
    weights = torch.ones(10, 10)
    with LiveBytes() as live:
        view = given[:50]
        assert live.now == 0
        kept = (view @ weights).relu()
        assert live.now == 50 * 10 * 4
        assert live.peak == 2 * 50 * 10 * 4
        del kept
        assert live.now == 0
