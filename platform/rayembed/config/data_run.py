"""A data run: data sets to prepare without a model to train, as the data jobs take it."""

from pathlib import Path
from typing import Any

from pydantic import Field, field_validator, model_validator

from rayembed.config.credentials import refuse_credentials
from rayembed.config.data import DataConfig
from rayembed.config.document import Document, read_mapping
from rayembed.config.run import Run
from rayembed.config.settings import Settings, parse


class DataPlacement(Settings):
    """Where a data job leaves its results."""

    storage_path: str = Field(default="outputs", min_length=1)
    """Folder or object-storage prefix, the same as a training run's `placement.storage_path`: what
    one made the other takes."""

    _no_credentials = field_validator("storage_path")(refuse_credentials)


class TeacherPlacement(DataPlacement):
    """Where a data job leaves its results, and what its teachers work on."""

    gpus: int = Field(default=0, ge=0)
    """GPUs for teachers, filters and their searches on a cluster that adds nodes when they are
    asked for, a process each. 0: all that the cluster has when such work begins, and its CPUs where
    it has none."""
    wait_for_nodes_seconds: float = Field(default=0.0, ge=0.0)
    """How long to ask for nodes until the first of the `gpus` is there."""

    @model_validator(mode="after")
    def _waits_for_something(self) -> "TeacherPlacement":
        if self.wait_for_nodes_seconds and not self.gpus:
            raise ValueError(
                "placement.wait_for_nodes_seconds waits for the first of placement.gpus, which is "
                "0; set it to the number of GPUs for teachers"
            )
        return self


class DataRun(Document):
    """What a data job does: the data part of a training run, or data sets by themselves."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Only names the job in its report; results are named by what they are made of."""
    seed: int = Field(default=0, ge=0, lt=2**32)
    """Of sampling, held-out titles, clusters."""
    data: DataConfig
    kept_for_evaluation: str | None = None
    """Asset reference of a Wikipedia JSON file whose held-out titles no row may touch, beside those
    of the data sets."""
    placement: TeacherPlacement = TeacherPlacement()

    _no_credentials = field_validator("kept_for_evaluation")(refuse_credentials)

    @model_validator(mode="after")
    def _names_are_unique(self) -> "DataRun":
        names = [dataset.name for dataset in self.data.datasets]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"two data sets have the name {twice[0]!r}; it must be unique")
        return self

    def identity(self) -> dict[str, Any]:
        """Everything but the name and where things lie."""
        values = super().identity()
        del values["data"]["root"]
        return values

    @classmethod
    def read(cls, path: str | Path) -> "DataRun":
        """A data run from a YAML file; of a training run's file its data part.

        Raises:
            ConfigError: no such file, not YAML, or settings that do not hold.
        """
        values = read_mapping(path)
        return data_of(parse(Run, values)) if "model" in values else parse(DataRun, values)


def data_of(run: Run) -> DataRun:
    """The data part of a training run: its stages' data sets, in the same storage.

    Where nodes are waited for, its teachers may have as many GPUs as its workers will.
    """
    evaluation = run.evaluation
    seconds = run.placement.wait_for_nodes_seconds if run.placement.use_gpu else 0.0
    return DataRun(
        name=run.name,
        seed=run.seed,
        data=run.data,
        kept_for_evaluation=evaluation.wikipedia.source if evaluation.uses_wikipedia else None,
        placement=TeacherPlacement(
            storage_path=run.placement.storage_path,
            gpus=run.placement.workers if seconds else 0,
            wait_for_nodes_seconds=seconds,
        ),
    )
