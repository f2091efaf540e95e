"""A run: identity (what it is) and placement (where it runs), its fingerprint and its overrides."""

import hashlib
import json
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field, PositiveInt, model_validator

from rayembed.config.data import DataConfig
from rayembed.config.model import ModelConfig
from rayembed.config.settings import Settings, nearest, parse
from rayembed.config.stage import StageConfig
from rayembed.errors import ConfigError


class EvaluationConfig(Settings):
    """Which scores are taken, of what."""

    suite: Literal["wikipedia", "none"] = "wikipedia"
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


class Placement(Settings):
    """Where and how a run is executed. Nothing here may change the trained weights."""

    storage_path: str = "outputs"
    """Folder or object-storage prefix for data, plans, checkpoints, models and results."""
    workers: PositiveInt = 1
    """Data-parallel training processes."""
    use_gpu: bool = False
    """One GPU for each worker."""
    cpus_per_worker: float = Field(default=1.0, gt=0)
    """What Ray reserves for each worker."""
    threads_per_worker: PositiveInt | None = None
    """Threads of torch in each worker; None: `cpus_per_worker`, rounded down."""
    zero_stage: Literal[0, 1, 2, 3] = 0
    """DeepSpeed's partitioning: 0 nothing, 1 optimiser, 2 gradients, 3 parameters."""
    micro_batch_tokens: PositiveInt = 8192
    """Padded tokens of one forward pass; texts are sorted by length and cut at this budget."""
    grad_cache: bool = True
    """Two passes with memory of one micro-batch; False keeps all graphs and runs one pass."""
    gradient_checkpointing: bool = False
    """Recompute activations layer by layer in the backward pass."""
    max_failures: int = Field(default=3, ge=0)
    """Restarts after a worker died, each from the last checkpoint."""
    keep_checkpoints: PositiveInt = 2
    """Checkpoints kept of each stage."""
    tracking_uri: str | None = None
    """MLflow's address, `http(s)://…` or `sqlite:///…`; None: a SQLite file in `storage_path`."""
    experiment: str = "rayembed"
    """MLflow experiment."""
    registered_model: str | None = None
    """Name in MLflow's registry; None: the run's name."""


class Run(Settings):
    """Everything that one training run is."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """A run submitted again under its name goes on where it stopped."""
    seed: int = Field(default=0, ge=0)
    """Of initialisation, dropout, sampling and the batch plan."""
    model: ModelConfig
    data: DataConfig
    stages: tuple[StageConfig, ...] = Field(min_length=1)
    evaluation: EvaluationConfig = EvaluationConfig()
    placement: Placement = Placement()

    @model_validator(mode="after")
    def _consistent(self) -> "Run":
        names = [dataset.name for dataset in self.data.datasets]
        for seen in (names, [stage.name for stage in self.stages]):
            twice = sorted({name for name in seen if seen.count(name) > 1})
            if twice:
                raise ValueError(f"the name {twice[0]!r} is used twice; names must be unique")
        for stage in self.stages:
            for name in stage.datasets:
                if name not in names:
                    raise ValueError(
                        f"stage {stage.name!r} uses the data set {name!r}; {nearest(name, names)}"
                    )
            if stage.batch.global_pairs % self.placement.workers:
                raise ValueError(
                    f"stage {stage.name!r}: batch.global_pairs {stage.batch.global_pairs} cannot "
                    f"be shared equally by placement.workers {self.placement.workers}"
                )
        return self

    def identity(self) -> dict[str, Any]:
        """What is fingerprinted: all but the name, the placement and where the data lies."""
        values = self.model_dump(mode="json", exclude={"name", "placement"})
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
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


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
    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot read the run {str(path)!r}: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"the run {str(path)!r} must be a mapping of settings")
    return parse(Run, values)


def override(run: Run, assignments: tuple[str, ...] | list[str]) -> Run:
    """The run with each `path.to.setting=value` put in; values are read as YAML.

    Elements of lists are named by their index or by their `name` (`stages.blend.steps=10`).
    Setting the `kind` of an alternative drops the other settings of the former one.

    Raises:
        ConfigError: not an assignment, an unknown path (with the nearest name), a wrong value.
    """
    values = run.model_dump(mode="json")
    for assignment in assignments:
        path, equals, text = assignment.partition("=")
        if not equals or not path:
            raise ConfigError(f"--set {assignment!r}: expected path.to.setting=value")
        try:
            value = yaml.safe_load(text) if text else ""
        except yaml.YAMLError as error:
            raise ConfigError(f"--set {assignment!r}: the value is not YAML: {error}") from None
        _assign(values, path, _number(value))
    return parse(Run, values)


def _number(value: Any) -> Any:
    """YAML 1.1 reads `2e-5` as text; people mean the number."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


def _assign(values: Any, path: str, value: Any) -> None:
    parts = path.split(".")
    here = values
    for depth, part in enumerate(parts):
        last = depth == len(parts) - 1
        if isinstance(here, list):
            key: Any = _index(here, part, path)
        elif isinstance(here, dict):
            free = parts[:depth][-1:] == ["datasets"] and "stages" in parts[:depth]
            if part not in here and not free:
                prefix = ".".join([*parts[:depth], part])
                raise ConfigError(f"no setting {prefix!r}; {nearest(part, here)}")
            key = part
        else:
            prefix = ".".join(parts[:depth])
            raise ConfigError(f"no setting {path!r}: {prefix!r} is a value, not a group")
        if last:
            if key == "kind" and here[key] != value:
                here.clear()
            here[key] = value
        else:
            if here[key] is None:
                raise ConfigError(
                    f"no setting {path!r}: {'.'.join(parts[: depth + 1])!r} is null; set it whole, "
                    f"for instance --set '{'.'.join(parts[: depth + 1])}={{{parts[depth + 1]}: …}}'"
                )
            here = here[key]


def _index(items: list[Any], part: str, path: str) -> int:
    names = [str(item.get("name")) if isinstance(item, dict) else "" for item in items]
    if part in names:
        return names.index(part)
    if part.isdigit() and int(part) < len(items):
        return int(part)
    allowed = [name for name in names if name] + [str(i) for i in range(len(items))]
    raise ConfigError(f"no setting {path!r}: no element {part!r}; {nearest(part, allowed)}")
