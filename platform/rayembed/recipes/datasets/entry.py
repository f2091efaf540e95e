"""Catalogue entries: settings of a data set, and what is known of its origin."""

from dataclasses import dataclass
from typing import Literal

from rayembed.config.data import DatasetConfig
from rayembed.config.sources import Source
from rayembed.data.sources.pairs import PairsSource

Paper = Literal["NV-Embed", "Nomic Embed v2", "Causal2Vec", "CDE"]

ARXIV: dict[Paper, str] = {
    "NV-Embed": "2405.17428",
    "Nomic Embed v2": "2502.07972",
    "Causal2Vec": "2507.23386",
    "CDE": "2410.02525",
}
"""arXiv number of each paper."""

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
class Entry:
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
        return f"{PREFIXES[self.paper]}/{self.config.name}"

    @property
    def reference(self) -> str:
        """Reference in the literature: `arXiv 2405.17428, Table 12`."""
        return f"arXiv {ARXIV[self.paper]}, {self.table}"


PREFIXES: dict[Paper, str] = {
    "NV-Embed": "nvembed",
    "Nomic Embed v2": "nomic",
    "Causal2Vec": "causal2vec",
    "CDE": "cde",
}
"""Prefixes of a paper's entry names."""


def hub(repository: str, inside: str, revision: str = "main") -> str:
    """Reference to the files of a hub data set."""
    return f"hf://datasets/{repository}@{revision}/{inside}"


def hub_page(repository: str) -> str:
    """Web page of a hub data set."""
    return f"https://huggingface.co/datasets/{repository}"


def own_folder(name: str, notes: str, url: str = "") -> Home:
    """Rows of `query` and `positive` (a text or a list) in folder `name` below `data.root`."""
    return Home(PairsSource(path=f"{name}/"), url, "own", notes=notes)
