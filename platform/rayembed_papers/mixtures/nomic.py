"""The published run of Nomic Embed v2 MoE (arXiv 2502.07972)."""

from rayembed.config.backbone import BackboneConfig
from rayembed.config.data import DataConfig
from rayembed.config.run import Run
from rayembed.config.run_evaluation import EvaluationConfig
from rayembed.config.stage import BatchConfig, StageConfig
from rayembed.losses.infonce import InfoNCE
from rayembed.models.nomic_moe.config import (
    BalanceConfig,
    ExpertsConfig,
    NomicMoeConfig,
)
from rayembed.optim.adamw import AdamW
from rayembed.optim.cosine import Cosine, Linear
from rayembed.recipes.nomic import MATRYOSHKA
from rayembed_papers.mixtures.datasets.nomic import (
    LANGUAGES,
    finetuning_entries,
    pretraining_entries,
)
from rayembed_papers.mixtures.datasets.nomic_pairs import PAIRS as ENGLISH_PAIRS
from rayembed_papers.mixtures.published import PUBLISHED_SCORES, on_gpus

MNOMIC_BERT = "hf://nomic-ai/nomic-xlm-2048@main"
"""XLM-R after masked-language modelling with rotary positions. The paper calls it mNomic-BERT;
configurations of the released models name this one as their start."""

PAIRS = sum(part.num_pairs for part in ENGLISH_PAIRS) + sum(LANGUAGES.values())
"""Number of pretraining pairs, for one epoch (section 4.2: 1.6 billion; Table 10 has the counts).
"""


def v2_moe() -> Run:
    """Nomic Embed v2 (sections 4.3 and 4.5): pretraining and finetuning with all data.

    It starts from mNomic-BERT; another, such as `rayembed pretrain` leaves, is named with
    `--set model.backbone.path=…`. In finetuning the balance loss is left on; the released
    configuration turns it off there, which the paper does not say.
    """
    pretraining = tuple(entry.config for entry in pretraining_entries())
    finetuning = tuple(entry.config for entry in finetuning_entries())
    pairs, tuned = 16_384, sum(entry.config.num_samples or 0 for entry in finetuning_entries())
    return Run(
        name="nomic-v2-moe",
        model=NomicMoeConfig(
            backbone=BackboneConfig(path=MNOMIC_BERT),
            experts=ExpertsConfig(start="released", balance=BalanceConfig(coefficient=1.0)),
            dimensions=(MATRYOSHKA,),
            query_max_length=512,
            document_max_length=512,
        ),
        data=DataConfig(datasets=(*pretraining, *finetuning)),
        stages=(
            StageConfig(
                name="pretrain",
                datasets={dataset.name: 1.0 for dataset in pretraining},
                batch=BatchConfig(
                    policy="homogeneous",
                    temperature=1.0,
                    global_pairs=pairs,
                    num_negatives=0,
                    in_batch_negatives=True,
                ),
                loss=InfoNCE(temperature=0.02),
                optimizer=AdamW(
                    learning_rate=8e-5, weight_decay=0.01, warmup_steps=1000, schedule=Cosine()
                ),
                steps=PAIRS // pairs,
                query_max_length=32,
                document_max_length=256,
                checkpoint_every_steps=1000,
            ),
            StageConfig(
                name="finetune",
                datasets={dataset.name: 1.0 for dataset in finetuning},
                batch=BatchConfig(
                    policy="homogeneous",
                    temperature=1.0,
                    global_pairs=256,
                    num_negatives=10,
                    in_batch_negatives=True,
                ),
                loss=InfoNCE(temperature=0.02, dimensions=(MATRYOSHKA,)),
                optimizer=AdamW(
                    learning_rate=2e-5, weight_decay=0.01, warmup_steps=400, schedule=Linear()
                ),
                steps=tuned // 256,
                checkpoint_every_steps=1000,
            ),
        ),
        evaluation=EvaluationConfig(benchmarks=PUBLISHED_SCORES),
        placement=on_gpus(workers=16, micro_batch_tokens=65_536),
    )
