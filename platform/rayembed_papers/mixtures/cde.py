"""Runs of CDE at published size (arXiv 2410.02525): the first phase alone, and both phases."""

from rayembed.config.backbone import BackboneConfig
from rayembed.config.data import DataConfig
from rayembed.config.run import Run
from rayembed.config.run_evaluation import EvaluationConfig
from rayembed.config.settings import changed
from rayembed.config.stage import BatchConfig, StageConfig
from rayembed.losses.infonce import InfoNCE
from rayembed.models.cde.config import CDEConfig, FirstStageConfig
from rayembed.optim.adamw import AdamW
from rayembed_papers.mixtures.datasets.cde import supervised_entries, unsupervised_entries
from rayembed_papers.mixtures.published import PUBLISHED_SCORES, on_gpus

NOMIC_BERT = "hf://nomic-ai/nomic-bert-2048@main"
"""The backbone of both stages (section 5, "Implementation")."""

SUPERVISED_PAIRS = 1_500_000
"""Size of BGE's training data. The paper states none; a caption of its supervised set has this
number (Table 4)."""


def small() -> Run:
    """cde-small-v1: three unsupervised epochs, then four on BGE's training data.

    One hard negative of each query in the second phase, as in the released model ("our best model
    does use a single hard negative per query", section 6).
    """
    unsupervised = small_unsupervised()
    entries = supervised_entries()
    datasets = tuple(entry.config for entry in entries)
    supervised = _stage(
        "supervised",
        {dataset.name: 1.0 for dataset in datasets},
        steps=4 * SUPERVISED_PAIRS // 512,
        num_negatives=1,
    )
    return changed(
        unsupervised,
        name="cde-small",
        data=changed(unsupervised.data, datasets=(*unsupervised.data.datasets, *datasets)),
        stages=(*unsupervised.stages, supervised),
    )


def small_unsupervised() -> Run:
    """The first phase alone: three epochs over the pairs of Table 5, the paper's default.

    Soft prompts and the MLP at the output are the released model's; the paper describes neither.
    """
    entries = unsupervised_entries()
    datasets = tuple(entry.config for entry in entries)
    pairs = sum(entry.samples or 0 for entry in entries)
    return Run(
        name="cde-small-unsupervised",
        seed=42,
        model=CDEConfig(
            backbone=BackboneConfig(path=NOMIC_BERT),
            encoder=FirstStageConfig(path=NOMIC_BERT),
            num_soft_prompts=8,
            output="mlp",
        ),
        data=DataConfig(datasets=datasets),
        stages=(
            _stage(
                "unsupervised",
                {dataset.name: 1.0 for dataset in datasets},
                steps=3 * pairs // 512,
                num_negatives=0,
            ),
        ),
        evaluation=EvaluationConfig(benchmarks=PUBLISHED_SCORES),
        placement=on_gpus(micro_batch_tokens=65_536),
    )


def _stage(name: str, datasets: dict[str, float], *, steps: int, num_negatives: int) -> StageConfig:
    """Build one phase of the paper's training (section 5, "Training"), with uniformly sampled
    pairs.
    """
    return StageConfig(
        name=name,
        datasets=datasets,
        batch=BatchConfig(
            policy="clustered",
            temperature=1.0,
            global_pairs=512,
            num_negatives=num_negatives,
            in_batch_negatives=True,
        ),
        loss=InfoNCE(temperature=0.02),
        optimizer=AdamW(learning_rate=2e-5, warmup_steps=1000),
        steps=steps,
        checkpoint_every_steps=5000,
    )
