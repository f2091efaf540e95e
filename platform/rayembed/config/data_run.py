"""Settings of data jobs, which prepare data sets without training a model."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from rayembed.config.data import DataConfig, data_identity
from rayembed.config.document import Document, read_mapping
from rayembed.config.placement import RuntimeSettings, UnitLimit
from rayembed.config.run import Run
from rayembed.config.settings import Settings, parse
from rayembed.config.types import FileName, Seed, StoragePath


class DataPlacement(Settings):
    """Settings for where a data job stores its results."""

    storage_path: StoragePath = Field(default="outputs", min_length=1)
    """Folder or object-storage prefix; with a training run's `placement.storage_path`, each reuses
    the other's results."""


class TeacherPlacement(UnitLimit, RuntimeSettings, DataPlacement):
    """Settings for where a data job stores its results and which hardware runs its teachers."""

    use_gpu: bool = True
    """Whether teachers, filters and searches run on GPUs where there are any; False: on CPUs."""
    gpus: int = Field(default=0, ge=0)
    """GPUs for teachers, filters and their searches, one process each, on a cluster that adds nodes
    on request. 0: all GPUs that the cluster has when the work begins, or its CPUs without any."""
    wait_for_nodes_seconds: float = Field(default=0.0, ge=0.0)
    """Maximum seconds to wait for the first of the `gpus`."""

    def asks_ray(self) -> dict[str, bool]:
        """Map each placement setting that can require Ray to whether its value does."""
        return {"gpus": self.gpus > 0}

    @model_validator(mode="after")
    def _gpus_are_used(self) -> "TeacherPlacement":
        if self.gpus and not self.use_gpu:
            raise ValueError(
                f"placement.gpus asks for {self.gpus} GPUs for teachers, but "
                "placement.use_gpu=false keeps them on CPUs; set gpus=0, or leave use_gpu out"
            )
        return self

    @model_validator(mode="after")
    def _waits_for_something(self) -> "TeacherPlacement":
        if self.wait_for_nodes_seconds and not self.gpus:
            raise ValueError(
                "placement.wait_for_nodes_seconds waits for a GPU to join the cluster, but "
                "placement.gpus is 0; set placement.gpus to the number of GPUs for teachers"
            )
        return self


class DataRun(Document):
    """Settings of a data job: data sets to prepare, taken from a training run or given alone."""

    name: FileName
    """Name of the job in its report only; results are named by their inputs."""
    seed: Seed = 0
    """Seed of sampling and clusters."""
    data: DataConfig
    placement: TeacherPlacement = TeacherPlacement()

    def identity(self, write: Callable[[str], str] | None = None) -> dict[str, Any]:
        """Settings that are fingerprinted: all except the name and locations."""
        values = super().identity(write)
        values["data"] = data_identity(values["data"])
        return values

    @classmethod
    def read(cls, path: str | Path) -> "DataRun":
        """Read a data run from a YAML file, or the data part of a training run's file.

        Raises:
            ConfigError: no such file, not YAML, or settings that do not hold.
        """
        values = read_mapping(path)
        return data_of(parse(Run, values)) if "model" in values else parse(DataRun, values)


def data_of(run: Run) -> DataRun:
    """Extract the data part of a training run: the data sets of its stages, in the same
    storage.

    Where nodes are waited for, its teachers may have as many GPUs as its workers will. Without GPUs
    for its workers they run on CPUs.
    """
    seconds = run.placement.wait_for_nodes_seconds if run.placement.on_gpu else 0.0
    return DataRun(
        name=run.name,
        seed=run.seed,
        data=run.data,
        placement=TeacherPlacement(
            storage_path=run.placement.storage_path,
            use_gpu=run.placement.use_gpu is not False,
            gpus=run.placement.workers if seconds else 0,
            wait_for_nodes_seconds=seconds,
            unit_seconds=run.placement.unit_seconds,
        ),
    )
