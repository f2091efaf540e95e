"""Recipes for a plain bi-encoder: on the user's pairs, on their documents alone, and on the
Wikipedia sample.
"""

from typing import Any

from rayembed.config.backbone import BackboneConfig, MeanPooling
from rayembed.config.data import DataConfig, DatasetConfig
from rayembed.config.held_out import HeldOutFraction
from rayembed.config.mining import MiningConfig
from rayembed.config.run import Run
from rayembed.config.run_evaluation import EvaluationConfig
from rayembed.config.settings import changed
from rayembed.config.stage import BatchConfig, StageConfig
from rayembed.data.sources.structure import StructureSource
from rayembed.losses.infonce import InfoNCE
from rayembed.losses.listwise_kl import ListwiseKL
from rayembed.models.biencoder.config import BiEncoderConfig
from rayembed.optim.adamw import AdamW
from rayembed.optim.cosine import Linear
from rayembed.recipes.building_blocks import (
    OWN_REJECTED_SHARE,
    guarded_scores,
    on_a_laptop,
    own_dataset,
)
from rayembed.recipes.sample import MINILM, Wikipedia


def own_pairs() -> Run:
    """Fine-tune all-MiniLM-L6-v2 on the user's own pairs.

    The pairs are named with `--set data.datasets.pairs.source.path=pairs.jsonl`, another encoder
    with `--set model.backbone.path=…`, its prefixes with `--set 'model.query_prefix=query: '`.
    Each pair is trained once; `stages.finetune.epochs=3` or `stages.finetune.steps=2000` trains
    longer. A tenth of the documents is held out and scored, unless
    `data.datasets.pairs.held_out=null` and `evaluation.guard=null`. The model is kept that
    gains most there and loses less than that on the mean of general tasks.
    """
    return Run(
        name="biencoder",
        model=_minilm(max_length=256),
        data=DataConfig(
            datasets=(own_dataset(),),
        ),
        stages=(
            changed(
                _stage("finetune", {"pairs": 1.0}, global_pairs=64, steps=1000),
                epochs=1.0,  # the steps stand for those of files that are not here
            ),
        ),
        evaluation=guarded_scores(),
        placement=on_a_laptop(),
    )


def own_corpus() -> Run:
    """Adapt all-MiniLM-L6-v2 to the user's documents, without labels.

    The documents are named with `--set data.datasets.corpus.source.path=articles.jsonl`. Each gives
    a pair by its structure, of which those stay that MiniLM finds; MiniLM mines hard negatives, and
    its scores are distilled beside InfoNCE. A reranker's are distilled in their place with
    `--set data.datasets.corpus.mining.rescoring.model=…`. The model is kept that
    gains most on the held-out part and loses less on the mean of general tasks.
    """
    source = StructureSource(path="corpus.jsonl", max_rejected_share=OWN_REJECTED_SHARE)
    filtered: dict[str, Any] = {}
    if "consistency" in DatasetConfig.model_fields:  # a setting of an optional package
        # As in Arctic Embed (arXiv 2405.05374): most pairs stay, nonsense goes.
        filtered["consistency"] = {"teacher": MINILM, "top_k": 20}
    dataset = DatasetConfig(
        name="corpus",
        source=source,
        held_out=HeldOutFraction(share=0.1),
        mining=MiningConfig(teacher=MINILM, num_negatives=4, sampling="stratified"),
        **filtered,
    )
    stage = _stage("adapt", {"corpus": 1.0}, global_pairs=32, steps=300)
    batch = changed(stage.batch, num_negatives=4)
    loss = ListwiseKL(temperature=0.05, infonce_temperature=0.05)
    return Run(
        name="biencoder-corpus",
        model=_minilm(max_length=128),
        data=DataConfig(datasets=(dataset,)),
        stages=(changed(stage, batch=batch, loss=loss),),
        evaluation=guarded_scores(),
        placement=on_a_laptop(),
    )


def quickstart() -> Run:
    """Train all-MiniLM-L6-v2 on Wikipedia summaries and score it on held-out ones: minutes on two
    cores.
    """
    sample = Wikipedia()
    return Run(
        name="biencoder-quickstart",
        model=_minilm(max_length=128),
        data=DataConfig(
            datasets=(
                DatasetConfig(name="wiki-description", source=sample.pairs("description")),
                DatasetConfig(name="wiki-sentence", source=sample.pairs("sentence")),
            ),
        ),
        stages=(
            _stage(
                "finetune",
                {"wiki-description": 1.0, "wiki-sentence": 1.0},
                global_pairs=64,
                steps=100,
            ),
        ),
        evaluation=EvaluationConfig(
            own_sets=sample.scores(documents=1000, queries=500, max_length=128),
            baselines=("bm25",),
        ),
        placement=on_a_laptop(),
    )


def _minilm(max_length: int) -> BiEncoderConfig:
    return BiEncoderConfig(
        backbone=BackboneConfig(path=MINILM),
        pooling=MeanPooling(),
        lora=None,
        query_max_length=max_length,
        document_max_length=max_length,
    )


def _stage(name: str, datasets: dict[str, float], *, global_pairs: int, steps: int) -> StageConfig:
    return StageConfig(
        name=name,
        datasets=datasets,
        batch=BatchConfig(global_pairs=global_pairs, num_negatives=0, in_batch_negatives=True),
        loss=InfoNCE(temperature=0.05),  # all-MiniLM-L6-v2 was itself trained with 0.05
        optimizer=AdamW(
            learning_rate=2e-5,
            weight_decay=0.01,
            warmup_share=0.1,
            schedule=Linear(),
            gradient_clipping=1.0,
        ),
        steps=steps,
        checkpoint_every_steps=200,
    )
