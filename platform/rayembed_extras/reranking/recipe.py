"""Recipe that trains a cross-encoder on the user's own pairs."""

from rayembed.config.backbone import BackboneConfig
from rayembed.config.data import DataConfig
from rayembed.config.mining import MiningConfig
from rayembed.config.run import Run
from rayembed.config.settings import changed
from rayembed.config.stage import BatchConfig, StageConfig
from rayembed.optim.adamw import AdamW
from rayembed.optim.cosine import Linear
from rayembed.recipes.building_blocks import on_a_laptop, own_dataset
from rayembed.recipes.sample import MINILM
from rayembed_extras.reranking.losses.listwise_softmax import ListwiseSoftmax
from rayembed_extras.reranking.settings import CrossEncoderConfig

NEGATIVES = 7
"""Hard negatives of a list."""


def reranker() -> Run:
    """Train a cross-encoder on the user's own pairs, to rerank what an embedder finds.

    The pairs are named with `--pairs pairs.jsonl`, the embedder, which mines the hard negatives and
    which the reranker is scored behind, with `--embedder REFERENCE`, the model to start from with
    `--set model.backbone.path=…`: an encoder (a new layer that scores is then trained) or a
    published reranker. A tenth of the documents is held out and scored, unless
    `data.datasets.pairs.held_out=null`.
    """
    mining = MiningConfig(
        teacher=MINILM, num_negatives=NEGATIVES, candidates=50, sampling="stratified"
    )
    stage = StageConfig(
        name="rerank",
        datasets={"pairs": 1.0},
        batch=BatchConfig(global_pairs=16, num_negatives=NEGATIVES, in_batch_negatives=False),
        loss=ListwiseSoftmax(),
        optimizer=AdamW(
            learning_rate=2e-4,  # of a new layer that scores: 5e-5 learnt much less in 89 steps
            weight_decay=0.01,
            warmup_share=0.1,
            schedule=Linear(),
            gradient_clipping=1.0,
        ),
        steps=1000,
        epochs=1.0,  # the steps stand for those of files that are not here
        checkpoint_every_steps=200,
    )
    return Run(
        name="reranker",
        model=CrossEncoderConfig(backbone=BackboneConfig(path=MINILM), document_max_length=256),
        data=DataConfig(datasets=(changed(own_dataset(), mining=mining),)),
        stages=(stage,),
        placement=on_a_laptop(),
    )
