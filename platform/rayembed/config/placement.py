"""Settings for how a run is executed: storage, workers, memory, restarts, tracking."""

import re
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from rayembed.config.architecture import ArchitectureConfig
from rayembed.config.reports import FindingChoice, known_mirror
from rayembed.config.settings import Settings
from rayembed.config.types import Reference, StoragePath, Unpadded, UseGpu

GPUS: Mapping[str, int] = MappingProxyType(
    {
        "B200": 178,
        "H200": 140,
        "H100": 79,
        "A100 80 GB": 79,
        "L40S": 45,
        "A100 40 GB": 39,
        "A10G": 22,
        "L4": 22,
        "T4": 15,
    }
)
"""GiB of GPUs by name as drivers report them, slightly less than their nominal size."""


def known_gpu(name: str) -> str:
    """Look up the GPU in `GPUS` that a text names; case, spaces and hyphens are ignored.

    Raises:
        ValueError: there is none.
    """
    for known in GPUS:
        if _letters(known) == _letters(name):
            return known
    raise ValueError(f"the GPU {name!r} is unknown; known GPUs are {', '.join(GPUS)}")


def ray_kind(name: str) -> str:
    """Convert a name in `GPUS` to Ray's accelerator name, equal for all memory sizes."""
    return name.partition(" ")[0]


def is_kind(name: str, kinds: Collection[str]) -> bool:
    """Whether a GPU with this name in Ray (`A100`, `A100-80G`) is one of the `kinds`, also by
    memory size if the name has it.
    """
    kind = ray_kind(name)
    sized = [known for known in kinds if known.startswith(f"{kind}-")]
    if sized and kind != name:
        return any(_letters(name).startswith(_letters(known)) for known in sized)
    return bool(sized) or kind in kinds


def is_device(name: str, device: str) -> bool:
    """Whether a driver's device name belongs to a kind of `GPUS`; `NVIDIA A100-SXM4-80GB` is an
    `A100 80 GB`.
    """
    kind, _, size = name.partition(" ")
    words = re.findall(r"[a-z0-9]+", device.lower())
    return kind.lower() in words and (not size or _letters(size) in words)


def _letters(name: str) -> str:
    return re.sub(r"[\s_-]", "", name).lower()


def check_model_name(name: str) -> str:
    """Check and return the name of a registered model; raise if MLflow could not find it.

    Raises:
        ValueError: it cannot.
    """
    others = sorted(set(re.findall(r"[^\w .+-]", name)))
    if others or not re.match(r"\w", name):
        seen = (
            f"not {', '.join(map(repr, others))}" if others else "starting with a letter or digit"
        )
        raise ValueError(
            "the name of a registered model may contain only letters, digits, spaces and . _ + -, "
            f"{seen}: MLflow uses the name in addresses (models:/name@alias) and in searches"
        )
    return name


def _digit(value: Any) -> Any:
    """Convert a digit in text form to a number, because a `Literal` of numbers accepts no text."""
    return int(value) if isinstance(value, str) and value in ("0", "1", "2", "3") else value


ZeroStage = Annotated[Literal[0, 1, 2, 3], BeforeValidator(_digit)]


class RuntimeSettings(Settings):
    """Base class of placement settings: the runtime, and which settings require Ray."""

    runtime: Literal["auto", "local", "ray"] = "auto"
    """Where the work runs. `local`: in this process, with a small pool beside it for data; `ray`:
    on the cluster that `RAY_ADDRESS` names, or one that is started for the job. `auto`: local where
    no cluster is named and no setting needs Ray."""

    def asks_ray(self) -> dict[str, bool]:
        """Map each setting of the class to whether its value needs Ray."""
        return {}

    @property
    def needs_ray(self) -> list[str]:
        """Settings, with their values, that require Ray instead of one process."""
        asked = self.asks_ray().items()
        return [f"placement.{name}={getattr(self, name)}" for name, needs in asked if needs]

    @model_validator(mode="after")
    def _one_process_is_enough(self) -> Self:
        if self.runtime == "local" and self.needs_ray:
            raise ValueError(
                f"placement.runtime=local runs in one process, but {', '.join(self.needs_ray)} "
                "needs Ray; remove that setting, or set placement.runtime=ray"
            )
        return self


class UnitLimit(Settings):
    """Setting for the time limit of one unit of work of data preparation on Ray."""

    unit_seconds: PositiveFloat = 86_400.0
    """Seconds after which a process that prepares a unit of data on Ray is killed as hanging;
    another one does the unit again. A unit is a part of 8,192 rows, a piece of a file, or a
    k-means."""


AUTO_THREADS = 2
"""Maximum of `Placement.threads_per_worker=auto`."""


class Placement(UnitLimit, FindingChoice, RuntimeSettings):
    """Settings for how and where a training run is executed. None of them may change the trained
    weights.

    With dropout the numbers drawn depend on workers and micro-batches, so the weights are other
    draws of the same training; a run resumed with as many workers draws the same ones. A run goes
    on from its checkpoints with other workers and another ZeRO stage.
    """

    storage_path: StoragePath = Field(default="outputs", min_length=1)
    """Folder or object-storage prefix for data, plans, checkpoints, models and results."""
    workers: PositiveInt = 1
    """Data-parallel training processes; their maximum with `min_workers`."""
    min_workers: PositiveInt | None = None
    """Minimum workers of a run on a cluster that changes; the run uses as many as fit, of those
    numbers up to `workers` that divide its batches evenly. None: always `workers`."""
    resize_interval_seconds: float = Field(default=60.0, ge=0.0)
    """Minimum seconds between two checks for more workers, with `min_workers`. A check follows a
    checkpoint; every change restarts all workers."""
    use_gpu: UseGpu = "auto"
    """Whether each worker has a GPU. `auto`: where torch sees one on this machine or, with Ray,
    where live nodes offer one for each of the fewest workers; said at the start and kept in
    `run.yaml`. With `wait_for_nodes_seconds` and no such node `auto` is refused, since GPUs may be
    still to come. False: teachers, filters and clusters stay on CPUs as well."""
    gpu: Annotated[str, AfterValidator(known_gpu)] | None = None
    """Kind of each worker's GPU (`H100`, `A100 40 GB`, `L40S`, …): `--dry-run` says whether the run
    fits, and ends with exit code 2 where it does not; on a cluster with GPUs of several kinds
    workers run on this one alone. None: any kind; `--dry-run` names all that the run fits."""
    cpus_per_worker: float = Field(default=1.0, gt=0)
    """CPUs that Ray reserves for each worker."""
    wait_for_nodes_seconds: float = Field(default=0.0, ge=0.0)
    """Maximum seconds to wait for nodes when the workers do not fit, on a cluster that adds nodes
    (KubeRay, `ray up`), possibly from none; 0: workers that do not fit are refused."""
    threads_per_worker: PositiveInt | Literal["auto"] | None = None
    """Torch threads of each worker. None: `cpus_per_worker`, rounded down. `auto`: two, or one
    where other processes keep this machine's cores busy when the run begins, which says what it
    took and has the number in its `run.yaml`; on a cluster of several nodes two."""
    step_processes: int | None = Field(default=None, ge=0)
    """Number of processes on the worker's machine that read and tokenise batches in advance; 0: a
    thread of the worker. None: on a GPU 2 to 4 for a model below about a billion parameters, as the
    machine has cores for them, else 0: a GPU reads few tokens a second of a larger model, and a
    step on CPUs takes a hundred times as long as its tokenisation. Each takes some 0.3 GB and,
    once, two CPU seconds."""
    zero_stage: ZeroStage = 2
    """DeepSpeed's partitioning: 0 nothing, 1 optimiser, 2 gradients, 3 parameters."""
    reduce_once: bool = True
    """Whether gradients are accumulated on each worker over a step's micro-batches and reduced over
    workers once, at its end. False: with `zero_stage` 2 or 3 after each micro-batch, so that a
    worker holds no gradients but its share; it saves nearly four bytes for each trained weight, as
    all parameters of a large model may need, and sends all gradients again for each micro-batch."""
    expert_parallel: PositiveInt = 1
    """Workers of a group that share the experts of each layer; 1: every worker holds all of them.
    Tokens are exchanged with the experts' workers in every layer and pass. It must divide `workers`
    and the number of experts."""
    micro_batch_tokens: PositiveInt | None = None
    """Tokens of one forward pass, padding included; texts are sorted by length and cut at this
    budget. None: 1,024 on a CPU, whose caches hold that, and on a GPU 8,192 with padding, without
    it a multiple of 8,192 up to 131,072 whose graphs take a quarter of the memory that is left for
    them at most, measured before the first step and kept for the stage while its GPUs and these
    settings stay.

    It is what memory must hold; where texts are cut below it is decided by `pass_cost_tokens`."""
    pass_cost_tokens: PositiveInt | None = None
    """Fixed cost of a forward pass, expressed in tokens: texts sorted by length are cut where
    padded tokens and passes together cost the least. None: by the hardware and the model's size, 48
    on a CPU, on a GPU from 500 for an LLM of 7B parameters to 16,384 for a small encoder.

    More where workers add up gradients over a slow network, as GradCache does after each pass."""
    unpadded: Unpadded = "auto"
    """Whether the texts of a forward pass are packed one after the other, without padding. `auto`:
    on GPUs with a kernel for the attention of the model's parts (bfloat16 on compute capability 8.0
    or later, no attention dropout). `always` on a CPU goes by a slow reference, for tests."""
    grad_cache: bool | Literal["auto"] = "auto"
    """Whether to use GradCache: a second forward pass of all texts for the memory of one
    micro-batch. False keeps the graphs of all; `auto` does so in steps whose graphs fit the memory
    that is there, measured in the first one."""
    compile_layers: bool | Literal["auto"] = "auto"
    """Whether to fuse the element-wise work of each layer by `torch.compile`, which compiles once
    for a minute or two. `auto`: on GPUs of compute capability 8.0 or later, in stages that take
    some 20 minutes or more. Not with `zero_stage` 3, whose weights come and go within the layers.
    """
    gradient_checkpointing: bool | Literal["auto"] = "auto"
    """Whether to recompute activations layer by layer in the backward pass. `auto`: in as many
    layers as do not fit the memory that is there, measured in the first step; of the first that do
    not fit all but matrix products and attention."""
    collective_timeout_seconds: PositiveFloat = 1800.0
    """Maximum seconds that a worker waits for the others in one collective; then it ends, and all
    go on from the last checkpoint. After 0.8 of it without a step each worker logs where it stands.
    """
    deterministic: bool = False
    """Whether GPUs compute bit-identical results in every run, with the same workers on the same
    kind of GPU: torch takes slower operations with one order of additions, and refuses those that
    have no such form. Nothing goes by the memory that happens to be free: there
    `micro_batch_tokens` is 8,192 unless named, and `auto` means true for `grad_cache` and
    `gradient_checkpointing`; false is faster where memory allows it. On CPUs runs repeat without
    it."""
    max_failures: int = Field(default=3, ge=0)
    """Maximum number of restarts after a worker died, each from the last checkpoint. After a GPU
    ran out of memory in a step the next start keeps less of the step's forward passes; where the
    settings forbid that, the run ends at once. Outside steps, as when a worker that died still
    holds the GPU, it is tried again as it was."""
    end_after_dropped_steps: PositiveInt = 5
    """Consecutive steps with a non-finite loss or gradient that end the run. Such a step changes no
    weights, and no checkpoint is made until a step succeeds."""
    checkpoint_minutes: PositiveFloat | None = 5.0
    """Minutes after which a checkpoint is made even if `checkpoint_every_steps` is not reached, so
    that a stop costs no more; None: only by steps."""
    keep_checkpoints: PositiveInt = 2
    """Number of latest checkpoints kept in each stage; if one is damaged, the previous one is used.
    """
    keep_states: bool = False
    """Whether to keep the checkpoints of all stages (weights and optimiser states) after the run,
    for instance to merge them. False: they are removed then; models, weights and scores stay, and
    the same command finds the run done."""
    validation_cpus: PositiveFloat | None = None
    """CPUs of a task that scores weights during training; None: `cpus_per_worker`."""
    validation_gpus: float | None = Field(default=None, ge=0.0)
    """GPUs of such a task, which may be fractional; None: 1 with `use_gpu`, else 0."""
    validations_at_once: PositiveInt = 1
    """Concurrent validation tasks. They run beside the workers if the cluster has resources for
    both, otherwise after the stage's workers."""
    validation_minutes: PositiveFloat | None = None
    """Timeout of such a task in minutes; its checkpoint then has no score. None for no timeout."""
    price_per_hour: PositiveFloat | None = None
    """Price of an hour of one worker, in any currency: with it the scores have the price of a
    million documents; None: none."""
    tracking_uri: Reference | None = None
    """MLflow's address, `http(s)://…` or `sqlite:///…`; None: a SQLite file in `storage_path`."""
    experiment: str = "rayembed"
    """MLflow experiment."""
    mirrors: tuple[Annotated[str, AfterValidator(known_mirror)], ...] = ()
    """Trackers that receive the curves of a training run in addition to MLflow: `tensorboard`
    (files in the run's folder), `wandb` (Weights & Biases; `experiment` is its project;
    `WANDB_MODE`, `WANDB_API_KEY` and others are its own). Extras of the same names install them."""
    registered_model: Annotated[str, AfterValidator(check_model_name)] | None = None
    """Name in MLflow's registry; None: the run's name."""

    @model_validator(mode="after")
    def _compiled_layers_are_whole(self) -> "Placement":
        if self.compile_layers is True and self.zero_stage == 3:
            raise ValueError(
                "placement.compile_layers needs whole weights in the layers, but "
                "placement.zero_stage=3 partitions them; set zero_stage to 2 or below, or "
                "compile_layers=auto"
            )
        return self

    @model_validator(mode="after")
    def _a_named_gpu_is_used(self) -> "Placement":
        if self.gpu is not None and self.use_gpu is False:
            raise ValueError(
                f"placement.gpu is {self.gpu}, but placement.use_gpu=false trains on CPUs; set "
                "use_gpu=true, or leave gpu out"
            )
        return self

    @model_validator(mode="after")
    def _fewest_are_not_more(self) -> "Placement":
        if self.fewest_workers > self.workers:
            raise ValueError(
                f"placement.min_workers {self.min_workers} exceeds placement.workers "
                f"{self.workers}, the maximum; lower min_workers or raise workers"
            )
        return self

    def asks_ray(self) -> dict[str, bool]:
        """Map each setting of the class to whether its value needs Ray."""
        return {
            "workers": self.workers > 1,
            "wait_for_nodes_seconds": bool(self.wait_for_nodes_seconds),
            "validations_at_once": self.validations_at_once > 1,
            "validation_minutes": self.validation_minutes is not None,
        }

    @property
    def on_gpu(self) -> bool:
        """Whether each worker has a GPU; `auto` without `gpu` counts as no until the job starts."""
        return self.use_gpu is True or (self.use_gpu == "auto" and self.gpu is not None)

    @property
    def threads(self) -> int:
        """Torch threads of each worker; `auto` counts as the maximum until the run starts."""
        if self.threads_per_worker == "auto":
            return AUTO_THREADS
        return self.threads_per_worker or max(1, int(self.cpus_per_worker))

    @property
    def fewest_workers(self) -> int:
        """Minimum number of workers of the run."""
        return self.workers if self.min_workers is None else self.min_workers

    @property
    def is_elastic(self) -> bool:
        """Whether the number of workers may change during the run."""
        return self.fewest_workers < self.workers


def check_expert_parallel(model: ArchitectureConfig, placement: Placement) -> None:
    """Check that groups of workers can share the model's experts.

    Raises:
        ValueError: the model has no experts, they or the workers cannot be shared out equally, or
            DeepSpeed would train them wrongly.
    """
    size, workers = placement.expert_parallel, placement.workers
    if size == 1:
        return
    asked = f"placement.expert_parallel {size}"
    if not model.num_experts:
        raise ValueError(
            f"{asked} spreads the experts of a mixture over workers, but the model ({model.kind}) "
            "has no experts; set it to 1"
        )
    if model.num_experts % size:
        raise ValueError(
            f"{asked} cannot divide model.experts.num_experts {model.num_experts} evenly; set it "
            "to a divisor of that number"
        )
    if workers % size:
        raise ValueError(
            f"{asked} must divide placement.workers {workers}, because workers form groups of "
            f"{size}, and each group holds all experts"
        )
    if placement.is_elastic:
        raise ValueError(
            f"{asked} does not go together with placement.min_workers, since its groups need a "
            "fixed number of workers; leave one of the two out"
        )
    if placement.zero_stage == 3:
        raise ValueError(
            f"{asked} does not go together with placement.zero_stage 3, in which DeepSpeed only "
            "partitions the experts of its own layers; set zero_stage to 2, or expert_parallel to 1"
        )
    if placement.zero_stage == 0 and model.backbone.dtype == "bfloat16":
        raise ValueError(
            f"{asked} does not go together with placement.zero_stage 0 in bfloat16, in which "
            "DeepSpeed leaves experts out of the gradient's norm; set zero_stage to 1 or 2"
        )


def worker_numbers(rows: int, fewest: int, most: int) -> tuple[int, ...]:
    """Numbers of workers, within the limits, that divide the rows of a batch evenly.

    Args:
        rows: of a global batch, over all workers.
    """
    return tuple(number for number in range(fewest, most + 1) if rows % number == 0)


def check_shares(setting: str, rows: int, fewest: int, most: int) -> None:
    """Check that both the minimum and the maximum number of workers divide the rows of a batch
    evenly.

    Numbers between them that do not are passed over while a run goes on.

    Args:
        setting: that has the rows, as an error calls it.

    Raises:
        ValueError: they do not; it names the numbers that do.
    """
    if not (rows % fewest or rows % most):
        return
    if fewest == most:
        raise ValueError(
            f"{setting} {rows} cannot be shared equally by placement.workers {most}; use a "
            "multiple of that number"
        )
    name, number = ("workers", most) if rows % most else ("min_workers", fewest)
    can = ", ".join(map(str, worker_numbers(rows, 1, most)))
    raise ValueError(
        f"{setting} {rows} cannot be shared equally by placement.{name} {number}; possible "
        f"numbers of workers up to {most} are {can}: set placement.min_workers and "
        "placement.workers to two of these numbers"
    )
