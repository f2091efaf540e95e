"""Settings of a backbone's evaluation by finetuning: encoder, tasks, protocol and placement."""

from collections.abc import Callable
from typing import Annotated, Any

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from rayembed.config.backbone import DtypeSetting
from rayembed.config.document import Document
from rayembed.config.settings import Settings, parse
from rayembed.config.types import Distinct, FileName, ModelReference, Reference, Seed, UseGpu

_Beta = Annotated[float, Field(ge=0.0, lt=1.0)]


class FinetuneProtocol(Settings):
    """Settings of the finetuning on one task. Every combination of learning rate, batch and seed is
    a trial.
    """

    epochs: PositiveInt
    learning_rates: Distinct[PositiveFloat] = Field(min_length=1)
    """Peak learning rates; each falls linearly to zero."""
    batch_sizes: Distinct[PositiveInt] = Field(min_length=1)
    """Numbers of rows in a step."""
    seeds: Distinct[Seed] = Field(min_length=1)
    """Seeds of the new head, the order of the rows and dropout."""
    max_length: PositiveInt
    """Maximum tokens of an input, including special ones."""
    warmup_share: float = Field(ge=0.0, lt=1.0)
    """Share of all steps in which the learning rate rises linearly."""
    max_grad_norm: float = Field(ge=0.0)
    """Maximum norm of gradients; 0: no clipping."""
    weight_decay: float = Field(ge=0.0)
    """AdamW's weight decay; biases and norms have none."""
    adam_betas: tuple[_Beta, _Beta]
    adam_epsilon: PositiveFloat


class ProtocolChanges(Settings):
    """Changes to the protocol of each task; None changes nothing."""

    epochs: PositiveInt | None = None
    learning_rates: tuple[PositiveFloat, ...] | None = None
    batch_sizes: tuple[PositiveInt, ...] | None = None
    seeds: tuple[Seed, ...] | None = None
    max_length: PositiveInt | None = None
    warmup_share: float | None = None
    max_grad_norm: float | None = None
    weight_decay: float | None = None
    adam_betas: tuple[_Beta, _Beta] | None = None
    adam_epsilon: PositiveFloat | None = None

    def applied_to(self, protocol: FinetuneProtocol) -> FinetuneProtocol:
        """Return the protocol with these changes applied.

        Raises:
            ConfigError: a changed value is out of range.
        """
        changes = self.model_dump(mode="json", exclude_none=True)
        return parse(FinetuneProtocol, {**protocol.model_dump(mode="json"), **changes})


class BackbonePlacement(Settings):
    """Where trials run, and with which resources. Nothing here changes a score beyond rounding."""

    storage_path: Reference = Field(default="outputs", min_length=1)
    """Folder or object-storage prefix for data, results and models that others start from; all
    nodes must see it."""
    use_gpu: UseGpu = "auto"
    """One GPU for each trial. `auto`: where a live node offers one."""
    cpus_per_trial: PositiveFloat = 1.0
    """CPUs that Ray reserves for each trial."""
    threads_per_trial: PositiveInt | None = None
    """Threads of torch in each trial; None: `cpus_per_trial`, rounded down."""
    trials_at_once: PositiveInt | None = None
    """Maximum trials side by side; None: as many as the cluster's free resources hold."""
    retries: int = Field(default=2, ge=0)
    """Maximum restarts of a trial whose process died or whose training failed."""
    predict_batch: PositiveInt = 128
    """Rows of a forward pass when a finetuned model is scored."""
    tracking_uri: Reference | None = None
    """MLflow's address; None: a SQLite file in `storage_path`."""
    experiment: str = "rayembed-backbones"
    """MLflow experiment."""

    @property
    def on_gpu(self) -> bool:
        """Whether each trial uses a GPU; `auto` counts as no until the job resolves it."""
        return self.use_gpu is True


class BackboneRun(Document):
    """Complete settings: a backbone, the tasks on which it is finetuned, and the placement."""

    backbone: ModelReference = Field(min_length=1)
    """Asset reference of an encoder: a folder, `hf://org/name@revision`, `s3://…`. One of
    transformers' own families, or a NomicBert in its published layout, dense or with experts."""
    name: FileName | None = None
    """Name in results and tables; None: the last part of the reference."""
    benchmarks: tuple[str, ...] = ()
    """`glue` (Nomic Embed v2, Table 3), `xtreme-r` (Table 4)."""
    tasks: tuple[str, ...] = ()
    """Single tasks by name, in addition to those of the benchmarks."""
    protocol: ProtocolChanges = ProtocolChanges()
    """Changes to the protocols of all tasks; empty: the papers' protocols."""
    from_mnli: bool = True
    """Start RTE, STS-B and MRPC from the model finetuned on MNLI (section 5.1), which is also made
    if it was not requested. False: from the backbone."""
    precision: DtypeSetting = "auto"
    """Number type of activations (autocast); weights and AdamW's state are always float32."""
    head_dropout: float = Field(default=0.1, ge=0.0, lt=1.0)
    """Dropout before the classifier of a NomicBert, whose encoder has none. Families of
    transformers have theirs in their configuration."""
    data_root: Reference | None = None
    """Folder or object-storage prefix with copies of the data sets' Parquet branches, laid out
    `<org>/<name>/<configuration>/<split>/*.parquet`; None: the hub."""
    placement: BackbonePlacement = BackbonePlacement()

    @model_validator(mode="after")
    def _something_to_do(self) -> "BackboneRun":
        if not (self.benchmarks or self.tasks):
            raise ValueError(
                "nothing to finetune on: name a benchmark (--benchmark glue or xtreme-r) or tasks "
                "(--tasks CoLA,RTE)"
            )
        return self

    def identity(self, write: Callable[[str], str] | None = None) -> dict[str, Any]:
        """All settings except the placement; results are filed under the name."""
        return self.model_dump(mode="json", exclude={"placement"})
