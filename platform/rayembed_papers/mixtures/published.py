"""Settings that all runs of published size share: compared scores, placement on GPUs."""

from rayembed.config.placement import Placement

PUBLISHED_SCORES = ("NanoBEIR",)
"""Benchmarks of runs of published size: minutes of scoring for days of training. The papers' own
are set by `evaluation.benchmarks`."""


def on_gpus(
    *,
    workers: int = 8,
    micro_batch_tokens: int,
) -> Placement:
    """Placement with a worker on each of several GPUs."""
    return Placement(
        workers=workers,
        use_gpu=True,
        cpus_per_worker=8.0,
        zero_stage=2,
        micro_batch_tokens=micro_batch_tokens,
    )
