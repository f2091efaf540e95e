"""Settings for the data of a run: its data sets and their processing."""

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, PositiveInt, model_validator

from rayembed.config.data_steps import DataStep, data_steps
from rayembed.config.held_out import HeldOut
from rayembed.config.mining import CleaningConfig, ClusterConfig, MiningConfig
from rayembed.config.settings import Settings, nearest
from rayembed.config.sources import SOURCES, Source
from rayembed.config.table import with_members
from rayembed.config.types import PlainName, Reference, Share, unique_names

if TYPE_CHECKING:
    AnySource = Source
else:
    AnySource = SOURCES.union()

TaskKind = Literal["retrieval", "classification", "clustering", "sts"]


class DatasetConfig(Settings):
    """Settings of one data set: its source, cleaning, sampling, and steps such as mining.

    Steps that other packages add (`STEPS`) are settings beside `mining`; see the end of the module.
    """

    name: PlainName
    """Name, unique within the run; used by stages and in folder names."""
    source: AnySource
    task: TaskKind = "retrieval"
    """Kind of task of the records. Has no effect of its own; stored with each record."""
    query_instruction: str = ""
    """Task instruction before queries; empty for none."""
    document_instruction: str = ""
    """Task instruction before documents, for symmetric tasks; empty for none."""
    in_batch_negatives: bool = True
    """Whether other records' documents may be negatives, in stages that use them at all."""
    num_samples: PositiveInt | None = None
    """Number of cleaned records to sample; None: all."""
    sample_share: Share | None = None
    """Share of cleaned records to sample, for papers that state a share."""
    held_out: HeldOut | None = None
    """Rows that are excluded from training and scored before and after it, as a retrieval set;
    their queries and documents stand in no training row of any data set. None: all rows are trained
    on. Records of a job that held a part out come without its rows; any fraction scores that part.
    """
    cleaning: CleaningConfig = CleaningConfig()
    """Cleaning beyond the removal of exact duplicates."""
    mining: MiningConfig | None = None
    """Mining of hard negatives; None: those of the source, or none."""
    clusters: ClusterConfig | None = None
    """Clustering into batches of similar pairs, for stages with the policy `clustered`; where no
    stage that uses the data set has it, they are not made."""

    @property
    def steps(self) -> tuple[DataStep, ...]:
        """Settings of the data set's configured steps, in execution order."""
        asked = (getattr(self, step.kind) for step in data_steps())
        return tuple(step for step in asked if step is not None)

    @property
    def draws_by_seed(self) -> bool:
        """Whether the run's seed changes the records, for example because they are sampled."""
        sampled = self.num_samples is not None or self.sample_share is not None
        return sampled or self.source.draws_by_seed

    @property
    def has_negatives(self) -> bool:
        """Whether the records can have hard negatives: mined, given in the rows, or from other
        classes.
        """
        return self.mining is not None or self.source.brings_negatives

    @property
    def most_negatives(self) -> tuple[str, int] | None:
        """Setting that limits the hard negatives of a record, with its value; None if no setting
        does.
        """
        if self.mining is not None:
            return "mining.num_negatives", self.mining.num_negatives
        return self.source.most_negatives

    @model_validator(mode="after")
    def _one_size(self) -> "DatasetConfig":
        if self.num_samples is not None and self.sample_share is not None:
            raise ValueError(
                f"data set {self.name!r}: num_samples and sample_share both set the number of "
                "records to draw; set one of them to null"
            )
        return self

    @model_validator(mode="after")
    def _rows_can_be_held_out(self) -> "DatasetConfig":
        if self.held_out is None:
            return self
        if not self.source.can_hold_out:
            kinds = [kind for kind, one in SOURCES.classes().items() if _can_hold_out(one)]
            raise ValueError(
                f"data set {self.name!r}: held_out does not support the source kind "
                f"{self.source.kind!r}, only {', '.join(kinds[:-1])} and {kinds[-1]}; write the "
                "records with rayembed prepare and name their folder as the source, or set "
                "held_out=null"
            )
        column, allowed = getattr(self.held_out, "column", None), self.source.held_out_columns
        if column is not None and allowed and column not in allowed:
            raise ValueError(
                f"data set {self.name!r}: held_out.column is {column!r}, but records have no such "
                f"column; {nearest(column, allowed)}"
            )
        return self

    @model_validator(mode="after")
    def _graded_pairs_are_no_positives(self) -> "DatasetConfig":
        if self.source.is_graded and self.steps:
            wrong = self.steps[0].kind
            raise ValueError(
                f"data set {self.name!r}: {wrong} treats every pair as a query and its positive, "
                f"but pairs of the source kind {self.source.kind!r} may be dissimilar; set "
                f"{wrong}=null, or use the kind 'sts', which keeps only similar pairs"
            )
        return self

    @model_validator(mode="after")
    def _steps_fit(self) -> "DatasetConfig":
        for step in self.steps:
            step.check_fits(self)
        return self

    @model_validator(mode="after")
    def _given_negatives_are_there(self) -> "DatasetConfig":
        if self.mining is None or self.mining.pool != "given":
            return self
        if not self.model_copy(update={"mining": None}).has_negatives:
            raise ValueError(
                f"data set {self.name!r}: mining.pool 'given' selects among the negatives in the "
                "rows, but the source provides no negatives; name their column (source.negatives) "
                "or set mining.pool to 'corpus'"
            )
        return self


if not TYPE_CHECKING:
    DatasetConfig = with_members(DatasetConfig, data_steps())


def _can_hold_out(kind: type[Settings]) -> bool:
    return issubclass(kind, Source) and kind.can_hold_out


class DataConfig(Settings):
    """Settings for all data of a run."""

    root: Reference = ""
    """Base of relative source paths: a folder, `s3://…` or `gs://…`. Not part of the run's
    identity; the data's content is."""
    datasets: Annotated[tuple[DatasetConfig, ...], unique_names("data sets")] = Field(min_length=1)


def data_identity(values: dict[str, Any]) -> dict[str, Any]:
    """Remove from dumped `DataConfig` values what does not change the data: the root folder, and
    endpoints and rates of language models.
    """
    kept = {name: value for name, value in values.items() if name != "root"}
    datasets = [
        {name: _without_address(value) for name, value in dataset.items()}
        for dataset in values["datasets"]
    ]
    return {**kept, "datasets": datasets}


def _without_address(value: Any) -> Any:
    """Reduce each `llm` group in nested settings to the language model's name and revision, without
    its endpoint.
    """
    if not isinstance(value, dict):
        return value
    return {
        name: {part: one[part] for part in ("model", "revision")}
        if name == "llm"
        else _without_address(one)
        for name, one in value.items()
    }
