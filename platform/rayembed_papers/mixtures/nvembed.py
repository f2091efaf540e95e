"""Runs of NV-Embed at published size (arXiv 2405.17428): Table 11, with the data of each row of
Table 4.
"""

from functools import partial

from rayembed.config.backbone import BackboneConfig, LatentAttentionPooling, LoraConfig
from rayembed.config.data import DataConfig, DatasetConfig
from rayembed.config.run import Run
from rayembed.config.run_evaluation import EvaluationConfig
from rayembed.config.settings import changed
from rayembed.config.stage import BatchConfig, StageConfig
from rayembed.data.sources.classes import LabelForm
from rayembed.losses.infonce import InfoNCE
from rayembed.models.nvembed.config import NVEmbedConfig
from rayembed.optim.adamw import AdamW
from rayembed.optim.cosine import Linear
from rayembed_papers.ablations import reversed_stages, single_stage
from rayembed_papers.mixtures.datasets.nvembed import (
    entries,
    other_entries,
    retrieval_entries,
    uniform_over_samples,
)
from rayembed_papers.mixtures.published import PUBLISHED_SCORES, on_gpus

MISTRAL_7B = "hf://mistralai/Mistral-7B-v0.1@main"


def nvembed_v1() -> Run:
    """NV-Embed-v1 (Table 4, last row).

    Without mined negatives, added and synthetic data; names of classes are the documents.
    """
    return published("nvembed-v1", mined=False, added=False, synthetic=False, labels="label")


def nvembed_v2() -> Run:
    """NV-Embed-v2: mined negatives, all data, examples as documents of classes."""
    return published("nvembed-v2", mined=True, added=True, synthetic=True, labels="example")


def nvembed_v2_public() -> Run:
    """NV-Embed-v2 with publicly available data: without BioASQ, HoVer and synthetic pairs.

    Weights and steps are those of the whole, in which the three have 5 % of all samples.
    """
    run = nvembed_v2()
    left_out = {entry.config.name for entry in entries() if entry.home.layout == "own"}
    data = changed(run.data, datasets=[d for d in run.data.datasets if d.name not in left_out])
    stages = [
        changed(
            stage,
            datasets={d: weight for d, weight in stage.datasets.items() if d not in left_out},
        )
        for stage in run.stages
    ]
    return changed(run, name="nvembed-v2-public", data=data, stages=stages)


def published(name: str, *, mined: bool, added: bool, synthetic: bool, labels: LabelForm) -> Run:
    """Build a run of published size (Table 11) with the data of one row of Table 4.

    Sizes of the batches, steps, optimiser and LoRA are the paper's. It does not state the
    temperature, Adam's other values and clipping; those here are the usual ones.
    """
    first = retrieval_entries(mined=mined, added=added, synthetic=synthetic)
    retrieval = tuple(entry.config for entry in first)
    others = other_entries(mined=mined, labels=labels)
    everything = (*retrieval, *(entry.config for entry in others))
    return Run(
        name=name,
        model=NVEmbedConfig(
            backbone=BackboneConfig(path=MISTRAL_7B, dtype="bfloat16"),
            mask="bidirectional",
            pooling=LatentAttentionPooling(num_latents=512, num_heads=8),
            lora=LoraConfig(rank=16, alpha=32, dropout=0.1),
            query_max_length=512,
            document_max_length=512,
        ),
        data=DataConfig(datasets=everything),
        stages=(
            _published_stage(
                "retrieval", retrieval, in_batch=True, steps=20_000, learning_rate=2e-5
            ),
            _published_stage(
                "blend", everything, in_batch=False, steps=18_000, learning_rate=1.5e-5
            ),
        ),
        evaluation=EvaluationConfig(benchmarks=PUBLISHED_SCORES),
        placement=on_gpus(micro_batch_tokens=16_384),
    )


def _published_stage(
    name: str,
    datasets: tuple[DatasetConfig, ...],
    *,
    in_batch: bool,
    steps: int,
    learning_rate: float,
) -> StageConfig:
    return StageConfig(
        name=name,
        datasets=uniform_over_samples(datasets),
        batch=BatchConfig(global_pairs=128, num_negatives=7, in_batch_negatives=in_batch),
        loss=InfoNCE(temperature=0.02),
        optimizer=AdamW(
            learning_rate=learning_rate, weight_decay=0.03, warmup_steps=50, schedule=Linear()
        ),
        steps=steps,
        checkpoint_every_steps=500,
    )


def single_stage_alone() -> Run:
    """The run of Table 4, "Single Stage (Inbatch Disabled)"."""
    return single_stage(nvembed_v2(), "nvembed-v2-single-stage", in_batch=False)


def single_stage_in_batch() -> Run:
    """The run of Table 4, "Single Stage (Inbatch Enabled)"."""
    return single_stage(nvembed_v2(), "nvembed-v2-single-stage-in-batch", in_batch=True)


def stages_reversed() -> Run:
    """The run of Table 4, "Reversed Two Stage"."""
    return reversed_stages(nvembed_v2(), "nvembed-v2-reversed")


LABELS = partial(
    published, "nvembed-v2-labels", mined=True, added=True, synthetic=True, labels="label"
)
"""Table 4, second part: class names as documents."""

S0 = partial(
    published, "nvembed-v2-s0", mined=False, added=False, synthetic=False, labels="example"
)
S1 = partial(published, "nvembed-v2-s1", mined=True, added=False, synthetic=False, labels="example")
S2 = partial(published, "nvembed-v2-s2", mined=True, added=True, synthetic=False, labels="example")
"""Table 4, third part: without mined negatives, with them, with more data."""
