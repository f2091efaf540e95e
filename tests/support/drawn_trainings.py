"""Trainings drawn at random, and ways to run them that must not change the trained weights.

A `Training` decides the weights: architecture, data, loss, optimiser. A `Way` is how some steps of
it run: workers, ZeRO stage, micro-batches, GradCache and so on. `trained` does both under
`run_distributed`, as a run does: from a plan on disk, by `StageTrainer.fit`, from a checkpoint.
"""

import dataclasses
import random
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from made_up_records import made_up_records
from made_up_teachers import TEACHERS
from run_distributed import run_distributed
from tiny_models import (
    save_cde_stages,
    save_decoder,
    save_encoder,
    save_modern_encoder,
    save_nomic_encoder,
)
from told import Told, in_turn
from train_made_up import KeepFirst

from rayembed.config.placement import Placement
from rayembed.config.settings import parse
from rayembed.config.stage import StageConfig
from rayembed.data.engine.parts import write_part
from rayembed.data.plan.batch_plan import TRAINING, BatchPlan
from rayembed.data.plan.order import PlanConfig, columns_for
from rayembed.data.plan.step_batch import make_step_batch
from rayembed.data.plan.write import write_plan
from rayembed.data.records import reject_reason
from rayembed.distributed.collectives import rank, world_size
from rayembed.models.biencoder.config import BiEncoderConfig
from rayembed.models.causal2vec.config import Causal2VecConfig
from rayembed.models.cde.config import CDEConfig
from rayembed.models.loading.build import build_model
from rayembed.models.nomic_moe.config import NomicMoeConfig
from rayembed.models.nvembed.config import NVEmbedConfig
from rayembed.training import engine as engine_module
from rayembed.training.checkpoints.checkpoint import Checkpoint, expected_position
from rayembed.training.contrastive import batch_loss
from rayembed.training.contrastive.step import EmbeddingObjective, stage_tokenizer
from rayembed.training.engine import DeepSpeedEngine
from rayembed.training.trainer import StageTrainer

PAIRS, STEPS, NEGATIVES = 12, 3, 2

WORKERS = (1, 2, 3, 4)
"""All divide the pairs of a batch; with three, shards and shares of parameters are uneven."""

EXPERT_PARALLEL = {1: 1, 2: 2, 3: 3, 4: 2}
"""Number of workers → those that share the experts of a layer."""

LORA = {"rank": 2, "alpha": 4, "dropout": 0.0}
LENGTHS = {"query_max_length": 32, "document_max_length": 32}

LATENTS = {"kind": "latent_attention", "num_latents": 4, "num_heads": 2, "head_dim": 8}
ENCODER = {"path": "given", "frozen": False, "max_length": 32}
CONTEXT = {"num_context": 8, "sequence_dropout": 0.0, "num_soft_prompts": 2, "output": "residual"}
PREFIXES = {"query_prefix": "", "document_prefix": ""}
EXPERTS = {"num_experts": 6, "top_k": 2, "start": "released"}

ARCHITECTURES = {
    "bert": (BiEncoderConfig, "bert", {}, ("query", "value", "dense")),
    "modern": (BiEncoderConfig, "modern", {}, ("Wqkv", "Wo")),
    "nvembed": (NVEmbedConfig, "llama", {"pooling": LATENTS}, ("q_proj", "v_proj", "down_proj")),
    "causal2vec": (
        *(Causal2VecConfig, "causal2vec"),
        {"encoder": ENCODER, "num_contextual_tokens": 2},
        ("q_proj", "v_proj"),
    ),
    "cde": (CDEConfig, "cde", {"encoder": {"path": "given"}, **CONTEXT, **PREFIXES}, None),
    "nomic": (NomicMoeConfig, "bert", {"experts": EXPERTS}, None),
}
"""Name → settings, folder of pretrained parts, further settings, layers that LoRA may adapt."""

DIRECTIONS = ("document_to_query", "query_to_query", "document_to_document")
LOSSES = (
    {"kind": "infonce", "temperature": 0.1},
    {"kind": "infonce", "temperature": 0.1, "dimensions": [16]},
    {"kind": "infonce", "temperature": 0.1, "false_negatives": {"margin": 0.1}},
    {"kind": "siglip"},
    {"kind": "listwise_kl"},
    {"kind": "margin_mse"},
    {"kind": "vector_distillation"},
    {"kind": "similarity_distillation"},
    {"kind": "infonce", "temperature": 0.1, "spread_out": 0.5},
    {"kind": "cosent"},
    {"temperature": 0.1, "directions": [*DIRECTIONS], "dimensions": [16]},
    {"temperature": 0.1, "directions": ["document_to_query"], "partition": "per_direction"},
    {"temperature": 0.1, "hardness": {}, "focal": 0.5, "learnt_temperature": True},
    {"temperature": 0.1, "false_negatives": {"by": "own", "margin": 0.1}},
    {"kind": "margin_mse", "directions": ["query_to_query"], "learnt_temperature": True},
)
SCHEDULES = ("linear", "cosine", "constant", {"kind": "wsd", "decay_share": 0.5})


@dataclass(frozen=True)
class Training:
    """All that may decide the weights."""

    name: str
    architecture: str
    model: dict[str, Any]
    stage: dict[str, Any]
    in_batch: tuple[bool, ...]
    """Of each data set: whether its rows have in-batch negatives."""
    seed: int

    @property
    def zero_stages(self) -> tuple[int, ...]:
        return parse(StageConfig, self.stage).optimizer.zero_stages


@dataclass(frozen=True)
class Way:
    """How steps are run; none of it may change the weights."""

    workers: int = 1
    zero_stage: int = 0
    reduce_once: bool = True
    grad_cache: bool | str = False
    tokens: int = 1_000_000
    """Of a micro-batch."""
    recompute: bool = False
    unpadded: str = "never"
    block: int = 1 << 23
    """Pairs of row and candidate that the loss computes at a time."""
    partitioned: bool = False
    """In stage 3: whether small parameters are partitioned too."""
    expert_parallel: int = 1


PLAIN = Way()
"""One worker, nothing partitioned, one pass."""


@dataclass(frozen=True)
class Run:
    """A training run in one way, or in two with a resume between them."""

    name: str
    training: Training
    ways: tuple[Way, ...]
    stops: int = STEPS
    """Step at which the first of two ways ends."""
    with_fault: bool = False
    """Whether the engine counts no backward passes, as it did before kept graphs were mended."""


def draw_training(seed: int, architecture: str | None = None) -> Training:
    """Any training, but with the given architecture."""
    draw = random.Random(f"training {seed}")
    name = architecture or draw.choice(sorted(ARCHITECTURES))
    modules = ARCHITECTURES[name][3]
    model: dict[str, Any] = {}
    if modules and (name == "nvembed" or draw.random() < 0.4):
        model["lora"] = {**LORA, "target_modules": modules} if draw.random() < 0.8 else None
    elif modules:
        model["lora"] = None
    loss = draw.choice(LOSSES)
    kind = loss.get("kind", "infonce")
    graded, own = kind == "cosent", draw.random() < 0.2 and "directions" not in loss
    several = kind == "infonce" and "directions" not in loss and draw.random() < 0.3
    optimizer = {
        "kind": draw.choice(("adamw", "adamw", "muon")),
        "learning_rate": 0.01,
        "weight_decay": draw.choice((0.0, 0.1)),
        "warmup_steps": draw.choice((0, 2)),
        "gradient_clipping": draw.choice((0.0, 0.5)),
        "schedule": draw.choice(SCHEDULES),
        # Adam divides by the root of the second moment: with its own 1e-8 it makes whole updates
        # of a gradient that is rounding alone, as of a key's bias.
        "eps": 1e-3,
    }
    sets = draw.choice((1, 2, 3))
    stage = {
        "name": "s",
        "datasets": {f"d{i}": draw.choice((1, 2)) for i in range(sets)},
        "batch": {
            "global_pairs": PAIRS,
            "num_negatives": 0 if graded else NEGATIVES,
            "in_batch_negatives": not graded and not own,
            "num_positives": 3 if several else 1,
        },
        "loss": loss,
        "optimizer": optimizer,
        "steps": STEPS,
    }
    if kind in ("vector_distillation", "similarity_distillation"):
        stage["teachers"] = [{"teacher": "five"}, {"teacher": "eight"}]
    in_batch = tuple(draw.random() < 0.8 for _ in range(sets))
    return Training(f"training-{seed}", name, model, stage, in_batch, seed)


def draw_way(draw: random.Random, training: Training, **fixed: Any) -> Way:
    """Any way to run a training, but with the fixed settings."""
    drawn = {
        "workers": draw.choice(WORKERS),
        "zero_stage": draw.choice(training.zero_stages),
        "reduce_once": draw.random() < 0.5,
        "grad_cache": draw.choice((True, False, "auto")),
        "tokens": draw.choice((40, 70, 150)),
        "recompute": draw.random() < 0.3,
        "unpadded": "always" if draw.random() < 0.3 else "never",
        "block": draw.choice((1 << 23, 60)),
        "partitioned": draw.random() < 0.5,
    }
    way, share = Way(**{**drawn, **fixed}), draw.random() < 0.5
    if training.architecture == "nomic" and way.zero_stage < 3 and share:
        return dataclasses.replace(way, expert_parallel=EXPERT_PARALLEL[way.workers])
    return way


def draw_run(seed: int, training: Training, numbers: tuple[int, ...], **fixed: Any) -> Run:
    """Any run of a training, a third of them resumed; its last way has the fixed settings.

    Args:
        numbers: of workers, of which the first part of a resumed run has one.
    """
    draw = random.Random(f"run {seed}")
    ways = [draw_way(draw, training, **fixed)]
    stops = STEPS
    if draw.random() < 1 / 3:
        ways.insert(0, draw_way(draw, training, workers=draw.choice(numbers)))
        stops = draw.randint(1, STEPS - 1)
    return Run(f"run {seed}", training, tuple(ways), stops)


def results(folder: Path, runs: list[Run]) -> dict[str, dict[str, Any]]:
    """Of each run `start` and `weights` by name and the least `passes` of a step, from as few
    groups of processes as there are numbers of workers.
    """
    folders = _folders(folder)
    for training in {run.training.name: run.training for run in runs}.values():
        _write_plan(folder, training)
    found: dict[str, dict[str, Any]] = {}
    for place in range(2):
        for workers in WORKERS:
            due = [
                run for run in runs if place < len(run.ways) and run.ways[place].workers == workers
            ]
            if due:
                found |= run_distributed(trained, workers, folder, folders, due, place)[0]
    return found


def trained(world_rank, world, folder, folders, runs, place):
    """Results of the runs that end with their way number `place`, of rank 0."""
    found = {}
    for run in runs:
        try:
            result = _train(folder, folders, run, place)
        except Exception as error:
            raise AssertionError(f"{describe(run)}: {error}") from error
        if world_rank == 0 and place == len(run.ways) - 1:
            found[run.name] = result
    return found


def distance(found: dict[str, Any], plain: dict[str, Any]) -> float:
    """Mean difference of the weights in the worst tensor, in mean movements of all weights.

    Not in the movement of each tensor: those without a gradient, as a key's bias, move by rounding.
    """
    assert found["weights"].keys() == plain["weights"].keys()
    start, end = plain["start"], plain["weights"]
    moved = torch.cat([(end[name] - start[name]).abs().flatten() for name in end]).mean().item()
    assert moved > 1e-5, "a training that moves nothing compares nothing"
    worst = max((found["weights"][name] - end[name]).abs().mean().item() for name in end)
    return worst / moved


def describe(run: Run) -> str:
    """A run in one line, with the seeds that draw it again."""
    training, ways = run.training, f" then, after step {run.stops}, ".join(map(str, run.ways))
    kinds = [str(training.stage["loss"]), training.stage["optimizer"]["kind"]]
    return f"{run.name} of {training.name} ({', '.join([training.architecture, *kinds])}): {ways}"


class _Planned(EmbeddingObjective):
    """The objective of a run, but for teachers whose vectors are made up."""

    def teacher_widths(self, plan):
        return tuple(teacher.width for teacher in TEACHERS[: self.num_teachers])

    def batches(self, plan, model, stage, seed):
        self.num_teachers = len(stage.teachers)
        if not stage.teachers:
            return super().batches(plan, model, stage, seed)
        tokenizer = stage_tokenizer(stage, model.tokenizer)

        def make(step):
            records = plan.read(step, rank(), world_size(), TRAINING)
            return make_step_batch(step, records, plan.num_negatives, tokenizer, TEACHERS)

        return make

    def __init__(self, num_teachers):
        self.num_teachers = num_teachers


def _train(folder, folders, run, place):
    training, way = run.training, run.ways[place]
    config, parts, further, _ = ARCHITECTURES[training.architecture]
    backbone = {"path": "given", "dtype": "float32"}
    settings = parse(config, {"backbone": backbone, **further, **LENGTHS, **training.model})
    model = build_model(settings, folders[parts], seed=3)
    start = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
    stage = parse(StageConfig, training.stage)
    last = place == len(run.ways) - 1
    checkpoint, plan = folder / f"{run.name} checkpoint", BatchPlan.open(_plan(folder, training))
    passes = []
    stops = Told(
        on_step=lambda record: passes.append(record["micro_batches"]),
        ends_after=lambda step: not last and step == run.stops,
    )
    placement = Placement(
        zero_stage=way.zero_stage,
        reduce_once=way.reduce_once,
        grad_cache=way.grad_cache,
        gradient_checkpointing=way.recompute,
        unpadded=way.unpadded,
        expert_parallel=way.expert_parallel,
        # Of other sizes on each worker, so that some are fillers; cheap passes, so that they are
        # several.
        micro_batch_tokens=way.tokens + 20 * rank(),
        pass_cost_tokens=8,
    )
    trainer = StageTrainer(
        stage,
        placement,
        model,
        _Planned(len(stage.teachers)),
        plan,
        seed=0,
        run_fingerprint="run",
        callbacks=[stops, *([] if last else [KeepFirst(checkpoint)])],
        stream=in_turn,
    )
    position = expected_position("s", "run", plan.fingerprint)
    with _patched(run, way):
        trainer.fit(Checkpoint(checkpoint, position) if place else None)
    weights = {n: w.cpu().clone() for n, w in trainer.engine.trainable_weights()}
    trainer.close()
    return {"start": start, "weights": weights, "passes": min(passes)}


@contextmanager
def _patched(run, way):
    settings = engine_module.deepspeed_settings

    def partitioned(*arguments):
        values = settings(*arguments)
        values["zero_optimization"]["stage3_param_persistence_threshold"] = 0
        return values

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch_loss, "_BLOCK", way.block)
        if way.partitioned and way.zero_stage == 3:
            patch.setattr(engine_module, "deepspeed_settings", partitioned)
        if run.with_fault:
            patch.setattr(DeepSpeedEngine, "_begin_pass", lambda self: None)
        yield


def _plan(folder: Path, training: Training) -> str:
    return str(folder / f"{training.name} plan")


def _write_plan(folder: Path, training: Training) -> None:
    """A plan over data sets of other sizes, with repeated texts, classes and ragged negatives."""
    draw = random.Random(f"records {training.seed}")
    stage, parts = parse(StageConfig, training.stage), {}
    for i, name in enumerate(training.stage["datasets"]):
        made = made_up_records(draw.randint(30, 50), num_negatives=NEGATIVES, seed=draw.random())
        records = [
            dataclasses.replace(
                record,
                id=f"{name}/{record.id}",
                dataset=name,
                query_instruction="find" if i else "",
                in_batch=record.in_batch and training.in_batch[i],
                negatives=tuple(
                    dataclasses.replace(one, score=draw.random()) for one in record.negatives
                ),
                positive_score=draw.random(),
                similarity=draw.randint(0, 4) / 4,
            )
            for record in made
            if reject_reason(record.to_row()) is None  # some words are drawn for both sides
        ]
        parts[name] = [write_part(str(folder / training.name), records)]
    config = PlanConfig(
        weights=stage.datasets,
        global_pairs=PAIRS,
        num_negatives=stage.batch.num_negatives,
        num_steps=STEPS,
        seed=training.seed,
        in_batch_negatives=stage.batch.in_batch_negatives,
        key="s",
        columns=columns_for(stage.loss),
    )
    write_plan(_plan(folder, training), parts, config)


def _folders(folder: Path) -> dict[str, Any]:
    """Pretrained parts of all architectures."""
    return {
        "bert": Path(save_encoder(folder / "bert")),
        "modern": Path(save_modern_encoder(folder / "modern")),
        "llama": Path(save_decoder(folder / "llama")),
        "causal2vec": {
            "backbone": save_decoder(folder / "decoder"),
            "encoder": save_encoder(folder / "encoder"),
        },
        "cde": save_cde_stages(folder / "cde", save_nomic_encoder),
    }
