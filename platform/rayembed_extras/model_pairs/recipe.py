"""Recipe that trains a small query encoder in the space of a large document encoder."""

from rayembed.config.backbone import BackboneConfig, MeanPooling, ProjectionConfig
from rayembed.config.compatible import OldModel
from rayembed.config.data import DataConfig, DatasetConfig
from rayembed.config.held_out import HeldOutFraction
from rayembed.config.run import Run
from rayembed.config.run_evaluation import EvaluationConfig
from rayembed.config.stage import BatchConfig, StageConfig
from rayembed.data.sources.structure import StructureSource
from rayembed.losses.vector_distillation import VectorDistillation
from rayembed.models.biencoder.config import BiEncoderConfig
from rayembed.optim.adamw import AdamW
from rayembed.optim.cosine import Linear
from rayembed.recipes.building_blocks import OWN_REJECTED_SHARE, on_a_laptop
from rayembed.recipes.sample import MINILM

DOCUMENT_ENCODER = "hf://Snowflake/snowflake-arctic-embed-m-v1.5@main"
"""Document encoder of the recipe, the one of leaf-ir (arXiv 2509.12539)."""
WIDTH = 768
"""Width of its vectors."""


def query_encoder() -> Run:
    """Train all-MiniLM-L6-v2 to embed queries for documents that a larger model has embedded.

    The vectors of the larger model are distilled on the user's documents, without judgements and
    negatives, as in LEAF (arXiv 2509.12539). The documents are named with
    `--set data.datasets.corpus.source.path=articles.jsonl`, another document encoder with
    `stages.distil.compatible_with=…` and the width of its vectors, `model.projections.0.width=…`.
    """
    stage = StageConfig(
        name="distil",
        datasets={"corpus": 1.0},
        batch=BatchConfig(global_pairs=32, num_negatives=0, in_batch_negatives=True),
        compatible_with=OldModel(model=DOCUMENT_ENCODER),
        loss=VectorDistillation(infonce_weight=0.0, projection=False),
        optimizer=AdamW(
            learning_rate=1e-4,
            weight_decay=0.01,
            warmup_share=0.1,
            schedule=Linear(),
            gradient_clipping=1.0,
        ),
        steps=1000,
        epochs=3.0,  # the steps stand for those of files that are not here
    )
    return Run(
        name="query-encoder",
        model=BiEncoderConfig(
            backbone=BackboneConfig(path=MINILM),
            pooling=MeanPooling(),
            projections=(ProjectionConfig(width=WIDTH, bias=False),),
            query_max_length=128,
            document_max_length=128,
        ),
        data=DataConfig(
            datasets=(
                DatasetConfig(
                    name="corpus",
                    source=StructureSource(
                        path="corpus.jsonl", max_rejected_share=OWN_REJECTED_SHARE
                    ),
                    held_out=HeldOutFraction(share=0.1),
                ),
            )
        ),
        stages=(stage,),
        evaluation=EvaluationConfig(baselines=("bm25",)),
        placement=on_a_laptop(),
    )
