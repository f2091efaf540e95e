"""Recipes for Nomic Embed v2 MoE (arXiv 2502.07972) on a laptop.

Ablations are settings of any run: `model.experts=null` (dense), `model.experts.top_k=1` (Table
9), `model.experts.every=1` (Table 7), `model.experts.start=released` or `random`.
"""

from rayembed.config.backbone import BackboneConfig
from rayembed.config.data import DataConfig, DatasetConfig
from rayembed.config.run import Run
from rayembed.config.stage import BatchConfig, StageConfig
from rayembed.losses.infonce import InfoNCE
from rayembed.models.nomic_moe.config import (
    SEARCH_PREFIXES,
    BalanceConfig,
    ExpertsConfig,
    NomicMoeConfig,
)
from rayembed.optim.adamw import AdamW
from rayembed.optim.cosine import Cosine, Linear
from rayembed.recipes.building_blocks import compared_scores, on_a_laptop
from rayembed.recipes.sample import MINILM, Language, Wikipedia

MATRYOSHKA = 256
"""Embedding width besides the full 768 (section 4.5)."""


def quickstart() -> Run:
    """Train all-MiniLM with experts on English, French and Spanish summaries: minutes on two CPU
    cores.

    Both stages of the paper at a small size: pretraining on pairs of one language and on texts of
    the same article in two, each batch of one data set; finetuning with the Matryoshka loss, on
    English pairs too. Without hard negatives, each of which costs as much as a positive.
    """
    sample = Wikipedia(languages=("en", "es", "fr"))
    languages: tuple[Language, ...] = ("en", "fr", "es")
    sentences = tuple(
        DatasetConfig(name=f"sentence-{code}", source=sample.pairs("sentence", code))
        for code in languages
    )
    crossing = tuple(
        DatasetConfig(
            name=f"en-{code}",
            source=sample.pairs("translation", to=code),
            # A text of either language may ask for the other; both are documents.
            query_instruction=SEARCH_PREFIXES[1],
        )
        for code in languages[1:]
    )
    description = DatasetConfig(name="description-en", source=sample.pairs("description"))
    max_length = 64
    batch = BatchConfig(
        policy="homogeneous", global_pairs=64, num_negatives=0, in_batch_negatives=True
    )
    return Run(
        name="nomic-quickstart",
        model=NomicMoeConfig(
            backbone=BackboneConfig(path=MINILM),
            experts=ExpertsConfig(balance=BalanceConfig(coefficient=0.1)),
            dimensions=(MATRYOSHKA,),
            query_max_length=max_length,
            document_max_length=max_length,
        ),
        data=DataConfig(datasets=(*sentences, *crossing, description)),
        stages=(
            StageConfig(
                name="pretrain",
                datasets={dataset.name: 1.0 for dataset in (*sentences, *crossing)},
                batch=batch,
                loss=InfoNCE(temperature=0.05),
                optimizer=AdamW(learning_rate=2e-4, warmup_steps=12, schedule=Cosine()),
                steps=90,
                checkpoint_every_steps=45,
            ),
            StageConfig(
                name="finetune",
                datasets={"description-en": 1.0, "sentence-en": 1.0},
                batch=batch,
                loss=InfoNCE(temperature=0.05, dimensions=(MATRYOSHKA,)),
                optimizer=AdamW(learning_rate=1e-4, warmup_steps=5, schedule=Linear()),
                steps=25,
                checkpoint_every_steps=25,
            ),
        ),
        evaluation=compared_scores(sample.scores(max_length=64, languages=("es", "fr"))),
        # Each micro-batch has a gradient of all experts, whatever part of them its tokens chose.
        placement=on_a_laptop(micro_batch_tokens=4096),
    )
