"""Requirements for spreading a mixture's experts over workers."""

from rayembed.config.model import ModelConfig


def check_expert_parallel(
    model: ModelConfig, *, size: int, workers: int, zero_stage: int, elastic: bool
) -> None:
    """Check that groups of `size` workers can share the model's experts.

    Args:
        elastic: whether the number of workers may change.

    Raises:
        ValueError: the model has no experts, they or the workers cannot be shared out equally, or
            DeepSpeed would train them wrongly.
    """
    if size == 1:
        return
    asked = f"placement.expert_parallel {size}"
    if not model.num_experts:
        raise ValueError(
            f"{asked} spreads the experts of a mixture over workers, and the model "
            f"({model.kind}) has none; leave it at 1"
        )
    if model.num_experts % size:
        raise ValueError(
            f"{asked} cannot share model.experts.num_experts {model.num_experts} out equally; "
            "take a number that divides it"
        )
    if workers % size:
        raise ValueError(
            f"{asked} must divide placement.workers {workers}: each group of so many workers holds "
            "all experts"
        )
    if elastic:
        raise ValueError(
            f"{asked} does not go together with placement.min_workers: groups are made of a fixed "
            "number of workers; leave one of the two out"
        )
    if zero_stage == 3:
        raise ValueError(
            f"{asked} does not go together with placement.zero_stage 3, in which DeepSpeed "
            "partitions no experts but those of its own layers; take zero_stage 2, or "
            "expert_parallel 1"
        )
    if zero_stage == 0 and model.backbone.dtype == "bfloat16":
        raise ValueError(
            f"{asked} does not go together with placement.zero_stage 0 in bfloat16, in which "
            "DeepSpeed leaves experts out of the gradient's norm; take zero_stage 2 or 1"
        )
