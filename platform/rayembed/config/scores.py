"""Settings of the tasks that a model is scored on, the same for training runs and evaluations."""

from typing import Annotated

from rayembed.config.own_sets import OwnSet, kinds_by_default
from rayembed.config.settings import Settings
from rayembed.config.types import unique_names


class Scores(Settings):
    """The tasks that a model is scored on; none named: it is not scored."""

    benchmarks: tuple[str, ...] = ()
    """Names such as `MTEB(eng, v1)`, `NanoBEIR`, `BEIR`, `MIRACL`; all of mteb's by their own
    names."""
    tasks: tuple[str, ...] = ()
    """Single tasks of mteb by name, beside those of the benchmarks."""
    languages: tuple[str, ...] = ()
    """Languages that mteb's and AIR-Bench's tasks are restricted to (`eng`, …); none: all."""
    own_sets: Annotated[tuple[OwnSet, ...], kinds_by_default, unique_names("own sets")] = ()
    """Sets of the user's own, for retrieval where no `kind` is named."""

    @property
    def any_tasks(self) -> bool:
        """Whether there is something to score a model on."""
        return bool(self.benchmarks or self.tasks or self.own_sets)
