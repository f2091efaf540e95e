"""All recipes by name; other packages add recipes through entry points of the group
`rayembed.recipes`.

Such an entry point is named as its recipe, and is a function that returns the run.
"""

from collections.abc import Callable
from functools import cache, partial
from importlib.metadata import EntryPoint

from rayembed.config.run import Run
from rayembed.config.settings import nearest
from rayembed.config.table import entry_points, from_outside
from rayembed.errors import ConfigError
from rayembed.recipes import biencoder, causal2vec, cde, nomic, nvembed

OWN_PAIRS = "biencoder"
"""Name of the recipe that fine-tunes an encoder on a user's own pairs."""

OWN_CORPUS = "biencoder-corpus"
"""Name of the recipe that adapts an encoder to a user's documents without a label."""


SCRIPTS = {
    "nvembed": "train_nvembed",
    "causal2vec": "train_causal2vec",
    "cde": "train_cde",
    "nomic-moe": "train_nomic",
    "biencoder": "train_biencoder",
}
"""Architecture → script in `jobs/` that trains it; architectures of other packages are trained by
any."""


def check_job(run: Run, kind: str) -> None:
    """Raise if the job, which trains one architecture only, cannot train the run.

    Raises:
        ConfigError: another job does; the message names it.
    """
    own = SCRIPTS.get(run.model.kind)
    if run.model.kind != kind and own is not None:
        raise ConfigError(
            f"the run {run.name!r} has model.kind {run.model.kind!r}, but this job only trains "
            f"{kind!r}; start it with jobs/{own}.py or rayembed train"
        )


def recipe_names() -> tuple[str, ...]:
    """Names of all recipes, as `get_recipe` accepts them."""
    return tuple(_recipes())


def get_recipe(name: str) -> Run:
    """Return the complete run of a recipe.

    Raises:
        ConfigError: no such recipe; the message names the nearest one.
    """
    recipes = _recipes()
    if name not in recipes:
        raise ConfigError(f"no recipe {name!r}; {nearest(name, recipes)}")
    return recipes[name]()


@cache
def _outside() -> dict[str, Callable[[], Run]]:
    """Recipes of other packages by name, imported only when one is needed."""
    return {point.name: partial(_load, point) for point in entry_points("rayembed.recipes")}


def _load(point: EntryPoint) -> Run:
    run = from_outside(point)()
    if not isinstance(run, Run):
        raise ConfigError(f"the recipe {point.name!r}: {point.value} does not return a run")
    return run


def _recipes() -> dict[str, Callable[[], Run]]:
    own: dict[str, Callable[[], Run]] = {
        "nvembed-quickstart": nvembed.quickstart,
        "causal2vec-quickstart": causal2vec.quickstart,
        "cde": cde.own_pairs,
        "cde-quickstart": cde.quickstart,
        "nomic-quickstart": nomic.quickstart,
        OWN_PAIRS: biencoder.own_pairs,
        OWN_CORPUS: biencoder.own_corpus,
        "biencoder-quickstart": biencoder.quickstart,
    }
    return own | {name: recipe for name, recipe in _outside().items() if name not in own}
