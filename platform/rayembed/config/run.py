"""A run: identity (what it is) and placement (where it runs), its fingerprint and its file."""

import hashlib
import json
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BeforeValidator, Field, PositiveInt, field_validator, model_validator

from rayembed.config.credentials import refuse_credentials
from rayembed.config.data import DataConfig, DatasetConfig
from rayembed.config.model import ModelConfig
from rayembed.config.settings import Settings, nearest, parse
from rayembed.config.sources import PairsSource, WikipediaSource
from rayembed.config.stage import StageConfig
from rayembed.config.yaml_text import read_yaml, write_yaml
from rayembed.errors import ConfigError


def _digit(value: Any) -> Any:
    """Texts of a file or the command line stand for numbers; a `Literal` takes numbers only."""
    return int(value) if isinstance(value, str) and value in ("0", "1", "2", "3") else value


ZeroStage = Annotated[Literal[0, 1, 2, 3], BeforeValidator(_digit)]


class EvaluationConfig(Settings):
    """Which scores are taken, of what."""

    suite: Literal["wikipedia", "none"] = "none"
    """`wikipedia`: the tasks over the held-out titles of the Wikipedia sample."""
    num_documents: PositiveInt = 1000
    """Documents of the retrieval corpora."""
    num_queries: PositiveInt = 500
    """Queries of the retrieval tasks."""
    max_length: PositiveInt = 128
    """Tokens of a text."""
    before_training: bool = True
    """Whether the untrained model is scored for comparison."""
    baselines: tuple[str, ...] = ()
    """Asset references of embedding models to compare with, or `bm25`."""
    instructions: dict[str, str] = Field(default_factory=dict)
    """Task definition put before the queries of a task, by the task's name; as in training."""
    source: str | None = None
    """Asset reference of the Wikipedia JSON file; None: that of the data sets."""

    _no_credentials = field_validator("source")(refuse_credentials)

    @field_validator("baselines")
    @classmethod
    def _no_credentials_each(cls, baselines: tuple[str, ...]) -> tuple[str, ...]:
        for reference in baselines:
            refuse_credentials(reference)
        return baselines

    @field_validator("instructions")
    @classmethod
    def _by_name(cls, instructions: dict[str, str]) -> dict[str, str]:
        """Sorted, because the order in which they are written decides nothing."""
        return dict(sorted(instructions.items()))


class Placement(Settings):
    """Where and how a run is executed. Nothing here may change the trained weights.

    With dropout the numbers drawn depend on workers and micro-batches, so the weights are other
    draws of the same training; a run resumed with as many workers draws the same ones. A run goes
    on from its checkpoints with other workers and another ZeRO stage.
    """

    storage_path: str = Field(default="outputs", min_length=1)
    """Folder or object-storage prefix for data, plans, checkpoints, models and results."""
    workers: PositiveInt = 1
    """Data-parallel training processes."""
    use_gpu: bool = False
    """One GPU for each worker."""
    cpus_per_worker: float = Field(default=1.0, gt=0)
    """What Ray reserves for each worker."""
    wait_for_nodes_seconds: float = Field(default=0.0, ge=0.0)
    """How long to ask the cluster for nodes when the workers do not fit, on one that adds nodes
    (KubeRay, `ray up`) and may have scaled to none; 0: workers that do not fit are refused."""
    threads_per_worker: PositiveInt | None = None
    """Threads of torch in each worker; None: `cpus_per_worker`, rounded down."""
    zero_stage: ZeroStage = 2
    """DeepSpeed's partitioning: 0 nothing, 1 optimiser, 2 gradients, 3 parameters.

    2 and 3 add the gradients of micro-batches in fp32, 0 and 1 in the weights' type: in bf16 the
    number of micro-batches then shows in the weights (measured: three times as much).
    """
    micro_batch_tokens: PositiveInt = 8192
    """Padded tokens of one forward pass; texts are sorted by length and cut at this budget.

    The more a GPU takes, the better; CPUs are fastest with 512 to 2048, which their caches hold.
    """
    grad_cache: bool = True
    """Two passes with memory of one micro-batch; False keeps all graphs and runs one pass."""
    gradient_checkpointing: bool = False
    """Recompute activations layer by layer in the backward pass."""
    max_failures: int = Field(default=3, ge=0)
    """Restarts after a worker died, each from the last checkpoint."""
    keep_checkpoints: PositiveInt = 2
    """Checkpoints kept of each stage: those of the lowest loss, and the last one beside them."""
    tracking_uri: str | None = None
    """MLflow's address, `http(s)://…` or `sqlite:///…`; None: a SQLite file in `storage_path`."""
    experiment: str = "rayembed"
    """MLflow experiment."""
    registered_model: str | None = None
    """Name in MLflow's registry; None: the run's name."""

    _no_credentials = field_validator("storage_path", "tracking_uri")(refuse_credentials)


class Run(Settings):
    """Everything that one training run is."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """A run submitted again under its name goes on where it stopped."""
    seed: int = Field(default=0, ge=0, lt=2**32)
    """Of initialisation, dropout, sampling and the batch plan; 32 bits, as numpy's generators take
    and as leaves torch's 64 room to tell stages and workers apart."""
    model: ModelConfig
    data: DataConfig
    stages: tuple[StageConfig, ...] = Field(min_length=1)
    evaluation: EvaluationConfig = EvaluationConfig()
    placement: Placement = Placement()

    @model_validator(mode="after")
    def _names_are_unique(self) -> "Run":
        groups = (
            ("data set", [dataset.name for dataset in self.data.datasets]),
            ("stage", [stage.name for stage in self.stages]),
        )
        for what, names in groups:
            twice = sorted({name for name in names if names.count(name) > 1})
            if twice:
                raise ValueError(
                    f"two elements have the {what} name {twice[0]!r}; it must be unique"
                )
        return self

    @model_validator(mode="after")
    def _stages_fit(self) -> "Run":
        datasets = {dataset.name: dataset for dataset in self.data.datasets}
        for stage in self.stages:
            for name in stage.datasets:
                if name not in datasets:
                    raise ValueError(
                        f"stage {stage.name!r} uses the data set {name!r}, which data.datasets "
                        f"lacks; {nearest(name, datasets)}"
                    )
                dataset = datasets[name]
                in_batch = stage.batch.in_batch_negatives and dataset.in_batch_negatives
                if not in_batch and not (stage.batch.num_negatives and dataset.has_negatives):
                    raise ValueError(
                        f"the data set {name!r} has no negatives in stage {stage.name!r}, so its "
                        "loss is always zero; give it negatives (mining, or negatives of the "
                        "source, with the stage's batch.num_negatives above 0) or allow in-batch "
                        "negatives in both the stage and the data set"
                    )
                if stage.batch.policy == "clustered":
                    _check_clusters(stage, dataset)
            if stage.batch.global_pairs % self.placement.workers:
                raise ValueError(
                    f"stage {stage.name!r}: batch.global_pairs {stage.batch.global_pairs} cannot "
                    f"be shared equally by placement.workers {self.placement.workers}; take a "
                    "multiple"
                )
        return self

    @model_validator(mode="after")
    def _negatives_are_used(self) -> "Run":
        for dataset in self.data.datasets:
            using = [stage for stage in self.stages if dataset.name in stage.datasets]
            origin = _origin_of_negatives(dataset)
            if origin is None or not using or any(stage.batch.num_negatives for stage in using):
                continue
            name = using[0].name
            number = dataset.mining.num_negatives if dataset.mining is not None else 7
            raise ValueError(
                f"data.datasets.{dataset.name}.{origin} gives hard negatives, but every stage that "
                f"uses the data set ({', '.join(stage.name for stage in using)}) takes none of "
                f"them: set stages.{name}.batch.num_negatives={number} (it is 0), or "
                f"data.datasets.{dataset.name}.{origin}=null"
            )
        return self

    @model_validator(mode="after")
    def _evaluation_fits(self) -> "Run":
        evaluation = self.evaluation
        if evaluation.suite == "none":
            return self
        sources = [dataset.source for dataset in self.data.datasets]
        learnt = any(isinstance(source, WikipediaSource) for source in sources)
        if evaluation.source is None and not learnt:
            raise ValueError(
                "evaluation.suite 'wikipedia' needs texts: set evaluation.source to the asset "
                "reference of the Wikipedia JSON file, or evaluation.suite=none"
            )
        if evaluation.num_queries > evaluation.num_documents:
            raise ValueError(
                f"evaluation.num_queries {evaluation.num_queries} exceeds "
                f"evaluation.num_documents {evaluation.num_documents}: each query has its document"
            )
        held_out = self.data.held_out.num_titles
        if held_out < evaluation.num_documents:
            raise ValueError(
                f"evaluation.num_documents {evaluation.num_documents} exceeds "
                f"data.held_out.num_titles {held_out}, the titles that no training row touches; "
                "hold out more, ask for fewer, or set evaluation.suite=none"
            )
        return self

    def identity(self) -> dict[str, Any]:
        """What is fingerprinted: all that the trained weights depend on.

        Left out are the name, the placement, where the data lies (its content is compared by the
        batch plan), and what is scored: a further baseline must not make another run of it. Only
        which articles the evaluation keeps from the training data stays in.
        """
        values = self.model_dump(mode="json", exclude={"name", "placement", "evaluation"})
        values["kept_for_evaluation"] = [self.evaluation.suite, self.evaluation.source]
        del values["data"]["root"]
        for stage in values["stages"]:
            del stage["checkpoint_every_steps"]
        return values

    @property
    def fingerprint(self) -> str:
        """Twelve hexadecimal digits that name the identity of this run."""
        return fingerprint(self.identity())

    def to_yaml(self) -> str:
        """The whole run as YAML, which `--recipe run.yaml` reads back."""
        return write_yaml(self.model_dump(mode="json"))


def _check_clusters(stage: StageConfig, dataset: DatasetConfig) -> None:
    """Return when the data set's clusters are batches of the stage.

    Raises:
        ValueError: it has none, or of another size, or takes no part in in-batch negatives.
    """
    pairs = stage.batch.global_pairs
    wanted = f"data.datasets.{dataset.name}.clusters"
    if dataset.clusters is None:
        raise ValueError(
            f"stage {stage.name!r} has the policy 'clustered', and the data set {dataset.name!r} "
            f"has no clusters; set {wanted} with batch_pairs={pairs}, or another policy"
        )
    if dataset.clusters.batch_pairs != pairs:
        raise ValueError(
            f"{wanted}.batch_pairs {dataset.clusters.batch_pairs} must be batch.global_pairs "
            f"{pairs} of stage {stage.name!r}, which takes its batches whole"
        )
    if not dataset.in_batch_negatives:
        raise ValueError(
            f"stage {stage.name!r} has the policy 'clustered', which puts pairs side by side that "
            f"are hard negatives of each other; the data set {dataset.name!r} leaves them out by "
            "in_batch_negatives=false"
        )


def _origin_of_negatives(dataset: DatasetConfig) -> str | None:
    """The setting that gives a data set its hard negatives; None: no setting does.

    Classes always give some; that a stage leaves these out is no contradiction.
    """
    if dataset.mining is not None:
        return "mining"
    given = isinstance(dataset.source, PairsSource) and dataset.source.negatives is not None
    return "source.negatives" if given else None


def fingerprint(values: Any) -> str:
    """Twelve hexadecimal digits of the SHA-256 of canonical JSON.

    Raises:
        TypeError: a value has no stable form in JSON.
    """
    text = json.dumps(values, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def read_run(path: str | Path) -> Run:
    """A run from a YAML file that `Run.to_yaml` wrote or a user did.

    Raises:
        ConfigError: no such file, not YAML, or settings that do not hold.
    """
    return parse(Run, read_mapping(path))


def read_mapping(path: str | Path) -> dict[str, Any]:
    """The settings in a YAML file, not yet checked.

    Raises:
        ConfigError: no such file, or not a mapping in YAML.
    """
    try:
        values = read_yaml(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot read the run {str(path)!r}: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(
            f"the run {str(path)!r} must be a mapping of settings, as --dry-run prints one"
        )
    return values
