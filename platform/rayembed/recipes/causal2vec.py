"""Recipes for Causal2Vec (arXiv 2507.23386) on a laptop.

The ablations are settings of any run: `model.num_contextual_tokens` (Table 5),
`model.position` (14), `model.representation` (2, 4, 12), `model.mask` (15), `model.encoder.path`
(6), `model.encoder.frozen` with `model.encoder.lora` (10), `model.backbone.path` (11). Plain
last-token pooling (Tables 2, 3 and 6) is `model.encoder=null` with `model.representation=eos`.
"""

from rayembed.config.backbone import BackboneConfig, LoraConfig
from rayembed.config.data import DataConfig, DatasetConfig
from rayembed.config.run import Run
from rayembed.config.stage import BatchConfig, StageConfig
from rayembed.losses.infonce import InfoNCE
from rayembed.models.causal2vec.config import Causal2VecConfig, EncoderConfig
from rayembed.optim.adamw import AdamW
from rayembed.recipes.building_blocks import (
    compared_scores,
    on_a_laptop,
)
from rayembed.recipes.sample import (
    DESCRIPTION_TASK,
    EVALUATION_INSTRUCTIONS,
    MINILM,
    SENTENCE_TASK,
    SMOLLM2,
    Wikipedia,
)

ENCODER_LAYERS = ("query", "key", "value", "dense")
"""Names of BERT's linear layers, the architecture of E5 and all-MiniLM."""


def quickstart() -> Run:
    """Train SmolLM2-135M with all-MiniLM as its context encoder on Wikipedia summaries: minutes on
    two CPU cores.

    Smaller than the paper's in every size, and without dropout in LoRA and hard negatives, which
    cost as much as they do in NV-Embed's quickstart. The learning rate is that of few steps.
    """
    sample = Wikipedia()
    max_length = 64
    return Run(
        name="causal2vec-quickstart",
        model=Causal2VecConfig(
            backbone=BackboneConfig(path=SMOLLM2),
            encoder=EncoderConfig(
                path=MINILM,
                frozen=False,
                lora=LoraConfig(rank=16, alpha=32, dropout=0.0, target_modules=ENCODER_LAYERS),
                max_length=max_length,
            ),
            lora=LoraConfig(rank=16, alpha=32, dropout=0.0),
            prompt_start="<|im_start|>user\n",
            query_max_length=max_length,
            document_max_length=max_length,
        ),
        data=DataConfig(
            datasets=(
                DatasetConfig(
                    name="wiki-description",
                    source=sample.pairs("description"),
                    query_instruction=DESCRIPTION_TASK,
                    num_samples=1000,
                ),
                DatasetConfig(
                    name="wiki-sentence",
                    source=sample.pairs("sentence"),
                    query_instruction=SENTENCE_TASK,
                    num_samples=1500,
                ),
            ),
        ),
        stages=(
            StageConfig(
                name="retrieval",
                datasets={"wiki-description": 1.0, "wiki-sentence": 2.0},
                batch=BatchConfig(
                    policy="homogeneous",
                    global_pairs=32,
                    num_negatives=0,
                    in_batch_negatives=True,
                ),
                loss=InfoNCE(temperature=0.05),
                optimizer=AdamW(learning_rate=1e-3, warmup_steps=3, decay_steps=72),
                steps=36,
                checkpoint_every_steps=18,
            ),
        ),
        evaluation=compared_scores(
            sample.scores(max_length=64), instructions=EVALUATION_INSTRUCTIONS
        ),
        placement=on_a_laptop(),
    )
