"""Batches of similar pairs."""

from rayembed.config.data import DatasetConfig
from rayembed.data.prepared import Prepared, Workshop


def make_clustered(workshop: Workshop, dataset: DatasetConfig, before: Prepared) -> Prepared:
    """The folder of the records that this step leaves."""
    raise NotImplementedError
