"""Score a training run's models on the run's workers."""

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property

from rayembed.assets.resolver import resolve
from rayembed.assets.storage import join, remove_folder
from rayembed.config.document import published_values, write_yaml
from rayembed.config.evaluation import BM25
from rayembed.config.run import Run
from rayembed.config.types import Precision
from rayembed.display.progress import doing
from rayembed.evaluation.hybrid import Baselines, baselines_of
from rayembed.evaluation.plan import task_factories
from rayembed.evaluation.pooled.pool import Workers
from rayembed.evaluation.run_scores import run_model
from rayembed.evaluation.score import ModelScores, Store, score
from rayembed.evaluation.tables import UNTRAINED, ScoreKey
from rayembed.evaluation.training_data import training_data_of
from rayembed.machine import hardware
from rayembed.models.loading.saved_folder import SETTINGS_FILE, saved_dimensions
from rayembed.pipeline.run.folders import RunFolders
from rayembed.pipeline.run.runtime import Runtime
from rayembed.results.scores import BM25_ROW

logger = logging.getLogger(__name__)


class RunScorer:
    """Scorer of a training run's models on the run's tasks. Results lie in the run's
    folder.

    Where BM25 is among the baselines, the untrained model, the last stage's and its mixtures have
    rows of hybrid search as well.

    Args:
        runtime: whose workers take them.
    """

    def __init__(self, run: Run, folders: RunFolders, runtime: Runtime) -> None:
        self._run, self._folders, self._runtime = run, folders, runtime
        self._tasks = task_factories(run.scores)
        self._beside: dict[ScoreKey, ModelScores] = {}
        placement = run.placement
        self._pool = runtime.pool(
            Workers(
                number=placement.fewest_workers,
                cpus=placement.cpus_per_worker,
                threads=placement.threads if placement.threads_per_worker else None,
                gpu=placement.on_gpu,
            )
        )

    def score(self, key: ScoreKey, *, keep_embeddings: bool = False) -> ModelScores:
        """Score a saved model on the run's tasks.

        Args:
            keep_embeddings: whether what is embedded is scored in another number type next.

        Raises:
            RayembedError: a task cannot be scored; those that are done are kept.
        """
        logger.info("scoring %s", key.model)
        run, is_own = self._run, key.baseline is None
        in_float32 = run.model.backbone.dtype == "float32" and is_own
        model = run_model(
            run,
            key.baseline or self._folders.model(key.model),
            name=f"rayembed/{f'{run.name}-' if is_own else ''}{key.model}",
            dimensions=key.dimension,
            precision=key.precision,
            without_context=key.without_context,
            training=training_data_of(run, is_trained=key.stage is not None) if is_own else None,
            on=None if in_float32 else self._computed,
        )
        published = published_values(run.scores, run.placement.storage_path)
        about = {"scores.yaml": write_yaml(published)}
        embeddings = join(self._folders.storage, "embeddings")
        store = Store(self._folders.results, embeddings)
        with doing(f"scoring {key.model}"):
            scored = score(
                model,
                self._tasks,
                self._pool,
                store,
                about=about,
                baselines=self._baselines if self._has_rows(key) else None,
                price_per_hour=run.placement.price_per_hour,
            )
        for _, error in scored.failed:
            raise error
        # They were for tasks with the same texts, and for a run that is killed meanwhile.
        if not keep_embeddings:
            remove_folder(embeddings)
        self._beside |= {
            replace(key, beside=row): of for row, of in scored.further.items() if row != BM25_ROW
        }
        return scored

    def _has_rows(self, key: ScoreKey) -> bool:
        """Whether BM25 and hybrid search are scored beside this model: the untrained one, the last
        stage's or one of its mixtures.
        """
        run = self._run
        plain = key == ScoreKey(key.stage, share=key.share)
        return (
            BM25 in run.evaluation.baselines and plain and key.stage in (None, run.stages[-1].name)
        )

    @cached_property
    def _baselines(self) -> Baselines:
        names = [task.name for task in self._tasks]
        return baselines_of(names, self._run.evaluation.reranker)

    @cached_property
    def _computed(self) -> hardware.Precision:
        """Number type that the workers' nodes compute fast, for models that may be in bfloat16."""
        return self._runtime.precision(self._run.placement)

    def further(self, tell: Callable[[str, dict[str, float]], None]) -> dict[ScoreKey, ModelScores]:
        """Score the last stage's model at smaller widths, in trained number types and without
        context, and the configured baselines; return these scores and those taken beside all
        models.

        Args:
            tell: takes the name of a curve in MLflow and its scores.
        """
        run, whole = self._run, ScoreKey(self._run.stages[-1].name)
        settings = resolve(join(self._folders.model(whole.model), SETTINGS_FILE))
        small = dict.fromkeys(p for stage in run.stages for p in stage.loss.precisions)
        precisions: tuple[Precision, ...] = ("float32", *small)
        keys = [
            replace(whole, dimension=dimension, precision=precision)
            for dimension in (None, *saved_dimensions(settings)[1:])
            for precision in precisions
        ][1:]
        if run.model.context_places:
            keys.append(replace(whole, without_context=True))
        keys += [ScoreKey(baseline=reference) for reference in run.evaluation.baselines]
        scores = {}
        for key, following in zip(keys, [*keys, UNTRAINED][1:], strict=True):
            same_vectors = replace(key, precision=following.precision) == following
            scores[key] = self.score(key, keep_embeddings=same_vectors)
            if key.baseline is None:
                tell(_curve(key), scores[key].scores)
        for key, scored in self._beside.items():
            if replace(key, beside="") == whole:
                tell(f"eval_{key.beside}", scored.scores)
        return scores | self._beside


def _curve(key: ScoreKey) -> str:
    """Name of the metrics in MLflow for scores of a model variant: `eval_256`, `eval_256_binary`,
    `eval_no_context`.
    """
    width = [] if key.dimension is None else [str(key.dimension)]
    small = [] if key.precision == "float32" else [key.precision]
    return "_".join(["eval", *width, *small, *(["no_context"] if key.without_context else [])])
