"""Small runs of the four architectures: a few minutes on two CPU cores each.

They are the quickstarts with the first layers of their backbones (experts: all of them), shorter
texts and other numbers of steps. What a claim is about stays as it is in the quickstart. All learn
and are scored in float32; their teachers take what the machine has units for.
"""

from collections.abc import Sequence

from rayembed.config.override import override
from rayembed.config.run import Run
from rayembed.config.settings import changed
from rayembed.recipes import biencoder, causal2vec, cde, nomic, nvembed
from rayembed.recipes.sample import (
    CROSS_LINGUAL,
    EVALUATION_INSTRUCTIONS,
    MINILM,
    RETRIEVAL_TASKS,
    TASK_NAMES,
    Wikipedia,
)

LENGTH = 40
"""Maximum tokens of a text."""

_INSTRUCTED = 72
"""Maximum tokens of a query with its instruction and template, which take up to 26: the LLM reads
as much of a text as the encoder."""

_PAIRS = ("wiki-description", "wiki-sentence")


def nvembed_small() -> Run:
    """Small NV-Embed run: two layers of SmolLM2; mined negatives and classes in its second
    stage.
    """
    run = _scored(nvembed.quickstart(), TASK_NAMES, instructed=True)
    return override(
        run,
        [
            *_lengths(_INSTRUCTED),
            "model.backbone.num_layers=2",
            # As long and, as in the paper, nearly as fast: claims change their number and order.
            "stages.retrieval.steps=60",
            "stages.blend.steps=60",
            "stages.blend.optimizer.learning_rate=7.5e-4",
            "stages.blend.optimizer.pooling_learning_rate=7.5e-4",
            # As in the paper, all stages have the same batches.
            *(
                f"stages.{stage}.batch.{setting}"
                for stage in ("retrieval", "blend")
                for setting in ("global_pairs=12", "num_negatives=3")
            ),
        ],
    )


def causal2vec_small() -> Run:
    """Small Causal2Vec run: two layers of SmolLM2, with all-MiniLM as encoder."""
    run = _scored(causal2vec.quickstart(), TASK_NAMES, instructed=True)
    return override(
        run,
        [
            *_lengths(_INSTRUCTED),
            f"model.encoder.max_length={LENGTH}",
            "model.backbone.num_layers=2",
            "stages.retrieval.steps=80",
            "stages.retrieval.batch.global_pairs=24",
            "stages.retrieval.optimizer.decay_steps=160",
        ],
    )


def nomic_small() -> Run:
    """Small Nomic run: the six layers of all-MiniLM, three of them with experts, in both
    stages.

    An encoder that gets rotary positions and experts keeps all layers of its start.
    """
    run = _scored(nomic.quickstart(), (*RETRIEVAL_TASKS, CROSS_LINGUAL))
    return override(
        run,
        [
            *_lengths(LENGTH),
            "model.experts.top_k=1",  # as many parameters act as in the dense model
            "stages.pretrain.steps=60",
            "stages.pretrain.batch.global_pairs=32",
            "stages.finetune.steps=30",
            "stages.finetune.batch.global_pairs=32",
        ],
    )


def cde_small() -> Run:
    """Small CDE run: all layers of all-MiniLM in the first stage, two layers in the second.

    Without the output MLP of the released models, which the paper does not describe: what it is
    compared with has none.
    """
    run = _scored(cde.quickstart(), RETRIEVAL_TASKS)
    return override(
        run,
        [
            *_lengths(LENGTH),
            "model.backbone.num_layers=2",
            "model.output=mean",
            "stages.retrieval.steps=60",
            "stages.retrieval.batch.global_pairs=32",
            "stages.retrieval.optimizer.learning_rate=1e-4",
            *of_pairs("num_samples=1600"),
            *of_pairs("clusters.batch_pairs=32"),
            *of_pairs(f"clusters.max_length={LENGTH}"),
        ],
    )


def encoder_small() -> Run:
    """Small bi-encoder run: two layers of all-MiniLM, with four negatives mined by the whole
    all-MiniLM.
    """
    run = _scored(biencoder.quickstart(), RETRIEVAL_TASKS)
    return override(
        run,
        [
            *_lengths(LENGTH),
            "model.backbone.num_layers=2",
            "stages.finetune.steps=100",
            "stages.finetune.batch.global_pairs=32",
            "stages.finetune.batch.num_negatives=4",
            "stages.finetune.optimizer.learning_rate=2e-4",
            *of_pairs("num_samples=1600"),
            *of_pairs(f"mining={{teacher: '{MINILM}', num_negatives: 4, max_length: 64}}"),
        ],
    )


def _lengths(of_query: int) -> tuple[str, ...]:
    return f"model.query_max_length={of_query}", f"model.document_max_length={LENGTH}"


def of_pairs(assignment: str) -> list[str]:
    """Repeat an assignment for both data sets of English pairs."""
    return [f"data.datasets.{name}.{assignment}" for name in _PAIRS]


def _scored(run: Run, tasks: Sequence[str], *, instructed: bool = False) -> Run:
    """Copy a run in float32, scored once after training on tasks of the sample, without
    baselines.
    """
    languages = ("es", "fr") if CROSS_LINGUAL in tasks else ()
    sets = Wikipedia().scores(documents=500, queries=500, max_length=LENGTH, languages=languages)
    instructions = EVALUATION_INSTRUCTIONS.items() if instructed else ()
    evaluation = changed(
        run.evaluation,
        own_sets=tuple(one for one in sets if one.name in tasks),
        baselines=(),
        before_training=False,
        instructions=dict(instructions),
    )
    return override(changed(run, evaluation=evaluation), ["model.backbone.dtype=float32"])
