"""All training data sets of the papers by name, and the data recipes made from them."""

from collections.abc import Callable
from functools import cache

from rayembed.config.data import DataConfig, DatasetConfig
from rayembed.config.data_run import DataRun
from rayembed.config.settings import nearest
from rayembed.data.sources.pairs import PairsSource
from rayembed.errors import ConfigError
from rayembed.recipes.datasets import causal2vec, cde, nomic, nvembed
from rayembed.recipes.datasets.entry import Entry


def own_pairs() -> DataRun:
    """One file with a query and a positive in each row; path, columns and steps are set with
    `--set`.
    """
    source = PairsSource(path="pairs.jsonl")
    return DataRun(
        name="pairs",
        data=DataConfig(
            datasets=(DatasetConfig(name="pairs", source=source),),
        ),
    )


def dataset_names() -> tuple[str, ...]:
    """Names known to `get_dataset`, paper by paper: `nvembed/fever`, …, `cde/bge-fever`."""
    return tuple(_entries())


def get_dataset(name: str) -> Entry:
    """Entry of a data set.

    Raises:
        ConfigError: no such data set; the message names the nearest one.
    """
    entries = _entries()
    if name not in entries:
        raise ConfigError(f"no data set {name!r} in the catalogue; {nearest(name, entries)}")
    return entries[name]


def data_recipe_names() -> tuple[str, ...]:
    """Names known to `get_data_recipe`."""
    return tuple(_recipes())


def get_data_recipe(name: str) -> DataRun:
    """Complete data run of a recipe.

    Raises:
        ConfigError: no such recipe; the message names the nearest one.
    """
    recipes = _recipes()
    if name not in recipes:
        raise ConfigError(f"no data recipe {name!r}; {nearest(name, recipes)}")
    return recipes[name]()


@cache
def _entries() -> dict[str, Entry]:
    entries = (
        *nvembed.entries(),
        *nomic.pretraining_entries(),
        *nomic.finetuning_entries(),
        *causal2vec.entries(),
        *cde.unsupervised_entries(),
        *cde.supervised_entries(),
    )
    by_name = {entry.name: entry for entry in entries}
    assert len(by_name) == len(entries)
    return by_name


def _recipes() -> dict[str, Callable[[], DataRun]]:
    return {
        "pairs": own_pairs,
        "nvembed-data": lambda: _run("nvembed-data", _nvembed_v2()),
        "nomic-pretraining-data": lambda: _run(
            "nomic-pretraining-data", nomic.pretraining_entries()
        ),
        "nomic-finetuning-data": lambda: _run("nomic-finetuning-data", nomic.finetuning_entries()),
        "causal2vec-data": lambda: _run("causal2vec-data", causal2vec.entries()),
        "cde-unsupervised-data": lambda: _run("cde-unsupervised-data", cde.unsupervised_entries()),
        "cde-supervised-data": lambda: _run("cde-supervised-data", cde.supervised_entries()),
    }


def _nvembed_v2() -> tuple[Entry, ...]:
    """Training data of version 2: the table without the variants by class names."""
    found = nvembed.entries()
    examples = {
        entry.config.name.removesuffix("-examples")
        for entry in found
        if entry.config.name.endswith("-examples")
    }
    return tuple(
        entry for entry in found if entry.config.name.removesuffix("-labels") not in examples
    )


def _run(name: str, entries: tuple[Entry, ...]) -> DataRun:
    return DataRun(
        name=name,
        data=DataConfig(
            datasets=tuple(entry.config for entry in entries),
        ),
    )
