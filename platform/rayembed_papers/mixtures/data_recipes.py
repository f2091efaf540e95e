"""Data recipes of the papers, as `rayembed prepare` lists them."""

from collections.abc import Callable, Sequence

from rayembed.config.data import DatasetConfig
from rayembed.recipes.data_recipes import DataRecipe, DatasetEntry
from rayembed_papers.mixtures.datasets import causal2vec, cde, nomic, nvembed


def _recipe(entries: Callable[[], Sequence[DatasetEntry]]) -> DataRecipe:
    return DataRecipe(lambda: [entry.config for entry in entries()], entries)


def _nvembed_v2() -> list[DatasetConfig]:
    """Training data of version 2: the table without the variants by class names."""
    found = [entry.config for entry in nvembed.entries()]
    examples = {c.name.removesuffix("-examples") for c in found if c.name.endswith("-examples")}
    return [config for config in found if config.name.removesuffix("-labels") not in examples]


NVEMBED = DataRecipe(_nvembed_v2, nvembed.entries)
NOMIC_PRETRAINING = _recipe(nomic.pretraining_entries)
NOMIC_FINETUNING = _recipe(nomic.finetuning_entries)
CAUSAL2VEC = _recipe(causal2vec.entries)
CDE_UNSUPERVISED = _recipe(cde.unsupervised_entries)
CDE_SUPERVISED = _recipe(cde.supervised_entries)
