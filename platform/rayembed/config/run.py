"""Settings of a training run: identity (everything that determines the weights) and placement
(where it runs); its fingerprint and file.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from rayembed.config.data import DataConfig, DatasetConfig, data_identity
from rayembed.config.document import NamedRun
from rayembed.config.held_out import held_out_set
from rayembed.config.instructions import check_prompt_names
from rayembed.config.model import ModelConfig
from rayembed.config.own_sets import ClassificationSet, OwnSet, RetrievalSet, Scores
from rayembed.config.placement import Placement, check_expert_parallel, check_shares
from rayembed.config.run_evaluation import (
    BeirValidation,
    EvaluationConfig,
    HeldOutValidation,
    MtebValidation,
    OwnSetsValidation,
    ValidationConfig,
    check_guard,
    check_names,
    own_sets_of,
)
from rayembed.config.settings import changed, nearest, parse
from rayembed.config.stage import StageConfig
from rayembed.config.stage_data import (
    as_taken,
    check_dataset,
    check_negatives,
    check_negatives_used,
    check_similarity,
    check_teachers,
)
from rayembed.config.types import FileName, Seed, unique_names
from rayembed.errors import ConfigError


class Run(NamedRun):
    """Complete settings of one training run."""

    name: FileName
    """Name of the run; a run submitted again under its name resumes."""
    seed: Seed = 0
    """Seed of initialisation, dropout, sampling and the batch plan; 32 bits, as numpy's generators
    take and as leaves torch's 64 room to tell stages and workers apart."""
    model: ModelConfig
    data: DataConfig
    stages: Annotated[tuple[StageConfig, ...], unique_names("stages")] = Field(min_length=1)
    evaluation: EvaluationConfig = EvaluationConfig()
    placement: Placement = Placement()

    @model_validator(mode="after")
    def _fits(self) -> "Run":
        datasets = {dataset.name: dataset for dataset in self.data.datasets}
        workers = self.placement.fewest_workers, self.placement.workers
        for stage in self.stages:
            for name in stage.datasets:
                if name not in datasets:
                    raise ValueError(
                        f"stage {stage.name!r} uses the data set {name!r}, which data.datasets "
                        f"lacks; {nearest(name, datasets)}"
                    )
                check_dataset(stage, datasets[name])
            check_shares(
                f"stage {stage.name!r}: batch.global_pairs", stage.batch.global_pairs, *workers
            )
            stage.optimizer.check_zero_stage(self.placement.zero_stage)
        check_prompt_names(self.instructions)
        check_expert_parallel(self.model, self.placement)
        for stage in self.stages:
            stage.check_model(self.model)
        for stage in self.stages:
            used = [datasets[name] for name in stage.datasets]
            check_similarity(stage, used)
            check_teachers(stage, used)
        for dataset in self.data.datasets:
            check_negatives_used(dataset, [s for s in self.stages if dataset.name in s.datasets])
        for stage in self.stages:
            check_negatives(stage, [datasets[name] for name in stage.datasets])
        self._check_held_out()
        self._check_embeds()
        if self.evaluation.guard is not None:
            kept, holds_out = self.placement.keep_checkpoints, bool(self.held_out_datasets)
            check_guard(self.evaluation.guard, self.evaluation, holds_out, kept)
        # Steps of epochs are known only when records are estimated or counted.
        if all(stage.epochs is None for stage in self.stages):
            self.check_choice()
        return self

    def _check_held_out(self) -> None:
        """Raise if an own set has the name of a held-out part, or validation needs a held-out part
        and none exists.
        """
        taken = {own.name for own in self.evaluation.own_sets}
        for dataset in self.held_out_datasets:
            if held_out_set(dataset.name) in taken:
                raise ValueError(
                    f"evaluation.own_sets: the name {held_out_set(dataset.name)!r} is reserved "
                    f"for the held-out part of the data set {dataset.name!r}; choose another name "
                    f"for your set, or set data.datasets.{dataset.name}.held_out=null"
                )
        validation = self.evaluation.validation
        if validation is not None and isinstance(validation.data, HeldOutValidation):
            if not self.held_out_datasets:
                raise ValueError(
                    "evaluation.validation.data.kind 'held_out' scores held-out parts, but no "
                    "data set of this run has a held-out part; set "
                    "data.datasets.NAME.held_out={kind: fraction}, or data.kind=own_sets, beir "
                    "or mteb"
                )
            check_names("evaluation.validation.weights", validation.weights, self.validation_names)

    def _check_embeds(self) -> None:
        """Raise if a run whose model gives no vectors is to be scored as an embedding model."""
        set_anyway = [
            name
            for name, given in (
                ("guard", self.evaluation.guard is not None),
                ("validation", self.evaluation.validation is not None),
                ("reranker", self.evaluation.reranker is not None),
                ("baselines", bool(self.evaluation.baselines)),
            )
            if given
        ]
        if set_anyway and not self.model.embeds:
            raise ValueError(
                f"evaluation.{set_anyway[0]} has no effect, because a model of the kind "
                f"{self.model.kind!r} gives no vectors that could be scored; leave it out"
            )

    def check_choice(self) -> None:
        """Check that validation, if it is to keep the best weights, scores at least one step before
        the last.

        Raises:
            ValueError: no stage has as many steps as lie between two scores.
        """
        validation = self.evaluation.validation
        if validation is not None and validation.keep == "best":
            every = [self.validation_interval(stage) for stage in self.stages]
            if all(e >= stage.steps for e, stage in zip(every, self.stages, strict=True)):
                raise ValueError(
                    f"evaluation.validation scores every {max(every)} steps, but no stage has "
                    "more steps: only the last step of a stage would be scored, so no best step "
                    "could be chosen; lower evaluation.validation.every_steps, or set "
                    "evaluation.validation=null"
                )

    @property
    def used_datasets(self) -> list[DatasetConfig]:
        """Data sets that at least one stage uses."""
        used = {name for stage in self.stages for name in stage.datasets}
        return [dataset for dataset in self.data.datasets if dataset.name in used]

    @property
    def held_out_datasets(self) -> list[DatasetConfig]:
        """Data sets that stages use and that hold some rows out for scoring."""
        return [dataset for dataset in self.used_datasets if dataset.held_out is not None]

    @property
    def takes_scores(self) -> bool:
        """Whether the run scores its models, on named tasks or on held-out parts; never a model
        that gives no vectors.
        """
        if not self.model.embeds:
            return False
        return self.evaluation.any_tasks or bool(self.held_out_datasets)

    @property
    def total_steps(self) -> int:
        """Number of steps of all stages."""
        return sum(stage.steps for stage in self.stages)

    @property
    def stage_names(self) -> tuple[str, ...]:
        """Names of the run's stages, in their order."""
        return tuple(stage.name for stage in self.stages)

    def default_instructions(self) -> dict[Literal["query", "document"], str]:
        """Map each role to its instruction if all data sets of the last stage share one; the
        trained model uses it by default.
        """
        last = [d for d in self.data.datasets if d.name in self.stages[-1].datasets]
        # Rows with instructions of their own have many.
        if any(dataset.source.instruction_column for dataset in last):
            return {}
        queries = {dataset.query_instruction for dataset in last}
        documents = {dataset.document_instruction for dataset in last}
        found: dict[Literal["query", "document"], str] = {}
        if len(queries) == 1:
            found["query"] = queries.pop()
        if len(documents) == 1:
            found["document"] = documents.pop()
        return {role: text for role, text in found.items() if text}

    @property
    def query_choices(self) -> dict[str, str]:
        """Map prompt names to query instructions if the last stage's data sets have different ones,
        so that users must choose one by name.
        """
        if self.default_instructions().get("query"):
            return {}
        last = [d for d in self.data.datasets if d.name in self.stages[-1].datasets]
        return {d.name: d.query_instruction for d in last if d.query_instruction}

    @property
    def instructions(self) -> dict[str, str]:
        """Map names of data sets and tasks to the instructions that are saved with the
        run's model.

        Whoever scores it finds them in its folder. A task's goes before a data set's of that name.
        """
        trained = {d.name: d.query_instruction for d in self.data.datasets if d.query_instruction}
        return {**trained, **self.evaluation.instructions}

    @property
    def scores(self) -> Scores:
        """Tasks on which the untrained model, each stage's model and the baselines are scored."""
        return Scores(**{name: getattr(self.evaluation, name) for name in Scores.model_fields})

    @property
    def validation_names(self) -> tuple[str, ...]:
        """Names of the validation tasks; empty without validation."""
        validation = self.evaluation.validation
        if validation is None:
            return ()
        if isinstance(validation.data, HeldOutValidation):
            return tuple(held_out_set(dataset.name) for dataset in self.held_out_datasets)
        return validation.data.task_names

    @property
    def validation_scores(self) -> Scores:
        """Settings of the validation tasks; the run must have validation.

        Held-out parts are among them when they are made and stand among the run's own sets.
        """
        assert self.evaluation.validation is not None, "the run has no validation"
        match self.evaluation.validation.data:
            case OwnSetsValidation(sets=sets):
                return Scores(own_sets=tuple(self._below_root(own) for own in sets))
            case BeirValidation(name=name, path=path, split=split, instruction=words):
                own = RetrievalSet(name=name, path=path, split=split, instruction=words)
                return Scores(own_sets=(self._below_root(own),))
            case MtebValidation(tasks=names):
                return Scores(tasks=names)
            case HeldOutValidation():
                own_sets, parts = self.evaluation.own_sets, self.validation_names
                return Scores(own_sets=tuple(own for own in own_sets if own.name in parts))

    def _below_root(self, own: OwnSet) -> OwnSet:
        """Copy the own set with relative paths joined to `data.root`."""
        paths = {"path": self._from_root(own.path)}
        if isinstance(own, ClassificationSet):
            paths["train"] = self._from_root(own.train)
        return changed(own, **paths)

    def _from_root(self, path: str) -> str:
        """Join a relative path to `data.root`; other paths stay unchanged."""
        if self.data.root and "://" not in path and not path.startswith("/"):
            return f"{self.data.root.rstrip('/')}/{path}"
        return path

    def validation_interval(self, stage: StageConfig) -> int:
        """Number of steps between two validations of the stage; the run must have validation."""
        assert self.evaluation.validation is not None
        return self.evaluation.validation.every_steps or stage.checkpoint_every_steps

    def identity(self, write: Callable[[str], str] | None = None) -> dict[str, Any]:
        """Fingerprinted settings: all settings that the trained weights depend on.

        Left out are the name, the placement, where the data lies (its content is compared by the
        batch plan), and what is scored: a further baseline must not make another run of it. Only
        what decides which step's weights are handed on stays in.
        """
        values = self.model_dump(
            mode="json", exclude={"name", "placement", "evaluation"}, context=write
        )
        values["data"] = data_identity(values["data"])
        for stage in values["stages"]:
            del stage["checkpoint_every_steps"]
            if stage.get("epochs") is not None:  # the records decide the steps
                del stage["steps"]
        if self.evaluation.validation is not None and self.evaluation.validation.keep == "best":
            values["validation"] = self._what_chooses(self.evaluation.validation, write)
        return values

    def _what_chooses(
        self, validation: ValidationConfig, write: Callable[[str], str] | None
    ) -> dict[str, Any]:
        values = validation.model_dump(mode="json", exclude={"every_steps"}, context=write)
        values["every_steps"] = [self.validation_interval(stage) for stage in self.stages]
        told = self.evaluation.instructions
        values["instructions"] = {n: told[n] for n in self.validation_names if n in told}
        return values


def of_stages(run: Run, names: Sequence[str]) -> Run:
    """Copy the run with only the named stages, in their original order; without names, with all
    stages.

    Hard negatives that only other stages take are neither mined nor read, and batches of similar
    pairs that only these take are not made.

    Raises:
        ConfigError: a name that no stage has, or settings that the stages left out were needed for.
    """
    known = [stage.name for stage in run.stages]
    for name in names:
        if name not in known:
            raise ConfigError(f"the run {run.name!r} has no stage {name!r}; {nearest(name, known)}")
    if not names:
        return run
    kept = tuple(stage for stage in run.stages if stage.name in names)
    datasets = tuple(as_taken(dataset, kept) for dataset in run.data.datasets)
    data = changed(run.data, datasets=datasets)
    return parse(Run, {**dict(run), "data": data, "stages": kept})


def without_general(run: Run, weighted: Collection[str] = ()) -> EvaluationConfig:
    """Copy a run's evaluation settings without the guard's general tasks, except those with a
    validation weight.
    """
    evaluation = run.evaluation
    if evaluation.guard is None:
        return evaluation
    kept = {*own_sets_of(evaluation.guard, evaluation), *weighted}
    named = {*evaluation.tasks, *(own.name for own in evaluation.own_sets)}
    named.update(held_out_set(dataset.name) for dataset in run.held_out_datasets)
    only: dict[str, Any] = {
        "own_sets": tuple(own for own in evaluation.own_sets if own.name in kept),
        "tasks": tuple(task for task in evaluation.tasks if task in kept),
    }
    # Which tasks a benchmark has is not known here.
    if named.issuperset(weighted):
        only["benchmarks"] = ()
    return evaluation.model_copy(update=only)
