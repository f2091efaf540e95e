"""Numbers of workers that can share a global batch."""


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
