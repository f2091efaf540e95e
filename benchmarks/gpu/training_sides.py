"""Sides of the training benchmark: a step of rayembed and of sentence-transformers, no trainer."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.gpu import made_up, peers

RATE = 2e-5


@dataclass(frozen=True)
class Case:
    """A model and how it is trained."""

    name: str
    folder: str
    """Of the backbone."""
    kind: str
    """`biencoder`, or `nvembed`, which sentence-transformers does not have."""
    shape: dict[str, Any]
    lora: bool
    pairs: int
    """Of a step."""
    longest: int = 512
    micro_batch_tokens: int = 16_384
    key: str = ""
    """On the command line."""


def cases(toy: bool) -> dict[str, Case]:
    """Cases by their names on the command line."""
    if toy:
        encoder, decoder = dict(made_up.TOY_ENCODER), dict(made_up.TOY_DECODER)
        return {
            "bert": Case(
                "toy encoder, all weights", "bert", "biencoder", encoder, False, 6, 40, 128
            ),
            "7b": Case("toy decoder, LoRA 16", "7b", "biencoder", decoder, True, 4, 40, 128),
            "nvembed": Case("toy NV-Embed, LoRA 16", "7b", "nvembed", decoder, True, 4, 40, 128),
        }
    encoder = dict(made_up.published_shape(made_up.BERT_BASE))
    decoder = dict(made_up.published_shape(made_up.MISTRAL_7B))
    return {
        "bert": Case("BERT base (110M), all weights", "bert", "biencoder", encoder, False, 256),
        "7b": Case("Mistral-7B, LoRA 16", "7b", "biencoder", decoder, True, 64, 512, 8192),
        "nvembed": Case(
            "NV-Embed (Mistral-7B), LoRA 16", "7b", "nvembed", decoder, True, 64, 512, 8192
        ),
    }


def settings_of(case: Case, folder: Path, dtype: str) -> Any:
    """Settings of rayembed's model."""
    from rayembed.config.backbone import LatentAttentionPooling, LoraConfig
    from rayembed.models.biencoder.config import BiEncoderConfig
    from rayembed.models.nvembed.config import NVEmbedConfig

    backbone = {"path": str(folder), "dtype": dtype}
    lengths = {"query_max_length": case.longest, "document_max_length": case.longest}
    lora = LoraConfig() if case.lora else None
    if case.kind == "biencoder":
        return BiEncoderConfig(backbone=backbone, lora=lora, **lengths)
    pooling = LatentAttentionPooling(num_latents=512, num_heads=8)
    return NVEmbedConfig(backbone=backbone, lora=lora, pooling=pooling, **lengths)


def stage_of(pairs: int) -> Any:
    """Settings of a stage with this many pairs a step."""
    from rayembed.config.stage import BatchConfig, StageConfig
    from rayembed.losses.infonce import InfoNCE
    from rayembed.optim.adamw import AdamW

    return StageConfig(
        name="only",
        datasets={"pairs": 1},
        batch=BatchConfig(global_pairs=pairs, num_negatives=0, in_batch_negatives=True),
        loss=InfoNCE(temperature=0.05),
        optimizer=AdamW(learning_rate=RATE),
        steps=1,
    )


@dataclass(frozen=True)
class Side:
    """One way to train."""

    prepare: Callable[[list[list[str]]], Any]
    """Tokens of a step's pairs on the CPU, which all sides make ahead of the step."""
    step: Callable[[Any], object]
    """Trains on what was prepared; what comes back is thrown away."""
    vectors: Callable[[list[str]], np.ndarray]
    """Unit vectors of documents, float32."""


def optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(trained, lr=RATE, fused=True)


def ours(
    case: Case,
    folder: Path,
    device: torch.device,
    dtype: str,
    *,
    grad_cache: bool | None = None,
    recompute: bool = False,
    compiled: str | None = None,
) -> Side:
    """Rayembed's.

    Args:
        grad_cache: None: of graphs and layers is kept what fits, as a run does by itself.
        compiled: backend that compiles the layers; None: they are not compiled.
    """
    from rayembed.data.plan.step_batch import make_step_batch
    from rayembed.data.records import Record
    from rayembed.machine.hardware import pass_cost_tokens
    from rayembed.models.loading.build import build_model
    from rayembed.models.passes.encoding import encode
    from rayembed.training.contrastive.collated import collated_step
    from rayembed.training.contrastive.engine_module import EngineModule
    from rayembed.training.contrastive.step import run_step
    from rayembed.training.memory.graph_room import GraphRoom
    from rayembed.training.objective import StepSettings

    model = build_model(settings_of(case, folder, dtype), folder, seed=0).to(device)
    if recompute:
        model.recompute_layers()
    if compiled is not None:
        model.compile_layers(compiled)
    optimizer, passable, stage = optimizer_of(model), EngineModule(model), stage_of(case.pairs)
    settings = StepSettings(
        case.micro_batch_tokens,
        GraphRoom(device, model) if grad_cache is None else grad_cache,
        device,
        pass_cost_tokens=pass_cost_tokens(device.type, model),
    )

    def prepare(rows: list[list[str]]) -> Any:
        records = [Record(str(i), q, (d,), "pairs") for i, (q, d) in enumerate(rows)]
        batch = make_step_batch(0, records, 0, model.tokenizer)
        return collated_step(model, batch, stage, settings)

    def step(prepared: Any) -> None:
        run_step(model, passable, lambda loss, _: loss.backward(), prepared, stage, settings)
        optimizer.step()
        optimizer.zero_grad()

    return Side(prepare, step, lambda texts: encode(model, texts, role="document"))


def peer(
    case: Case, folder: Path, device: torch.device, dtype: str, *, attention: str, recompute: bool
) -> Side:
    """The same in sentence-transformers' modules and loss; forward passes in one micro-batch."""
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

    model = peers.loaded(folder, device, dtype, attention)
    model.max_seq_length = case.longest
    transformer = model[0].auto_model
    if case.lora:
        import peft

        from rayembed.config.backbone import LoraConfig

        lora = LoraConfig()
        transformer.add_adapter(
            peft.LoraConfig(
                r=lora.rank,
                lora_alpha=lora.alpha,
                lora_dropout=lora.dropout,
                target_modules=list(lora.target_modules),
            )
        )
    if recompute:
        transformer.gradient_checkpointing_enable({"use_reentrant": False})
    loss_of = MultipleNegativesRankingLoss(model, scale=20.0)
    optimizer = optimizer_of(model)
    model.train()

    def prepare(rows: list[list[str]]) -> list[Any]:
        columns = (list(column) for column in zip(*rows, strict=True))
        return [model.preprocess(column) for column in columns]

    def step(features: list[Any]) -> None:
        moved = [
            {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in one.items()}
            for one in features
        ]
        loss_of(moved, torch.empty(0)).backward()
        optimizer.step()
        optimizer.zero_grad()

    def vectors(texts: list[str]) -> np.ndarray:
        model.eval()
        found = model.encode(texts, normalize_embeddings=True, show_progress_bar=False)
        model.train()
        return np.asarray(found, dtype=np.float32)

    return Side(prepare, step, vectors)


SIDES = {
    "auto": "rayembed, not compiled",
    "compiled": "rayembed, layers compiled",
    "graph": "rayembed, one graph",
    "cache": "rayembed, GradCache",
    "peer": "sentence-transformers",
}
"""Names on the command line → what they are called in the table; `peer` is one side or two."""


def sides(
    case: Case, toy: bool, chosen: Sequence[str]
) -> Iterator[tuple[str, str, Callable, dict[str, Any]]]:
    """Name on the command line, name in the table, what makes its step, and further arguments."""
    further: dict[str, dict[str, Any]] = {
        "auto": {},
        # A compiler of code for CPUs would work for minutes: there graphs are made alone.
        "compiled": {"compiled": "eager" if toy else "inductor"},
        "graph": {"grad_cache": False, "recompute": case.lora},
        "cache": {"grad_cache": True, "recompute": case.lora},
    }
    for key, more in further.items():
        if key in chosen:
            yield key, SIDES[key], ours, more
    if case.kind == "biencoder" and "peer" in chosen:
        for name, attention in peers.attentions():
            yield "peer", name, peer, {"attention": attention, "recompute": case.lora}
