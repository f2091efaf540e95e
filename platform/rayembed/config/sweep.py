"""A sweep: which runs are compared, by which score, how they are found and when they are ended."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from rayembed.config.document import Document
from rayembed.config.run import Run
from rayembed.config.settings import Settings, nearest
from rayembed.config.space import Domain, check_paths, parse_space
from rayembed.config.validation import WIKIPEDIA_VALIDATION_TASKS
from rayembed.errors import ConfigError

WIKIPEDIA_SUITE_TASKS = (
    *WIKIPEDIA_VALIDATION_TASKS,
    "WikiTopicClassification",
    "WikiTopicClustering",
    "WikiTitleDescriptionPairClassification",
    "WikiRelatednessSTS",
)
"""Those that the benchmark `wikipedia` scores after training."""

CROSS_LINGUAL_TASK = "WikiCrossLingualRetrieval"
"""One more, where `evaluation.wikipedia.translations` name languages."""


class GridSearch(Settings):
    """Every combination of the space."""

    kind: Literal["grid"] = "grid"


class RandomSearch(Settings):
    """Independent draws; each with every combination of what is written `grid(…)`."""

    kind: Literal["random"] = "random"
    trials: PositiveInt = 10
    """Draws, of which equal ones are one trial. A sweep that is submitted again with more of them
    does those that are new."""
    seed: int = Field(default=0, ge=0, lt=2**32)
    """Of the draws."""


class OptunaSearch(Settings):
    """Optuna's tree-structured Parzen estimator: draws where earlier trials scored well."""

    kind: Literal["optuna"] = "optuna"
    trials: PositiveInt = 20
    """Proposals, of which equal ones are one trial. Submitted again a sweep proposes as many more
    as it has fewer trials that have ended; may be raised later."""
    seed: int = Field(default=0, ge=0, lt=2**32)
    """Of the sampler. With several trials at once the order in which they end decides too."""


class NoScheduler(Settings):
    """Every trial runs to its end."""

    kind: Literal["none"] = "none"


class AshaScheduler(Settings):
    """Asynchronous successive halving (arXiv 1810.05934) on the scores of validation.

    A trial that reaches a rung is ended when its score is not among the best 1/`reduction_factor`
    of those that have reached it so far.
    """

    kind: Literal["asha"] = "asha"
    grace_steps: PositiveInt | None = None
    """Steps before which no trial is ended, over all stages; None: up to the first score."""
    reduction_factor: float = Field(default=3.0, gt=1.0)
    """η: each rung is so many times further than the one before."""


class PbtScheduler(Settings):
    """Population-based training (arXiv 1711.09846): the worst trials go on from the best one's
    weights and optimiser, with its settings changed a little.

    For runs of one stage, and settings that may change in the middle of it: those of
    `stages.*.optimizer`, the loss's temperature, the dropout of adapters.
    """

    kind: Literal["pbt"] = "pbt"
    every_steps: PositiveInt | None = None
    """Steps between two comparisons, a multiple of validation's; None: at each score."""
    quantile: float = Field(default=0.25, gt=0.0, le=0.5)
    """Share of the population that is replaced, and share that it is replaced from."""
    resample_probability: float = Field(default=0.25, ge=0.0, le=1.0)
    """Of drawing a setting anew rather than multiplying it by 0.8 or 1.2."""


Search = Annotated[GridSearch | RandomSearch | OptunaSearch, Field(discriminator="kind")]
Scheduler = Annotated[NoScheduler | AshaScheduler | PbtScheduler, Field(discriminator="kind")]


class MetricConfig(Settings):
    """The score that trials are compared by; higher is better. Never the training loss."""

    of: Literal["validation", "evaluation"] | None = None
    """`validation`: of the held-out texts that are scored while training goes on, by the weights
    that a run hands on. `evaluation`: of the tasks after training. None: the first of the two that
    the runs have."""
    weights: dict[str, PositiveFloat] = Field(default_factory=dict)
    """Weight of each task's score by the task's name; tasks left out count nothing. Empty: the
    run's own deciding score of validation, the mean of the retrieval tasks of evaluation."""


class Sweep(Document):
    """Everything that one sweep is."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """A sweep submitted again under its name goes on; its trials' names begin with it."""
    runs: dict[str, Run] = Field(min_length=1)
    """What the space is laid over, by a label; of a table each row. Their names do not matter."""
    space: dict[str, str | tuple[str, ...]] = Field(default_factory=dict)
    """Path of a setting → its values, as config/space.py writes them, or a list of them."""
    search: Search = GridSearch()
    scheduler: Scheduler = NoScheduler()
    metric: MetricConfig = MetricConfig()
    trial_failures: int = Field(default=2, ge=0)
    """How often a trial whose process died is tried again, from its last checkpoint."""
    trials_at_once: PositiveInt | None = None
    """At most; None: as many as the cluster's free CPUs and GPUs hold. With
    `placement.wait_for_nodes_seconds` nodes for so many are waited for, else for one trial."""

    @property
    def domains(self) -> dict[str, Domain]:
        """The space, read.

        Raises:
            ConfigError: as `parse_space`.
        """
        return parse_space(self.space)

    @property
    def base(self) -> Run:
        """The first run; placement, tracking and storage are the same in all."""
        return next(iter(self.runs.values()))

    def identity(self) -> dict[str, Any]:
        """All that decides which trials there are and which is best.

        How many are drawn is left out: more of them belong to the same sweep.
        """
        values = self.model_dump(mode="json", include={"space", "search", "scheduler", "metric"})
        values["search"].pop("trials", None)
        # A run's own identity leaves out what it is scored on, which decides here.
        unscored = {"baselines", "before_training"}
        values["runs"] = {
            label: [run.fingerprint, run.evaluation.model_dump(mode="json", exclude=unscored)]
            for label, run in self.runs.items()
        }
        return values

    @model_validator(mode="after")
    def _is_searchable(self) -> "Sweep":
        try:
            domains = self.domains
            if domains or len(self.runs) == 1:
                check_paths(domains)
        except ConfigError as error:
            raise ValueError(str(error)) from None
        grids = [path for path, domain in domains.items() if domain.kind == "grid"]
        if self.search.kind == "optuna" and (grids or len(self.runs) > 1):
            what = f"{grids[0]}=grid(…)" if grids else f"{len(self.runs)} runs"
            raise ValueError(
                f"search 'optuna' draws every setting of one run, and {what} asks for all; write "
                "choice(…), or take search=grid or random"
            )
        return self

    @model_validator(mode="after")
    def _same_placement(self) -> "Sweep":
        for label, run in self.runs.items():
            if run.placement != self.base.placement:
                first = next(iter(self.runs))
                raise ValueError(
                    f"the runs {first!r} and {label!r} have different placements; all trials of a "
                    "sweep run in the same way"
                )
        return self


def metric_source(sweep: Sweep) -> Literal["validation", "evaluation"]:
    """Where the deciding score comes from.

    Raises:
        ConfigError: the runs do not give it, or the scheduler needs scores while training goes on.
    """
    validated = all(run.evaluation.validation is not None for run in sweep.runs.values())
    evaluated = all(run.evaluation.any_tasks for run in sweep.runs.values())
    source = sweep.metric.of or ("validation" if validated or not evaluated else "evaluation")
    if source == "validation" and not validated:
        raise ConfigError(
            f"the sweep {sweep.name!r} has no score to compare by: its runs have no validation; "
            "set evaluation.validation.data.kind=wikipedia, beir or mteb with --set, or metric.of="
            "evaluation with evaluation.benchmarks=[wikipedia]"
        )
    if source == "evaluation" and not evaluated:
        raise ConfigError(
            "metric.of 'evaluation' needs scores after training, and a run of the sweep "
            f"{sweep.name!r} names no tasks; set evaluation.benchmarks=[wikipedia], or metric.of="
            "validation"
        )
    if source == "evaluation" and sweep.scheduler.kind != "none":
        raise ConfigError(
            f"scheduler {sweep.scheduler.kind!r} compares trials while they train, and metric.of "
            "'evaluation' is known only afterwards; set metric.of=validation, or scheduler=none"
        )
    return source


def check_metric(sweep: Sweep) -> None:
    """Return when every run gives every score that the metric weighs.

    Raises:
        ConfigError: as `metric_source`, or a task that a run does not score.
    """
    source = metric_source(sweep)
    for label, run in sweep.runs.items():
        names: tuple[str, ...] = WIKIPEDIA_SUITE_TASKS
        if run.evaluation.wikipedia.translations:
            names = (*names, CROSS_LINGUAL_TASK)
        if source == "validation":
            assert run.evaluation.validation is not None
            names = run.evaluation.validation.data.task_names
        for task in sweep.metric.weights:
            if task not in names:
                raise ConfigError(
                    f"metric.weights names {task!r}, which the {source} of the run {label!r} does "
                    f"not score; {nearest(task, names)}"
                )


def deciding(sweep: Sweep, scores: Mapping[str, float]) -> float:
    """The score that decides, of scores by task; of validation also `score`, the run's own mean.

    Raises:
        KeyError: a task has no score.
    """
    weights: Mapping[str, float] = sweep.metric.weights
    if not weights:
        if metric_source(sweep) == "validation":
            return scores["score"]
        weights = dict.fromkeys(WIKIPEDIA_VALIDATION_TASKS, 1.0)
    return sum(w * scores[task] for task, w in weights.items()) / sum(weights.values())
