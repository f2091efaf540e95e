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


def worker_numbers(rows: int, fewest: int, most: int) -> tuple[int, ...]:
    """Numbers of workers between the limits that divide the rows of a batch evenly.

    Args:
        rows: of a global batch, over all workers.
    """
    return tuple(number for number in range(fewest, most + 1) if rows % number == 0)


def check_shares(setting: str, rows: int, fewest: int, most: int) -> None:
    """Check that the fewest and the most workers divide the rows of a batch evenly.

    Numbers between them that do not are passed over while a run goes on.

    Args:
        setting: that has the rows, as an error calls it.

    Raises:
        ValueError: they do not; it names the numbers that do.
    """
    if not (rows % fewest or rows % most):
        return
    if fewest == most:
        raise ValueError(
            f"{setting} {rows} cannot be shared equally by placement.workers {most}; take a "
            "multiple"
        )
    name, number = ("workers", most) if rows % most else ("min_workers", fewest)
    can = ", ".join(map(str, worker_numbers(rows, 1, most)))
    raise ValueError(
        f"{setting} {rows} cannot be shared equally by placement.{name} {number}; of up to {most} "
        f"workers these numbers can: {can}; take two of them for placement.min_workers and "
        "placement.workers"
    )
