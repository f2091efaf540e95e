"""Masked-language modelling under DeepSpeed: workers, ZeRO stages and a resume change nothing."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from run_distributed import run_distributed
from tiny_adaptation import save_masked, tiny_adaptation, write_corpus

from rayembed.config.placement import Placement
from rayembed.data.engine.artifacts import PipelineContext
from rayembed.training.checkpoints.checkpoint import POSITION, Checkpoint
from rayembed.training.checkpoints.weights import tensors_digest
from rayembed.training.trainer import Callback
from rayembed_extras.adaptation.make import prepare_sequences
from rayembed_extras.adaptation.masked import AdaptationJob, load_adapted
from rayembed_extras.adaptation.plan import SequencePlan

pytestmark = pytest.mark.distributed

STEPS = 4


class Stopped(Exception):
    """The worker was killed."""


def run(rank, world, folder, zero, *, stops_after=None, resume_from=None, again=False):
    """Metrics of each step and the trained weights of worker 0, as the job leaves them."""
    placement = Placement(
        workers=world,
        zero_stage=zero,
        # Micro-batches of other sizes on each worker, so that some are fillers.
        micro_batch_tokens=70 + 60 * rank,
        gradient_checkpointing=again,
        storage_path=str(folder / "outputs"),
    )
    adaptation = tiny_adaptation(folder).model_copy(update={"placement": placement})
    plan = prepare_sequences(adaptation, PipelineContext(str(folder / "outputs"), adaptation.seed))
    name = f"{world}-{zero}-{stops_after}-{resume_from is not None}"
    here = folder / "weights" / name
    records = []

    class Kept(Callback):
        on_step_end = records.append

        def on_checkpoint(self, step, part):
            to = folder / "checkpoints" / f"{world}-{zero}" / f"step{step}"
            to.mkdir(parents=True, exist_ok=True)
            for path in part.iterdir():
                path.rename(to / path.name)
            dist.barrier()
            if step == stops_after:
                raise Stopped

    closed = []

    def stream(make, first, last, processes, named):
        try:
            yield from map(make, range(first, last))
        finally:
            closed.append(True)

    job = AdaptationJob(adaptation, plan, str(here / "weights.safetensors"))
    try:
        trainer = job.trainer([Kept()], stream)
        trainer.fit(resume_from and Checkpoint(resume_from, trainer.position))
    except Stopped:
        assert closed, "whatever makes steps ahead must end with a training that fails"
        return records, None
    if rank:
        return records, None
    assert job.is_done()
    model = load_adapted(adaptation, job.weights)
    return records, {name: p.detach().clone() for name, p in model.named_parameters()}


WAYS = {1: [(0, False), (2, True), (3, False)], 2: [(0, False), (1, False), (2, True), (3, True)]}
"""Of each number of workers: ZeRO stage, layers recomputed or not."""


def trained(rank, world, folder):
    found = {
        (zero, again): run(rank, world, folder, zero, again=again) for zero, again in WAYS[world]
    }
    stopped = run(rank, world, folder, 2, stops_after=2, again=True)
    last = folder / "checkpoints" / f"{world}-2" / "step2"
    assert (last / POSITION).exists()
    resumed = run(rank, world, folder, 2, resume_from=last, again=True)
    return found, stopped, resumed


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = Path(tmp_path_factory.mktemp("adaptation"))
    save_masked(folder / "bert")
    write_corpus(folder)
    run = tiny_adaptation(folder)
    prepare_sequences(run, PipelineContext(str(folder / "outputs"), run.seed))
    return folder


@pytest.fixture(scope="module")
def results(folder):
    return {world: run_distributed(trained, world, folder) for world in WAYS}


@pytest.fixture(scope="module")
def expected(folder):
    """Weights and losses of torch's AdamW over the mean of all masked tokens, in one graph, and
    perplexity and accuracy of the held-out batches by step.
    """
    adaptation = tiny_adaptation(folder)
    from rayembed_extras.adaptation.batch import MaskedSteps
    from rayembed_extras.adaptation.encoder import check_adaptable

    storage = str(folder / "outputs")
    plan = SequencePlan.open(
        prepare_sequences(adaptation, PipelineContext(storage, adaptation.seed))
    )
    words = check_adaptable(folder / "bert", adaptation.model)
    exam = adaptation.training.held_out.masking
    steps = MaskedSteps(plan, adaptation.masking, words, adaptation.seed, 0, 1, exam)
    model = load_adapted(adaptation, None)
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    settings = adaptation.training.optimizer
    rate = settings.learning_rate
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, eps=settings.eps, weight_decay=0)
    losses, held_out = [], {}

    def predicted(step):
        """Loss of each masked token of a batch, and whether the word is named."""
        batch, found, named = steps(step), [], []
        for ids, places, answers in zip(batch.input_ids, batch.places, batch.words, strict=True):
            sequence = torch.from_numpy(ids.astype("int64"))[None]
            hidden = model.encoder(sequence, torch.ones_like(sequence)).last_hidden_state[0]
            table = model.encoder.embeddings.word_embeddings.weight[: len(model.head.bias)]
            logits = model.head(hidden[places]) @ table.T + model.head.bias
            logs = torch.log_softmax(logits, dim=1)
            words = torch.from_numpy(answers.astype("int64"))
            found.append(-logs[torch.arange(len(places)), words])
            named.append(logits.argmax(1) == words)
        return torch.cat(found), torch.cat(named)

    for step in range(STEPS):
        loss = predicted(step)[0].mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.gradient_clipping)
        for group in optimizer.param_groups:
            # One step of warm-up, then down to zero.
            group["lr"] = rate * (1.0 if step == 0 else 1 - (step - 1) / (STEPS - 1))
        optimizer.step()
        losses.append(loss.item())
        if step % 2:
            kept = [predicted(number) for number in plan.held_out]
            of_tokens, named = map(torch.cat, zip(*kept, strict=True))
            held_out[step + 1] = of_tokens.mean().exp().item(), named.double().mean().item()
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    for part in ("word_embeddings", "Wqkv", "mlp.fc1", "head.dense", "head.bias"):
        moved = max((start[n] - weights[n]).abs().max().item() for n in start if part in n)
        assert moved > 1e-3, part
    return weights, losses, held_out


def assert_same(found, wanted):
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        # Adam divides by the root of small squares; the weights moved by 1e-2.
        torch.testing.assert_close(found[name], value, atol=2e-5, rtol=1e-4, msg=name)


@pytest.mark.parametrize("world", WAYS)
def test_weights_and_metrics_are_those_of_plain_torch(world, results, expected):
    weights, losses, held_out = expected
    ways, _, _ = results[world][0]
    for way, (records, found) in ways.items():
        assert [r["loss"] for r in records] == pytest.approx(losses, rel=1e-4), way
        assert_same(found, weights)
        scored = {r["step"]: r for r in records if "held_out/perplexity" in r}
        assert scored.keys() == held_out.keys() == {2, 4}
        for step, (perplexity, accuracy) in held_out.items():
            assert scored[step]["held_out/perplexity"] == pytest.approx(perplexity, rel=1e-4)
            # One word of some 180 may fall on the other side of a tie.
            assert scored[step]["held_out/masked_accuracy"] == pytest.approx(accuracy, abs=0.006)
            assert {"held_out/perplexity/sw", "held_out/masked_accuracy/fr"} <= scored[step].keys()
    for records, _ in ways.values():
        assert {"perplexity/en", "perplexity/fr", "masked_accuracy/sw"} <= records[0].keys()
        assert records[0]["sequences_per_second"] > 0
    # All workers' tokens are told, and all worlds tell the same.
    tokens = {tuple(r["tokens"] for r in records) for records, _ in ways.values()}
    alone = [r["tokens"] for r in results[1][0][0][0, False][0]]
    assert tokens == {tuple(alone)}


@pytest.mark.parametrize("world", WAYS)
def test_a_run_that_was_stopped_ends_with_the_same_weights(world, results):
    ways, stopped, resumed = results[world][0]
    whole = next(weights for (zero, _), (_, weights) in ways.items() if zero == 2)
    assert [len(stopped[0]), len(resumed[0])] == [2, STEPS - 2]
    assert [r["step"] for r in resumed[0]] == [3, 4]
    assert tensors_digest(resumed[1]) == tensors_digest(whole)
