"""Describe a paper's data set: where its rows are published, and how that is known."""

from dataclasses import dataclass
from typing import Literal

from rayembed.config.sources import Source
from rayembed.recipes.data_recipes import KnownDataset

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
class DatasetEntry(KnownDataset):
    """A data set of a paper."""

    paper: Paper
    table: str
    """Table of the paper that lists it."""
    home: Home
    samples: int | None = None
    """Record count of the paper, if stated. After the paper's own filters, so it is `num_samples`
    only without them."""

    @property
    def name(self) -> str:
        """Unique name in the catalogue: `nvembed/fever`, `cde/fever`."""
        return f"{self.paper.prefix}/{self.config.name}"

    @property
    def reference(self) -> str:
        """Reference in the literature: `arXiv 2405.17428, Table 12`."""
        return f"arXiv {self.paper.arxiv}, {self.table}"

    @property
    def licence(self) -> str:
        """Licence stated where the rows are published; empty if none is stated."""
        return "" if self.home.layout == "own" else self.home.licence
