"""Parts that recipes share: scores with baselines, and a placement for a laptop."""

from collections.abc import Mapping

from rayembed.config.data import DatasetConfig
from rayembed.config.held_out import HeldOutFraction
from rayembed.config.own_sets import OwnSet
from rayembed.config.placement import Placement
from rayembed.config.run_evaluation import EvaluationConfig, GuardConfig
from rayembed.config.table import entry_points
from rayembed.data.sources.pairs import PairsSource
from rayembed.recipes.sample import (
    MINILM,
)


def compared_scores(
    own_sets: tuple[OwnSet, ...], *, instructions: Mapping[str, str] | None = None
) -> EvaluationConfig:
    """Evaluation settings: scores on own sets, compared with BM25 and all-MiniLM."""
    return EvaluationConfig(
        own_sets=own_sets,
        baselines=("bm25", MINILM),
        instructions=dict(instructions or {}),
    )


def guarded_scores() -> EvaluationConfig:
    """Evaluation settings with a guard: scores on the held-out part of the user's data and on the
    Wikipedia sample.

    The sample comes from the package index, so that a machine without a hub has it too. Without the
    optional feature that makes it the guard has no general tasks.
    """
    points = entry_points("rayembed.benchmarks")
    general = tuple(point.name for point in points if point.name == "wikipedia")
    return EvaluationConfig(benchmarks=general, baselines=("bm25",), guard=GuardConfig())


OWN_REJECTED_SHARE = 0.05
"""Maximum share of dirty rows in a user's own pairs."""


def own_dataset() -> DatasetConfig:
    """Data set settings for the user's own pairs, with a tenth of the documents held out for
    scoring.
    """
    source = PairsSource(path="pairs.jsonl", max_rejected_share=OWN_REJECTED_SHARE)
    return DatasetConfig(name="pairs", source=source, held_out=HeldOutFraction(share=0.1))


def on_a_laptop(*, micro_batch_tokens: int | None = None) -> Placement:
    """Placement settings for a laptop: one worker, on two CPU cores if they are free.

    Args:
        micro_batch_tokens: None: by hardware.
    """
    return Placement(
        workers=1,
        cpus_per_worker=1.0,
        threads_per_worker="auto",
        zero_stage=2,
        micro_batch_tokens=micro_batch_tokens,
    )
