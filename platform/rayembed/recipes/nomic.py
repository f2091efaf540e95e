"""Runs of Nomic Embed v2 MoE (arXiv 2502.07972): the published one and one for a laptop.

Ablations are settings of any of them: `model.experts=null` (dense), `model.experts.top_k=1` (Table
9), `model.experts.every=1` (Table 7), `model.experts.start=released` or `random`.
"""

from rayembed.config.backbone import BackboneConfig
from rayembed.config.data import DataConfig, DatasetConfig
from rayembed.config.run import Run
from rayembed.config.run_evaluation import EvaluationConfig
from rayembed.config.settings import changed
from rayembed.config.stage import BatchConfig, StageConfig
from rayembed.errors import ConfigError
from rayembed.losses.infonce import InfoNCE
from rayembed.models.nomic_moe.config import (
    SEARCH_PREFIXES,
    BalanceConfig,
    ExpertsConfig,
    NomicMoeConfig,
)
from rayembed.optim.adamw import AdamW
from rayembed.optim.cosine import Cosine, Linear
from rayembed.recipes.building_blocks import PUBLISHED_SCORES, compared_scores, on_a_laptop, on_gpus
from rayembed.recipes.datasets.nomic import LANGUAGES, finetuning_entries, pretraining_entries
from rayembed.recipes.datasets.nomic_pairs import PAIRS as ENGLISH_PAIRS
from rayembed.samples.assets import MINILM
from rayembed.samples.references import Language
from rayembed.samples.wikipedia import Wikipedia

MNOMIC_BERT = "hf://nomic-ai/nomic-xlm-2048@main"
"""XLM-R after masked-language modelling with rotary positions. The paper calls it mNomic-BERT;
configurations of the released models name this one as their start."""

PAIRS = sum(part.num_pairs for part in ENGLISH_PAIRS) + sum(LANGUAGES.values())
"""Number of pretraining pairs, for one epoch (section 4.2: 1.6 billion; Table 10 has the counts).
"""

MATRYOSHKA = 256
"""Embedding width besides the full 768 (section 4.5)."""


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
        placement=on_gpus(workers=16, zero_stage=2, micro_batch_tokens=65_536),
    )


def quickstart() -> Run:
    """all-MiniLM with experts on English, French and Spanish summaries: minutes on two CPU cores.

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


def quickstart_dense() -> Run:
    """The quickstart without experts, trained the same way."""
    return dense(quickstart(), "nomic-quickstart-dense")


def dense(run: Run, name: str) -> Run:
    """The run with dense MLPs, for comparison at equal steps.

    Raises:
        ConfigError: the run is not of a nomic-moe.
    """
    if not isinstance(run.model, NomicMoeConfig):
        raise ConfigError(f"{run.name!r} is a run of {run.model.kind!r}, not of 'nomic-moe'")
    return changed(run, name=name, model=changed(run.model, experts=None))
