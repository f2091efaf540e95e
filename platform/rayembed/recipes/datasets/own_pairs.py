"""Default data recipe: the user's own pairs."""

from rayembed.config.data import DataConfig, DatasetConfig
from rayembed.config.data_run import DataRun
from rayembed.data.sources.pairs import PairsSource


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
