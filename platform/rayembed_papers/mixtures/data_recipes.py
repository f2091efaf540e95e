"""Data recipes of the papers, as `rayembed prepare` lists them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from rayembed.config.data import DatasetConfig
from rayembed.display.tables import Table
from rayembed.recipes.data_recipes import DataRecipe
from rayembed_papers.mixtures.datasets import causal2vec, cde, nomic, nvembed
from rayembed_papers.mixtures.datasets.entries import DatasetEntry

_LAYOUTS = (
    "layout: how files and columns are known. seen: on pages of the repository or in code that "
    "reads it; alike: so in a sibling; remembered: from general knowledge; own: no public home, "
    "expected below data.root. licence: as the home states it, where it is known"
)


def _recipe(entries: Callable[[], Sequence[DatasetEntry]]) -> DataRecipe:
    return DataRecipe(
        lambda: [entry.config for entry in entries()], entries, lambda: _listing(entries())
    )


def _listing(entries: Sequence[DatasetEntry]) -> Iterator[Table | str]:
    """Print the papers' data sets, the files expected below `data.root`, and a legend."""
    from rayembed.pipeline.data.tables import requested_rows

    by_table: dict[str, list[DatasetEntry]] = {}
    for entry in entries:
        by_table.setdefault(f"{entry.paper.name}, {entry.reference}", []).append(entry)
        if entry.home.layout == "own":
            yield f"{entry.name}: {entry.home.notes} {entry.home.url}"
    for title, listed in by_table.items():
        rows = []
        for entry in listed:
            config, home = entry.config, entry.home
            what = (entry.name, config.task, requested_rows(config), config.source.summary)
            rows.append([*what, home.layout, home.licence])
        heads = ["data set", "task", "rows", "source", "layout", "licence"]
        yield Table(heads, rows, title=title)
    yield _LAYOUTS


def _nvembed_v2() -> list[DatasetConfig]:
    """Training data of NV-Embed-v2: all data sets of the table, without variants by class names."""
    found = [entry.config for entry in nvembed.entries()]
    examples = {c.name.removesuffix("-examples") for c in found if c.name.endswith("-examples")}
    return [config for config in found if config.name.removesuffix("-labels") not in examples]


NVEMBED = replace(_recipe(nvembed.entries), datasets=_nvembed_v2)
NOMIC_PRETRAINING = _recipe(nomic.pretraining_entries)
NOMIC_FINETUNING = _recipe(nomic.finetuning_entries)
CAUSAL2VEC = _recipe(causal2vec.entries)
CDE_UNSUPERVISED = _recipe(cde.unsupervised_entries)
CDE_SUPERVISED = _recipe(cde.supervised_entries)
