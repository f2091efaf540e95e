"""A trial of a sweep: train its run, report its scores, at last that of what it leaves.

Scores of a population's member are told when the checkpoint of their step is whole: weights are
handed in to be scored before it is written, and a score that is told may let another member go on
from that checkpoint, or end the process that writes it.
"""

import logging
import threading
from collections.abc import Callable, Mapping
from types import TracebackType

from rayembed.assets.storage import join
from rayembed.config.sweep import Sweep, deciding, metric_source
from rayembed.errors import ArtifactError, StorageError
from rayembed.pipeline.train import TrialOf, TrialResult, train_trial
from rayembed.pipeline.validation import SCORE, kept_step
from rayembed.training.checkpoint import find_damage
from rayembed.training.checkpoint_list import checkpoint_name
from rayembed.training.validation.folder import ValidationFolder
from rayembed.tuning.events import Event, Start

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.5


class PopulationScores:
    """Holds scores back, in a thread of its own, while the `with` block trains.

    Scores of steps up to `start.after` are known and dropped, and so is one whose checkpoint will
    not come: a later one is there, or training has ended.

    Args:
        tell: takes each score, in the order of the steps.
    """

    def __init__(self, start: Start, tell: Callable[[Event], None]) -> None:
        run = start.run
        self._name, self._after, self._tell_on = run.name, start.after, tell
        folder = join(run.placement.storage_path, "runs", run.name, run.stages[0].name)
        self._folder = join(folder, "train")
        self._waiting: dict[int, Event] = {}
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="checkpoints", daemon=True)

    def __enter__(self) -> "PopulationScores":
        self._thread.start()
        return self

    def __exit__(
        self,
        error: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._done.set()
        self._thread.join()
        self._pass_on()
        if self._waiting:
            steps = ", ".join(map(str, sorted(self._waiting)))
            logger.warning(
                "%s has no whole checkpoint of step %s; others cannot go on from it",
                *(self._name, steps),
            )

    def tell(self, score: Event) -> None:
        """Take a score; one of a step that is waiting takes the other's place."""
        if score.global_step > self._after:
            with self._lock:
                self._waiting[score.global_step] = score

    def _watch(self) -> None:
        while not self._done.wait(_POLL_SECONDS):
            self._pass_on()

    def _pass_on(self) -> None:
        """Tell what has its checkpoint, and drop what came before it without one."""
        with self._lock:
            waiting = sorted(self._waiting)
        try:
            whole = [step for step in waiting if self._is_whole(step)]
        except StorageError as error:
            logger.warning("checkpoints are looked for again: %s", error)
            return
        for step in waiting:
            if whole and step <= whole[-1]:
                with self._lock:
                    score = self._waiting.pop(step)
                if step in whole:
                    self._tell_on(score)

    def _is_whole(self, step: int) -> bool:
        return find_damage(join(self._folder, checkpoint_name(step))) is None


def run_trial(
    sweep: Sweep, start: Start, tags: Mapping[str, str], tell: Callable[[Event], None]
) -> None:
    """Return when the trial's run is trained; `tell` has got every score, the final one last.

    Raises:
        RayembedError: as `train`; or the weights that the run hands on have no score.
    """
    validated = metric_source(sweep) == "validation"

    def train_and(tell_score: Callable[[Event], None]) -> TrialResult:
        def on_scores(name: str, scores: dict[str, float], step: int) -> None:
            if validated and name == "validation":
                tell_score(Event("score", step, deciding(sweep, scores), scores))

        return train_trial(start.run, TrialOf(tags, on_scores, start.checkpoint))

    if sweep.scheduler.kind == "pbt":
        with PopulationScores(start, tell) as population:
            trained = train_and(population.tell)
    else:
        trained = train_and(tell)
    scores = _of_kept_weights(start, trained) if validated else trained.scores
    total = sum(stage.steps for stage in start.run.stages)
    tell(Event("final", total, deciding(sweep, scores), scores, trained.scores))


def _of_kept_weights(start: Start, trained: TrialResult) -> dict[str, float]:
    """Validation's scores of the weights that the last stage hands on, with their mean."""
    run, stage = start.run, start.run.stages[-1]
    step = int(kept_step(trained.last_weights) or stage.steps)
    folder = join(run.placement.storage_path, "runs", run.name, stage.name)
    record = ValidationFolder(folder).read(step)
    if record is None or record.score is None:
        why = "there is no record of it" if record is None else record.problem
        raise ArtifactError(
            f"the weights of step {step} of {run.name!r}, which the stage {stage.name!r} hands on, "
            f"have no validation score: {why}; the trial cannot be compared"
        )
    return {**record.scores, SCORE: record.score}
