"""Scores of the models of a training run: by the one road, on the run's workers."""

import logging
from collections.abc import Callable
from functools import cached_property

from rayembed import hardware
from rayembed.assets.resolver import resolve
from rayembed.assets.storage import join, remove_folder
from rayembed.config.document import published_values
from rayembed.config.run import Run
from rayembed.config.small_vectors import Precision
from rayembed.config.yaml_text import write_yaml
from rayembed.evaluation.plan import task_factories
from rayembed.evaluation.pooled.workers import Workers
from rayembed.evaluation.run_scores import run_model
from rayembed.evaluation.score import ModelScores, Store, score
from rayembed.evaluation.tables import ScoreKey
from rayembed.models.saved_folder import SETTINGS_FILE, saved_dimensions
from rayembed.pipeline.run_folders import RunFolders
from rayembed.pipeline.runtime import Runtime
from rayembed.progress import doing

logger = logging.getLogger(__name__)


class RunScorer:
    """Takes the scores of a run's models. Results lie in the run's folder.

    Args:
        runtime: whose workers take them.
    """

    untrained = "untrained"
    """Name of the model before training, in storage and in results."""

    def __init__(self, run: Run, folders: RunFolders, runtime: Runtime) -> None:
        self._run, self._folders, self._runtime = run, folders, runtime
        self._tasks = task_factories(run.scores)
        placement = run.placement
        self._pool = runtime.pool(
            Workers(
                number=placement.fewest_workers,
                cpus=placement.cpus_per_worker,
                threads=placement.threads if placement.threads_per_worker else None,
                gpu=placement.on_gpu,
            )
        )

    def score(
        self,
        reference: str,
        name: str,
        *,
        dimensions: int | None = None,
        precision: Precision = "float32",
        without_context: bool = False,
        compared: bool = False,
        keep_embeddings: bool = False,
    ) -> ModelScores:
        """Scores of a saved model on the run's tasks.

        Args:
            reference: where every node finds it.
            name: of the model, which stands behind the run's name in results.
            dimensions: so many first values of each vector are kept; None: all.
            precision: number type of the vectors.
            without_context: whether a contextual model embeds behind its null token.
            compared: whether it is no model of the run; its results have its name alone.
            keep_embeddings: whether what is embedded is scored in another number type next.

        Raises:
            RayembedError: a task cannot be scored; those that are done are kept.
        """
        logger.info("scoring %s", name)
        run = self._run
        in_float32 = run.model.backbone.dtype == "float32" and not compared
        model = run_model(
            run,
            reference,
            name=f"rayembed/{name if compared else f'{run.name}-{name}'}",
            dimensions=dimensions,
            precision=precision,
            without_context=without_context,
            on=None if in_float32 else self._computed,
        )
        published = published_values(run.scores, run.placement.storage_path)
        about = {"scores.yaml": write_yaml(published)}
        embeddings = join(self._folders.storage, "embeddings")
        store = Store(self._folders.results, embeddings)
        with doing(f"scoring {name}"):
            scored = score(model, self._tasks, self._pool, store, about=about)
        for _, error in scored.failed:
            raise error
        # They were for tasks with the same texts, and for a run that is killed meanwhile.
        if not keep_embeddings:
            remove_folder(embeddings)
        return scored

    @cached_property
    def _computed(self) -> hardware.Precision:
        """What the workers' nodes compute fast; asked where a model may be in bfloat16."""
        return self._runtime.precision(self._run.placement)

    def further(self, tell: Callable[[str, dict[str, float]], None]) -> dict[ScoreKey, ModelScores]:
        """Scores of the last stage's model at smaller widths, in the number types that any stage
        trains and without context, and of the baselines.

        Args:
            tell: takes the name of a curve in MLflow and its scores.
        """
        run, found = self._run, {}
        last = run.stages[-1].name
        model = self._folders.model(last)
        small = dict.fromkeys(p for stage in run.stages for p in stage.loss.precisions)
        trained: tuple[Precision, ...] = ("float32", *small)
        for dimension in (None, *saved_dimensions(resolve(join(model, SETTINGS_FILE)))[1:]):
            for precision in trained[1:] if dimension is None else trained:
                scored = self.score(
                    model,
                    last,
                    dimensions=dimension,
                    precision=precision,
                    keep_embeddings=precision != trained[-1],
                )
                found[ScoreKey(last, dimension=dimension, precision=precision)] = scored
                tell(_curve(dimension, precision), scored.scores)
        if run.model.context_places:
            scored = self.score(model, last, without_context=True)
            found[ScoreKey(last, without_context=True)] = scored
            tell("eval_no_context", scored.scores)
        for reference in run.evaluation.baselines:
            name = baseline_name(reference)
            found[ScoreKey(baseline=name)] = self.score(reference, name, compared=True)
        return found


def _curve(dimension: int | None, precision: Precision) -> str:
    """Name in MLflow of scores with small vectors: `eval_256`, `eval_binary`, `eval_256_binary`."""
    width = [] if dimension is None else [str(dimension)]
    return "_".join(["eval", *width, *([] if precision == "float32" else [precision])])


def baseline_name(reference: str) -> str:
    """A short name of a baseline: the last part of its reference that says something."""
    if reference == "bm25":
        return "BM25"
    path = reference.partition("?")[0]
    parts = [part for part in path.split("/") if part not in ("", "model", "pypi:", "hf:")]
    return parts[-1].partition("==")[0].partition("@")[0].replace("gt_", "").replace("_", "-")
