"""Settings of a sweep: the runs to compare, the deciding score, the search and early stopping."""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from rayembed.config.document import Document
from rayembed.config.held_out import held_out_set
from rayembed.config.run import Run
from rayembed.config.settings import Settings, nearest
from rayembed.config.types import FileName, Seed, SortedDict
from rayembed.errors import ConfigError
from rayembed_extras.sweeps.space import Domain, check_paths, parse_space


class GridSearch(Settings):
    """Tries every combination of the search space."""

    kind: Literal["grid"] = "grid"


class RandomSearch(Settings):
    """Draws settings at random; each draw runs with every combination of the `grid(…)` settings."""

    kind: Literal["random"] = "random"
    trials: PositiveInt = 10
    """Number of draws; equal draws are one trial. A resubmitted sweep with a higher number runs
    only the new ones."""
    seed: Seed = 0
    """Seed of the draws."""


class OptunaSearch(Settings):
    """Optuna's tree-structured Parzen estimator, which samples near trials with good scores."""

    kind: Literal["optuna"] = "optuna"
    trials: PositiveInt = 20
    """Number of proposals; equal proposals are one trial. A resubmitted sweep proposes as many as
    it lacks finished trials; the number may be raised."""
    seed: Seed = 0
    """Seed of the sampler. With concurrent trials, the order in which they end matters too."""


class NoScheduler(Settings):
    """Lets every trial run to its end."""

    kind: Literal["none"] = "none"


class AshaScheduler(Settings):
    """Stops weak trials early by asynchronous successive halving (arXiv 1810.05934) on validation
    scores.

    A trial that reaches a rung is ended when its score is not among the best 1/`reduction_factor`
    of those that have reached it so far.
    """

    kind: Literal["asha"] = "asha"
    grace_steps: PositiveInt | None = None
    """Steps before which no trial is stopped, over all stages; None: up to the first score."""
    reduction_factor: float = Field(default=3.0, gt=1.0)
    """η: ratio of the steps of consecutive rungs."""


Search = Annotated[GridSearch | RandomSearch | OptunaSearch, Field(discriminator="kind")]
Scheduler = Annotated[NoScheduler | AshaScheduler, Field(discriminator="kind")]


class MetricConfig(Settings):
    """Score that trials are compared by; higher is better. Never the training loss."""

    of: Literal["validation", "evaluation"] | None = None
    """Source of the score. `validation`: held-out texts scored during training, for the weights
    that the run returns. `evaluation`: tasks after training. None: the first of the two that the
    runs have."""
    weights: SortedDict[str, PositiveFloat] = Field(default_factory=dict)
    """Weight of each task's score, by task name; tasks not listed do not count. Empty: the run's
    own validation score, or the mean of the retrieval tasks of evaluation."""


class Sweep(Document):
    """Complete settings of one sweep."""

    name: FileName
    """Name; a sweep resubmitted under its name resumes. Prefix of its trials' names."""
    runs: dict[str, Run] = Field(min_length=1)
    """Base runs by label; the rows of a table. Their own names are ignored."""
    space: dict[str, str | tuple[str, ...]] = Field(default_factory=dict)
    """Path of a setting → its domain, as text (see `space`) or a list of values."""
    search: Search = GridSearch()
    scheduler: Scheduler = NoScheduler()
    metric: MetricConfig = MetricConfig()
    trial_failures: int = Field(default=2, ge=0)
    """Maximum retries of a trial whose process died, from its last checkpoint."""
    trials_at_once: PositiveInt | None = None
    """Maximum concurrent trials; None: as many as the cluster's free CPUs and GPUs hold. With
    `placement.wait_for_nodes_seconds` nodes for that many are awaited, otherwise for one trial."""

    @property
    def domains(self) -> dict[str, Domain]:
        """Search space with parsed domains, by setting path.

        Raises:
            ConfigError: as `parse_space`.
        """
        return parse_space(self.space)

    @property
    def base(self) -> Run:
        """The first run, whose placement, tracking and storage all runs share."""
        return next(iter(self.runs.values()))

    @property
    def validates(self) -> bool:
        """Whether the runs score their weights on tasks during training."""
        return any(run.evaluation.validation is not None for run in self.runs.values())

    def placed(self, **changes: Any) -> Self:
        """Copy the sweep with placement settings changed in all its runs."""
        placement = self.base.placement.model_copy(update=changes)
        runs = {
            label: run.model_copy(update={"placement": placement})
            for label, run in self.runs.items()
        }
        return self.model_copy(update={"runs": runs})

    def identity(self, write: Callable[[str], str] | None = None) -> dict[str, Any]:
        """Settings that decide the trials and their order.

        How many are drawn is left out: more of them belong to the same sweep.
        """
        values = self.model_dump(
            mode="json", include={"space", "search", "scheduler", "metric"}, context=write
        )
        values["search"].pop("trials", None)
        # A run's own identity leaves out what it is scored on, which decides here.
        left_out = {"baselines", "before_training"}
        values["runs"] = {
            label: [run.fingerprint, run.evaluation.model_dump(mode="json", exclude=left_out)]
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
                f"search 'optuna' chooses values while trials run, but {what} fixes all values "
                "beforehand; write choice(…), or use search=grid or random"
            )
        return self

    @model_validator(mode="after")
    def _same_placement(self) -> "Sweep":
        first = next(iter(self.runs))
        for label, run in self.runs.items():
            if run.placement != self.base.placement:
                raise ValueError(
                    f"the runs {first!r} and {label!r} have different placement settings, but all "
                    "trials of a sweep must have the same; make them equal"
                )
        return self


def metric_source(sweep: Sweep) -> Literal["validation", "evaluation"]:
    """Return the source of the deciding score: validation or evaluation.

    Raises:
        ConfigError: the runs do not give it, or the scheduler needs scores while training goes on.
    """
    validated = all(run.evaluation.validation is not None for run in sweep.runs.values())
    evaluated = all(run.takes_scores for run in sweep.runs.values())
    source = sweep.metric.of or ("validation" if validated or not evaluated else "evaluation")
    if source == "validation" and not validated:
        raise ConfigError(
            f"the sweep {sweep.name!r} has no score to compare trials by, because its runs have "
            "no validation; set evaluation.validation.data.kind=held_out, own_sets, beir or mteb "
            "with --set, or metric.of=evaluation with evaluation.own_sets or evaluation.tasks"
        )
    if source == "evaluation" and not evaluated:
        raise ConfigError(
            "metric.of 'evaluation' compares trials by scores after training, but a run of the "
            f"sweep {sweep.name!r} names no tasks; set evaluation.own_sets or evaluation.tasks, "
            "or metric.of=validation"
        )
    if source == "evaluation" and sweep.scheduler.kind != "none":
        while_training = (
            "metric.of=validation"
            if validated
            else "evaluation.validation.data to {kind: held_out} (or own_sets, beir, mteb)"
        )
        raise ConfigError(
            f"scheduler {sweep.scheduler.kind!r} compares trials while they train, but the scores "
            f"of metric.of 'evaluation' are known only after training; set {while_training}, or "
            "scheduler=none"
        )
    return source


def check_metric(sweep: Sweep) -> None:
    """Check that every run yields all scores that the metric weights.

    Raises:
        ConfigError: as `metric_source`, or a task that a run does not score.
    """
    source = metric_source(sweep)
    for label, run in sweep.runs.items():
        evaluation = run.evaluation
        parts = (held_out_set(dataset.name) for dataset in run.held_out_datasets)
        names = (*(own.name for own in evaluation.own_sets), *evaluation.tasks, *parts)
        if source == "validation":
            assert evaluation.validation is not None
            names = run.validation_names
        elif evaluation.benchmarks:  # whose tasks are not known here
            continue
        for task in sweep.metric.weights:
            if task not in names:
                raise ConfigError(
                    f"metric.weights names the task {task!r}, which the {source} of the run "
                    f"{label!r} does not score; {nearest(task, names)}"
                )


def held_out_decides(sweep: Sweep, run: Run) -> bool:
    """Whether the compared scores include held-out parts of the trial's own data sets."""
    parts = {held_out_set(dataset.name) for dataset in run.held_out_datasets}
    if sweep.metric.weights:
        return bool(parts & sweep.metric.weights.keys())
    if metric_source(sweep) == "validation":
        return bool(parts.intersection(run.validation_names))
    others = (o for o in run.evaluation.own_sets if o.kind == "retrieval" and not o.languages)
    return bool(parts) and not any(others)


def deciding(sweep: Sweep, scores: Mapping[str, float]) -> float:
    """Compute the deciding score from scores by task; for validation it is the run's own mean,
    `score`.

    Without weights, after training own sets for retrieval in one language decide, without such
    sets all tasks; a guard's general tasks are not scored and decide nothing.

    Raises:
        KeyError: a task has no score.
    """
    weights: Mapping[str, float] = sweep.metric.weights
    if not weights:
        if metric_source(sweep) == "validation":
            return scores["score"]
        own_sets = sweep.base.evaluation.own_sets
        retrieval = [o.name for o in own_sets if o.kind == "retrieval" and not o.languages]
        found = [name for name in retrieval if name in scores]
        weights = dict.fromkeys(found or scores, 1.0)
    return sum(w * scores[task] for task, w in weights.items()) / sum(weights.values())
