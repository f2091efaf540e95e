"""CDE's two-stage GradCache is exact, and training under DeepSpeed is that of a plain loop.

Chunks of either stage, workers, ZeRO stages and the cache change nothing; sequence dropout is on
where the cache is compared with the full graph.
"""

import contextlib
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
from made_up_records import made_up_records
from plain_reference import train_by_hand
from run_distributed import run_distributed
from tiny_models import save_cde_stages, save_nomic_encoder
from train_made_up import distance, train_made_up

from rayembed.config.placement import Placement
from rayembed.config.settings import parse
from rayembed.config.stage import StageConfig
from rayembed.distributed import grad_cache
from rayembed.distributed.collectives import gather_with_gradient
from rayembed.distributed.collectives import largest as largest_number
from rayembed.distributed.grad_cache import (
    Passes,
    backward_with_cache,
    backward_with_graphs,
)
from rayembed.models.cde.config import CDEConfig
from rayembed.models.loading.build import build_model
from rayembed.training.contrastive.collated import collate_context, context_rows
from rayembed.training.engine import DeepSpeedEngine
from rayembed.training.objective import StepSettings

pytestmark = pytest.mark.distributed

PAIRS, J = 24, 16
CHUNKS = [(1, 1), (2, 2), (3, 3), (6, 6), (1, 6), (6, 1), (2, 3)]
"""Of the first stage and of the second."""


def model_of(folders, *, sequence_dropout, num_context=J):
    config = {
        "backbone": {"path": "given", "dtype": "float32"},
        "encoder": {"path": "given"},
        "num_context": num_context,
        "sequence_dropout": sequence_dropout,
        "num_soft_prompts": 2,
        "output": "residual",
        "query_prefix": "",
        "document_prefix": "",
        "query_max_length": 16,
        "document_max_length": 16,
    }
    return build_model(parse(CDEConfig, config), folders, seed=3).train()


def pieces(items, count):
    """`count` pieces, as even as may be."""
    return [items[i::count] for i in range(count)]


def gradients(model, rank, world, chunks, way, rows=None):
    """Averaged gradients of one step of a plain in-batch loss, by one of both ways."""
    records, share = made_up_records(PAIRS), PAIRS // world
    own = records[rank * share : (rank + 1) * share]
    queries = model.tokenizer([r.query for r in own], "query")
    documents = model.tokenizer([r.positives[0] for r in own], "document")
    first, second = chunks
    if rows is None:
        rows = context_rows(PAIRS, J, seed=1, stage="s", step=0)

    def cut(lengths):
        return [piece for piece in pieces(list(range(len(lengths))), first) if piece]

    own = collate_context(model, documents, rows, cut, lambda micro_batch: micro_batch)
    device = torch.device("cpu")
    context = own.passes(model.embed_context, largest_number(own.num_passes, device), device)
    assert len(context.micro_batches) == first
    tokens = [*queries, *documents]
    cuts = pieces(list(range(len(tokens))), second)
    order = torch.tensor([place for cut in cuts for place in cut])

    def loss_of(embeddings, statistics):
        rowwise = torch.empty_like(embeddings).index_copy(0, order, embeddings)
        found = rowwise[:share], gather_with_gradient(rowwise[share:])
        targets = torch.arange(share) + rank * share
        return torch.nn.functional.cross_entropy(found[0] @ found[1].T / 0.1, targets)

    passes = Passes(
        embed=model,
        micro_batches=[model.tokenizer.collate([tokens[i] for i in cut]) for cut in cuts],
        context=context,
    )
    model.zero_grad()
    torch.manual_seed(17 + rank)
    way(passes, loss_of, lambda loss, last: loss.backward())
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    for gradient in found.values():
        dist.all_reduce(gradient)
    return {n: g / world for n, g in found.items()}


def largest(left, right):
    """The largest difference of gradients of each stage."""
    assert left.keys() == right.keys()
    found = {}
    for part in ("encoder.", "layers.first.", "backbone.", "layers."):
        names = [n for n in left if n.startswith(part)]
        assert max(left[n].abs().max() for n in names) > 1e-3, part
        found[part] = max((left[n] - right[n]).abs().max().item() for n in names)
    return found


def cached_against_the_full_graph(rank, world, folders):
    found = {}
    model = model_of(folders, sequence_dropout=0.3)
    for chunks in CHUNKS:
        whole = gradients(model, rank, world, chunks, backward_with_graphs)
        cached = gradients(model, rank, world, chunks, backward_with_cache)
        found[chunks] = largest(whole, cached)
    original = grad_cache.replayed
    grad_cache.replayed = lambda state: contextlib.nullcontext()
    control = gradients(model, rank, world, (2, 3), backward_with_cache)
    grad_cache.replayed = original
    whole = gradients(model, rank, world, (2, 3), backward_with_graphs)
    found["control"] = largest(whole, control)
    plain = model_of(folders, sequence_dropout=0.0)
    for chunks in [(1, 1), (3, 6)]:
        found["no dropout", chunks] = gradients(plain, rank, world, chunks, backward_with_cache)
    few = np.array([1, 0])  # of the first worker alone: the second one has none
    for way in (backward_with_graphs, backward_with_cache):
        found["few", way.__name__] = gradients(plain, rank, world, (1, 2), way, few)
    return found


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Stages whose word embeddings are large enough for ZeRO-3 to spread them."""
    save = partial(save_nomic_encoder, vocab_size=400)
    return save_cde_stages(tmp_path_factory.mktemp("stages"), save)


def test_both_stages_are_cached_exactly(folders):
    without_dropout, few = [], []
    for world in (1, 2):
        found = run_distributed(cached_against_the_full_graph, world, folders)
        for worker in found:
            for chunks in CHUNKS:
                assert max(worker[chunks].values()) < 1e-5, (world, chunks, worker[chunks])
            assert min(worker["control"].values()) > 1e-4, "without replay"
        without_dropout += [found[0]["no dropout", chunks] for chunks in [(1, 1), (3, 6)]]
        few += [found[0]["few", way] for way in ("backward_with_graphs", "backward_with_cache")]
    for gradient in without_dropout[1:]:
        assert max(largest(without_dropout[0], gradient).values()) < 1e-5
    for gradient in few[1:]:
        assert max(largest(few[0], gradient).values()) < 1e-5
    assert max(largest(few[0], without_dropout[0]).values()) > 1e-3


STEPS, GLOBAL, PLACES = 3, 12, 7
STAGE = parse(
    StageConfig,
    {
        "name": "s",
        "datasets": {"d": 1},
        "batch": {"global_pairs": GLOBAL, "num_negatives": 2, "in_batch_negatives": True},
        "loss": {"temperature": 0.1},
        "optimizer": {
            "learning_rate": 0.01,
            "pooling_learning_rate": 0.02,
            "gradient_clipping": 0.5,
            "eps": 1e-4,
        },
        "steps": STEPS,
    },
)
SEED = 9
WAYS = {1: [(0, False), (2, True)], 2: [(0, True), (1, True), (2, True), (3, True), (3, False)]}


def trained(rank, world, folders):
    found = {}
    for zero, cache in WAYS[world]:
        model = model_of(folders, sequence_dropout=0.0, num_context=PLACES)
        engine = DeepSpeedEngine(model, STAGE, Placement(zero_stage=zero), "float32", world)
        if zero == 3:
            spread = [n for n, p in model.named_parameters() if not p.ds_persist]
            assert any(n.startswith("encoder.") for n in spread), "of the first stage"
            assert any(n.startswith("backbone.") for n in spread), "of the second"
        # Micro-batches of other sizes on each worker, so that some are fillers.
        settings = StepSettings(70 + 40 * rank, cache, torch.device("cpu"), seed=SEED)
        found[zero, cache] = train_made_up(engine, model, STAGE, settings)
    return found


def test_weights_are_those_of_the_plain_loop_however_they_are_trained(folders):
    model = model_of(folders, sequence_dropout=0.0, num_context=PLACES)
    start = {n: p.detach().clone() for n, p in model.named_parameters()}
    draws = [
        context_rows(GLOBAL, PLACES, seed=SEED, stage="s", step=s).tolist() for s in range(STEPS)
    ]
    expected, _ = train_by_hand(
        model, STAGE, lambda step: made_up_records(GLOBAL, seed=step), draws.__getitem__
    )
    for part in ("backbone.", "encoder.", "layers.first."):
        moved = max((start[n] - w).abs().max().item() for n, w in expected.items() if part in n)
        assert moved > 5e-3, part
    for world, ways in WAYS.items():
        for worker in run_distributed(trained, world, folders):
            assert len(worker) == len(ways)
            for case, weights in worker.items():
                assert distance(weights, expected) < 2e-5, (world, case)
