"""Data recipes by name, and what is known of the origin of their data sets.

Other packages add data recipes by entry points of the group `rayembed.data_recipes`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

from rayembed.config.data import DataConfig, DatasetConfig
from rayembed.config.data_run import DataRun
from rayembed.config.sources import Source
from rayembed.config.table import NamedTable
from rayembed.data.sources.pairs import PairsSource

Layout = Literal["seen", "alike", "remembered", "own"]
"""Evidence for the names of files and columns; none could be tried against the hub itself.

`seen`: on stored pages of the repository, or in public code that reads it. `alike`: so in another
repository or file of the same owner that was seen. `remembered`: from general knowledge. `own`:
there is no public home; rows are expected below `data.root` as the settings say.
"""


@dataclass(frozen=True)
class Home:
    """Location of a data set's rows and the settings to read them."""

    source: Source
    url: str
    """Web page; empty without one."""
    layout: Layout
    licence: str = ""
    """Licence as stated at the location; empty if none is stated or known."""
    notes: str = ""


@dataclass(frozen=True)
class Paper:
    """A paper that lists the data sets of its training."""

    name: str
    prefix: str
    """Prefix of its data sets' names in the catalogue."""
    arxiv: str
    """Its number."""


@dataclass(frozen=True)
class DatasetEntry:
    """A data set of a paper."""

    config: DatasetConfig
    """Settings for `data.datasets`; the name is unique among those of the paper."""
    paper: Paper
    table: str
    """Table of the paper that lists it."""
    home: Home
    samples: int | None = None
    """Record count of the paper, if stated. After the paper's own filters, so it is `num_samples`
    only without them."""
    notes: str = ""
    """Interpretation of the paper where it leaves room."""

    @property
    def name(self) -> str:
        """Unique name in the catalogue: `nvembed/fever`, `cde/fever`."""
        return f"{self.paper.prefix}/{self.config.name}"

    @property
    def reference(self) -> str:
        """Reference in the literature: `arXiv 2405.17428, Table 12`."""
        return f"arXiv {self.paper.arxiv}, {self.table}"


@dataclass(frozen=True)
class DataRecipe:
    """Data sets that are prepared by one name."""

    datasets: Callable[[], Sequence[DatasetConfig]]
    entries: Callable[[], Sequence[DatasetEntry]] = tuple
    """What the catalogue lists, and where licences in model cards come from."""


def own_pairs() -> tuple[DatasetConfig, ...]:
    """One file with a query and a positive in each row; path, columns and steps are set with
    `--set`.
    """
    return (DatasetConfig(name="pairs", source=PairsSource(path="pairs.jsonl")),)


DATA_RECIPES = NamedTable(
    "rayembed.data_recipes", DataRecipe, "data recipe", {"pairs": DataRecipe(own_pairs)}
)
"""All data recipes by name."""


@cache
def known_datasets() -> dict[str, DatasetEntry]:
    """The catalogue: data sets by name, paper by paper: `nvembed/fever`, …, `cde/bge-fever`."""
    recipes = DATA_RECIPES.members().values()
    return {entry.name: entry for recipe in recipes for entry in recipe.entries()}


def data_recipe_names() -> tuple[str, ...]:
    """Names known to `get_data_recipe`."""
    return tuple(DATA_RECIPES.members())


def get_data_recipe(name: str) -> DataRun:
    """Complete data run of a recipe.

    Raises:
        ConfigError: no such recipe; the message names the nearest one.
    """
    datasets = DATA_RECIPES.get(name).datasets()
    return DataRun(name=name, data=DataConfig(datasets=tuple(datasets)))
