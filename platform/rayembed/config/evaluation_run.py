"""An evaluation: which model is scored on what, and where that is done."""

from typing import Literal

from pydantic import Field, PositiveInt, model_validator

from rayembed.config.document import Document
from rayembed.config.evaluation import ModelUnderTest
from rayembed.config.own_sets import Scores
from rayembed.config.placement import RuntimeSettings
from rayembed.config.settings import Settings
from rayembed.config.types import Reference, StoragePath, UseGpu


class EvaluationPlacement(RuntimeSettings):
    """Placement of an evaluation. Nothing here changes a score beyond rounding."""

    storage_path: StoragePath = Field(default="outputs", min_length=1)
    """Folder or object-storage prefix for results and kept embeddings."""
    workers: PositiveInt = 1
    """Processes that hold the model."""
    use_gpu: UseGpu = "auto"
    """One GPU for each worker. `auto`: where torch sees one on this machine or, with Ray, where
    live nodes offer one for each."""
    cpus_per_worker: float = Field(default=1.0, gt=0)
    """CPUs that Ray reserves for each worker."""
    threads_per_worker: PositiveInt | None = None
    """Threads of torch in each worker; None: `cpus_per_worker`, rounded down."""
    tasks_at_once: PositiveInt | None = None
    """Tasks that run side by side, each in a process of its own that holds the task's queries and
    scores, not its corpus; None: one more than workers, at most 8."""
    cpus_per_task: float = Field(default=0.0, ge=0)
    """CPUs that Ray reserves for each running task, which fits classifiers and clusters; 0: tasks
    share what there is."""
    keep_embeddings: Literal["float32", "float16", "none"] = "float32"
    """Number type of embeddings kept in storage, for a restart and for tasks with the same texts.
    `float16` takes half the room and moves scores by about 1e-4; `none` keeps none."""
    tracking_uri: Reference | None = None
    """MLflow's address; None: a SQLite file in `storage_path`."""
    experiment: str = "rayembed-evaluation"
    """MLflow experiment."""

    @property
    def on_gpu(self) -> bool:
        """Whether each worker has a GPU; `auto` counts as no until a job's start settles it."""
        return self.use_gpu is True

    def asks_ray(self) -> dict[str, bool]:
        """Setting → whether its value needs Ray."""
        return {
            "workers": self.workers > 1,
            "tasks_at_once": self.tasks_at_once is not None,
            "cpus_per_task": bool(self.cpus_per_task),
        }


class ResultsPlace(Settings):
    """Location of the results of an evaluation that is done; all that a submission needs."""

    placement: EvaluationPlacement = EvaluationPlacement()


class EvaluationRun(Scores, Document):
    """A model, the tasks that score it, and where."""

    model: ModelUnderTest
    placement: EvaluationPlacement = EvaluationPlacement()

    @model_validator(mode="after")
    def _something_to_do(self) -> "EvaluationRun":
        if not self.any_tasks:
            raise ValueError(
                "nothing to score the model on: name a benchmark (--benchmark wikipedia needs no "
                "hub), tasks (--tasks) or own sets (own_sets)"
            )
        return self
