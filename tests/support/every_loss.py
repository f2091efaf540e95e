"""Stages with each loss, over records with two negatives and two teachers."""

from rayembed.config.settings import parse
from rayembed.config.stage import StageConfig

LOSSES = {
    "infonce": {"dimensions": [4], "spread_out": 1.0, "precisions": ["int8", "binary"]},
    "siglip": {"kind": "siglip"},
    "listwise_kl": {"kind": "listwise_kl", "false_negatives": {"margin": 0.1}},
    "margin_mse": {"kind": "margin_mse"},
    "vector_distillation": {"kind": "vector_distillation"},
    "similarity_distillation": {"kind": "similarity_distillation"},
    "false negatives": {"false_negatives": {"by": "teachers", "margin": 0.1}},
}


def stage_of(loss, *, in_batch=True, negatives=2):
    """A stage with a loss, and with teachers where it has vectors of theirs."""
    batch = {"global_pairs": 8, "num_negatives": negatives, "in_batch_negatives": in_batch}
    settings = {"name": "s", "datasets": {"d": 1}, "batch": batch, "loss": loss, "steps": 3}
    if "teachers" in str(loss) or "distillation" in str(loss):
        settings["teachers"] = [{"teacher": "five"}, {"teacher": "eight"}]
    return parse(StageConfig, settings | {"optimizer": {"learning_rate": 0.1}})
