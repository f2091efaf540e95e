"""An entry of the catalogue: a data set's settings, and what is known of where it comes from."""

from dataclasses import dataclass
from typing import Literal

from rayembed.config.data import DatasetConfig
from rayembed.config.sources import PairsSource, Source

Paper = Literal["NV-Embed", "Nomic Embed v2", "Causal2Vec", "CDE"]

ARXIV: dict[Paper, str] = {
    "NV-Embed": "2405.17428",
    "Nomic Embed v2": "2502.07972",
    "Causal2Vec": "2507.23386",
    "CDE": "2410.02525",
}
"""Number of each paper on arXiv."""

Layout = Literal["seen", "alike", "remembered", "own"]
"""How the names of files and columns are known; none could be tried against the hub itself.

`seen`: on stored pages of the repository, or in public code that reads it. `alike`: so in another
repository or file of the same owner that was seen. `remembered`: from general knowledge. `own`:
there is no public home; rows are expected below `data.root` as the settings say.
"""


@dataclass(frozen=True)
class Home:
    """Where rows live and how they are read."""

    source: Source
    url: str
    """A page for people; empty where there is none."""
    layout: Layout
    licence: str = ""
    """As the home states it; empty where it states none or it is not known."""
    notes: str = ""


@dataclass(frozen=True)
class Entry:
    """A data set of a paper."""

    config: DatasetConfig
    """Ready for `data.datasets`; its name is unique among those of the paper."""
    paper: Paper
    table: str
    """Where the paper lists it."""
    home: Home
    samples: int | None = None
    """Records that the paper counts; None: it does not say. After the paper's own filters, so it is
    `num_samples` only where there are none."""
    notes: str = ""
    """How the paper is read where it leaves room."""

    @property
    def name(self) -> str:
        """Unique in the catalogue: `nvembed/fever`, `cde/fever`."""
        return f"{PREFIXES[self.paper]}/{self.config.name}"

    @property
    def reference(self) -> str:
        """Where it is described: `arXiv 2405.17428, Table 12`."""
        return f"arXiv {ARXIV[self.paper]}, {self.table}"


PREFIXES: dict[Paper, str] = {
    "NV-Embed": "nvembed",
    "Nomic Embed v2": "nomic",
    "Causal2Vec": "causal2vec",
    "CDE": "cde",
}
"""First part of the names of a paper's entries."""


def hub(repository: str, inside: str, revision: str = "main") -> str:
    """The reference of files of a data set on the Hugging Face hub."""
    return f"hf://datasets/{repository}@{revision}/{inside}"


def hub_page(repository: str) -> str:
    """The page of a data set on the Hugging Face hub."""
    return f"https://huggingface.co/datasets/{repository}"


def own_folder(name: str, notes: str, url: str = "") -> Home:
    """Rows of `query` and `positive` (a text or a list) in the folder `name` below `data.root`."""
    return Home(PairsSource(path=f"{name}/"), url, "own", notes=notes)
