"""Recipes for CDE (arXiv 2410.02525): one for the user's own pairs, one for a laptop."""

from rayembed.config.backbone import BackboneConfig
from rayembed.config.data import DataConfig, DatasetConfig
from rayembed.config.mining import ClusterConfig
from rayembed.config.run import Run
from rayembed.config.run_evaluation import EvaluationConfig
from rayembed.config.settings import changed
from rayembed.config.stage import BatchConfig, StageConfig
from rayembed.data.sources.pairs import PairsSource
from rayembed.losses.infonce import InfoNCE
from rayembed.models.cde.config import CDEConfig, FirstStageConfig
from rayembed.optim.adamw import AdamW
from rayembed.recipes.building_blocks import (
    compared_scores,
    on_a_laptop,
    own_dataset,
)
from rayembed.recipes.sample import MINILM, Wikipedia

_PAIRS = 64
_STEPS = 60


def own_pairs() -> Run:
    """Train a contextual model, all-MiniLM in both stages, on the user's own pairs in clustered,
    filtered batches.

    The pairs are named with `--set data.datasets.pairs.source.path=pairs.jsonl`; other encoders of
    one family with `model.backbone.path` and `model.encoder.path`, which may both be one earlier
    CDE. A tenth of the documents is held out and scored, unless
    `data.datasets.pairs.held_out=null`.
    """
    run = quickstart()
    assert isinstance(run.model, CDEConfig)
    lengths = {"query_max_length": 256, "document_max_length": 256}
    clusters = ClusterConfig(teacher=MINILM, max_length=256, batch_pairs=_PAIRS)
    pairs = changed(own_dataset(), clusters=clusters)
    (stage,) = run.stages
    stage = changed(
        stage,
        name="finetune",
        datasets={"pairs": 1.0},
        steps=1000,
        optimizer=changed(stage.optimizer, warmup_steps=0, warmup_share=0.1),
        checkpoint_every_steps=200,
    )
    return changed(
        run,
        name="cde",
        model=changed(run.model, num_context=_PAIRS, **lengths),
        data=DataConfig(datasets=(pairs,)),
        stages=(stage,),
        evaluation=EvaluationConfig(baselines=("bm25",)),
    )


def quickstart() -> Run:
    """Train a contextual model, all-MiniLM in both stages, on Wikipedia summaries in clustered,
    filtered batches.

    Smaller than the paper's in every size. The output has the residual of the second release: an
    MLP from random weights alone would need more steps than these to give what the encoder has.
    """
    sample = Wikipedia()
    prefix = "search_query: ", "search_document: "
    return Run(
        name="cde-quickstart",
        model=CDEConfig(
            backbone=BackboneConfig(path=MINILM),
            encoder=FirstStageConfig(path=MINILM),
            num_context=32,
            output="residual",
            query_prefix=prefix[0],
            document_prefix=prefix[1],
            query_max_length=64,
            document_max_length=64,
        ),
        data=DataConfig(
            datasets=(
                _clustered("wiki-description", sample.pairs("description")),
                _clustered("wiki-sentence", sample.pairs("sentence")),
            )
        ),
        stages=(
            StageConfig(
                name="retrieval",
                datasets={"wiki-description": 1.0, "wiki-sentence": 1.0},
                batch=BatchConfig(
                    policy="clustered",
                    global_pairs=_PAIRS,
                    num_negatives=0,
                    in_batch_negatives=True,
                ),
                loss=InfoNCE(temperature=0.02),
                optimizer=AdamW(learning_rate=2e-5, pooling_learning_rate=1e-4, warmup_steps=6),
                steps=_STEPS,
                checkpoint_every_steps=30,
            ),
        ),
        evaluation=compared_scores(sample.scores(documents=1000, queries=500, max_length=64)),
        placement=on_a_laptop(),
    )


def _clustered(name: str, source: PairsSource) -> DatasetConfig:
    return DatasetConfig(
        name=name,
        source=source,
        num_samples=3000,
        clusters=ClusterConfig(
            teacher=MINILM, max_length=64, batch_pairs=_PAIRS, iterations=20, restarts=1
        ),
    )
