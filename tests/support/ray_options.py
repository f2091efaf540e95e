"""Options that the installed `ray start` knows."""

from functools import cache


@cache
def ray_start_options() -> frozenset[str]:
    from ray.scripts.scripts import start

    names = (name for param in start.params for name in (*param.opts, *param.secondary_opts))
    return frozenset(name for name in names if name.startswith("--"))
