"""Data recipes by name, and a catalogue of data sets with known origins.

Other packages add data recipes by entry points of the group `rayembed.data_recipes`.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache

from rayembed.config.data import DataConfig, DatasetConfig
from rayembed.config.data_run import DataRun
from rayembed.config.table import NamedTable
from rayembed.data.sources.pairs import PairsSource
from rayembed.display.tables import Table


@dataclass(frozen=True)
class KnownDataset:
    """Catalogue entry for a data set with a known origin."""

    config: DatasetConfig

    @property
    def name(self) -> str:
        """Name of the data set, unique in the catalogue."""
        return self.config.name

    @property
    def licence(self) -> str:
        """Licence stated by the origin of the rows; empty if none is stated or known."""
        return ""


@dataclass(frozen=True)
class DataRecipe:
    """Group of data sets that a recipe's name prepares together."""

    datasets: Callable[[], Sequence[DatasetConfig]]
    entries: Callable[[], Sequence[KnownDataset]] = tuple
    """Its data sets of which the origin is known; licences in model cards come from them."""
    listing: Callable[[], Iterable[Table | str]] = tuple
    """What `rayembed prepare --list` shows of them: tables, and lines that follow all tables."""


def own_pairs() -> tuple[DatasetConfig, ...]:
    """Data run for a user's file of pairs, a query and a positive in each row; `--set` gives path,
    columns and steps.
    """
    return (DatasetConfig(name="pairs", source=PairsSource(path="pairs.jsonl")),)


DATA_RECIPES = NamedTable(
    "rayembed.data_recipes", DataRecipe, "data recipe", {"pairs": DataRecipe(own_pairs)}
)
"""All data recipes by name."""


@cache
def known_datasets() -> dict[str, KnownDataset]:
    """List the catalogue's data sets, paper by paper: `nvembed/fever`, …, `cde/bge-fever`."""
    recipes = DATA_RECIPES.members().values()
    return {entry.name: entry for recipe in recipes for entry in recipe.entries()}


def data_recipe_names() -> tuple[str, ...]:
    """Names of all data recipes, as `get_data_recipe` accepts them."""
    return tuple(DATA_RECIPES.members())


def get_data_recipe(name: str) -> DataRun:
    """Return the complete data run of a recipe.

    Raises:
        ConfigError: no such recipe; the message names the nearest one.
    """
    datasets = DATA_RECIPES.get(name).datasets()
    return DataRun(name=name, data=DataConfig(datasets=tuple(datasets)))
