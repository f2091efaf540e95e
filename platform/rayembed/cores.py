"""How many CPU cores are there to work with."""


def num_cores() -> int:
    """CPU cores that this process may use.

    Its affinity and its container's limit count, so that a pod of four CPUs on a machine of a
    hundred does not start a hundred threads; `LOKY_MAX_CPU_COUNT` sets fewer.
    """
    from joblib import cpu_count

    return int(cpu_count())
