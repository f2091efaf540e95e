"""Recipes for NV-Embed (arXiv 2405.17428) on a laptop.

Tables 2 and 3 are `--set model.pooling.kind=… --set model.mask=…` on any run.
"""

from rayembed.config.backbone import BackboneConfig, LatentAttentionPooling, LoraConfig
from rayembed.config.data import DataConfig, DatasetConfig
from rayembed.config.mining import MiningConfig
from rayembed.config.run import Run
from rayembed.config.stage import BatchConfig, StageConfig
from rayembed.data.mining.rules import PercPos
from rayembed.losses.infonce import InfoNCE
from rayembed.models.nvembed.config import NVEmbedConfig
from rayembed.optim.adamw import AdamW
from rayembed.recipes.building_blocks import (
    compared_scores,
    on_a_laptop,
)
from rayembed.recipes.sample import (
    CLASSIFICATION_TASK,
    CLUSTERING_TASK,
    DESCRIPTION_TASK,
    EVALUATION_INSTRUCTIONS,
    MINILM,
    SENTENCE_TASK,
    SMOLLM2,
    Wikipedia,
)


def quickstart() -> Run:
    """Train SmolLM2-135M on Wikipedia summaries, both stages within minutes on two CPU
    cores.

    Smaller than the paper's in every size, with the first 8 of the 30 layers, so that it ends in
    time on CPUs without units for bfloat16. Two differences are of kind: no dropout in LoRA, whose
    kernels take as long on a CPU as the rest of the forward pass, and no hard negatives in stage 1,
    where each costs as much as a positive.
    """
    sample = Wikipedia()
    max_length = 48
    return Run(
        name="nvembed-quickstart",
        model=NVEmbedConfig(
            backbone=BackboneConfig(path=SMOLLM2, num_layers=8),
            pooling=LatentAttentionPooling(num_latents=64, num_heads=8, head_dim=72),
            lora=LoraConfig(rank=16, alpha=32, dropout=0.0),
            query_max_length=64,  # of which the instruction takes a third
            document_max_length=max_length,
        ),
        data=DataConfig(datasets=_wikipedia_datasets(sample, max_length)),
        stages=(
            StageConfig(
                name="retrieval",
                datasets={"wiki-description": 1.0, "wiki-sentence": 2.0},
                batch=BatchConfig(global_pairs=30, num_negatives=0, in_batch_negatives=True),
                loss=InfoNCE(temperature=0.05),
                optimizer=AdamW(
                    learning_rate=1e-3,
                    pooling_learning_rate=1e-3,
                    weight_decay=0.03,
                    warmup_steps=3,
                ),
                steps=36,
                checkpoint_every_steps=18,
            ),
            StageConfig(
                name="blend",
                datasets={
                    "wiki-description": 1.0,
                    "wiki-sentence": 2.0,
                    "wiki-topic-classification": 1.0,
                    "wiki-topic-clustering": 1.0,
                },
                batch=BatchConfig(global_pairs=8, num_negatives=4, in_batch_negatives=False),
                loss=InfoNCE(temperature=0.05),
                optimizer=AdamW(
                    learning_rate=3e-4,
                    pooling_learning_rate=3e-4,
                    weight_decay=0.03,
                    warmup_steps=2,
                ),
                steps=16,
                checkpoint_every_steps=8,
            ),
        ),
        evaluation=compared_scores(
            sample.scores(max_length=max_length), instructions=EVALUATION_INSTRUCTIONS
        ),
        placement=on_a_laptop(),
    )


def _wikipedia_datasets(sample: Wikipedia, max_length: int) -> tuple[DatasetConfig, ...]:
    mining = MiningConfig(
        teacher=MINILM,
        num_negatives=7,
        rule=PercPos(max_relative_score=0.95),
        max_length=max_length,
    )
    return (
        DatasetConfig(
            name="wiki-description",
            source=sample.pairs("description"),
            query_instruction=DESCRIPTION_TASK,
            num_samples=700,
            mining=mining,
        ),
        DatasetConfig(
            name="wiki-sentence",
            source=sample.pairs("sentence"),
            query_instruction=SENTENCE_TASK,
            num_samples=1000,
            mining=mining,
        ),
        DatasetConfig(
            name="wiki-topic-classification",
            source=sample.topics(),
            task="classification",
            query_instruction=CLASSIFICATION_TASK,
            num_samples=1000,
        ),
        DatasetConfig(
            name="wiki-topic-clustering",
            source=sample.topics(),
            task="clustering",
            query_instruction=CLUSTERING_TASK,
            num_samples=1000,
        ),
    )
